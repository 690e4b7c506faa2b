"""Ours beside the papers: which printed row is shown, what differs, what each ± is."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from protofl.registry import names
from protofl.report import papers, runs
from protofl.report.blocks import Table
from protofl.report.content import Report

Write = Callable[..., Path]
WIDE = {"projection_dim": 256}
CIFAR100 = {"dataset": "cifar100", "model": "resnet50_bn", **WIDE}


def shown(folder: Path, out: Path) -> tuple[list[dict[str, str]], str]:
    """The rows of the table by head, and its notes."""
    out.mkdir()
    report = Report(runs([folder]), out)
    (table,) = [b for s in report.settings for b in papers.against_papers(report, s)]
    assert isinstance(table, Table)
    stored = list(csv.DictReader((out / "tables" / "papers.csv").read_text("utf-8").splitlines()))
    assert [list(row.values()) for row in stored] == [[cell.text for cell in row] for row in table.rows]
    return stored, table.notes


def pick(rows: list[dict[str, str]], **wanted: str) -> dict[str, str]:
    """The one row with these cells."""
    (row,) = [row for row in rows if wanted.items() <= row.items()]
    return row


# ---- the file --------------------------------------------------------------------------------------------------


def test_every_printed_row_is_read() -> None:
    assert len(papers.printed()) == 105
    for row in papers.printed():
        assert row["dataset"] in papers.DATASETS and 0 < float(row["mean"]) < 100 and row["source"]
        method, options = papers.named(row)
        assert method or row["method"].startswith(("none", "l2 norm"))
        assert all(float(v) > 0 for v in options.values())
        assert "(" in row["metric"] or not row["std"], "a ± of which nothing is said"


def test_the_names_are_the_packages() -> None:
    assert set(papers.METHODS.values()) - {"ccvr"} <= set(names())


def test_names_and_options() -> None:
    by = {row["method"]: papers.named(row) for row in papers.printed()}
    assert by["MOON (mu=5)"] == ("moon", {"mu": "5"}) and by["FedProx (mu=0.001)"] == ("fedprox", {"mu": "0.001"})
    assert by["MOON (row of FedProc tab. 2)"] == ("moon", {}) and by["none (FedAvg)"][0] == ""
    assert papers.parameters("moon") == papers.parameters("fedprox") == ("mu",) and papers.parameters("fedavg") == ()


def test_party_models_are_not_compared_with_a_global_model() -> None:
    kinds = {(papers.named(row)[0] == "solo", papers.metric(row)[0]) for row in papers.printed()}
    assert kinds == {(True, "pm_uniform"), (False, "gm")}


# ---- rows ------------------------------------------------------------------------------------------------------


def test_the_papers_own_setting(write: Write, tmp_path: Path) -> None:
    for seed, gm in enumerate((0.6900, 0.6910, 0.6950)):
        folder = write("moon", seed, (gm,) * 100, options={"mu": 5.0}, protocol=WIDE)
    rows, notes = shown(folder.parent, tmp_path / "out")
    row = pick(rows, paper="MOON", table="Table 1")
    # mean 69.20, sd of 69.00 69.10 69.50: sqrt((.04 + .01 + .09) / 2) = .2646
    assert (row["ours"], row["printed"], row["difference"]) == ("69.20 ± 0.26", "69.1 ± 0.4", "+0.10")
    assert (row["settings that differ"], row["not stated"], row["measured by"]) == ("none", "nothing", "GM")
    assert [(r["paper"], r["table"], r["printed"]) for r in rows] == [
        ("MOON", "Table 1", "69.1 ± 0.4"),
        ("MOON", "Table 5", "69.1"),
        ("FedProc", "Table 2", "69.1"),
        ("FedFSA", "Table 2", "69.44"),
        ("Flower baselines/moon", "README", "70.71"),
    ]
    assert "sd over 3 seeds, n-1" in notes and "± printed: GM, std over 3 trials." in notes


def test_what_differs_and_what_is_not_stated(write: Write, tmp_path: Path) -> None:
    ours = {"beta": 0.3, "clients": 20, "participation": 0.2, "local_epochs": 5, "model": "cnn_fednh"} | WIDE
    write("fedprox", 0, (0.3, 0.4), options={"mu": 0.01}, protocol=ours)
    folder = write("fedproc", 0, (0.3, 0.4), protocol=ours)
    rows, notes = shown(folder.parent, tmp_path / "out")
    differing = "beta 0.5 / 0.3; clients 10 / 20; participation 1.0 / 0.2; rounds 100 / 2; local_epochs 10 / 5; model "
    assert pick(rows, method="FedProx", paper="MOON")["settings that differ"] == f"{differing}simple_cnn / cnn_fednh"
    flower = pick(rows, method="FedProx", paper="Flower baselines/moon")
    assert flower["settings that differ"].endswith("; mu 0.001 / 0.01")
    own = pick(rows, method="FedProc", paper="FedProc")
    assert own["settings that differ"] == "none of those stated" and own["difference"] == "-30.70"
    assert own["not stated"] == "beta, clients, participation, rounds, local_epochs, model"
    # as printed, not rounded; of N = 5 and 10, both unlike 20, the nearer
    fsa = pick(rows, method="FedProc", paper="FedFSA")
    assert (fsa["printed"], fsa["difference"], fsa["not stated"]) == ("69.85", "-29.85", "participation")
    assert "clients 10 / 20" in fsa["settings that differ"]
    assert "NOT FedCSPC's own table" in notes and "do not measure the same thing" in notes and "One seed" in notes


@pytest.mark.parametrize(
    ("protocol", "mu", "table", "printed", "differing"),
    [
        ({}, 1.0, "Table 3", "54.7", "clients 50 / 10"),
        ({"clients": 50}, 10.0, "Table 3", "58.2", "none"),
        ({"clients": 100, "participation": 0.2}, 1.0, "Table 3", "54.5", "rounds 250 / 100"),
        ({"clients": 50}, 3.0, "Table 3", "54.7", "mu 1 / 3"),
        ({"beta": 5.0}, 1.0, "Table 4", "68.0", "none"),
        ({"beta": 0.1}, 1.0, "Table 4", "64.0", "none"),
        ({"beta": 0.2}, 1.0, "Table 4", "64.0", "beta 0.1 / 0.2"),
        ({"beta": 0.1}, 1.0, "Table 1", "67.5 ± 0.4", "beta 0.5 / 0.1"),
    ],
)
def test_the_row_that_differs_least(
    write: Write, tmp_path: Path, protocol: dict[str, Any], mu: float, table: str, printed: str, differing: str
) -> None:
    folder = write("moon", 0, (0.6,) * 100, options={"mu": mu}, protocol=CIFAR100 | protocol)
    row = pick(shown(folder.parent, tmp_path / "out")[0], paper="MOON", table=table)
    # of mu = 1 and mu = 10, 3 is a factor 3 from the one and 3.3 from the other
    assert (row["printed"], row["settings that differ"]) == (printed, differing)


def test_party_models_beside_solo(write: Write, line: Any, tmp_path: Path) -> None:
    each = {"client": [0, 1, 2], "uniform": [0.40, 0.45, 0.50]}
    lines = [line(0, None, range(10), pm_uniform=0.45, pm_each=each)]
    adapted = {"adapted": {"rounds": 1, "participation": 1.0, "local_epochs": 300}}
    alone = {"std_over": "parties", "std_ddof": 0}
    folder = write("solo", 0, (None,), rows=lines, options=alone, document=adapted, protocol=WIDE)
    rows, notes = shown(folder.parent, tmp_path / "out")
    row = pick(rows, paper="MOON")
    # sd over the parties, divisor 3, of 40 45 50: sqrt(50 / 3) = 4.08
    assert (row["measured by"], row["ours"], row["printed"]) == ("PM uniform", "45.00 ± 4.08", "46.3 ± 5.1")
    assert row["settings that differ"] == "none of those stated" and row["not stated"] == "participation, rounds"
    assert "PM uniform, std over parties" in notes and "sd over the parties of one run" in notes


def test_variants_are_rows_of_their_own(write: Write, tmp_path: Path) -> None:
    write("moon", 0, (0.6,), options={"mu": 1.0}, protocol=WIDE)
    folder = write("moon", 0, (0.65,), options={"mu": 5.0}, protocol=WIDE)
    rows, _ = shown(folder.parent, tmp_path / "out")
    mine = {r["method"]: r["settings that differ"] for r in rows if (r["paper"], r["table"]) == ("MOON", "Table 1")}
    assert mine == {"MOON (mu=1)": "rounds 100 / 1; mu 5 / 1", "MOON (mu=5)": "rounds 100 / 1"}


def test_the_width_of_the_projection(write: Write, tmp_path: Path) -> None:
    folder = write("fedavg", 0, (0.6,) * 100, protocol={"projection_dim": 84})
    rows, _ = shown(folder.parent, tmp_path / "out")
    assert pick(rows, paper="MOON")["settings that differ"] == "projection_dim 256 / 84"
    assert pick(rows, paper="FedFSA")["settings that differ"] == "none of those stated"


# ---- nothing to show -------------------------------------------------------------------------------------------


def test_only_finished_runs_with_a_number_are_compared(write: Write, tmp_path: Path) -> None:
    write("fedavg", 0, (0.2, 0.3), status="running")
    write("moon", 0, (0.2, 0.3), status="diverged")
    write("fedprox", 0, (None, None))
    folder = write("fedproc", 0, (0.2, 0.3))
    rows, _ = shown(folder.parent, tmp_path / "out")
    assert {r["method"] for r in rows} == {"FedProc"}


@pytest.mark.parametrize(("method", "dataset"), [("fedavg", "digits"), ("fednh", "cifar10"), ("fedavg", "cifar1O")])
def test_no_paper_no_table(write: Write, tmp_path: Path, method: str, dataset: str) -> None:
    folder = write(method, 0, (0.2,), protocol={"dataset": dataset})
    report = Report(runs([folder]), tmp_path)
    assert papers.against_papers(report, report.settings[0]) == [] and not (tmp_path / "tables").exists()
