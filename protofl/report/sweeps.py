"""What accuracy does over a protocol field, two of them, or an option of a method: found in the records, not told."""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from . import figures, tables
from .blocks import Block, Cell, Heading, Table
from .content import Report
from .groups import HASHES, Entry, Setting
from .markdown import escape
from .read import DIVERGED, UNFINISHED, number
from .sections import BOLD, missing
from .select import KINDS, mean
from .tables import frame

COLUMNS = ["method", "label", "variant", "metric", "group", "value", "place", "n", "mean", "low", "high", "fate"]


@dataclass(frozen=True, eq=False)
class Point:
    """A method at a value of what is varied, within a group: a value of the second field, or ''."""

    setting: Setting
    entry: Entry
    label: str
    value: str
    group: str = ""


@dataclass(frozen=True, eq=False)
class Sweep:
    """What is varied; the second field, or ''; what else tells its settings from the others, or ''."""

    over: str
    by: str
    where: str
    points: Sequence[Point]

    def name(self, metric: str) -> str:
        """The name of its files, GM being the metric that goes without saying."""
        words = ["sweep", self.over, self.by, self.where, "" if metric == "gm" else metric]
        return re.sub(r"[\W_]+", "-", "-".join(filter(None, words)))

    def title(self, word: str) -> str:
        """What is shown."""
        fields = f"{self.over} and {self.by}" if self.by else self.over
        return f"{word} over {fields}" + (f" ({self.where})" if self.where else "")


def found(settings: Sequence[Setting]) -> Iterator[Sweep]:
    """The sweeps among the settings: over two protocol fields, over one, and over a numeric option of a method.

    Settings of a sweep agree in all other fields. A sweep that would only show settings again is left out.
    """
    names = _varied(settings)
    shown: set[int] = set()
    for fields in [*itertools.combinations(names, 2), *((name,) for name in names)]:
        groups: dict[tuple[str, ...], list[Setting]] = {}
        for s in settings:
            groups.setdefault(tuple(s.differs[n] for n in names if n not in fields), []).append(s)
        for group in groups.values():
            over, by = _roles(group, fields)
            points = _points(group, over, by)
            numbers = {p.setting.number for p in points}
            if not numbers <= shown and _crossed(points, by):
                shown |= numbers
                where = ", ".join(f"{n}={group[0].differs[n]}" for n in names if n not in fields)
                yield Sweep(over, by, where, points)
    for s in settings:
        yield from _options(s, f"setting {s.number}" if len(settings) > 1 else "")


def _varied(settings: Sequence[Setting]) -> list[str]:
    """The fields that tell the settings apart, but those that some settings lack and all others share.

    Without a Dirichlet split, for one, there is no beta: that goes with the partition.
    """
    names = settings[0].differs if settings else {}
    known = {n: {s.differs[n] for s in settings} - {tables.MISSING} for n in names}
    varied = [n for n in names if len(known[n]) > 1]
    return [] if set(varied) & set(HASHES) else varied


def _roles(settings: Sequence[Setting], names: Sequence[str]) -> tuple[str, str]:
    """What goes along the axis, and what makes panels (''): the field with fewer values."""
    counts = {n: len({s.differs[n] for s in settings}) for n in names}
    over = max(names, key=lambda n: counts[n])
    return over, next((n for n in names if n != over), "")


def _points(group: Sequence[Setting], over: str, by: str) -> list[Point]:
    """The methods that the settings have at two values or more."""
    points = [Point(s, e, e.label, s.differs[over], s.differs.get(by, "")) for s in group for e in s.entries]
    at: dict[str, set[str]] = {}
    for p in points:
        at.setdefault(p.label, set()).add(p.value)
    return [p for p in points if len(at[p.label]) > 1]


def _crossed(points: Sequence[Point], by: str) -> bool:
    """Whether there is something to draw: two values or more, for two values or more of the second field."""
    panels: dict[str, set[str]] = {}
    for p in points:
        panels.setdefault(p.group, set()).add(p.value)
    return sum(len(each) > 1 for each in panels.values()) >= (2 if by else 1)


def _options(s: Setting, where: str) -> Iterator[Sweep]:
    """Methods of which a setting has rows that differ in one numeric option alone."""
    for method in dict.fromkeys(e.method for e in s.entries):
        entries = [e for e in s.entries if e.method == method]
        options = [e.runs[0].options for e in entries]
        names = [n for n in options[0] if len({str(o.get(n)) for o in options}) > 1]
        values = [number(o.get(names[0])) for o in options] if len(names) == 1 else []
        if values and None not in values and len(set(values)) == len(entries):
            points = [Point(s, e, e.runs[0].name, f"{v:g}") for e, v in zip(entries, values)]
            yield Sweep(f"{method}.{names[0]}", "", where, points)


def values(sweep: Sweep, metric: str) -> pd.DataFrame:
    """Method x group x value -> the headline's mean, lowest and highest of the seeds; `place`: where it stands on the axis.

    As shares of 1; no row where nothing was measured.
    """
    places = _places(sweep)
    return frame(
        (
            {
                "method": p.entry.method,
                "label": p.label,
                "variant": p.entry.variant if p.label == p.entry.label else 0,
                "metric": metric,
                "group": p.group,
                "value": p.value,
                "place": places[p.value],
                "n": len(known),
                "mean": statistics.fmean(known),
                "low": min(known),
                "high": max(known),
                "fate": p.entry.used[0].status,
            }
            for p in sorted(sweep.points, key=lambda p: places[p.value])
            if (known := _headlines(p, metric))
        ),
        COLUMNS,
    )


def _headlines(p: Point, metric: str) -> list[float]:
    """The headline of each seed that has it."""
    rule = p.setting.headline
    return [v for run in p.entry.used if (v := mean(p.entry.reported(run, rule), metric)) is not None]


def _places(sweep: Sweep) -> dict[str, float]:
    """Where values stand on the axis, ascending: numbers at themselves; words, or some words, in their order."""
    shown = list(dict.fromkeys(p.value for p in sweep.points))
    try:
        return dict(sorted(((v, float(v)) for v in shown), key=lambda pair: pair[1]))
    except ValueError:
        return {v: float(i) for i, v in enumerate(shown)}


def sweeps(made: Report) -> list[Block]:
    """A table and a figure for every sweep and kind of accuracy."""
    blocks: list[Block] = []
    for sweep in found(made.settings):
        for metric, word in KINDS.items():
            data = values(sweep, metric)
            if data["value"].nunique() > 1:
                blocks += [_table(made, sweep, data, metric, word), _figure(made, sweep, data, metric, word)]
    return [Heading("Sweeps"), *blocks] if blocks else []


def _table(made: Report, sweep: Sweep, data: pd.DataFrame, metric: str, word: str) -> Table:
    """Methods down (in their groups), values across."""
    shown = {p.setting.number: tables.Cells(made.data["accuracy.csv"], p.setting.number) for p in sweep.points}
    columns: dict[tuple[str, str], list[Point]] = {}
    for p in sweep.points:
        columns.setdefault((p.group, p.value), []).append(p)
    cells: dict[tuple[str, str, str], Cell] = {}
    for points in columns.values():
        labels = [p.entry.label for p in points]
        first = points[0]
        top = shown[first.setting.number].highest(labels, metric, first.setting.headline.name)
        for p in points:
            cells[p.group, p.label, p.value] = _cell(shown[p.setting.number], p, metric, p.entry.label in top)
    heads = list(_places(sweep))
    grouped = [""] if sweep.by else []
    rows = [
        [*(Cell(group) for _ in grouped), Cell(label), *(cells.get((group, label, v), Cell(tables.MISSING)) for v in heads)]
        for group, label in dict.fromkeys((p.group, p.label) for p in sweep.points)
    ]  # fmt: skip
    notes = [
        f"{word} of the headline ({escape(sweep.points[0].setting.headline.label)}), in %, by {escape(sweep.over)}.",
        f"{tables.over(data['n'], sweep.points[0].setting.ddof)}.",
        BOLD if any(cell.bold for cell in cells.values()) else "",
        _unlike(sweep.points),
        _unfinished(data),
        missing(rows),
    ]
    titles = [*([sweep.by] if sweep.by else []), "method", *heads]
    return made.table(
        Table(sweep.name(metric), sweep.title(word), titles, rows, " ".join(filter(None, notes)), left=1 + len(grouped))
    )


def _cell(shown: tables.Cells, p: Point, metric: str, bold: bool) -> Cell:
    """The headline of a point, or what became of its runs."""
    gone = not p.entry.used and any(run.status == DIVERGED for run in p.entry.runs)
    return Cell(DIVERGED) if gone else shown.cell(p.entry.label, metric, p.setting.headline.name, bold=bold)


def _unlike(points: Sequence[Point]) -> str:
    """Which methods differ in more than what is varied: between settings a preset may give other options."""
    seen: dict[str, Mapping[str, Any]] = {}
    unlike = dict.fromkeys(
        p.label
        for p in points
        if p.label == p.entry.label and seen.setdefault(p.label, p.entry.runs[0].options) != p.entry.runs[0].options
    )
    return f"Options differ between the values: {', '.join(map(escape, unlike))}." if unlike else ""


def _unfinished(data: pd.DataFrame) -> str:
    """Which points are not those of finished runs."""
    open_ = data[data["fate"] == UNFINISHED]
    named = ", ".join(escape(f"{label} at {value}") for label, value in zip(open_["label"], open_["value"]))
    return f"Not finished, numbers of the last round that all its seeds have: {named}." if named else ""


def _figure(made: Report, sweep: Sweep, data: pd.DataFrame, metric: str, word: str) -> Block:
    """A line per method; a panel per value of the second field."""
    runs = [run for p in sweep.points for run in p.entry.used]
    caption = "Line: mean over seeds; band: lowest to highest seed." if data["n"].max() > 1 else "One seed."
    caption += " A diamond: not finished." if (data["fate"] == UNFINISHED).any() else ""
    panels = f", a panel for each {sweep.by}" if sweep.by else ""
    alt = f"{sweep.title(word)}{panels}, of {', '.join(dict.fromkeys(data['label']))}"
    return made.figure(
        sweep.name(metric),
        runs,
        data,
        alt,
        caption,
        lambda tidy: figures.draw_sweep(tidy, sweep.over, sweep.by),
    )
