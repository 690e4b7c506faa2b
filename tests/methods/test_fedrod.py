"""FedROD: the test vectors, every option, what is equal by construction, traps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import ENGINES, Harnessed, Identity, ToyNet, batch, federation, view
from protofl.methods.fedavg import FedAvg
from protofl.methods.fedrod import FedROD
from ragged import Shift, Tiny, gap, identical, ragged, state
from torch import Tensor
from toy import SIZES, ToyBN, everything, outputs, toy
from toy import gap as toy_gap

from protofl import registry, rng
from protofl.errors import UserError
from protofl.nets import build
from protofl.options import fields
from protofl.protocol import Protocol
from protofl.tree import Tree, nbytes

engines = pytest.mark.parametrize("engine", ENGINES)


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# ---- the vectors: one sample of class 1 at a client that is told to have (6, 2, 0)


class Told(ToyNet):
    """The inputs are the features, plus a shift that may be learnt."""

    name, classes = "told", 3

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = self.encoded = dim

    def encode(self, w: Tree, x: Tensor) -> Tensor:
        return x + w["encoder.shift"]


G, P = (1.0, 0.5, -0.2), (-0.3, 0.4, 0.0)


def told(
    options: dict[str, Any], x: tuple[float, ...] = G, *, y: int = 1, engine: str = "loop", head: Any = None,
    mine: Tree | None = None, **fields: Any,
) -> Harnessed:  # fmt: skip
    """One step of rate 1 (the features are the logits, without `head`); mine: the personal part before it."""
    weight = torch.eye(len(x)) if head is None else torch.tensor(head)
    initial = Tree({"encoder.shift": torch.zeros(len(x)), "head.weight": weight}).map(Tensor.double)
    fed = federation(FedROD(**options), Told(len(x)), vector(*x)[None], torch.tensor([y]), [[0]],
                     engine=engine, initial=initial, **{"local_epochs": 1, "client_lr": 1.0, **fields})  # fmt: skip
    fed.task.counts[0] = torch.tensor([6, 2, 0])
    if mine is not None and "phead.weight" in mine:
        fed.memory.put(0, Tree(own=Tree(phead=mine)))
    elif mine is not None:
        fed.shared = fed.shared | Tree(psi=fed.shared.psi | mine)
    fed.play(0)
    return fed


def gradient(fed: Harnessed) -> list[float]:
    """With respect to z."""
    return (-fed.shared.net["encoder.shift"]).tolist()  # type: ignore[no-any-return]


LOSSES = [
    ({}, 1.7827462742), ({"prior": "zero"}, 1.7827462742), ({"prior": "add_one"}, 1.6119437169),
    ({"gamma": 0.5}, 1.3495446261), ({"gamma": 2.0}, 2.7624431442),
]  # fmt: skip


@engines
@pytest.mark.parametrize(("options", "wanted"), LOSSES, ids=str)
def test_balanced_loss(engine: str, options: dict[str, Any], wanted: float) -> None:
    fed = told(options, engine=engine)
    assert fed.last.terms["generic"] == pytest.approx(wanted, abs=1e-10)
    if not options:
        assert gradient(fed) == pytest.approx([0.831824344, -0.831824344, 0], abs=1e-9)
        assert gradient(told({"prior": "zero"}, engine=engine)) == pytest.approx(gradient(fed), abs=1e-12)
    plain = float(F.cross_entropy(vector(*G)[None], torch.tensor([1])))
    assert plain == pytest.approx(1.1459113654, abs=1e-10)


def balanced(prior: str, y: int, **options: Any) -> float:
    """The loss of a class that the client may lack."""
    fed = FedROD(prior=prior, **options)
    w = Tree({"encoder.shift": vector(0, 0, 0), "head.weight": torch.eye(3).double()})
    net: Any = Told(3).bound("train")
    return float(fed.loss(net, w, batch([G], [y]), view(counts=vector(6, 2, 0)))[0])


@engines
def test_a_class_without_samples(engine: str) -> None:
    assert told({}, y=2, engine=engine).last.terms["generic"] == pytest.approx(30.8069145707, abs=1e-9)
    assert told({"prior": "add_one"}, y=2, engine=engine).last.terms["generic"] == pytest.approx(3.4105560055)
    assert told({"prior": "zero"}, y=2, engine=engine).last.terms["generic"] == math.inf
    assert balanced("zero", 2) == math.inf and balanced("eps", 2) == pytest.approx(30.8069145707)
    assert abs(balanced("zero", 1) - balanced("eps", 1)) < 1e-12


@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0])
def test_raw_counts_say_the_same_as_frequencies(gamma: float) -> None:
    n = vector(6, 2, 1e-12)
    raw = F.cross_entropy((vector(*G) + gamma * n.log())[None], torch.tensor([1]))
    assert float(raw) == pytest.approx(balanced("eps", 1, gamma=gamma), abs=1e-12)


PERSONAL = {
    "linear": Tree({"phead.weight": torch.zeros(3, 3).double(), "phead.bias": vector(*P)}),
    "hyper": Tree({
        "psi.2.weight": torch.zeros(9, 3).double(),
        "psi.2.bias": torch.cat([vector(*P), torch.zeros(6).double()]),  # the first of d rows meets z_0 = 1
    }),
}  # fmt: skip


@engines
@pytest.mark.parametrize("phead", ["linear", "hyper"])
def test_personal_loss(engine: str, phead: str) -> None:
    """Under weight decay and a clip that the personal part must not feel; together: on the g from before step (a)."""
    options = {"phead": phead, "schedule": "together"}
    kw = {"engine": engine, "mine": PERSONAL[phead], "weight_decay": 0.1, "momentum": 0.9, "grad_clip_norm": 1e-3}
    fed = told(options, **kw)
    assert fed.last.terms["personal"] == pytest.approx(0.7662126051, abs=1e-10)
    new = fed.own(0).phead["phead.bias"] if phead == "linear" else fed.last.uploads[0].psi["psi.2.bias"][:3]
    assert (vector(*P) - new).tolist() == pytest.approx([0.3805214976, -0.5352299933, 0.1547084958], abs=1e-10)


@engines
@pytest.mark.parametrize("phead", ["linear", "hyper"])
def test_prediction(engine: str, phead: str) -> None:
    # the shift of the tiny step is below 1e-12
    fed = told({"phead": phead}, engine=engine, mine=PERSONAL[phead], client_lr=1e-12)
    x = vector(*G)[None]
    assert int(fed.scores(fed.global_model(), x)["network"].argmax()) == 0
    out = fed.scores(fed.personal()[0], x)["network"][0]
    assert out.tolist() == pytest.approx([a + b for a, b in zip(G, P)], abs=1e-9) and int(out.argmax()) == 1
    alone = told({"phead": phead, "pm_logits": "p_only"}, engine=engine, mine=PERSONAL[phead], client_lr=1e-12)
    assert alone.scores(alone.personal()[0], x)["network"][0].tolist() == pytest.approx(P, abs=1e-9)


@engines
@pytest.mark.parametrize(
    ("options", "personal", "wanted"),
    [
        ({"detach": "no"}, 1.1911227833, (1.7439885090, -1.8760045222)),
        ({"detach": "no", "pm_logits": "p_only"}, 1.1193380844, (1.0414388198, -1.1685764261)),
        ({"detach": "yes"}, 1.1911227833, (0.8318243440, -0.8318243440)),
    ],
)
def test_both_losses_on_the_body(engine: str, options: dict[str, Any], personal: float, wanted: Any) -> None:
    mine = Tree({"phead.weight": torch.tensor([[0.5, 0], [0, 0.5], [0, 0]]).double()})
    head = [[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]
    fed = told({"phead": "linear", "schedule": "together", **options}, (1.0, 0.5), engine=engine, head=head, mine=mine)
    assert fed.last.terms["generic"] == pytest.approx(1.7827462742, abs=1e-10)
    assert fed.last.terms["personal"] == pytest.approx(personal, abs=1e-10)
    assert gradient(fed) == pytest.approx(wanted, abs=1e-9)


# ---- the hypernetwork


@pytest.mark.parametrize(
    ("classes", "dim", "width", "size"),
    [(10, 192, "d", 372_672), (100, 192, "d", 3_724_992), (10, 192, 32, 63_712), (100, 192, 32, 636_832),
     (200, 512, 32, 3_385_632)],
)  # fmt: skip
def test_size_of_the_hypernetwork(classes: int, dim: int, width: Any, size: int) -> None:
    method = FedROD(hyper_width=width)
    fed = federation(method, Identity(classes, dim), torch.zeros(1, dim), torch.tensor([0]), [[0]],
                     initial=Tree({"head.weight": torch.zeros(classes, dim)}))  # fmt: skip
    assert sum(v.numel() for v in fed.shared.psi.values()) == size
    extra = method.bill().down.removeprefix("P + ")
    assert eval(extra, {"K": classes, "q": dim}) == size
    tiny = {"K": 200, "q": 512, "P": 11_271_232}
    assert eval(FedROD().bill().down, tiny) == 11_271_232 + 52_634_112 == 255_621_376 // 4


def test_draw_of_the_hypernetwork() -> None:
    psi = told({}).shared.psi
    start = FedROD().hypernetwork(told({}).task)
    assert list(start) == ["psi.0.weight", "psi.0.bias", "psi.2.weight", "psi.2.bias"] == list(psi)
    assert start["psi.0.weight"].flatten()[:3].tolist() == pytest.approx([0.079372, -0.108338, -0.558237], abs=5e-7)
    stream = rng.private("fedrod", "init", 0, -1, -1)
    for name, shape in (("0.weight", (3, 3)), ("0.bias", (3,)), ("2.weight", (9, 3)), ("2.bias", (9,))):
        drawn = torch.from_numpy(stream.uniform(-1 / math.sqrt(3), 1 / math.sqrt(3), shape).astype("float32"))
        assert identical(start[f"psi.{name}"], drawn.double())


# ---- against a plain script


def steps(fed: Harnessed, stream: Any, i: int, epochs: int) -> Any:
    """The batches of client i: positions."""
    part = torch.as_tensor(fed.task.parts[i])
    for _ in range(epochs):
        yield from part[torch.from_numpy(stream.permutation(len(part)))].split(fed.protocol.batch_size)


def by_hand(fed: Harnessed, t: int, i: int, net: Tree, mine: Tree) -> tuple[Tree, Tree, Tree]:
    """What client i makes of both parts -> net, personal part, personal part before the last step."""
    p, o, module = fed.protocol, fed.method, fed.task.net
    stream = rng.train(p.seed, t, i)
    n = torch.bincount(fed.task.y[torch.as_tensor(fed.task.parts[i])], minlength=5).double()
    smooth = {"eps": n.clamp_min(1e-12), "zero": n, "add_one": n + 1}[o.prior]
    log_prior = (smooth / smooth.sum()).log() * o.gamma
    b: dict[str, Tensor] = {}
    before = mine

    def personal(q: Tree, z: Tensor, g: Tensor) -> Tensor:
        if o.phead == "linear":
            out = F.linear(z, q["phead.weight"], q["phead.bias"])
        else:
            hidden = F.relu(F.linear(n / n.sum(), q["psi.0.weight"], q["psi.0.bias"]))
            out = z @ F.linear(hidden, q["psi.2.weight"], q["psi.2.bias"]).view(module.dim, 5)
        return out if o.pm_logits == "p_only" else g + out

    def grads(loss: Tensor, q: Tree) -> Tree:
        return Tree(zip(q, torch.autograd.grad(loss, list(q.values()), allow_unused=True, retain_graph=True)))

    def sgd(q: Tree, g: Tree) -> Tree:
        factor = min(1.0, p.grad_clip_norm / (float(sum(d.square().sum() for d in g.values())) ** 0.5 + 1e-6))
        for k in q:
            b[k] = p.momentum * b.get(k, 0) + factor * g[k] + p.weight_decay * q[k].detach()
        return Tree({k: v.detach() - p.client_lr * b[k] for k, v in q.items()})

    def leaf(q: Tree) -> Tree:
        return q.map(lambda v: v.detach().requires_grad_())

    def read(q: Tree, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = module.embed(q, fed.task.x[rows])
        return z, module.classify(q, z, z), fed.task.y[rows]

    def plain(q: Tree, g: Tree) -> Tree:
        return Tree({k: v.detach() - p.client_lr * (0 if g[k] is None else g[k]) for k, v in q.items()})

    for rows in steps(fed, stream, i, p.local_epochs):
        net, old = leaf(net), leaf(mine)
        z, g, y = read(net, rows)
        loss = F.cross_entropy(g + log_prior, y)
        if o.schedule == "together":
            held = (z, g) if o.detach == "no" else (z.detach(), g.detach())
            other = F.cross_entropy(personal(old, *held), y)
            before, mine = mine, plain(old, grads(other, old))
            loss = loss + other if o.detach == "no" else loss
        net = sgd(net, grads(loss, net))
    if o.schedule == "separate":
        for rows in steps(fed, stream, i, p.local_epochs):
            old = leaf(mine)
            z, g, y = read(net, rows)
            before, mine = mine, plain(old, grads(F.cross_entropy(personal(old, z, g), y), old))
    return net.map(Tensor.detach), mine, before


DRAWS = [[0, 1, 2], [0, 3], [1, 3, 4]]
DETAILS: list[dict[str, Any]] = [
    {},
    {"phead": "linear"},
    {"phead": "linear", "schedule": "together", "pm_logits": "p_only", "prior": "add_one"},
    {"schedule": "together", "hyper_width": 32, "gamma": 0.5, "stale_phead": True},
    {"schedule": "together", "detach": "no", "prior": "zero"},
    {"schedule": "together", "detach": "no", "phead": "linear", "pm_logits": "p_only", "gamma": 2.0},
    {"stale_phead": True, "pm_logits": "p_only"},
]


@engines
@pytest.mark.parametrize("options", DETAILS, ids=str)
def test_by_hand(engine: str, options: dict[str, Any]) -> None:
    """Momentum, decay and clip for the body alone; both phases on one stream; private heads through idle rounds."""
    fed = ragged(FedROD(**options), engine=engine, draws=DRAWS, grad_clip_norm=0.6)
    method, first = fed.method, fed.task.initial
    copied = Tree({"phead.weight": first["head.weight"], "phead.bias": first["head.bias"]})
    heads = dict.fromkeys(range(7), copied)
    for t in range(3):
        received = fed.shared
        played = fed.play(t)
        made = {}
        for i, upload in zip(played.ids, played.uploads):
            net, mine, before = by_hand(fed, t, i, received.net, heads[i] if not method.hyper else received.psi)
            made[i] = net, mine
            assert gap(net, upload.net) < 1e-12
            shown = before if method.hyper and method.stale_phead else mine
            if method.hyper:
                assert gap(mine, upload.psi) < 1e-12 and not fed.own(i)
                shown = method.head(shown, fed.task.counts[i].double())
            else:
                heads[i] = mine
                assert list(upload) == ["net"]
            assert gap(shown, fed.personal()[i].tree.phead) < 1e-12
        sizes = [len(fed.task.parts[i]) for i in made]
        for k, name in enumerate(["net", "psi"] if method.hyper else ["net"]):
            mean = Tree({key: sum(made[i][k][key] * (n / sum(sizes)) for i, n in zip(made, sizes))
                         for key in fed.shared[name]})  # fmt: skip
            assert gap(mean, fed.shared[name]) < 1e-12
    for i, head in heads.items():
        if not method.hyper and i in (0, 1, 2, 3, 4):
            assert gap(head, fed.own(i).phead) < 1e-12


# ---- options


def played(engine: str = "loop", net: Any = None, **options: Any) -> Harnessed:
    """Two rounds; options of the method and fields of the protocol."""
    mine = {k: v for k, v in options.items() if k in fields(FedROD)}
    rest = {k: v for k, v in options.items() if k not in mine}
    return ragged(FedROD(**mine), net, engine=engine, rounds=2, draws=[[0, 1, 5], [1, 2]], **rest).run()


def personal(fed: Harnessed) -> list[Any]:
    return [m.tree for m in fed.personal().values()]


NO_MATTER = [
    {"phead": "linear"}, {"hyper_width": 32}, {"schedule": "together"}, {"pm_logits": "p_only"}, {"stale_phead": True},
    {"phead": "linear", "schedule": "together", "pm_logits": "p_only"},
]  # fmt: skip


@engines
def test_the_generic_part_does_not_depend_on_the_personal(engine: str) -> None:
    kw = {"engine": engine, "grad_clip_norm": 0.5}
    base = played(**kw)
    for options in NO_MATTER:
        fed = played(**kw, **options)
        assert identical(fed.shared.net, base.shared.net), options
        assert identical(fed.global_model().tree, base.global_model().tree)
        assert identical([u.net for u in fed.last.uploads], [u.net for u in base.last.uploads])
        assert gap(fed.shared.psi, base.shared.psi) > 1e-6 if options in NO_MATTER[2:4] else True


@engines
def test_equal_by_construction(engine: str) -> None:
    linear = played(engine, phead="linear")
    for options in ({"hyper_width": 32}, {"stale_phead": True}, {"frozen_bn": "train"}):
        fed = played(engine, phead="linear", **options)
        assert identical(state(fed), state(linear)) and identical(personal(fed), personal(linear)), options
    base = played(engine)
    assert identical(state(base), state(played(engine, frozen_bn="train")))  # no BatchNorm
    zero = played(engine, prior="zero")
    assert 0 < gap(state(zero), state(base)) < 1e-11 and math.isfinite(zero.last.terms["loss"])
    stale = played(engine, stale_phead=True)
    assert identical(state(stale), state(base)) and gap(personal(stale), personal(base)) > 1e-6
    kw = {"schedule": "together", "net": Tiny(norm=True)}
    assert identical(state(played(engine, **kw)), state(played(engine, frozen_bn="train", **kw)))


@engines
def test_every_option_moves_what_it_should(engine: str) -> None:
    base = played(engine)
    for options in ({"prior": "add_one"}, {"gamma": 0.5}, {"gamma": 2.0}, {"detach": "no", "schedule": "together"}):
        assert gap(played(engine, **options).shared.net, base.shared.net) > 1e-6, options
    for options in ({"schedule": "together"}, {"pm_logits": "p_only"}):
        assert gap(played(engine, **options).shared.psi, base.shared.psi) > 1e-6, options
    narrow = played(engine, hyper_width=32).shared.psi
    assert narrow["psi.0.weight"].shape == (32, 5) and base.shared.psi["psi.0.weight"].shape == (3, 5)
    assert base.shared.psi["psi.2.bias"].shape == (15,)


@engines
def test_frozen_bn(engine: str) -> None:
    def fed(**options: Any) -> Harnessed:
        return toy(FedROD(**options), engine=engine, draws=[[0, 1, 3]], rounds=1).run()

    frozen, moving = fed(), fed(frozen_bn="train")
    for i, a, b in zip((0, 1, 3), frozen.last.uploads, moving.last.uploads):
        parameters = ToyBN().trainable(a.net)
        assert identical(parameters, b.net.like(parameters)) and gap(a.psi, b.psi) > 1e-9
        counts = [int(u.net["encoder.norm1.num_batches_tracked"]) for u in (a, b)]
        assert counts == [2 * -(-SIZES[i] // 8) * k for k in (1, 2)]
        assert gap(a.net["encoder.norm1.running_var"], b.net["encoder.norm1.running_var"]) > 1e-6
    plain = toy(FedAvg(), engine=engine, draws=[[0, 1, 3]], rounds=1).run()
    assert [int(u.net["encoder.norm1.num_batches_tracked"]) for u in plain.last.uploads] == [6, 2, 4]


# ---- traps


@engines
def test_the_prior_stays_out_of_prediction(engine: str) -> None:
    fed = played(engine)
    x = fed.task.x[:9]
    assert identical(fed.scores(fed.global_model(), x)["network"], fed.task.net(fed.shared.net, x))
    model = fed.personal()[1]  # a client of one class
    g = fed.task.net(fed.last.uploads[0].net, x)
    z = fed.task.net.embed(fed.last.uploads[0].net, x)
    wanted = g + z @ fed.method.head(fed.last.uploads[0].psi, fed.task.counts[1].double())["phead.weight"].mT
    assert gap(wanted, fed.scores(model, x)["network"]) < 1e-12


@engines
@pytest.mark.parametrize("prior", ["eps", "zero"])
def test_classes_are_counted_over_all_data(engine: str, prior: str) -> None:
    """5 samples in batches of 4 without the last short one: the one of class 1 is dropped in some epochs only."""
    x = torch.randn(9, 6, generator=torch.Generator().manual_seed(0)).double()
    y = torch.tensor([0, 0, 0, 0, 1, 2, 2, 2, 2])
    fed = federation(FedROD(prior=prior), Tiny(), x, y, [range(5), range(5, 9)], engine=engine, batch_size=4,
                     drop_last=True, local_epochs=6).run()  # fmt: skip
    assert all(math.isfinite(v) for v in fed.last.terms.values()) and fed.last.terms["generic"] < 20
    assert all(bool(v.isfinite().all()) for v in state(fed) if v.is_floating_point())


@pytest.mark.parametrize("prior", ["eps", "zero", "add_one"])
def test_padding_of_an_absent_class(prior: str) -> None:
    """Client 1 lacks class 0, which padding rows carry."""
    runs = []
    for engine in ENGINES:
        x = torch.randn(11, 6, generator=torch.Generator().manual_seed(1)).double()
        y = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 4])
        fed = federation(FedROD(prior=prior), Tiny(), x, y, [range(8), [2, 3, 4]], engine=engine, batch_size=5).run()
        assert all(math.isfinite(v) for v in fed.last.terms.values())
        runs.append(state(fed))
    assert gap(*runs) < 1e-12


@engines
def test_local_buffers(engine: str) -> None:
    fed = toy(FedROD(), engine=engine, bn_buffers="local", draws=[[0, 1], [0, 2]], rounds=2).run()
    assert fed.global_model() is None
    counter = "encoder.norm1.num_batches_tracked"
    assert [int(m.tree.net[counter]) for m in fed.personal().values()] == [2 * 6, 4]
    assert int(fed.shared.net[counter]) == 0


@engines
@pytest.mark.parametrize("phead", ["hyper", "linear"])
def test_refresh(engine: str, phead: str) -> None:
    fed = played(engine, phead=phead)
    before = [v.clone() for v in state(fed)]
    models = fed.refreshed()
    assert identical(state(fed), before) and sorted(models) == list(range(7))
    first = fed.task.initial
    copied = Tree({"phead.weight": first["head.weight"], "phead.bias": first["head.bias"]})
    for i in (1, 6):  # one that was drawn, one that never was
        mine = fed.shared.psi if phead == "hyper" else fed.own(i).get("phead", copied)
        fed.protocol.__dict__["grad_clip_norm"] = 1e9  # as good as none
        net, mine, _ = by_hand(fed, fed.protocol.rounds, i, fed.shared.net, mine)
        fed.protocol.__dict__["grad_clip_norm"] = 0.0
        assert gap(net, models[i].tree.net) < 1e-12
        assert gap(fed.method.head(mine, fed.task.counts[i].double()), models[i].tree.phead) < 1e-12


@engines
def test_a_head_without_bias_has_a_twin_without(engine: str) -> None:
    net = build("cnn_fednh", classes=5, shape=(16, 16, 3), projection_dim=4)
    x = torch.zeros(4, 3, 16, 16).double()
    fed = federation(FedROD(phead="linear"), net, x, torch.arange(4), [[0, 1, 2], [3]], engine=engine, local_epochs=1)
    fed.run()
    assert list(fed.own(0).phead) == ["phead.weight"]
    assert nbytes(fed.own(0)) == 4 * 5 * 192


@engines
def test_auxiliary_classifier_is_trained_by_the_plain_loss(engine: str) -> None:
    net = build("mlp", classes=5, shape=(1, 6, 1), projection_dim=3, aux_classifier=True)
    x = torch.randn(8, 1, 1, 6, generator=torch.Generator().manual_seed(2)).double()
    y = torch.tensor([0, 0, 1, 2, 3, 3, 4, 4])
    kw = {"engine": engine, "local_epochs": 1}
    runs = [federation(m, net, x, y, [range(8)], **kw).run() for m in (FedROD(), FedAvg())]
    a, b = (r.shared.net for r in runs)
    assert identical(a.only("aux"), b.only("aux")) and gap(a["head.weight"], b["head.weight"]) > 1e-6
    assert gap(a["aux.weight"], runs[0].task.initial["aux.weight"]) > 1e-6


# ---- refusals, presets


def made(*given: tuple[str, Any], preset: str = "moon.common") -> FedROD:
    return registry.Spec("fedrod", given, preset).build(Protocol())  # type: ignore[return-value]


def test_detach_implies_together() -> None:
    assert made(("detach", "no")) == made(("detach", "no"), ("schedule", "together"))
    assert made(("detach", "no")).schedule == "together" and made().schedule == "separate"
    with pytest.raises(UserError, match="schedule=together"):
        made(("detach", "no"), ("schedule", "separate"))


def test_values() -> None:
    assert made() == FedROD(phead="hyper", hyper_width="d", prior="eps", gamma=1.0, frozen_bn="eval")
    assert made(("hyper_width", "32")).hyper_width == 32
    assert made(preset="fednh.tinyimagenet").phead == "linear"
    assert made(preset="fednh.cifar100").phead == "hyper"
    for bad in (("gamma", "0"), ("prior", "none"), ("hyper_width", "16"), ("phead", "mlp")):
        with pytest.raises(UserError):
            made(bad)
    assert set(FedROD.open_fields) <= set(fields(Protocol)) - set(fields(FedROD))


# ---- cost, engines


@pytest.mark.parametrize(
    ("classes", "options", "wanted"),
    [(10, {}, 4_682_496), (100, {}, 18_160_896), (10, {"hyper_width": 32}, 3_446_656),
     (100, {"hyper_width": 32}, 5_808_256), (10, {"phead": "linear"}, 3_191_808)],
    ids=str,
)  # fmt: skip
def test_bytes(classes: int, options: dict[str, Any], wanted: int) -> None:
    net = build("cnn_fednh", classes=classes, shape=(32, 32, 3), projection_dim=256)
    fed = federation(FedROD(**options), net, torch.zeros(3, 3, 32, 32), torch.arange(3), [[0, 1], [2]],
                     local_epochs=1, precision="fp32", draws=[[0]]).run()  # fmt: skip
    assert fed.last.bytes == {"down": wanted, "up": wanted, "once": 0}
    assert all(v.dtype == torch.float32 for v in state(fed))


@engines
@pytest.mark.parametrize(
    "options",
    [{}, {"phead": "linear"}, {"schedule": "together"}, {"hyper_width": 32, "stale_phead": True, "frozen_bn": "train"}],
    ids=str,
)
def test_bill(engine: str, options: dict[str, Any]) -> None:
    fed = toy(FedROD(**options), engine=engine, participation=1.0, rounds=1).run()
    bill, initial = fed.method.bill(), fed.task.initial
    symbols = {"P": nbytes(initial) // 4, "H": nbytes(initial.only("head")) // 4, "K": 5, "q": 7, "E": 2,
               "n": sum(SIZES)}  # fmt: skip
    assert fed.last.bytes == {k: 7 * 4 * eval(e, symbols) for k, e in (("down", bill.down), ("up", bill.up))} | {
        "once": 0
    }
    assert fed.last.samples == {"trained": eval(bill.trained, symbols), "forward": eval(bill.forward, symbols)}
    assert fed.last.state_bytes == 4 * eval(bill.state, symbols)


def test_engines_agree() -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {"drop_last": True}),
        ({"phead": "linear", "frozen_bn": "train"}, {"optimizer_reset": "never", "bn_buffers": "local"}),
        ({"schedule": "together", "stale_phead": True, "prior": "zero"}, {"crew": 1, "server_lr": 0.5}),
        ({"schedule": "together", "detach": "no", "pm_logits": "p_only"}, {"augment": False}),
        ({"stale_phead": True, "hyper_width": 32}, {"optimizer_reset": "never"}),
    ]
    for options, kw in cases:
        a, b = (toy(FedROD(**options), engine=e, rounds=2, local_epochs=1, **kw).run() for e in ENGINES)
        assert toy_gap(everything(a), everything(b)) < 1e-12
        assert toy_gap(outputs(a), outputs(b)) < 1e-12
        assert a.bytes == b.bytes and a.terms[-1] == pytest.approx(b.terms[-1])
    a, b = (ragged(FedROD(), engine=e, augment=Shift(), participation=0.5).run() for e in ENGINES)
    assert gap(state(a), state(b)) < 1e-12
    assert set(a.terms[-1]) == {"loss", "generic", "personal"}
