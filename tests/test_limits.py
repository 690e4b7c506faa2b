"""What the machine takes away: disk, memory, rights, the clock, the folder's lock. Nothing that was computed is lost."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from test_cli import PROTOFL, protofl, runs
from test_run import cell, played, rows

from protofl import cli, files, records, run
from protofl.errors import UserError, failure
from protofl.run import play, prepare

SMALL = ("bench", "--methods", "fedavg", "--seeds", 0, "--rounds", 3, "--local-epochs", 1, "--no-report")


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "out", Console(width=200))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    run.set_up_process()


# ---- a disk that is full ---------------------------------------------------------------------------------------------


class FullDisk:
    """Of all that a run writes, what comes as number `at` is written by half, and there is no space for it."""

    def __init__(self, patch: pytest.MonkeyPatch, at: int) -> None:
        self.at, self.written = at, 0
        whole, append = files.write_bytes, records.RunFolder.append

        def write(path: Path, content: bytes) -> None:
            if self.full():
                path.parent.mkdir(parents=True, exist_ok=True)
                (path.parent / ".half.tmp").write_bytes(content[: len(content) // 2])
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
            whole(path, content)

        def add(folder: records.RunFolder, row: Any) -> None:
            if self.full():
                with open(folder.path / "rounds.jsonl", "a", encoding="utf-8") as file:
                    file.write(json.dumps(row)[:40])
                raise OSError(errno.ENOSPC, "No space left on device", str(folder.path / "rounds.jsonl"))
            append(folder, row)

        patch.setattr(files, "write_bytes", write)
        patch.setattr(records, "write_bytes", write)
        patch.setattr(records.RunFolder, "append", add)

    def full(self) -> bool:
        self.written += 1
        return self.written >= self.at


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_a_disk_that_is_full_at_any_moment(every: int, tmp_path: Path) -> None:
    """Whatever could not be written: the line says which file, the same run resumes, and equals one with a disk to itself."""
    asked = cell("moon", participation=0.5)
    ready, straight = prepare(asked), played(asked, tmp_path / "straight")
    with pytest.MonkeyPatch.context() as patch:
        disk = FullDisk(patch, at=10**6)
        played(asked, tmp_path / "counted")
    assert disk.written > 15
    for at in range(1, disk.written + 1, every):
        place = tmp_path / f"full-{at}"
        with pytest.MonkeyPatch.context() as patch:
            FullDisk(patch, at)
            with pytest.raises(OSError, match="No space left on device") as fault:
                play(ready, place, lambda event: None)
        line, trace = failure(fault.value)
        assert str(place) in line and "the same command resumes" in line and not trace
        assert played(asked, place) == straight
        assert (place / ready.folder / "summary.json").read_bytes() == (
            tmp_path / "straight" / ready.folder / "summary.json"
        ).read_bytes()


def limited(*words: Any, cwd: Path, limit: int) -> tuple[int, str]:
    """The command in a process whose files may not grow beyond `limit` bytes -> exit code, what it said."""
    told = subprocess.run(
        [*PROTOFL, *map(str, words)], cwd=cwd, capture_output=True, text=True, timeout=300,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},  # Python would leave bytecode cut short behind
    )  # fmt: skip
    return told.returncode, told.stdout + told.stderr


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_files_that_may_not_grow(workers: int, tmp_path: Path) -> None:
    """A limit of the system below the size of a state, in the process itself and in workers."""
    words = (*SMALL, "--workers", workers, "--set", "seeds=0,1")
    code, said = limited(*words, cwd=tmp_path, limit=6000)
    assert code == 1 and "Traceback" not in said
    last = said.strip().splitlines()[-1]
    assert "failed: File too large: " in last and "state/round-00000" in last.replace("\n", "")
    protofl(*words, cwd=tmp_path)
    assert [len(r) for r in runs(tmp_path / "results").values()] == [3, 3]


# ---- memory ----------------------------------------------------------------------------------------------------------

GREEDY = """
from dataclasses import dataclass
import torch
from protofl.methods.fedavg import FedAvg

@dataclass(frozen=True)
class Greedy(FedAvg):
    def aggregate(self, server, shared, private, uploads):
        {what}
        return super().aggregate(server, shared, private, uploads)
"""


@pytest.mark.parametrize("what", ["torch.empty(10**16)", "bytearray(10**16)"])
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_out_of_memory(what: str, workers: int, tmp_path: Path) -> None:
    """The run that asked for it fails with that cause on the last line; the others end."""
    (tmp_path / "greedy.py").write_text(GREEDY.format(what=f"{what} if server.round == 1 else None"))
    words = [w if w != "fedavg" else "./greedy.py,fedavg" for w in SMALL]
    said = protofl(*words, "--workers", workers, cwd=tmp_path, code=1)
    assert "out of memory (" in said.strip().splitlines()[-1] and "Traceback" not in said
    assert sorted(len(r) for r in runs(tmp_path / "results").values()) == [1, 3]


def test_what_a_machine_lacks_is_no_fault_of_ours() -> None:
    """Told in one line, also where it was wrapped; what is a fault of ours has its traceback, whatever came before it."""

    def raised(inner: BaseException, outer: Callable[[], BaseException]) -> tuple[str, str]:
        try:
            try:
                raise inner
            except BaseException as e:
                raise outer() from e
        except BaseException as e:
            return failure(e)

    full = OSError(errno.ENOSPC, "No space left on device", "/x")
    line, trace = raised(full, lambda: RuntimeError("cannot be stored"))
    assert line.startswith("No space left on device: /x; ") and not trace
    assert raised(full, lambda: UserError("give another folder")) == ("give another folder", "")
    line, trace = raised(KeyError("k"), lambda: RuntimeError("wrong"))
    assert line == "RuntimeError: wrong" and "KeyError" in trace
    line, trace = failure(FileNotFoundError(errno.ENOENT, "No such file", "/x"))
    assert "FileNotFoundError" in line and trace


# ---- others in the same folder ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_at_once_in_one_folder(tmp_path: Path) -> None:
    """The same command twice at the same time: one of both does each run, the other says so; no row is written twice."""
    words = [*PROTOFL, *map(str, SMALL), "--methods", "fedavg,moon,fedproc", "--rounds", "6", "--workers", "1"]
    both = [
        subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(2)
    ]
    said = [p.communicate(timeout=300)[0] for p in both]
    assert {p.returncode for p in both} <= {0, 1} and "Traceback" not in "".join(said)
    for p, text in zip(both, said):
        assert p.returncode == 0 or "another process is at work on" in text, text
    again = protofl(*map(str, SMALL[:1]), *words[-6:], *SMALL[3:5], "--local-epochs", 1, "--no-report", cwd=tmp_path)
    assert "Traceback" not in again
    alone = tmp_path / "alone"
    alone.mkdir()
    protofl(*map(str, SMALL[:1]), *words[-6:], *SMALL[3:5], "--local-epochs", 1, "--no-report", cwd=alone)
    assert runs(tmp_path / "results") == runs(alone / "results") and len(runs(alone / "results")) == 3


def test_finished_elsewhere_meanwhile(tmp_path: Path) -> None:
    """A run that was planned, and that another process has finished since: nothing is played, its summary stays."""
    asked = cell("fedproc")
    ready = prepare(asked)
    played(asked, tmp_path)
    folder = tmp_path / ready.folder
    before = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
    told = play(ready, tmp_path, lambda event: None)
    assert told == json.loads(before["summary.json"]) and told["confusion"] is not None
    assert before == {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


@pytest.mark.parametrize("fields", [{}, {"bn_buffers": "local"}], ids=str)
def test_killed_after_the_last_round(fields: dict[str, Any], tmp_path: Path) -> None:
    """Between the last state and the mark that the run is finished: the summary is that of a run that was not killed."""
    asked = cell("fedavg", model="mlp", **fields)
    folder = tmp_path / prepare(asked).folder
    played(asked, tmp_path)
    summary = (folder / "summary.json").read_bytes()
    (folder / "done").unlink()
    (folder / "summary.json").unlink()
    played(asked, tmp_path)
    assert (folder / "summary.json").read_bytes() == summary


# ---- the clock -------------------------------------------------------------------------------------------------------


def test_a_clock_that_is_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two parts of a run and within it; files from the future: the newest state is that of the latest round."""
    asked = cell("moon", rounds=5)
    straight, folder = played(asked, tmp_path / "straight"), prepare(asked).folder
    save = run.Run._save

    def stop(self: run.Run, done: int) -> None:
        save(self, done)
        if done == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(run.Run, "_save", stop)
    with pytest.raises(KeyboardInterrupt):
        played(asked, tmp_path / "back")
    monkeypatch.setattr(run.Run, "_save", save)
    states = sorted((tmp_path / "back" / folder / "state").glob("round-*"))
    for age, path in enumerate(states):
        os.utime(path, (time.time() + 1e7 * (1 - age),) * 2)
    now = iter(range(10**9, 0, -(10**5)))
    monkeypatch.setattr(time, "time", lambda: float(next(now)))
    begun: list[int] = []
    play(prepare(asked), tmp_path / "back", lambda e: begun.append(e["round"]) if e["kind"] == "start" else None)
    assert begun == [3] and rows(tmp_path / "back" / folder) == straight


# ---- rights ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="a folder that nobody can write is taken from /proc")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """Refused before any work, also of who may write everywhere."""
    said = protofl(*SMALL, "--results", "/proc/nothing", cwd=tmp_path, code=2)
    assert "\nError: results folder '/proc/nothing' cannot be written:" in said and "started" not in said
    said = protofl(*(w for w in SMALL if w != "--no-report"), "--reports", "/proc/nothing", cwd=tmp_path, code=2)
    assert "\nError: reports folder '/proc/nothing' cannot be written:" in said and not list(tmp_path.rglob("*.json"))
