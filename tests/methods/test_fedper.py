"""FedPer: the test vectors, every option, what is equal by construction, traps, costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import ENGINES, Harnessed, ToyNet, federation
from protofl.methods.fedavg import FedAvg
from protofl.methods.fedper import FedPer
from ragged import Shift, Tiny, gap, identical, ragged, state
from torch import Tensor
from toy import ToyBN, everything, toy
from toy import gap as distance

from protofl import registry, rng
from protofl.errors import UserError
from protofl.handles import RunTask
from protofl.nets import build
from protofl.options import fields
from protofl.protocol import Protocol
from protofl.registry import Spec
from protofl.tree import Tree, nbytes

engines = pytest.mark.parametrize("engine", ENGINES)
PERSONAL = {"metrics": ("gm", "pm_v")}
DRAWS = [[0, 1, 2], [0, 3, 4], [0, 1, 3]]  # client 0 always, 1 with a pause, 2 once, 5 and 6 never


class Scalar(ToyNet):
    """Prediction phi theta, loss half its squared distance to the row."""

    def init(self, stream: Any) -> Tree:
        return Tree({"encoder.theta": torch.tensor([1.0]), "head.phi": torch.tensor([0.5])})

    def loss(self, w: Tree, batch: Any) -> Tensor:
        miss = w["head.phi"] * w["encoder.theta"] - batch.x[:, 0]
        return batch.mean(miss.square() / 2)  # type: ignore[no-any-return]


def scalar(method: Any, n: tuple[int, ...] = (3, 3), targets: tuple[float, ...] = (2.0, -1.0), **kw: Any) -> Harnessed:
    """Clients with n_i equal rows each, one full batch a step."""
    x = torch.cat([torch.full((k, 1), t, dtype=torch.float64) for k, t in zip(n, targets)])
    ends = torch.tensor([0, *n]).cumsum(0).tolist()
    parts = [range(a, b) for a, b in zip(ends, ends[1:])]
    plain = {"local_epochs": 2, "model_weighting": "uniform"}
    return federation(method, Scalar(), x, torch.zeros(len(x), dtype=torch.long), parts, **{**plain, **kw})


def pairs(fed: Harnessed) -> list[list[float]]:
    """(theta, phi) of the personal models, by client."""
    return [[float(m.tree["encoder.theta"]), float(m.tree["head.phi"])] for m in fed.personal().values()]


ROUNDS = [
    ([[1.15958125, 0.789884375], [0.87866875, 0.227553125]], 1.019125),
    ([[1.2033018109, 1.0213342506], [0.9798606889, -0.0071224096]], 1.0915812499),
]


@engines
def test_vectors(engine: str) -> None:
    fed = scalar(FedPer(), engine=engine, rounds=2)
    for t, (wanted, theta) in enumerate(ROUNDS):
        fed.play(t)
        assert pairs(fed) == [pytest.approx(pair, abs=5e-11) for pair in wanted]
        assert float(fed.shared.net["encoder.theta"]) == pytest.approx(theta, abs=5e-11)
    by_size = scalar(FedPer(), (10, 30), engine=engine, model_weighting="data_size").run()
    assert float(by_size.shared.net["encoder.theta"]) == pytest.approx(0.948896875, abs=1e-12)


# ---- against a plain script


def by_hand(fed: Harnessed, private: Callable[[str], bool], extra: int = 0) -> tuple[Tree, dict[int, Tree], list[Tree]]:
    """Bodies averaged, the rest kept, by a plain script with torch's own optimiser and clip.

    -> the body, everybody's private part, the last round's models after `extra` more epochs of a new optimiser.
    """
    p, net = fed.protocol, fed.task.net
    start = Tree(fed.task.initial)
    body = Tree({k: v for k, v in start.items() if not private(k)})
    mine = {i: Tree({k: v for k, v in start.items() if private(k)}) for i in range(fed.task.clients)}
    shown: list[Tree] = []

    def trained(w: Tree, i: int, stream: Any, epochs: int) -> Tree:
        q = Tree({k: v.clone().requires_grad_() for k, v in w.items()})
        sgd = torch.optim.SGD(list(q.values()), lr=p.client_lr, momentum=p.momentum, weight_decay=p.weight_decay)
        for _ in range(epochs):
            order = torch.from_numpy(stream.permutation(len(fed.task.parts[i])))
            for rows in fed.task.parts[i][order].split(p.batch_size):
                sgd.zero_grad()
                F.cross_entropy(net(q, fed.task.x[rows]), fed.task.y[rows]).backward()
                if p.grad_clip_norm:
                    torch.nn.utils.clip_grad_norm_(list(q.values()), p.grad_clip_norm)
                sgd.step()
        return q.map(Tensor.detach)

    for t in range(p.rounds):
        models, ids, shown = [], fed.taking_part(t), []
        for i in ids:
            stream = rng.train(p.seed, t, i)
            models.append(trained(body | mine[i], i, stream, p.local_epochs))
            shown.append(trained(models[-1], i, stream, extra))
            mine[i] = Tree({k: v for k, v in models[-1].items() if private(k)})
        sizes = [len(fed.task.parts[i]) for i in ids]
        body = Tree({k: sum(m[k] * (n / sum(sizes)) for m, n in zip(models, sizes)) for k in body})
    return body, mine, shown


@engines
@pytest.mark.parametrize("epochs", [0, 5])
def test_by_hand(engine: str, epochs: int) -> None:
    fed = ragged(
        FedPer(finetune_epochs=epochs), engine=engine, participation=0.5, grad_clip_norm=0.7, rounds=4, **PERSONAL
    )
    fed.run()
    body, mine, shown = by_hand(fed, lambda k: k.startswith("head."), epochs)
    assert gap(body, fed.shared.net) < 1e-12
    for i, wanted in mine.items():
        drawn = fed.memory.get(i) is not None
        assert gap(wanted, fed.own(i).head if drawn else fed.task.initial.only("head")) < 1e-12
    for model, wanted in zip(fed.personal().values(), shown):
        assert gap(model.tree, wanted) < 1e-12


@engines
def test_one_client_is_fedavg(engine: str) -> None:
    kw = {"engine": engine, "draws": [[4]] * 3, "grad_clip_norm": 0.5}
    alone, average = ragged(FedPer(), **kw).run(), ragged(FedAvg(), **kw).run()
    assert identical(alone.shared.net | alone.own(4).head, average.shared.net)


# ---- what is private


@engines
def test_heads_never_travel(engine: str) -> None:
    fed = ragged(FedPer(), Tiny(norm=True), engine=engine, draws=DRAWS).run()
    names = {"head.weight", "head.bias"}  # the bias is private too
    assert not names & (set(fed.shared.net) | {k for u in fed.last.uploads for k in u.net})
    assert all(set(fed.own(i).head) == names for i in range(5))
    assert fed.global_model() is None


@engines
def test_an_idle_head_stays_as_it_is(engine: str) -> None:
    fed = ragged(FedPer(), engine=engine, draws=DRAWS)
    fed.play(0)
    then = {i: fed.own(i).head.map(torch.clone) for i in (1, 2)}
    fed.play(1)
    assert identical(fed.own(1).head, then[1]) and fed.memory.get(5) is None
    fed.play(2)
    assert identical(fed.own(2).head, then[2]) and gap(fed.own(1).head, then[1]) > 1e-6


def test_age_of_a_head() -> None:
    fed = scalar(FedPer(), (1,) * 100, (0.0,) * 100, participation=0.1, rounds=200)
    last = {i: t for t in range(200) for i in fed.drawn(t)}
    ages = [199 - last[i] for i in range(100)]
    assert sum(ages) / 100 == pytest.approx(10.2, abs=0.05) and max(ages) == 86


@engines
def test_refresh_gives_everybody_a_model(engine: str) -> None:
    fed = scalar(FedPer(), (3, 3, 3), (2.0, -1.0, 2.0), engine=engine, rounds=2, draws=[[0, 1]] * 2).run()
    before = state(fed)
    models = fed.refreshed()
    assert list(models) == [0, 1, 2]
    theta, phi = 1.0915812499, 0.5  # client 2 was never drawn: phi^0
    for _ in range(2):
        miss = phi * theta - 2
        theta, phi = theta - 0.1 * miss * phi, phi - 0.1 * miss * theta
    got = models[2].tree
    assert [float(got["encoder.theta"]), float(got["head.phi"])] == pytest.approx([theta, phi], abs=1e-9)
    assert identical(state(fed), before)


# ---- options


@engines
def test_pm_body(engine: str) -> None:
    own, aggregated = (ragged(FedPer(pm_body=b), engine=engine, participation=0.5).run() for b in ("own", "aggregated"))
    assert identical(state(own), state(aggregated))  # it changes PM alone
    for i, model in aggregated.personal().items():
        assert identical(model.tree, aggregated.shared.net | aggregated.own(i).head)
    for k, model in enumerate(own.personal().values()):
        assert identical(model.tree, own.last.uploads[k].net | own.own(own.last.ids[k]).head)
    received = aggregated.refreshed()[0].tree
    assert identical(received.without("head"), aggregated.shared.net)


@engines
@pytest.mark.parametrize("buffers", ["average", "local"])
def test_pm_body_and_normalisation(engine: str, buffers: str) -> None:
    fed = ragged(FedPer(pm_body="aggregated"), Tiny(norm=True), engine=engine, bn_buffers=buffers).run()
    statistics = [m.tree["encoder.running_mean"] for m in fed.personal().values()]
    for i, mean in enumerate(statistics):
        wanted = fed.memory.get(i).buffers if buffers == "local" else fed.shared.net
        assert torch.equal(mean, wanted["encoder.running_mean"])
    assert torch.equal(statistics[0], statistics[1]) is (buffers == "average")


@engines
def test_finetune_epochs(engine: str) -> None:
    kw = {"engine": engine, "participation": 0.5, "eval_every": 2, "rounds": 4, "augment": Shift()}
    plain, tuned = (ragged(FedPer(finetune_epochs=e), **kw, **PERSONAL).run() for e in (0, 5))
    assert identical(state(plain), state(tuned)) and plain.terms == tuned.terms  # it changes PM alone
    assert all(gap(a.tree, b.tree) > 1e-6 for a, b in zip(plain.personal().values(), tuned.personal().values()))
    assert [bool(r.shown[0]) for r in tuned.rounds] == [False, True, False, True]
    assert [bool(r.shown[0]) for r in ragged(FedPer(finetune_epochs=5), **kw).run().rounds] == [False] * 4
    assert all(gap(m.tree, plain.refreshed()[i].tree) > 1e-6 for i, m in tuned.refreshed().items())


class Deep(Tiny):
    """A net that says which layer stands before its output layer."""

    last_block = r"projection\."


@engines
def test_head_layers(engine: str) -> None:
    kw = {"engine": engine, "participation": 0.5, "grad_clip_norm": 0.7}
    linear, block = (ragged(FedPer(head_layers=h), Deep(), **kw).run() for h in ("last_linear", "last_block"))
    assert list(linear.shared.net) == ["encoder.weight", "projection.weight"]
    assert list(block.shared.net) == ["encoder.weight"]
    body, mine, _ = by_hand(block, lambda k: not k.startswith("encoder."))
    assert gap(body, block.shared.net) < 1e-12
    assert all(gap(mine[i], block.own(i).head) < 1e-12 for i in block.last.ids)
    assert gap(linear.shared.net["encoder.weight"], block.shared.net["encoder.weight"]) > 1e-6


@engines
def test_private_statistics_of_a_private_block(engine: str) -> None:
    class Whole(Tiny):
        last_block = r"encoder\."

    fed = ragged(FedPer(head_layers="last_block"), Whole(norm=True), engine=engine, draws=[[0, 1]] * 3).run()
    assert list(fed.shared.net) == ["projection.weight"]
    assert not torch.equal(*(fed.own(i).head["encoder.running_mean"] for i in (0, 1)))


@engines
def test_bn_buffers(engine: str) -> None:
    runs = [ragged(FedPer(), engine=engine, bn_buffers=b).run() for b in ("average", "local")]
    assert identical(*map(state, runs))  # no normalisation, no effect
    average, local = (
        ragged(FedPer(), Tiny(norm=True), engine=engine, bn_buffers=b).run() for b in ("average", "local")
    )
    assert int(average.shared.net["encoder.num_batches_tracked"]) == 3 * 2 * 4
    assert int(local.shared.net["encoder.num_batches_tracked"]) == 0
    assert int(local.personal()[1].tree["encoder.num_batches_tracked"]) == 3 * 2 * 1


def test_refusals() -> None:
    with pytest.raises(UserError, match="needs pm_body=own"):
        FedPer(pm_body="aggregated", finetune_epochs=5)
    with pytest.raises(UserError, match="does not tell its last layers apart"):
        FedPer(head_layers="last_block").check(Protocol(), ToyBN(projection=None))
    FedPer(head_layers="last_block").check(Protocol(), ToyBN())
    never = Protocol(optimizer_reset="never")
    FedPer().check(never, ToyBN())
    with pytest.raises(UserError, match="optimizer_reset=per_round"):
        FedPer(finetune_epochs=5).check(never, ToyBN())
    p = Protocol(pm_clients="all", metrics=("gm", "pm_v"))
    with pytest.raises(UserError, match="pm_clients=all as trained"):
        registry.check(FedPer(), p, FedPer().adapt(p), ToyBN())


def test_options_and_open_fields() -> None:
    given = (("head_layers", "last_block"), ("pm_body", "aggregated"), ("finetune_epochs", "0"))
    assert Spec("fedper", given).build(Protocol()) == FedPer("last_block", "aggregated", 0)
    assert set(fields(FedPer)) == {k for k, _ in given}
    assert set(FedPer.open_fields) <= set(fields(Protocol))


# ---- costs, engines


def floats(tree: Any) -> int:
    return nbytes(tree) // 4


@engines
@pytest.mark.parametrize("options", [{}, {"head_layers": "last_block"}, {"finetune_epochs": 5}], ids=str)
def test_bill(engine: str, options: dict[str, Any]) -> None:
    fed = toy(FedPer(**options), engine=engine, rounds=2, **PERSONAL).run()
    net, w, bill = fed.task.net, fed.task.initial, fed.method.bill()
    head, block = floats(w.only(net.head)), floats(w.only(net.last_block))
    parts = {"P": floats(w), "H": head, "B": floats(w) - head, "V": block, "E": fed.protocol.local_epochs}
    ids = fed.last.ids
    assert 0 < len(ids) < 7
    assert fed.last.bytes == {"down": 4 * len(ids) * eval(bill.down, parts), "up": 4 * len(ids) * eval(bill.up, parts),
                              "once": 0}  # fmt: skip
    each = [{**parts, "n": fed.task.sizes[i]} for i in ids]
    assert fed.last.samples == {k: sum(eval(getattr(bill, k), e) for e in each) for k in ("trained", "forward")}
    assert fed.last.state_bytes == 4 * eval(bill.state, parts)


@pytest.mark.parametrize(
    ("name", "classes", "side", "wanted"),
    [("cnn_fednh", 10, 32, 3_184_128), ("cnn_fednh", 100, 32, 3_184_128), ("resnet18_gn2", 200, 64, 44_675_328)],
)
def test_bytes(name: str, classes: int, side: int, wanted: int) -> None:
    net = build(name, classes=classes, shape=(side, side, 3))
    initial = Tree({e.name: torch.zeros(e.shape) for e in net.table()})
    task = RunTask(
        net, torch.zeros(1, 3, side, side), torch.tensor([0]), [torch.tensor([0])], Protocol(), initial=initial
    )
    assert nbytes(FedPer().start(task)[0]) == wanted


def test_engines_agree() -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"finetune_epochs": 5}, {"drop_last": True, "grad_clip_norm": 0.5}),
        ({"pm_body": "aggregated"}, {"bn_buffers": "local"}),
        ({"head_layers": "last_block"}, {"augment": False, "participation": 1.0, "crew": 1}),
        ({}, {"optimizer_reset": "never", "server_lr": 0.5}),
    ]
    for options, kw in cases:
        a, b = (toy(FedPer(**options), engine=e, rounds=2, **PERSONAL, **kw).run() for e in ENGINES)
        assert distance(everything(a), everything(b)) < 1e-10
        for one, two in ((a.personal(), b.personal()), (a.refreshed(), b.refreshed())):
            assert list(one) == list(two)
            assert all(distance(one[i].tree, two[i].tree) < 1e-10 for i in one)
        assert a.bytes == b.bytes and [r.samples for r in a.rounds] == [r.samples for r in b.rounds]
        assert a.terms[-1] == pytest.approx(b.terms[-1])
