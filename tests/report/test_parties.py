"""std_over=parties: the ± of a method is over the parties of one run, and the report says so."""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from rich.console import Console

from protofl.report import groups, report, runs, tables

Write = Callable[..., Path]

FOUR = (0.75, 0.84, 0.50, 0.61)
OTHER = (0.30, 0.40, 0.50, 0.36)
BY_PARTY = {"budget": "epochs", "std_over": "parties", "std_ddof": 0}


def measured(line: Any, t: int, each: Sequence[float | None], **more: Any) -> dict[str, Any]:
    """A row with the personal accuracies of the parties: uniform as given, v and l larger by a tenth and a fifth."""
    known = [v for v in each if v is not None]
    row: dict[str, Any] = {"pm_each": {"client": list(range(len(each)))}, "pm_clients": len(known), "pm_skipped": 0}
    for name, more_of_it in (("uniform", 0.0), ("v", 0.1), ("l", 0.2)):
        values = [None if v is None else v * (1 + more_of_it) for v in each]
        row["pm_each"][name] = values
        row[f"pm_{name}"] = statistics.fmean(v for v in values if v is not None)
        row[f"pm_{name}_std"] = statistics.pstdev(v for v in values if v is not None)
    return line(t, None, range(len(each)), gm_scores={}, **(row | more))


def solo(write: Write, line: Any, seed: int, *rounds: Sequence[float | None], **options: Any) -> Path:
    """A run of SOLO whose parties reach these accuracies, round by round."""
    rows = [measured(line, t, each) for t, each in enumerate(rounds)]
    return write("solo", seed, [None] * len(rows), rows=rows, name="SOLO", options=BY_PARTY | options,
                 document={"adapted": {"rounds": len(rows), "pm_clients": "all"}}, protocol={"rounds": 100})  # fmt: skip


def found(folder: Path, metric: str = "pm_uniform", rule: str = "last") -> pd.Series[Any]:
    """The row of the tidy table."""
    tidy = tables.accuracy(groups.settings(runs([folder.parent])))
    tidy = tidy[(tidy["metric"] == metric) & (tidy["rule"] == rule)]
    assert len(tidy) == 1
    return tidy.iloc[0]


def test_four_parties(write: Write, line: Any) -> None:
    row = found(solo(write, line, 0, FOUR))
    assert (row["n"], row["over"], row["ddof"]) == (1, "parties", 0)
    assert row["mean"] == pytest.approx(0.675) and row["sd"] == pytest.approx(0.130096, abs=5e-7)


def test_divisor(write: Write, line: Any) -> None:
    row = found(solo(write, line, 0, FOUR, std_ddof=1))
    assert row["ddof"] == 1 and row["sd"] == pytest.approx(0.150222, abs=5e-7)


def test_every_weighting_has_its_own(write: Write, line: Any) -> None:
    folder = solo(write, line, 0, FOUR)
    for metric, factor in (("pm_uniform", 1.0), ("pm_v", 1.1), ("pm_l", 1.2)):
        row = found(folder, metric)
        assert row["over"] == "parties" and row["sd"] == pytest.approx(factor * statistics.pstdev(FOUR))
    assert found(folder, "pm_uniform_std")["over"] == found(folder, "gm")["over"] == "seeds"


def test_several_seeds(write: Write, line: Any) -> None:
    """Every run has its parties: the mean is over all runs, the ± is the mean of what it is in each."""
    for seed, each in enumerate((FOUR, OTHER)):
        folder = solo(write, line, seed, each)
    row = found(folder)
    assert (row["n"], row["seeds"], row["over"]) == (2, "0 1", "parties")
    assert row["mean"] == pytest.approx((0.675 + 0.39) / 2)
    assert row["sd"] == pytest.approx((statistics.pstdev(FOUR) + statistics.pstdev(OTHER)) / 2)
    pooled, seeds = statistics.pstdev((*FOUR, *OTHER)), statistics.stdev((0.675, 0.39))
    assert abs(row["sd"] - pooled) > 1e-3 < abs(row["sd"] - seeds)


def test_over_seeds_as_everybody(write: Write, line: Any) -> None:
    for seed, each in enumerate((FOUR, OTHER)):
        folder = solo(write, line, seed, each, std_over="seeds")
    row = found(folder)  # by the table's divisor, whatever the method's own
    assert (row["over"], row["ddof"]) == ("seeds", 1) and row["sd"] == pytest.approx(statistics.stdev((0.675, 0.39)))


def test_rules_choose_rounds_of_parties(write: Write, line: Any) -> None:
    """The mean of the last five is a party's own before the spread is taken."""
    rounds = [(0.1, 0.9, 0.5, 0.5), (0.9, 0.1, 0.5, 0.5)]
    folder = solo(write, line, 0, *rounds)
    assert found(folder)["sd"] == pytest.approx(statistics.pstdev(rounds[1]))
    assert found(folder, rule="mean_last_5")["sd"] == pytest.approx(0)


def test_parties_without_a_number(write: Write, line: Any) -> None:
    assert found(solo(write, line, 0, (*FOUR, None)))["sd"] == pytest.approx(0.130096, abs=5e-7)


def test_a_single_party_has_no_spread(write: Write, line: Any) -> None:
    assert pd.isna(found(solo(write, line, 0, (0.7, None)))["sd"])


def test_records_without_parties(write: Write, line: Any) -> None:
    folder = write("solo", 0, [None], rows=[line(0, None, [0], pm_uniform=0.5)], name="SOLO", options=BY_PARTY)
    row = found(folder)
    assert row["mean"] == 0.5 and pd.isna(row["sd"])


@pytest.mark.parametrize("wrong", [[], {"client": 3}, {"client": [0], "uniform": ["x"]}])
def test_a_damaged_row(write: Write, line: Any, wrong: Any) -> None:
    (run,) = runs([write("solo", 0, [None], rows=[line(0, None, [0], pm_each=wrong)], options=BY_PARTY)])
    assert run.status == "damaged" and "pm_each" in run.reason


def page(folder: Path, out: Path) -> str:
    """The section on personal models."""
    text = (report(folder.parent, out, title="t").parent / "README.md").read_text()
    return text.split("### Accuracy of the personalised models (PM)")[1].split("\n##")[0]


def test_the_report_says_so(write: Write, line: Any, tmp_path: Path, sketched: None) -> None:
    for seed, each in enumerate((FOUR, OTHER)):
        folder = solo(write, line, seed, each)
        write("fedavg", seed, [None], rows=[measured(line, 0, each)], protocol={"rounds": 100},
              document={"adapted": {"rounds": 1}})  # fmt: skip
    text = page(folder, tmp_path / "out")
    mine = next(part for part in text.splitlines() if part.startswith("| SOLO"))
    theirs = next(part for part in text.splitlines() if part.startswith("| FedAvg"))
    assert "53.25 ± 10.14" in mine and "53.25 ± 20.15" in theirs
    assert "±: sd over 2 seeds, n-1; ± of SOLO: sd over the parties of one run, n, its mean over 2 seeds." in text
    terminal = Console(file=io.StringIO(), width=160)
    terminal.print(tables.terminal(runs([folder.parent])))
    shown = terminal.file.getvalue()  # type: ignore[attr-defined]
    assert "± 11.16" in shown and "± of SOLO: sd over the parties of one run, n, its mean over 2 seeds" in shown


def test_one_run_says_one_run(write: Write, line: Any, tmp_path: Path, sketched: None) -> None:
    text = page(solo(write, line, 0, FOUR), tmp_path / "out")
    assert "67.50 ± 13.01" in text
    assert "± of SOLO: sd over the parties of one run, n. " in text and "One seed" not in text
    both = page(write("fedavg", 0, [None], rows=[measured(line, 0, FOUR)], protocol={"rounds": 100},
                      document={"adapted": {"rounds": 1}}), tmp_path / "both")  # fmt: skip
    assert "One seed, hence no ±; ± of SOLO: sd over the parties of one run, n." in both
