"""Methods in Flower: the same numbers as here, in an app that is written, on messages, and between real processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from protofl import __version__, cli, records, registry, run
from protofl.cells import Cell
from protofl.errors import UserError
from protofl.experiment import Settings, cells
from protofl.federation import Federation
from protofl.tree import Rows, Tree

pytest.importorskip("flwr", reason="Flower: pip install 'protofl[flower]'")
from flwr.app import Context, Error, Message, RecordDict
from flwr.common.config import flatten_dict
from flwr.supercore.task_identity import TaskIdentity

from protofl.flower import client, data, messages, server, settings
from protofl.flower.export import export

N = 3
FAST = ("fedavg", "fedproc", "fednh", "fedcspc", "scaffold", "fedper", "solo")
"""A method of every kind: weights, prototypes, a server that trains, memories, no global model, another population."""
QUICK = {"fedcspc": {"fedcspc.calib_epochs": 2}, "creff": {"creff.match_epochs": 3, "creff.retrain_epochs": 5}}
"""What takes long on a server."""
PLAIN = {"clients": N, "rounds": 2, "local_epochs": 1, "seeds": 0, "engine": "loop", "metrics": "gm"}


def cell(method: str, **given: Any) -> Cell:
    settings = Settings(methods=[method])
    for name, value in {**PLAIN, **given}.items():
        settings.take_text(f"{name}={value}") if "." in name else settings.take(name, value, "test")
    (made,) = cells(settings)
    return made


def here(asked: Cell) -> Tree:
    """What the server has in the end of protofl's own run."""
    ready = run.prepare(asked)
    fed = Federation(ready.method, run.task(ready)[0])
    fed.introduce()
    for t in range(ready.protocol.rounds):
        fed.play(t)
    fed.conclude()
    return Tree(shared=fed.shared, private=fed.private)


def same(a: Tree, b: Tree) -> bool:
    """Equal names, in order, and equal bits."""
    x, y = records.flatten(a), records.flatten(b)
    return list(x) == list(y) and all(x[k].dtype == y[k].dtype and torch.equal(x[k], y[k]) for k in x)


@pytest.fixture(autouse=True)
def as_in_an_app() -> None:
    """Messages know who sends them: Flower says so where it starts an app."""
    run.set_up_process()
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1


# ---- on messages ----------------------------------------------------------------------------------------------------


def exported(asked: Cell, folder: Path) -> dict[str, Any]:
    """Write an app -> its settings, as Flower hands them on."""
    export(asked, folder)
    return flatten_dict(tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["tool"]["flwr"]["app"]["config"])


class Grid:
    """Flower's grid with the nodes in this process: what they are sent, they do at once. Answers come in another order."""

    def __init__(self, folder: Path, config: dict[str, Any], train: Callable[[Any], Any] = data.part) -> None:
        self.app, self.config, self.memory = client.client_app(train, str(folder / "app" / "client.py")), config, folder
        self.clients = {100 + i: i for i in reversed(range(int(config["protocol.clients"])))}
        self.silent: set[int] = set()  # nodes that are listed and say nothing
        self.replies: dict[str, Any] = {}
        self.sent: list[Any] = []

    def get_node_ids(self) -> list[int]:
        return list(self.clients)

    def context(self, node: int = 0) -> Any:
        own = {"partition-id": self.clients.get(node, 0), "memory": str(self.memory)}
        return Context(1, node, own, RecordDict(), self.config)

    def push_messages(self, messages: list[Any]) -> list[str]:
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(len(self.sent))
            self.sent.append(message)
            node = message.metadata.dst_node_id
            if node not in self.silent:
                self.replies[message.metadata.message_id] = self.app(message, self.context(node))
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, ids: list[str]) -> list[Any]:
        return [self.replies.pop(k) for k in reversed(ids) if k in self.replies]


def played(asked: Cell, folder: Path, grid: type[Grid] = Grid, **changes: Any) -> tuple[Tree, Grid]:
    """The app of a cell, played -> what the server stored in the end."""
    config = {**exported(asked, folder), "out": str(folder / "state.safetensors"), **changes}
    made = grid(folder, config)
    server.play(made, made.context(), data.test_set, folder / "app")
    return records.unpack((folder / "state.safetensors").read_bytes())[0], made


@pytest.mark.parametrize(
    "method", [m if m in FAST else pytest.param(m, marks=pytest.mark.slow) for m in [*registry.names(), "moon+cspc"]]
)
def test_every_method_gives_the_same_bits(method: str, tmp_path: Path) -> None:
    asked = cell(method, **QUICK.get(method, {}))
    stored, _ = played(asked, tmp_path / "app")
    assert same(stored, here(asked))


@pytest.mark.parametrize(
    ("method", "fields"),
    [
        ("scaffold", {"participation": 0.4, "rounds": 4, "clients": 5}),
        ("moon", {"optimizer_reset": "never", "participation": 0.7}),
        ("fedproc", {"fedproc.proto_init": "first_clients", "participation": 0.4}),
        ("fedavg", {"precision": "fp64", "clients": 4, "participation": 0.25, "grad_clip_norm": 1}),
        ("fedavg+cspc", {"model": "conv_digits", "augment": "rotate15", "rounds": 1, "fedavg+cspc.calib_epochs": 2}),
    ],
)
def test_other_settings_too(method: str, fields: dict[str, Any], tmp_path: Path) -> None:
    asked = cell(method, **fields)
    stored, grid = played(asked, tmp_path / "app")
    assert same(stored, here(asked))
    asked_for = sum(m.metadata.message_type == messages.WORK for m in grid.sent)
    rows = [json.loads(line) for line in (tmp_path / "app" / "state.jsonl").read_text().splitlines()]
    first = len(rows[0]["clients"]) if "fedproc.proto_init" in fields else 0
    assert asked_for == first + sum(len(row["clients"]) for row in rows) and rows[-1]["gm"] > 0


def test_a_file_is_a_method(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    asked = cell("./strangers/fedntd.py", **{"fedntd.tau": 2})
    assert same(played(asked, tmp_path / "app")[0], here(asked))
    assert (tmp_path / "app" / "app" / "fedntd.py").is_file()


def test_the_run_configuration_changes_a_run(tmp_path: Path) -> None:
    stored, _ = played(cell("fednh"), tmp_path / "app", **{"protocol.rounds": 1, "options.rho": 0.5})
    assert same(stored, here(cell("fednh", rounds=1, **{"fednh.rho": 0.5})))


def test_a_tree_survives_its_message() -> None:
    tree = Tree(
        b=Tree(z=torch.arange(3), a=torch.tensor(1.5, dtype=torch.float64)), empty=Tree(),
        rows=Rows(torch.rand(2, 3).T, torch.tensor([True, False, True])), none=torch.zeros(0, 4),
    )  # fmt: skip
    again = messages.tree(messages.record(tree), torch.device("cpu"))
    assert same(again, tree) and isinstance(again.rows, Rows)
    assert messages.tree(messages.record(Tree()), torch.device("cpu")) == Tree()


# ---- what goes wrong ------------------------------------------------------------------------------------------------


def refusal(asked: Cell, folder: Path, kind: type[Exception], grid: type[Grid], **changes: Any) -> str:
    with pytest.raises(kind) as told:
        played(asked, folder, grid, **{"wait": 0, "timeout": 0.1, **changes})
    assert "\n" not in str(told.value)
    return str(told.value)


class Dies(Grid):
    """Node 102 says nothing from round 1 on."""

    def push_messages(self, messages: list[Any]) -> list[str]:
        self.silent = {102} if messages[0].metadata.group_id == "round 1" else set()
        return super().push_messages(messages)


class Leaves(Grid):
    """Node 102 is gone when round 1 begins."""

    looks = 0
    back = None

    def get_node_ids(self) -> list[int]:
        if sum(m.metadata.message_type == messages.WORK for m in self.sent) == N:
            self.clients.pop(102, None)
            self.looks += 1
            if self.back is not None and self.looks > 1:
                self.clients[self.back] = 2
        return super().get_node_ids()


class Anew(Leaves):
    back = 7


class Same(Leaves):
    back = 102


class Older(Grid):
    """Node 102 has another version."""

    def push_messages(self, messages: list[Any]) -> list[str]:
        sent = super().push_messages(messages)
        for k in sent:
            if self.replies[k].metadata.src_node_id == 102:
                self.replies[k].content["with"]["protofl"] = "0.0.1"
        return sent


class Crashes(Grid):
    """Node 101 has a fault of its own, of which Flower makes an error."""

    def push_messages(self, messages: list[Any]) -> list[str]:
        sent = super().push_messages(messages)
        for message in messages:
            if message.metadata.dst_node_id == 101 and message.metadata.message_type == "train":
                self.replies[message.metadata.message_id] = Message(Error(2, "ValueError:\n no"), reply_to=message)
        return sent


class Twins(Grid):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.clients[102] = 1


def test_a_node_with_which_something_is_wrong_is_named(tmp_path: Path) -> None:
    assert refusal(cell("fedavg"), tmp_path / "a", RuntimeError, Dies) == (
        "no answer within 0.1 s: client 2 (node 102), round 1"
    )
    assert records.unpack((tmp_path / "a" / "state.safetensors").read_bytes())[1] == {"round": 1}
    told = refusal(cell("fedavg"), tmp_path / "b", RuntimeError, Leaves)
    assert told.startswith("no node for client 2 within 0 s, round 1")
    told = refusal(cell("fedavg"), tmp_path / "c", RuntimeError, Twins)
    assert "nodes 102 and 101 both say that they are client 1" in told
    told = refusal(cell("fedavg"), tmp_path / "d", RuntimeError, Older)
    assert told == f"client 2 (node 102) has protofl 0.0.1, the server {__version__}"
    told = refusal(cell("fedavg"), tmp_path / "e", RuntimeError, Crashes)
    assert told == "client 1 (node 101), round 0, gave no result: ValueError: no"


@pytest.mark.parametrize("grid", [Anew, Same])
def test_a_node_that_comes_back_goes_on_where_it_was(grid: type[Leaves], tmp_path: Path) -> None:
    asked = cell("scaffold")
    stored, made = played(asked, tmp_path / "app", grid, wait=5)
    assert same(stored, here(asked)) and made.clients[grid.back or 0] == 2


class Forgets(Grid):
    def push_messages(self, messages: list[Any]) -> list[str]:
        for path in self.memory.glob("run-1/c00001-*"):
            path.unlink()
        return super().push_messages(messages)


def test_a_memory_that_is_lost_is_noticed(tmp_path: Path) -> None:
    told = refusal(cell("scaffold"), tmp_path / "a", UserError, Forgets)
    assert told.startswith("client 1 (node 101), round 1: what it remembers of round 0 is not in")
    played(cell("fedavg"), tmp_path / "b", Forgets)  # has none


def test_a_node_keeps_what_the_last_two_rounds_left(tmp_path: Path) -> None:
    played(cell("scaffold", rounds=4), tmp_path)
    assert sorted(p.name[7:13] for p in (tmp_path / "run-1").glob("c00001*")) == ["r00003", "r00004"]


FAILS = """
from dataclasses import dataclass
from protofl.method import Diverged, Train, Tree
from protofl.methods.fedavg import FedAvg

@dataclass(frozen=True)
class Fails(FedAvg):
    def local(self, client, shared, own):
        if client.round == 1 and client.id == 1:
            raise {what}
        w = yield Train(shared.net, self.loss)
        return Tree(net=w), Tree()
"""


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("ValueError('on purpose')", "Fails.local raised ValueError: on purpose [round 1, client 1"),
        ("Diverged('on purpose')", "on purpose"),
    ],
)
def test_what_a_client_raises_is_told_with_its_place(what: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(FAILS.replace("{what}", what))
    told = refusal(cell(str(tmp_path / "fails.py")), tmp_path / "app", Exception, Grid)
    assert told.startswith(f"client 1 (node 101), round 1: {line}")


def test_weights_that_are_not_finite_end_the_run(tmp_path: Path) -> None:
    told = refusal(cell("fedavg", client_lr=1e20), tmp_path / "app", Exception, Grid)
    assert "loss of client 0 is not finite in round 0" in told


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (lambda c: None, "train() in data.py must return two arrays"),
        (lambda c: (torch.zeros(3, 8, 8), [0, 1, 2]), "x uint8 (or float32) [n, 8, 8, 1] and y [n], not float32"),
        (lambda c: (data.part(c)[0], data.part(c)[1] + 1), "class ids, integers from 0 to 9"),
    ],
)
def test_a_loader_that_gives_something_else(given: Any, line: str, tmp_path: Path) -> None:
    config = exported(cell("fedavg"), tmp_path / "app")
    grid = Grid(tmp_path / "app", config, given)
    with pytest.raises(UserError) as told:
        server.play(grid, grid.context(), data.test_set, tmp_path / "app" / "app")
    assert str(told.value).startswith("node 10") and line in str(told.value)


@pytest.mark.parametrize(
    ("own", "line"),
    [({}, "partition-id=K with K from 0 to 2"), ({"partition-id": 3}, "partition-id=K"),
     ({"partition-id": 0, "num-partitions": 4}, "the app is for 3 clients")],
)  # fmt: skip
def test_a_node_must_say_who_it_is(own: dict[str, Any], line: str, tmp_path: Path) -> None:
    config = exported(cell("fedavg"), tmp_path / "app")
    with pytest.raises(UserError, match=line):
        data.client(Context(1, 1, own, RecordDict(), config))


def test_data_of_ones_own_and_no_test_set(tmp_path: Path) -> None:
    config = {**exported(cell("fednh"), tmp_path / "app"), "out": str(tmp_path / "own.safetensors")}
    shape = {"data.shape": "6,6,3", "data.classes": 4, "data.scale": 255.0}

    def train(context: Any) -> Any:
        stream = __import__("numpy").random.RandomState(context.node_config["partition-id"])
        return stream.randint(0, 256, (20, 6, 6, 3)).astype("uint8"), stream.randint(0, 4, 20)

    grid = Grid(tmp_path / "app", {**config, **shape}, train)
    fed = server.play(grid, grid.context(), lambda context: None, tmp_path / "app" / "app")
    assert fed.task.sizes == [20] * N and fed.task.classes == 4
    assert json.loads((tmp_path / "own.jsonl").read_text().splitlines()[-1])["gm"] is None


# ---- the command ----------------------------------------------------------------------------------------------------


def command(*given: str) -> Any:
    return CliRunner().invoke(cli.app, ["flower", "export", *given])


def test_the_command_writes_a_small_app(tmp_path: Path) -> None:
    told = command("scaffold", "--out", str(tmp_path / "app"), "--clients", "3", "--rounds", "3", "--beta", "0.5")
    assert told.exit_code == 0, told.output
    files = sorted(p.relative_to(tmp_path / "app").as_posix() for p in (tmp_path / "app").rglob("*") if p.is_file())
    assert files == ["README.md", "app/__init__.py", "app/client.py", "app/data.py", "app/server.py", "pyproject.toml"]
    from flwr.cli.config_utils import load_and_validate

    assert load_and_validate(tmp_path / "app" / "pyproject.toml")[1] == []
    again = command("scaffold", "--out", str(tmp_path / "app"))
    assert isinstance(again.exception, UserError) and "not empty" in str(again.exception)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (["fedavgg"], "there is no method 'fedavgg' (did you mean 'fedavg'?)"),
        (["fedavg", "--clients", "0"], "clients"),
        (["fedavg", "--beta", "0.1,0.5"], "give one --beta"),
        (["fedavg", "--seed", "0,1"], "give one --beta and one --seed"),
        (["fedavg", "--set", "engine=batched"], "leave the engine out"),
        (["fednh", "--set", "fednh.roh=1"], "rho"),
        (["fedavg", "--dataset", "nothing"], "nothing"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(given: list[str], line: str, tmp_path: Path) -> None:
    told = command(*given, "--out", str(tmp_path / "app"))
    assert isinstance(told.exception, UserError) and line in str(told.exception)
    assert not (tmp_path / "app").exists()


def test_settings_survive_their_file(tmp_path: Path) -> None:
    for method in [*registry.names(), "fedavg+cspc"]:
        asked = cell(method, augment="hflip", mean="0.1,0.2", std="0.3,0.4", lr_decay_per_round=0.998)
        asked = Cell(asked.method, asked.protocol.replace(mean=(0.1,), std=(0.3,)))
        config = exported(asked, tmp_path / method)
        ready = run.prepare(Cell(asked.method, asked.protocol.replace(**settings.DEPLOYED)))
        made = settings.read(config, tmp_path / method / "app")
        assert made.method == ready.method and made.protocol.document() == ready.protocol.document()


# ---- between processes ----------------------------------------------------------------------------------------------

PATIENCE = 600
"""Seconds for what takes a minute on an idle machine: every message starts a process that imports torch."""


def until(true: Callable[[], Any], seconds: float = PATIENCE) -> bool:
    """Whether it becomes true in this time."""
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.2)
    return bool(true())


def free(port: int) -> bool:
    """Whether nobody listens there."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_ports(count: int) -> list[int]:
    """So many at once, so that no two are the same."""
    held = [socket.socket() for _ in range(count)]
    for s in held:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in held]
    for s in held:
        s.close()
    return ports


class Deployment:
    """A SuperLink and a SuperNode for every client on loopback, started by the commands of an app's README."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.processes = folder, list[subprocess.Popen[bytes]]()
        self.ports = free_ports(1 + N)
        home, path = folder / "home", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.env = {**os.environ, "PATH": path, "FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0"}
        self.env["FLWR_DISABLE_UPDATE_CHECK"] = "1"
        home.mkdir()
        self.there = f"127.0.0.1:{self.ports[0]}"
        (home / "config.toml").write_text(f'[superlink.protofl]\naddress = "{self.there}"\ninsecure = true\n')

    def begin(self) -> None:
        """Start the SuperLink, then the SuperNodes."""
        link = ("--disable-runtime-dependency-installation", "--port", str(self.ports[0]))
        self.start("flower-superlink", "--insecure", *link)
        assert until(lambda: not free(self.ports[0])), self.log(0)
        for k in range(N):
            own = f'partition-id={k} num-partitions={N} memory="{self.folder / "memory"}"'
            port = str(self.ports[1 + k])
            self.start(
                "flower-supernode", "--insecure", "--superlink", self.there, "--port", port, "--node-config", own
            )

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        """A process in a session of its own, with its output in a file."""
        with open(self.folder / f"log-{len(self.processes)}", "wb") as log:
            made = subprocess.Popen(
                command, env=self.env, cwd=self.folder, stdout=log, stderr=log, start_new_session=True
            )
        self.processes.append(made)
        return made

    def log(self, number: int) -> str:
        return (self.folder / f"log-{number}").read_text("utf-8", "replace")

    def run(self, app: Path, *options: str) -> int:
        """Begin a run of an app -> the number of its log."""
        self.start("flwr", "run", str(app), "protofl", "--stream", *options)
        return len(self.processes) - 1

    def finished(self, number: int) -> str:
        """What a run said until its end."""
        assert until(lambda: self.processes[number].poll() is not None), self.log(number)
        return self.log(number)

    def stop(self) -> None:
        """End what was started, nodes first, with everything that they started."""
        for process in reversed(self.processes):
            process.terminate()
        ended = [until(lambda p=p: p.poll() is not None, 60) for p in self.processes]  # type: ignore[misc]
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        assert all(ended), "processes did not end when they were told to"
        assert all(until(lambda k=k: free(k), 30) for k in self.ports), "ports are in use"  # type: ignore[misc]


@contextmanager
def deployed(folder: Path) -> Iterator[Deployment]:
    made = Deployment(folder)
    try:
        made.begin()
        yield made
    finally:
        made.stop()


@pytest.mark.slow
def test_real_processes_give_the_same_bits(tmp_path: Path) -> None:
    """One run after the other: an app's process that does not speak up within 30 s is given up by Flower."""
    with deployed(tmp_path) as made:
        for name in ("fedavg", "fedproc", "fednh", "scaffold"):
            asked = cell(name, rounds=3)
            export(asked, tmp_path / name)
            log = made.finished(made.run(tmp_path / name))
            assert "round 3 of 3: accuracy" in log, log
            stored, notes = records.unpack((tmp_path / f"{name}.safetensors").read_bytes())
            assert notes == {"round": 3} and same(stored, here(asked))


@pytest.mark.slow
def test_a_node_that_is_killed_is_named(tmp_path: Path) -> None:
    export(cell("fedavg", rounds=50), tmp_path / "app")
    with deployed(tmp_path) as made:
        number = made.run(tmp_path / "app")
        assert until(lambda: "round 1 of 50" in made.log(number)), made.log(number)
        made.processes[2].kill()
        (line,) = [text for text in made.finished(number).splitlines() if text.startswith("RuntimeError: ")]
        assert line.startswith("RuntimeError: client 1 (node ") and ", round " in line
    stored, notes = records.unpack((tmp_path / "fedavg.safetensors").read_bytes())
    assert notes["round"] >= 1 and "net" in stored.shared
