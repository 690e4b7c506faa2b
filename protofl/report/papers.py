"""Ours beside the papers' own numbers (`papers.csv`, with their sources), and which settings differ."""

from __future__ import annotations

import csv
import functools
import math
import re
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any, NamedTuple

from .. import options
from . import tables
from .blocks import Block, Cell, Table
from .comparison import rule
from .content import Report
from .groups import Entry, Setting
from .markdown import escape
from .read import number

DATASETS = {"CIFAR-10": "cifar10", "CIFAR-100": "cifar100", "Tiny-ImageNet": "tiny-imagenet"}
METHODS = {
    "FedAvg": "fedavg",
    "FedProx": "fedprox",
    "MOON": "moon",
    "FedProc": "fedproc",
    "FedCSPC": "fedcspc",
    "SCAFFOLD": "scaffold",
    "SOLO": "solo",
    "CCVR": "ccvr",
}
MODELS = {"simple-cnn": "simple_cnn", "ResNet-50": "resnet50_bn", "ResNet-18": "resnet18_bn"}
FIELDS = ("beta", "clients", "participation", "rounds", "local_epochs")

Printed = Mapping[str, str]


@functools.cache
def printed() -> tuple[Printed, ...]:
    """The rows of papers.csv."""
    text = resources.files(__package__).joinpath("papers.csv").read_text("utf-8")
    return tuple(csv.DictReader(text.splitlines()))


def named(row: Printed) -> tuple[str, dict[str, str]]:
    """The id of a row's method and the options that its name gives: `MOON (mu=5)` -> moon, {mu: 5}; '' if it is none."""
    name, _, told = row["method"].partition(" (")
    return METHODS.get(name, ""), dict(re.findall(r"(\w+)=([\d.]+)", told))


@functools.cache
def parameters(method: str) -> tuple[str, ...]:
    """The options of a method that any row gives."""
    told = [named(row) for row in printed()]
    return tuple(dict.fromkeys(name for of, values in told if of == method for name in values))


def metric(row: Printed) -> tuple[str, str]:
    """What a row is comparable with: the party models' mean on the whole test set where it is over parties, else GM."""
    return ("pm_uniform", "PM uniform") if "parties" in row["metric"] else ("gm", "GM")


class Unlike(NamedTuple):
    """How a row's settings differ from ours: the fields that do, those that it does not state, and how far off it is."""

    fields: list[str]
    """As `rounds 100 / 5`: paper / ours."""
    silent: list[str]
    distance: float
    """Of numbers above 0, the sum of |ln(paper / ours)|."""

    @property
    def order(self) -> tuple[int, int, float]:
        """The key by which the row whose settings differ least comes first."""
        return len(self.fields), len(self.silent), self.distance


def unlike(entry: Entry, row: Printed) -> Unlike:
    """Compare the settings that papers.csv holds with those of a method."""
    run = entry.runs[0]
    ours: dict[str, Any] = {**run.protocol, **run.adapted}
    method, told = named(row)
    network = re.match(r"[\w-]*", row["model"])
    width = re.search(r"proj head \((\d+)\)", row["model"])
    stated = {name: row[name] for name in FIELDS} | {"model": MODELS.get(network[0], "") if network else ""}
    stated |= {"projection_dim": width[1]} if width else {}
    pairs = [(name, value, ours.get(name)) for name, value in stated.items()]
    pairs += [(name, told.get(name, ""), run.options.get(name)) for name in parameters(method)]
    differing = [(name, a, b) for name, a, b in pairs if a and not _equal(a, b)]
    return Unlike(
        [f"{name} {a} / {_text(b)}" for name, a, b in differing],
        [name for name, a, _ in pairs if not a],
        sum(_apart(a, b) for _, a, b in differing),
    )


def _equal(a: str, b: Any) -> bool:
    known = number(b)
    return a == str(b) if known is None else float(a) == known


def _apart(a: str, b: Any) -> float:
    known = number(b)
    return abs(math.log(float(a) / known)) if known is not None and known > 0 and float(a) > 0 else 0.0


def _text(value: Any) -> str:
    return tables.MISSING if value is None else options.text(value)


def nearest(entry: Entry, dataset: Any) -> list[tuple[Printed, Unlike]]:
    """Of every table that has the method on this data set, by metric, the rows whose settings differ least from ours."""
    groups: dict[tuple[str, ...], list[tuple[Printed, Unlike]]] = {}
    for row in printed():
        if DATASETS.get(row["dataset"]) == dataset and named(row)[0] == entry.method:
            groups.setdefault((row["paper"], row["table"], *metric(row)), []).append((row, unlike(entry, row)))
    return [
        (row, found)
        for many in groups.values()
        for least in [min(found.order for _, found in many)]
        for row, found in many
        if found.order == least
    ]


def against_papers(made: Report, s: Setting) -> list[Block]:
    """For every finished method and table of a paper the printed row whose settings are nearest to ours."""
    cells = tables.Cells(made.data["accuracy.csv"], s.number)
    rows, told, theirs = [], [], []
    for e in (e for e in s.entries if e.finished):
        for row, found in nearest(e, s.first.protocol.get("dataset")):
            name, word = metric(row)
            ours = cells.row(e.label, name, rule(s, name).name)
            if ours["mean"] is not None:
                rows.append(_row(e, word, cells.cell(e.label, name, rule(s, name).name), ours["mean"], row, found))
                told.append(ours)
                theirs.append(row)
    if not rows:
        return []
    heads = [
        "method",
        "measured by",
        "ours",
        "printed",
        "difference",
        "paper",
        "table",
        "settings that differ",
        "not stated",
    ]
    notes = [
        "Accuracy in %, difference in points: ours minus printed. Settings that differ are written paper / ours: **where any "
        "differ or are not stated, the two numbers do not measure the same thing**. Of every table the row whose settings "
        "differ least is shown. Learning rate, batch size, augmentation, kind of split and the reported round are not "
        "compared: `papers.csv` does not hold them.",
        f"Ours: {' / '.join(dict.fromkeys(rule(s, metric(row)[0]).label for row in theirs))}. "
        f"{tables.plus_minus(told, s.ddof, escape)}.",
        _printed_spread(theirs),
        f"Sources: {'; '.join(f'“{escape(source)}”' for source in dict.fromkeys(row['source'] for row in theirs))}.",
    ]
    name = made.name("papers", s)
    text = " ".join(filter(None, notes))
    return [made.table(Table(name, "Ours beside the papers", heads, rows, text, left=2))]


def _printed_spread(rows: Iterable[Printed]) -> str:
    """What the printed ± are, as papers.csv says."""
    told = {f"{metric(row)[1]}, {row['metric'].partition(' (')[2].rstrip(')')}": None for row in rows if row["std"]}
    return f"± printed: {escape('; '.join(told))}." if told else ""


def _short(paper: str) -> str:
    """A paper without where it appeared."""
    return paper.partition(" (")[0]


def _row(entry: Entry, word: str, ours: Cell, mean: float, row: Printed, found: Unlike) -> list[Cell]:
    theirs = float(row["mean"])
    spread = f" ± {row['std']}" if row["std"] else ""
    return [
        Cell(entry.label),
        Cell(word),
        ours,
        Cell(row["mean"] + spread, theirs),
        Cell(f"{100 * mean - theirs:+.2f}", 100 * mean - theirs),
        Cell(_short(row["paper"])),
        Cell(row["table"]),
        Cell("; ".join(found.fields) or ("none of those stated" if found.silent else "none")),
        Cell(", ".join(found.silent) or "nothing"),
    ]
