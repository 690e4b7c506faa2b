"""CReFF: the test vectors, every option, what is equal by construction, traps, bytes."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import toy
from harness import ENGINES, Harnessed, Identity, federation
from protofl.methods.creff import DISTANCES, CReFF, gradient
from protofl.methods.fedavg import FedAvg
from ragged import CLASSES, SIZES, Shift, Tiny, data, gap, identical, ragged, state
from torch import Tensor

from protofl import rng
from protofl.errors import UserError
from protofl.evaluate import TestSet, global_row, score
from protofl.handles import RunClient
from protofl.nets import build
from protofl.options import fields, option
from protofl.protocol import Protocol
from protofl.registry import Spec
from protofl.tree import Rows, Tree, nbytes

engines = pytest.mark.parametrize("engine", ENGINES)
SMALL: dict[str, Any] = {"features_per_class": 3, "match_epochs": 4, "retrain_epochs": 3, "retrain_batch": 4}


def close(got: Any, wanted: Any, digits: int = 10) -> None:
    """Equal to so many decimals, as the vectors are given."""
    got = torch.as_tensor(got, dtype=torch.float64)
    assert torch.allclose(got, torch.as_tensor(wanted, dtype=torch.float64), rtol=0, atol=0.51 * 10**-digits), got


def small(**options: Any) -> CReFF:
    """Few features, steps and epochs; few samples in a draw."""
    return CReFF(**{**SMALL, "batch_real": 3, **options})


# ---- the vectors: features are the inputs ------------------------------------------------------------------


class Bare(Identity):
    """Features are the inputs; an output layer with or without bias."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__(2, 2)
        self.bias = bias

    def init(self, stream: Any) -> Tree:
        w: Tree = super().init(stream)
        return w if self.bias else w.only("head.weight")


REAL, SECOND = [[1.0, 2], [0, 1]], [[2.0, 1]]
MADE = [[1.0, 0], [0.5, -1]]
EYE = torch.eye(2, dtype=torch.float64)


def played(engine: str, x: Any = REAL, parts: Any = ((0, 1),), bias: bool = False, **options: Any) -> Harnessed:
    """One round from an identity layer and the federated features MADE of class 0, which is all that clients have."""
    rows = torch.tensor(x).double()
    method = CReFF(**{"match_epochs": 1, "lr_feature": 0.1, "retrain_epochs": 1, "features_per_class": 2, **options})
    fed = federation(
        method, Bare(bias), rows, torch.zeros(len(rows), dtype=torch.long), list(parts), engine=engine, local_epochs=1
    )
    layer = Tree(weight=EYE.clone()) | ({"bias": torch.zeros(2).double()} if bias else {})
    features = torch.stack([torch.tensor(MADE).double(), torch.full((2, 2), 7.0).double()])
    fed.shared, fed.private = fed.shared | {"retrained": layer}, Tree(features=features)
    return fed.run()


def distance(fed: Harnessed) -> Tensor:
    """D of MADE to what was uploaded."""
    layer = Tree(weight=EYE) | ({"bias": torch.zeros(2).double()} if "bias" in fed.shared.retrained else {})
    targets = fed.method.targets(fed.last.uploads).map(lambda t: t.values[:1])
    made = gradient(layer, torch.tensor([MADE]).double(), torch.tensor([0]))
    return DISTANCES[fed.method.distance](made, targets)


@engines
def test_gradients_of_a_client(engine: str) -> None:
    grad = played(engine).last.uploads[0].grad
    close(grad.weight.values[0], [[-0.3655292893, -1.0965878679], [0.3655292893, 1.0965878679]])
    assert list(grad) == ["weight"] and grad.weight.has.tolist() == [True, False]
    with_bias = played(engine, bias=True).last.uploads[0].grad
    close(with_bias.bias.values[0], [-0.7310585786, 0.7310585786])
    assert torch.equal(with_bias.weight.values, grad.weight.values) and with_bias.bias.has.tolist() == [True, False]


def test_gradients_of_federated_features() -> None:
    row, features = torch.tensor([-0.1800770916, 0.0912127619], dtype=torch.float64), torch.tensor([MADE]).double()
    close(gradient(Tree(weight=EYE), features, torch.tensor([0])).weight[0], torch.stack([row, -row]))
    made = gradient(Tree(weight=EYE, bias=torch.zeros(2).double()), features, torch.tensor([0]))
    close(made.bias[0], [-0.2256834726, 0.2256834726])


@engines
@pytest.mark.parametrize(
    ("name", "plain", "biased"),
    [("row_cosine", 2.2931387711, 2.2931418016), ("flat_cosine", 1.1465696996, 0.6841767097),
     ("sq_error", 2.8905257078, 3.4013337034)],
)  # fmt: skip
def test_distances(engine: str, name: str, plain: float, biased: float) -> None:
    close(distance(played(engine, distance=name)), plain)
    close(distance(played(engine, distance=name, bias=True)), biased)


@engines
def test_matching(engine: str) -> None:
    fed = played(engine)
    close(fed.private.features[0], [[1.0160159084, 0.1611059986], [0.589082479, -0.968939005]])
    assert torch.equal(fed.private.features[1], torch.full((2, 2), 7.0).double())  # nobody has class 1
    slope = (torch.tensor(MADE).double() - fed.private.features[0]) / 0.1
    close(slope, [[-0.160159084, -1.6110599858], [-0.8908247902, -0.3106099496]], 9)


@engines
@pytest.mark.parametrize(
    ("weighting", "row", "wanted"),
    [("uniform", (-0.4517060660, -0.6827646447), 1.7692663625),
     ("count", (-0.4947944544, -0.4758530330), 1.3404657650)],
)  # fmt: skip
def test_two_clients(engine: str, weighting: str, row: tuple[float, float], wanted: float) -> None:
    fed = played(engine, x=REAL + SECOND * 6, parts=[(0, 1), range(2, 8)], grad_weighting=weighting)
    close(fed.method.targets(fed.last.uploads).weight.values[0, 0], row)
    close(distance(fed), wanted)


@pytest.mark.parametrize("retrain_bias", ["as_net", "drop"])
def test_start_of_run_0(retrain_bias: str) -> None:
    x, y = torch.zeros(1, 2).double(), torch.zeros(1, dtype=torch.long)
    fed = federation(CReFF(features_per_class=1, retrain_bias=retrain_bias), Bare(), x, y, [[0]])
    close(fed.shared.retrained.weight[0], [-0.509619, -0.565486], 6)
    close(fed.private.features[0, 0], [1.206699, -0.302407], 6)
    assert list(fed.shared.retrained) == ["weight"]
    redrawn = federation(CReFF(features_per_class=1, features_start="redraw"), Bare(), x, y, [[0]])
    assert not redrawn.private and identical(redrawn.shared, fed.shared)


def test_bias_of_the_start_is_drawn_between_weight_and_features() -> None:
    fed = federation(
        CReFF(features_per_class=2, retrain_bias="keep"), Bare(), torch.zeros(1, 2), torch.tensor([0]), [[0]], seed=3
    )
    stream, end = rng.private("creff", "init", 3, -1, -1), 2**-0.5
    for got, wanted in (
        (fed.shared.retrained.weight, stream.uniform(-end, end, (2, 2))),
        (fed.shared.retrained.bias, stream.uniform(-end, end, 2)),
        (fed.private.features, stream.standard_normal((2, 2, 2))),
    ):
        close(got, wanted, 15)


# ---- the whole method by a plain script --------------------------------------------------------------------


def by_script(fed: Harnessed, rounds: int) -> tuple[list[Tensor], Tensor]:
    """The layer and F after so many rounds: gradients by autograd, matching by its second derivative.

    `fed` plays the clients' training, which is FedAvg's; everything else is done again from its weights.
    """
    m, task, net = fed.method, fed.task, fed.task.net
    layer = [v.clone() for v in fed.shared.retrained.values()]
    features = fed.private.get("features")

    def slopes(z: Tensor, c: int, create: bool = False) -> list[Tensor]:
        leaves = [v.detach().requires_grad_() for v in layer]
        loss = F.cross_entropy(F.linear(z, *leaves), torch.full((len(z),), c))
        return list(torch.autograd.grad(loss, leaves, create_graph=create))

    def rows(g: list[Tensor]) -> list[Tensor]:
        return [*g[0], *g[1:]]

    def apart(a: list[Tensor], b: list[Tensor]) -> Tensor:
        if m.distance == "row_cosine":
            return sum(1 - p @ q / (p.norm() * q.norm() + 1e-6) for p, q in zip(rows(a), rows(b)))
        p, q = (torch.cat([v.flatten() for v in g]) for g in (a, b))
        return (p - q).square().sum() if m.distance == "sq_error" else 1 - p @ q / (p.norm() * q.norm() + 1e-6)

    for t in range(rounds):
        sent: dict[int, list[tuple[int, list[Tensor]]]] = {}
        ids = fed.taking_part(t)
        for i in ids:
            stream, part = rng.private("creff", "survey", fed.protocol.seed, t, i), task.parts[i]
            x, y = task.x[part], task.y[part]
            if task.draw is not None and m.real_transform == "train_once":
                x = x + torch.from_numpy(stream.random_sample((len(x), 1)))
            with torch.no_grad():
                z = net.bound("eval").embed(fed.shared.net, x)
            draws: dict[int, list[list[Tensor]]] = {}
            for _ in range(m.gradient_repeats):
                for c in y.unique().tolist():
                    mine = z[y == c]
                    drawn = stream.permutation(len(mine))[: m.batch_real]
                    draws.setdefault(c, []).append(slopes(mine[drawn], c))
            for c, many in draws.items():
                mean = [torch.stack(v).mean(0) for v in zip(*many)]
                sent.setdefault(c, []).append((int((y == c).sum()), mean))
        if features is None or m.features_start == "redraw":
            drawn = rng.private("creff", "features", fed.protocol.seed, t, -1)
            features = torch.from_numpy(drawn.standard_normal((CLASSES, m.features_per_class, net.dim)))
        features = features.clone()
        for c, many in sent.items():
            weights = [n if m.grad_weighting == "count" else 1 for n, _ in many]
            target = [sum(w * v for w, v in zip(weights, vs)) / sum(weights) for vs in zip(*[g for _, g in many])]
            for _ in range(m.match_epochs):
                moving = features[c].clone().requires_grad_()
                (slope,) = torch.autograd.grad(apart(slopes(moving, c, True), target), moving)
                features[c] -= m.lr_feature * slope
        stream, end = rng.private("creff", "retrain", fed.protocol.seed, t, -1), net.dim**-0.5
        biased = len(layer) > 1 or m.retrain_bias == "drop"
        if m.retrain_start == "new":
            shapes = [(CLASSES, net.dim), (CLASSES,)][: 1 + biased]
            leaves = [torch.from_numpy(stream.uniform(-end, end, s)) for s in shapes]
        else:
            leaves = [*layer, *([torch.zeros(CLASSES).double()] if m.retrain_bias == "drop" else [])]
        leaves = [v.clone().requires_grad_() for v in leaves]
        x, y = features.reshape(-1, net.dim), torch.arange(CLASSES).repeat_interleave(m.features_per_class)
        sgd = torch.optim.SGD(leaves, lr=m.lr_net)
        for _ in range(m.retrain_epochs):
            for batch in torch.from_numpy(stream.permutation(len(x))).split(m.retrain_batch):
                sgd.zero_grad()
                F.cross_entropy(F.linear(x[batch], *leaves), y[batch]).backward()
                sgd.step()
        layer = [v.detach() for v in leaves][: 1 if m.retrain_bias == "drop" else 2]
        fed.play(t)
    return layer, features


SCRIPTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"distance": "flat_cosine", "grad_weighting": "count", "retrain_start": "warm"}, {"augment": Shift()}),
    ({"distance": "sq_error", "retrain_bias": "drop", "gradient_repeats": 1}, {"augment": Shift(), "seed": 2}),
    ({"retrain_bias": "drop", "retrain_start": "warm", "features_start": "redraw"}, {"drop_last": True}),
    ({"retrain_bias": "keep", "real_transform": "test", "lr_feature": 0.5, "lr_net": 0.2}, {"augment": Shift()}),
]


@engines
@pytest.mark.parametrize(("options", "kw"), SCRIPTS)
def test_rounds_by_hand(engine: str, options: dict[str, Any], kw: dict[str, Any]) -> None:
    fed = ragged(small(**options), Tiny(norm="augment" in kw), engine=engine, participation=0.6, **kw)
    layer, features = by_script(fed, 2)
    assert gap(list(fed.shared.retrained.values()), layer) < 1e-11
    if "features_start" not in options:
        assert gap(fed.private.features, features) < 1e-11


OPTION_SETS: list[dict[str, Any]] = [
    *[options for options, _ in SCRIPTS],
    {"features_start": "redraw"}, {"retrain_start": "warm"}, {"gradient_repeats": 1}, {"distance": "sq_error"},
    {"batch_real": 64},
]  # fmt: skip


FEDAVG: dict[str, Any] = {
    "augment": Shift(), "participation": 0.6, "grad_clip_norm": 0.7, "model_weighting": "uniform", "drop_last": True,
    "rounds": 2,
}  # fmt: skip


@functools.cache
def fedavg(engine: str) -> Harnessed:
    return ragged(FedAvg(), Tiny(True), engine=engine, **FEDAVG).run()


@engines
@pytest.mark.parametrize("options", OPTION_SETS)
def test_body_personal_models_and_own_head_are_fedavg_s(engine: str, options: dict[str, Any]) -> None:
    plain = fedavg(engine)
    fed = ragged(small(**options), Tiny(True), engine=engine, **FEDAVG).run()
    assert identical(fed.shared.net, plain.shared.net)
    mine, theirs = fed.personal(), plain.personal()
    assert list(mine) == list(theirs) and all(identical(mine[i].tree, theirs[i].tree) for i in mine)
    x = data()[0]
    scores = fed.scores(fed.global_model(), x)
    assert list(scores) == ["retrained", "network"]
    assert torch.equal(scores["network"], plain.scores(plain.global_model(), x)["network"])
    z = fed.task.net.bound("eval").embed(fed.shared.net, x)
    close(scores["retrained"], F.linear(z, *fed.shared.retrained.values()), 12)


def test_headline_is_the_retrained_head() -> None:
    """The record, from scores that are known: the re-trained layer has all right, FedAvg's own none."""

    class Plain:
        def test(self, x: Tensor) -> Tensor:
            return x.double()

    x, y = torch.eye(2).repeat(3, 1), torch.tensor([0, 1] * 3)
    fed = federation(CReFF(), Bare(), x.double(), y, [range(6)])
    fed.shared = Tree(net=Tree({"head.weight": -9 * EYE}), retrained=Tree(weight=9 * EYE))
    row = global_row(score(fed.global_model(), fed.task.net, TestSet(x, y, Plain(), 2)))  # type: ignore[arg-type]
    assert row["gm"] == 1 and row["gm_scores"] == {"retrained": 1.0, "network": 0.0}
    assert row["loss"] == pytest.approx(np.log(1 + np.exp(-9)))


@pytest.mark.parametrize("options", OPTION_SETS)
def test_engines_agree(options: dict[str, Any]) -> None:
    kw: dict[str, Any] = {"augment": Shift(), "grad_clip_norm": 0.3, "participation": 0.6, "rounds": 2}
    a, b = (ragged(small(**options), Tiny(True), engine=e, **kw).run() for e in ENGINES)
    assert gap(state(a), state(b)) < 1e-11 and a.bytes == b.bytes
    assert [r.samples for r in a.rounds] == [r.samples for r in b.rounds]


@pytest.mark.parametrize("fields", [{}, {"bn_buffers": "local", "drop_last": True}])
def test_engines_agree_on_images(fields: dict[str, Any]) -> None:
    a, b = (toy.toy(small(), engine=e, **fields).run() for e in ENGINES)
    assert toy.gap(toy.everything(a), toy.everything(b)) < 1e-10
    assert toy.gap(toy.outputs(a), toy.outputs(b)) < 1e-10
    assert (a.global_model() is None) == ("bn_buffers" in fields)


# ---- options -----------------------------------------------------------------------------------------------

READINGS = {
    "retrain_bias": ("as_net", "drop", "keep"),
    "features_per_class": (100,),
    "match_epochs": (100,),
    "retrain_epochs": (300,),
    "batch_real": (64, 32),
    "retrain_batch": (64, 32),
    "lr_feature": (0.01, 0.1),
    "lr_net": (0.01,),
    "distance": ("row_cosine", "flat_cosine", "sq_error"),
    "grad_weighting": ("uniform", "count"),
    "gradient_repeats": (10, 1),
    "real_transform": ("train_once", "test"),
    "features_start": ("kept", "redraw"),
    "retrain_start": ("new", "warm"),
}


def test_all_options_are_there() -> None:
    table = {name: option(field) for name, field in fields(CReFF).items()}
    assert {name: o.readings for name, o in table.items()} == READINGS
    assert all(o.why and o.source for o in table.values())
    assert set(CReFF.open_fields) <= set(fields(Protocol)) - set(fields(CReFF))


@pytest.mark.parametrize(
    ("name", "value"),
    [("features_per_class", "0"), ("match_epochs", "0"), ("retrain_epochs", "0"), ("batch_real", "0"),
     ("retrain_batch", "0"), ("lr_feature", "0"), ("lr_net", "-1"), ("gradient_repeats", "2"), ("distance", "cosine")],
)  # fmt: skip
def test_refused_values(name: str, value: str) -> None:
    with pytest.raises(UserError, match=f"creff {name}: ") as refusal:
        Spec("creff", ((name, value),)).build(Protocol())
    assert "\n" not in str(refusal.value)


@functools.cache
def plain() -> Harnessed:
    return ragged(small(), augment=Shift(), rounds=2).run()


@pytest.mark.parametrize(
    "options",
    [{"features_per_class": 4}, {"match_epochs": 5}, {"retrain_epochs": 4}, {"batch_real": 2}, {"retrain_batch": 5},
     {"lr_feature": 0.02}, {"lr_net": 0.02}, {"distance": "flat_cosine"}, {"distance": "sq_error"},
     {"grad_weighting": "count"}, {"gradient_repeats": 1}, {"real_transform": "test"}, {"features_start": "redraw"},
     {"retrain_start": "warm"}, {"retrain_bias": "drop"}],
)  # fmt: skip
def test_every_option_moves_the_layer(options: dict[str, Any]) -> None:
    other = ragged(small(**options), augment=Shift(), rounds=2).run()
    assert gap(plain().shared.retrained.weight, other.shared.retrained.weight) > 1e-7


@engines
def test_bias_of_the_layer(engine: str) -> None:
    """as_net follows the net; drop predicts without one, keep with one, on every net."""
    x, y = torch.tensor(REAL).double(), torch.tensor([0, 1])
    for bias, wanted in ((False, (False, False, True)), (True, (True, False, True))):
        for reading, has in zip(READINGS["retrain_bias"], wanted):
            fed = federation(small(retrain_bias=reading), Bare(bias), x, y, [[0, 1]], engine=engine).run()
            assert ("bias" in fed.shared.retrained) is has, (bias, reading)
            assert ("bias" in fed.last.uploads[0].grad) is has


# ---- equal by construction ---------------------------------------------------------------------------------


@engines
def test_keep_is_as_net_where_the_head_has_a_bias(engine: str) -> None:
    runs = [ragged(small(retrain_bias=b), engine=engine, rounds=2).run() for b in ("as_net", "keep")]
    assert identical(state(runs[0]), state(runs[1])) and "bias" in runs[0].shared.retrained


@engines
def test_repeats_of_a_whole_class_change_nothing(engine: str) -> None:
    runs = [ragged(small(gradient_repeats=r, batch_real=31), engine=engine, rounds=1).run() for r in (10, 1)]
    assert identical(state(runs[0]), state(runs[1]))
    drawn = [ragged(small(gradient_repeats=r, batch_real=4), engine=engine, rounds=1).run() for r in (10, 1)]
    y, parts = data()[1:]
    for i, (many, one) in enumerate(zip(drawn[0].last.uploads, drawn[1].last.uploads)):
        n = torch.bincount(y[parts[i]], minlength=CLASSES)
        whole = (n > 0) & (n <= 4)
        assert torch.equal(many.grad.weight.values[whole], one.grad.weight.values[whole])
        assert not (n > 4).any() or gap(many.grad.weight.values[n > 4], one.grad.weight.values[n > 4]) > 1e-6


def test_weighting_of_a_class_with_one_owner_does_not_matter() -> None:
    runs = [ragged(small(grad_weighting=w), draws=[[2], [5], [1]]).run() for w in ("uniform", "count")]
    assert gap(state(runs[0]), state(runs[1])) < 1e-12


def test_transform_without_augmentation_changes_nothing() -> None:
    runs = [ragged(small(real_transform=t), rounds=2).run() for t in ("train_once", "test")]
    assert identical(state(runs[0]), state(runs[1]))


# ---- traps -------------------------------------------------------------------------------------------------


@engines
def test_gradients_are_taken_before_training_in_eval_mode(engine: str) -> None:
    """At (theta^t, layer^t), by running statistics; no round's training touches them."""
    fed = ragged(small(batch_real=31), Tiny(True), engine=engine, rounds=2)
    fed.play(0)
    net, layer = fed.shared.net, fed.shared.retrained
    fed.play(1)
    x, y, parts = data()
    for i, upload in enumerate(fed.last.uploads):
        z = fed.task.net.bound("eval").embed(net, x[parts[i]])
        wanted = gradient(layer, z[y[parts[i]] == 0][None], torch.tensor([0])) if (y[parts[i]] == 0).any() else None
        assert wanted is None or gap(wanted.weight[0], upload.grad.weight.values[0]) < 1e-12


@engines
def test_skipped_classes_keep_their_features_and_still_train_the_layer(engine: str) -> None:
    fed = ragged(small(), engine=engine, draws=[[1]] * 3)  # client 1 has class 0 alone
    before = fed.private.features
    fed.run()
    assert torch.equal(fed.private.features[1:], before[1:]) and gap(fed.private.features[0], before[0]) > 1e-6
    moved = ragged(small(), engine=engine, draws=[[1]] * 3)
    moved.private = Tree(features=torch.cat([before[:1], before[1:] + 1]))
    assert gap(moved.run().shared.retrained, fed.shared.retrained) > 1e-4


@engines
def test_features_may_be_negative_and_the_own_head_stays(engine: str) -> None:
    fed = ragged(small(), engine=engine).run()
    assert (fed.private.features < 0).any()
    assert gap(fed.shared.retrained.weight, fed.shared.net["head.weight"]) > 1e-3


@engines
def test_two_classes_without_bias_count_one_angle_twice(engine: str) -> None:
    fed = played(engine)
    close(fed.last.uploads[0].grad.weight.values[0].sum(0), [0, 0], 12)
    close(distance(fed) / 2, 2.2931387711 / 2)


def test_nothing_is_written_into_what_was_given() -> None:
    fed = ragged(small())
    before = [v.clone() for v in state(fed)]
    given = state(fed)
    fed.run()
    assert all(map(torch.equal, before, given))


def test_matching_comes_closer() -> None:
    fed = ragged(CReFF(features_per_class=20, retrain_epochs=1, lr_feature=0.1), rounds=1)
    layer, before = fed.shared.retrained, fed.private.features
    fed.run()
    targets = fed.method.targets(fed.last.uploads).map(lambda t: t.values)
    far, near = (float(DISTANCES["row_cosine"](gradient(layer, f, torch.arange(CLASSES)), targets))
                 for f in (before, fed.private.features))  # fmt: skip
    assert near < 0.75 * far


def test_a_dead_gradient_has_no_direction() -> None:
    """All features at the origin: a weight gradient of 0, distance 1 a row, no NaN."""
    fed = played("loop", bias=True)
    layer = Tree(weight=EYE, bias=torch.zeros(2).double())
    made = fed.method.match(torch.zeros(2, 2, 2).double(), layer, fed.method.targets(fed.last.uploads))
    assert torch.isfinite(made).all()


# ---- memory, bytes, resuming -------------------------------------------------------------------------------


def symbols(fed: Harnessed, i: int) -> dict[str, float]:
    """The bill's symbols for one client; numbers of buffers belong to their part, an integer counts as two floats."""
    count = fed.task.net.count()
    p, h = count["total"] + count["buffers"] + 2 * count["counters"], count["head"]
    return {"P": p, "B": p - h, "H": h, "K": CLASSES, "K_i": int((fed.task.counts[i] > 0).sum()), "int": 2,
            "q": fed.task.net.dim, "d": fed.task.net.encoded, "n": SIZES[i], "E": fed.protocol.local_epochs}  # fmt: skip


@engines
@pytest.mark.parametrize("options", [{}, {"retrain_bias": "drop"}, {"retrain_bias": "keep", "grad_weighting": "count"}])
def test_bill(engine: str, options: dict[str, Any]) -> None:
    fed = toy.toy(small(**options), engine=engine, rounds=2).run()
    bill = fed.method.bill()

    def total(expression: str) -> float:
        return sum(eval(expression, {}, symbols(fed, i)) for i in fed.last.ids)

    assert len(fed.last.ids) == 4
    assert fed.last.bytes == {"down": 4 * total(bill.down), "up": 4 * total(bill.up), "once": 0}
    assert fed.last.samples == {"trained": total(bill.trained), "forward": total(bill.forward)}
    assert fed.last.state_bytes == 0 == total(bill.state)


@pytest.mark.parametrize(
    ("name", "classes", "side", "down", "up"),
    [("cnn_fednh", 10, 32, 3_199_488, 3_268_608), ("cnn_fednh", 100, 32, 3_337_728, 10_940_928)],
)
def test_bytes_of_the_tables(name: str, classes: int, side: int, down: int, up: int) -> None:
    """Protocol 6.1: down, and up with all classes present."""
    net = build(name, classes=classes, shape=(side, side, 3))
    fed = federation(small(), net, torch.zeros(1, 3, side, side), torch.tensor([0]), [[0]], precision="fp32")
    assert nbytes(fed.shared) == down
    z, client = torch.ones(classes, net.dim), RunClient(fed.task, 0, 0)
    client.y, client.counts = torch.arange(classes), torch.ones(classes)
    grad = fed.method.class_gradients(client, fed.shared.retrained, z, rng.private("creff", "survey", 0, 0, 0))
    assert nbytes(Tree(net=fed.shared.net, grad=grad)) == up


@engines
def test_absent_classes_do_not_travel(engine: str) -> None:
    fed = ragged(small(), engine=engine, draws=[[1]], rounds=1).run()
    grad = fed.last.uploads[0].grad
    assert isinstance(grad.weight, Rows) and grad.weight.values.shape == (CLASSES, CLASSES, 3)
    assert grad.weight.has.tolist() == grad.bias.has.tolist() == [True] + [False] * 4
    assert nbytes(grad) == 4 * (CLASSES * 3 + CLASSES)


@engines
def test_resumes_from_its_trees(engine: str) -> None:
    whole = ragged(small(), engine=engine, augment=Shift(), participation=0.6).run()
    half, rest = (ragged(small(), engine=engine, augment=Shift(), participation=0.6) for _ in range(2))
    half.play(0)
    rest.shared, rest.private = half.shared, half.private
    rest.play(1)
    rest.play(2)
    assert identical(state(whole), state(rest))


def test_refreshed_models_are_fedavg_s() -> None:
    fed, plain = ragged(small(), rounds=1).run(), ragged(FedAvg(), rounds=1).run()
    mine, theirs = fed.refreshed(), plain.refreshed()
    assert sorted(mine) == list(range(len(SIZES))) and all(identical(mine[i].tree, theirs[i].tree) for i in mine)
