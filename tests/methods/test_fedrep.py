"""FedRep: the test vectors, every option, what is equal by construction, traps, costs; optimisers that go on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import ENGINES, Harnessed, ToyNet, federation
from protofl.methods.fedavg import FedAvg
from protofl.methods.fedbabu import FedBABU
from protofl.methods.fedrep import FedRep
from ragged import Tiny, gap, identical, ragged, state
from torch import Tensor
from toy import ToyBN, everything, toy
from toy import gap as distance

from protofl import rng
from protofl.errors import UserError
from protofl.method import Train
from protofl.options import fields
from protofl.protocol import Protocol
from protofl.registry import Spec
from protofl.tree import Tree, nbytes

engines = pytest.mark.parametrize("engine", ENGINES)
PERSONAL = {"metrics": ("gm", "pm_v")}
QUICK = {"head_epochs": 1}


class Scalar(ToyNet):
    """Prediction phi theta, loss half its squared distance to the row."""

    def init(self, stream: Any) -> Tree:
        return Tree({"encoder.theta": torch.tensor([1.0]), "head.phi": torch.tensor([0.5])})

    def loss(self, w: Tree, batch: Any) -> Tensor:
        miss = w["head.phi"] * w["encoder.theta"] - batch.x[:, 0]
        return batch.mean(miss.square() / 2)  # type: ignore[no-any-return]


def scalar(method: Any, **kw: Any) -> Harnessed:
    """Two clients with targets 2 and -1 and three equal rows each, one full batch a step."""
    x = torch.tensor([[2.0]] * 3 + [[-1.0]] * 3, dtype=torch.float64)
    plain = {"local_epochs": 1, "model_weighting": "uniform"}
    return federation(method, Scalar(), x, torch.zeros(6, dtype=torch.long), [range(3), range(3, 6)], **{**plain, **kw})


def pairs(fed: Harnessed) -> list[list[float]]:
    """(theta, phi) of the personal models, by client."""
    return [[float(m.tree["encoder.theta"]), float(m.tree["head.phi"])] for m in fed.personal().values()]


ROUNDS = [
    ([[1.0953775, 0.785], [0.9738775, 0.215]], 1.0346275, [1.0197896514, -0.0093876923]),
    ([[1.1310104491, 1.0176343822], [1.0370074395, -0.024416188]], 1.0840089443, [1.1974063718, -0.2156968631]),
]


@engines
@pytest.mark.parametrize("body_epochs", ["local_epochs", 1])
def test_vectors(engine: str, body_epochs: Any) -> None:
    epochs = 1 if body_epochs == "local_epochs" else 7
    fed = scalar(FedRep(2, body_epochs), engine=engine, rounds=2, local_epochs=epochs)
    for t, (wanted, theta, _) in enumerate(ROUNDS):
        fed.play(t)
        assert pairs(fed) == [pytest.approx(pair, abs=5e-11) for pair in wanted]
        assert float(fed.shared.net["encoder.theta"]) == pytest.approx(theta, abs=5e-11)


@engines
def test_refitted_heads(engine: str) -> None:
    fed = scalar(FedRep(2, pm_refit_head=True), engine=engine, rounds=2, **PERSONAL)
    for t, (wanted, theta, refitted) in enumerate(ROUNDS):
        fed.play(t)
        assert pairs(fed) == [pytest.approx([pair[0], phi], abs=5e-11) for pair, phi in zip(wanted, refitted)]
        assert [float(fed.own(i).head["head.phi"]) for i in (0, 1)] == pytest.approx([p[1] for p in wanted], abs=5e-11)
        assert float(fed.shared.net["encoder.theta"]) == pytest.approx(theta, abs=5e-11)


@engines
def test_the_head_comes_first(engine: str) -> None:
    body_first = scalar(FedRep(0), engine=engine).run()
    assert pairs(body_first)[0] == pytest.approx([1.075, 0.5])


@engines
@pytest.mark.parametrize(
    ("kind", "decay", "wanted"),
    [
        ("fresh", 0.1, [1.0890889297, 0.90455]),
        ("shared", 0.1, [1.0458150860, 1.1277454095]),
        ("fresh", 0.0, [1.09936, 0.92]),
        ("shared", 0.0, [1.09936, 1.163]),
    ],
)
def test_optimisers(engine: str, kind: str, decay: float, wanted: list[float]) -> None:
    fed = scalar(FedRep(2, fresh_opt=kind), engine=engine, momentum=0.9, weight_decay=decay).run()
    assert pairs(fed)[0] == pytest.approx(wanted, abs=1e-10)


# ---- against a plain script


def by_hand(fed: Harnessed, shared: bool = False) -> tuple[Tree, dict[int, Tree], list[Tree]]:
    """Bodies averaged, heads kept, by a plain script with torch's own optimisers and clip.

    -> the body, all heads, the last round's models with heads that were refitted.
    """
    p, m, net = fed.protocol, fed.method, fed.task.net
    body, start = fed.task.initial.without("head"), fed.task.initial.only("head")
    heads, refitted = dict.fromkeys(range(fed.task.clients), start), []

    def phase(q: Tree, part: str, sgd: Any, i: int, stream: Any, epochs: int) -> None:
        mine = [v for k, v in q.items() if k.startswith("head.") is (part == "head")]
        for _ in range(epochs):
            order = torch.from_numpy(stream.permutation(len(fed.task.parts[i])))
            for rows in fed.task.parts[i][order].split(p.batch_size):
                grads = torch.autograd.grad(F.cross_entropy(net(q, fed.task.x[rows]), fed.task.y[rows]), mine)
                for v in q.values():
                    v.grad = torch.zeros_like(v)
                for v, g in zip(mine, grads):
                    v.grad = g
                torch.nn.utils.clip_grad_norm_(mine, p.grad_clip_norm)
                sgd.step()

    def sgd(q: Tree, part: str) -> Any:
        mine = [v for k, v in q.items() if part == "all" or k.startswith("head.") is (part == "head")]
        return torch.optim.SGD(mine, lr=p.client_lr, momentum=p.momentum, weight_decay=p.weight_decay)

    for t in range(p.rounds):
        models, ids, refitted = [], fed.taking_part(t), []
        for i in ids:
            q = Tree({k: v.clone().requires_grad_() for k, v in (body | heads[i]).items()})
            stream, one = rng.train(p.seed, t, i), sgd(q, "all")
            phase(q, "head", one if shared else sgd(q, "head"), i, stream, m.head_epochs)
            phase(q, "body", one if shared else sgd(q, "body"), i, stream, m.epochs or p.local_epochs)
            models.append(q.map(lambda v: v.detach().clone()))
            heads[i] = models[-1].only("head")
            phase(q, "head", sgd(q, "head"), i, stream, m.head_epochs)
            refitted.append(q.map(Tensor.detach))
        sizes = [len(fed.task.parts[i]) for i in ids]
        body = Tree({k: sum(w[k] * (n / sum(sizes)) for w, n in zip(models, sizes)) for k in body})
    return body, heads, refitted


@engines
@pytest.mark.parametrize("kind", ["fresh", "shared"])
def test_by_hand(engine: str, kind: str) -> None:
    method = FedRep(3, fresh_opt=kind, pm_refit_head=True)
    fed = ragged(method, engine=engine, participation=0.5, grad_clip_norm=0.5, **PERSONAL).run()
    body, heads, refitted = by_hand(fed, kind == "shared")
    assert gap(body, fed.shared.net) < 1e-12
    assert all(gap(heads[i], fed.own(i).head) < 1e-12 for i in range(7) if fed.memory.get(i))
    assert all(gap(m.tree, w) < 1e-12 for m, w in zip(fed.personal().values(), refitted))


@engines
def test_frozen_means_frozen(engine: str) -> None:
    kw = {"engine": engine, "momentum": 0.9, "weight_decay": 0.1, "rounds": 1}
    for kind, moves in (("fresh", False), ("shared", True)):
        fed = ragged(FedRep(0, fresh_opt=kind), **kw).run()  # no head phase: a head that moves was not frozen
        assert (gap(fed.own(0).head, fed.task.initial.only("head")) > 1e-6) is moves
    two, three = (ragged(FedRep(e, 1), **kw).run() for e in (2, 3))
    assert gap(two.own(0).head, three.own(0).head) > 1e-6


# ---- options, and what is equal by construction


@engines
def test_no_head_epochs_is_fedbabu(engine: str) -> None:
    kw = {"engine": engine, "participation": 0.5, "grad_clip_norm": 0.7}
    rep, babu = ragged(FedRep(0), **kw).run(), ragged(FedBABU(), **kw).run()
    assert identical(rep.shared.net, babu.shared.net)
    assert all(identical(rep.own(i).head, babu.shared.head) for i in rep.last.ids)


@engines
def test_shared_is_fresh_without_decay_and_momentum(engine: str) -> None:
    def fed(kind: str, **kw: Any) -> Harnessed:
        return ragged(FedRep(2, fresh_opt=kind), engine=engine, rounds=2, **kw).run()

    bare = {"momentum": 0.0, "weight_decay": 0.0}
    assert identical(state(fed("fresh", **bare)), state(fed("shared", **bare)))
    assert (
        gap(state(fed("fresh", grad_clip_norm=0.5, **bare)), state(fed("shared", grad_clip_norm=0.5, **bare))) < 1e-12
    )
    for kept in ({"momentum": 0.0}, {"weight_decay": 0.0}):
        assert gap(fed("fresh", **kept).shared, fed("shared", **kept).shared) > 1e-6


@engines
def test_epochs(engine: str) -> None:
    kw = {"engine": engine, "rounds": 1}
    results = [ragged(FedRep(*given), **kw).run().shared for given in ((0,), (1,), (5,), (5, 1))]
    assert all(gap(a, b) > 1e-6 for k, a in enumerate(results) for b in results[:k])
    as_the_protocol = [ragged(FedRep(2, e), **kw).run() for e in ("local_epochs", 2)]
    assert identical(*map(state, as_the_protocol))


@engines
@pytest.mark.parametrize("kind", ["fresh", "shared"])
def test_frozen_bn(engine: str, kind: str) -> None:
    def fed(mode: str, net: Tiny) -> Harnessed:
        return ragged(FedRep(2, fresh_opt=kind, frozen_bn=mode), net, engine=engine, rounds=2).run()

    assert identical(*(state(fed(mode, Tiny())) for mode in ("eval", "train")))  # no normalisation, no effect
    kept, moved = (fed(mode, Tiny(norm=True)) for mode in ("eval", "train"))
    assert gap(kept.own(0).head, moved.own(0).head) > 1e-6
    counted = [int(f.shared.net["encoder.num_batches_tracked"]) for f in (kept, moved)]
    assert counted == [2 * 2 * 4, 2 * 4 * 4]  # rounds, epochs of the body (and of the head), batches


@engines
@pytest.mark.parametrize(("kind", "mode"), [("fresh", "eval"), ("shared", "train")])
def test_pm_refit_head(engine: str, kind: str, mode: str) -> None:
    def fed(refit: bool, head_epochs: int = 2, **kw: Any) -> Harnessed:
        method = FedRep(head_epochs, fresh_opt=kind, frozen_bn=mode, pm_refit_head=refit)
        return ragged(method, Tiny(norm=True), engine=engine, eval_every=2, rounds=2, **kw).run()

    plain, refitted = fed(False, **PERSONAL), fed(True, **PERSONAL)
    assert identical(state(plain), state(refitted)) and plain.terms == refitted.terms  # it changes PM alone
    for i, model in refitted.personal().items():
        before = plain.personal()[i].tree
        assert identical(model.tree.only("encoder.weight|projection"), before.only("encoder.weight|projection"))
        assert gap(model.tree.only("head"), before.only("head")) > 1e-6
        moved = int(model.tree["encoder.num_batches_tracked"]) - int(before["encoder.num_batches_tracked"])
        assert (moved > 0) is (mode == "train")
    assert [bool(r.shown[0]) for r in refitted.rounds] == [False, True]
    assert not any(r.shown[0] for r in fed(True).rounds)  # nobody asks
    assert not any(r.shown[0] for r in fed(True, 0, **PERSONAL).rounds)  # no epochs


@engines
def test_both_phases_are_recorded(engine: str) -> None:
    terms = ragged(FedRep(2), engine=engine, rounds=1).run().terms[0]
    assert set(terms) == {"loss", "ce", "head_ce"}
    assert terms["loss"] == terms["ce"] < terms["head_ce"]


@engines
def test_who_has_what(engine: str) -> None:
    fed = ragged(FedRep(2), engine=engine, draws=[[0, 1], [0, 3], [0, 3]]).run()
    assert set(fed.own(1).head) == {"head.weight", "head.bias"} and not fed.shared.net.only("head")
    assert fed.memory.get(2) is None and fed.global_model() is None
    models = fed.refreshed()
    assert list(models) == list(range(7)) and list(fed.personal()) == [0, 3]
    on = ragged(FedRep(2), engine=engine, rounds=4, draws=[[0, 1], [0, 3], [0, 3], [1, 2]])
    on.run()  # refresh is one more round: from the old head, or phi^0
    assert all(gap(models[i].tree, m.tree) < 1e-12 for i, m in on.personal().items())


def test_refusals_and_options() -> None:
    never = Protocol(optimizer_reset="never")
    FedRep().check(never, ToyBN())
    with pytest.raises(UserError, match="optimizer_reset=per_round"):
        FedRep(pm_refit_head=True).check(never, ToyBN())
    given = (("head_epochs", "5"), ("body_epochs", "1"), ("fresh_opt", "shared"), ("pm_refit_head", "true"),
             ("frozen_bn", "train"))  # fmt: skip
    assert Spec("fedrep", given).build(Protocol()) == FedRep(5, 1, "shared", True, "train")
    assert set(fields(FedRep)) == {k for k, _ in given}
    with pytest.raises(UserError, match="body_epochs"):
        Spec("fedrep", (("body_epochs", "0"),)).build(Protocol())
    assert set(FedRep.open_fields) <= set(fields(Protocol))


# ---- optimisers that go on from one Train to the next


@dataclass(frozen=True)
class Halves(FedAvg):
    """The epochs of a round in two requests, the second with the momenta of the first, or not."""

    optimizer: str = "same"

    def local(self, client: Any, shared: Tree, own: Tree) -> Any:
        w = yield Train(shared.net, self.loss, epochs=1)
        w = yield Train(w, self.loss, epochs=1, optimizer=self.optimizer)
        return Tree(net=w), Tree()


@engines
def test_an_optimiser_goes_on(engine: str) -> None:
    def fed(method: Any, **kw: Any) -> Harnessed:
        return ragged(method, engine=engine, grad_clip_norm=0.7, crew=1, **kw).run()

    whole = fed(FedAvg())
    assert gap(fed(Halves()).shared, whole.shared) < 1e-12
    assert gap(fed(Halves("new")).shared, whole.shared) > 1e-6
    never = {"optimizer_reset": "never"}  # there, it always goes on
    always = state(fed(FedAvg(), **never))
    assert all(gap(state(fed(Halves(o), **never)), always) < 1e-12 for o in ("same", "new"))


# ---- costs, engines


@engines
@pytest.mark.parametrize(
    "options",
    [{}, {"head_epochs": 2, "body_epochs": 1, "pm_refit_head": True}, {"fresh_opt": "shared", "pm_refit_head": True}],
    ids=str,
)  # fmt: skip
def test_bill(engine: str, options: dict[str, Any]) -> None:
    fed = toy(FedRep(**{**QUICK, **options}), engine=engine, rounds=1, **PERSONAL).run()
    w, bill, ids = fed.task.initial, fed.method.bill(), fed.last.ids
    head, body = nbytes(w.only("head")) // 4, nbytes(w.without("head")) // 4
    parts = {"P": head + body, "H": head, "B": body, "E": fed.protocol.local_epochs}
    assert 0 < len(ids) < 7
    assert fed.last.bytes == {"down": 4 * len(ids) * eval(bill.down, parts), "up": 4 * len(ids) * eval(bill.up, parts),
                              "once": 0}  # fmt: skip
    each = [{**parts, "n": fed.task.sizes[i]} for i in ids]
    assert fed.last.samples == {k: sum(eval(getattr(bill, k), e) for e in each) for k in ("trained", "forward")}
    assert fed.last.state_bytes == 4 * eval(bill.state, parts)


def test_three_times_the_samples_of_fedavg() -> None:
    rep, average = (toy(m, local_epochs=5, rounds=1).run().last.samples for m in (FedRep(), FedAvg()))
    assert sum(rep.values()) == 3 * sum(average.values())


def test_engines_agree() -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"fresh_opt": "shared", "pm_refit_head": True}, {"drop_last": True, "grad_clip_norm": 0.5}),
        ({"frozen_bn": "train", "body_epochs": 1, "pm_refit_head": True}, {"bn_buffers": "local"}),
        ({"fresh_opt": "shared"}, {"optimizer_reset": "never", "server_lr": 0.5, "augment": False}),
        ({"head_epochs": 0}, {"participation": 1.0, "crew": 1}),
    ]
    for options, kw in cases:
        a, b = (toy(FedRep(**{**QUICK, **options}), engine=e, rounds=2, **PERSONAL, **kw).run() for e in ENGINES)
        assert distance(everything(a), everything(b)) < 1e-10
        for one, two in ((a.personal(), b.personal()), (a.refreshed(), b.refreshed())):
            assert list(one) == list(two)
            assert all(distance(one[i].tree, two[i].tree) < 1e-10 for i in one)
        assert a.bytes == b.bytes and [r.samples for r in a.rounds] == [r.samples for r in b.rounds]
        assert a.terms[-1] == pytest.approx(b.terms[-1])
