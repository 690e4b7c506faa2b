"""What is on offer, in words: methods and their options, data sets, splits."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from . import options, registry, suites
from .cells import Cell
from .errors import UserError
from .protocol import Protocol

if TYPE_CHECKING:
    from .method import Method


def _doc(name: str) -> str:
    return inspect.cleandoc(registry.module(name).__doc__ or "")


def all_methods() -> Table:
    """A line per method."""
    table = Table(title="Methods")
    table.add_column("name", no_wrap=True)
    for column in ("idea", "down", "up", "trained", "forward", "client keeps"):
        table.add_column(column, overflow="fold")
    for name in registry.names():
        idea = _doc(name).split("\n\n")[0].replace("\n", " ").partition(": ")[2]
        bill = registry.load(name)().bill()
        table.add_row(name, *map(Text, (idea, bill.down, bill.up, bill.trained, bill.forward, bill.state)))
    added = "; ".join(f"{p}: {_doc('fedavg+' + p).split(': ', 1)[1].splitlines()[0]}" for p in registry.plugins())
    table.caption = (
        "What a client receives and sends (floats), trains on and passes forward (samples) in a round, and keeps, by default. "
        "P: all parameters, B: all but the output layer, H: that layer; K: classes, K_t: with a prototype, K_i: of the client; "
        "d, q, z: widths of encoder, embedding, projection; n, E: samples, local epochs. "
        f"Plug-ins (METHOD+PLUGIN): {added} protofl methods NAME shows one with all its options"
    )
    return table


def one(name: str) -> Group:
    """A method: its docstring, its options, and the protocol fields that its paper leaves open."""
    cls = registry.load(name)
    parts: list[Any] = [Text(_doc(name)), Text(), _bill(cls())]
    parts.append(_options(f"Options of {registry.label(name)} (--set {registry.label(name)}.OPTION=VALUE)",
                          options.fields(cls)))  # fmt: skip
    fields = options.fields(Protocol)
    left_open = {n: fields[n] for n in cls.open_fields}
    if left_open:
        parts += [
            Text(),
            _options("Protocol fields left open too, for every method of a table (--set FIELD=VALUE)", left_open),
        ]
    for preset, values in cls.presets.items():
        needs = cls.needs.get(preset, {})
        said = ", ".join(f"{k}={options.text(v)}" for k, v in values.items()) or "the defaults"
        parts.append(Text(f"preset={preset}: {said}"))
        if needs:
            parts.append(Text("  it needs: " + ", ".join(f"{k}={options.text(v)}" for k, v in needs.items())))
    return Group(*parts)


def all_suites() -> Table:
    """A line per suite."""
    table = Table(title="Suites", caption="protofl suite run NAME --scale laptop | paper | smoke; --dry-run prices it")
    table.add_column("name", no_wrap=True)
    table.add_column("what it is", overflow="fold")
    for name in suites.shipped():
        table.add_row(name, Text(suites.read(name).title))
    return table


def _bill(method: Method) -> Table:
    """What a round costs a client."""
    table = Table(title="Cost of a client and a round, by default (symbols: protofl methods)")
    for column in ("receives", "sends", "samples trained", "samples forward", "keeps", "server"):
        table.add_column(column, overflow="fold")
    table.add_row(*map(Text, method.bill()))
    return table


def _options(title: str, fields: Mapping[str, Any]) -> Table:
    table = Table(title=title)
    table.add_column("option", no_wrap=True)
    for column in ("default", "readings", "reason", "source"):
        table.add_column(column, overflow="fold")
    for name, field in fields.items():
        o = options.option(field)
        readings = (
            o.limits() if o.closed else "; ".join(filter(None, [", ".join(map(options.text, o.readings)), o.limits()]))
        )
        table.add_row(*map(Text, (name, options.text(field.default), readings, o.why, o.source)))
    return table


def all_datasets(data_dir: Path | None) -> Table:
    """A line per data set: what it is, whether and where it was found."""
    from . import data

    table = Table(title="Data sets")
    for column in ("name", "what", "found", "where"):
        table.add_column(column, overflow="fold")
    for name, source in data.known().items():
        place = data.locate(name, data_dir)
        found = place.path or "inside scikit-learn"
        where = str(found) if place.found else "looked in " + ", ".join(map(str, place.looked))
        table.add_row(name, source.what, "yes" if place.found else "no", Text(where))
    table.caption = "also: a folder with train/ and test/, or a .npz with x_train, y_train, x_test, y_test"
    return table


def split(cell: Cell, console: Console, figure: str | None, save: str | None) -> None:
    """Show the split of a cell; draw or save it."""
    from . import inputs
    from .data.partition import save as save_split

    for path in filter(None, (figure, save)):
        if not Path(path).resolve().parent.is_dir():
            raise UserError(f"{path!r}: its folder does not exist")
    data = inputs.load_data(cell.protocol.dataset, cell.data_dir, cell.protocol.data_order)
    made = inputs.split(cell.protocol, cell.data_dir)
    table = Table(title=f"{data.name}, {cell.protocol.partition}: samples by client and class")
    for column in ("client", *data.classes, "all"):
        table.add_column(Text(column), justify="right")
    for i, row in enumerate(made.counts.tolist()):
        table.add_row(str(i), *(str(n) if n else "." for n in row), str(sum(row)))
    console.print(table)
    s = made.skew
    console.print(
        f"sizes {made.min_size} to {made.max_size}; classes per client {s.classes_per_client:.3g}; label entropy "
        f"{s.label_entropy:.3g} nats, {s.label_entropy_normalised:.3g} of ln K; size sd / mean {s.size_cv:.3g}; "
        f"total variation {s.total_variation:.3g}, JS distance {s.js_distance:.3g} (larger: more skewed)\n"
        f"counts {made.count_hash()}, indices {made.index_hash()}, attempts {made.attempts}"
        + (f"\n{made.note}" if made.note else ""), highlight=False, markup=False,
    )  # fmt: skip
    if figure:
        draw_counts(made.counts.tolist(), data.classes, Path(figure))
        console.print(f"heat map: {figure}", highlight=False, soft_wrap=True)
    if save:
        try:
            where = save_split(made, save)
        except OSError as e:
            raise UserError(f"split {save!r} cannot be written: {e.strerror}") from None
        console.print(f"split: {where}", highlight=False, soft_wrap=True)


def draw_counts(counts: list[list[int]], classes: Sequence[str], path: Path) -> None:
    """Samples by client and class as a heat map."""
    import pandas as pd

    from .report import figures

    rows = [(i, c, n) for i, row in enumerate(counts) for c, n in zip(classes, row)]
    data = pd.DataFrame(rows, columns=["client", "class", "samples"])
    with figures.one_style():
        figures.save(figures.draw_split(data), path)


def replayed(told: Mapping[str, Any]) -> Table:
    """Stored figures beside those measured again."""
    table = Table(title=f"after round {told['round'] + 1}")
    for column in ("figure", "stored", "again", ""):
        table.add_column(column)
    for name, again in told["again"].items():
        stored = told["stored"][name]
        if isinstance(again, float | int | type(None)):
            table.add_row(name, str(stored), str(again), "same" if stored == again else "DIFFERS")
        elif stored != again:
            table.add_row(name, "", "", "DIFFERS")
    return table
