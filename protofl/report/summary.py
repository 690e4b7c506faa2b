"""The top of a report: what was run, what came out, what is missing, in a few sentences and one table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from . import describe, tables
from .blocks import Block, Cell, Table, Text
from .content import Report
from .groups import Entry, Setting
from .markdown import escape
from .oddities import oddities
from .read import DIVERGED, FINISHED
from .sections import missing
from .select import KINDS, last


def summary(made: Report) -> list[Block]:
    """Sentences and the headline by method and setting; nothing where no run could be read."""
    if not made.settings:
        return []
    lines = [_extent(made), *_outcomes(made), _lacking(made)]
    return [Text("\n".join(f"* {line}" for line in lines if line)), made.table(_table(made))]


def _extent(made: Report) -> str:
    """How much was run, and which round is reported."""
    entries = [e for s in made.settings for e in s.entries]
    methods, labels = {e.method for e in entries}, {e.label for e in entries}
    sets = f" ({len(labels)} with sets of options)" if len(labels) > len(methods) else ""
    rules = " / ".join(dict.fromkeys(s.headline.label for s in made.settings))
    return (
        f"{_count(len(made.runs), 'run')}: {_count(len(methods), 'method')}{sets}, {_count(len(made.settings), 'setting')}, "
        f"{_count(len({seed for s in made.settings for seed in s.seeds}), 'seed')}. Headline of the global model (GM): {rules}"
        f"{_personal(made)}."
    )


def _personal(made: Report) -> str:
    """Which round PM is of, if there is any."""
    tidy = made.data["accuracy.csv"]
    known = tidy.loc[(tidy["metric"] == "pm_v") & (tidy["rule"] == last.name), "mean"].notna().any()
    return f"; of the clients' own models on their own classes (PM(V)): {last.label}" if known else ""


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _rule(s: Setting, metric: str) -> str:
    """The rule that the table of this metric reports by: the headline for GM, the last round for PM."""
    return s.headline.name if metric == "gm" else last.name


def _outcomes(made: Report) -> list[str]:
    """The outcome of every setting; what is said of several is said once."""
    told: dict[str, list[str]] = {}
    for s in made.settings:
        for line in _outcome(made, s):
            told.setdefault(line, []).append(str(s.number))
    if len(made.settings) == 1:
        return list(told)
    return [f"Setting{'s' * (len(numbers) > 1)} {', '.join(numbers)}. {line}" for line, numbers in told.items()]


def _outcome(made: Report, s: Setting) -> list[str]:
    """Who is ahead by how much, beside the spread over seeds; and what speaks against reading more into it."""
    told = [line for metric in KINDS if (line := _ahead(made, s, metric))]
    told += [_single(s)] if told else []
    if checked := describe.checks(s):
        told.append(f"Checked: {checked}.")
    told += [f"Look twice: {escape(odd)}." for odd in oddities(s)]
    return [line for line in told if line]


def _ahead(made: Report, s: Setting, metric: str) -> str:
    """The highest of the finished methods and its margin to the next; nothing where there are not two."""
    cells, rule, word = tables.Cells(made.data["accuracy.csv"], s.number), _rule(s, metric), KINDS[metric]
    entries = {e.label: e for e in s.entries if e.finished}
    rows = {k: row for k in entries if (row := cells.row(k, metric, rule))["mean"] is not None}
    top = [k for k in rows if k in cells.highest(list(rows), metric, rule)]
    rest = sorted((k for k in rows if k not in top), key=lambda k: -rows[k]["mean"])
    if len(top) > 1:
        return f"Highest {word}: {', '.join(map(escape, top))}, equal at {100 * rows[top[0]]['mean']:.2f} %."
    if not top:
        return ""
    first, second = rows[top[0]], rows[rest[0]]
    margin = first["mean"] - second["mean"]
    populations = {describe.population(entries[k]) for k in (top[0], rest[0])} if metric != "gm" else set()
    unlike = all(len(set(told)) > 1 for told in zip(*populations))  # where all are drawn, the active clients are all
    beside = "populations differ: not comparable" if populations and unlike else _beside(margin, first, second)
    return (
        f"Highest {word}: {escape(top[0])}, {tables.with_spread(first['mean'], first['sd'])} % (n = {first['n']}), "
        f"{100 * margin:.2f} points above {escape(rest[0])}{f' ({beside})' if beside else ''}."
    )


def _beside(margin: float, first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    """The margin beside the larger standard deviation over seeds of the two; no test."""
    sds = [r["sd"] for r in (first, second) if r["over"] == tables.SEEDS and r["sd"] is not None]
    if len(sds) < 2:
        return ""
    return f"{'more than' if margin > max(sds) else 'within'} the larger of their standard deviations over seeds"


def _single(s: Setting) -> str:
    """Which methods have no spread over seeds."""
    used = [e for e in s.entries if e.used]
    single = [escape(e.label) for e in used if len(e.used) == 1]
    if not single:
        return ""
    who = "" if len(single) == len(used) else f" ({', '.join(single)})"
    return f"One seed only{who}: nothing tells how much of a difference is chance."


def _lacking(made: Report) -> str:
    fates = Counter(run.status for run in made.runs if run.status != FINISHED)
    told = ", ".join(f"{n} {fate}" for fate, n in sorted(fates.items()))
    return f"**Not finished: {told}**; the list of runs below says which and why." if told else ""


def _table(made: Report) -> Table:
    """Methods by kind of accuracy and setting."""
    labels = list(dict.fromkeys(e.label for s in made.settings for e in s.entries))
    columns = [
        (head, column)
        for metric in KINDS
        for s in made.settings
        for head, column in [(_head(s, metric, len(made.settings)), _column(made, s, metric))]
        if metric == "gm" or any(cell.order is not None for cell in column.values())
    ]
    rows = [[Cell(k), *(column.get(k, Cell(tables.MISSING)) for _, column in columns)] for k in labels]
    open_ = dict.fromkeys(escape(e.label) for s in made.settings for e in s.entries if e.used and not e.finished)
    notes = [
        " ".join(f"{part}." for part in ("Accuracy in %", _spreads(made)) if part),
        "**Bold**: highest mean of finished runs in the column." if any(c.bold for row in rows for c in row) else "",
        f"Not finished, numbers of the last round that all its seeds have: {', '.join(open_)}." if open_ else "",
        missing(rows),
    ]
    return Table("summary", "Summary", ["method", *(head for head, _ in columns)], rows, " ".join(filter(None, notes)))


def _spreads(made: Report) -> str:
    """What every ± of the table is over."""
    by: dict[int, list[dict[str, Any]]] = {}
    for s in made.settings:
        cells = tables.Cells(made.data["accuracy.csv"], s.number)
        rows = [cells.row(e.label, metric, _rule(s, metric)) for metric in KINDS for e in s.entries]
        by.setdefault(s.ddof, []).extend(row for row in rows if row["n"])
    shown = [tables.plus_minus(rows, ddof, escape) for ddof, rows in by.items() if rows]
    several = len({r["n"] for rows in by.values() for r in rows if r["n"] > 1}) > 1
    return "; ".join([*shown, *(["n: in the tables below"] if several else [])])


def _column(made: Report, s: Setting, metric: str) -> dict[str, Cell]:
    cells, rule = tables.Cells(made.data["accuracy.csv"], s.number), _rule(s, metric)
    labels = [e.label for e in s.entries]
    top = cells.highest(labels, metric, rule)
    shown = {label: cells.cell(label, metric, rule, bold=label in top) for label in labels}
    return shown | {e.label: Cell(DIVERGED) for e in s.entries if metric == "gm" and _gone(e)}


def _gone(entry: Entry) -> bool:
    """Whether a method has no numbers because it diverged."""
    return not entry.used and any(run.status == DIVERGED for run in entry.runs)


def _head(s: Setting, metric: str, settings: int) -> str:
    word = KINDS[metric]
    return f"{word}, {s.name}" if settings > 1 else word
