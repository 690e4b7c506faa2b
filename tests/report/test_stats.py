"""Paired tests, corrections and ranks: against SciPy and against numbers worked out by hand."""

from __future__ import annotations

import math
import statistics
import warnings

import numpy as np
import pytest
from scipy import stats as scipy_stats

from protofl.report import stats


@pytest.mark.parametrize("n", [5, 6, 20])
def test_paired_is_scipys(n: int) -> None:
    rs = np.random.RandomState(n)
    a, b = rs.normal(0.65, 0.02, n).tolist(), rs.normal(0.63, 0.02, n).tolist()
    got, want = stats.paired(a, b), scipy_stats.ttest_rel(a, b)
    interval = want.confidence_interval(0.95)
    assert got.n == n and got.mean == pytest.approx(statistics.fmean(a) - statistics.fmean(b))
    assert got.sd == pytest.approx(np.std(np.subtract(a, b), ddof=1))
    assert (got.low, got.high, got.p) == pytest.approx((interval.low, interval.high, want.pvalue))
    assert got.same_sign == sum((x > y) == (got.mean > 0) for x, y in zip(a, b))


def test_paired_by_hand() -> None:
    # differences 1 2 3 4 5 %: mean 3, sd sqrt(2.5), error sqrt(0.5); t(0.975, 4) = 2.776445
    got = stats.paired([0.51, 0.52, 0.53, 0.54, 0.55], [0.5] * 5)
    half = 0.01 * 2.776445 * math.sqrt(0.5)
    assert (got.mean, got.sd, got.low, got.high) == pytest.approx(
        (0.03, 0.01 * math.sqrt(2.5), 0.03 - half, 0.03 + half), abs=1e-8
    )
    # t = 3 / sqrt(0.5) = 4.242641, two-sided with 4 degrees of freedom
    assert got.p == pytest.approx(0.013235, abs=1e-6) and got.same_sign == 5


def test_fewer_than_five_pairs_are_not_tested() -> None:
    few = stats.paired([0.5, 0.6, 0.7, 0.7], [0.4, 0.6, 0.8, 0.5])
    assert few.n == 4 and few.mean == pytest.approx(0.05) and few.same_sign == 2
    assert few.sd == pytest.approx(statistics.stdev([0.1, 0.0, -0.1, 0.2]))
    assert (few.low, few.high, few.p) == (None, None, None)
    assert stats.paired([0.5], [0.4]) == (1, pytest.approx(0.1), None, 1, None, None, None)


def test_equal_differences_have_no_spread_and_give_no_warning() -> None:
    # 0.62 - 0.6 and 0.52 - 0.5 differ in their last bits: the spread is rounding, and none is reported
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same = stats.paired([0.62, 0.52, 0.42, 0.72, 0.92], [0.6, 0.5, 0.4, 0.7, 0.9])
        none = stats.paired([0.5, 0.6, 0.7, 0.8, 0.9], [0.5, 0.6, 0.7, 0.8, 0.9])
        lower = stats.paired([0.5] * 6, [0.75] * 6)
    assert same == (5, 0.02, 0.0, 5, 0.02, 0.02, 0.0)
    assert none == (5, 0.0, 0.0, 0, 0.0, 0.0, 1.0)
    assert (lower.mean, lower.p, lower.same_sign) == (-0.25, 0.0, 6)


def test_the_order_of_a_pair_is_the_sign() -> None:
    a, b = [0.61, 0.64, 0.59, 0.66, 0.63], [0.60, 0.60, 0.60, 0.61, 0.62]
    one, other = stats.paired(a, b), stats.paired(b, a)
    assert one.mean == -other.mean and one.p == other.p and one.same_sign == other.same_sign == 4
    assert one.low is not None and other.high is not None and one.low == pytest.approx(-other.high)


def test_pairs_must_be_pairs() -> None:
    with pytest.raises(ValueError):
        stats.paired([0.5, 0.6], [0.5])
    with pytest.raises(ValueError):
        stats.paired([], [])


def test_holm() -> None:
    # sorted .01 .03 .04, times 3 2 1: .03 .06 .04, and no smaller than the one before: .03 .06 .06
    assert stats.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert stats.holm([0.02]) == [0.02] and stats.holm([]) == []
    assert stats.holm([0.5, 0.9]) == [1.0, 1.0]
    assert stats.holm([0.0, 0.0, 1.0]) == [0.0, 0.0, 1.0]


def test_holm_rejects_step_by_step() -> None:
    """The corrected p is the smallest level at which Holm's procedure, step by step, rejects."""
    ps = np.random.RandomState(0).random_sample(7) ** 3

    def rejects(level: float) -> set[int]:
        out: set[int] = set()
        for k, i in enumerate(np.argsort(ps)):
            if ps[i] * (len(ps) - k) > level:
                break
            out.add(int(i))
        return out

    corrected = stats.holm(ps.tolist())
    for i, p in enumerate(corrected):
        assert i not in rejects(p - 1e-9) and (p == 1 or i in rejects(p + 1e-9))


@pytest.mark.parametrize("values", [[0.5, 0.7, 0.5, 0.9], [0.3], [0.1, 0.1, 0.1], [0.9, 0.8, 0.7], []])
def test_ranks_are_scipys_from_the_top(values: list[float]) -> None:
    assert stats.ranks(values) == list(scipy_stats.rankdata([-v for v in values]))


def test_ranks_share_ties() -> None:
    assert stats.ranks([0.5, 0.7, 0.5, 0.9]) == [3.5, 2, 3.5, 1]
