"""Methods against each other: paired differences to a baseline, ranks, and what a target accuracy costs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from . import describe, frames, stats
from .blocks import Block, Cell, Heading, Table
from .content import Report
from .groups import Entry, Setting
from .markdown import escape
from .read import Run
from .sections import number_cell
from .select import KINDS, SAME, Rule, last, mean, undefined, value
from .tables import MISSING, UNDEFINED

OTHER = "other clients"


def baseline(s: Setting, wanted: str | None) -> Entry:
    """What the others are compared with: the method asked for (id or label), else FedAvg, else the first."""
    for name in (wanted, "fedavg"):
        for e in s.entries:
            if name in (e.method, e.label):
                return e
    return s.entries[0]


def rule(s: Setting, metric: str) -> Rule:
    """The rule by which a metric is compared: the headline for GM, the last round for PM, as in their tables."""
    return s.headline if metric == "gm" else last


def by_seed(entry: Entry, metric: str, chosen: Rule) -> dict[int, float]:
    """What a rule reports of every finished run, as a share of 1, by seed."""
    if not entry.finished:
        return {}
    found = {run.seed: mean(entry.reported(run, chosen), metric) for run in entry.used}
    return {seed: v for seed, v in found.items() if v is not None}


def lacking(entry: Entry, metric: str) -> str:
    """Why a method has no number, by its records: the metric means nothing for it, or was not measured."""
    told = any(undefined(row, metric) for run in entry.used for row in entry.rows(run))
    return UNDEFINED if told else MISSING


# ---- differences ------------------------------------------------------------------------------------------


def differences(made: Report, s: Setting, wanted: str | None = None) -> list[Block]:
    """Each method against the baseline, over the seeds that both have; a table per kind of accuracy."""
    base = baseline(s, wanted)
    blocks: list[Block] = []
    for metric, word in KINDS.items():
        found = {e.label: _compared(s, e, base, metric) for e in s.entries if e is not base}
        pairs = {label: d for label, d in found.items() if isinstance(d, stats.Paired)}
        if not pairs:
            continue
        corrected = _corrected(pairs)
        rows = [_difference(label, d, corrected) for label, d in found.items()]
        heads = ["method", "difference", "95 % interval", "p", "p corrected", "same sign", "n"]
        title = f"{word}: difference to {base.label}"
        name = made.name(f"differences-{metric.replace('_', '-')}", s)
        notes = _notes(base, rule(s, metric), pairs, rows)
        blocks.append(made.table(Table(name, title, heads, rows, notes)))
    return [Heading("Differences between methods", 3), *blocks] if blocks else []


def _compared(s: Setting, entry: Entry, base: Entry, metric: str) -> stats.Paired | str:
    """The differences of a method to the baseline, or why there are none."""
    mine, theirs = (by_seed(e, metric, rule(s, metric)) for e in (entry, base))
    seeds = sorted(mine.keys() & theirs.keys())
    if not mine:
        return lacking(entry, metric) if entry.finished else "not finished"
    if not seeds:
        return "no common seed"
    if metric != "gm" and _over_others(entry, base):
        return OTHER
    return stats.paired([mine[k] for k in seeds], [theirs[k] for k in seeds])


def _over_others(a: Entry, b: Entry) -> bool:
    """Whether PM is over other clients; where all are drawn, the active ones are all."""
    mine, theirs = describe.population(a), describe.population(b)
    return mine[0] != theirs[0] and mine[1] != theirs[1]


def _corrected(found: Mapping[str, stats.Paired]) -> dict[str, float]:
    tested = {label: d.p for label, d in found.items() if d.p is not None}
    return dict(zip(tested, stats.holm(list(tested.values()))))


def _difference(label: str, d: stats.Paired | str, corrected: Mapping[str, float]) -> list[Cell]:
    if isinstance(d, str):
        return [Cell(label), Cell(d), *[Cell(MISSING)] * 4, Cell("0", 0)]
    shown = f"{100 * d.mean:+.2f}" + ("" if d.sd is None else f" ± {100 * d.sd:.2f}")
    if d.low is None or d.high is None or d.p is None:
        tests = [Cell(f"no test: n < {stats.FEWEST}"), Cell(MISSING), Cell(MISSING)]
    else:
        interval = Cell(f"{100 * d.low:+.2f} to {100 * d.high:+.2f}", d.low)
        tests = [interval, _p(d.p), _p(corrected[label])]
    same = Cell(f"{d.same_sign} of {d.n}", d.same_sign / d.n)
    return [Cell(label), Cell(shown, d.mean), *tests, same, Cell(str(d.n), d.n)]


def _p(p: float) -> Cell:
    return Cell("< 0.0001" if p < 1e-4 else f"{p:.4f}", p)


def _notes(base: Entry, chosen: Rule, pairs: Mapping[str, stats.Paired], rows: Sequence[Sequence[Cell]]) -> str:
    words = {cell.text for row in rows for cell in row}
    tested = sum(d.p is not None for d in pairs.values())
    fixed = base.runs[0].protocol.get("partition_seed") != "run"
    parts = [
        f"Percentage points, {chosen.label} of finished runs, method minus {escape(base.label)}; a pair is a seed, which "
        "shares the split and the streams of initial weights, client draws and batches.",
        "±: sd of the differences over seeds, n-1." if any(d.n > 1 for d in pairs.values()) else "",
        f"p: two-sided paired t-test; corrected by Holm's method for the {tested} tested methods of this table; the interval "
        "is the test's, not corrected."
        if tested
        else f"With fewer than {stats.FEWEST} seeds no test is made.",
        "*Same sign*: seeds whose difference has the sign of the mean.",
        "What another split would change is not in it: the split is the same for all seeds." if fixed else "",
        f"*{OTHER}*: PM over other clients than the baseline's is not compared." if OTHER in words else "",
        f"`{MISSING}`: no test, or not measured." if MISSING in words else "",
    ]
    return " ".join(filter(None, parts))


# ---- ranks ------------------------------------------------------------------------------------------------


def ranks(made: Report) -> list[Block]:
    """The rank of every method in every setting by the mean headline GM, and its mean rank; nothing for one method."""
    seeds = {(s.number, e.label): by_seed(e, "gm", s.headline) for s in made.settings for e in s.entries}
    labels = list(dict.fromkeys(label for (_, label), known in seeds.items() if known))
    by_setting = {
        s.number: _ranked({k: statistics.fmean(v.values()) for k in labels if (v := seeds.get((s.number, k)))})
        for s in made.settings
    }
    labels = [k for k in labels if any(k in ranked for ranked in by_setting.values())]
    if not labels:
        return []
    full = [n for n, ranked in by_setting.items() if len(ranked) == len(labels)]
    pairs = [
        _ranked({k: seeds[n, k][seed] for k in labels})
        for n in full
        for seed in sorted(set.intersection(*(set(seeds[n, k]) for k in labels)))
    ]
    means = {"mean over settings": [by_setting[n] for n in full], "mean over seeds": pairs}
    means = {head: many for head, many in means.items() if len(many) > 1}
    heads = ["method", *(f"setting {n}" if len(by_setting) > 1 else "rank" for n in by_setting), *means]
    rows = [
        [
            Cell(label),
            *(_rank(ranked.get(label)) for ranked in by_setting.values()),
            *(number_cell(statistics.fmean(one[label] for one in many), 2) for many in means.values()),
        ]
        for label in labels
    ]
    over = {
        "mean over settings": f"settings in which all methods have a number ({len(full)})",
        "mean over seeds": f"pairs of setting and seed in which all have one ({len(pairs)})",
    }
    notes = [
        f"1: highest mean GM, {' / '.join(dict.fromkeys(s.headline.label for s in made.settings))}; equal ones share the mean "
        "of their ranks; finished runs alone.",
        f"Means over the {' and the '.join(over[head] for head in means)}." if means else "",
        f"`{MISSING}`: no number of a finished run to be ranked." if any(c.text == MISSING for r in rows for c in r) else "",
    ]  # fmt: skip
    return [made.table(Table("ranks", "Ranks", heads, rows, " ".join(filter(None, notes))))]


def _ranked(values: Mapping[str, float]) -> dict[str, float]:
    """The ranks of two or more."""
    return dict(zip(values, stats.ranks([round(v, 9) for v in values.values()]))) if len(values) > 1 else {}


def _rank(rank: float | None) -> Cell:
    return Cell(MISSING) if rank is None else Cell(f"{rank:g}", rank)


# ---- target -----------------------------------------------------------------------------------------------


class Reached(NamedTuple):
    """What a run had spent when it first reached a target: rounds, MB (1e6 bytes), seconds without evaluation."""

    rounds: int
    mb: float | None
    seconds: float | None


def reached(entry: Entry, run: Run, target: float) -> Reached | None:
    """The first evaluated round with a GM of the target (a share of 1) or more, and the spending until then; None: never."""
    rows = entry.rows(run)
    spent = frames.spent(rows)
    for row in rows:
        gm = value(row, "gm") if row["round"] >= 0 else None
        if gm is not None and gm >= target - SAME:
            until = spent[row["round"]]
            return Reached(row["round"] + 1, until["mb"], until["seconds"])
    return None


def target(made: Report, s: Setting, wanted: float | None = None, base: str | None = None) -> list[Block]:
    """Rounds, bytes and seconds to a target GM (a share of 1); by default the baseline's mean headline (MOON, Table 2)."""
    reference = baseline(s, base)
    known = by_seed(reference, "gm", s.headline)
    used = [e for e in s.entries if e.used]
    measured = any(value(row, "gm") is not None for e in used for run in e.used for row in e.rows(run))
    if not measured or (wanted is None and not known):
        return []
    goal = statistics.fmean(known.values()) if wanted is None else wanted
    rows = [_target(e, goal) for e in used]
    what = f"the mean GM ({s.headline.label}) of {escape(reference.label)}" if wanted is None else "as asked for"
    open_ = ", ".join(escape(e.label) for e in used if not e.finished)
    notes = [
        f"Target: {100 * goal:.2f} %, {what}. Rounds until an evaluated round first has it; MB: all bytes sent and received "
        "until then, with the exchanges before round 0 and after the last and with constants; seconds of training, prototype "
        "pass and aggregation, evaluation apart. Means over the seeds that reach it. Which seeds do is part of the result: "
        "read the last column first.",
        f"Not finished: {open_}." if open_ else "",
        f"`{MISSING}`: not reached, or not measured." if any(c.text == MISSING for r in rows for c in r) else "",
    ]
    heads = ["method", "rounds", "MB", "seconds", "reached by"]
    name = made.name("target", s)
    return [made.table(Table(name, "Cost of a target accuracy", heads, rows, " ".join(filter(None, notes))))]


def _target(entry: Entry, goal: float) -> list[Cell]:
    found = [reached(entry, run, goal) for run in entry.used]
    hit = [one for one in found if one is not None]
    count = Cell(f"{len(hit)} of {len(found)} seeds", len(hit) / len(found))
    if not hit:
        return [Cell(entry.label), Cell(_never(entry)), Cell(MISSING), Cell(MISSING), count]
    known = [[v for one in hit if (v := getattr(one, name)) is not None] for name in Reached._fields]
    shown = [number_cell(statistics.fmean(v) if len(v) == len(hit) else None, 1) for v in known]
    return [Cell(entry.label), *shown, count]


def _never(entry: Entry) -> str:
    """Why a method has not reached the target."""
    rows = [entry.rows(run) for run in entry.used]
    if any(value(row, "gm") is not None for many in rows for row in many):
        return f"not reached in {max(sum(row['round'] >= 0 for row in many) for many in rows)} rounds"
    return lacking(entry, "gm")
