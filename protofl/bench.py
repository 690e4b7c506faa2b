"""A table: its cells are checked, run side by side, stored, and reported."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from . import records, run
from .cells import Cell
from .engine import workers
from .engine.place import Place
from .errors import UserError, failure
from .progress import Display, duration
from .protocol import digest
from .run import Prepared

RATE = 4e10
"""Multiply-adds per second and process, for the estimate of --dry-run."""

STEP_SECONDS = {"loop": 6e-3, "batched": 5e-4, "graphs": 5e-4}
"""What a client's step costs beside its multiply-adds, by engine; that of graphs, which needs a GPU, is a guess."""


@dataclass(frozen=True)
class Planned:
    """A cell, what is already there of it, and what is left."""

    ready: Prepared
    folder: Path
    done: int  # rounds that are stored
    finished: bool

    @property
    def label(self) -> str:
        return self.ready.cell.label

    @property
    def left(self) -> int:
        """Rounds still to play."""
        return 0 if self.finished else self.ready.protocol.rounds - self.done

    def seconds(self) -> float:
        """A rough estimate of the time that is left for it, on one core of this kind of machine."""
        p, ready = self.ready.protocol, self.ready
        drawn = max(1, int(p.participation * p.clients + 1e-9))
        samples, macs = float(ready.split.sizes.mean()) * drawn * p.local_epochs, ready.net.macs
        steps = samples / p.batch_size * STEP_SECONDS[ready.document["network"]["engine"]]
        train = samples * 3 * macs / RATE + steps
        tested = 1 + (drawn if len(p.metrics) > 1 else 0)
        return self.left * (ready.method.cost * train + tested * len(ready.data.y_test) * macs / RATE / p.eval_every)


def plan(cells: Sequence[Cell], results: Path, here: bool = True) -> list[Planned]:
    """Check every cell and look what the store has of it. Cells that are the same run are planned once.

    here: whether they are to run on this machine.
    """
    planned: dict[str, Planned] = {}
    for cell in cells:
        ready = run.prepare(cell, here)
        folder = results / ready.folder
        store = records.RunFolder(folder)
        done = len([r for r in store.rows() if r["round"] >= 0]) if folder.is_dir() else 0
        planned.setdefault(ready.digest, Planned(ready, folder, min(done, ready.protocol.rounds), store.done))
    return list(planned.values())


def setting(planned: Sequence[Planned]) -> str:
    """What a table is about to run under, a line per setting: nobody should have to guess what a data set chose."""
    return "\n".join(dict.fromkeys(map(_setting, planned))) + _varied(planned)


def _setting(planned: Planned) -> str:
    p, ready = planned.ready.cell.protocol, planned.ready
    varied = {name for name, _ in ready.cell.swept}

    def told(name: str, text: str) -> str:
        return "" if name in varied else f", {text}"

    return (
        f"{ready.data.name}: preset {ready.cell.method.preset}{told('model', ready.net.name)}"
        f"{told('clients', f'{p.clients} clients')}{told('participation', f'participation {p.participation:g}')}"
        f"{told('partition', p.partition)}{told('rounds', f'{p.rounds} rounds')}"
        f"{told('local_epochs', f'{p.local_epochs} local epochs')}{told('batch_size', f'batch {p.batch_size}')}"
        f"{told('client_lr', f'lr {p.client_lr:g}')}; measured: {', '.join(p.metrics)}"
    )


def _varied(planned: Sequence[Planned]) -> str:
    """What differs between the cells of a grid."""
    values: dict[str, dict[str, None]] = {}
    for p in planned:
        for name, value in p.ready.cell.swept:
            values.setdefault(name, {})[value] = None
    return "".join(f"; {name}: {', '.join(each)}" for name, each in values.items())


def priced(planned: Sequence[Planned], count: int) -> Table:
    """What --dry-run shows."""
    table = Table(title="Nothing runs: cells, their digests, estimated time")
    for column in ("cell", "digest", "rounds", "in store", "about"):
        table.add_column(column)
    for p in planned:
        there = "finished" if p.finished else f"{p.done} rounds" if p.done else "-"
        rounds = str(p.ready.protocol.rounds)
        table.add_row(p.label, p.ready.digest, rounds, there, duration(p.seconds()))
    total = sum(p.seconds() for p in planned)
    longest = max((p.seconds() for p in planned), default=0.0)
    table.caption = f"about {duration(max(total / max(count, 1), longest))} with {count} workers"
    return table


@dataclass(frozen=True)
class Order:
    """What a worker is given."""

    cell: Cell
    results: str
    processes: int


def play(order: Order, tell: Callable[[Mapping[str, Any]], None]) -> dict[str, Any]:
    """A worker's job: one cell, from its check to its records."""
    return run.play(run.prepare(order.cell), Path(order.results), tell, order.processes)


@dataclass
class Outcome:
    """How a table ended: planned cells with their summaries, or with (line, traceback) of what failed."""

    planned: list[Planned]
    summaries: dict[str, dict[str, Any]]
    failures: dict[str, tuple[str, str]]
    notes: Sequence[str] = ()
    ablation: Mapping[str, Any] | None = None
    called: str = ""
    headed: str = ""

    def named(self, name: str, scale: str | None, title: str, notes: Sequence[str]) -> None:
        """Give it the name, title and notes of a suite at a scale."""
        self.called, self.headed, self.notes = "-".join(filter(None, [name, scale])), title, notes

    @property
    def name(self) -> str:
        """The report's folder: the suite, or what was split how; and which runs it is about."""
        groups = dict.fromkeys(p.folder.parent.name for p in self.planned)
        called = self.called or "-".join(groups)[:60]
        return f"{called}-{digest({'runs': sorted(p.ready.digest for p in self.planned)})[:8]}"

    @property
    def title(self) -> str:
        """What the table is about, in words."""
        if self.headed:
            return self.headed
        cells = [p.ready.cell.protocol for p in self.planned]
        betas = ", ".join(dict.fromkeys(f"{p.beta:g}" for p in cells if p.dirichlet))
        names = ", ".join(dict.fromkeys(p.ready.data.name for p in self.planned))
        return f"{names}: {', '.join(dict.fromkeys(p.partition for p in cells))}" + (f", beta {betas}" if betas else "")

    @property
    def code(self) -> int:
        """Exit code: 1 where a run failed or diverged."""
        bad = any(s["status"] != "finished" for s in self.summaries.values())
        return 1 if bad or self.failures else 0


def bench(
    planned: Sequence[Planned], results: Path, count: int, console: Console, place: Place | None = None
) -> Outcome:
    """Run what is not finished, in `count` processes or elsewhere."""
    todo = sorted((p for p in planned if not p.finished), key=lambda p: -p.seconds())
    outcome = Outcome(list(planned), {}, {})
    for p in planned:
        if p.finished:
            outcome.summaries[p.ready.digest] = records.read_json(p.folder / "summary.json") or {"status": "unknown"}
    _tell_reuse(planned, console)
    if not todo:
        return outcome
    with _terminated(), _connected(place, console), Display(console, [(p.label, p.left) for p in todo]) as display:
        began = time.monotonic()

        def ended(number: int, summary: Any, failure: tuple[str, str] | None) -> None:
            p = todo[number]
            if failure:
                outcome.failures[p.ready.digest] = failure
                display.show(number, {"kind": "end", "said": f"failed: {failure[0]}"})
            else:
                outcome.summaries[p.ready.digest] = summary
                display.show(number, {"kind": "end", "said": summary["status"]})

        share = max(1, count // len(todo))  # more processes than runs: they share the clients of a round
        orders = [Order(p.ready.cell, str(results), share) for p in todo]
        if place is not None:
            from .engine import cluster

            cluster.run_all([p.ready for p in todo], results, place, display.show, ended)
        elif min(count, len(todo)) == 1:
            _in_this_process(orders, display.show, ended)
        else:
            workers.run(orders, play, count, display.show, ended)
    console.print(f"{len(todo)} runs in {duration(time.monotonic() - began)}", highlight=False)
    return outcome


@contextmanager
def _connected(place: Place | None, console: Console) -> Iterator[None]:
    """The cluster, if one is asked for, for as long as there is work."""
    if place is None:
        yield
        return
    place.settle()

    from .engine import cluster  # only here: Ray need not be installed

    with cluster.connected(place) as told:
        console.print(told, highlight=False)
        yield


def _in_this_process(
    orders: Sequence[Order], tell: Callable[[int, Mapping[str, Any]], None], ended: Callable[..., None]
) -> None:
    for number, order in enumerate(orders):
        try:
            ended(number, play(order, partial(tell, number)), None)
        except Exception as e:
            ended(number, None, failure(e))


def _tell_reuse(planned: Sequence[Planned], console: Console) -> None:
    finished = sum(p.finished for p in planned)
    begun = sum(p.done > 0 and not p.finished for p in planned)
    if finished:
        console.print(f"{finished} of {len(planned)} runs are in the store already and are reused", highlight=False)
    if begun:
        console.print(f"{begun} of {len(planned)} runs were begun and are resumed", highlight=False)


def writable(what: str, folder: Path) -> None:
    """Refuse a folder that cannot be written, before any work starts."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as e:
        raise UserError(f"{what} folder {str(folder)!r} cannot be written: {e.strerror or e}") from None


@contextmanager
def _terminated() -> Iterator[None]:
    """SIGTERM ends the work as Ctrl-C does, with its own exit code."""

    codes: list[int] = []

    def stop(number: int, frame: Any) -> None:
        codes.append(128 + number)
        raise SystemExit(codes[0])

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except SystemExit as e:
        raise SystemExit(codes[0] if codes else e.code) from None  # raised while Ray waits, it comes with another code
    finally:
        signal.signal(signal.SIGTERM, before)
