"""Sweeps are found in the records, and their numbers are the records'."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from protofl.report import groups, runs, sweeps
from protofl.report.blocks import Table
from protofl.report.content import Report

Write = Callable[..., Path]


def found(folder: Path) -> list[sweeps.Sweep]:
    return list(sweeps.found(groups.settings(runs([folder]))))


def test_over_one_field(write: Write, tmp_path: Path) -> None:
    for beta, end in ((0.1, 0.3), (0.5, 0.5), (5, 0.7)):
        for seed in (0, 1):
            folder = write("fedavg", seed, (0.1, end + 0.1 * seed), protocol={"beta": beta})
            if beta != 5:
                write("moon", seed, (0.1, end), protocol={"beta": beta})
    (sweep,) = found(folder.parent)
    assert (sweep.over, sweep.by, sweep.name("gm"), sweep.name("pm_v")) == ("beta", "", "sweep-beta", "sweep-beta-pm-v")
    data = sweeps.values(sweep, "gm")
    fedavg = data[data["label"] == "FedAvg"]
    assert fedavg["place"].tolist() == [0.1, 0.5, 5.0] and fedavg["mean"].tolist() == pytest.approx([0.35, 0.55, 0.75])
    assert fedavg["low"].tolist() == [0.3, 0.5, 0.7] and fedavg["n"].tolist() == [2, 2, 2]
    assert data[data["label"] == "MOON"]["value"].tolist() == ["0.1", "0.5"]
    (tmp_path / "out").mkdir()
    blocks = sweeps.sweeps(Report(runs([folder.parent]), tmp_path / "out"))
    (table,) = [b for b in blocks if isinstance(b, Table)]
    assert table.heads == ["method", "0.1", "0.5", "5"]
    assert [[c.text for c in row] for row in table.rows] == [
        ["FedAvg", "35.00 ± 7.07", "55.00 ± 7.07", "75.00 ± 7.07"],
        ["MOON", "30.00 ± 0.00", "50.00 ± 0.00", "-"],
    ]
    assert (tmp_path / "out" / "figures" / "sweep-beta.pdf").is_file()


def test_over_two_fields_the_longer_is_the_axis(write: Write, tmp_path: Path) -> None:
    for clients in (10, 20, 50):
        for share in (0.2, 1.0):
            folder = write("fedavg", 0, (clients / 100 * share,), protocol={"clients": clients, "participation": share})
    (sweep,) = found(folder.parent)
    assert (sweep.over, sweep.by) == ("clients", "participation")
    data = sweeps.values(sweep, "gm")
    assert data.groupby("group")["place"].apply(list).to_dict() == {"0.2": [10, 20, 50], "1": [10, 20, 50]}
    (tmp_path / "out").mkdir()
    blocks: list[Any] = sweeps.sweeps(Report(runs([folder.parent]), tmp_path / "out"))
    assert blocks[1].heads == ["participation", "method", "10", "20", "50"] and blocks[1].left == 2


def test_over_an_option(write: Write) -> None:
    write("fedavg", 0, (0.4,))
    for rho in (0.9, 0.1):
        folder = write("fednh", 0, (rho,), options={"rho": rho, "head": "x"})
    (sweep,) = found(folder.parent)
    assert sweep.name("gm") == "sweep-fednh-rho" and {p.label for p in sweep.points} == {"FedNH"}
    assert sweeps.values(sweep, "gm")["mean"].tolist() == [0.1, 0.9]


def test_words_stand_in_their_order(write: Write) -> None:
    for scheme in ("iid", "dir_class"):
        folder = write("fedavg", 0, (0.5,), protocol={"partition": scheme})
    data = sweeps.values(found(folder.parent)[0], "gm")
    assert sorted(data["place"]) == [0, 1] and set(data["value"]) == {"iid", "dir_class"}


def test_nothing_is_swept(write: Write) -> None:
    write("fedavg", 0, (0.5,))
    assert found(write("moon", 0, (0.5,)).parent) == []
    for i, beta in enumerate((0.1, 0.5)):
        folder = write("fedprox", i, (0.5,), protocol={"beta": beta, "clients": 10 + i, "rounds": 1 + i})
    assert found(folder.parent) == []  # three fields differ: no sweep


def test_unfinished_and_diverged_points(write: Write, line: Any) -> None:
    write("fedavg", 0, (0.5,), protocol={"beta": 0.1})
    write("fedavg", 0, (0.5, 0.6), protocol={"beta": 0.5}, rows=[line(0, 0.4, [0])], status="running")
    folder = write(
        "fedavg", 0, (0.5,), protocol={"beta": 5}, rows=[line(0, None, [0], diverged=True)], status="diverged"
    )
    (sweep, *_) = [s for s in found(folder.parent) if s.over == "beta"] or found(folder.parent)
    data = sweeps.values(sweep, "gm")
    assert set(data["mean"]) <= {0.5, 0.4} and "5" not in set(data["value"])
