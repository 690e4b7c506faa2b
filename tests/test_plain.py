"""FedAvg against a plain script that shares nothing with protofl but the split."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from test_cli import spawned

from protofl.records import read_rows
from protofl.report import asked

SCRIPT = Path(__file__).with_name("plain_fedavg.py")
RESULTS = SCRIPT.parent.parent / "results"
DATA = Path(os.environ.get("PROTOFL_DATA", ""))
ROUNDS, SEEDS, POINTS = 20, (0, 1), 1.5


def test_the_script_is_short_and_knows_nothing_of_protofl() -> None:
    text = SCRIPT.read_text("utf-8")
    assert len(text.splitlines()) <= 80 and "import protofl" not in text and "from protofl" not in text


def test_the_reference_runs_are_where_the_script_is() -> None:
    """CIFAR-10, 100 rounds of one epoch, the committed runs of both: the last round, and the last ten, within 1.5 points."""
    files = sorted(RESULTS.glob("plain-fedavg-cifar10-*.jsonl"))
    theirs = [[r["gm"] for r in read_rows(path)] for path in files]
    runs = asked.find([RESULTS / "cifar10.tar.xz"]).runs
    ours = [[r["gm"] for r in run.rounds if r.get("gm") is not None] for run in runs if run.method == "fedavg"]
    assert [len(one) for one in (*theirs, *ours)] == [100] * 6
    for last in (1, 10):
        means = [statistics.fmean(statistics.fmean(one[-last:]) for one in way) for way in (ours, theirs)]
        assert abs(means[0] - means[1]) < POINTS / 100


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.skipif(not (DATA / "cifar10.npz").is_file(), reason="PROTOFL_DATA has no cifar10.npz")
def test_fedavg_on_cifar10_equals_a_plain_script(tmp_path: Path) -> None:
    """MOON's setting with 1 local epoch and 20 rounds: means of the last five rounds and two seeds within 1.5 points."""
    split = tmp_path / "split.npz"
    where = ("--dataset", "cifar10", "--data-dir", DATA)
    spawned("partition", *where, "--save", split, cwd=tmp_path)
    words = (
        "bench",
        "--methods",
        "fedavg",
        *where,
        "--rounds",
        ROUNDS,
        "--local-epochs",
        1,
        "--seeds",
        "0,1",
        "--no-report",
    )
    spawned(*words, cwd=tmp_path)
    ours = [r["gm"] for p in (tmp_path / "results").glob("*/*/rounds.jsonl") for r in read_rows(p)[-5:]]
    theirs = []
    for seed in SEEDS:
        words = (sys.executable, SCRIPT, DATA / "cifar10.npz", split, ROUNDS, 1, seed)
        told = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=True)
        theirs += [json.loads(line)["gm"] for line in told.stdout.splitlines()[-5:]]
    assert len(ours) == len(theirs) == 10
    assert abs(statistics.fmean(ours) - statistics.fmean(theirs)) < POINTS / 100
