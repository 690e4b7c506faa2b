"""Runs end to end: the figures of protocol section 8, resuming, and what may not change a number."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protofl import records, registry, run, suites
from protofl.engine.base import MethodError
from protofl.errors import UserError
from protofl.evaluate import score
from protofl.experiment import Settings, cells
from protofl.federation import Federation
from protofl.run import Cell, Run, play, prepare, replay

TIMES = ("seconds", "memory_mb")


def cell(method: str, **given: Any) -> Cell:
    s = Settings(methods=[method])
    quick = {"fedcspc.calib_epochs": 2} if method == "fedcspc" else {}
    for name, value in {"seeds": 0, "rounds": 3, "local_epochs": 2, **quick, **given}.items():
        s.take_text(f"{name}={value}") if "." in name else s.take(name, value, "test")
    (made,) = cells(s)
    return made


def rows(folder: Path) -> list[dict[str, Any]]:
    """The records of a run, times apart."""
    return [{k: v for k, v in r.items() if k not in TIMES} for r in records.read_rows(folder / "rounds.jsonl")]


def played(asked: Cell, results: Path) -> list[dict[str, Any]]:
    ready = prepare(asked)
    assert play(ready, results, lambda event: None)["status"] == "finished"
    return rows(results / ready.folder)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    run.set_up_process()


# ---- the figures of protocol section 8 ------------------------------------------------------------------------------

FIGURES = {
    "fedavg": {1: (10.1623072048, 2.3014681322), 2: (10.2710452553, 2.2883990951), 3: (10.4492656217, 2.2123691699),
               20: (13.294558, 0.656676, 292)},
    "fedproc": {1: (10.1046227038, 2.3113150074), 2: (10.1206231993, 2.3128166775), 3: (10.1709003322, 2.3105014683),
                20: (12.888251, 0.734598, 278)},
}  # fmt: skip


QUICK = ("moon", "fedproc", "fedcspc")
"""Memory of clients, a table of the server, trees of its own; the others are slow tests."""

METHODS = [pytest.param(m, marks=[] if m in QUICK else pytest.mark.slow) for m in registry.ORDER]
EVERY = [pytest.param(m, marks=[] if m in QUICK else pytest.mark.slow) for m in registry.names()]


@pytest.mark.parametrize("engine", ["loop", pytest.param("batched", marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", FIGURES)
def test_end_to_end_figures(method: str, engine: str) -> None:
    """digits.digits in float64: norm of all global weights, mean test loss, images right of 355."""
    rounds = 20 if engine == "batched" else 3
    ready = prepare(cell(method, preset="digits.digits", precision="fp64", rounds=20, local_epochs=10, engine=engine))
    task, test = run.task(ready)
    fed = Federation(ready.method, task)
    fed.introduce()
    for t in range(rounds):
        fed.play(t)
        if t + 1 in FIGURES[method]:
            norm, loss, *right = FIGURES[method][t + 1]
            got = score(fed.global_model(), ready.net, test)  # type: ignore[arg-type]
            exact = 1e-9 if t < 3 else 1e-6
            total = sum(float(v.square().sum()) for v in fed.shared.net.values()) ** 0.5
            assert (total, got.loss) == (pytest.approx(norm, abs=exact), pytest.approx(loss, abs=exact))
            assert not right or int(np.trace(got.headline)) == right[0]  # type: ignore[arg-type]


# ---- stopped and resumed ---------------------------------------------------------------------------------------------

STOPPED = {
    "fedcspc": {"fedcspc.pool": "latest_all", "fedcspc.calib_init": "previous_calibrated"},
    "fedproc": {"fedproc.proto_participants": "all_latest", "fedproc.loss_prototype_source": "local"},
    "moon": {"moon.prev_buffer": 2, "moon.first_prev": "own_init", "moon.prev_age": "previous_round_only"},
}
PARTIAL = {"participation": 0.5, "lr_decay_per_round": 0.9, "rounds": 8, "local_epochs": 1}


@pytest.mark.parametrize("engine", ["batched", pytest.param("loop", marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", EVERY)
def test_killed_and_resumed_equals_straight_through(method: str, engine: str, tmp_path: Path) -> None:
    """kill -9 at a moment that differs from method to method; then again, until the run ends."""
    short = {f"{method}.{k}": v for k, v in suites.SHORT.get(method, {}).items()}
    asked = cell(method, engine=engine, **PARTIAL, **short, **STOPPED.get(method, {}))
    straight = played(asked, tmp_path / "straight")
    ready = prepare(asked)
    kills, log = 0, tmp_path / "killed" / ready.folder / "rounds.jsonl"
    rs = np.random.RandomState(len(method))
    while kills < 3:
        before = len(records.read_rows(log))
        child = os.fork()
        if child == 0:
            try:
                play(prepare(asked), tmp_path / "killed", lambda event: None)
            finally:
                os._exit(0)
        while len(records.read_rows(log)) <= before and os.waitpid(child, os.WNOHANG)[0] == 0:
            time.sleep(0.001)
        time.sleep(rs.uniform(0, 0.05))
        try:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        except (ProcessLookupError, ChildProcessError):
            break
        kills += 1
    assert 0 < len(records.read_rows(log)) < len(straight) or (log.parent / "done").exists()
    assert played(asked, tmp_path / "killed") == straight
    a, b = (sorted((tmp_path / d / ready.folder / "state").glob("round-*")) for d in ("straight", "killed"))
    assert [p.name for p in a] == [p.name for p in b]  # names carry the content's check sum


@pytest.mark.parametrize("method", METHODS)
def test_stopped_between_row_and_state(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = cell(method, bn_buffers="local", optimizer_reset="never", **PARTIAL)
    straight = played(asked, tmp_path / "straight")
    save = Run._save

    def stop(self: Run, done: int) -> None:
        if done == 4:
            raise KeyboardInterrupt
        save(self, done)

    monkeypatch.setattr(Run, "_save", stop)
    with pytest.raises(KeyboardInterrupt):
        played(asked, tmp_path / "stopped")
    monkeypatch.setattr(Run, "_save", save)
    assert len(rows(tmp_path / "stopped" / prepare(asked).folder)) == len(straight) - 4
    assert played(asked, tmp_path / "stopped") == straight


# ---- what may not change a number -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_the_same_twice_whatever_ran_before(method: str, tmp_path: Path) -> None:
    other = "fedavg" if method != "fedavg" else "moon"
    first = played(cell(method), tmp_path / "a")
    played(cell(other, seeds=1), tmp_path / "b")
    torch.rand(3), np.random.rand(3)
    assert played(cell(method), tmp_path / "b") == first
    assert played(cell(method, seeds=1), tmp_path / "b") != first


def test_methods_share_draws_and_batches(tmp_path: Path) -> None:
    """With its own term switched off each of these is FedAvg, bit for bit.

    In the loop engine: MOON's clients with and without a previous model are answered in separate calls.
    """
    plain = {"participation": 0.5, "z_normalize": "false", "engine": "loop"}
    want = played(cell("fedavg", **plain), tmp_path)
    for method, off in (
        ("fedprox", {"fedprox.mu": 0}), ("moon", {"moon.mu": 0}), ("moon", {"moon.second_term": "none"}),
        ("fedproc", {"fedproc.alpha_schedule": "ce_only"}), ("fedcspc", {"fedcspc.n_repeat": 0}),
    ):  # fmt: skip
        got = [r for r in played(cell(method, **plain, **off), tmp_path) if r["round"] >= 0]
        assert [(r["clients"], r["loss"], r["pm_v"]) for r in got] == [
            (r["clients"], r["loss"], r["pm_v"]) for r in want
        ]


def test_evaluation_changes_nothing_else(tmp_path: Path) -> None:
    often = played(cell("moon", rounds=4), tmp_path)
    seldom = played(cell("moon", rounds=4, eval_every=4), tmp_path)
    assert often[-1] == seldom[-1] and "gm" not in seldom[1]
    refreshed = played(cell("moon", rounds=4, pm_protocol="refresh", pm_clients="all"), tmp_path)
    assert refreshed[-1]["gm"] == often[-1]["gm"] and refreshed[-1]["pm_clients"] == 10
    assert refreshed[-1]["pm_v"] != often[-1]["pm_v"]


def test_one_client_is_local_training(tmp_path: Path) -> None:
    (row,) = played(cell("fedavg", clients=1, rounds=1), tmp_path)
    ready = prepare(cell("fedavg", clients=1, rounds=1))
    assert row["clients"] == [0] and row["gm"] == row["pm_uniform"] and ready.split.sizes.tolist() == [1442]


def test_every_library_runs_one_thread(tmp_path: Path) -> None:
    """Also those that came with a method: k-means over a large class adds up in the order of its threads."""
    code = (
        "from pathlib import Path\nfrom threadpoolctl import threadpool_info\nfrom protofl.experiment import Settings, cells\n"
        "from protofl import run\ns = Settings(methods=['fedcspc'], seeds=[0])\ns.take('rounds', 1, '')\n"
        "s.take('local_epochs', 1, '')\n"
        f"run.play(run.prepare(cells(s)[0]), Path({str(tmp_path)!r}), lambda event: None)\n"
        "assert {i['num_threads'] for i in threadpool_info()} == {1}, threadpool_info()"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "2"}
    )
    assert told.returncode == 0, told.stderr


# ---- evaluated again --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_stored_run_evaluates_to_the_same_digits(method: str, tmp_path: Path) -> None:
    asked = cell(method, participation=0.5)
    played(asked, tmp_path)
    folder = tmp_path / prepare(asked).folder
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    told = replay(folder, None)
    assert told["stored"] == told["again"] and told["round"] == 2 and told["again"]["pm_v"] is not None
    assert before == {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_eval_refuses_what_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"protocol\.json"):
        replay(tmp_path, None)
    asked = cell("fedavg")
    played(asked, tmp_path)
    folder = tmp_path / prepare(asked).folder
    document = json.loads((folder / "protocol.json").read_text())
    document["digest"] = "0" * 16
    (folder / "protocol.json").write_text(json.dumps(document))
    with pytest.raises(UserError, match="digest"):
        replay(folder, None)


# ---- what a run tells --------------------------------------------------------------------------------------------------


def test_records_of_a_run(tmp_path: Path) -> None:
    asked = cell("fedproc", rounds=6)
    got = played(asked, tmp_path)
    folder = tmp_path / prepare(asked).folder
    document, summary = (json.loads((folder / f"{n}.json").read_text()) for n in ("protocol", "summary"))
    assert [r["round"] for r in got] == [-1, 0, 1, 2, 3, 4, 5]
    assert document["network"]["w0"] == "dde420edae6c80fb" and document["network"]["parameters"]["total"] == 23146
    assert np.array(document["partition"]["counts"]).sum() == 1442
    assert (document["partition"]["min_size"], document["partition"]["one_class"]) == (47, 0)
    assert np.array(summary["confusion"]).sum() == 355 and summary["status"] == "finished"
    assert np.trace(np.array(summary["confusion"])) / 355 == got[-1]["gm"]
    assert len(list((folder / "prototypes").glob("*.npz"))) == 5
    with np.load(folder / "prototypes/round-00005.npz", allow_pickle=False) as stored:
        assert stored["values"].shape == (10, 32) and len(stored["client_ids"]) == len(stored["client_labels"])
    # protocol 6.1: P down and K_i Q + K int up before round 0; then P + K_t Q down
    parameters, held = 23146, int((np.array(document["partition"]["counts"]) > 0).sum())
    assert got[0]["bytes_down"] == 10 * 4 * parameters and got[0]["bytes_up"] == 4 * 32 * held + 10 * 10 * 8
    assert got[1]["bytes_down"] == 10 * 4 * (parameters + 320)
    assert got[1]["bytes_up"] == 10 * 4 * parameters + 4 * 32 * held + 10 * 10 * 8
    seconds = records.read_rows(folder / "rounds.jsonl")[1]["seconds"]
    assert set(seconds) == {"train", "prototype", "aggregate", "evaluate"} and seconds["train"] > 0


def test_a_diverging_run_is_marked_where_it_happens(tmp_path: Path) -> None:
    ready = prepare(cell("fedavg", lr=1e20, rounds=5))
    summary = play(ready, tmp_path, lambda event: None)
    assert summary["status"] == "diverged" and "round 0" in summary["error"]
    assert rows(tmp_path / ready.folder)[-1]["diverged"] is True


HOOKS = {
    "start": "def start(self, task):\n        raise ValueError('boom')",
    "enrol": "def enrol(self, client):\n        raise ValueError('boom')",
    "aggregate": "def aggregate(self, server, shared, private, uploads):\n        raise ValueError('boom')",
    "global_model": "def global_model(self, shared, private):\n        raise ValueError('boom')",
    "personal_model": "def personal_model(self, client, shared, own, last):\n        raise ValueError('boom')",
    "prototypes": "def prototypes(self, shared, private):\n        raise ValueError('boom')",
    "local": "def local(self, client, shared, own):\n        return shared",
}


@pytest.mark.parametrize("hook", HOOKS)
def test_errors_of_hooks_name_method_and_function(hook: str, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(
        "from dataclasses import dataclass\nfrom protofl.methods.fedavg import FedAvg\n\n\n@dataclass(frozen=True)\n"
        f"class Bad(FedAvg):\n    {HOOKS[hook]}\n"
    )
    with pytest.raises(MethodError, match=rf"Bad\.{hook} raised .*round"):
        play(prepare(cell(str(tmp_path / "bad.py"), rounds=1)), tmp_path / "results", lambda event: None)


CANNOT = (
    "import sys\nsys.exit(3)",
    "1/0",
    "x = 1",
    "import dataclasses\n@dataclasses.dataclass(frozen=True)\nclass Mine(Method):\n    a: int",
    "class Mine(Method):\n    def check(self, protocol, net):\n        return 1 / 0",
)


@pytest.mark.parametrize("text", CANNOT)
def test_method_files_that_cannot_be_set_up_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from protofl.method import Method\n" + text + "\n")
    with pytest.raises(UserError, match="mine"):
        prepare(cell(str(tmp_path / "mine.py")))


def test_a_method_can_say_that_it_diverged(tmp_path: Path) -> None:
    (tmp_path / "wild.py").write_text(
        "from dataclasses import dataclass\nfrom protofl.method import Diverged\nfrom protofl.methods.fedavg import FedAvg\n\n\n"
        "@dataclass(frozen=True)\nclass Wild(FedAvg):\n    def aggregate(self, server, shared, private, uploads):\n"
        "        raise Diverged('too wild')\n"
    )
    ready = prepare(cell(str(tmp_path / "wild.py")))
    summary = play(ready, tmp_path, lambda event: None)
    assert summary == {"status": "diverged", "rounds": 0, "of": 3, "error": "too wild"}


def test_skipping_every_client_is_refused() -> None:
    with pytest.raises(UserError, match="leaves out every client"):
        prepare(cell("fedavg", drop_last="true", short_client="skip", batch_size=500))


def test_errors_of_methods_say_where(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text(
        "from dataclasses import dataclass\nfrom protofl.methods.fedavg import FedAvg\n\n\n@dataclass(frozen=True)\n"
        "class Broken(FedAvg):\n    def loss(self, net, w, batch, view):\n"
        "        return net.loss(w, batch) @ batch.y.double()\n"
    )
    with pytest.raises(RuntimeError, match=r"Broken\.loss raised .*round 0, client") as caught:
        play(prepare(cell(str(path))), tmp_path / "results", lambda event: None)
    assert "samples" in str(caught.value) and "net" in str(caught.value)


def test_a_methods_source_is_part_of_the_digest(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    text = (
        "from dataclasses import dataclass\nfrom protofl.methods.fedavg import FedAvg\n\n\n@dataclass(frozen=True)\n"
        "class Mine(FedAvg):\n    pass\n"
    )
    path.write_text(text)
    first = prepare(cell(str(path))).digest
    path.write_text(text + "# edited\n")
    assert prepare(cell(str(path))).digest != first
    assert played(cell(str(path)), tmp_path)[-1]["gm"] == played(cell("fedavg"), tmp_path)[-1]["gm"]


def test_prototype_rounds_are_spread() -> None:
    p = cell("fedavg", rounds=21).protocol
    assert run.prototype_rounds(p) == {0, 5, 10, 15, 20}
    assert run.prototype_rounds(p.replace(rounds=1)) == {0}
    assert run.prototype_rounds(p.replace(prototype_rounds=0)) == set()
