"""Paired differences, ranks, targets and the papers' numbers, against plain Python over the raw records."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scipy import stats as scipy_stats

from protofl.report import comparison, papers, runs, stats
from protofl.report.blocks import Table
from protofl.report.content import Report

Write = Callable[..., Path]


def made(folder: Path, out: Path, **more: Any) -> Report:
    out.mkdir()
    return Report(runs([folder]), out, **more)


def found(blocks: list[Any], title: str) -> dict[str, list[str]]:
    """The rows of a table by their first cell."""
    (table,) = [b for b in blocks if isinstance(b, Table) and b.title.startswith(title)]
    return {row[0].text: [cell.text for cell in row[1:]] for row in table.rows}


def last(folder: Path) -> list[float]:
    """The last GM of every run of a method, by seed."""
    told = {}
    for path in folder.glob("*/protocol.json"):
        document = json.loads(path.read_text())
        rows = [json.loads(line) for line in (path.parent / "rounds.jsonl").read_text().splitlines()]
        told[document["method"]["name"], document["protocol"]["seed"]] = rows[-1]["gm"]
    return told  # type: ignore[return-value]


# ---- statistics ------------------------------------------------------------------------------------------------


def test_paired_is_scipys() -> None:
    a, b = [0.61, 0.64, 0.59, 0.66, 0.63, 0.70], [0.60, 0.60, 0.60, 0.61, 0.62, 0.66]
    got, want = stats.paired(a, b), scipy_stats.ttest_rel(a, b)
    interval = want.confidence_interval(0.95)
    assert got.n == 6 and got.mean == pytest.approx(statistics.fmean(a) - statistics.fmean(b))
    assert (got.low, got.high, got.p) == pytest.approx((interval.low, interval.high, want.pvalue))
    assert got.same_sign == 5


def test_paired_without_a_test_and_without_spread() -> None:
    few = stats.paired([0.5, 0.6], [0.4, 0.6])
    assert few.n == 2 and few.mean == pytest.approx(0.05) and few.sd is not None
    assert (few.low, few.high, few.p) == (None, None, None)
    assert stats.paired([0.5], [0.4]).sd is None
    assert stats.paired([0.75] * 5, [0.5] * 5)[4:] == (0.25, 0.25, 0.0)
    assert stats.paired([0.5] * 5, [0.5] * 5).p == 1.0


def test_holm() -> None:
    assert stats.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert stats.holm([0.5, 0.9]) == [1.0, 1.0] and stats.holm([]) == []


def test_ranks_share_ties() -> None:
    values = [0.5, 0.7, 0.5, 0.9]
    assert stats.ranks(values) == [3.5, 2, 3.5, 1] == list(5 - scipy_stats.rankdata(values))


# ---- differences -----------------------------------------------------------------------------------------------


def test_differences_against_the_records(write: Write, tmp_path: Path) -> None:
    ends = {"fedavg": [0.60, 0.62, 0.58, 0.61, 0.63], "moon": [0.63, 0.66, 0.60, 0.66, 0.64], "fednh": [0.59] * 5}
    for method, values in ends.items():
        for seed, v in enumerate(values):
            folder = write(method, seed, (0.3, v))
    report = made(folder.parent, tmp_path / "out")
    got = found(comparison.differences(report, report.settings[0]), "GM: difference to FedAvg")
    told: Any = last(folder.parent)
    ps = {}
    for method, label in (("moon", "MOON"), ("fednh", "FedNH")):
        test = scipy_stats.ttest_rel(*([told[m, k] for k in range(5)] for m in (method, "fedavg")))
        low, high = test.confidence_interval(0.95)
        d = [100 * (told[method, k] - told["fedavg", k]) for k in range(5)]
        assert got[label][0] == f"{statistics.fmean(d):+.2f} ± {statistics.stdev(d):.2f}"
        assert got[label][1] == f"{100 * low:+.2f} to {100 * high:+.2f}" and got[label][-1] == "5"
        ps[label] = test.pvalue
        assert got[label][2] == f"{test.pvalue:.4f}"
    smaller, larger = sorted(ps, key=lambda k: ps[k])
    assert got[smaller][3] == f"{2 * ps[smaller]:.4f}" and got[larger][3] == f"{max(2 * ps[smaller], ps[larger]):.4f}"


def test_few_seeds_and_unlike_seeds(write: Write, tmp_path: Path) -> None:
    for seed in range(3):
        write("fedavg", seed, (0.5,))
        folder = write("moon", seed + 1, (0.6,))
    write("fedprox", 0, (0.5, 0.6), status="running")
    report = made(folder.parent, tmp_path / "out")
    blocks = comparison.differences(report, report.settings[0])
    got = found(blocks, "GM")
    assert got["MOON"] == ["+10.00 ± 0.00", "no test: n < 5", "-", "-", "2 of 2", "2"]
    assert "no test is possible" in blocks[-1].notes  # type: ignore[union-attr]


def test_baseline_is_fedavg_else_the_first_else_as_asked(write: Write, tmp_path: Path) -> None:
    write("fedprox", 0, (0.5,))
    folder = write("moon", 0, (0.6,))
    report = made(folder.parent, tmp_path / "out")
    (s,) = report.settings
    assert comparison.baseline(s, None).method == "fedprox" and comparison.baseline(s, "moon").method == "moon"
    assert comparison.baseline(s, "MOON").method == "moon"
    assert found(comparison.differences(report, s, "moon"), "GM: difference to MOON")["FedProx"][0] == "-10.00"


# ---- ranks -----------------------------------------------------------------------------------------------------


def test_ranks_over_settings(write: Write, tmp_path: Path) -> None:
    ends = {0.1: {"fedavg": (0.5, 0.3), "moon": (0.4, 0.5), "fednh": (0.5, 0.4)},
            0.5: {"fedavg": (0.5, 0.5), "moon": (0.6, 0.6), "fednh": (0.7, 0.5)}}  # fmt: skip
    for beta, methods in ends.items():
        for method, values in methods.items():
            for seed, v in enumerate(values):
                folder = write(method, seed, (v,), protocol={"beta": beta})
    write("solo", 0, (None,), protocol={"beta": 0.5})
    report = made(folder.parent, tmp_path / "out")
    got = found(comparison.ranks(report), "Ranks")
    # SOLO has no GM: it has no rank, and no pair has all methods
    assert got == {"FedAvg": ["3", "3"], "MOON": ["1.5", "1.5"], "FedNH": ["1.5", "1.5"]}


def test_ranks_over_pairs(write: Write, tmp_path: Path) -> None:
    for seed, (a, b) in enumerate([(0.5, 0.6), (0.7, 0.6), (0.5, 0.5)]):
        write("fedavg", seed, (a,))
        folder = write("moon", seed, (b,))
    report = made(folder.parent, tmp_path / "out")
    assert found(comparison.ranks(report), "Ranks") == {"FedAvg": ["1.5", "1.50"], "MOON": ["1.5", "1.50"]}


# ---- target ----------------------------------------------------------------------------------------------------


def test_target_against_the_records(write: Write, line: Any, tmp_path: Path) -> None:
    write("fedavg", 0, (0.2, 0.4, 0.5))
    write("fedavg", 1, (0.2, 0.4, 0.7))
    before = line(-1, None, [0, 1], gm_scores={}, bytes_up=5_000_000, bytes_once=1_000_000)
    rows = [before, *(line(t, v, [0, 1]) for t, v in enumerate((0.1, 0.65, 0.3)))]
    write("fedproc", 0, (0.1, 0.65, 0.3), rows=rows)
    write("fedproc", 1, (0.1, 0.2, 0.3))
    folder = write("fednh", 0, (0.1, 0.2, 0.3))
    report = made(folder.parent, tmp_path / "out")
    got = found(comparison.target(report, report.settings[0]), "Cost of a target")
    assert got["FedAvg"] == ["3.0", f"{3 * 20 * 0.370504:.1f}", f"{3 * 3.51:.1f}", "1 of 2 seeds"]
    moved = (5_000_000 + 1_000_000 + 2 * 370_504 + 2 * 4 * 370_504) / 1e6
    assert got["FedProc"] == ["2.0", f"{moved:.1f}", f"{3 * 3.51:.1f}", "1 of 2 seeds"]
    assert got["FedNH"] == ["not in 3", "-", "-", "0 of 1 seeds"]
    wanted = found(comparison.target(report, report.settings[0], 0.39), "Cost of a target")
    assert wanted["FedAvg"][0] == "2.0" and wanted["FedAvg"][-1] == "2 of 2 seeds"


# ---- papers ----------------------------------------------------------------------------------------------------


def test_the_papers_nearest_row_and_what_differs(write: Write, tmp_path: Path) -> None:
    write("fedavg", 0, (0.2,))
    folder = write("moon", 0, (0.6910,) * 100, options={"mu": 5.0})
    report = made(folder.parent, tmp_path / "out")
    rows = [b for s in report.settings for b in papers.against_papers(report, s)]
    got = [[c.text for c in row] for table in rows if isinstance(table, Table) for row in table.rows]
    moon = next(row for row in got if row[0] == "MOON" and row[5] == "MOON")
    assert moon[1:5] == ["GM", "69.10", "69.1 ± 0.4", "+0.0"] and moon[6:] == ["Table 1", "none", "nothing"]
    fedavg = next(row for row in got if row[0] == "FedAvg" and row[5] == "MOON")
    assert fedavg[3] == "66.3 ± 0.5" and fedavg[7] == "rounds 100 / 1"


def test_no_paper_no_table(write: Write, tmp_path: Path) -> None:
    folder = write("fedavg", 0, (0.2,), protocol={"dataset": "digits"})
    report = made(folder.parent, tmp_path / "out")
    assert papers.against_papers(report, report.settings[0]) == []


def test_every_printed_row_is_read() -> None:
    for row in papers.printed():
        assert row["dataset"] in papers.DATASETS and 0 < float(row["mean"]) < 100 and row["source"]
        method, options = papers.named(row)
        assert method or row["method"].startswith(("none", "l2 norm"))
        assert all(float(v) > 0 for v in options.values())
    assert papers.metric(next(r for r in papers.printed() if r["method"] == "SOLO"))[0] == "pm_uniform"
