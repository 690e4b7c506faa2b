"""An ablation: what every reading of a choice does, against the method as it is set, beside what another split does."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from rich import box
from rich.table import Table as RichTable
from rich.text import Text as RichText

from . import describe, figures, stats
from .blocks import Block, Cell, Heading, Table, Text
from .content import Report
from .markdown import escape
from .read import DIVERGED, FINISHED, Run
from .select import KINDS, RULES, SAME, Rule, evaluated, last, value
from .tables import MISSING

SPLIT = "partition_seed"

Row = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Effect:
    """What a row does to a metric: paired differences to its base over seeds, and where curves part.

    base: mean of the base over the same seeds. parts: the first evaluated round in which any seed differs, and the first
    in which all do; None: in none.
    """

    row: Row
    found: stats.Paired
    base: float
    any: int | None
    all: int | None
    problem: str = ""


def blocks(made: Report, told: Mapping[str, Any]) -> list[Block]:
    """All parts of an ablation's page below its opening."""
    runs = {run.digest: run for run in made.runs}
    rows = [row for row in told.get("rows", []) if isinstance(row, dict)]
    base = {d for row in rows if not row["beside"] for d in row["base"].values()}
    setting = next((s for s in made.settings if base & {run.digest for run in s.runs}), None)
    parts: list[Block] = [Text(describe.what_was_run(setting))] if setting is not None else []
    parts.append(Text(_extent(rows, runs)))
    for metric, word in KINDS.items():
        effects = sorted(_effects(rows, runs, metric), key=lambda e: -abs(e.found.mean))
        if effects:
            parts += _effect(made, metric, word, effects, rows, runs)
    return [*parts, *_claims(made, rows), *_refused(made, rows)]


def labels(told: Mapping[str, Any]) -> dict[str, str]:
    """What runs are called, by digest: the reading that they are of, or the method as it is set."""
    base = {d: f"{told['method']} as it is set" for row in told["rows"] for d in row["base"].values()}
    return base | {
        d: f"{told['method']} {_name(row)}" for row in told["rows"] if not row["rule"] for d in row["runs"].values()
    }


def _extent(rows: Sequence[Row], runs: Mapping[str, Run]) -> str:
    """How many readings of how many choices became what."""
    run = [row for row in rows if row["runs"]]
    idle, refused = [row for row in rows if row["idle"]], [row for row in rows if row["refused"]]
    seeds = sorted({int(seed) for row in run for seed in row["runs"]})
    return (
        f"One factor at a time: {len(rows)} readings of {len({row['choice'] for row in rows})} choices, each against the "
        f"method as it is set with everything else equal: split, initial weights, client draws and batches. {len(run)} were "
        f"run with {len(seeds)} seed{'s' if len(seeds) != 1 else ''} ({', '.join(map(str, seeds))}), {len(idle)} are proved to "
        f"change nothing here, {len(refused)} cannot be set here."
    )


# ---- effects --------------------------------------------------------------------------------------------------------


def _effects(rows: Sequence[Row], runs: Mapping[str, Run], metric: str) -> Iterator[Effect]:
    """The effects on a metric of the rows that have it."""
    for row in rows:
        pairs = [
            (runs[mine], runs[base])
            for seed, mine in row["runs"].items()
            if mine in runs and (base := row["base"].get(seed)) in runs
        ]
        rule = RULES.get(row["rule"], last)
        values = [(_reported(a, metric, rule), _reported(b, metric, last)) for a, b in pairs]
        good = [(x, y) for x, y in values if x is not None and y is not None]
        if good:
            mine, base = zip(*good)
            apart = [] if row["rule"] else [_apart(a, b, metric) for a, b in pairs]
            yield Effect(row, stats.paired(mine, base), statistics.fmean(base), *_parted(apart), _problem(pairs, good))


def _reported(run: Run, metric: str, rule: Rule) -> float | None:
    """What a rule reports of a finished run."""
    return rule(run.rounds, metric) if run.status == FINISHED else None


def _apart(a: Run, b: Run, metric: str) -> set[int]:
    """The evaluated rounds in which two runs differ."""
    mine, base = ({r["round"]: value(r, metric) for r in evaluated(run.rounds)} for run in (a, b))
    return {t for t in mine.keys() & base.keys() if mine[t] != base[t]}


def _parted(apart: Sequence[set[int]]) -> tuple[int | None, int | None]:
    """The first round in which any pair differs, and the first in which all do."""
    if not apart:
        return None, None
    return min(set.union(*apart), default=None), min(set.intersection(*apart), default=None)


def _problem(pairs: Sequence[tuple[Run, Run]], good: Sequence[Any]) -> str:
    """Which seeds are not in the numbers, and why."""
    gone = sum(a.status == DIVERGED for a, _ in pairs)
    told = [f"diverged with {gone} of {len(pairs)} seeds"] if gone else []
    lost = len(pairs) - len(good) - gone
    return "; ".join([*told, *([f"{lost} of {len(pairs)} pairs are not finished"] if lost else [])])


def _split(effects: Sequence[Effect]) -> tuple[float, float] | None:
    """The largest mean difference of another split, and the sd of the splits' means; None: no other split was run."""
    moved = [e.found.mean for e in effects if e.row["choice"] == SPLIT]
    return (max(map(abs, moved)), statistics.stdev([0.0, *moved])) if moved else None


def _effect(
    made: Report, metric: str, word: str, effects: Sequence[Effect], rows: Sequence[Row], runs: Mapping[str, Run]
) -> list[Block]:  # fmt: skip
    """The table of effects on one metric, and their picture."""
    split, intervals = _split(effects), any(e.found.low is not None for e in effects)
    heads = ["choice", "reading", "default", "difference", "95 % interval", "same sign", "n", "curves part", "remark"]
    shown = [_cells(e, split) for e in effects]
    lost = [row for row in rows if row["runs"] and not any(e.row is row for e in effects)]
    notes = [
        f"{word}, percentage points, last round, reading minus default{_default(effects)}, sorted by size; a pair is a seed.",
        "±: sd of the differences over seeds, n-1." if any(e.found.n > 1 for e in effects) else "",
        f"Intervals of the paired t-test, not corrected for the {len(effects)} rows: of twenty choices that do nothing one is "
        "expected to look as if it did."
        if intervals
        else f"With fewer than {stats.FEWEST} seeds no interval is given.",
        "*Curves part*: the first evaluated round in which any seed differs from the default / all seeds do.",
        f"**Another split of the same data moves the default by up to {100 * split[0]:.2f} points** (sd over the splits "
        f"{100 * split[1]:.2f}). *< split*: smaller than that; on another split it may look otherwise."
        if split
        else "",
        f"Without a number: {', '.join(escape(_name(row)) for row in lost)}: {_fates(lost, runs)}." if lost else "",
    ]
    name = f"ablation-{metric.replace('_', '-')}"
    table = Table(name, f"Effects on {word}", heads, shown, " ".join(filter(None, notes)), left=3)
    data = _frame(effects)
    caption = (
        f"{word}, reading minus default, points: mean {'and 95 % interval ' if intervals else ''}over seeds"
        + ("; grey: what another split of the same data does to the default." if split else ".")
    )  # fmt: skip
    used = [runs[d] for e in effects for d in e.row["runs"].values() if d in runs]
    picture = made.figure(
        name,
        used,
        data,
        f"Effects of choices on {word}",
        caption,
        lambda d: figures.draw_effects(d, split[0] if split else None),
    )
    return [Heading(f"Effects on {word}"), picture, made.table(table)]


def _default(effects: Sequence[Effect]) -> str:
    """What the method as it is set reaches."""
    plain = next((e.base for e in effects if not e.row["beside"]), None)
    return "" if plain is None else f" (which has {100 * plain:.2f} % in the mean)"


def _name(row: Row) -> str:
    return f"{row['choice']}={row['reading']}"


def _fates(rows: Sequence[Row], runs: Mapping[str, Run]) -> str:
    fates = sorted({runs[d].status if d in runs else "not run" for row in rows for d in row["runs"].values()})
    return ", ".join("not measured" if fate == FINISHED else fate for fate in fates)


def _cells(e: Effect, split: tuple[float, float] | None) -> list[Cell]:
    """A row of the table."""
    d = e.found
    difference = f"{100 * d.mean:+.2f}" + ("" if d.sd is None else f" ± {100 * d.sd:.2f}")
    interval = MISSING if d.low is None or d.high is None else f"{100 * d.low:+.2f} to {100 * d.high:+.2f}"
    clear = d.low is not None and d.high is not None and (d.low > 0 or d.high < 0)
    never = e.any is None and not e.row["rule"]
    parts = "same runs" if e.row["rule"] else "never" if never else f"{e.any} / {MISSING if e.all is None else e.all}"
    told = [e.problem, *_remarks(e.row)]
    told += ["no difference in any round"] if never else []
    small = split is not None and e.row["choice"] != SPLIT and SAME < abs(d.mean) <= split[0]
    told += ["< split"] if small else []
    told += [f"both with {', '.join(f'{k}={v}' for k, v in e.row['beside'].items())}"] if e.row["beside"] else []
    return [
        Cell(e.row["choice"]), Cell(e.row["reading"]), Cell(e.row["default"]), Cell(difference, d.mean),
        Cell(interval, d.low, bold=clear), Cell(f"{d.same_sign} of {d.n}", d.same_sign / d.n), Cell(str(d.n), d.n),
        Cell(parts, e.any), Cell("; ".join(filter(None, told))),
    ]  # fmt: skip


def _remarks(row: Row) -> list[str]:
    """What was proved of a reading that acts, and claims that did not hold."""
    told = []
    for claim in row["claims"]:
        if claim["holds"] and claim["equals"]:
            told.append(f"equals {claim['equals']} {_how(claim)}")
        elif not claim["holds"]:
            told.append(f"claimed equal ({claim['why']}), which did not hold: {claim['problem'] or _how(claim)}")
    return told


def _how(claim: Row) -> str:
    """How equal two sides are."""
    gap = claim["gap"]
    if gap is None:
        return "(not comparable)"
    return "(bit for bit)" if gap == 0 else f"(to {gap:.1g})"


def _frame(effects: Sequence[Effect]) -> pd.DataFrame:
    """Choice x reading -> mean, low, high of the difference, shares of 1."""
    rows = [
        {"choice": e.row["choice"], "reading": e.row["reading"], "n": e.found.n, "mean": e.found.mean, "low": e.found.low,
         "high": e.found.high}
        for e in effects
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=["choice", "reading", "n", "mean", "low", "high"])


def terminal(runs: Sequence[Run], told: Mapping[str, Any]) -> RichTable:
    """The effects for the terminal, largest first: on GM, or on PM(V) where the method has no GM."""
    known = {run.digest: run for run in runs}
    found = {
        metric: sorted(_effects(told["rows"], known, metric), key=lambda e: -abs(e.found.mean)) for metric in KINDS
    }
    metric = next((m for m in KINDS if found[m]), "gm")
    split = _split(found[metric])
    table = RichTable(
        title=f"Effects on {KINDS[metric]}, points", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True
    )
    for head in ("choice", "reading", "default", "difference", "95 % interval", "same sign", "curves part", "remark"):
        table.add_column(RichText(head), justify="right" if head in ("difference", "95 % interval") else "left")
    for e in found[metric]:
        cells = _cells(e, split)
        table.add_row(
            *(RichText(cells[i].text, style="bold" if cells[i].bold else "") for i in (0, 1, 2, 3, 4, 5, 7, 8))
        )
    quiet = [_name(row) for row in told["rows"] if row["idle"]]
    lines = (
        [f"< split: smaller than what another split of the data does, up to {100 * split[0]:.2f} points."]
        if split
        else []
    )
    lines += [f"Proved to change nothing: {', '.join(quiet)}."] if quiet else []
    lines += (
        [f"Cannot be set here: {', '.join(_name(row) for row in told['rows'] if row['refused'])}."]
        if any(row["refused"] for row in told["rows"])
        else []
    )
    table.caption, table.caption_justify = RichText(" ".join(lines)), "left"
    return table


# ---- what does nothing, and what cannot be --------------------------------------------------------------------------


def _claims(made: Report, rows: Sequence[Row]) -> list[Block]:
    """Readings that are equal by construction, and choices that cannot act in this setting, with the proofs."""
    idle = [(row, next(c for c in row["claims"] if c["holds"] and c["idle"])) for row in rows if row["idle"]]
    always = [(row, claim) for row, claim in idle if not claim["instead"]]
    here = [(row, claim) for row, claim in idle if claim["instead"]]
    notes = (
        "Proved, not run: both sides played for the rounds named, in float64; the difference is the largest between the scores "
        "of all models after any of them, in units of the larger of 1 and the score; 0: the same bits."
    )
    parts: list[Block] = []
    if always:
        heads = ["choice", "reading", "default", "difference", "rounds", "why"]
        shown = [[*_who(row), *_proof(claim), Cell(claim["why"])] for row, claim in always]
        parts += [
            Heading("Equal by construction"),
            made.table(Table("equal", "Equal by construction", heads, shown, notes, 3)),
        ]
    if here:
        heads = ["choice", "reading", "default", "difference", "rounds", "why", "acts with"]
        shown = [[*_who(row), *_proof(claim), Cell(claim["why"]), Cell(claim["instead"])] for row, claim in here]
        title = "Cannot act in this setting"
        parts += [Heading(title), made.table(Table("cannot-act", title, heads, shown, notes, 3))]
    return parts


def _who(row: Row) -> list[Cell]:
    return [Cell(row["choice"]), Cell(row["reading"]), Cell(row["default"])]


def _proof(claim: Row) -> list[Cell]:
    return [Cell("0" if claim["gap"] == 0 else f"{claim['gap']:.1g}", claim["gap"]), Cell(str(claim["rounds"]))]


def _refused(made: Report, rows: Sequence[Row]) -> list[Block]:
    """Readings that this setting does not allow."""
    shown = [[*_who(row), Cell(row["refused"]), Cell(row["instead"])] for row in rows if row["refused"]]
    if not shown:
        return []
    title = "Cannot be set in this setting"
    return [
        Heading(title),
        made.table(Table("refused", title, ["choice", "reading", "default", "why", "acts with"], shown, left=5)),
    ]
