"""Tables of the report, one setting at a time; a function returns the blocks of its section."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from . import describe, tables
from .blocks import Block, Cell, Table
from .content import Report
from .groups import Setting
from .markdown import escape
from .read import DIVERGED
from .select import RULES, last, mean_last_5

BOLD = "**Bold**: highest mean of finished runs in the column; no test of significance was made."

PERSONAL = (
    "PM(V): on the classes that the client holds; PM(L): weighted by the client's label mix; uniform: on the "
    "whole test set. *sd over clients* (divisor: number of clients) and the mean of the *worst 10 %* of the "
    "clients say how evenly a method serves them; both are means over seeds."
)
COST = (
    "Communication in MB (1e6 bytes, 4 per float): *down* and *up* per round and drawn client; *one-time*: "
    "constants, the exchange before round 0 and that after the last; *total*: the whole run, all clients. "
    "*trained*, *forward*: samples passed forward and backward, and forward alone, per round and drawn client; "
    "*kept*: MB that a client keeps between rounds. Seconds: parts per round (*aggregate*: the server), then the "
    "whole run. Memory in MB. Means over seeds; seconds and memory hold for the machine named above. The formulas: "
    "`protofl methods`."
)


def accuracy(made: Report, s: Setting) -> list[Block]:
    """Global model: one row per method, one column per selection rule."""
    cells = tables.Cells(made.data["accuracy.csv"], s.number)
    labels = [e.label for e in s.entries]
    top = {name: cells.highest(labels, "gm", name) for name, rule in RULES.items() if not rule.peeks}
    heads = [
        "method",
        *(f"{r.label}{' (headline)' if r is s.headline else ''}" for r in RULES.values()),
        "round of best",
        "n",
        "status",
    ]
    rows = []
    for e in s.entries:
        shown = [cells.cell(e.label, "gm", n, bold=e.label in top.get(n, ())) for n in RULES]
        gone = not e.used and any(r.status == DIVERGED for r in e.runs)
        shown = [Cell("diverged")] * len(shown) if gone else shown
        n = int(cells.row(e.label, "gm", s.headline.name)["n"])
        at = str(cells.row(e.label, "gm", "best")["rounds"]).replace(" ", ", ") or tables.MISSING
        rows.append([Cell(e.label), *shown, Cell(at), Cell(str(n), n), Cell(e.state)])
    counted = [int(cells.row(label, "gm", s.headline.name)["n"]) for label in labels]
    chance = chance_level(s)
    notes = [
        f"Top-1 accuracy in % of the server's model on the whole test set. {tables.over(counted, s.ddof)}.",
        f"Chance level: {100 * chance:.2f} (1 of {round(1 / chance)} classes)." if chance else "",
        BOLD if any(top.values()) else "",
        "Rounds count from t = 0. *best* chooses its round by the test set: optimistic, for comparison only.",
        _few_rounds(s, cells),
        _shortened(s),
        missing(rows),
    ]
    return [
        made.table(Table(made.name("accuracy", s), "Accuracy of the global model (GM)", heads, rows, _joined(notes)))
    ]


def _few_rounds(s: Setting, cells: tables.Cells) -> str:
    """Who has fewer evaluated rounds than the mean of the last five wants."""
    rule = mean_last_5
    shown = [e for e in s.entries if cells.row(e.label, "gm", rule.name)["n"]]
    few = {e.label: min(len(rule.rows(e.rows(r))) for r in e.used) for e in shown}
    named = ", ".join(f"{escape(k)} ({n})" for k, n in few.items() if 0 < n < 5)
    return f"Fewer than five evaluated rounds: {named}." if named else ""


def _shortened(s: Setting) -> str:
    """Who is shown although no run finished."""
    named = ", ".join(escape(e.label) for e in s.entries if e.used and not e.finished)
    return f"Not finished, numbers of the last round that all its seeds have: {named}." if named else ""


def _joined(notes: Sequence[str]) -> str:
    return " ".join(filter(None, notes))


def missing(rows: Sequence[Sequence[Cell]]) -> str:
    """What `-` means, if there is one."""
    used = any(cell.text == tables.MISSING for row in rows for cell in row)
    return f"`{tables.MISSING}`: not measured." if used else ""


def chance_level(s: Setting) -> float | None:
    """The accuracy of guessing, if the classes are known."""
    classes = len(s.first.data.get("classes", []))
    return 1 / classes if classes else None


def personal(made: Report, s: Setting) -> list[Block]:
    """Personalised models: the last evaluated round, never in one column with GM."""
    cells = tables.Cells(made.data["accuracy.csv"], s.number)
    shown = [e for e in s.entries if any(cells.row(e.label, m, "last")["n"] for m in tables.WEIGHTINGS)]
    if not shown:
        return []
    labels = [e.label for e in shown]
    names = {"pm_v": "PM(V)", "pm_l": "PM(L)", "pm_uniform": "PM uniform"}
    by = next(m for m in tables.WEIGHTINGS if any(cells.row(label, m, "last")["n"] for label in labels))
    top = {m: cells.highest(labels, m, "last") for m in names}
    heads = [
        "method",
        *names.values(),
        f"{names[by]} sd over clients",
        f"{names[by]} worst 10 %",
        "population",
        "clients",
        "n",
        "status",
    ]
    rows = [
        [
            Cell(e.label),
            *(cells.cell(e.label, m, "last", bold=e.label in top[m]) for m in names),
            *(cells.cell(e.label, f"{by}_{k}", "last", spread=False) for k in ("std", "worst10")),
            *map(Cell, describe.population(e)),
            Cell(str(max(int(cells.row(e.label, m, "last")["n"]) for m in names))),
            Cell(e.state),
        ]
        for e in shown
    ]
    told = [cells.row(label, m, "last") for label in labels for m in names]
    notes = [
        "Accuracy in % of the clients' own models in the last evaluated round, mean over clients.",
        f"{tables.plus_minus(told, s.ddof, escape)}. {BOLD if any(top.values()) else ''}",
        PERSONAL,
        f"Models as in `pm_protocol` = {escape(s.first.protocol.get('pm_protocol', tables.MISSING))}, but for methods of "
        "whose own a setting above says otherwise."
        if any(e.runs[0].adapted for e in shown)
        else f"Models as in `pm_protocol` = {escape(s.first.protocol.get('pm_protocol', tables.MISSING))}.",
        "Methods with different populations are not comparable." if len({row[6].text for row in rows}) > 1 else "",
        missing(rows),
    ]
    title = "Accuracy of the personalised models (PM)"
    return [made.table(Table(made.name("personal", s), title, heads, rows, _joined(notes)))]


def readings(made: Report, s: Setting) -> list[Block]:
    """Methods whose global model can be read in several ways."""
    cells = tables.Cells(made.data["accuracy.csv"], s.number)
    found = {e.label: tables.readings(e) for e in s.entries}
    names = list(dict.fromkeys(name for many in found.values() for name in many))
    if not names:
        return []
    rows = [
        [
            Cell(label),
            *(cells.cell(label, f"gm:{n}", last.name) for n in names),
            cells.cell(label, "gm", last.name),
        ]
        for label, many in found.items()
        if many
    ]
    text = "Ways to read the same global model, last round, %; one of them is the method's GM."
    title = "Other readings of the global model"
    notes = _joined([text, missing(rows)])
    return [made.table(Table(made.name("readings", s), title, ["method", *names, "GM"], rows, notes))]


def personal_readings(made: Report, s: Setting) -> list[Block]:
    """Methods whose personal models can be read in several ways."""
    cells = tables.Cells(made.data["accuracy.csv"], s.number)
    rows = [
        [Cell(e.label), Cell(name), *(cells.cell(e.label, f"{m}:{name}", last.name) for m in tables.WEIGHTINGS)]
        for e in s.entries
        for name in tables.readings(e, "pm_scores")
    ]
    if not rows:
        return []
    text = "Ways to read the same models, last round, %; one of them is the method's PM."
    title = "Other readings of the personalised models"
    heads = ["method", "reading", "PM(V)", "PM(L)", "PM uniform"]
    return [made.table(Table(made.name("personal_readings", s), title, heads, rows, text, left=2))]


def cost(made: Report, s: Setting) -> list[Block]:
    """Communication, time and memory."""
    mine = made.of("cost.csv", s).set_index("label")
    digits = {
        "down_mb": 3,
        "up_mb": 3,
        "once_mb": 3,
        "total_mb": 1,
        "trained": 0,
        "forward": 0,
        "state_mb": 3,
        **{f"seconds_{p}": 2 for p in tables.PARTS},
        "seconds_total": 1,
        "memory_mb": 0,
    }
    if not mine[list(digits)].notna().any().any():
        return []
    heads = ["method", "down", "up", "one-time", "total", "trained", "forward", "kept", *tables.PARTS, "whole run",
             "peak memory", "rounds"]  # fmt: skip
    rows = [
        [Cell(e.label), *(number_cell(mine.loc[e.label, n], d) for n, d in {**digits, "rounds": 0}.items())]
        for e in s.entries
    ]
    return [made.table(Table(made.name("cost", s), "Cost", heads, rows, _joined([COST, missing(rows)])))]


def number_cell(value: Any, digits: int) -> Cell:
    """A number with so many decimals; `-` where there is none."""
    return Cell(tables.MISSING) if pd.isna(value) else Cell(f"{value:,.{digits}f}", float(value))
