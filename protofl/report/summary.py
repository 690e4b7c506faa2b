"""The top of a report: what was run, what came out, what is missing, in a few sentences and one table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from . import describe, tables
from .blocks import Block, Cell, Table, Text
from .content import Report
from .groups import Setting
from .markdown import escape
from .read import FINISHED
from .sections import missing

KINDS = {"gm": "GM", "pm_v": "PM(V)"}


def summary(made: Report) -> list[Block]:
    """Sentences and the headline by method and setting; nothing where no run could be read."""
    if not made.settings:
        return []
    lines = [_extent(made), *(line for s in made.settings for line in _outcome(made, s)), _lacking(made), _seeds(made)]
    return [Text("\n".join(f"* {line}" for line in lines if line)), made.table(_table(made))]


def _extent(made: Report) -> str:
    labels = dict.fromkeys(e.label for s in made.settings for e in s.entries)
    settings = len(made.settings)
    return (
        f"{_count(len(made.runs), 'run')} of {_count(len(labels), 'method')}, {_count(settings, 'setting')}; "
        "the headline is the last round unless a table says otherwise, global and personal figures stand apart."
    )


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _outcome(made: Report, s: Setting) -> list[str]:
    """Who is ahead by how much, beside the spread over seeds; and whether the comparison was fair."""
    where = f"Setting {s.number}: " if len(made.settings) > 1 else ""
    cells = tables.Cells(made.data["accuracy.csv"], s.number)
    out = []
    for metric, word in KINDS.items():
        rows = {e.label: cells.row(e.label, metric, s.headline.name) for e in s.entries if e.finished}
        known = sorted(((r["mean"], label) for label, r in rows.items() if r["mean"] is not None), reverse=True)
        if len(known) > 1:
            (top, first), (next_, second) = known[:2]
            out.append(
                f"{where}highest {word}: {escape(first)}, {tables.with_spread(top, rows[first]['sd'])} %, "
                f"{100 * (top - next_):.2f} points above {escape(second)}{_beside(top - next_, rows[first], rows[second])}."
            )
    if unlike := describe.unlike(s):
        out.append(f"{where}**not the same for all methods of a seed: {', '.join(unlike)}**.")
    return out


def _beside(margin: float, first: Mapping[str, object], second: Mapping[str, object]) -> str:
    """The margin beside the larger standard deviation over seeds of the two; no test."""
    sds = [sd for r in (first, second) if r.get("over") == tables.SEEDS and isinstance(sd := r["sd"], float)]
    if len(sds) < 2:
        return ""
    return f" ({'more' if margin > max(sds) else 'less'} than one standard deviation over seeds)"


def _lacking(made: Report) -> str:
    fates = Counter(run.status for run in made.runs if run.status != FINISHED)
    told = ", ".join(f"{n} {fate}" for fate, n in sorted(fates.items()))
    return f"**Not finished: {told}**; the list of runs below says which and why." if told else ""


def _seeds(made: Report) -> str:
    single = [str(s.number) for s in made.settings if len(s.seeds) == 1]
    if not single:
        return ""
    where = "" if len(made.settings) == 1 else f" in setting {', '.join(single)}"
    return f"One seed{where}: nothing tells how much of a difference is chance."


def _table(made: Report) -> Table:
    """Methods by kind of accuracy and setting."""
    labels = list(dict.fromkeys(e.label for s in made.settings for e in s.entries))
    columns = {}
    for metric, word in KINDS.items():
        for s in made.settings:
            column = _column(made, s, metric)
            if metric == "gm" or any(cell.order is not None for cell in column.values()):
                columns[_head(s, word, len(made.settings))] = column
    rows = [[Cell(k), *(column.get(k, Cell(tables.MISSING)) for column in columns.values())] for k in labels]
    notes = f"Headline, in %; bold: highest of finished runs in a column. {missing(rows)}".strip()
    return Table("summary", "Summary", ["method", *columns], rows, notes)


def _column(made: Report, s: Setting, metric: str) -> dict[str, Cell]:
    cells, labels = tables.Cells(made.data["accuracy.csv"], s.number), [e.label for e in s.entries]
    top = cells.highest(labels, metric, s.headline.name)
    return {label: cells.cell(label, metric, s.headline.name, bold=label in top) for label in labels}


def _head(s: Setting, word: str, settings: int) -> str:
    return f"{word}, {', '.join(f'{k}={v}' for k, v in s.differs.items())}" if settings > 1 else word
