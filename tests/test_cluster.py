"""Runs on a cluster of Ray: the same bits wherever they are played, also when a node dies in the middle of them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_cli import PROTOFL, protofl, runs
from test_run import rows

from protofl import records

HAS_RAY = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed: pip install 'protofl[ray]'")

STALLS = """
import time
from dataclasses import dataclass
from pathlib import Path
from protofl.methods.moon import MOON

MARK = Path({mark!r})

@dataclass(frozen=True)
class Stalls(MOON):
    def local(self, client, shared, own):
        if client.round == 2 and not MARK.exists():
            import ray
            node = ray.get_runtime_context().get_node_id()
            if node != {head!r}:
                MARK.write_text(node)
                time.sleep(600)
        return (yield from super().local(client, shared, own))
"""
"""MOON, but the first client that is at round 2 on a node other than the driver's waits there until the node is killed."""

TWELVE = """
title = "Twelve"
methods = ["./stalls.py", "fedproc"]
seeds = [0, 1, 2]
beta = [0.5, 5.0]
dataset = "./images.npz"
partition_min_size = 2
clients = 4
rounds = 4
local_epochs = 1
model = "mlp"
optimizer_reset = "never"
engine = "loop"
"""

LARGE = ("bench", "--methods", "./stalls.py", "--seeds", 0, "--rounds", 4, "--local-epochs", 1, "--participation", 0.6,
         "--set", "optimizer_reset=never", "--set", "engine=loop", "--no-report")  # fmt: skip


@pytest.fixture
def three() -> Iterator[Any]:
    """A cluster of three nodes of one CPU, the first of which is the driver's."""
    utils = pytest.importorskip("ray.cluster_utils")
    before = Path.cwd()
    os.chdir("/")  # nodes are elsewhere: no path of the driver's leads anywhere there
    made = utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        for _ in range(2):
            made.add_node(num_cpus=1)
        os.chdir(before)
        made.wait_for_nodes()
        yield made
    finally:
        os.chdir(before)
        made.shutdown()


def killed_in_the_middle(cluster: Any, folder: Path, *words: Any) -> str:
    """Run a command on the cluster; the node on which a client stalls is killed -> what was printed."""
    mark = folder / "mark"
    (folder / "stalls.py").write_text(STALLS.format(mark=str(mark), head=cluster.head_node.node_id))

    def kill() -> None:
        while not mark.exists():
            time.sleep(0.05)
        time.sleep(0.5)  # until the name is written, and others have gone on
        (node,) = (n for n in cluster.worker_nodes if n.node_id == mark.read_text())
        cluster.remove_node(node, allow_graceful=False)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    said = protofl(*words, "--engine", "ray", "--address", cluster.address, "--results", folder / "far", cwd=folder)
    killer.join(10)
    assert not killer.is_alive() and "Ray: nodes: 3, CPUs: 3" in said
    return said


def everything(results: Path) -> dict[str, Any]:
    """All that is stored, by digest; rows without times, and the machine apart."""
    told: dict[str, Any] = {}
    for folder in (path.parent for path in results.glob("*/*/protocol.json")):
        files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        apart = {name: files.pop(name, None) for name in ("rounds.jsonl", "env.json", "lock")}
        assert apart["env.json"], folder
        told[folder.name] = rows(folder), files
    return told


@pytest.mark.slow
def test_a_suite_loses_nothing_with_a_node(three: Any, tmp_path: Path) -> None:
    (tmp_path / "twelve.toml").write_text(TWELVE)
    images(tmp_path / "images.npz")
    words = ("suite", "run", "./twelve.toml", "--no-report")
    said = killed_in_the_middle(three, tmp_path, *words)
    assert said.count(": finished") == 12 and said.count("started, resumed after round 2") == 1, said
    protofl(*words, "--results", tmp_path / "near", cwd=tmp_path)
    far = everything(tmp_path / "far")
    assert far == everything(tmp_path / "near") and len(far) == 12
    assert all(told[0][-1]["round"] == 3 and "done" in told[1] for told in far.values())
    assert "12 of 12 runs are in the store already" in protofl(*words, "--results", tmp_path / "far", cwd=tmp_path)


@pytest.mark.slow
def test_the_clients_of_a_large_run_are_spread(three: Any, tmp_path: Path) -> None:
    """One run on three nodes: every client's memory is with an owner, whose node dies."""
    said = killed_in_the_middle(three, tmp_path, *LARGE)
    assert "started, resumed after round 2" in said
    protofl(*LARGE, "--workers", 1, "--results", tmp_path / "near", cwd=tmp_path)
    far = everything(tmp_path / "far")
    assert far == everything(tmp_path / "near") and len(far) == 1
    assert any(name.startswith("state/clients/") for _, files in far.values() for name in files)


def images(path: Path) -> None:
    """Digits as a file."""
    import numpy as np
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x = (x.reshape(-1, 8, 8) * 15).astype("uint8")
    np.savez(path, x_train=x[:400], y_train=y[:400], x_test=x[400:600], y_test=y[400:600])


# ---- a command's end -------------------------------------------------------------------------------------------------


def descendants(pid: int) -> set[int]:
    """The processes that a process has started, and theirs."""
    told = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = {int(child): int(parent) for child, parent in map(str.split, told.splitlines())}
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def alive(pids: set[int]) -> list[str]:
    told = subprocess.run(
        ["ps", "-o", "pid=,stat=,args=", "-p", ",".join(map(str, pids))], capture_output=True, text=True
    )
    return [line for line in told.stdout.splitlines() if line.split()[1][0] != "Z"]


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(2, 130), (15, 143)])
def test_interrupts_have_their_codes_and_leave_nothing(number: int, code: int, tmp_path: Path) -> None:
    words = ["bench", "--methods", "fedavg,moon", "--seeds", "0", "--no-report", "--engine", "ray"]
    heard = [  # a shell's background job starts with SIGINT ignored
        sys.executable, "-c", f"import signal; signal.signal(2, signal.default_int_handler); {PROTOFL[-1]}"
    ]  # fmt: skip
    child = subprocess.Popen([*heard, *words, "--rounds", "500"], cwd=tmp_path, start_new_session=True, text=True,
                             stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                             env={**os.environ, "TMPDIR": str(tmp_path), "RAY_TMPDIR": "/tmp"})  # fmt: skip
    deadline = time.monotonic() + 90
    while sum(map(len, runs(tmp_path / "results").values())) < 5 and time.monotonic() < deadline:
        time.sleep(0.02)
    started = descendants(child.pid)
    assert len(started) > 3
    os.kill(child.pid, number)
    said = child.communicate(timeout=30)[1]
    assert child.returncode == code and "Traceback" not in said, said
    deadline = time.monotonic() + 10
    while alive(started) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(started)
    assert not list(tmp_path.glob("protofl-*"))
    for path in (tmp_path / "results").glob("*/*/rounds.jsonl"):
        assert records.RunFolder(path.parent).states()


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_without_the_extra_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    said = protofl("bench", "--engine", "ray", cwd=tmp_path, code=2)
    assert said == "Error: --engine ray needs Ray, which is not installed: pip install 'protofl[ray]'\n"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--address", "auto"), "--address is an option of a cluster: give --engine ray as well"),
        (("--gpus-per-run", "0.5"), "--gpus-per-run is an option of a cluster"),
        (("--engine", "rya"), "did you mean"),
        pytest.param(("--engine", "ray", "--gpus-per-run", "2"), "--gpus-per-run '2': a share", marks=needs_ray),
        pytest.param(("--engine", "ray", "--address", "ray://a:1"), "--address 'ray://a:1'", marks=needs_ray),
        pytest.param(("--engine", "ray", "--workers", "0"), "--workers '0'", marks=needs_ray),
    ],
)
def test_what_is_asked_for_wrongly_is_refused(words: tuple[str, ...], line: str, tmp_path: Path) -> None:
    said = protofl("bench", *words, cwd=tmp_path, code=2)
    assert line in said and said.count("\n") == 1, said


def test_how_clients_are_computed_is_the_other_meaning_of_engine(tmp_path: Path) -> None:
    """--engine loop is the protocol's field, as --set engine=loop."""
    short = ("bench", "--methods", "fedavg", "--seeds", 0, "--dry-run")
    said = [protofl(*short, *more, cwd=tmp_path) for more in (("--engine", "loop"), ("--set", "engine=loop"), ())]
    assert said[0] == said[1] != said[2]
    if HAS_RAY:
        assert protofl(*short, "--engine", "ray", cwd=tmp_path) == said[2]
