"""Run folders in every state: nothing raises, nothing wrong is taken for right."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protofl.errors import UserError
from protofl.report import read, runs

Write = Callable[..., Path]


def test_finished(write: Write) -> None:
    run = read.read(write("fedproc", 3, (0.5, 0.6)))
    assert (run.status, run.reason, run.method, run.name, run.seed, run.total) == (
        "finished", "", "fedproc", "FedProc", 3, 2,
    )  # fmt: skip


def test_a_killed_run_keeps_its_whole_lines(write: Write, line: Any) -> None:
    rows = [line(t, 0.1 * t, [0]) for t in range(4)]
    run = read.read(write("fedavg", 0, [0.5] * 9, rows=rows, status="running", tail='{"round": 4, "gm": 0.'))
    assert (run.status, run.played) == ("unfinished", 4)
    assert "4 of 9 rounds" in run.reason and "cut off" in run.reason


def test_a_whole_last_line_without_its_end_counts(write: Write, line: Any) -> None:
    folder = write("fedavg", 0, (0.5, 0.6), rows=[line(0, 0.5, [0])], tail=json.dumps(line(1, 0.6, [0])))
    assert read.read(folder).status == "finished"


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("protocol.json", None, "protocol.json is missing"),
        ("protocol.json", "{", "protocol.json is not whole JSON"),
        ("protocol.json", "[]", "protocol.json is not a JSON object"),
        ("protocol.json", "{}", "does not name the method"),
        ("protocol.json", '{"method": {"name": "x"}, "protocol": {}}', "no seed"),
        ("protocol.json", '{"method": {"name": "x"}, "protocol": [1]}', "protocol is not an object"),
        ("rounds.jsonl", '{"round": 0}\nrubbish\n{"round": 1}\n', "line 2 of rounds.jsonl: not whole JSON"),
        ("rounds.jsonl", '{"round": 0, "gm": 61.2}\n', "line 1 of rounds.jsonl: gm is not"),
        ("rounds.jsonl", '{"round": 0, "gm_scores": {"a": 7}}\n', "gm_scores a is not"),
        ("rounds.jsonl", '{"round": 0, "terms": 3}\n', "terms is not"),
        ("rounds.jsonl", '{"round": "0"}\n', "not a row of a round"),
        ("rounds.jsonl", '{"round": 0, "gm": 0.1}\n{"round": 0, "gm": 0.2}\n', "two different rows"),
        ("rounds.jsonl", '{"round": 0, "gm": 0.1}\n', "marked finished, but has 1 of 2 rounds"),
        ("rounds.jsonl", '{"round": 0}\n{"round": 2}\n', "marked finished, but has 2 of 2 rounds"),
        ("rounds.jsonl", b"\xff\xfe\x00\n\n", "line 1 of rounds.jsonl"),
        ("rounds.jsonl", None, "marked finished, but has 0 of 2 rounds; rounds.jsonl is missing"),
    ],
)  # fmt: skip
def test_damaged(write: Write, file: str, content: str | bytes | None, reason: str) -> None:
    folder = write()
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    run = read.read(folder)
    assert run.status == "damaged"
    assert reason in run.reason


def test_repeated_rows_of_a_resumed_run_count_once(write: Write, line: Any) -> None:
    run = read.read(write("fedavg", 0, (0.1, 0.2), rows=[line(0, 0.1, [0])] * 2 + [line(1, 0.2, [0])]))
    assert (run.status, run.played) == ("finished", 2)


def test_summary_and_env_may_be_missing(write: Write) -> None:
    folder = write()
    (folder / "summary.json").unlink()
    (folder / "env.json").unlink()
    assert read.read(folder).status == "finished"
    (folder / "done").unlink()
    assert read.read(folder).status == "unfinished"


def test_diverged_and_failed(write: Write, line: Any) -> None:
    rows = [line(0, 0.3, [0]), line(1, None, [0], diverged=True, loss=float("nan"))]
    run = read.read(write("fedavg", 0, [0.1] * 5, rows=rows, status="diverged"))
    assert (run.status, run.diverged_at, run.reason) == ("diverged", 1, "diverged at round 1")
    run = read.read(write("fedavg", 1, [0.1] * 5, rows=[], status="failed", summary={"error": "out of memory"}))
    assert (run.status, run.reason) == ("failed", "failed: out of memory")


def test_every_run_once_and_runs_are_not_searched(write: Write, tmp_path: Path) -> None:
    one = write("fedavg", 0)
    (one / "state").mkdir()
    (one / "state" / "summary.json").write_text("{}")
    two = write("fedprox", 0)
    assert [r.path for r in runs([tmp_path])] == [one, two]
    assert [r.path for r in runs([two, tmp_path, one])] == [two, one]


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no runs below"):
        runs([tmp_path])
    with pytest.raises(UserError, match="there is no folder"):
        runs([tmp_path / "results"])


def test_last_prototypes(write: Write, prototypes: Callable[..., None]) -> None:
    folder = write()
    assert read.read(folder).prototypes() == (None, "")
    prototypes(folder, 2)
    prototypes(folder, 10)
    found, problem = read.read(folder).prototypes()
    assert found is not None and (found.round, problem) == (10, "")
    (folder / "prototypes" / "round-00011.npz").write_bytes(b"PK rubbish")
    assert read.read(folder).prototypes() == (None, "prototypes/round-00011.npz cannot be read")
    np.savez(folder / "prototypes" / "round-00012.npz", values=np.zeros((3, 2)), has=np.ones(4, bool))
    assert "cannot be read" in read.read(folder).prototypes()[1]
    np.savez(folder / "prototypes" / "round-00013.npz", values=np.array([{}], dtype=object))
    assert "cannot be read" in read.read(folder).prototypes()[1]


def test_prototypes_of_clients_alone(write: Write) -> None:
    folder = write()
    (folder / "prototypes").mkdir()
    np.savez(folder / "prototypes" / "round-00001.npz", client_values=np.zeros((2, 3)), client_labels=[0, 1])
    found, _ = read.read(folder).prototypes()
    assert found is not None
    assert found.values.shape == (0, 3) and found.client_ids.tolist() == [-1, -1]
