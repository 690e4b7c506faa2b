"""Numbers of the tables, recomputed from the raw files."""

from __future__ import annotations

import io
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from rich.console import Console

from protofl.report import groups, runs, tables

Write = Callable[..., Path]


def one(tidy: pd.DataFrame, **where: Any) -> Any:
    """The only row that fits."""
    for name, value in where.items():
        tidy = tidy[tidy[name] == value]
    assert len(tidy) == 1
    return tidy.iloc[0]


def raw(root: Path) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Method, seed -> rows, read without the package."""
    out = {}
    for file in root.rglob("protocol.json"):
        document = json.loads(file.read_text())
        rows = [json.loads(text) for text in (file.parent / "rounds.jsonl").read_text().splitlines()]
        rows = [r for r in rows if r["round"] >= 0]
        out[document["method"]["name"], document["protocol"]["seed"]] = rows
    return out


def test_means_over_seeds(study: Path) -> None:
    tidy, rows = tables.accuracy(groups.settings(runs([study]))), raw(study)
    for method in ("fedavg", "fednh", "fedcspc"):
        for metric in ("gm", "pm_v", "pm_l", "pm_uniform", "pm_v_std", "pm_v_worst10"):
            finals = [rows[method, seed][-1][metric] for seed in (0, 1, 2)]
            found = one(tidy, method=method, metric=metric, rule="last")
            assert (found["n"], found["ddof"], found["seeds"]) == (3, 1, "0 1 2")
            assert found["mean"] == pytest.approx(sum(finals) / 3, abs=1e-12)
            assert found["sd"] == pytest.approx(statistics.stdev(finals), abs=1e-12)
        fives = [sum(r["gm"] for r in rows[method, seed][-5:]) / 5 for seed in (0, 1, 2)]
        tops = [max(r["gm"] for r in rows[method, seed]) for seed in (0, 1, 2)]
        for rule, values in (("mean_last_5", fives), ("best", tops)):
            assert one(tidy, method=method, metric="gm", rule=rule)["mean"] == pytest.approx(sum(values) / 3)


def test_ddof_of_the_protocol(write: Write) -> None:
    for seed, gm in enumerate((0.5, 0.6, 0.8)):
        write("fedavg", seed, (gm,), protocol={"std_ddof": 0})
    found = one(tables.accuracy(groups.settings(runs([write("fedprox", 0, (0.5,), protocol={"std_ddof": 0}).parent]))),
                method="fedavg", metric="gm", rule="last")  # fmt: skip
    assert found["sd"] == pytest.approx(statistics.pstdev((0.5, 0.6, 0.8)))


def test_one_seed_has_no_spread(write: Write) -> None:
    tidy = tables.accuracy(groups.settings(runs([write("fedavg", 0, (0.5, 0.6312))])))
    assert pd.isna(one(tidy, metric="gm", rule="last")["sd"])
    assert tables.Cells(tidy, 1).percent("FedAvg", "gm", "last") == "63.12"
    assert tables.over([1, 1], 1) == "One seed, hence no ±"


def test_cells() -> None:
    assert tables.with_spread(0.63174, 0.00416) == "63.17 ± 0.42"
    assert tables.over([3, 3], 1) == "±: sd over 3 seeds, n-1"
    assert tables.over([3, 2], 0) == "±: sd over the n seeds, n"


def test_unmeasured_is_missing(write: Write) -> None:
    cells = tables.Cells(tables.accuracy(groups.settings(runs([write()]))), 1)
    assert cells.percent("FedAvg", "pm_v", "last") == "-"
    assert cells.row("FedAvg", "pm_v", "last")["n"] == 0


def test_highest_as_printed(write: Write) -> None:
    for method, gm in (("fedavg", 0.60001), ("fedprox", 0.60004), ("moon", 0.59)):
        folder = write(method, 0, (gm,))
    cells = tables.Cells(tables.accuracy(groups.settings(runs([folder.parent]))), 1)
    assert cells.highest(["FedAvg", "FedProx", "MOON"], "gm", "last") == {"FedAvg", "FedProx"}
    assert cells.highest(["FedAvg"], "gm", "last") == set()


def test_unfinished_runs_do_not_mix_with_finished_ones(write: Write, line: Any) -> None:
    write("fedavg", 0, (0.5, 0.6, 0.7))
    folder = write("fedavg", 1, (0, 0, 0), rows=[line(0, 0.1, [0])], status="running")
    found = one(tables.accuracy(groups.settings(runs([folder.parent]))), metric="gm", rule="last")
    assert (found["n"], found["mean"], found["finished"]) == (1, 0.7, True)
    assert found["status"] == "1 of 2 finished; seed 1 unfinished (1 of 3 rounds)"


def test_unfinished_seeds_are_compared_in_the_same_round(write: Write, line: Any) -> None:
    for seed, n in ((0, 2), (1, 3)):
        rows = [line(t, 0.1 * (t + 1), [0]) for t in range(n)]
        folder = write("fedavg", seed, [0] * 5, rows=rows, status="running")
    found = one(tables.accuracy(groups.settings(runs([folder.parent]))), metric="gm", rule="last")
    assert (found["n"], found["mean"], found["finished"], found["rounds"]) == (2, 0.2, False, "1 1")


def test_diverged_runs_have_no_number(write: Write, line: Any) -> None:
    rows = [line(0, 0.3, [0]), line(1, None, [0], diverged=True)]
    folder = write("fedavg", 0, [0] * 5, rows=rows, status="diverged")
    found = one(tables.accuracy(groups.settings(runs([folder]))), metric="gm", rule="last")
    assert (found["n"], found["status"]) == (0, "diverged at round 1")
    assert pd.isna(found["mean"])


def test_the_same_run_twice_counts_once(write: Write, tmp_path: Path) -> None:
    import shutil

    folder = write("fedavg", 0)
    shutil.copytree(folder, tmp_path / "copy" / folder.name)
    tidy = tables.accuracy(groups.settings(runs([tmp_path])))
    assert one(tidy, metric="gm", rule="last")["n"] == 1


def test_settings_and_labels(write: Write) -> None:
    for mu in (0.01, 0.1):
        for beta in (10.0, 5.0):
            folder = write("fedprox", 0, options={"mu": mu, "other": 1}, protocol={"beta": beta})
    write("fedavg", 0, protocol={"beta": 5.0, "std_ddof": 0})
    made = groups.settings(runs([folder.parent]))
    assert [dict(s.differs) for s in made] == [{"beta": "5"}, {"beta": "10"}]
    assert [e.label for e in made[0].entries] == ["FedAvg", "FedProx (mu=0.01)", "FedProx (mu=0.1)"]
    assert [e.label for e in made[1].entries] == ["FedProx (mu=0.01)", "FedProx (mu=0.1)"]


def test_another_split_is_another_setting(write: Write) -> None:
    write("fedavg", 0)
    folder = write("fedprox", 0, document={"partition": {"index_hash": "other"}})
    assert len(groups.settings(runs([folder.parent]))) == 2


def test_a_split_per_seed_is_one_setting(write: Write) -> None:
    for seed in (0, 1):
        folder = write("fedavg", seed, protocol={"partition_seed": "run"},
                       document={"partition": {"index_hash": f"split {seed}"}})  # fmt: skip
    assert len(groups.settings(runs([folder.parent]))) == 1


def test_two_methods_with_one_name(write: Write) -> None:
    write("a", 0, name="Same", options={})
    folder = write("b", 0, name="Same", options={})
    (setting,) = groups.settings(runs([folder.parent]))
    assert sorted(e.label for e in setting.entries) == ["Same (a)", "Same (b)"]


def test_runs_of_other_code_do_not_mix(write: Write) -> None:
    for seed, code in enumerate(("0123456789", "abcdefabcd", "abcdefabcd")):
        method = {"name": "fedavg", "options": {}, "source": code}
        folder = write("fedavg", seed, document={"method": method})
    (setting,) = groups.settings(runs([folder.parent]))
    assert [(e.label, len(e.used)) for e in setting.entries] == [
        ("FedAvg (code 01234567)", 1),
        ("FedAvg (code abcdefab)", 2),
    ]


def test_cost(write: Write, line: Any) -> None:
    before = line(-1, None, [0, 1], bytes_down=10, bytes_up=20, bytes_once=7, memory_mb=5.0)
    played = [
        line(0, 0.1, [0, 1], bytes_down=4_000_000, bytes_up=2_000_000, bytes_once=500_000, memory_mb=7.0,
             seconds={"train": 1.0, "evaluate": 0.5}),
        line(1, 0.2, [0, 1, 2], bytes_down=6_000_000, bytes_up=3_000_000, bytes_once=0, memory_mb=6.0,
             seconds={"train": 3.0, "evaluate": 1.5}),
    ]  # fmt: skip
    before["seconds"] = {"train": 0.25}
    found = one(
        tables.cost(groups.settings(runs([write("fedproc", 0, (0.1, 0.2), rows=[before, *played])]))), method="fedproc"
    )
    assert (found["down_mb"], found["up_mb"], found["rounds"]) == (2.0, 1.0, 2.0)
    assert found["once_mb"] == pytest.approx(0.500037, abs=1e-9)
    assert found["total_mb"] == pytest.approx(15.500037, abs=1e-9)
    assert (found["seconds_train"], found["seconds_evaluate"], found["memory_mb"]) == (2.0, 1.0, 7.0)
    assert found["seconds_total"] == 6.25
    assert (found["trained"], found["forward"], found["state_mb"]) == (500.0, 50.0, 0.008)
    assert pd.isna(found["seconds_aggregate"])


def test_the_exchange_after_the_last_round_is_billed_apart(write: Write, line: Any) -> None:
    last = line(0, 0.2, [0, 1], bytes_down=4_000_000, bytes_up=0,
                final={"clients": [0, 1, 2], "bytes_down": 300, "bytes_up": 600, "bytes_once": 100})  # fmt: skip
    found = one(tables.cost(groups.settings(runs([write("fedproc", 0, (0.2,), rows=[last])]))), method="fedproc")
    assert (found["down_mb"], found["once_mb"]) == (2.0, pytest.approx(0.001))


def test_undefined_is_not_unmeasured(write: Write, line: Any) -> None:
    scores = {"prototype": {"v": 0.5, "l": None, "uniform": None}, "head": {"v": 0.25, "l": 0.5, "uniform": 0.75}}
    rows = [line(0, None, [0], gm_scores={}, pm_v=0.5, pm_l=None, pm_uniform=None, pm_scores=scores)]
    cells = tables.Cells(tables.accuracy(groups.settings(runs([write("fedproto", 0, (None,), rows=rows)]))), 1)
    told = {m: cells.percent("FedProto", m, "last") for m in ("gm", "pm_v", "pm_l", "pm_v_std")}
    assert [cells.percent("FedProto", f"pm_l:{k}", "last") for k in scores] == ["not defined", "50.00"]
    assert told == {"gm": "not defined", "pm_v": "50.00", "pm_l": "not defined", "pm_v_std": "-"}


def test_terminal(study: Path, write: Write) -> None:
    write("fed[red]x", 0, [0.5] * 12)
    console = Console(file=io.StringIO(), width=160)
    console.print(tables.terminal(runs([study])))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "fed[red]x" in text and "best (picked on test)" in text and "n-1" in text
    cells = tables.Cells(tables.accuracy(groups.settings(runs([study]))), 1)
    assert cells.percent("FedNH", "gm", "last") in text and "±" in cells.percent("FedNH", "gm", "last")
