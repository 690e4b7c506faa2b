"""FedProto: the test vectors, every option, what is equal by construction, traps, bytes."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import toy
from harness import ENGINES, Harnessed, Identity, federation
from protofl.methods.fedproto import FedProto
from ragged import CLASSES, SIZES, Shift, Tiny, data, gap, identical, ragged, state, table
from torch import Tensor

from protofl import rng
from protofl.errors import UserError
from protofl.evaluate import TestSet, personal_row, score
from protofl.handles import RunClient, RunServer
from protofl.method import Model
from protofl.nets import build
from protofl.nets.base import Entry, Net, Options, declare_conv, declare_norm
from protofl.options import fields, option
from protofl.protocol import Protocol
from protofl.registry import Spec, check
from protofl.tree import Rows, Tree, nbytes

engines = pytest.mark.parametrize("engine", ENGINES)


def close(got: Any, wanted: Any, digits: int = 6) -> None:
    """Equal to so many decimals, as the vectors are given."""
    got = torch.as_tensor(got, dtype=torch.float64)
    assert torch.allclose(got, torch.as_tensor(wanted, dtype=torch.float64), rtol=0, atol=0.51 * 10**-digits), got


# ---- vector 1: global prototypes ---------------------------------------------------------------------------

ONE = [[1.0, 0]] * 30 + [[0.0, 2]] * 10  # class 0, then class 1
TWO = [[3.0, 4]] * 10  # class 0


def averaged(engine: str, rows: Any = (ONE, TWO), labels: Any = ((30, 10), (10,)), **options: Any) -> Harnessed:
    """One round of clients whose embeddings are their inputs; labels: samples per class, in order."""
    ends = np.cumsum([0, *map(len, rows)])
    y = torch.tensor([c for own in labels for c, n in enumerate(own) for _ in range(n)])
    x = torch.tensor([r for own in rows for r in own]).double()
    parts = [range(a, b) for a, b in itertools.pairwise(ends)]
    return federation(FedProto(**options), Identity(3, 2), x, y, parts, engine=engine, local_epochs=1).run()


@engines
@pytest.mark.parametrize(
    ("weighting", "first"), [("uniform", (2, 2)), ("count", (1.5, 1)), ("paper_literal", (0.75, 0.5))]
)
def test_global_prototypes(engine: str, weighting: str, first: tuple[float, float]) -> None:
    fed = averaged(engine, proto_weighting=weighting)
    close(fed.shared.proto.values, [first, (0, 2), (0, 0)], 12)
    assert fed.shared.proto.has.tolist() == [True, True, False]
    sent = fed.last.uploads[0]
    assert ("n" in sent) is (weighting != "uniform")
    if "n" in sent:
        assert sent.n.tolist() == [30, 10, 0] and sent.n.dtype == torch.int64


# ---- vector 2: the penalty ---------------------------------------------------------------------------------


class PerRow(Identity):
    """A row is (h, which): its embedding is h plus a shift of its own, whose gradient is that of the embedding."""

    def init(self, stream: Any) -> Tree:
        return Tree({"encoder.shift": torch.zeros(3, 2)}) | super().init(stream)

    def encode(self, w: Tree, x: Tensor) -> Tensor:
        return x[:, :2] + x[:, 2:] @ w["encoder.shift"]


H, LABELS = [[1.0, 2], [4, 0], [0, 1]], [0, 0, 1]
KNOWN = [[2.0, 2], [0, 2], [9, 9]]


def pulled(engine: str, has: Any = (True, False, False), rows: Any = (0, 1, 2), **options: Any) -> Harnessed:
    """One step of one client, rate 1, whose output layer is 0: minus the shift is the gradient."""
    x = torch.cat([torch.tensor(H), torch.eye(3)], 1)[list(rows)].double()
    kw: dict[str, Any] = {"local_epochs": 1, "client_lr": 1.0}
    kw |= {k: options.pop(k) for k in list(options) if k in fields(Protocol)}
    fed = federation(FedProto(**{"lam": 1.0, **options}), PerRow(3, 2), x, torch.tensor(LABELS)[list(rows)],
                     [range(len(rows))], engine=engine, **kw)  # fmt: skip
    fed.shared = fed.shared | {"proto": table(KNOWN, has)}
    return fed.run()


PENALTIES = [("mse", "self", 1.5), ("mse", "mask", 2.25), ("sample_sq_l2", "self", 3.0), ("sample_sq_l2", "mask", 4.5),
             ("class_mean_l2", "self", 1.118034), ("class_mean_l2", "mask", 1.118034)]  # fmt: skip


@engines
@pytest.mark.parametrize(("form", "missing", "wanted"), PENALTIES)
def test_penalty(engine: str, form: str, missing: str, wanted: float) -> None:
    fed = pulled(engine, reg_form=form, reg_missing=missing)
    terms = fed.terms[0]
    close(terms["pull"], wanted)
    close(terms["ce"], np.log(3))
    close(terms["loss"] - terms["ce"], wanted)
    assert fed.own(0).net["encoder.shift"][2].tolist() == [0, 0]  # its class has no prototype


@engines
def test_penalty_of_class_means(engine: str) -> None:
    close(pulled(engine, has=(True, True, False), reg_form="class_mean_l2").terms[0]["pull"], 2.118034)


@engines
def test_gradient_of_the_penalty(engine: str) -> None:
    shift = pulled(engine).own(0).net["encoder.shift"]
    close(-shift, [[-0.333333, 0], [0.666667, -0.666667], [0, 0]])


@engines
@pytest.mark.parametrize(("lam", "wanted"), [(1.0, 2.0), (0.1, 0.65)])
def test_weight_of_the_penalty(engine: str, lam: float, wanted: float) -> None:
    terms = pulled(engine, lam=lam).terms[0]
    close(0.5 + terms["loss"] - terms["ce"], wanted)


@engines
@pytest.mark.parametrize("form", ["mse", "sample_sq_l2", "class_mean_l2"])
@pytest.mark.parametrize("missing", ["self", "mask"])
def test_nobody_is_known(engine: str, form: str, missing: str) -> None:
    fed = pulled(engine, has=(False, False, False), reg_form=form, reg_missing=missing)
    assert fed.terms[0]["pull"] == 0 and not fed.own(0).net["encoder.shift"].any()


@engines
@pytest.mark.parametrize("form", ["mse", "sample_sq_l2", "class_mean_l2"])
def test_at_the_prototype_the_gradient_is_zero(engine: str, form: str) -> None:
    fed = pulled(engine, rows=(2,), has=(False, True, False), reg_form=form)  # (0, 1) is pulled to (0, 2)
    assert fed.own(0).net["encoder.shift"].any()
    x = torch.tensor([[0.0, 2, 0, 0, 1]]).double()
    there = federation(FedProto(reg_form=form), PerRow(3, 2), x, torch.tensor([1]), [[0]], engine=engine,
                       local_epochs=1)  # fmt: skip
    there.shared = there.shared | {"proto": table(KNOWN, [True, True, False])}
    assert there.run().terms[0]["pull"] == 0 and not there.own(0).net["encoder.shift"].any()


# ---- vectors 3 and 4: prediction ---------------------------------------------------------------------------


def model(
    labels: Any = (0, 1), has: Any = (True, True, False), own: Tree | None = None, values: Any = KNOWN, **options: Any
) -> tuple[Harnessed, Model]:
    """The personal model of a client that has these classes, with these global prototypes."""
    x = torch.zeros(len(labels), 2).double()
    fed = federation(FedProto(**options), Identity(3, 2), x, torch.tensor(labels), [range(len(labels))])
    client = RunClient(fed.task, 0, 0)
    mine = fed.method.enrol(client) | (own or Tree())
    return fed, fed.method.personal_model(client, Tree(proto=table(values, has)), mine, None)


def test_nearest_prototype() -> None:
    x = torch.tensor([[1.0, 1], [0, 3]]).double()
    fed, found = model()
    near = fed.scores(found, x)["proto"]
    close(-near[:, :2], [[1.414214, 1.414214], [2.236068, 1.0]])
    assert near[:, 2].tolist() == [-np.inf] * 2
    assert near[0, 0] == near[0, 1] and near.argmax(1).tolist() == [0, 1]  # a tie goes to the lowest index
    fed, found = model(labels=(0, 0), proto_candidates="own_known")
    assert fed.scores(found, x)["proto"].argmax(1).tolist() == [0, 0]


def test_prototypes_of_which_round() -> None:
    x = torch.tensor([[1.5, 1]]).double()
    received = Tree(proto=table(KNOWN, (True, True, False)))
    for which, far, wanted in (("train_time", (1.118034, 1.802776), 0), ("updated", (2.5, 1.5), 1)):
        fed, found = model(values=[[3.0, 3], [0, 1], [0, 0]], own=received, pm_proto=which)
        near = fed.scores(found, x)["proto"]
        close(-near[0, :2], far)
        assert int(near.argmax()) == wanted


class Plain:
    """A pipeline that leaves rows as they are."""

    def test(self, x: Tensor) -> Tensor:
        return x.double()


def test_counters_are_reset_between_rules_and_clients() -> None:
    """Vector 4: 8 of 10 by the head, 6 of 10 by the prototypes, for two clients alike."""
    y = torch.arange(10) % 2
    right = torch.where(y == 0, 1.0, -1.0)
    by_head, by_proto = right.clone(), right.clone()
    by_head[:2] *= -1  # wrong twice
    by_proto[:4] *= -1  # wrong four times
    x = torch.stack([by_head, by_proto], 1)  # the head reads the first number, the prototypes are told by the second
    fed, found = model(values=[[0.0, 9], [0, -9], [0, 0]])
    found.tree.net["head.weight"] = torch.tensor([[1.0, 0], [-1, 0], [0, 0]]).double()
    found.tree.net["head.bias"] = torch.tensor([0.0, 0, -99]).double()
    test = TestSet(x, y, Plain(), 3)  # type: ignore[arg-type]
    scored = {i: score(found, fed.task.net, test) for i in (0, 1)}
    row = personal_row(scored, np.array([[5, 5, 0]] * 2), test.per_class())
    assert row["pm_v"] == pytest.approx(0.6) and row["pm_scores"]["head"]["v"] == pytest.approx(0.8)
    assert row["pm_each"]["v"] == pytest.approx([0.6, 0.6])


def test_headline_and_loss() -> None:
    x, y = torch.tensor([[1.0, 1], [0, 3]]), torch.tensor([0, 1])
    for predict, names in (("proto", ["proto", "head"]), ("head", ["head", "proto"])):
        fed, found = model(predict=predict)
        assert list(fed.scores(found, x.double())) == names
        scored = score(found, fed.task.net, TestSet(x, y, Plain(), 3))  # type: ignore[arg-type]
        assert scored.loss == pytest.approx(np.log(3))  # distances are no logits
        assert list(scored.confusion) == names


def test_nobody_is_known_at_test() -> None:
    test = TestSet(torch.zeros(4, 2), torch.tensor([0, 1, 2, 0]), Plain(), 3)  # type: ignore[arg-type]
    for options, has in (({}, (False,) * 3), ({"proto_candidates": "own_known"}, (False, False, True))):
        fed, found = model(has=has, **options)
        scored = score(found, fed.task.net, test)
        row = personal_row({0: scored}, np.array([[1, 1, 0]]), test.per_class())
        assert scored.headline is None and row["pm_v"] is None and row["pm_scores"]["head"]["v"] is not None


# ---- the whole method by a plain script --------------------------------------------------------------------


def by_script(fed: Harnessed) -> tuple[dict[int, Tree], dict[int, Tensor]]:
    """Clients' weights and global prototypes after all rounds, with torch's own optimiser."""
    m, p, net, task = fed.method, fed.protocol, fed.task.net, fed.task
    models: dict[int, Tree] = {}
    known: dict[int, Tensor] = {}
    if m.proto_init == "rand_uniform":
        drawn = rng.private("fedproto", "init", p.seed, -1, -1).random_sample((CLASSES, net.dim))
        known = dict(enumerate(torch.from_numpy(drawn)))
    for t in range(p.rounds):
        sent: dict[int, list[tuple[int, Tensor]]] = {}
        for i in fed.taking_part(t):
            part = task.parts[i]
            x, y = task.x[part], task.y[part]
            first = task.initial if m.common_init else net.init(rng.private("fedproto", "init", p.seed, -1, i))
            w = Tree({k: v.double().clone().requires_grad_() for k, v in models.get(i, first).items()})
            sgd = torch.optim.SGD(list(w.values()), lr=p.client_lr, momentum=p.momentum, weight_decay=p.weight_decay)
            stream, met = rng.train(p.seed, t, i), []
            for epoch in range(p.local_epochs):
                order = torch.from_numpy(stream.permutation(len(part)))
                shift = (
                    torch.from_numpy(stream.random_sample((len(part), 1))) if task.draw else torch.zeros(len(part), 1)
                )
                for rows in torch.arange(len(part)).split(p.batch_size):
                    r = net.encode(w, x[order[rows]] + shift[rows])
                    h = net.project(w, r)
                    h = h.relu() if m.embed_relu == "add" else h
                    met += [(epoch, c, v) for c, v in zip(y[order[rows]].tolist(), h.detach())]
                    target = torch.stack([known.get(int(c), v) for c, v in zip(y[order[rows]], h.detach())])
                    rows_known = sum(int(c) in known for c in y[order[rows]])
                    pull = F.mse_loss(h, target, reduction="sum")
                    pull = pull / (len(h) if m.reg_missing == "self" else max(rows_known, 1))
                    pull = pull / h.shape[1] if m.reg_form == "mse" else pull
                    if m.reg_form == "class_mean_l2":
                        means = {c: h[y[order[rows]] == c].mean(0) for c in y[order[rows]].unique().tolist()}
                        pull = sum((v - known[c]).norm() for c, v in means.items() if c in known)
                    sgd.zero_grad()
                    (F.cross_entropy(net.classify(w, r, h), y[order[rows]]) + m.lam * pull).backward()
                    sgd.step()
            models[i] = w.map(Tensor.detach)
            if m.proto_timing == "final_pass":
                survey = rng.private("fedproto", "survey", p.seed, t, i)
                moved = x + torch.from_numpy(survey.random_sample((len(part), 1))) if task.draw else x
                h = net.project(models[i], net.encode(models[i], moved))
                met = [(p.local_epochs, c, v.relu() if m.embed_relu == "add" else v) for c, v in zip(y.tolist(), h)]
            if m.proto_timing == "last_epoch":
                met = [one for one in met if one[0] == p.local_epochs - 1]
            for c in y.unique().tolist():
                n = int((y == c).sum())
                if n >= m.min_count:
                    sent.setdefault(c, []).append((n, torch.stack([v for _, k, v in met if k == c]).mean(0)))
        known = known if m.absent_class == "keep_old" else {}
        for c, many in sent.items():
            weights = [1 if m.proto_weighting == "uniform" else n for n, _ in many]
            known[c] = sum(n * v for n, (_, v) in zip(weights, many)) / sum(weights)
            if m.proto_weighting == "paper_literal":
                known[c] = known[c] / len(many)
    return models, known


SCRIPTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"augment": Shift()}),
    ({"lam": 2.0, "reg_form": "sample_sq_l2", "reg_missing": "mask", "proto_weighting": "count"}, {}),
    ({"reg_form": "class_mean_l2", "proto_weighting": "paper_literal", "absent_class": "drop"}, {"augment": Shift()}),
    ({"proto_init": "rand_uniform", "proto_timing": "last_epoch", "pm_proto": "train_time"}, {"augment": Shift()}),
    ({"proto_timing": "all_epochs", "embed_relu": "add", "common_init": False, "min_count": 3}, {"seed": 2}),
]


@engines
@pytest.mark.parametrize(("options", "kw"), SCRIPTS)
def test_rounds_by_hand(engine: str, options: dict[str, Any], kw: dict[str, Any]) -> None:
    fed = ragged(FedProto(**{"lam": 1.0, **options}), engine=engine, participation=0.45, **kw)
    models, known = by_script(fed)
    fed.run()
    assert all(gap(fed.own(i).net, w) < 1e-12 for i, w in models.items())
    assert fed.shared.proto.has.nonzero()[:, 0].tolist() == sorted(known)
    assert all(gap(fed.shared.proto.values[c], v) < 1e-12 for c, v in known.items())


OPTION_SETS: list[dict[str, Any]] = [
    *[options for options, _ in SCRIPTS],
    {"share_model": "fedavg_body", "proto_weighting": "count", "reg_missing": "mask"},
    {"share_model": "fedavg_all", "common_init": False},
]


@pytest.mark.parametrize("options", OPTION_SETS)
def test_engines_agree(options: dict[str, Any]) -> None:
    kw: dict[str, Any] = {"augment": Shift(), "grad_clip_norm": 0.3, "participation": 0.6, "rounds": 2}
    kw["drop_last"] = "proto_timing" in options
    a, b = (ragged(FedProto(**options), Tiny(True), engine=e, **kw).run() for e in ENGINES)
    assert gap(state(a), state(b)) < 1e-11 and a.bytes == b.bytes
    assert a.terms[-1] == pytest.approx(b.terms[-1])
    x = data()[0]
    mine, theirs = ([fed.scores(m, x) for m in fed.personal().values()] for fed in (a, b))
    assert toy.gap(mine, theirs) < 1e-10


class Mapped(Net):
    """convolution, batch normalisation, ReLU = a map of 5 x 4 x 4, whose mean is r; projection; head."""

    pools = True

    def __init__(self, projection: int | None = 7) -> None:
        super().__init__("mapped", 5, Options(toy.CLASSES, toy.SHAPE, projection))

    def encoder_table(self) -> list[Entry]:
        return [*declare_conv("encoder.conv", 3, 5, 3), *declare_norm("encoder.norm", 5, True)]

    def _feature_map(self, w: Tree, x: Tensor) -> Tensor:
        x = F.conv2d(x, w["encoder.conv.weight"], w["encoder.conv.bias"], stride=2, padding=1)
        return F.relu(self.batch_norm(w, "encoder.norm", x))

    def _encode(self, w: Tree, x: Tensor, relu: bool) -> Tensor:
        return self.pool(self._feature_map(w, x))


IMAGES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"embed": "feature_map", "embed_relu": "add"}, {}),
    ({"embed": "feature_map", "proto_timing": "last_epoch"}, {"bn_buffers": "local", "drop_last": True}),
    ({"share_model": "fedavg_body"}, {"bn_buffers": "local"}),
]


@pytest.mark.parametrize(("options", "kw"), IMAGES)
def test_engines_agree_on_images(options: dict[str, Any], kw: dict[str, Any]) -> None:
    a, b = (toy.toy(FedProto(**options), net=Mapped(), engine=e, rounds=2, **kw).run() for e in ENGINES)
    assert toy.gap(toy.everything(a), toy.everything(b)) < 1e-10
    assert toy.gap(toy.outputs(a), toy.outputs(b)) < 1e-10


# ---- options -----------------------------------------------------------------------------------------------

READINGS = {
    "preset": ("cross_device", "paper", "official_code", "fednh_code"),
    "lam": (0.1, 1.0),
    "reg_form": ("mse", "sample_sq_l2", "class_mean_l2"),
    "reg_missing": ("self", "mask"),
    "proto_weighting": ("uniform", "count", "paper_literal"),
    "proto_init": ("none", "rand_uniform"),
    "proto_timing": ("final_pass", "last_epoch", "all_epochs"),
    "embed": ("pooled", "feature_map"),
    "embed_relu": ("as_net", "add"),
    "predict": ("proto", "head"),
    "proto_candidates": ("all_known", "own_known"),
    "pm_proto": ("updated", "train_time"),
    "share_model": ("none", "fedavg_body", "fedavg_all"),
    "absent_class": ("keep_old", "drop"),
    "common_init": (True, False),
    "min_count": (1,),
}


def test_all_options_are_there() -> None:
    shown = {name: option(field) for name, field in fields(FedProto).items()}
    assert {name: o.readings for name, o in shown.items()} == READINGS
    assert all(o.why and o.source for o in shown.values())
    assert set(FedProto.open_fields) <= set(fields(Protocol)) - set(fields(FedProto))


def test_presets() -> None:
    def made(name: str) -> dict[str, Any]:
        method = Spec("fedproto", (("preset", name),)).build(Protocol())
        return {k: v for k, v in dataclasses.asdict(method).items() if v != getattr(FedProto(), k)}

    assert made("cross_device") == {}
    assert made("paper") == {"preset": "paper"}
    assert made("fednh_code") == {
        "preset": "fednh_code", "proto_init": "rand_uniform", "proto_timing": "last_epoch", "pm_proto": "train_time",
    }  # fmt: skip
    assert made("official_code") == {
        "preset": "official_code", "proto_timing": "last_epoch", "proto_candidates": "own_known", "common_init": False,
    }  # fmt: skip
    given = (("preset", "official_code"), ("common_init", "true"), ("lam", "1"))
    mixed = Spec("fedproto", given).build(Protocol())
    assert isinstance(mixed, FedProto) and mixed.common_init and mixed.lam == 1


def test_refusals() -> None:
    small, large = (build(n, classes=10, shape=(32, 32, 3)) for n in ("simple_cnn", "resnet18_bn"))
    FedProto(embed="feature_map").check(Protocol(), large)
    with pytest.raises(UserError, match="embed=feature_map: simple_cnn pools no feature map") as refusal:
        FedProto(embed="feature_map").check(Protocol(), small)
    assert "\n" not in str(refusal.value)
    code, cifar = FedProto(preset="official_code"), Protocol(dataset="cifar10")
    code.check(cifar, small)
    code.check(Protocol(), large)
    dataclasses.replace(code, embed="feature_map").check(cifar, large)
    with pytest.raises(UserError, match="resnet18_bn: .* add embed=feature_map"):
        code.check(cifar, large)
    for name, value in (("lam", "-1"), ("min_count", "0"), ("reg_form", "l1"), ("min_count", "1.5")):
        with pytest.raises(UserError, match=f"fedproto {name}: "):
            Spec("fedproto", ((name, value),)).build(Protocol())
    everybody = Protocol(pm_clients="all", metrics=("gm", "pm_v"))
    check(FedProto(), everybody, everybody, small)  # clients keep their models


@pytest.mark.parametrize(
    "options",
    [{"lam": 1.0}, {"reg_form": "sample_sq_l2"}, {"reg_form": "class_mean_l2"}, {"reg_missing": "mask"},
     {"proto_weighting": "count"}, {"proto_weighting": "paper_literal"}, {"proto_init": "rand_uniform"},
     {"proto_timing": "last_epoch"}, {"embed_relu": "add"},
     {"share_model": "fedavg_body"}, {"share_model": "fedavg_all"}, {"absent_class": "drop"}, {"common_init": False},
     {"min_count": 4}],
)  # fmt: skip
def test_every_option_moves_the_prototypes(options: dict[str, Any]) -> None:
    draws = [[1], [2, 5], [1, 3], [0, 4]]  # class 0 alone, then all; two clients have class 4, and come once
    base, other = (ragged(FedProto(**o), draws=draws, rounds=4, local_epochs=1).run() for o in ({}, options))
    apart = gap(base.shared.proto.values, other.shared.proto.values) > 1e-6
    assert apart or not torch.equal(base.shared.proto.has, other.shared.proto.has)


@engines
def test_random_start(engine: str) -> None:
    fed = ragged(FedProto(proto_init="rand_uniform"), engine=engine, rounds=1)
    drawn = rng.private("fedproto", "init", 0, -1, -1).random_sample((CLASSES, 3))
    assert np.array_equal(fed.shared.proto.values.numpy(), drawn) and bool(fed.shared.proto.has.all())
    assert fed.run().terms[0]["pull"] > 0
    assert ragged(FedProto(), engine=engine, rounds=1).run().terms[0]["pull"] == 0


@engines
def test_own_starts(engine: str) -> None:
    """The recipe of the common weights on the client's private stream."""
    fed = ragged(FedProto(common_init=False), Tiny(True), engine=engine, seed=3)
    starts = [fed.method.enrol(RunClient(fed.task, i, t)).net for i in (2, 4) for t in (0, 2)]
    wanted = [fed.task.net.init(rng.private("fedproto", "init", 3, -1, i)) for i in (2, 2, 4, 4)]
    for got, drawn in zip(starts, wanted):
        assert identical(got, drawn.map(lambda v: v.double() if v.is_floating_point() else v))
        assert all(v.dtype in (torch.float64, torch.int64) for v in got.values())
    assert gap(starts[0], starts[2]) > 0.01 < gap(starts[0], fed.task.initial)
    same = ragged(FedProto(), Tiny(True), engine=engine)
    assert identical(same.method.enrol(RunClient(same.task, 2, 0)).net, same.task.initial)


@engines
def test_means_read_augmented_samples_from_their_own_stream(engine: str) -> None:
    fed = ragged(FedProto(), Tiny(True), engine=engine, augment=Shift(), rounds=2).run()
    x, y, parts = data()
    for i, upload in enumerate(fed.last.uploads):
        shift = rng.private("fedproto", "survey", 0, 1, i).random_sample((SIZES[i], 1))
        net = fed.task.net.bound("eval")
        h = net.embed(fed.own(i).net, x[parts[i]] + torch.from_numpy(shift))
        for c in upload.proto.has.nonzero()[:, 0].tolist():
            close(upload.proto.values[c], h[y[parts[i]] == c].mean(0), 11)


@engines
def test_timing(engine: str) -> None:
    """Training is the same; means on the way are over what was drawn, by batch statistics, in one or all epochs."""

    def fed(timing: str, **kw: Any) -> Harnessed:
        return ragged(FedProto(proto_timing=timing), Tiny(True), engine=engine, **{"rounds": 1, **kw}).run()

    runs = [fed(t) for t in ("final_pass", "last_epoch", "all_epochs")]
    assert all(identical(runs[0].own(i).net, r.own(i).net) for r in runs for i in range(7))
    sent = [r.last.uploads[0].proto for r in runs]
    assert gap(sent[0].values, sent[1].values) > 1e-3 < gap(sent[1].values, sent[2].values)
    once = [fed(t, local_epochs=1) for t in ("last_epoch", "all_epochs")]
    assert identical([u.proto for u in once[0].last.uploads], [u.proto for u in once[1].last.uploads])


@engines
def test_what_was_not_read_stays_home(engine: str) -> None:
    """Three samples, batches of two, the short one dropped: the last epoch misses the sample of class 1."""
    seed = next(s for s in range(99) if [v[2] for v in orders(s)] == [0, 2])
    x, y = torch.tensor([[1.0, 0], [3, 0], [0, 5]]).double(), torch.tensor([0, 0, 1])
    sent = {}
    for timing in READINGS["proto_timing"]:
        fed = federation(
            FedProto(proto_timing=timing, proto_weighting="count"), Identity(3, 2), x, y, [range(3)], engine=engine,
            local_epochs=2, batch_size=2, drop_last=True, seed=seed,
        )  # fmt: skip
        sent[timing] = fed.run().last.uploads[0]
    assert sent["final_pass"].n.tolist() == [2, 1, 0] and sent["final_pass"].proto.values[0].tolist() == [2, 0]
    assert sent["last_epoch"].proto.has.tolist() == [True, False, False] and sent["last_epoch"].n.tolist() == [2, 0, 0]
    assert sent["last_epoch"].proto.values[0].tolist() == [2, 0]
    assert sent["all_epochs"].n.tolist() == [2, 1, 0]  # what it has, not how often that was read
    close(sent["all_epochs"].proto.values[:2], [[(3 + 1 + 3) / 3, 0], [0, 5]])


def orders(seed: int) -> list[list[int]]:
    """The two permutations of the three samples."""
    stream = rng.train(seed, 0, 0)
    return [stream.permutation(3).tolist() for _ in range(2)]


@engines
def test_absent_class(engine: str) -> None:
    draws = [[2, 5], [1], [0]]  # class 4 is in round 0 alone, client 1 has class 0 alone
    kept, dropped = (ragged(FedProto(absent_class=a), engine=engine, draws=draws) for a in ("keep_old", "drop"))
    kept.play(0)
    dropped.play(0)
    first = kept.shared.proto
    assert identical(first, dropped.shared.proto) and bool(first.has[4])
    kept.play(1)
    dropped.play(1)
    assert torch.equal(kept.shared.proto.values[1:], first.values[1:]) and torch.equal(kept.shared.proto.has, first.has)
    assert dropped.shared.proto.has.tolist() == [True] + [False] * 4
    assert gap(kept.shared.proto.values[0], first.values[0]) > 1e-6
    dropped.play(2)
    assert not dropped.shared.proto.has[4] and dropped.shared.proto.has[:4].sum() > 1  # until seen again


@engines
@pytest.mark.parametrize("least", [1, 3, 6, 99])
def test_min_count(engine: str, least: int) -> None:
    fed = ragged(FedProto(min_count=least, proto_weighting="count"), engine=engine, rounds=1).run()
    for i, upload in enumerate(fed.last.uploads):
        counts = fed.task.counts[i]
        assert torch.equal(upload.proto.has, counts >= least)
        assert torch.equal(upload.n, counts * (counts >= least))
    assert (least == 99) is not bool(fed.shared.proto.has.any())


@engines
def test_a_relu_more(engine: str) -> None:
    """It stands before the output layer and before the prototypes; a net with a ReLU there does not notice."""
    net = Tiny()
    fed = ragged(FedProto(embed_relu="add"), net, engine=engine, rounds=2).run()
    assert (fed.shared.proto.values >= 0).all()
    assert (ragged(FedProto(), net, engine=engine, rounds=1).run().shared.proto.values < 0).any()
    x, found = data()[0], fed.personal()[0]
    h = net.embed(found.tree.net, x).relu()
    close(fed.scores(found, x)["head"], net.classify(found.tree.net, h, h), 12)
    near = [toy.toy(FedProto(embed_relu=e), net=Mapped(None), engine=engine, rounds=1).run() for e in ("as_net", "add")]
    assert identical(toy.everything(near[0]), toy.everything(near[1]))


@engines
def test_feature_maps_are_the_prototypes(engine: str) -> None:
    fed = toy.toy(FedProto(embed="feature_map"), net=Mapped(), engine=engine, rounds=2, augment=False).run()
    assert fed.shared.proto.values.shape == (toy.CLASSES, 5 * 4 * 4)
    i = fed.last.ids[0]
    part, net = fed.task.parts[i], fed.task.net.bound("eval")
    maps = net.feature_map(fed.own(i).net, fed.task.x[part] if fed.task.transform is None else
                           fed.task.pipeline.test(fed.task.x[part]))  # fmt: skip
    for c in fed.last.uploads[0].proto.has.nonzero()[:, 0].tolist():
        close(fed.last.uploads[0].proto.values[c], maps.flatten(1)[fed.task.y[part] == c].mean(0), 10)
    found = fed.personal()[i]
    x = fed.task.pipeline.test(toy.images()[0][:20])
    scores = fed.scores(found, x)
    far = (net.feature_map(found.tree.net, x).flatten(1)[:, None] - fed.shared.proto.values).norm(dim=-1)
    close(scores["proto"], torch.where(fed.shared.proto.has, -far, -torch.inf), 10)
    close(scores["head"], net(found.tree.net, x), 10)
    pooled = toy.toy(FedProto(), net=Mapped(), engine=engine, rounds=1)
    assert pooled.shared.proto.values.shape == (toy.CLASSES, 7)  # what the output layer reads


@engines
def test_feature_map_without_penalty_trains_alike(engine: str) -> None:
    runs = [toy.toy(FedProto(embed=e, lam=0.0), net=Mapped(), engine=engine, rounds=1).run() for e in READINGS["embed"]]
    assert gap([runs[0].own(i) for i in range(7)], [runs[1].own(i) for i in range(7)]) < 1e-12
    assert [r.last.samples for r in runs] == [runs[0].last.samples] * 2


@engines
def test_shared_models(engine: str) -> None:
    """none: nothing travels; fedavg_body: all but the output layer is averaged; fedavg_all: everything."""
    kw: dict[str, Any] = {"engine": engine, "draws": [[0, 2], [0, 2], [3, 4]]}
    none = ragged(FedProto(), Tiny(True), **kw).run()
    assert list(none.shared) == ["proto"] == list(none.last.uploads[0])
    for share, names in (("fedavg_body", r"(?!head\.)"), ("fedavg_all", "")):
        fed = ragged(FedProto(share_model=share), Tiny(True), **kw)
        assert list(fed.shared.net) == list(fed.task.initial.only(names))
        fed.play(0)
        fed.play(1)
        sizes = [SIZES[0], SIZES[2]]
        for k, v in fed.shared.net.items():
            mine = [fed.own(i).net[k] for i in (0, 2)]
            if v.is_floating_point():
                close(v, sum(n * w for n, w in zip(sizes, mine)) / sum(sizes), 12)
        before = {i: fed.own(i).net for i in (0, 2)}
        fed.play(2)
        assert all(identical(fed.own(i).net, w) for i, w in before.items())  # idle: nothing is loaded into them
        assert fed.global_model() is None
    heads = [
        ragged(FedProto(share_model=s), **kw).run().own(3).net["head.weight"] for s in ("fedavg_body", "fedavg_all")
    ]
    assert gap(*heads) > 1e-6  # client 3 comes with its own output layer, or with the average


# ---- personal models ---------------------------------------------------------------------------------------


@engines
def test_which_prototypes_a_personal_model_has(engine: str) -> None:
    draws = [[0, 1, 2], [0, 3], [3, 4]]
    kw: dict[str, Any] = {"engine": engine, "draws": draws, "pm_clients": "all", "metrics": ("gm", "pm_v")}
    runs = {which: ragged(FedProto(pm_proto=which), **kw) for which in READINGS["pm_proto"]}
    sent: list[Rows] = []
    for t in range(3):
        for fed in runs.values():
            fed.play(t)
        assert identical(runs["updated"].shared, runs["train_time"].shared)  # nothing but the evaluation differs
        sent.append(runs["updated"].shared.proto)
        models = {which: fed.personal() for which, fed in runs.items()}
        assert all(list(m) == list(range(7)) for m in models.values())
        last = {i: max((s for s in range(t + 1) if i in draws[s]), default=None) for i in range(7)}
        for i in range(7):
            updated, trained = models["updated"][i], models["train_time"][i]
            assert identical(updated.tree.proto, sent[-1]) and identical(updated.tree.net, trained.tree.net)
            if not last[i]:  # it never met the server, or did in round 0, when no class was known
                assert "proto" not in trained.tree
                assert runs["train_time"].scores(trained, data()[0])["proto"] is None
            else:
                assert identical(trained.tree.proto, sent[last[i] - 1])
    assert identical(runs["updated"].personal()[6].tree.net, runs["updated"].task.initial)
    assert all("proto" not in runs["updated"].own(i) for i in range(7))


@engines
def test_random_prototypes_are_known_in_round_0(engine: str) -> None:
    fed = ragged(FedProto(proto_init="rand_uniform", pm_proto="train_time"), engine=engine, rounds=1)
    drawn = fed.shared.proto
    models = fed.run().personal()
    assert all(identical(m.tree.proto, drawn) for m in models.values())


@engines
def test_candidates(engine: str) -> None:
    every, own = (
        ragged(FedProto(proto_candidates=c), engine=engine, rounds=1).run() for c in READINGS["proto_candidates"]
    )
    assert identical(state(every), state(own))
    x = data()[0]
    for i, model in own.personal().items():
        scores, wide = own.scores(model, x), every.scores(every.personal()[i], x)
        has = own.task.counts[i] > 0
        assert torch.equal(torch.isfinite(scores["proto"]).all(0), has)
        assert torch.equal(scores["proto"][:, has], wide["proto"][:, has])
        assert torch.equal(scores["head"], wide["head"])
        assert model.only == {"proto": ("v",)} and not every.personal()[i].only
        if i == 1:
            assert (scores["proto"].argmax(1) == 0).all()  # a single class: always right on its own test data
    assert set(own.personal()[1].tree.proto.has.tolist()) == {True, False}
    head = ragged(FedProto(proto_candidates="own_known", predict="head"), engine=engine, rounds=1).run()
    assert head.personal()[0].only == {"proto": ("v",)}  # whichever is the headline


def test_undefined_weightings_are_left_out_of_the_record() -> None:
    fed, found = model(proto_candidates="own_known")
    test = TestSet(torch.tensor([[2.0, 2], [0, 2], [5, 5]]), torch.tensor([0, 1, 2]), Plain(), 3)  # type: ignore[arg-type]
    row = personal_row({0: score(found, fed.task.net, test)}, np.array([[1, 1, 0]]), test.per_class())
    assert row["pm_v"] == 1 and row["pm_l"] is None and row["pm_uniform"] is None
    assert row["pm_scores"]["head"]["l"] is not None


@engines
def test_refreshed_models(engine: str) -> None:
    """Everybody trains once more from its own weights towards the final prototypes, which then decide."""
    for which in READINGS["pm_proto"]:
        fed = ragged(FedProto(pm_proto=which), engine=engine, participation=0.5).run()
        before = state(fed)
        models = fed.refreshed()
        assert sorted(models) == list(range(7)) and identical(before, state(fed))
        assert all(identical(m.tree.proto, fed.shared.proto) for m in models.values())
        assert all(gap(m.tree.net, (fed.own(i) or Tree(net=fed.task.initial)).net) > 1e-4 for i, m in models.items())


# ---- equal by construction ---------------------------------------------------------------------------------


def test_weightings() -> None:
    even = {"rows": (TWO, TWO[:5] + [[1.0, 1]] * 5), "labels": ((10,), (10,))}
    runs = {w: averaged("loop", proto_weighting=w, **even).shared.proto.values for w in READINGS["proto_weighting"]}
    close(runs["uniform"], runs["count"], 12)
    close(runs["count"], 2 * runs["paper_literal"], 12)  # two owners
    odd = {w: averaged("loop", proto_weighting=w).shared.proto.values for w in READINGS["proto_weighting"]}
    close(odd["count"], odd["paper_literal"] * torch.tensor([[2.0], [1], [1]]), 12)
    assert gap(odd["uniform"], odd["count"]) > 0.1


@engines
def test_self_is_mask_where_everybody_is_known(engine: str) -> None:
    def apart(draws: Any = None, **options: Any) -> float:
        a, b = (ragged(FedProto(lam=2.0, reg_missing=r, **options), engine=engine, rounds=2, draws=draws).run()
                for r in READINGS["reg_missing"])  # fmt: skip
        return gap(state(a), state(b))

    late = [[1], [0]]  # client 1 has class 0 alone
    assert apart() < 1e-12 > apart(reg_form="sample_sq_l2")
    assert apart(late, proto_init="rand_uniform") < 1e-12 > apart(late, reg_form="class_mean_l2")
    assert apart(late) > 1e-6 < apart(min_count=5)


@engines
def test_keep_old_is_drop_when_all_take_part(engine: str) -> None:
    runs = [ragged(FedProto(absent_class=a), engine=engine, rounds=2).run() for a in READINGS["absent_class"]]
    assert identical(state(runs[0]), state(runs[1]))


@engines
def test_mse_is_the_squared_distance_over_d(engine: str) -> None:
    for missing in READINGS["reg_missing"]:
        runs = [ragged(FedProto(lam=lam, reg_form=f, reg_missing=missing), engine=engine, rounds=2).run()
                for lam, f in ((1.5, "mse"), (0.5, "sample_sq_l2"))]  # fmt: skip
        assert gap(state(runs[0]), state(runs[1])) < 1e-12


def test_candidates_are_the_same_for_a_client_with_every_known_class() -> None:
    x = torch.randn(20, 2, generator=torch.Generator().manual_seed(0)).double()
    (fed, every), (_, own) = (model(proto_candidates=c) for c in READINGS["proto_candidates"])
    assert torch.equal(fed.scores(every, x)["proto"], fed.scores(own, x)["proto"])


def test_the_head_hangs_on_no_prototypes() -> None:
    x = torch.randn(20, 2, generator=torch.Generator().manual_seed(0)).double()
    options = itertools.product(READINGS["proto_candidates"], READINGS["pm_proto"], ((True,) * 3, (False,) * 3))
    scores = [fed.scores(m, x)["head"] for c, p, has in options
              for fed, m in [model(proto_candidates=c, pm_proto=p, has=has)]]  # fmt: skip
    assert all(torch.equal(s, scores[0]) for s in scores)


@engines
def test_without_a_weight_everybody_trains_alone(engine: str) -> None:
    """lam=0: the prototypes are measured but move nothing."""
    runs = [ragged(FedProto(lam=0.0, proto_init=i), engine=engine, rounds=2).run() for i in READINGS["proto_init"]]
    assert all(identical(runs[0].own(i), runs[1].own(i)) for i in range(7))


# ---- traps -------------------------------------------------------------------------------------------------


@engines
def test_no_server_weights_are_loaded(engine: str) -> None:
    """Clients differ and go on from their own weights, however long they paused."""
    fed = ragged(FedProto(), engine=engine, draws=[[0, 2], [2, 3], [0, 3]])
    fed.play(0)
    mine = {i: fed.own(i).net for i in (0, 2)}
    assert gap(mine[0], mine[2]) > 1e-3
    fed.play(1)
    assert identical(fed.own(0).net, mine[0])
    alone = ragged(FedProto(lam=0.0), engine=engine, draws=[[0], [2], [0]]).run()
    other = ragged(FedProto(lam=0.0), engine=engine, draws=[[0], [4], [0]]).run()
    assert identical(alone.own(0), other.own(0))


@engines
def test_buffers_stay_with_their_clients(engine: str) -> None:
    fed = ragged(FedProto(), Tiny(True), engine=engine).run()
    batches = [-(-n // 8) for n in SIZES]
    assert [int(fed.own(i).net["encoder.num_batches_tracked"]) for i in range(7)] == [3 * 2 * b for b in batches]
    local = ragged(FedProto(), Tiny(True), engine=engine, bn_buffers="local").run()
    assert all(identical(local.own(i), fed.own(i)) for i in range(7)) and local.bytes == fed.bytes


def test_a_class_that_nobody_has_is_never_known() -> None:
    """Its distance is no infinity in a computation: scores of the others stay finite."""
    fed = averaged("loop")
    scores = fed.scores(fed.personal()[0], torch.randn(9, 2).double())["proto"]
    assert torch.isfinite(scores[:, :2]).all() and (scores[:, 2] == -torch.inf).all()


def test_tables_of_another_width_are_refused() -> None:
    fed = averaged("loop")
    uploads = [Tree(proto=table([[1.0, 0, 0]] * 3, [True] * 3))]
    with pytest.raises(RuntimeError, match=r"an uploaded table is not of shape \[3, 2\]"):
        fed.method.aggregate(RunServer(fed.task, [0], 1), fed.shared, fed.private, uploads)


@engines
def test_collapse_can_be_seen(engine: str) -> None:
    """Recorded from round 1 on: the smallest distance of two prototypes that were received."""
    fed = ragged(FedProto(), engine=engine).run()
    assert "proto_gap" not in fed.terms[0]
    again = ragged(FedProto(), engine=engine)
    for t in range(2):
        wanted = torch.pdist(again.shared.proto.values[again.shared.proto.has])
        again.play(t)
        if t:
            assert again.last.terms["proto_gap"] == pytest.approx(float(wanted.min()))
    lone = ragged(FedProto(), engine=engine, draws=[[1]] * 3).run()  # one class: nothing to compare
    assert all("proto_gap" not in terms for terms in lone.terms)


@engines
def test_a_single_sample_is_its_own_prototype(engine: str) -> None:
    fed = averaged(engine, rows=([[1.0, 3]],), labels=((1,),))
    assert fed.last.uploads[0].proto.values[0].tolist() == [1, 3]
    assert not averaged(engine, rows=([[1.0, 3]],), labels=((1,),), min_count=2).shared.proto.has.any()


def test_auxiliary_classifier_trains_along() -> None:
    net = build("mlp", classes=3, shape=(8, 8, 1), aux_classifier=True)
    x = torch.from_numpy(np.random.RandomState(3).standard_normal((6, 1, 8, 8)))
    fed = federation(FedProto(), net, x, torch.tensor([0, 1, 2] * 2), [range(6)])
    before = fed.task.initial["aux.weight"]
    fed.run()
    assert gap(before, fed.own(0).net["aux.weight"]) > 1e-4


# ---- memory, bytes, the record -----------------------------------------------------------------------------


def symbols(fed: Harnessed, i: int, known: int) -> dict[str, float]:
    """The bill's symbols for one client; numbers of buffers belong to their part, an integer counts as two floats."""
    count, m = fed.task.net.count(), fed.method
    p, h = count["total"] + count["buffers"] + 2 * count["counters"], count["head"]
    return {"P": p, "B": p - h, "H": h, "K": toy.CLASSES, "K_t": known, "K_i": int((fed.task.counts[i] >= m.min_count).sum()),
            "q": fed.task.net.dim, "m": 5 * 4 * 4, "n": SIZES[i], "E": fed.protocol.local_epochs, "int": 2}  # fmt: skip


@engines
@pytest.mark.parametrize(
    "options",
    [{}, {"proto_weighting": "count", "pm_proto": "train_time", "proto_timing": "last_epoch"},
     {"share_model": "fedavg_body", "proto_timing": "all_epochs", "min_count": 4},
     {"share_model": "fedavg_all", "embed": "feature_map", "pm_proto": "train_time"}],
)  # fmt: skip
def test_bill(engine: str, options: dict[str, Any]) -> None:
    fed = toy.toy(FedProto(**options), net=Mapped(), engine=engine, rounds=2)
    bill = fed.method.bill()
    for t in range(2):
        known = int(fed.shared.proto.has.sum())
        fed.play(t)
        told = [symbols(fed, i, known) for i in fed.last.ids]

        def each(expression: str, told: list[dict[str, float]] = told) -> list[float]:
            return [eval(expression, {}, mine) for mine in told]

        assert fed.last.bytes == {"down": 4 * sum(each(bill.down)), "up": 4 * sum(each(bill.up)), "once": 0}
        assert fed.last.samples == {"trained": sum(each(bill.trained)), "forward": sum(each(bill.forward))}
        assert fed.last.state_bytes == 4 * max(each(bill.state))
    assert known > 0


def test_bytes_of_the_paper() -> None:
    """50 floats per class: only the rows that are there travel."""
    sent = Tree(proto=Rows(torch.zeros(10, 50), torch.arange(10) < 4))
    assert nbytes(sent) == 4 * 50 * 4
    assert ragged(FedProto(), rounds=1).run().bytes[0]["down"] == 0  # nothing is known before round 0


def test_recorded_prototypes() -> None:
    fed = ragged(FedProto(), rounds=1).run()
    shown = fed.method.prototypes(fed.shared, fed.private)
    assert identical(shown, fed.shared.proto)
    rows, labels = fed.method.client_prototypes(fed.last.uploads[1])
    assert labels.tolist() == [0] and torch.equal(rows[0], fed.last.uploads[1].proto.values[0])


@engines
def test_resumes_from_its_trees(engine: str) -> None:
    def made() -> Harnessed:
        return ragged(FedProto(pm_proto="train_time", share_model="fedavg_body"), engine=engine, participation=0.6)

    whole, half, rest = made().run(), made(), made()
    half.play(0)
    rest.shared, rest.private, rest.memory = half.shared, half.private, half.memory
    rest.play(1)
    rest.play(2)
    assert identical(state(whole), state(rest))
    assert identical([m.tree for m in whole.personal().values()], [m.tree for m in rest.personal().values()])
