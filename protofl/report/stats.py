"""Paired comparisons: runs of the same seed share split, initial weights, draws and batches, so that they make pairs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

FEWEST = 5
"""With fewer pairs no test is made."""


class Paired(NamedTuple):
    """Differences a - b over pairs. low, high: 95 % interval of the mean; p: two-sided paired t-test; None: no test."""

    n: int
    mean: float
    sd: float | None
    same_sign: int
    low: float | None
    high: float | None
    p: float | None


def paired(a: Sequence[float], b: Sequence[float]) -> Paired:
    """Compare pairs of accuracies (shares of 1); of fewer than FEWEST there is neither interval nor p.

    Equal differences have p = 0, or 1 if they are 0. same_sign: pairs whose difference has the sign of the mean. Raises
    ValueError without pairs, or for sequences of unlike length.
    """
    from scipy.stats import t

    differences = [round(x - y, 12) for x, y in zip(a, b, strict=True)]  # 0.62 - 0.6 is not quite 0.52 - 0.5
    n, mean = len(differences), statistics.fmean(differences)
    sd = statistics.stdev(differences) if n > 1 else None
    same_sign = sum(d * mean > 0 for d in differences)
    if n < FEWEST or sd is None:
        return Paired(n, mean, sd, same_sign, None, None, None)
    if sd == 0:
        return Paired(n, mean, sd, same_sign, mean, mean, 0.0 if mean else 1.0)
    error = sd / math.sqrt(n)
    half = float(t.ppf(0.975, n - 1)) * error
    return Paired(n, mean, sd, same_sign, mean - half, mean + half, float(2 * t.sf(abs(mean) / error, n - 1)))


def holm(ps: Sequence[float]) -> list[float]:
    """p values corrected for their number (Holm 1979), in the given order."""
    order = sorted(range(len(ps)), key=lambda i: ps[i])
    out, highest = [0.0] * len(ps), 0.0
    for k, i in enumerate(order):
        highest = max(highest, min(1.0, (len(ps) - k) * ps[i]))
        out[i] = highest
    return out


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from the highest value, 1, on; equal ones share the mean of theirs."""
    return [sum(w > v for w in values) + (1 + sum(w == v for w in values)) / 2 for v in values]
