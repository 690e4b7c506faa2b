"""Methods against each other: paired differences to a baseline, ranks, and what a target accuracy costs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from . import stats, tables
from .blocks import Block, Cell, Heading, Table
from .content import Report
from .groups import Entry, Setting
from .markdown import escape
from .read import Run
from .sections import missing, number_cell
from .select import Row, mean, value
from .tables import MISSING, UNDEFINED

METRICS = {"gm": "GM", "pm_v": "PM(V)"}


def baseline(s: Setting, wanted: str | None) -> Entry:
    """What the others are compared with: the method asked for, else FedAvg, else the first."""
    names = [wanted] if wanted else ["fedavg"]
    return next((e for e in s.entries if e.method in names or e.label in names), s.entries[0])


def by_seed(s: Setting, entry: Entry, metric: str) -> dict[int, float]:
    """The headline of every finished run, by seed."""
    if not entry.finished:
        return {}
    found = {run.seed: mean(entry.reported(run, s.headline), metric) for run in entry.used}
    return {seed: v for seed, v in found.items() if v is not None}


# ---- differences ------------------------------------------------------------------------------------------


def differences(made: Report, s: Setting, wanted: str | None = None) -> list[Block]:
    """Each method against the baseline, over the seeds that both have; a table per kind of accuracy."""
    base = baseline(s, wanted)
    blocks: list[Block] = []
    for metric, word in METRICS.items():
        reference = by_seed(s, base, metric)
        found = {e.label: _pairs(by_seed(s, e, metric), reference) for e in s.entries if e is not base}
        tested = {label: d for label, d in found.items() if d is not None}
        if not tested:
            continue
        corrected = _corrected(tested)
        rows = [_difference(e.label, found[e.label], corrected) for e in s.entries if e is not base]
        heads = ["method", "difference", "95 % interval", "p", "p corrected", "same sign", "n"]
        title = f"{word}: difference to {base.label}"
        name = made.name(f"differences-{metric.replace('_', '-')}", s)
        blocks.append(made.table(Table(name, title, heads, rows, _notes(base, tested, rows))))
    return [Heading("Differences between methods", 3), *blocks] if blocks else []


def _pairs(mine: Mapping[int, float], theirs: Mapping[int, float]) -> stats.Paired | None:
    seeds = sorted(mine.keys() & theirs.keys())
    return stats.paired([mine[k] for k in seeds], [theirs[k] for k in seeds]) if seeds else None


def _corrected(found: Mapping[str, stats.Paired]) -> dict[str, float]:
    tested = {label: d.p for label, d in found.items() if d.p is not None}
    return dict(zip(tested, stats.holm(list(tested.values()))))


def _difference(label: str, d: stats.Paired | None, corrected: Mapping[str, float]) -> list[Cell]:
    if d is None:
        return [Cell(label), *[Cell(MISSING)] * 5, Cell("0", 0)]
    shown = f"{100 * d.mean:+.2f}" + ("" if d.sd is None else f" ± {100 * d.sd:.2f}")
    if d.low is None or d.high is None or d.p is None:
        tests = [Cell(f"no test: n < {stats.FEWEST}")] + [Cell(MISSING)] * 2
    else:
        interval = Cell(f"{100 * d.low:+.2f} to {100 * d.high:+.2f}", d.low)
        tests = [interval, _p(d.p), _p(corrected[label])]
    return [
        Cell(label),
        Cell(shown, d.mean),
        *tests,
        Cell(f"{d.same_sign} of {d.n}", d.same_sign / d.n),
        Cell(str(d.n), d.n),
    ]


def _p(p: float) -> Cell:
    return Cell("< 0.0001" if p < 1e-4 else f"{p:.4f}", p)


def _notes(base: Entry, tested: Mapping[str, stats.Paired], rows: Sequence[Sequence[Cell]]) -> str:
    several = any(d.n > 1 for d in tested.values())
    test = (
        "p: two-sided paired t-test; corrected by Holm's method for all methods of this table."
        if any(d.p is not None for d in tested.values())
        else f"With fewer than {stats.FEWEST} seeds no test is possible."
    )
    parts = [
        f"Percentage points, headline of finished runs, method minus {escape(base.label)}; a pair is a seed, which shares "
        "split, initial weights, draws and batches.",
        "±: sd of the differences over seeds, n-1." if several else "",
        test,
        "What another split would change is not in it: the split is the same for all seeds."
        if base.runs[0].protocol.get("partition_seed") != "run"
        else "",
        missing(rows),
    ]
    return " ".join(filter(None, parts))


# ---- ranks ------------------------------------------------------------------------------------------------


def ranks(made: Report) -> list[Block]:
    """The rank of every method in every setting by the mean headline GM, and its mean rank."""
    labels = list(dict.fromkeys(e.label for s in made.settings for e in s.entries))
    means = {(s.number, e.label): by_seed(s, e, "gm") for s in made.settings for e in s.entries}
    full = [s for s in made.settings if all(means.get((s.number, label)) for label in labels)]
    ranked = [label for label in labels if any(means.get((s.number, label)) for s in made.settings)]
    if len(ranked) < 2:
        return []
    by_setting = {
        s.number: _ranked({k: statistics.fmean(v.values()) for k in labels if (v := means.get((s.number, k)))})
        for s in made.settings
    }
    pairs = [_ranked({k: means[s.number, k][seed] for k in labels})
             for s in full for seed in _common([means[s.number, k] for k in labels])]  # fmt: skip
    heads = ["method", *(f"setting {s.number}" if len(made.settings) > 1 else "rank" for s in made.settings)]
    heads += [*(["mean over settings"] if len(full) > 1 else []), *(["mean over seeds"] if pairs else [])]
    rows = []
    for label in ranked:
        row = [Cell(label), *(_rank(by_setting[s.number].get(label)) for s in made.settings)]
        if len(full) > 1:
            row.append(number_cell(statistics.fmean(by_setting[s.number][label] for s in full), 2))
        if pairs:
            row.append(number_cell(statistics.fmean(one[label] for one in pairs), 2))
        rows.append(row)
    notes = [
        "1: highest GM of the headline; equal ones share a rank; finished runs alone.",
        f"Means over the settings ({len(full)}) and the pairs of setting and seed ({len(pairs)}) in which all methods have a "
        "figure." if pairs else "",
        missing(rows),
    ]  # fmt: skip
    return [made.table(Table("ranks", "Ranks", heads, rows, " ".join(filter(None, notes))))]


def _ranked(values: Mapping[str, float]) -> dict[str, float]:
    return dict(zip(values, stats.ranks(list(values.values()))))


def _common(found: Sequence[Mapping[int, float]]) -> list[int]:
    return sorted(set.intersection(*(set(one) for one in found)))


def _rank(rank: float | None) -> Cell:
    return Cell(MISSING) if rank is None else Cell(f"{rank:g}", rank)


# ---- target -----------------------------------------------------------------------------------------------


class Reached(NamedTuple):
    """What a run had spent when it first reached a target: rounds, MB (1e6 bytes), seconds without evaluation."""

    rounds: int
    mb: float | None
    seconds: float | None


def reached(entry: Entry, run: Run, target: float) -> Reached | None:
    """The first evaluated round with a GM of the target or more; None: never."""
    so_far = []
    for row in entry.rows(run):
        so_far.append(row)
        gm = value(row, "gm") if row["round"] >= 0 else None
        if gm is not None and gm >= target:
            names = ("bytes_down", "bytes_up", "bytes_once")
            moved = [v for n in names if (v := tables.total(so_far, n)) is not None]
            return Reached(row["round"] + 1, sum(moved) / 1e6 if moved else None, seconds(so_far))
    return None


def seconds(rows: Sequence[Row]) -> float | None:
    """Training, prototype pass and aggregation of these rounds; None if nothing of it was recorded."""
    told = [r.get("seconds", {}) for r in rows]
    known = [v for part in ("train", "prototype", "aggregate") if (v := tables.total(told, part)) is not None]
    return sum(known) if known else None


def target(made: Report, s: Setting, wanted: float | None = None, base: str | None = None) -> list[Block]:
    """Rounds, bytes and seconds to a target; by default to the mean headline GM of the baseline (MOON, table 2)."""
    reference = baseline(s, base)
    known = by_seed(s, reference, "gm")
    if wanted is None and not known:
        return []
    goal = statistics.fmean(known.values()) if wanted is None else wanted
    rows = [_target(e, goal) for e in s.entries if e.used]
    if not any(cell.order is not None for row in rows for cell in row):
        return []
    what = f"the mean headline GM of {escape(reference.label)}" if wanted is None else "as asked for"
    notes = (
        f"Target: {100 * goal:.2f} %, {what}. Rounds until an evaluated round first has it, all bytes sent and received until "
        "then (with the exchange before round 0), seconds of training, prototype pass and aggregation, evaluation apart; "
        "means over the seeds that reach it. Which seeds do is part of the result: read the last column first. "
        f"{missing(rows)}"
    )
    heads = ["method", "rounds", "MB", "seconds", "reached by"]
    return [made.table(Table(made.name("target", s), "Cost of a target accuracy", heads, rows, notes.strip()))]


def _target(entry: Entry, goal: float) -> list[Cell]:
    found = [reached(entry, run, goal) for run in entry.used]
    hit = [one for one in found if one is not None]
    count = Cell(f"{len(hit)} of {len(found)} seeds", float(len(hit)))
    defined = any(value(row, "gm") is not None for run in entry.used for row in entry.rows(run))
    if not hit:
        played = max(run.played for run in entry.used)
        return [
            Cell(entry.label),
            Cell(f"not in {played}" if defined else UNDEFINED),
            Cell(MISSING),
            Cell(MISSING),
            count,
        ]
    known = [[v for one in hit if (v := getattr(one, name)) is not None] for name in Reached._fields]
    shown = [number_cell(statistics.fmean(v) if len(v) == len(hit) else None, 1) for v in known]
    return [Cell(entry.label), *shown, count]
