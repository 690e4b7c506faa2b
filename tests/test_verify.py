"""The contract: every method keeps it, and whoever breaks a promise is told which and where."""

from __future__ import annotations

import functools
import random
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from protofl.methods.fedavg import FedAvg
from rich.console import Console

from protofl import cli, registry, verify
from protofl.errors import UserError
from protofl.method import Bill, Collect, Method, Model, Rows, Survey, Train, Tree, number
from protofl.protocol import Protocol
from protofl.trials import awkward

QUICK: dict[str, dict[str, Any]] = {
    "fedcspc": {"calib_epochs": 3}, "creff": {"features_per_class": 10, "match_epochs": 30, "retrain_epochs": 120},
}  # fmt: skip
NAMES = [*registry.names(), *(f"{base}+{name}" for name in registry.plugins() for base in ("fedavg", "moon"))]
SCARCE = {"it has no prototypes", "its run is a single round"}
"""Why a check may not apply."""


# ---- every method keeps it -------------------------------------------------------------------------------------------


@functools.cache
def subject(name: str) -> verify.Subject:
    """A method on trial, whose runs all checks share."""
    given = QUICK.get(name, QUICK["fedcspc"] if name.endswith("+cspc") else {})
    return verify.Subject(registry.Spec(name, tuple(given.items()), "digits.quick").build(Protocol()))


@pytest.mark.parametrize("check", verify.CHECKS, ids=lambda check: check.name)
@pytest.mark.parametrize("name", NAMES)
def test_methods_keep_the_contract(name: str, check: verify.Check) -> None:
    try:
        _, kept, line = check.judge(subject(name))
    except UserError as refusal:
        assert "+" in name, refusal
        pytest.skip(str(refusal))
    assert kept or line in SCARCE, line


# ---- broken methods --------------------------------------------------------------------------------------------------


class Undecorated(FedAvg):
    rate: float = number(0.1, why="a reason", source="a source")


@dataclass(frozen=True)
class Unexplained(FedAvg):
    share: float = 0.5


@dataclass(frozen=True)
class OutOfLimits(FedAvg):
    share: float = number(2.0, high=1, why="a reason", source="a source")


@dataclass(frozen=True)
class Preset(FedAvg):
    presets = {"fast": {}}  # noqa: RUF012


@dataclass(frozen=True)
class OpenField(FedAvg):
    open_fields = ("momentumm",)


@dataclass(frozen=True)
class Refuses(FedAvg):
    def check(self, protocol: Any, net: Any) -> None:
        raise UserError("it needs a net of another kind")


@dataclass(frozen=True)
class Fails(FedAvg):
    def aggregate(self, server: Any, shared: Tree, private: Tree, uploads: list[Tree]) -> Any:
        if server.round == 1:
            raise ValueError("on purpose")
        return super().aggregate(server, shared, private, uploads)


@dataclass(frozen=True)
class Sends(FedAvg):
    """Sends what `also` says beside the model."""

    def local(self, client: Any, shared: Tree, own: Tree) -> Any:
        w = yield Train(shared.net, self.loss)
        return Tree(net=w) | self.also(client, shared, w), Tree()

    def also(self, client: Any, shared: Tree, w: Tree) -> Any:
        return Tree()


@dataclass(frozen=True)
class SendsText(Sends):
    def also(self, client: Any, shared: Tree, w: Tree) -> Any:
        return Tree(note="hello")


@dataclass(frozen=True)
class SendsDict(Sends):
    def also(self, client: Any, shared: Tree, w: Tree) -> Any:
        return Tree(extra={"bias": w["head.bias"]})


@dataclass(frozen=True)
class SendsRows(Sends):
    def also(self, client: Any, shared: Tree, w: Tree) -> Any:
        return Tree(table=Rows(w["head.weight"], client.counts))


@dataclass(frozen=True)
class SendsSlash(Sends):
    def also(self, client: Any, shared: Tree, w: Tree) -> Any:
        return Tree({"head/bias": w["head.bias"] + 0})


@dataclass(frozen=True)
class SendsShared(Sends):
    def also(self, client: Any, shared: Tree, w: Tree) -> Any:
        return Tree(bias=shared.net["head.bias"][1:])


@dataclass(frozen=True)
class KeepsNumber(FedAvg):
    def local(self, client: Any, shared: Tree, own: Tree) -> Any:
        w = yield Train(shared.net, self.loss)
        return Tree(net=w), Tree(last=client.round)


@dataclass(frozen=True)
class KeepsGraph(FedAvg):
    def aggregate(self, server: Any, shared: Tree, private: Tree, uploads: list[Tree]) -> Any:
        shared, _ = super().aggregate(server, shared, private, uploads)
        return shared, Tree(last=torch.zeros(3, requires_grad=True))


@dataclass(frozen=True)
class WritesBatch(FedAvg):
    def loss(self, net: Any, w: Tree, batch: Any, view: Any) -> Any:
        return net.loss(w, batch._replace(x=batch.x.mul_(0.9)))


@dataclass(frozen=True)
class WritesUnseen(FedAvg):
    """Past the version counter, where the engine cannot see it."""

    def loss(self, net: Any, w: Tree, batch: Any, view: Any) -> Any:
        view.shared.net["head.bias"].data[0] += 1e-9
        return net.loss(w, batch)


@dataclass(frozen=True)
class WritesShared(FedAvg):
    def local(self, client: Any, shared: Tree, own: Tree) -> Any:
        shared["visited"] = torch.tensor(client.id)
        w = yield Train(shared.net, self.loss)
        return Tree(net=w), Tree()


@dataclass(frozen=True)
class Closure(FedAvg):
    def local(self, client: Any, shared: Tree, own: Tree) -> Any:
        w = yield Train(shared.net, lambda net, w, batch, view: net.loss(w, batch))
        return Tree(net=w), Tree()


@dataclass(frozen=True)
class Partial(FedAvg):
    def weighted(self, factor: float, net: Any, w: Tree, batch: Any, view: Any) -> Any:
        return factor * net.loss(w, batch)

    def local(self, client: Any, shared: Tree, own: Tree) -> Any:
        w = yield Train(shared.net, functools.partial(self.weighted, 1.0))
        return Tree(net=w), Tree()


@dataclass(frozen=True)
class Unmasked(FedAvg):
    def loss(self, net: Any, w: Tree, batch: Any, view: Any) -> Any:
        return F.cross_entropy(net(w, batch.x), batch.y)


@dataclass(frozen=True)
class Surveys(FedAvg):
    """Asks for class means beside the model."""

    def local(self, client: Any, shared: Tree, own: Tree) -> Any:
        w = yield Train(shared.net, self.loss)
        said = yield Survey(w, self.fn)
        return Tree(net=w, said=said.v), Tree()

    def fn(self, net: Any, w: Tree, batch: Any, view: Any) -> Tree:
        return Tree(v=batch.onehot(net.classes).mT @ net.embed(w, batch.x))


@dataclass(frozen=True)
class SurveysMeans(Surveys):
    def fn(self, net: Any, w: Tree, batch: Any, view: Any) -> Tree:
        return Tree(v=batch.mean(net.embed(w, batch.x).sum(1)))


@dataclass(frozen=True)
class TalliesMeans(FedAvg):
    def tally(self, net: Any, w: Tree, batch: Any, view: Any) -> Tree:
        rows = batch.onehot(net.classes)
        return Tree(v=rows.mT @ net.embed(w, batch.x) / rows.sum(0).clamp_min(1)[:, None])

    def local(self, client: Any, shared: Tree, own: Tree) -> Any:
        w, said = yield Train(shared.net, self.loss, tally=self.tally)
        return Tree(net=w, said=said.v), Tree()


@dataclass(frozen=True)
class ChangesUpload(FedAvg):
    def aggregate(self, server: Any, shared: Tree, private: Tree, uploads: list[Tree]) -> Any:
        uploads[-1].net["head.bias"].clamp_(-1, 1)
        return super().aggregate(server, shared, private, uploads)


@dataclass(frozen=True)
class DropsUpload(FedAvg):
    def aggregate(self, server: Any, shared: Tree, private: Tree, uploads: list[Tree]) -> Any:
        return Tree(net=server.merge(shared.net, [u.pop("net") for u in uploads])), Tree()


@dataclass(frozen=True)
class ChangesPrivate(FedAvg):
    def start(self, task: Any) -> Any:
        return Tree(net=task.initial), Tree(rounds=torch.zeros(()))

    def aggregate(self, server: Any, shared: Tree, private: Tree, uploads: list[Tree]) -> Any:
        private.rounds.add_(1)
        return super().aggregate(server, shared, private, uploads)[0], private


@dataclass(frozen=True)
class Branches(FedAvg):
    def loss(self, net: Any, w: Tree, batch: Any, view: Any) -> Any:
        return net.loss(w, batch) * (0.5 if batch.epoch > 0 else 1)


@dataclass(frozen=True)
class LooksAround(FedAvg):
    """The loop sees one client after the other."""

    seen: ClassVar[list[Any]] = []

    def local(self, client: Any, shared: Tree, own: Tree) -> Any:
        self.seen.append(client.id)
        w = yield Train(shared.net, self.loss)
        return Tree(net=w | {"head.bias": w["head.bias"] + (self.seen[-1] != client.id)}), Tree()


@dataclass(frozen=True)
class Draws(FedAvg):
    """Adds what `noise` draws."""

    noise: ClassVar[Callable[[], float]] = staticmethod(lambda: 0.0)

    def local(self, client: Any, shared: Tree, own: Tree) -> Any:
        w = yield Train(shared.net, self.loss)
        return Tree(net=w | {"head.bias": w["head.bias"] + 1e-6 * self.noise()}), Tree()


@dataclass(frozen=True)
class DrawsTorch(Draws):
    noise = staticmethod(lambda: float(torch.rand(())))


@dataclass(frozen=True)
class DrawsNumpy(Draws):
    noise = staticmethod(lambda: np.random.random_sample())


@dataclass(frozen=True)
class DrawsPython(Draws):
    noise = staticmethod(random.random)


@dataclass(frozen=True)
class Counts(FedAvg):
    """Remembers in the class how often it was called."""

    calls: ClassVar[dict[str, int]] = {}

    def aggregate(self, server: Any, shared: Tree, private: Tree, uploads: list[Tree]) -> Any:
        self.calls["all"] = self.calls.get("all", 0) + 1
        shared, private = super().aggregate(server, shared, private, uploads)
        return Tree(net=shared.net | {"head.bias": shared.net["head.bias"] + 1e-6 * self.calls["all"]}), private


@dataclass(frozen=True)
class Hides(FedAvg):
    """Remembers beside the trees, where nobody stores it."""

    def aggregate(self, server: Any, shared: Tree, private: Tree, uploads: list[Tree]) -> Any:
        server.task.calls = getattr(server.task, "calls", 0) + 1
        shared, private = super().aggregate(server, shared, private, uploads)
        return Tree(net=shared.net | {"head.bias": shared.net["head.bias"] + 1e-6 * server.task.calls}), private


@dataclass(frozen=True)
class Moves(FedAvg):
    def personal_model(self, client: Any, shared: Tree, own: Tree, last: Any) -> Model:
        last.upload.net["head.bias"].add_(1)
        return Model(last.upload.net)


@dataclass(frozen=True)
class Performs(FedAvg):
    """Trains longer where somebody looks."""

    def local(self, client: Any, shared: Tree, own: Tree) -> Any:
        w = yield Train(shared.net, self.loss, epochs=3 if client.measured else None)
        return Tree(net=w), Tree()


@dataclass(frozen=True)
class Tells(Surveys):
    """Has prototypes, of everything that it needs not."""

    def prototypes(self, shared: Tree, private: Tree) -> Any:
        return Rows(shared.net["head.weight"], torch.ones(5, dtype=torch.bool))

    def client_prototypes(self, upload: Tree) -> Any:
        has = upload.said.abs().sum(1) > 0
        return upload.said[has], has.nonzero()[:, 0]


@dataclass(frozen=True)
class TellsTensor(Tells):
    def prototypes(self, shared: Tree, private: Tree) -> Any:
        return shared.net["head.weight"]


@dataclass(frozen=True)
class TellsNarrow(Tells):
    def client_prototypes(self, upload: Tree) -> Any:
        rows, ids = super().client_prototypes(upload)
        return rows[:, 1:], ids


@dataclass(frozen=True)
class TellsAll(Tells):
    def client_prototypes(self, upload: Tree) -> Any:
        return upload.said, torch.arange(5)


@dataclass(frozen=True)
class TellsScores(Tells):
    def client_prototypes(self, upload: Tree) -> Any:
        return upload.said, torch.arange(5.0)


@dataclass(frozen=True)
class BillsUp(Surveys):
    def bill(self) -> Bill:
        return Bill(forward="n")


@dataclass(frozen=True)
class BillsForward(Surveys):
    def bill(self) -> Bill:
        return Bill(up="P + K*q")


@dataclass(frozen=True)
class BillsState(FedAvg):
    def local(self, client: Any, shared: Tree, own: Tree) -> Any:
        w = yield Train(shared.net, self.loss)
        return Tree(net=w), Tree(w=w)


@dataclass(frozen=True)
class BillsStrange(FedAvg):
    def bill(self) -> Bill:
        return Bill(up="P + m")


@dataclass(frozen=True)
class Inconstant(FedAvg):
    constant = ("net",)

    def bill(self) -> Bill:
        return Bill(down="0")


@dataclass(frozen=True)
class Divides(Surveys):
    def local(self, client: Any, shared: Tree, own: Tree) -> Any:
        upload, kept = yield from super().local(client, shared, own)
        return upload | Tree(said=upload.said / client.counts[:, None]), kept


@dataclass(frozen=True)
class Forgets(FedAvg):
    def refresh(self, client: Any, shared: Tree, own: Tree) -> Any:
        rows, _ = yield Collect(shared.net, self.scores)
        return Model(shared.net, lambda net, w, x: net(w, x) / rows.s.sum() * torch.nan)

    def scores(self, net: Any, w: Tree, batch: Any, view: Any) -> Tree:
        return Tree(s=net(w, batch.x))

    def personal_model(self, client: Any, shared: Tree, own: Tree, last: Any) -> Model:
        return Model(last.upload.net, lambda net, w, x: net(w, x) * torch.nan)


@dataclass(frozen=True)
class Lazy(FedAvg):
    def aggregate(self, server: Any, shared: Tree, private: Tree, uploads: list[Tree]) -> Any:
        return Tree(), Tree()


BROKEN: list[tuple[type[FedAvg], dict[str, str]]] = [
    (Undecorated, {"builds": "Undecorated is no dataclass of its own"}),
    (Unexplained, {"builds": "option share has no reason or source"}),
    (OutOfLimits, {"builds": "share: 2 is outside its limits"}),
    (Preset, {"builds": "presets name 'fast'"}),
    (OpenField, {"builds": "no field 'momentumm'"}),
    (Refuses, {"builds": "it needs a net of another kind", "runs": "of another kind"}),
    (Fails, {"runs": r"Fails.aggregate raised ValueError: on purpose \[round 1, server, clients 1, 3, 4"}),
    (SendsText, {"trees": "Sends.local: the upload/note is str: .* client 0, 23", "runs": "AttributeError"}),
    (SendsDict, {"trees": "the upload/extra is dict"}),
    (SendsRows, {"trees": "the upload/table: Rows are values"}),
    (SendsSlash, {"trees": "the upload has the name 'head/bias'"}),
    (KeepsNumber, {"trees": "KeepsNumber.local: what it keeps/last is int", "runs": "AttributeError"}),
    (
        KeepsGraph,
        {"trees": r"KeepsGraph.aggregate: private/last keeps the graph of a gradient: detach it \[round 0, server"},
    ),
    (WritesBatch, {"functions": r"WritesBatch.loss changed batch/x in place \[round 0, client 0, 23 samples\]"}),
    (WritesUnseen, {"functions": "WritesUnseen.loss changed view/shared/net/head.bias in place"}),
    (WritesShared, {"functions": "WritesShared.local changed shared/visited"}),
    (Closure, {"requests": r"loss=Closure.local.<locals>.<lambda> is made anew .*round 0, client 1"}),
    (Partial, {"requests": "loss=partial is made anew"}),
    (
        Unmasked,
        {"padding": "Unmasked.loss is moved by .* by rows of padding, at loss .round 0", "engines": "differs by"},
    ),
    (SurveysMeans, {"sums": r"SurveysMeans.fn is .* off the sum over two halves, at v \[round 0, client 0"}),
    (TalliesMeans, {"sums": "TalliesMeans.tally is .* off the sum over two halves"}),
    (
        ChangesUpload,
        {"aggregate": "ChangesUpload.aggregate changed upload of client 5/net/head.bias in place .round 0"},
    ),
    (DropsUpload, {"aggregate": "DropsUpload.aggregate changed upload of client 0/net"}),
    (ChangesPrivate, {"aggregate": "changed private/rounds in place"}),
    (SendsShared, {"uploads": r"bias of client 1 and bias of client 0 are one memory \[loop, round 0\]"}),
    (Branches, {"engines": "Branches.loss raised .*vmap.*round 0, client 0"}),
    (LooksAround, {"engines": r"client 0/upload/net/head.bias differs by 1.0e\+00 \[round 0, clients 0, 1, 2"}),
    (DrawsTorch, {"repeatable": "upload/net/head.bias differs by .*round 0, clients 0"}),
    (DrawsNumpy, {"repeatable": "head.bias differs"}),
    (DrawsPython, {"repeatable": "head.bias differs"}),
    (
        Counts,
        {
            "repeatable": "shared/net/head.bias differs",
            "resume": "differs",
            "evaluation": "differs",
            "engines": "differs",
        },
    ),
    (Hides, {"resume": r"differs by .* \[round 1"}),
    (Moves, {"evaluation": "global_model or personal_model changed .*net/head.bias"}),
    (Performs, {"evaluation": "where rounds are evaluated, .* differs by"}),
    (TellsTensor, {"prototypes": "prototypes must be Rows"}),
    (TellsNarrow, {"prototypes": r"prototypes of several widths: \[6\], \[7\] .round 2, client 0"}),
    (TellsAll, {"prototypes": "client_prototypes name class 1, which the client does not have .round 2, client 1"}),
    (TellsScores, {"prototypes": r"client_prototypes must be .*float32 \[round 2"}),
    (BillsUp, {"bill": r"up='P' comes to \d+, a run measures \d+ \[round 1, clients 0, 1, 4, 5\]"}),
    (BillsForward, {"bill": "forward='0' comes to 0, a run measures 71"}),
    (BillsState, {"bill": "state='0' comes to 0, a run measures"}),
    (BillsStrange, {"bill": "up='P . m': name 'm' is not defined; the symbols are P, B"}),
    (Inconstant, {"bill": "shared/net is declared constant and changes"}),
    (Divides, {"extremes": "client 0/upload/said is not finite .round 0, clients 0, 1 samples"}),
    (Forgets, {"extremes": "scores of client 6/network mean nothing"}),
    (Lazy, {"learns": r"GM \d+.\d % after 25 rounds"}),
]
CHEAP = ("builds", "runs", "trees", "functions", "requests", "padding", "sums", "aggregate")
"""Checks that one run answers."""


@pytest.mark.parametrize(("method", "wanted"), BROKEN, ids=lambda v: getattr(v, "__name__", ""))
def test_a_broken_promise_is_named(method: type[FedAvg], wanted: dict[str, str]) -> None:
    """It fails the checks that it is meant to fail, with these words, and of those that cost nothing no other."""
    Counts.calls.clear()
    tried = verify.Subject(method)
    verdicts = [c.judge(tried) for c in verify.CHECKS if c.name in wanted or c.name in CHEAP]
    failed = {v.check.name: v.line for v in verdicts if v.kept is False}
    assert failed.keys() == wanted.keys()
    for name, words in wanted.items():
        assert re.search(words, failed[name]), failed
        assert "\n" not in failed[name]


def test_every_check_is_broken_by_somebody() -> None:
    assert {name for _, wanted in BROKEN for name in wanted} == {c.name for c in verify.CHECKS}


@dataclass(frozen=True)
class Personal(FedAvg):
    def global_model(self, shared: Tree, private: Tree) -> None:
        return None


def test_without_a_global_model_the_personal_ones_are_read() -> None:
    (learns,) = [c for c in verify.CHECKS if c.name == "learns"]
    _, kept, line = learns.judge(verify.Subject(Personal()))
    assert kept and line.startswith("it has no GM; PM(V) 100.0 %")


@dataclass(frozen=True)
class Least(Method):
    """What is not optional, and nothing else."""

    def start(self, task: Any) -> Any:
        return Tree(net=task.initial), Tree()

    def loss(self, net: Any, w: Tree, batch: Any, view: Any) -> Any:
        return net.loss(w, batch)

    def local(self, client: Any, shared: Tree, own: Tree) -> Any:
        w = yield Train(shared.net, self.loss)
        return Tree(net=w), Tree()

    def aggregate(self, server: Any, shared: Tree, private: Tree, uploads: list[Tree]) -> Any:
        return Tree(net=server.mean([u.net for u in uploads])), Tree()


def test_the_least_method_keeps_the_contract() -> None:
    tried = verify.Subject(Least)
    verdicts = {c.name: c.judge(tried)[1:] for c in verify.CHECKS}
    open_ = {name: line for name, (kept, line) in verdicts.items() if not kept}
    assert open_ == {"prototypes": "it has no prototypes", "learns": "it has neither a global nor personal models"}
    assert not [name for name, (kept, _) in verdicts.items() if kept is False]


def test_the_global_generators_are_left_alone() -> None:
    before = random.getstate(), torch.get_rng_state(), np.random.get_state()[1].copy()
    assert verify.CHECKS[1].judge(verify.Subject(DrawsTorch())).kept
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])
    assert (np.random.get_state()[1] == before[2]).all()


def test_the_awkward_scene_is_awkward() -> None:
    """Clients that come late and pause, batches of unlike sizes, a class that a client lacks."""
    scene = awkward()
    drawn = [set(ids) for ids in scene.draws]
    assert drawn[1] - drawn[0] and drawn[0] - drawn[1] & drawn[2] and {len(p) % 8 for p in scene.parts} != {0}
    assert len({len(p) for p in scene.parts}) == len(scene.parts)


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(cli, "out", Console(width=160))
        monkeypatch.setattr(sys, "argv", ["protofl", "verify", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code or 0, *capsys.readouterr()  # type: ignore[return-value]

    return run


MINE = '''"""Mine: half of everything."""
from dataclasses import dataclass
from protofl.method import Train, Tree
from protofl.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Mine(FedAvg):
    def local(self, client, shared, own):
        w = yield Train(shared.net, self.loss)
        return Tree(net=w, note="hello"), Tree()
'''


def test_command(command: Any, tmp_path: Path) -> None:
    code, said, _ = command("fedprox", "--set", "fedprox.mu=0.1")
    assert code == 0 and said.count("✓") == len(verify.CHECKS) - 1 and "- prototypes it has no prototypes" in said
    assert "GM 100.0 %" in said and said.endswith("it keeps the contract\n")
    (tmp_path / "mine.py").write_text(MINE)
    code, said, _ = command(str(tmp_path / "mine.py"))
    assert code == 1 and "2 of 17 checks failed" in said
    assert "✗ trees" in said and "Mine.local: the upload/note is str" in said


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["./nothere.py"], "does not exist"),
        (["fedprocc"], "did you mean 'fedproc'"),
        (["cspc"], "stands behind a method"),
        (["fednh+cspc"], "fedavg, fedprox and moon fit"),
        (["fedavg", "./broken.py"], "does not load: ZeroDivisionError"),
        (["fedprox", "--set", "fedprox.muu=1"], "did you mean 'mu'"),
    ],
)
def test_bad_input(command: Any, words: list[str], wanted: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("1 / 0\n")
    code, said, error = command(*words)
    assert code == 2 and not said and wanted in error and error.count("\n") == 1
