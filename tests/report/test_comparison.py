"""Paired differences, ranks and targets, against plain Python and SciPy over the raw records."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats as scipy_stats

from protofl.report import comparison, runs, select
from protofl.report.blocks import Heading, Table
from protofl.report.content import Report

Write = Callable[..., Path]
Records = dict[tuple[str, int], list[dict[str, Any]]]


def made(folder: Path, out: Path, **more: Any) -> Report:
    out.mkdir()
    return Report(runs([folder]), out, **more)


def table(blocks: list[Any], title: str) -> Table:
    (one,) = [b for b in blocks if isinstance(b, Table) and b.title.startswith(title)]
    assert all(len(row) == len(one.heads) for row in one.rows)
    return one


def found(blocks: list[Any], title: str) -> dict[str, list[str]]:
    """The rows of a table by their first cell."""
    return {row[0].text: [cell.text for cell in row[1:]] for row in table(blocks, title).rows}


def records(folder: Path) -> Records:
    """The lines of every run, by method and seed."""
    told = {}
    for path in folder.glob("*/protocol.json"):
        document = json.loads(path.read_text())
        lines = (path.parent / "rounds.jsonl").read_text().splitlines()
        told[document["method"]["name"], document["protocol"]["seed"]] = [json.loads(line) for line in lines]
    return told


# ---- the baseline ----------------------------------------------------------------------------------------------


def test_baseline_is_fedavg_else_the_first_or_as_asked(write: Write, tmp_path: Path) -> None:
    write("fedprox", 0, (0.5,))
    folder = write("moon", 0, (0.6,))
    report = made(folder.parent, tmp_path / "out")
    (s,) = report.settings
    assert comparison.baseline(s, None).method == "fedprox"
    assert comparison.baseline(s, "moon").method == comparison.baseline(s, "MOON").method == "moon"
    assert found(comparison.differences(report, s, "moon"), "GM: difference to MOON")["FedProx"][0] == "-10.00"


def test_a_setting_without_the_wanted_baseline_takes_fedavg(write: Write, tmp_path: Path) -> None:
    write("creff", 0, (0.5,))
    folder = write("fedavg", 0, (0.6,))
    (s,) = made(folder.parent, tmp_path / "out").settings
    assert s.entries[0].method == "creff" and comparison.baseline(s, "moon").method == "fedavg"


# ---- differences -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("headline", ["last", "mean_last_5"])
def test_differences_against_the_records(write: Write, line: Any, tmp_path: Path, headline: str) -> None:
    rs = np.random.RandomState(1)
    for method, top in {"fedavg": 0.60, "moon": 0.63, "fednh": 0.605, "fedproc": 0.55}.items():
        for seed in range(7):
            gm = [round(float(v), 4) for v in top + rs.normal(0, 0.02, 8)]
            lines = [line(t, v, range(10), pm_v=round(1.1 * v, 4)) for t, v in enumerate(gm)]
            folder = write(method, seed, gm, rows=lines, protocol={"report": headline})
    report = made(folder.parent, tmp_path / "out")
    blocks = comparison.differences(report, report.settings[0])
    told = records(folder.parent)
    assert blocks[0] == Heading("Differences between methods", 3)

    for metric, word in (("gm", "GM"), ("pm_v", "PM(V)")):
        rounds = 5 if headline == "mean_last_5" and metric == "gm" else 1
        ends = {k: statistics.fmean(row[metric] for row in rows[-rounds:]) for k, rows in told.items()}
        got = found(blocks, f"{word}: difference to FedAvg")
        assert list(got) == ["FedNH", "FedProc", "MOON"]
        ps = {}
        for label, method in (("MOON", "moon"), ("FedNH", "fednh"), ("FedProc", "fedproc")):
            a, b = ([ends[m, seed] for seed in range(7)] for m in (method, "fedavg"))
            test = scipy_stats.ttest_rel(a, b)
            low, high = test.confidence_interval(0.95)
            d = [100 * (x - y) for x, y in zip(a, b)]
            mean = statistics.fmean(d)
            same = sum(x > 0 for x in d) if mean > 0 else sum(x < 0 for x in d)
            ps[label] = float(test.pvalue)
            assert got[label][:2] == [
                f"{mean:+.2f} ± {statistics.stdev(d):.2f}",
                f"{100 * low:+.2f} to {100 * high:+.2f}",
            ]
            assert got[label][4:] == [f"{same} of 7", "7"]
        order = sorted(ps, key=lambda k: ps[k])
        corrected = 0.0
        for k, label in enumerate(order):
            corrected = max(corrected, min(1.0, (3 - k) * ps[label]))
            shown = ["< 0.0001" if p < 1e-4 else f"{p:.4f}" for p in (ps[label], corrected)]
            assert got[label][2:4] == shown
    notes = table(blocks, "GM").notes
    assert select.RULES[headline].label in notes and "for the 3 tested methods of this table" in notes
    assert "last round" in table(blocks, "PM(V)").notes


def test_few_seeds_and_unlike_seeds(write: Write, tmp_path: Path) -> None:
    for seed in range(3):
        write("fedavg", seed, (0.5,))
        folder = write("moon", seed + 1, (0.6,))
    write("fednh", 7, (0.6,))
    report = made(folder.parent, tmp_path / "out")
    blocks = comparison.differences(report, report.settings[0])
    got = found(blocks, "GM")
    assert got["MOON"] == ["+10.00 ± 0.00", "no test: n < 5", "-", "-", "2 of 2", "2"]
    assert got["FedNH"] == ["no common seed", "-", "-", "-", "-", "0"]
    notes = table(blocks, "GM").notes
    assert "no test is made" in notes and "t-test" not in notes and "the split is the same for all seeds" in notes


def test_what_has_no_number_says_why(write: Write, line: Any, tmp_path: Path) -> None:
    for seed in range(5):
        write("fedavg", seed, (0.4, 0.5))
        write("moon", seed, (0.4, 0.55 + 0.01 * seed))
        folder = write("solo", seed, (None, None), rows=[line(t, None, range(10), pm_v=0.5) for t in range(2)])
    write("fedprox", 0, (0.5, 0.6), status="running")
    write("fednh", 0, (0.5, 0.6), status="diverged")
    write("fedproc", 0, (0.5, 0.6), status="failed")
    unmeasured = [line(t, 0.5, range(10)) for t in range(2)]
    for one in unmeasured:
        del one["gm"]
    write("fedcspc", 0, (None, None), rows=unmeasured)
    report = made(folder.parent, tmp_path / "out")
    blocks = comparison.differences(report, report.settings[0])
    got = found(blocks, "GM")
    assert {k: v[0] for k, v in got.items() if v[-1] == "0"} == {
        "FedProx": "not finished",
        "FedNH": "not finished",
        "FedProc": "not finished",
        "FedCSPC": "-",
        "solo": "not defined",
    }
    # one method is tested: what is corrected for one is not changed
    assert got["MOON"][0] == "+7.00 ± 1.58" and got["MOON"][2] == got["MOON"][3] and got["MOON"][-1] == "5"
    assert not any(isinstance(b, Table) and b.title.startswith("PM") for b in blocks)  # the baseline has none


def test_pm_over_other_clients_is_not_compared(write: Write, line: Any, tmp_path: Path) -> None:
    few = {"participation": 0.2}
    for method, evaluated, adapted in (("fedavg", 2, {}), ("moon", 2, {}), ("solo", 10, {"pm_clients": "all"})):
        lines = [line(0, 0.5, [0, 1], pm_v=0.6, pm_clients=evaluated)]
        if adapted:
            lines[0]["clients"] = list(range(10))
        folder = write(method, 0, (0.5,), rows=lines, protocol=few, document={"adapted": adapted})
    report = made(folder.parent, tmp_path / "out")
    blocks = comparison.differences(report, report.settings[0])
    assert found(blocks, "PM(V)")["solo"] == ["other clients", "-", "-", "-", "-", "0"]
    assert found(blocks, "PM(V)")["MOON"][0] == "+0.00" and found(blocks, "GM")["solo"][0] == "+0.00"
    assert "other clients than the baseline's" in table(blocks, "PM(V)").notes


def test_where_all_are_drawn_the_active_clients_are_all(write: Write, line: Any, tmp_path: Path) -> None:
    for method, adapted in (("fedavg", {}), ("solo", {"pm_clients": "all"})):
        lines = [line(0, None, range(10), pm_v=0.6 if adapted else 0.5, pm_clients=10)]
        folder = write(method, 0, (None,), rows=lines, document={"adapted": adapted})
    report = made(folder.parent, tmp_path / "out")
    assert found(comparison.differences(report, report.settings[0]), "PM(V)")["solo"][0] == "+10.00"


def test_a_split_of_every_seed_is_not_called_the_same(write: Write, tmp_path: Path) -> None:
    for seed in range(2):
        write("fedavg", seed, (0.5,), protocol={"partition_seed": "run"})
        folder = write("moon", seed, (0.6,), protocol={"partition_seed": "run"})
    report = made(folder.parent, tmp_path / "out")
    assert "another split" not in table(comparison.differences(report, report.settings[0]), "GM").notes


def test_names_cannot_break_the_notes(write: Write, tmp_path: Path) -> None:
    write("fedavg", 0, (0.5,), name="*a|b*")
    folder = write("moon", 0, (0.6,), name="<script>")
    report = made(folder.parent, tmp_path / "out")
    (s,) = report.settings
    notes = [
        b.notes for b in (*comparison.differences(report, s), *comparison.target(report, s)) if isinstance(b, Table)
    ]
    assert len(notes) == 2 and all("\\*a\\|b\\*" in text for text in notes)


@pytest.mark.parametrize("status", ["running", "diverged"])
def test_nothing_to_compare(write: Write, tmp_path: Path, status: str) -> None:
    write("fedavg", 0, (0.5,), status=status)
    folder = write("moon", 0, (0.6,))
    report = made(folder.parent, tmp_path / "out")
    assert comparison.differences(report, report.settings[0]) == [] and comparison.ranks(report) == []
    assert comparison.target(report, report.settings[0]) == []


# ---- ranks -----------------------------------------------------------------------------------------------------


def test_ranks_against_the_records(write: Write, tmp_path: Path) -> None:
    rs = np.random.RandomState(2)
    names = {"fedavg": "FedAvg", "moon": "MOON", "fednh": "FedNH", "fedproc": "FedProc"}
    betas = (0.1, 0.5, 5.0)
    for beta in betas:
        for method in names:
            for seed in range(5):
                gm = (0.1, round(float(rs.normal(0.6, 0.05)), 4))
                write(method, seed, gm, protocol={"beta": beta}, name=names[method])
    study = tmp_path / "results" / "study"
    report = made(study, tmp_path / "out")
    ends: dict[tuple[float, str, int], float] = {}
    for path in study.glob("*/protocol.json"):
        document = json.loads(path.read_text())
        p = document["protocol"]
        rows = (path.parent / "rounds.jsonl").read_text().splitlines()
        ends[p["beta"], document["name"], p["seed"]] = json.loads(rows[-1])["gm"]
    labels = list(names.values())
    by_mean = [
        scipy_stats.rankdata([-statistics.fmean(ends[beta, k, seed] for seed in range(5)) for k in labels])
        for beta in betas
    ]
    by_pair = [scipy_stats.rankdata([-ends[beta, k, seed] for k in labels]) for beta in betas for seed in range(5)]
    got = found(comparison.ranks(report), "Ranks")
    for i, label in enumerate(labels):
        each = [f"{ranked[i]:g}" for ranked in by_mean]
        means = [statistics.fmean(float(ranked[i]) for ranked in many) for many in (by_mean, by_pair)]
        assert got[label] == [*each, *(f"{mean:.2f}" for mean in means)]
    notes = table(comparison.ranks(report), "Ranks").notes
    assert "all methods have a number (3)" in notes and "all have one (15)" in notes


def test_ranks_with_gaps(write: Write, tmp_path: Path) -> None:
    ends = {0.1: {"fedavg": (0.5, 0.3), "moon": (0.4, 0.5), "fednh": (0.5, 0.4)},
            0.5: {"fedavg": (0.5, 0.5), "moon": (0.6, 0.6), "fednh": (0.7, 0.5)},
            1.0: {"fedavg": (0.5, 0.5), "moon": (0.6, 0.6)},
            5.0: {"fedavg": (0.5, 0.5)}}  # fmt: skip
    for beta, methods in ends.items():
        for method, values in methods.items():
            for seed, v in enumerate(values):
                folder = write(method, seed, (v,), protocol={"beta": beta})
    write("solo", 0, (None,), protocol={"beta": 0.5})
    write("fednh", 0, (0.9,), protocol={"beta": 1.0}, status="running")
    report = made(folder.parent, tmp_path / "out")
    # beta 0.1: means .40 .45 .45; beta 0.5: .50 .60 .60; beta 1: an unfinished run has no rank; beta 5: one method, no rank.
    # Pairs, of the first two alone: (0.1, 0): 1.5 3 1.5; (0.1, 1): 3 1 2; (0.5, 0): 3 2 1; (0.5, 1): 2.5 1 2.5
    assert found(comparison.ranks(report), "Ranks") == {
        "FedAvg": ["3", "3", "2", "-", "3.00", "2.50"],
        "MOON": ["1.5", "1.5", "1", "-", "1.50", "1.75"],
        "FedNH": ["1.5", "1.5", "-", "-", "1.50", "1.75"],
    }


def test_ranks_of_one_setting(write: Write, tmp_path: Path) -> None:
    for seed, (a, b) in enumerate([(0.5, 0.6), (0.7, 0.6), (0.5, 0.5)]):
        write("fedavg", seed, (a,))
        folder = write("moon", seed, (b,))
    report = made(folder.parent, tmp_path / "out")
    assert found(comparison.ranks(report), "Ranks") == {"FedAvg": ["1.5", "1.50"], "MOON": ["1.5", "1.50"]}


def test_one_seed_has_no_mean_rank_and_one_method_no_rank(write: Write, tmp_path: Path) -> None:
    folder = write("fedavg", 0, (0.5,))
    assert comparison.ranks(made(folder.parent, tmp_path / "one")) == []
    write("moon", 0, (0.6,))
    assert found(comparison.ranks(made(folder.parent, tmp_path / "two")), "Ranks") == {"FedAvg": ["2"], "MOON": ["1"]}


# ---- target ----------------------------------------------------------------------------------------------------


def test_target_against_the_records(write: Write, line: Any, tmp_path: Path) -> None:
    rs = np.random.RandomState(3)
    for method, top in {"fedavg": 0.60, "moon": 0.62, "fedproc": 0.61, "fednh": 0.4}.items():
        for seed in range(5):
            lines = [line(-1, None, range(10), bytes_up=102_480, bytes_once=77)] if method == "fedproc" else []
            for t in range(12):
                gm = round(float(top * (1 - 0.5 ** (t + 1)) + rs.normal(0, 0.01)), 4)
                seconds = {n: float(rs.random_sample()) for n in ("train", "prototype", "aggregate", "evaluate")}
                clients = range(int(rs.randint(2, 8)))
                lines.append(line(t, gm, clients, seconds=seconds))
                if t % 2 == 0:
                    lines[-1]["gm"] = None  # not an evaluated round
            folder = write(method, seed, [0.0] * 12, rows=lines)
    told = records(folder.parent)
    goal = statistics.fmean(told["fedavg", seed][-1]["gm"] for seed in range(5))
    report = made(folder.parent, tmp_path / "out")
    blocks = comparison.target(report, report.settings[0])
    got = found(blocks, "Cost of a target")
    assert f"Target: {100 * goal:.2f} %, the mean GM (last round) of FedAvg" in table(blocks, "Cost").notes
    for method, label in (("fedavg", "FedAvg"), ("moon", "MOON"), ("fedproc", "FedProc")):
        spent = []
        for seed in range(5):
            rows = told[method, seed]
            k = next((k for k, row in enumerate(rows) if row["gm"] is not None and row["gm"] >= goal), None)
            if k is not None:
                until = rows[: k + 1]
                spent.append(
                    (
                        rows[k]["round"] + 1,
                        sum(row["bytes_down"] + row["bytes_up"] + row["bytes_once"] for row in until) / 1e6,
                        sum(row["seconds"][n] for row in until for n in ("train", "prototype", "aggregate")),
                    )
                )
        assert spent
        means = [statistics.fmean(column) for column in zip(*spent)]
        assert got[label] == [*(f"{mean:,.1f}" for mean in means), f"{len(spent)} of 5 seeds"]
    assert got["FedNH"] == ["not reached in 12 rounds", "-", "-", "0 of 5 seeds"]


def test_target_by_hand(write: Write, line: Any, tmp_path: Path) -> None:
    write("fedavg", 0, (0.2, 0.4, 0.5))
    write("fedavg", 1, (0.2, 0.4, 0.7))
    before = line(-1, None, [0, 1], gm_scores={}, bytes_up=5_000_000, bytes_once=1_000_000)
    rows = [before, *(line(t, v, [0, 1]) for t, v in enumerate((0.1, 0.65, 0.3)))]
    write("fedproc", 0, (0.1, 0.65, 0.3), rows=rows)
    write("fedproc", 1, (0.1, 0.2, 0.3))
    write("solo", 0, (None, None, None))
    folder = write("fednh", 0, (0.1, 0.2, 0.3))
    report = made(folder.parent, tmp_path / "out")
    got = found(comparison.target(report, report.settings[0]), "Cost of a target")
    assert got["FedAvg"] == ["3.0", f"{3 * 20 * 0.370504:.1f}", f"{3 * 3.51:.1f}", "1 of 2 seeds"]
    moved = (5_000_000 + 1_000_000 + 2 * 370_504 + 2 * 4 * 370_504) / 1e6
    assert got["FedProc"] == ["2.0", f"{moved:.1f}", f"{3 * 3.51:.1f}", "1 of 2 seeds"]
    assert got["FedNH"] == ["not reached in 3 rounds", "-", "-", "0 of 1 seeds"]
    assert got["solo"] == ["not defined", "-", "-", "0 of 1 seeds"]
    asked = comparison.target(report, report.settings[0], 0.39)
    wanted = found(asked, "Cost of a target")
    assert wanted["FedAvg"][0] == "2.0" and wanted["FedAvg"][-1] == "2 of 2 seeds"
    assert "Target: 39.00 %, as asked for" in table(asked, "Cost").notes
    # a baseline of one's own
    assert "of FedNH" in table(comparison.target(report, report.settings[0], None, "fednh"), "Cost").notes


def test_a_baseline_reaches_its_own_mean(write: Write, tmp_path: Path) -> None:
    # 0.1 three times: their sum is 0.30000000000000004, its third lies above 0.1
    for seed in range(3):
        folder = write("fedavg", seed, (0.05, 0.1))
    report = made(folder.parent, tmp_path / "out")
    assert found(comparison.target(report, report.settings[0]), "Cost")["FedAvg"][-1] == "3 of 3 seeds"


def test_the_exchange_after_the_last_round_counts(write: Write, line: Any, tmp_path: Path) -> None:
    final = {
        "bytes_down": 1_000_000,
        "bytes_up": 2_000_000,
        "bytes_once": 0,
        "seconds": {"train": 4.0, "aggregate": 1.0},
    }
    rows = [line(0, 0.2, [0]), line(1, 0.6, [0]) | {"final": final}]
    write("fedavg", 0, (0.2, 0.6), rows=rows)
    folder = write("moon", 0, (0.7, 0.6))
    report = made(folder.parent, tmp_path / "out")
    got = found(comparison.target(report, report.settings[0]), "Cost")
    assert got["FedAvg"] == ["2.0", f"{3 + 4 * 0.370504:.1f}", f"{2 * 3.51 + 5:.1f}", "1 of 1 seeds"]
    assert got["MOON"][:2] == ["1.0", f"{20 * 0.370504:.1f}"]


def test_target_of_unfinished_and_poor_records(write: Write, line: Any, tmp_path: Path) -> None:
    folder = write("fedavg", 0, (0.2, 0.6))
    # of two unfinished runs the rounds that both have: the third of the first does not count
    write("moon", 0, (0.1, 0.2, 0.9), status="running", protocol={"rounds": 2})
    write("moon", 1, (0.1, 0.2), status="running", protocol={"rounds": 2})
    bare = [line(t, 0.7, [0]) for t in range(2)]
    for one in bare:
        del one["bytes_up"], one["seconds"]
    write("fednh", 0, (0.7, 0.7), rows=bare)
    report = made(folder.parent, tmp_path / "out")
    blocks = comparison.target(report, report.settings[0])
    got = found(blocks, "Cost")
    assert got["MOON"] == ["not reached in 2 rounds", "-", "-", "0 of 2 seeds"]
    assert got["FedNH"] == ["1.0", "-", "-", "1 of 1 seeds"]
    assert "Not finished: MOON." in table(blocks, "Cost").notes


def test_no_global_model_no_target(write: Write, tmp_path: Path) -> None:
    folder = write("solo", 0, (None, None))
    report = made(folder.parent, tmp_path / "out")
    assert comparison.target(report, report.settings[0]) == comparison.target(report, report.settings[0], 0.5) == []
