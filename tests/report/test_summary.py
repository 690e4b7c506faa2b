"""The top of a report: its sentences and its table against the raw records and against the tables below it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from protofl.report import runs, sections
from protofl.report.blocks import Block, Cell, Table, Text
from protofl.report.content import Report
from protofl.report.summary import summary

Write = Callable[..., Path]
Made = Callable[[], Report]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """`made()` reads all runs written so far."""
    (tmp_path / "out").mkdir()
    return lambda: Report(runs([tmp_path / "results"]), tmp_path / "out")


def parts(report: Report) -> tuple[list[str], Table]:
    """The sentences and the table."""
    text, table = summary(report)
    assert isinstance(text, Text) and isinstance(table, Table)
    return [line.removeprefix("* ") for line in text.markdown.splitlines()], table


def row(blocks: Sequence[Block], label: str) -> Sequence[Cell]:
    """The row of a method in the first table."""
    table = next(block for block in blocks if isinstance(block, Table))
    return next(cells for cells in table.rows if cells[0].text == label)


SAME = "Checked: the same for all methods of a seed: split, initial weights (of networks of one size), drawn clients."


def test_hand_computed(write: Write, made: Made) -> None:
    # FedAvg 0.5, 0.54 -> 52.00, sd 0.04 / sqrt 2 = 2.83; FedProc 0.7, 0.72 -> 71.00, sd 1.41; 19.00 apart
    for method, ends in {"fedavg": (0.5, 0.54), "fedproc": (0.7, 0.72)}.items():
        for seed, end in enumerate(ends):
            write(method, seed, [0.1, end])
    lines, table = parts(made())
    assert lines == [
        "4 runs: 2 methods, 1 setting, 2 seeds. Headline of the global model (GM): last round.",
        "Highest GM: FedProc, 71.00 ± 1.41 % (n = 2), 19.00 points above FedAvg "
        "(more than the larger of their standard deviations over seeds).",
        SAME,
    ]
    assert list(table.heads) == ["method", "GM"]
    assert row([table], "FedAvg")[1] == Cell("52.00 ± 2.83", 0.52)
    assert row([table], "FedProc")[1] == Cell("71.00 ± 1.41", 0.71, True)
    assert "±: sd over 2 seeds, n-1." in table.notes and "not measured" not in table.notes


def test_margin_within_the_spread(write: Write, made: Made) -> None:
    for method, ends in {"fedavg": (0.5, 0.54), "fedproc": (0.53, 0.53)}.items():
        for seed, end in enumerate(ends):
            write(method, seed, [end])
    line = parts(made())[0][1]
    assert "1.00 points above FedAvg (within the larger of their standard deviations over seeds)" in line


def test_against_the_raw_rounds(study: Path, made: Made) -> None:
    ends: dict[str, list[float]] = {}
    for folder in study.iterdir():
        name = json.loads((folder / "protocol.json").read_text())["name"]
        rounds = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
        ends.setdefault(name, []).append(rounds[-1]["gm"])
    means = {name: statistics.fmean(values) for name, values in ends.items()}
    (second, first) = sorted(means, key=lambda name: means[name])[-2:]
    lines, table = parts(made())
    for name, values in ends.items():
        assert row([table], name)[1].text == f"{100 * means[name]:.2f} ± {100 * statistics.stdev(values):.2f}"
    margin = f"{100 * (means[first] - means[second]):.2f} points above {second}"
    assert f"Highest GM: {first}, {row([table], first)[1].text} % (n = 3), {margin}" in lines[1]
    assert lines[0].startswith("18 runs: 6 methods, 1 setting, 3 seeds.")


@pytest.mark.parametrize("headline", ["last", "mean_last_5"])
def test_no_number_differs_from_the_tables_below(write: Write, made: Made, line: Any, headline: str) -> None:
    """GM is that of the headline column, PM(V) that of the last round, whatever the headline."""
    for method in ("fedavg", "fedproc"):
        for seed in range(2):
            gms = [0.1 + 0.05 * t + 0.01 * seed + (method == "fedproc") * 0.02 * t for t in range(8)]
            rows = [line(t, gm, range(10), pm_v=gm / 2, pm_l=gm / 2, pm_uniform=gm, pm_clients=10)
                    for t, gm in enumerate(gms)]  # fmt: skip
            write(method, seed, gms, rows=rows, protocol={"report": headline})
    report = made()
    (s,) = report.settings
    lines, table = parts(report)
    for label in ("FedAvg", "FedProc"):
        below = row(sections.accuracy(report, s), label)[1 if headline == "last" else 2]
        assert row([table], label)[1:] == [below, row(sections.personal(report, s), label)[1]]
    assert lines[1].startswith(f"Highest GM: FedProc, {row([table], 'FedProc')[1].text} %")
    assert lines[2].startswith(f"Highest PM(V): FedProc, {row([table], 'FedProc')[2].text} %")
    assert ("mean of last 5" in lines[0]) == (headline == "mean_last_5")


def test_equal_as_printed(write: Write, made: Made) -> None:
    """Two methods with the same figure in the table are both bold, and neither is said to lead."""
    for method, end in {"fedavg": 0.5, "fedproc": 0.60001, "moon": 0.60004}.items():
        write(method, 0, [end])
    lines, table = parts(made())
    assert lines[1] == "Highest GM: FedProc, MOON, equal at 60.00 %."
    assert [cells[0].text for cells in table.rows if cells[1].bold] == ["FedProc", "MOON"]


def test_mixed_states(write: Write, made: Made, tmp_path: Path) -> None:
    write("fedavg", 0, [0.5] * 6)
    write("fedavg", 1, [0.54] * 6)
    write("fedproc", 0, [0.6] * 6)
    write("moon", 0, [0.9] * 3, status="running", protocol={"rounds": 6})
    write("fedprox", 0, [0.1], status="diverged", protocol={"rounds": 6})
    write("fednh", 0, [], rows=[], status="failed", protocol={"rounds": 6})
    broken = tmp_path / "results" / "study" / "broken"
    broken.mkdir()
    (broken / "protocol.json").write_text("{")
    lines, table = parts(made())
    # the unfinished method is ahead, shown, and neither bold nor called the highest
    assert lines[1:] == [
        "Highest GM: FedProc, 60.00 % (n = 1), 8.00 points above FedAvg.",
        "One seed only (FedProc, MOON): nothing tells how much of a difference is chance.",
        SAME,
        "**Not finished: 1 damaged, 1 diverged, 1 failed, 1 unfinished**; the list of runs below says which and why.",
    ]
    assert lines[0].startswith("7 runs: 5 methods, 1 setting, 2 seeds.")
    shown = {cells[0].text: (cells[1].text, cells[1].bold) for cells in table.rows}
    assert shown == {
        "FedAvg": ("52.00 ± 2.83", False),
        "FedProc": ("60.00", True),
        "MOON": ("90.00", False),
        "FedProx": ("diverged", False),
        "FedNH": ("-", False),
    }
    assert "Not finished, numbers of the last round that all its seeds have: MOON." in table.notes
    assert "`-`: not measured." in table.notes


def test_settings_are_columns(write: Write, made: Made) -> None:
    for beta, end in ((0.1, 0.4), (0.5, 0.6)):
        write("fedavg", 0, [end], protocol={"beta": beta})
        write("fedproc", 0, [end + 0.1], protocol={"beta": beta})
    write("moon", 0, [0.65], protocol={"beta": 0.5})
    lines, table = parts(made())
    assert list(table.heads) == ["method", "GM, beta=0.1", "GM, beta=0.5"]
    assert [c.text for c in row([table], "MOON")] == ["MOON", "-", "65.00"]
    assert lines[1:] == [
        "Setting 1. Highest GM: FedProc, 50.00 % (n = 1), 10.00 points above FedAvg.",
        "Settings 1, 2. One seed only: nothing tells how much of a difference is chance.",
        f"Settings 1, 2. {SAME}",
        "Setting 2. Highest GM: FedProc, 70.00 % (n = 1), 5.00 points above MOON.",
    ]


def test_personal_models_of_other_populations_are_not_compared(write: Write, made: Made, line: Any) -> None:
    for method, asked, clients in (("fedavg", "active", range(4)), ("fedproc", "all", range(4))):
        counted = 4 if asked == "active" else 10
        rows = [line(0, 0.5, clients, pm_v=0.5 + 0.1 * (asked == "all"), pm_clients=counted)]
        document = {"adapted": {"pm_clients": asked}}
        write(method, 0, [0.5], rows=rows, document=document)
    told = next(text for text in parts(made())[0] if "PM(V): FedProc" in text)
    assert told.endswith("10.00 points above FedAvg (populations differ: not comparable).")


def test_what_is_not_the_same_for_all_methods(write: Write, made: Made) -> None:
    write("fedavg", 0, [0.5], document={"network": {"name": "mlp", "w0": "a", "trained": 7}})
    write("fedproc", 0, [0.6], document={"network": {"name": "mlp", "w0": "b", "trained": 7}})
    assert parts(made())[0][-1] == (
        "Checked: the same for all methods of a seed: split, drawn clients; "
        "**not the same for all methods of a seed: initial weights (of networks of one size)**."
    )


def test_one_run_and_sets_of_options(write: Write, made: Made) -> None:
    write("fedprox", 0, [0.5], options={"mu": 0.1})
    lines, table = parts(made())
    assert lines == ["1 run: 1 method, 1 setting, 1 seed. Headline of the global model (GM): last round."]
    assert "One seed, hence no ±." in table.notes and "Bold" not in table.notes
    write("fedprox", 0, [0.6], options={"mu": 1.0})
    lines, table = parts(made())
    assert lines[0].startswith("2 runs: 1 method (2 with sets of options), 1 setting, 1 seed.")
    assert [cells[0].text for cells in table.rows] == ["FedProx (mu=0.1)", "FedProx (mu=1)"]


def test_nothing_to_tell(made: Made, tmp_path: Path) -> None:
    folder = tmp_path / "results" / "broken"
    folder.mkdir(parents=True)
    (folder / "protocol.json").write_text("{")
    assert summary(made()) == []


def test_names_are_escaped(write: Write, made: Made) -> None:
    write("fedavg", 0, [0.5])
    write("fedproc", 0, [0.6], name="<b>*x*|")
    lines, table = parts(made())
    assert lines[1].startswith(r"Highest GM: &lt;b&gt;\*x\*\|, 60.00 %")
    assert [cells[0].text for cells in table.rows] == ["<b>*x*|", "FedAvg"]


def test_a_third_population_says_nothing_of_the_two_that_are_compared(write: Write, made: Made, line: Any) -> None:
    for method, asked, reached in (("fedavg", "active", 0.5), ("fedproc", "active", 0.6), ("moon", "all", 0.4)):
        counted = 4 if asked == "active" else 10
        rows = [line(0, 0.5, range(4), pm_v=reached, pm_clients=counted)]
        write(method, 0, [0.5], rows=rows, document={"adapted": {"pm_clients": asked}})
    told = next(text for text in parts(made())[0] if "PM(V): FedProc" in text)
    assert told.endswith("10.00 points above FedAvg.")
