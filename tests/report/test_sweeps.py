"""Sweeps are found in the records, and their numbers are the records'."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from protofl.report import figures, frames, groups, pictures, runs, sweeps
from protofl.report.blocks import Figure, Table, Text
from protofl.report.content import Report

Write = Callable[..., Path]


def found(folder: Path) -> list[sweeps.Sweep]:
    return list(sweeps.found(groups.settings(runs([folder]))))


def shown(folder: Path, tmp_path: Path) -> list[Table]:
    """The tables of the sweeps; no figure may fail."""
    (tmp_path / "out").mkdir(exist_ok=True)
    blocks = sweeps.sweeps(Report(runs([folder]), tmp_path / "out"))
    assert not [b for b in blocks if isinstance(b, Text)]
    return [b for b in blocks if isinstance(b, Table)]


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
    (table,) = shown(folder.parent, tmp_path)
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
    (table,) = shown(folder.parent, tmp_path)
    assert table.heads == ["participation", "method", "10", "20", "50"] and table.left == 2
    assert [[c.text for c in row] for row in table.rows] == [
        ["0.2", "FedAvg", "2.00", "4.00", "10.00"],
        ["1", "FedAvg", "10.00", "20.00", "50.00"],
    ]


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
    assert found(folder.parent) == []  # they agree in none of the three fields that differ


def test_unfinished_and_diverged_points(write: Write, line: Any, tmp_path: Path) -> None:
    write("fedavg", 0, (0.5,), protocol={"beta": 0.1})
    write("fedavg", 0, (0.5, 0.5), protocol={"beta": 0.5, "rounds": 1}, rows=[line(0, 0.4, [0])], status="running")
    folder = write(
        "fedavg", 0, (0.5,), protocol={"beta": 5}, rows=[line(0, None, [0], diverged=True)], status="diverged"
    )
    (sweep,) = found(folder.parent)
    data = sweeps.values(sweep, "gm")
    assert dict(zip(data["value"], data["mean"])) == {"0.1": 0.5, "0.5": 0.4}
    assert data["fate"].tolist() == ["finished", "unfinished"]
    table = shown(folder.parent, tmp_path)[0]
    assert [c.text for c in table.rows[0]] == ["FedAvg", "50.00", "40.00", "diverged"]
    assert "Not finished, numbers of the last round that all its seeds have: FedAvg at 0.5." in table.notes


def test_sweeps_of_a_store_with_several(write: Write) -> None:
    """A store with beta x 3 at one place, and clients x participation at one beta: two sweeps, none shown twice."""
    for clients in (10, 20):
        for share in (0.2, 1.0):
            write("fedavg", 0, protocol={"clients": clients, "participation": share})
    for beta in (0.1, 5.0):
        folder = write("fedavg", 0, protocol={"beta": beta, "clients": 10, "participation": 1.0})
    assert [(s.over, s.by, s.where) for s in found(folder.parent)] == [
        ("clients", "participation", "beta=0.5"),
        ("beta", "", "clients=10, participation=1"),
    ]
    assert [len(s.points) for s in found(folder.parent)] == [4, 3]


def test_a_split_without_beta_is_a_value_of_the_partition(write: Write) -> None:
    write("fedavg", 0, protocol={"partition": "iid", "beta": None})
    folder = write("fedavg", 0, protocol={"partition": "dir_class", "beta": 0.5})
    assert [(s.over, s.by) for s in found(folder.parent)] == [("partition", "")]


def test_methods_of_one_value_are_not_swept(write: Write) -> None:
    for beta in (0.1, 0.5):
        folder = write("fedavg", 0, protocol={"beta": beta})
    write("moon", 0, protocol={"beta": 0.5})
    (sweep,) = found(folder.parent)
    assert {p.label for p in sweep.points} == {"FedAvg"}


def test_other_options_between_the_values_are_told(write: Write, tmp_path: Path) -> None:
    for beta in (0.1, 0.5):
        write("fedavg", 0, protocol={"beta": beta})
        folder = write("fedprox", 0, protocol={"beta": beta}, options={"mu": beta})
    (table,) = shown(folder.parent, tmp_path)
    assert "Options differ between the values: FedProx." in table.notes


def test_the_headline_follows_the_rule_of_the_protocol(write: Write) -> None:
    for beta in (0.1, 0.5):
        folder = write("fedavg", 0, (0.1, 0.2, 0.3, 0.4, 0.5, 0.6), protocol={"beta": beta, "report": "mean_last_5"})
    assert sweeps.values(found(folder.parent)[0], "gm")["mean"].tolist() == pytest.approx([0.4, 0.4])


def test_personal_models_have_a_table_of_their_own(write: Write, line: Any, tmp_path: Path) -> None:
    for beta in (0.1, 0.5):
        folder = write("fedavg", 0, (0.5,), protocol={"beta": beta}, rows=[line(0, 0.5, [0], pm_v=beta)])
    assert [(t.title, t.rows[0][1].text) for t in shown(folder.parent, tmp_path)] == [
        ("GM over beta", "50.00"),
        ("PM(V) over beta", "10.00"),
    ]


def test_no_line_crosses_what_is_missing(write: Write) -> None:
    for beta in (0.1, 0.5, 5):
        folder = write("fedavg", 0, protocol={"beta": beta})
        if beta != 0.5:
            write("moon", 0, protocol={"beta": beta})
    data = sweeps.values(found(folder.parent)[0], "gm")
    gaps = figures.with_gaps(data, [0.1, 0.5, 5.0])
    moon = gaps[gaps["label"] == "MOON"]
    assert moon["place"].tolist() == [0.1, 0.5, 5.0] and moon["mean"].isna().tolist() == [False, True, False]


def test_panels_share_limits_that_hold_all(write: Write) -> None:
    """The later panel has the higher numbers: the limits must not be those of the first."""
    for clients in (10, 20, 50):
        for share in (0.2, 1.0):
            folder = write("fedavg", 0, (share * 0.9,), protocol={"clients": clients, "participation": share})
    (sweep,) = found(folder.parent)
    with figures.one_style():
        drawn = figures.draw_sweep(sweeps.values(sweep, "gm"), sweep.over, sweep.by)
    first, second = drawn.axes
    assert first.get_ylim() == second.get_ylim() and first.get_ylim()[0] < 18 and second.get_ylim()[1] > 90


# ---- what was spent --------------------------------------------------------------------------------------------------


def plain(folder: Path) -> dict[int, tuple[float, float, float]]:
    """Round -> MB, seconds and seconds of evaluation until then, from the file and nothing else."""
    made = {}
    moved = worked = judged = 0.0
    for text in (folder / "rounds.jsonl").read_text().splitlines():
        row = json.loads(text)
        for part in [row, row.get("final", {})]:
            moved += sum(part.get(f"bytes_{n}", 0) for n in ("down", "up", "once"))
            worked += sum(part.get("seconds", {}).get(n, 0) for n in ("train", "prototype", "aggregate"))
            judged += part.get("seconds", {}).get("evaluate", 0)
        made[row["round"]] = (moved / 1e6, worked, judged)
    return made


def test_the_budget_is_that_of_the_records(write: Write, line: Any) -> None:
    folders = []
    for seed in (0, 1):
        before = line(-1, None, range(10), bytes_down=0, bytes_up=102_480 + seed, bytes_once=7)
        rows = [line(t, 0.1 * t + 0.1, range(2 + seed), bytes_once=t) for t in range(3)]
        rows[-1]["final"] = {"bytes_down": 11, "bytes_up": 13, "bytes_once": 0, "seconds": {"prototype": 0.25}}
        folders.append(write("fedproc", seed, (0.1, 0.2, 0.3), rows=[before, *rows]))
    data = frames.budget(groups.settings(runs([folders[0].parent])))
    gm = data[data["metric"] == "gm"]
    wanted = [[(a + b) / 2 for a, b in zip(*(plain(f)[t] for f in folders))] for t in range(3)]
    assert gm[["mb", "seconds", "evaluation"]].to_numpy().tolist() == [pytest.approx(w) for w in wanted]
    first = (102_480 + 102_481) / 2 + 7 + 2.5 * 2 * 370_504
    assert gm["mb"].iloc[0] == pytest.approx(first / 1e6) and gm["seconds"].iloc[0] == pytest.approx(2 * 3.51)
    assert gm["evaluation"].tolist() == pytest.approx([1.4, 2.1, 2.8])
    assert data[data["metric"] == "loss"]["mean"].tolist() == pytest.approx([2.1, 1.9, 1.7])


def test_the_budget_of_every_run_of_a_study(study: Path) -> None:
    made = groups.settings(runs([study]))
    data = frames.budget(made)
    for e in made[0].entries:
        each = [plain(run.path) for run in e.drawn]
        mine = data[(data["label"] == e.label) & (data["metric"] == "gm")]
        for i, name in enumerate(("mb", "seconds", "evaluation")):
            wanted = [statistics.fmean(one[t][i] for one in each) for t in mine["round"]]
            assert mine[name].tolist() == pytest.approx(wanted)
    assert list(data.columns) == [*frames.CURVES, "mb", "seconds", "evaluation"]


def test_what_is_not_recorded_is_missing(write: Write, line: Any, tmp_path: Path) -> None:
    bare = [{k: v for k, v in line(t, 0.5, [0]).items() if not k.startswith(("bytes", "seconds"))} for t in (0, 1)]
    write("fedavg", 0, rows=bare)
    folder = write("fedavg", 1)
    data = frames.budget(groups.settings(runs([folder.parent])))
    assert data[["mb", "seconds", "evaluation"]].isna().all(axis=None) and len(data)
    (tmp_path / "out").mkdir()
    report = Report(runs([folder.parent]), tmp_path / "out")
    names = [b.name for b in pictures.curves(report, report.settings[0]) if isinstance(b, Figure)]
    assert names == ["curves", "loss", "terms"]


def test_budget_of_mixed_runs(write: Write, line: Any, tmp_path: Path) -> None:
    """One round, an unfinished and a diverged method: they end where their records end."""
    write("fedavg", 0, (0.5, 0.6))
    write("moon", 0, (0, 0), rows=[line(0, 0.3, [0])], status="running", tail='{"round"')
    folder = write("fedprox", 0, (0, 0), rows=[line(0, 0.2, [0]), line(1, None, [0], diverged=True)], status="diverged")
    (tmp_path / "out").mkdir()
    report = Report(runs([folder.parent]), tmp_path / "out")
    (budget,) = [b for b in pictures.curves(report, report.settings[0]) if isinstance(b, Figure) and b.name == "budget"]
    assert "A cross ends a diverged method. A diamond ends an unfinished method." in budget.caption
    data = frames.budget(report.settings)
    assert {k: len(v) for k, v in data[data["metric"] == "gm"].groupby("label")} == {
        "FedAvg": 2,
        "FedProx": 1,
        "MOON": 1,
    }
    assert (tmp_path / "out" / "figures" / "budget.png").is_file()
