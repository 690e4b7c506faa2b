"""What the runtime promises to every method, each promise tried by breaking it (methods' promises: test_verify)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from harness import ENGINES, Identity, federation, quadratic
from protofl.methods.fedavg import FedAvg
from toy import SIZES, everything, gap, toy

from protofl import rng
from protofl.engine.base import MethodError
from protofl.engine.loop import Loop
from protofl.method import Collect, Group, Model, Survey, Train, Tree

# ---- normalisation statistics that stay with their client -------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_local_buffers_never_travel(engine: str) -> None:
    fed = toy("fedavg", engine=engine, bn_buffers="local", participation=1.0, rounds=2).run()
    for name, v in fed.shared.net.items():
        if "running" in name or "tracked" in name:
            assert torch.equal(v, fed.task.initial[name]), name
    kept = [fed.memory.get(i).buffers for i in range(len(SIZES))]
    assert gap(kept[0], kept[1]) > 0 and int(kept[0]["encoder.norm1.num_batches_tracked"]) == 2 * 2 * 3
    assert fed.global_model() is None
    personal = fed.personal()
    for i, model in personal.items():
        assert torch.equal(model.tree["encoder.norm1.running_mean"], kept[i]["encoder.norm1.running_mean"])
    averaged = toy("fedavg", engine=engine, participation=1.0, rounds=2).run()
    floats = 4 * 2 * 6 + 8  # running mean and variance of 6 channels, a counter
    assert averaged.bytes[0]["down"] - fed.bytes[0]["down"] == len(SIZES) * floats


@dataclass(frozen=True)
class Keeps(FedAvg):
    """Clients keep what they trained; idle ones can be asked for it."""

    keeps_personal = True

    def enrol(self, client: Any) -> Tree:
        return Tree(mine=client.task.initial)

    def local(self, client: Any, shared: Tree, own: Tree) -> Any:
        w = yield Train(shared.net, self.loss)
        return Tree(net=w), Tree(mine=w)

    def personal_model(self, client: Any, shared: Tree, own: Tree, last: Any) -> Model:
        return Model(own.mine)


def test_all_clients_are_evaluated_where_they_keep_their_model() -> None:
    fed = toy(Keeps(), pm_clients="all", rounds=1).run()
    models = fed.personal()
    assert list(models) == list(range(len(SIZES))) and len(fed.last.ids) < len(SIZES)
    for i, model in models.items():
        want = fed.last.uploads[fed.last.ids.index(i)].net if i in fed.last.ids else fed.task.initial
        assert gap(model.tree, want) == 0
    assert list(toy(Keeps(), rounds=1).run().personal()) == fed.last.ids


# ---- streams ----------------------------------------------------------------------------------------------------------


def test_shared_client_seed_gives_equal_orders() -> None:
    fed = toy("fedavg", client_seed="shared")
    from protofl.handles import RunClient

    a, b = (RunClient(fed.task, i, 0).batches.permutation(5).tolist() for i in (0, 4))
    assert a == b == rng.train(1, 0, 0).permutation(5).tolist()


def test_streams_of_handles() -> None:
    fed = toy("fedavg")
    from protofl.handles import RunClient, RunServer

    client, server = RunClient(fed.task, 2, 4), RunServer(fed.task, [2], 4)
    pairs = [
        (client.stream("moon", "x", 7), rng.private("moon", "x", 1, 4, 2, 7)),
        (server.stream("moon", "x"), rng.private("moon", "x", 1, 4, -1)),
        (fed.task.stream("moon", "x"), rng.private("moon", "x", 1, -1, -1)),
        (fed.task.client_stream("moon", "x", 3), rng.private("moon", "x", 1, -1, 3)),
    ]
    assert all(a.randint(1 << 30) == b.randint(1 << 30) for a, b in pairs)


# ---- constants, closures, mistakes -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WithConstant(FedAvg):
    """Broadcasts a table that never changes."""

    constant = ("table",)

    def start(self, task: Any) -> Any:
        shared, private = super().start(task)
        return shared | Tree(table=torch.zeros(3)), private


def test_constants_are_billed_once_per_client() -> None:
    fed = quadratic(WithConstant(), rows=((1, 1),) * 3, n=(4, 4, 4), rounds=3, draws=[[0, 1], [1], [2]])
    fed.run()
    assert [b["once"] for b in fed.bytes] == [2 * 12, 0, 12]
    assert [b["down"] for b in fed.bytes] == [8, 4, 4]


@dataclass(frozen=True)
class Uneven(FedAvg):
    """Clients with another number of requests do not break the lockstep; a closure splits a group."""

    def count(self, net: Any, w: Tree, batch: Any, view: Any) -> Tree:
        return Tree(n=batch.mask.sum())

    def local(self, client: Any, shared: Tree, own: Tree) -> Any:
        seen = []
        for _ in range(client.id % 3):
            seen.append((yield Survey(shared.net, self.count)).n)
        assert all(int(n) == client.n for n in seen)
        rows, at = yield Collect(shared.net, lambda net, w, batch, view: Tree(y=batch.y))
        assert torch.equal(rows.y, client.y) and at.tolist() == list(range(client.n))
        w = yield Train(shared.net, self.loss, epochs=1 + client.id % 2)
        return Tree(net=w), Tree()


def test_uneven_programs_agree() -> None:
    runs = [toy(Uneven(), engine=e, participation=1.0).run() for e in ENGINES]
    assert gap(*map(everything, runs)) < 1e-10


@dataclass(frozen=True)
class Branch(FedAvg):
    def loss(self, net: Any, w: Tree, batch: Any, view: Any) -> Any:
        return net.loss(w, batch) * (2 if batch.epoch > 0 else 1)


@dataclass(frozen=True)
class Writes(FedAvg):
    def loss(self, net: Any, w: Tree, batch: Any, view: Any) -> Any:
        view.shared.net["encoder.fc.bias"].add_(1.0)
        return net.loss(w, batch)


@dataclass(frozen=True)
class Asks(FedAvg):
    def local(self, client: Any, shared: Tree, own: Tree) -> Any:
        yield "a model, please"


def test_mistakes_speak() -> None:
    with pytest.raises(MethodError, match=r"Branch\.loss raised .*round 0, client .*samples"):
        toy(Branch(), engine="batched").run()
    for engine in ENGINES:
        with pytest.raises(MethodError, match=r"Writes\.loss"):
            toy(Writes(), engine=engine).run()
        with pytest.raises(MethodError, match="yields Train, Survey or Collect"):
            toy(Asks(), engine=engine).run()


@dataclass(frozen=True)
class Frozen(FedAvg):
    """Only the head moves, at its own rate, without clip and decay."""

    def local(self, client: Any, shared: Tree, own: Tree) -> Any:
        head = Group(client.task.net.head, lr=0.5, momentum=0.0, weight_decay=0.0, clip=float("inf"))
        w = yield Train(shared.net, self.loss, groups=(head,))
        return Tree(net=w), Tree()


@pytest.mark.parametrize("engine", ENGINES)
def test_groups(engine: str) -> None:
    fed = toy(Frozen(), engine=engine, rounds=1).run()
    for name, v in fed.last.uploads[0].net.items():
        moved = not torch.equal(v, fed.task.initial[name])
        assert moved == (name.startswith("head.") or "running" in name or "tracked" in name), name
    assert gap(everything(toy(Frozen(), engine="loop", rounds=1).run()), everything(fed)) < 1e-10


def test_refresh_is_the_round_after_the_last() -> None:
    """pm_protocol=refresh: streams and rate of t = T; nothing of it is kept."""
    fed = toy("fedavg", rounds=2).run()
    state = everything(fed)
    model = fed.refreshed()[4]
    assert isinstance(model, Model) and gap(state, everything(fed)) == 0
    on = toy("fedavg", rounds=3)
    on.shared, on.private = fed.shared, fed.private
    on.draws = [[], [], [4]]
    on.play(2)
    assert gap(model.tree, on.last.uploads[0].net) == 0


def test_the_loop_serves_the_server() -> None:
    """server.train equals SGD by hand: rate per epoch, short batch kept, one private stream."""
    fed = federation(FedAvg(), Identity(2, 2), torch.zeros(2, 2).double(), torch.tensor([0, 1]), [[0], [1]])
    from protofl.handles import RunServer

    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(7, 2, generator=g).double(), torch.tensor([0, 1, 0, 1, 1, 0, 0])
    server = RunServer(fed.task, [0, 1], 3)
    start = fed.task.initial

    def loss(net: Any, w: Tree, batch: Any, view: Any) -> Any:
        return net.loss(w, batch._replace(x=batch.x.u))

    got = server.train(Train(start, loss), Tree(u=x), y, batch_size=3, epochs=2, lr=lambda e: 0.5 / (e + 1),
                       weight_decay=0.1, stream=server.stream("m", "t"))  # fmt: skip
    w, stream = {k: v.clone().requires_grad_() for k, v in start.items()}, server.stream("m", "t")
    for e in range(2):
        order = stream.permutation(7)
        for at in (0, 3, 6):
            rows = torch.from_numpy(order[at : at + 3])
            out = x[rows] @ w["head.weight"].T + w["head.bias"]
            grads = torch.autograd.grad(torch.nn.functional.cross_entropy(out, y[rows]), list(w.values()))
            with torch.no_grad():
                for v, d in zip(w.values(), grads):
                    v -= 0.5 / (e + 1) * (d + 0.1 * v)
    assert gap(got, Tree(w).map(torch.Tensor.detach)) < 1e-12
    assert isinstance(fed.clients.engine, Loop)
