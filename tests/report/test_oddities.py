"""What a report tells its reader to look at twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from protofl.report import read, report, tables

Write = Callable[..., Path]


def told(root: Path) -> list[str]:
    return tables.odd(read.runs([root]))


def rows(curve: list[float], gpc: list[float]) -> list[dict[str, object]]:
    return [{"round": t, "gm": gm, "terms": {"loss": 1.0, "gpc": v}} for t, (gm, v) in enumerate(zip(curve, gpc))]


def test_equal_curves(write: Write, tmp_path: Path) -> None:
    for method, second in (("fedavg", 0.62), ("moon", 0.62), ("fedproc", 0.63)):
        for seed in (0, 1):
            write(method, seed, [0.5, second])
    (line,) = told(tmp_path)
    assert "same GM" in line and "FedAvg" in line and "MOON" in line and "FedProc" not in line
    page = report(tmp_path, tmp_path / "page", title="t").with_name("README.md").read_text()
    assert "Look twice: the same GM in every round of every seed: FedAvg, MOON" in page


def test_one_seed_that_differs_is_enough(write: Write, tmp_path: Path) -> None:
    for method, last in (("fedavg", 0.62), ("moon", 0.63)):
        write(method, 0, [0.5, 0.62])
        write(method, 1, [0.5, last])
    assert told(tmp_path) == []


def test_terms_that_are_never_there(write: Write, tmp_path: Path) -> None:
    write("fedproc", 0, [0.5, 0.6], rows=rows([0.5, 0.6], [0.0, 0.0]))
    write("fednh", 0, [0.5, 0.61], rows=rows([0.5, 0.61], [0.0, 0.1]))
    assert told(tmp_path) == ["exactly 0 in every round of FedProc: gpc (it trains as if that were not there)"]


def test_chance(write: Write, tmp_path: Path) -> None:
    """10 classes, 10 000 test images: 0.1 + 2 sqrt(0.09 / 10 000) = 0.106."""
    write("fedavg", 0, [0.5, 0.106])
    write("moon", 0, [0.5, 0.107])
    assert told(tmp_path) == ["FedAvg is at chance: 10.60 % GM, of 10 classes"]
