"""The data behind the figures: functions from runs to tidy frames."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pandas as pd

from .groups import Entry, Setting
from .read import Run, counts, number
from .select import METRICS, Row, value
from .tables import frame

CURVES = ["setting", "method", "label", "variant", "metric", "round", "n", "mean", "low", "high", "fate"]
SPENT: dict[str, tuple[float, tuple[str, ...]]] = {
    "mb": (1e6, ("bytes_down", "bytes_up", "bytes_once")),
    "seconds": (1.0, ("train", "prototype", "aggregate")),
    "evaluation": (1.0, ("evaluate",)),
}
"""What is spent: its unit, and the parts of a row that add up to it."""

SPLIT = ["setting", "seed", "client", "class", "samples"]


def curves(made: Sequence[Setting]) -> pd.DataFrame:
    """Setting x method x metric x round -> mean, lowest and highest of the seeds, as shares of 1.

    `loss` is that of the test. Only rounds that all seeds in use have; a method whose runs all diverged is
    followed until then.
    """
    return _over_rounds(made, lambda entry: [*METRICS, "loss"], value)


def budget(made: Sequence[Setting]) -> pd.DataFrame:
    """As `curves`, with what was spent until the round is evaluated, means over the seeds.

    `mb`: all bytes sent and received, in 1e6, constants and the exchanges before round 0 and after the last included;
    `seconds`: training, prototype pass and aggregation; `evaluation`: seconds of evaluation. Missing where a seed has no
    record of it.
    """
    shown = curves(made)
    bills = {(s.number, e.label): _bill(e) for s in made for e in s.entries if e.drawn}
    points = zip(shown["setting"], shown["label"], shown["round"])
    told = frame((bills[s, label][t] for s, label, t in points), list(SPENT))
    return shown.join(told.set_index(shown.index))


def _bill(entry: Entry) -> dict[int, dict[str, float | None]]:
    """Round -> what was spent until then, means over the seeds; only rounds that all have."""
    bills = [spent(entry.rows(run)) for run in entry.drawn]
    made: dict[int, dict[str, float | None]] = {}
    for t in bills[0]:
        if all(t in bill for bill in bills):
            known = {n: [v for bill in bills if (v := bill[t][n]) is not None] for n in SPENT}
            made[t] = {n: statistics.fmean(v) if len(v) == len(bills) else None for n, v in known.items()}
    return made


def spent(rows: Sequence[Row]) -> dict[int, dict[str, float | None]]:
    """Round -> what a run has spent when the round is evaluated (see `budget`); None: a part of it is not recorded."""
    total: dict[str, float] = {}
    made = {}
    for row in rows:
        for bill in (row, row.get("final")):
            if isinstance(bill, dict):
                _add(total, bill)
        made[row["round"]] = {
            name: sum(total[p] for p in parts) / unit if all(p in total for p in parts) else None
            for name, (unit, parts) in SPENT.items()
        }
    return made


def _add(total: dict[str, float], row: Row) -> None:
    """Add what a row was billed, by part."""
    seconds = row.get("seconds")
    told = {**row, **seconds} if isinstance(seconds, dict) else row
    for part in (p for _, parts in SPENT.values() for p in parts):
        if (v := number(told.get(part))) is not None:
            total[part] = total.get(part, 0.0) + v


def terms(made: Sequence[Setting]) -> pd.DataFrame:
    """Setting x method x term of the training loss x round -> mean, lowest and highest of the seeds."""
    return _over_rounds(made, _terms, lambda row, name: number(row.get("terms", {}).get(name)))


def _terms(entry: Entry) -> list[str]:
    rows = [r for run in entry.drawn for r in run.rounds]
    return list(dict.fromkeys(name for r in rows for name in r.get("terms", {})))


def _over_rounds(
    made: Sequence[Setting], names: Callable[[Entry], list[str]], read: Callable[[Row, str], float | None]
) -> pd.DataFrame:
    return frame(
        (
            {**whose(s, e), "metric": name, **point}
            for s in made
            for e in s.entries
            if e.drawn
            for name in names(e)
            for point in _points(e, name, read)
        ),
        CURVES,
    )


def whose(setting: Setting, entry: Entry) -> dict[str, Any]:
    """Whose point it is, and what became of the runs behind it."""
    return {
        "setting": setting.number,
        "method": entry.method,
        "label": entry.label,
        "variant": entry.variant,
        "fate": entry.drawn[0].status,
    }


def _points(entry: Entry, name: str, read: Callable[[Row, str], float | None]) -> Iterator[dict[str, Any]]:
    """The rounds in which all seeds have the number."""
    found: dict[int, list[float]] = {}
    for run in entry.drawn:
        for row in entry.rows(run):
            if row["round"] >= 0 and (v := read(row, name)) is not None:
                found.setdefault(row["round"], []).append(v)
    for t in sorted(found):
        seeds = found[t]
        if len(seeds) == len(entry.drawn):
            yield {
                "round": t,
                "n": len(seeds),
                "mean": statistics.fmean(seeds),
                "low": min(seeds),
                "high": max(seeds),
            }


def split_run(setting: Setting) -> Run | None:
    """The run whose split is shown: the first, by seed, that has one."""
    known = [run for run in setting.runs if counts(run.partition) is not None]
    return min(known, key=lambda run: run.seed, default=None)


def split(made: Sequence[Setting]) -> pd.DataFrame:
    """Setting x client x class -> samples."""
    return frame(
        (
            {
                "setting": s.number,
                "seed": run.seed,
                "client": i,
                "class": class_name(run, c),
                "samples": int(n),
            }
            for s in made
            if (run := split_run(s)) is not None and (table := counts(run.partition)) is not None
            for i, line in enumerate(table)
            for c, n in enumerate(line)
        ),
        SPLIT,
    )


def class_name(run: Run, c: int) -> str:
    """The name of a class, or its number where the record has none."""
    names = run.data.get("classes", [])
    return str(names[c]) if 0 <= c < len(names) else str(c)
