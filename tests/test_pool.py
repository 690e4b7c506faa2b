"""The clients of a round in several processes: the same bits, and what goes wrong there is told here."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from test_run import cell, rows

from protofl import records, run
from protofl.cells import Cell
from protofl.engine import workers
from protofl.engine.base import MethodError
from protofl.run import Run, play, prepare

PLAIN: dict[str, Any] = {"engine": "loop", "rounds": 3, "local_epochs": 1, "participation": 0.6}


def played(asked: Cell, results: Path, processes: int) -> Path:
    ready = prepare(asked)
    assert play(ready, results, lambda event: None, processes)["status"] == "finished"
    return results / ready.folder


def everything(folder: Path) -> tuple[Any, ...]:
    """Rows and the content of the state files, which their names carry the check sums of."""
    names = sorted(p.name for p in (folder / "state").rglob("*.safetensors"))
    return rows(folder), names


@pytest.fixture(autouse=True)
def one_thread() -> None:
    workers.warm(["protofl.bench"])
    run.set_up_process()


@pytest.mark.parametrize(
    ("method", "fields"),
    [("moon", {"optimizer_reset": "never"}), ("fedcspc", {}), ("fedproc", {"engine": "batched", "crew": 1})],
)
def test_more_processes_change_no_bit(method: str, fields: dict[str, Any], tmp_path: Path) -> None:
    asked = cell(method, **{**PLAIN, **fields})
    alone = everything(played(asked, tmp_path / "1", 1))
    assert everything(played(asked, tmp_path / "2", 2)) == alone and len(alone[1]) > 0


FAILS = """
from dataclasses import dataclass
from protofl.method import Diverged, Train, Tree
from protofl.methods.fedavg import FedAvg

@dataclass(frozen=True)
class Fails(FedAvg):
    def local(self, client, shared, own):
        if client.round == 1 and client.id == 5:
            raise {what}
        w = yield Train(shared.net, self.loss)
        return Tree(net=w), Tree()
"""


@pytest.mark.parametrize("what", ["ValueError('on purpose')", "Diverged('on purpose')"])
def test_what_a_client_raises_is_told_with_its_place(what: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fails.py").write_text(FAILS.replace("{what}", what))
    ready = prepare(cell("./fails.py", **{**PLAIN, "participation": 1.0}))
    if what.startswith("Diverged"):
        assert play(ready, tmp_path, lambda event: None, 2)["error"] == "on purpose"
    else:
        with pytest.raises(MethodError, match=r"Fails.local raised ValueError: on purpose \[round 1, client 5"):
            play(ready, tmp_path, lambda event: None, 2)
    assert records.read_rows(tmp_path / ready.folder / "rounds.jsonl")[0]["round"] == 0


@pytest.mark.parametrize("noticed", ["when it should answer", "when it is spoken to"])
def test_a_process_that_dies_ends_the_run_which_can_be_resumed(noticed: str, tmp_path: Path, monkeypatch: Any) -> None:
    asked = cell("moon", **PLAIN)
    straight = everything(played(asked, tmp_path / "straight", 1))
    ready, step = prepare(asked), Run.step

    def dies(self: Run, t: int) -> dict[str, Any]:
        if t == 1:
            assert self.pool is not None
            os.kill(self.pool.workers[0].process.pid or 0, signal.SIGKILL)
            if noticed == "when it is spoken to":
                self.pool.workers[0].process.join()
        return step(self, t)

    monkeypatch.setattr(Run, "step", dies)
    with pytest.raises(RuntimeError, match=r"a process of this run ended \(exit code -9\)"):
        play(ready, tmp_path / "killed", lambda event: None, 2)
    monkeypatch.setattr(Run, "step", step)
    assert everything(played(asked, tmp_path / "killed", 2)) == straight
