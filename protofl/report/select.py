"""Which round is reported (protocol 5.5): named rules over the evaluated rounds of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .read import number

Row = Mapping[str, Any]

METRICS = ("gm", "pm_v", "pm_l", "pm_uniform")
"""The accuracies that make a round an evaluated one."""

KINDS = {"gm": "GM", "pm_v": "PM(V)"}
"""The two that methods are compared by, as they are called: of the global model, of the clients' own."""

SAME = 1e-9
"""Shares nearer than this are equal: the mean of equal numbers may differ from them in its last bit."""


def value(row: Row, metric: str) -> float | None:
    """A metric of a row; `gm:network`: the reading `network` of the GM. None: not measured or not defined."""
    told, key = _place(row, metric)
    return number(told.get(key))


def _place(row: Row, metric: str) -> tuple[Row, str]:
    """Where a row has a metric; readings of personal models lie by reading, then by weighting."""
    name, _, reading = metric.partition(":")
    if not reading:
        return row, name
    if name == "gm":
        return row.get("gm_scores", {}), reading
    return row.get("pm_scores", {}).get(reading, {}), name.removeprefix("pm_")


def undefined(row: Row, metric: str) -> bool:
    """Whether a row says that the metric means nothing for its method; not: that it was not measured."""
    told, key = _place(row, metric)
    return key in told and told[key] is None


def evaluated(rows: Sequence[Row]) -> list[Row]:
    """The rounds in which an accuracy was measured."""
    return [r for r in rows if r["round"] >= 0 and any(value(r, m) is not None for m in METRICS)]


def mean(chosen: Sequence[Row], metric: str) -> float | None:
    """The mean of a metric over chosen rounds; None if one of them lacks it, or there are none."""
    found = [value(r, metric) for r in chosen]
    known = [v for v in found if v is not None]
    return math.fsum(known) / len(known) if known and len(known) == len(found) else None


@dataclass(frozen=True)
class Rule:
    """A way to get one number out of many rounds. `peeks`: whether it looks at test results to choose."""

    name: str
    label: str
    short: str
    choose: Callable[[Sequence[Row]], Sequence[Row]]
    peeks: bool = False

    def rows(self, rows: Sequence[Row]) -> Sequence[Row]:
        """The rounds that are reported."""
        return self.choose(evaluated(rows))

    def __call__(self, rows: Sequence[Row], metric: str) -> float | None:
        """The mean of a metric over the chosen rounds; None if one of them lacks it."""
        return mean(self.rows(rows), metric)

    def round(self, rows: Sequence[Row]) -> int | None:
        """The (last) round that is reported."""
        return next((int(r["round"]) for r in reversed(self.rows(rows))), None)


def _best(rows: Sequence[Row]) -> Sequence[Row]:
    """The first round with the highest GM, or PM(V) where no round has a GM."""
    metric = "gm" if any(value(r, "gm") is not None for r in rows) else "pm_v"
    known = [(v, r) for r in rows if (v := value(r, metric)) is not None]
    top = max((v for v, _ in known), default=None)
    return [r for v, r in known if v == top][:1]


last = Rule("last", "last round", "last", lambda rows: rows[-1:])
mean_last_5 = Rule("mean_last_5", "mean of last 5 evaluated rounds", "mean of last 5", lambda rows: rows[-5:])
best = Rule("best", "best (picked on test)", "best (picked on test)", _best, peeks=True)

RULES = {rule.name: rule for rule in (last, mean_last_5, best)}
