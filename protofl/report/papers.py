"""Ours beside the papers' own numbers (`papers.csv`, with their sources), and which settings differ."""

from __future__ import annotations

import csv
import functools
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

from .. import options
from . import tables
from .blocks import Block, Cell, Table
from .content import Report
from .groups import Entry, Setting
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
NETS = {"simple-cnn": "simple_cnn", "ResNet-50": "resnet50_bn", "ResNet-18": "resnet18_bn"}
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


def metric(row: Printed) -> tuple[str, str]:
    """What a row is comparable with: the party models' mean on the whole test set where it is over parties, else GM."""
    return ("pm_uniform", "PM uniform") if "parties" in row["metric"] else ("gm", "GM")


def differing(entry: Entry, row: Printed) -> tuple[list[str], list[str]]:
    """The settings that differ, as `rounds 100 / 5` (paper / ours), and those that the paper does not state."""
    run = entry.runs[0]
    ours: dict[str, Any] = {**run.protocol, **run.adapted}
    wanted: dict[str, tuple[str, Any]] = {name: (row[name], ours.get(name)) for name in FIELDS}
    wanted |= {name: (value, run.options.get(name)) for name, value in named(row)[1].items()}
    net = re.match(r"[\w-]*", row["model"])
    wanted["net"] = (NETS.get(net[0], "") if net else "", ours.get("model"))
    unlike = [f"{name} {a} / {_text(b)}" for name, (a, b) in wanted.items() if a and not _equal(a, b)]
    return unlike, [name for name, (a, _) in wanted.items() if not a]


def _equal(a: str, b: Any) -> bool:
    known = number(b)
    return a == str(b) if known is None else float(a) == known


def _text(value: Any) -> str:
    return tables.MISSING if value is None else options.text(value)


def against_papers(made: Report, s: Setting) -> list[Block]:
    """For every method and paper the printed row whose settings are nearest to ours."""
    dataset = s.first.protocol.get("dataset")
    shown = tables.Cells(made.data["accuracy.csv"], s.number)
    rows = []
    for e in s.entries:
        mine = [r for r in printed() if DATASETS.get(r["dataset"]) == dataset and named(r)[0] == e.method]
        for paper in dict.fromkeys(r["paper"] for r in mine):
            nearest = min((r for r in mine if r["paper"] == paper), key=lambda r: tuple(map(len, differing(e, r))))
            name, word = metric(nearest)
            ours = shown.row(e.label, name, s.headline.name)["mean"]
            if ours is not None:
                rows.append(_row(e, word, shown.cell(e.label, name, s.headline.name), ours, nearest))
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
    notes = (
        "Accuracy in %, ours: headline, mean ± sd over seeds. Printed: the row of that paper whose settings are nearest to "
        "ours; its ± is over three trials or over parties, as its metric in `papers.csv` says. Settings that differ are "
        "written paper / ours: **where any differ, the two numbers do not measure the same thing**."
    )
    name = made.name("papers", s)
    return [made.table(Table(name, "Ours beside the papers", heads, rows, notes, left=2))]


def _row(entry: Entry, word: str, ours: Cell, mean: float, row: Printed) -> list[Cell]:
    theirs = float(row["mean"])
    unlike, silent = differing(entry, row)
    return [
        Cell(entry.label),
        Cell(word),
        ours,
        Cell(f"{theirs:.1f}" + (f" ± {row['std']}" if row["std"] else ""), theirs),
        Cell(f"{100 * mean - theirs:+.1f}", 100 * mean - theirs),
        Cell(row["paper"].partition(" (")[0]),
        Cell(row["table"]),
        Cell("; ".join(unlike) or "none"),
        Cell(", ".join(silent) or "nothing"),
    ]
