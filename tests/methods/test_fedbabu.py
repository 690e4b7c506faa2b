"""FedBABU: the test vectors, every option, what is equal by construction, traps, costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import ENGINES, Harnessed, ToyNet, federation
from protofl.methods import spread
from protofl.methods.fedbabu import FedBABU
from ragged import Shift, Tiny, gap, identical, ragged, state
from torch import Tensor
from toy import ToyBN, everything, toy
from toy import gap as distance

from protofl import registry, rng
from protofl.errors import UserError
from protofl.handles import RunClient, RunTask
from protofl.nets import build
from protofl.options import fields
from protofl.protocol import Protocol
from protofl.registry import Spec
from protofl.tree import Tree, nbytes

engines = pytest.mark.parametrize("engine", ENGINES)


class Scalar(ToyNet):
    """Prediction phi theta, loss half its squared distance to the row."""

    def init(self, stream: Any) -> Tree:
        return Tree({"encoder.theta": torch.tensor([1.0]), "head.phi": torch.tensor([0.5])})

    def loss(self, w: Tree, batch: Any) -> Tensor:
        miss = w["head.phi"] * w["encoder.theta"] - batch.x[:, 0]
        return batch.mean(miss.square() / 2)  # type: ignore[no-any-return]


def scalar(engine: str, **options: Any) -> Harnessed:
    """Clients with targets 2, 0 and three equal rows each take part; 2 and 3, with the same targets, never do."""
    x = torch.tensor([[2.0]] * 3 + [[0.0]] * 3, dtype=torch.float64).repeat(2, 1)
    parts = [range(k, k + 3) for k in (0, 3, 6, 9)]
    options = {"finetune_epochs": 2, **options}
    y = torch.zeros(12, dtype=torch.long)
    return federation(FedBABU(**options), Scalar(), x, y, parts, engine=engine, rounds=2, local_epochs=2,
                      model_weighting="uniform", draws=[[0, 1]] * 2)  # fmt: skip


def pair(w: Tree) -> list[float]:
    return [float(w["encoder.theta"]), float(w["head.phi"])]


@engines
def test_rounds(engine: str) -> None:
    fed = scalar(engine)
    for wanted, theta in (([1.148125, 0.950625], 1.049375), ([1.1950621094, 0.9975621094], 1.0963121094)):
        fed.play(len(getattr(fed, "rounds", [])))
        assert [float(u.net["encoder.theta"]) for u in fed.last.uploads] == pytest.approx(wanted, abs=5e-11)
        assert pair(fed.global_model().tree) == pytest.approx([theta, 0.5], abs=5e-11)


FULL = [[1.2499487008, 0.8028837707], [1.0482192555, 0.3896433613]]
STALE = [[1.3423176484, 0.8137778964], [0.9529061197, 0.4076506552]]
NEVER_DRAWN = [[1.15958125, 0.789884375], [0.95525625, 0.407221875]]


@engines
@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, FULL * 2),
        ({"finetune_part": "head"}, [[1.0963121094, 0.7992044848], [1.0963121094, 0.3870327968]] * 2),
        ({"finetune_part": "body"}, [[1.2396816990, 0.5], [1.0421816990, 0.5]] * 2),
        ({"finetune_start": "stale_local"}, STALE + NEVER_DRAWN),
        ({"finetune_epochs": 0}, [[1.0963121094, 0.5]] * 4),
    ],
    ids=str,
)
def test_fine_tuning(engine: str, options: dict[str, Any], wanted: list[list[float]]) -> None:
    fed = scalar(engine, **options).run()
    before = state(fed)
    models = fed.refreshed()
    assert list(models) == [0, 1, 2, 3]  # whoever took part
    assert [pair(m.tree) for m in models.values()] == [pytest.approx(p, abs=6e-11) for p in wanted]
    assert identical(state(fed), before)


# ---- against a plain script


@engines
@pytest.mark.parametrize("options", [{}, {"finetune_start": "stale_local", "finetune_part": "head"}], ids=str)
def test_by_hand(engine: str, options: dict[str, Any]) -> None:
    fed = ragged(FedBABU(finetune_lr="initial", finetune_epochs=3, **options), engine=engine, participation=0.5,
                 grad_clip_norm=0.5, lr_decay_per_round=0.8)  # fmt: skip
    fed.run()
    p, net = fed.protocol, fed.task.net
    body, head = fed.task.initial.without("head"), fed.task.initial.only("head")
    bodies = dict.fromkeys(range(7), body)

    def trained(i: int, t: int, w: Tree, names: str, epochs: int, lr: float) -> Tree:
        q = w.map(lambda v: v.clone().requires_grad_())
        mine = list(q.only(names).values())
        sgd = torch.optim.SGD(mine, lr=lr, momentum=p.momentum, weight_decay=p.weight_decay)
        stream = rng.train(p.seed, t, i)
        for _ in range(epochs):
            order = torch.from_numpy(stream.permutation(len(fed.task.parts[i])))
            for rows in fed.task.parts[i][order].split(p.batch_size):
                sgd.zero_grad()
                F.cross_entropy(net(q, fed.task.x[rows]), fed.task.y[rows]).backward()
                torch.nn.utils.clip_grad_norm_(mine, p.grad_clip_norm)
                sgd.step()
        return q.map(Tensor.detach)

    for t in range(p.rounds):
        ids = fed.taking_part(t)
        for i in ids:
            bodies[i] = trained(i, t, body | head, "(?!head)", p.local_epochs, 0.1 * 0.8**t).without("head")
        sizes = [len(fed.task.parts[i]) for i in ids]
        body = Tree({k: sum(bodies[i][k] * (n / sum(sizes)) for i, n in zip(ids, sizes)) for k in body})
    assert gap(body, fed.shared.net) < 1e-12
    for i, model in fed.refreshed().items():
        start = bodies[i] if options else body
        wanted = trained(i, p.rounds, start | head, "head" if options else "", 3, 0.1)
        assert gap(wanted, model.tree) < 1e-12


# ---- options


@engines
def test_finetune_options_move_the_personal_models_alone(engine: str) -> None:
    def fed(**options: Any) -> tuple[list[Tensor], list[Tree]]:
        made = ragged(FedBABU(**options), engine=engine, participation=0.5, lr_decay_per_round=0.9).run()
        return state(made)[: len(made.shared.net) + 2], [m.tree for m in made.refreshed().values()]

    options = {"finetune_start": "stale_local", "finetune_part": "body", "finetune_lr": "initial", "finetune_epochs": 1}
    base = fed()
    for name, value in options.items():
        shared, models = fed(**{name: value})
        assert identical(shared, base[0])
        assert all(gap(a, b) > 1e-6 for a, b in zip(models, base[1]))
        untuned = fed(finetune_epochs=0)[1]
        same = fed(**{name: value, "finetune_epochs": 0})[1]
        assert identical(untuned, same) is (name != "finetune_start")


@engines
def test_rates(engine: str) -> None:
    runs = [ragged(FedBABU(finetune_lr=lr), engine=engine).run().refreshed() for lr in ("continued", "initial")]
    assert all(identical(runs[0][i].tree, runs[1][i].tree) for i in range(7))  # no decay, no difference


def test_rate_of_the_round_after_the_last() -> None:
    p = Protocol(client_lr=0.01, lr_decay_per_round=0.99, rounds=200)
    task = RunTask(ToyBN(), torch.zeros(1, 3, 8, 8), torch.tensor([0]), [torch.tensor([0])], p)
    assert RunClient(task, 0, 200).lr == pytest.approx(0.0013397967, abs=5e-11)


@engines
def test_a_frozen_body_keeps_its_statistics(engine: str) -> None:
    for part, moves in (("head", False), ("body", True), ("full", True)):
        fed = ragged(FedBABU(finetune_part=part), Tiny(norm=True), engine=engine).run()
        tuned, whole = fed.refreshed()[0].tree, fed.global_model().tree
        changed = {k.split(".")[0] for k in whole if not torch.equal(tuned[k], whole[k])}
        assert ("encoder" in changed) is moves and ("head" in changed) is (part != "body")
        assert (int(tuned["encoder.num_batches_tracked"]) > int(whole["encoder.num_batches_tracked"])) is moves


@engines
def test_stale_statistics(engine: str) -> None:
    """bn_buffers=local: the fine-tuning begins with the client's own, whatever body it begins with."""
    for begin in ("aggregated", "stale_local"):
        method = FedBABU(finetune_start=begin, finetune_epochs=0)
        fed = ragged(method, Tiny(norm=True), engine=engine, bn_buffers="local", draws=[[0, 1]] * 3).run()
        models = fed.refreshed()
        for i in (0, 1):
            assert torch.equal(
                models[i].tree["encoder.running_mean"], fed.memory.get(i).buffers["encoder.running_mean"]
            )
        assert not models[6].tree["encoder.running_mean"].any()


def test_head_init() -> None:
    fed = toy(FedBABU(head_init="orthogonal"), net=ToyBN(projection=7), rounds=1).run()
    head = fed.shared.head
    rows = spread.orthogonal(5, 7, rng.private("fedbabu", "init", 1, -1, -1))
    assert torch.equal(head["head.weight"], torch.from_numpy(rows)) and not head["head.bias"].any()
    assert distance(head["head.weight"] @ head["head.weight"].mT, torch.eye(5).double()) < 1e-12
    plain = toy("fedbabu", net=ToyBN(projection=7), rounds=1).run()
    assert distance(plain.shared.head, plain.task.initial.only("head")) == 0
    assert distance(plain.shared.net, fed.shared.net) > 1e-6
    bare = toy(FedBABU(head_init="orthogonal"), net=ToyBN(projection=None), rounds=1)
    assert bare.shared.head["head.weight"].shape == (5, 10)


# ---- the head, the population, refusals


@engines
def test_the_head_never_moves(engine: str) -> None:
    fed = ragged(FedBABU(), engine=engine, weight_decay=0.1).run()
    head = fed.task.initial.only("head")
    assert identical(fed.shared.head, head) and identical(fed.global_model().tree.only("head"), head)
    assert all(not u.net.only("head") for u in fed.last.uploads)
    assert all(fed.memory.get(i) is None for i in range(7))


@engines
def test_last_bodies(engine: str) -> None:
    fed = ragged(
        FedBABU(finetune_start="stale_local", finetune_epochs=0), engine=engine, draws=[[0, 1], [0, 2], [0, 3]]
    )
    sent = {}
    for t in range(3):
        fed.play(t)
        sent |= dict(zip(fed.last.ids, (u.net for u in fed.last.uploads)))
    models = fed.refreshed()
    for i in range(7):
        assert identical(models[i].tree.without("head"), sent.get(i, fed.task.initial.without("head")))


def test_population() -> None:
    asked = Protocol(metrics=("gm", "pm_v"))
    adapted = FedBABU().adapt(asked)
    assert (adapted.pm_protocol, adapted.pm_clients) == ("refresh", "all")
    assert adapted == asked.replace(pm_protocol="refresh", pm_clients="all")
    registry.check(FedBABU(), asked, adapted, ToyBN())
    assert not adapted.measures(asked.rounds - 1)  # nobody is evaluated as trained


def test_refusals() -> None:
    p, stale = Protocol(), FedBABU(finetune_start="stale_local")
    stale.check(p, ToyBN())
    refresh = p.replace(pm_protocol="refresh")
    FedBABU().check(refresh, ToyBN())
    with pytest.raises(UserError, match="every client receives the final body"):
        registry.check(stale, refresh, stale.adapt(refresh), ToyBN())
    FedBABU(head_init="orthogonal").check(p, ToyBN(projection=5))
    with pytest.raises(UserError, match="5 classes cannot have orthogonal rows in 4"):
        FedBABU(head_init="orthogonal").check(p, ToyBN(projection=4))
    never = p.replace(optimizer_reset="never")
    FedBABU(finetune_epochs=0).check(never, ToyBN())
    with pytest.raises(UserError, match="new optimiser"):
        FedBABU().check(never, ToyBN())


def test_options_and_open_fields() -> None:
    given = (("finetune_start", "stale_local"), ("finetune_part", "head"), ("finetune_lr", "initial"),
             ("finetune_epochs", "10"), ("head_init", "orthogonal"))  # fmt: skip
    assert Spec("fedbabu", given).build(Protocol()) == FedBABU("stale_local", "head", "initial", 10, "orthogonal")
    assert set(fields(FedBABU)) == {k for k, _ in given}
    assert set(FedBABU.open_fields) <= set(fields(Protocol))


# ---- costs, engines


@engines
@pytest.mark.parametrize("options", [{}, {"finetune_start": "stale_local"}], ids=str)
def test_bill(engine: str, options: dict[str, Any]) -> None:
    fed = toy(FedBABU(**options), engine=engine).run()
    w, bill = fed.task.initial, fed.method.bill()
    head, body = nbytes(w.only("head")) // 4, nbytes(w.without("head")) // 4
    parts = {"P": head + body, "H": head, "B": body, "E": fed.protocol.local_epochs}
    met: set[int] = set()
    for r in fed.rounds:
        m = len(r.ids)
        assert r.bytes == {"down": 4 * m * eval(bill.down, parts), "up": 4 * m * eval(bill.up, parts),
                           "once": 4 * head * len(set(r.ids) - met)}  # fmt: skip
        met |= set(r.ids)
        each = [{**parts, "n": fed.task.sizes[i]} for i in r.ids]
        assert r.samples == {k: sum(eval(getattr(bill, k), e) for e in each) for k in ("trained", "forward")}
        assert r.state_bytes == 4 * eval(bill.state, parts)
    before = dict(fed.clients.engine.samples)
    fed.refreshed()
    assert fed.clients.engine.samples["trained"] - before["trained"] == 5 * sum(fed.task.sizes)


def test_bytes() -> None:
    net = build("cnn_fednh", classes=10, shape=(32, 32, 3))
    task = RunTask(net, torch.zeros(1, 3, 32, 32), torch.tensor([0]), [torch.tensor([0])], Protocol())
    shared, private = FedBABU().start(task)
    assert (nbytes(shared.net), nbytes(shared.head), private) == (3_184_128, 4 * 1_920, Tree())


def test_engines_agree() -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {"drop_last": True, "grad_clip_norm": 0.5}),
        ({"finetune_start": "stale_local", "finetune_part": "head"}, {"bn_buffers": "local"}),
        ({"finetune_part": "body", "finetune_lr": "initial"}, {"crew": 1}),
        ({"head_init": "orthogonal", "finetune_epochs": 0}, {"augment": False, "server_lr": 0.5}),
    ]
    for options, kw in cases:
        a, b = (toy(FedBABU(**options), engine=e, **kw).run() for e in ENGINES)
        assert distance(everything(a), everything(b)) < 1e-10
        for one, two in ((a.personal(), b.personal()), (a.refreshed(), b.refreshed())):
            assert list(one) == list(two) == list(range(7))
            assert all(distance(one[i].tree, two[i].tree) < 1e-10 for i in one)
        assert a.bytes == b.bytes and [r.samples for r in a.rounds] == [r.samples for r in b.rounds]
        assert a.terms[-1] == pytest.approx(b.terms[-1])


@engines
def test_untuned_models_are_where_the_fine_tuning_begins(engine: str) -> None:
    fed = ragged(FedBABU(), engine=engine, augment=Shift(), participation=0.5).run()
    assert all(identical(m.tree, fed.global_model().tree) for m in fed.personal().values())
