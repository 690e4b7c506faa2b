"""Selection rules against the examples of the protocol."""

from __future__ import annotations

from typing import Any

import pytest

from protofl.report import select


def rows(*values: float | None, metric: str = "gm") -> list[dict[str, Any]]:
    return [{"round": t, metric: v} for t, v in enumerate(values)]


def test_protocol_example() -> None:
    found = rows(0.60, 0.62, 0.65, 0.63, 0.64)
    assert select.last(found, "gm") == pytest.approx(0.64, abs=1e-15)
    assert select.best(found, "gm") == pytest.approx(0.65, abs=1e-15)
    assert select.mean_last_5(found, "gm") == pytest.approx(0.628, abs=1e-15)
    assert [rule.round(found) for rule in select.RULES.values()] == [4, 4, 2]
    assert [rule.peeks for rule in select.RULES.values()] == [False, False, True]


def test_only_evaluated_rounds_count() -> None:
    found = rows(None, 0.1, None, 0.2, None, 0.3, 0.4, None, 0.5, 0.6, None)
    assert select.last(found, "gm") == 0.6
    assert select.mean_last_5(found, "gm") == pytest.approx((0.2 + 0.3 + 0.4 + 0.5 + 0.6) / 5)


def test_first_of_equal_best_rounds() -> None:
    assert select.best.round(rows(0.1, 0.7, 0.2, 0.7)) == 1


def test_best_goes_by_gm_and_reads_the_other_metrics_there() -> None:
    found = [{"round": 0, "gm": 0.5, "pm_v": 0.6}, {"round": 1, "gm": 0.4, "pm_v": 0.9}]
    assert select.best(found, "pm_v") == 0.6


def test_best_goes_by_pm_v_without_a_gm() -> None:
    found = [{"round": t, "gm": None, "pm_v": v, "pm_l": v / 2} for t, v in enumerate((0.3, 0.8, 0.4))]
    assert select.best(found, "pm_l") == 0.4
    assert select.best(found, "gm") is None


def test_missing_is_never_zero() -> None:
    assert select.last([], "gm") is None
    assert select.best(rows(None, None), "gm") is None
    assert select.last(rows(float("nan")), "gm") is None
    half = [{"round": 0, "gm": 0.5}, {"round": 1, "gm": 0.5, "pm_v": 0.7}]
    assert select.mean_last_5(half, "pm_v") is None


def test_the_exchange_before_round_0_is_no_round() -> None:
    assert select.evaluated([{"round": -1, "gm": 0.1}]) == []


def test_readings() -> None:
    found = [{"round": 0, "gm": 0.5, "gm_scores": {"network": 0.4, "exemplar": None}}]
    assert select.last(found, "gm:network") == 0.4
    assert select.last(found, "gm:exemplar") is None
