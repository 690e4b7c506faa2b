"""FedNH: the test vectors, every option, what is equal by construction, traps, bytes."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import ENGINES, Harnessed, Identity, batch, federation, view
from protofl.methods import spread
from protofl.methods.fednh import FedNH
from ragged import CLASSES, SIZES, Shift, Tiny, by_hand, data, gap, identical, ragged, state
from torch import Tensor

from protofl import rng
from protofl.errors import UserError
from protofl.handles import RunClient, RunTask
from protofl.nets import build
from protofl.options import fields, option
from protofl.protocol import Protocol
from protofl.registry import Spec
from protofl.tree import Rows, Tree, nbytes

engines = pytest.mark.parametrize("engine", ENGINES)
EYE = torch.eye(3, dtype=torch.float64)


def close(got: Any, wanted: Any, digits: int = 6) -> None:
    """Equal to so many decimals, as the vectors are given."""
    got = torch.as_tensor(got, dtype=torch.float64)
    assert torch.allclose(got, torch.as_tensor(wanted, dtype=torch.float64), rtol=0, atol=0.51 * 10**-digits), got


# ---- vector 4: the start -----------------------------------------------------------------------------------


def start(classes: int, dim: int, seed: int = 0, **options: Any) -> Tensor:
    """W^0 [K, d] of a run."""
    net = Identity(classes, dim)
    protocol = Protocol(seed=seed, precision="fp64", model="mlp", clients=1)
    task = RunTask(net, torch.zeros(1, dim), torch.zeros(1, dtype=torch.long), [torch.tensor([0])], protocol)
    return FedNH(**options).start(task)[0].proto  # type: ignore[no-any-return]


def smallest_square(w: Tensor) -> float:
    """The smallest squared distance of two rows."""
    return float(torch.pdist(w).min() ** 2)


def test_simplex_before_rotation() -> None:
    first = [0.816497, -0.408248, -0.408248]
    close(spread.simplex(3, 3), [first, first[-1:] + first[:-1], first[-2:] + first[:-2]])
    close(spread.simplex(3, 2), [[0.866025, 0.5], [-0.866025, 0.5], [0, -1]])


def test_starts_of_run_0() -> None:
    close(start(3, 3)[0], [-0.433613, 0.019701, -0.900884])
    close(start(3, 3, proto_init="orthogonal")[0], [-0.371413, -0.560987, -0.739828])


@pytest.mark.parametrize(("classes", "dim"), [(10, 192), (10, 10), (10, 9), (5, 4), (2, 1)])
def test_simplex_while_it_fits(classes: int, dim: int) -> None:
    w = start(classes, dim)
    off = torch.full((classes, classes), -1 / (classes - 1), dtype=torch.float64)
    assert torch.allclose(w @ w.T, off.fill_diagonal_(1), atol=1e-12)


@pytest.mark.parametrize(
    ("classes", "dim", "wanted"),
    [(100, 84, 2.0), (6, 3, 2.0), (5, 3, 2.0), (5, 2, 1.381966), (7, 3, 1.579656), (12, 3, 1.105573)],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_smallest_distance(classes: int, dim: int, wanted: float, seed: int) -> None:
    assert smallest_square(start(classes, dim, seed)) == pytest.approx(wanted, abs=1e-6)


def test_distance_of_the_code_is_2_at_any_size() -> None:
    for classes, wanted in ((10, 2.2222), (100, 2.0202)):
        assert smallest_square(start(classes, 192)) == pytest.approx(wanted, abs=1e-4)
        rows = start(classes, 192, proto_init="orthogonal")
        assert torch.allclose(rows @ rows.T, torch.eye(classes).double(), atol=1e-12)
    loose = start(10, 4, proto_init="random_unit")
    assert torch.allclose(loose.norm(dim=1), torch.ones(10).double()) and smallest_square(loose) < 1
    drawn = rng.private("fednh", "init", 0, -1, -1).standard_normal((10, 4))
    close(loose, drawn / np.linalg.norm(drawn, axis=1, keepdims=True), 12)


def test_seeds_give_other_rotations_and_equal_seeds_equal_ones() -> None:
    for classes in (3, 7):
        assert torch.equal(start(classes, 3, 1), start(classes, 3, 1))
        assert gap(start(classes, 3, 0), start(classes, 3, 1)) > 0.01


# ---- vectors 1 and 2: class means and the moving prototypes ------------------------------------------------

A = [[3.0, 4, 0], [0, 1, 0], [8, 6, 0], [0, 0, 1]]  # classes 0 0 0 1
B = [[2.0, 0, 0]]  # class 0
FIXED_BODY = {"scale_trainable": False, "scale_init": 1}


def moved(engine: str, rows: tuple[Any, ...] = (A, B), labels: Any = ((0, 0, 0, 1), (0,)), **options: Any) -> Harnessed:
    """One round from W = I with nothing that trains."""
    x = torch.cat([torch.tensor(r).double() for r in rows])
    ends = np.cumsum([0, *map(len, rows)])
    parts = [range(a, b) for a, b in itertools.pairwise(ends)]
    y = torch.tensor([c for own in labels for c in own])
    fed = federation(FedNH(**{**FIXED_BODY, **options}), Identity(3, 3), x, y, parts, engine=engine)
    fed.shared = fed.shared | Tree(proto=EYE.clone())
    return fed.run()


@engines
def test_class_means(engine: str) -> None:
    upload = moved(engine).last.uploads[0]
    close(upload.m.values[0], [1.511613, 2.591337, 0])
    assert upload.n.tolist() == [3, 1, 0] and upload.n.dtype == torch.int64
    assert upload.m.has.tolist() == [True, True, False]
    raw = moved(engine, client_proto_norm="raw_mean_unit").last.uploads[0]
    close(raw.m.values[0] / 3, [0.707107, 0.707107, 0])
    mean = moved(engine, client_proto_norm="unit_mean").last.uploads[0]
    close(mean.m.values[0] / 3, [0.466667, 0.8, 0])
    confident = moved(engine, proto_client_weight="confidence").last.uploads[0]
    close(confident.m.values[0] / 3, [0.596883, 0.802329, 0])


W1 = (0, 0.993884, 0.110432)
VARIANTS: list[tuple[dict[str, Any], Any, Any]] = [
    ({}, (0.997269, 0.073856, 0), W1),
    ({"proto_client_weight": "uniform_present"}, (0.998728, 0.050413, 0), W1),
    ({"proto_client_weight": "uniform_all"}, (0.998728, 0.050413, 0), W1),
    ({"proto_client_weight": "confidence"}, (0.999352, 0.036004, 0), W1),
    ({"proto_pre_normalize": False}, (0.997744, 0.067135, 0), W1),
    ({"proto_client_weight": "uniform_present", "proto_pre_normalize": False}, (0.999021, 0.044244, 0), W1),
    (
        {"proto_client_weight": "uniform_all", "proto_pre_normalize": False},
        (0.999021, 0.044244, 0),
        (0, 0.998460, 0.055470),
    ),
    ({"proto_post_normalize": False}, (0.969597, 0.071807, 0), (0, 0.9, 0.1)),
    ({"rho": 0.1}, (0.747107, 0.664703, 0), (0, 0.110432, 0.993884)),
    ({"client_proto_norm": "unit_mean"}, (0.997357, 0.072652, 0), W1),
    ({"client_proto_norm": "raw_mean_unit"}, (0.998368, 0.057105, 0), W1),
    *[({"rho": 1.0, "proto_client_weight": w}, (1, 0, 0), (0, 1, 0)) for w in ("count", "confidence")],
]


@engines
@pytest.mark.parametrize(("options", "first", "second"), VARIANTS)
def test_prototypes_move(engine: str, options: dict[str, Any], first: Any, second: Any) -> None:
    proto = moved(engine, **options).shared.proto
    close(proto[:2], [first, second])
    assert torch.equal(proto[2], EYE[2])  # nobody has class 2: bit for bit


# ---- vector 3: logits, loss, gradients ---------------------------------------------------------------------


class Shifted(Identity):
    """Features are the inputs plus a shift that is learnt: its gradient is that of the embedding."""

    def init(self, stream: Any) -> Tree:
        return Tree({"encoder.shift": torch.zeros(self.dim)}) | super().init(stream)

    def encode(self, w: Tree, x: Tensor) -> Tensor:
        return x + w["encoder.shift"]


def stepped(engine: str, rows: Any, labels: Any, proto: Tensor = EYE, **kw: Any) -> Harnessed:
    """One step of one client, rate 1: start - weights = gradient. The prototypes stay unless rho says so."""
    options = {"rho": 1.0, "scale_init": 20, **{k: kw.pop(k) for k in list(kw) if k in fields(FedNH)}}
    x = torch.tensor(rows).double()
    fed = federation(
        FedNH(**options), Shifted(3, 3), x, torch.tensor(labels), [range(len(x))], engine=engine,
        **{"local_epochs": 1, "client_lr": 1.0, **kw},
    )  # fmt: skip
    fed.shared = fed.shared | Tree(proto=proto.clone())
    return fed.run()


@engines
def test_loss_and_gradients(engine: str) -> None:
    fed = stepped(engine, [[1.0, 2, 2]], [1])
    close(fed.terms[0]["ce"], 0.693783)
    assert fed.terms[0]["scale"] == 20
    net = fed.shared.net
    close([*net["encoder.shift"].tolist(), float(net.scale) - 20], [-0.004710, 3.334511, -3.332156, 0.000212])
    close(stepped(engine, [[1.0, 2, 2]], [1], scale_init=1).terms[0]["ce"], 0.999356)


def test_logits() -> None:
    method, net = FedNH(), Identity(3, 3).bound("eval")
    tree = Tree(net=Tree(scale=torch.tensor([20.0]).double()), proto=EYE)
    close(method.scores(net, tree, torch.tensor([[1.0, 2, 2]]).double()), [[6.666667, 13.333333, 13.333333]])


# ---- the whole method by a plain script --------------------------------------------------------------------


def unit(v: Tensor) -> Tensor:
    return v / v.norm(dim=-1, keepdim=True)


@engines
def test_three_rounds_by_hand(engine: str) -> None:
    fed = ragged(FedNH(scale_init=20), engine=engine, participation=0.6)
    fed.task.initial, proto = fed.shared.net, fed.shared.proto
    net, means = Tiny(), []

    def embed(w: Tree, x: Tensor) -> Tensor:
        return unit(net.embed(w, x))

    def loss(w: Tree, x: Tensor, y: Tensor, received: Tree, t: int, i: int) -> Tensor:
        return F.cross_entropy(w["scale"] * embed(w, x) @ proto.T, y)

    def trained(w: Tree, t: int, i: int) -> None:
        x, y = fed.task.x[fed.task.parts[i]], fed.task.y[fed.task.parts[i]]
        r = embed(w, x)
        means.append({c: (int((y == c).sum()), unit(r[y == c].mean(0))) for c in y.unique().tolist()})

    def done(t: int) -> None:
        nonlocal proto
        proto = proto.clone()
        for c in range(CLASSES):
            sent = [m[c] for m in means if c in m]
            if sent:
                m = unit(sum(n * mu for n, mu in sent) / sum(n for n, _ in sent))
                proto[c] = unit(0.9 * proto[c] + 0.1 * m)
        means.clear()

    wanted = by_hand(fed, loss, trained, done)
    fed.run()
    assert gap(fed.shared.net.like(wanted), wanted) < 1e-12
    assert gap(fed.shared.proto, proto) < 1e-12


OPTION_SETS: list[dict[str, Any]] = [
    {},
    {"rho": 1.0},
    {"proto_client_weight": "confidence", "proto_transform": "test"},
    {"proto_timing": "last_epoch", "client_proto_norm": "raw_mean_unit"},
    {"mask_absent_logits": True, "proto_client_weight": "uniform_all", "proto_pre_normalize": False},
    {"embed_layer": "encoder", "proto_post_normalize": False, "client_proto_norm": "unit_mean"},
    {"scale_weight_decay": False, "proto_init": "random_unit"},
]


@pytest.mark.parametrize("options", OPTION_SETS)
@pytest.mark.parametrize("norm", [False, True])
def test_engines_agree(options: dict[str, Any], norm: bool) -> None:
    runs = [ragged(FedNH(**options), Tiny(norm), engine=e, augment=Shift(), grad_clip_norm=0.3).run() for e in ENGINES]
    assert gap(state(runs[0]), state(runs[1])) < 1e-11


# ---- options -----------------------------------------------------------------------------------------------

READINGS = {
    "preset": ("paper", "official_code"),
    "rho": (0.9, 0.1, 0.3, 0.5, 0.7, 1.0),
    "proto_init": ("maxmin", "orthogonal", "random_unit"),
    "proto_client_weight": ("count", "uniform_present", "uniform_all", "confidence"),
    "client_proto_norm": ("unit_mean_unit", "unit_mean", "raw_mean_unit"),
    "proto_pre_normalize": (True, False),
    "proto_post_normalize": (True, False),
    "scale_init": ("by_net", 1, 20, 30),
    "scale_trainable": (True, False),
    "scale_weight_decay": (True, False),
    "proto_transform": ("train", "test"),
    "proto_timing": ("final_pass", "last_epoch"),
    "pm_proto": ("train_time", "updated"),
    "mask_absent_logits": (False, True),
    "embed_relu": (True, False),
    "embed_layer": ("head_input", "encoder"),
}


def test_all_options_are_there() -> None:
    table = {name: option(field) for name, field in fields(FedNH).items()}
    assert {name: o.readings for name, o in table.items()} == READINGS
    assert all(o.why and o.source for o in table.values())
    assert set(FedNH.open_fields) <= set(fields(Protocol))


def test_where_the_scale_starts() -> None:
    def scale(name: str, **options: Any) -> float:
        net = build(name, classes=10, shape=(16, 16, 3))
        protocol = Protocol(model=name, clients=1)
        task = RunTask(net, torch.zeros(1), torch.zeros(1, dtype=torch.long), [torch.tensor([0])], protocol)
        return float(FedNH(**options).start(task)[0].net.scale)

    assert [scale(n) for n in ("cnn_fednh", "mlp", "resnet18_gn2")] == [1, 1, 20]
    assert [scale("mlp", scale_init=s) for s in (1, 20, 30)] == [1, 20, 30]


@engines
def test_scale_trains_and_decays(engine: str) -> None:
    def scale(**kw: Any) -> float:
        return float(stepped(engine, [[1.0, 2, 2]], [1], **kw).shared.net.scale)

    gradient = 20 - scale()
    assert scale(weight_decay=0.1) == pytest.approx(20 - gradient - 2)
    assert scale(weight_decay=0.1, scale_weight_decay=False) == 20 - gradient
    assert scale(weight_decay=0.1, scale_trainable=False) == 20


@engines
def test_scale_shares_the_clip(engine: str) -> None:
    free, tight = stepped(engine, [[1.0, 2, 2]], [1]), stepped(engine, [[1.0, 2, 2]], [1], grad_clip_norm=1.0)
    g = torch.cat([free.shared.net["encoder.shift"], free.shared.net.scale - 20])
    wanted = g / (g.norm() + 1e-6)
    close(torch.cat([tight.shared.net["encoder.shift"], tight.shared.net.scale - 20]), wanted, 10)


def test_decay_of_the_scale_moves_nothing_that_does_not_train() -> None:
    fixed = [ragged(FedNH(scale_trainable=False, scale_weight_decay=d)).run() for d in (True, False)]
    assert identical(state(fixed[0]), state(fixed[1]))


@engines
def test_class_means_read_augmented_samples_from_their_own_stream(engine: str) -> None:
    x, y, parts = data()
    net = Identity(CLASSES, 6)
    runs = {
        t: federation(FedNH(proto_transform=t), net, x, y, parts, engine=engine, augment=Shift(), client_lr=0.01).run()
        for t in ("train", "test")
    }
    assert identical([u.net for u in runs["train"].last.uploads], [u.net for u in runs["test"].last.uploads])
    for t, run in runs.items():
        for i, upload in enumerate(run.last.uploads):
            shift = rng.private("fednh", "survey", 0, 0, i).random_sample((SIZES[i], 1))
            r = unit(x[parts[i]] + (torch.from_numpy(shift) if t == "train" else 0))
            for c in upload.m.has.nonzero()[:, 0].tolist():
                mine = r[y[parts[i]] == c]
                close(upload.m.values[c], len(mine) * unit(mine.mean(0)), 11)


@engines
def test_means_on_the_way_count_what_the_last_epoch_read(engine: str) -> None:
    def upload(timing: str, drop_last: bool) -> Tree:
        fed = ragged(FedNH(proto_timing=timing), engine=engine, rounds=1, drop_last=drop_last)
        return fed.run().last.uploads[0]

    final, way, dropped = upload("final_pass", False), upload("last_epoch", False), upload("last_epoch", True)
    assert identical(final.net, way.net) and torch.equal(final.n, way.n)
    assert gap(final.m.values, way.m.values) > 1e-3
    assert int(way.n.sum()) == SIZES[0] == 23 and int(dropped.n.sum()) == 16
    assert int(upload("final_pass", True).n.sum()) == 23


@engines
def test_prototypes_of_the_personal_model(engine: str) -> None:
    for which, wanted in (("train_time", 0), ("updated", 1)):
        fed = ragged(FedNH(pm_proto=which), engine=engine, rounds=1)
        before = fed.shared.proto
        fed.run()
        models = fed.personal()
        assert all(torch.equal(m.tree.proto, (before, fed.shared.proto)[wanted]) for m in models.values())
        assert all(identical(m.tree.net, u.net) for m, u in zip(models.values(), fed.last.uploads))
    assert not torch.equal(before, fed.shared.proto)


@engines
def test_absent_classes_may_be_masked(engine: str) -> None:
    rows, labels = [[1.0, 2, 2], [3, 1, 0]], [1, 0]
    plain = stepped(engine, rows, labels, scale_init=1)
    masked = stepped(engine, rows, labels, scale_init=1, mask_absent_logits=True)
    logits = unit(torch.tensor(rows).double())
    close(masked.terms[0]["ce"], F.cross_entropy(logits[:, :2], torch.tensor(labels)), 12)
    close(plain.terms[0]["ce"], F.cross_entropy(logits, torch.tensor(labels)), 12)
    every = [stepped(engine, EYE.tolist(), [0, 1, 2], mask_absent_logits=m) for m in (False, True)]
    assert identical(every[0].shared, every[1].shared)


def images(n: int, side: int, channels: int) -> Tensor:
    return torch.from_numpy(np.random.RandomState(3).standard_normal((n, channels, side, side)))


def cnn(engine: str, classes: int = 3, name: str = "cnn_fednh", side: int = 16, **kw: Any) -> Harnessed:
    """One step of two clients with a real net."""
    options = {k: kw.pop(k) for k in list(kw) if k in fields(FedNH)}
    net = build(name, classes=classes, shape=(side, side, 3))
    y = torch.tensor([0, 1, 2, 0, 1])
    fed = federation(
        FedNH(**options), net, images(5, side, 3), y, [[0, 1, 2], [3, 4]], engine=engine, model=name,
        **{"local_epochs": 1, "client_lr": 1e-3, **kw},
    )  # fmt: skip
    return fed.run()


def test_embedding_without_relu() -> None:
    runs = {relu: [cnn(e, embed_relu=relu) for e in ENGINES] for relu in (True, False)}
    for pair in runs.values():
        assert gap(state(pair[0]), state(pair[1])) < 1e-12
    assert (runs[True][0].last.uploads[0].m.values >= 0).all()
    assert (runs[False][0].last.uploads[0].m.values < 0).any()
    assert gap(runs[True][0].shared.proto, runs[False][0].shared.proto) > 1e-4


def test_embedding_of_the_encoder() -> None:
    net = Tiny()
    whole, short = ragged(FedNH()), ragged(FedNH(embed_layer="encoder"))
    assert set(whole.shared.net) - set(short.shared.net) == {"projection.weight"}
    assert whole.shared.proto.shape == (5, 3) and short.shared.proto.shape == (5, 4)
    short.run()
    x = data()[0]
    logits = short.scores(short.global_model(), x)["network"]
    close(logits, short.shared.net.scale * unit(net.encode(short.shared.net, x)) @ short.shared.proto.T, 12)
    plain = [ragged(FedNH(embed_layer=e), Tiny(projected=None)).run() for e in ("head_input", "encoder")]
    assert identical(state(plain[0]), state(plain[1]))


@engines
def test_presets_and_refusals(engine: str) -> None:
    with pytest.raises(UserError, match="needs init=torch"):
        Spec("fednh", (("preset", "official_code"),), "fednh.cifar10").build(Protocol())
    wanted = Protocol(
        init="torch",
        init_seed=2022,
        partition_seed="run",
        client_sampling="fednh_compat",
        client_seed="shared",
    )
    made = Spec("fednh", (("preset", "official_code"),), "fednh.cifar10").build(wanted)
    assert isinstance(made, FedNH) and made.proto_init == "orthogonal"
    assert dataclasses.replace(made, preset="paper", proto_init="maxmin") == FedNH()

    tiny = build("resnet18_gn2", classes=200, shape=(64, 64, 3))
    on_tiny = wanted.replace(dataset="tiny-imagenet", model="resnet18_gn2")
    with pytest.raises(UserError, match="--set resnet_norm=none_fednh"):
        made.check(on_tiny, tiny)
    made.check(on_tiny.replace(resnet_norm="none_fednh"), tiny)
    made.check(wanted, tiny)

    small = build("simple_cnn", classes=100, shape=(32, 32, 3))
    FedNH(proto_init="orthogonal").check(Protocol(), small)  # z has 256 dimensions
    with pytest.raises(UserError, match=r"100 classes cannot have orthogonal rows in 84"):
        FedNH(proto_init="orthogonal", embed_layer="encoder").check(Protocol(), small)
    with pytest.raises(UserError, match="simple_cnn has no last ReLU"):
        FedNH(embed_relu=False).check(Protocol(), small)
    FedNH(embed_relu=False).check(Protocol(), build("cnn_fednh", classes=10, shape=(32, 32, 3)))


# ---- equal by construction ---------------------------------------------------------------------------------


def test_two_uniform_weightings_are_one_when_normalised() -> None:
    runs = [ragged(FedNH(proto_client_weight=w)).run() for w in ("uniform_present", "uniform_all")]
    assert gap(state(runs[0]), state(runs[1])) < 1e-12
    bare = [
        ragged(FedNH(proto_client_weight=w, proto_pre_normalize=False)).run()
        for w in ("uniform_present", "uniform_all")
    ]
    assert gap(bare[0].shared.proto, bare[1].shared.proto) > 1e-3


@pytest.mark.parametrize("weight", ["uniform_present", "uniform_all"])
def test_weight_of_a_single_owner_does_not_matter(weight: str) -> None:
    lone: dict[str, Any] = {"draws": [[2], [5], [1]]}
    runs = [ragged(FedNH(proto_client_weight=w), **lone).run() for w in ("count", weight)]
    assert gap(state(runs[0]), state(runs[1])) < 1e-12
    confident = [
        ragged(FedNH(proto_client_weight=w, client_proto_norm="unit_mean_unit"), rounds=1, draws=[[1]]).run()
        for w in ("count", "confidence")
    ]  # the weight does not matter; the mean is another unless all samples are equally probable
    assert gap(confident[0].last.uploads[0].n, confident[1].last.uploads[0].n) == 0


@engines
def test_confidence_of_a_single_owner_with_one_sample(engine: str) -> None:
    runs = [moved(engine, proto_client_weight=w).shared.proto[1] for w in ("count", "confidence")]
    assert gap(runs[0], runs[1]) < 1e-15


def test_normalising_a_unit_mean_changes_nothing() -> None:
    for options in ({}, {"client_proto_norm": "raw_mean_unit"}, {"proto_client_weight": "confidence"}):
        runs = [ragged(FedNH(proto_pre_normalize=p, **options), draws=[[2], [5], [1]]).run() for p in (True, False)]
        assert gap(state(runs[0]), state(runs[1])) < 1e-12


def test_a_fixed_head_has_no_use_for_prototype_options() -> None:
    base = ragged(FedNH(rho=1.0), augment=Shift()).run()
    for options in (
        {"proto_client_weight": "confidence"}, {"client_proto_norm": "unit_mean"}, {"pm_proto": "updated"},
        {"proto_pre_normalize": False}, {"proto_post_normalize": False}, {"proto_transform": "test"},
        {"proto_timing": "last_epoch"},
    ):  # fmt: skip
        other = ragged(FedNH(rho=1.0, **options), augment=Shift()).run()
        assert identical(state(base), state(other))
        assert all(identical(a.tree, b.tree) for a, b in zip(base.personal().values(), other.personal().values()))


def test_transform_without_augmentation_changes_nothing() -> None:
    runs = [ragged(FedNH(proto_transform=t)).run() for t in ("train", "test")]
    assert identical(state(runs[0]), state(runs[1]))


# ---- traps -------------------------------------------------------------------------------------------------


@engines
def test_zero_embedding(engine: str) -> None:
    dead = stepped(engine, [[0.0, 0, 0]], [1])
    close(dead.terms[0]["ce"], np.log(3), 12)
    assert torch.equal(dead.shared.net["encoder.shift"], torch.zeros(3).double()) and float(dead.shared.net.scale) == 20
    mixed = stepped(engine, [[0.0, 0, 0], [1, 2, 2]], [1, 1])
    alone = stepped(engine, [[1.0, 2, 2]], [1])
    close(2 * mixed.shared.net["encoder.shift"], alone.shared.net["encoder.shift"], 12)


@engines
def test_a_class_without_direction_is_absent(engine: str) -> None:
    fed = moved(engine, rows=([[1.0, 0, 0], [-2, 0, 0], [0, 0, 0], [0, 0, 3]],), labels=((0, 0, 1, 2),))
    upload = fed.last.uploads[0]
    assert upload.n.tolist() == [0, 0, 1] and upload.m.has.tolist() == [False, False, True]
    assert torch.equal(fed.shared.proto[:2], EYE[:2])


def one_upload(m: Any, n: Any) -> Tree:
    values = torch.tensor(m).double()
    return Tree(m=Rows(values, torch.tensor(n) > 0), n=torch.tensor(n))


def test_opposite_mean_keeps_the_prototype() -> None:
    sent = one_upload([[-1.0, 0, 0], [0, 0, 0], [0, 0, 0]], [1, 0, 0])
    assert torch.equal(FedNH(rho=0.5).move(EYE, [sent]), EYE)
    assert torch.equal(FedNH(rho=0.5, proto_post_normalize=False).move(EYE, [sent]), EYE)
    close(FedNH(rho=0.1).move(EYE, [sent])[0], [-1, 0, 0])


@engines
def test_negative_scale_is_refused(engine: str) -> None:
    with pytest.raises(RuntimeError, match="the averaged scale fell to -"):
        stepped(engine, [[1.0, 2, 2]], [0], scale_init=1, client_lr=100.0)


def test_long_prototypes_are_refused() -> None:
    fed = ragged(FedNH())
    fed.shared = fed.shared | Tree(proto=fed.shared.proto * 1.001)
    with pytest.raises(RuntimeError, match="not of length 1"):
        fed.run()
    kept = ragged(FedNH(proto_post_normalize=False))
    kept.shared = kept.shared | Tree(proto=kept.shared.proto * 0.5)
    kept.run()


def test_row_norms_stay_1() -> None:
    fed = ragged(FedNH(proto_client_weight="uniform_all", proto_pre_normalize=False), rounds=5).run()
    assert torch.allclose(fed.shared.proto.norm(dim=1), torch.ones(CLASSES).double(), atol=1e-12)


def test_a_lone_client_with_a_lone_class() -> None:
    fed = ragged(FedNH(), draws=[[1]] * 3)
    before = fed.shared.proto
    fed.run()
    assert torch.equal(fed.shared.proto[1:], before[1:]) and not torch.equal(fed.shared.proto[0], before[0])


# ---- bytes and the record ----------------------------------------------------------------------------------


def test_bytes_of_the_tables() -> None:
    """Protocol 6.1, from the messages: down, and up with all classes present."""
    sizes = {("cnn_fednh", 10, 32): (3_191_812, 3_191_892), ("cnn_fednh", 100, 32): (3_260_932, 3_261_732),
             ("resnet18_gn2", 200, 64): (45_084_932, 45_086_532)}  # fmt: skip
    for (name, classes, side), (down, up) in sizes.items():
        net = build(name, classes=classes, shape=(side, side, 3))
        task = RunTask(
            net,
            torch.zeros(1),
            torch.zeros(1, dtype=torch.long),
            [torch.tensor([0])],
            Protocol(model=name, clients=1),
        )
        shared = FedNH().start(task)[0]
        assert nbytes(shared) == down
        sums = Tree(sum=torch.ones(classes, net.dim), n=torch.ones(classes))
        assert nbytes(Tree(net=shared.net) | FedNH().directions(sums)) == up
        assert nbytes(shared.net) == down - classes * net.dim * 4


@engines
def test_bytes_of_a_round(engine: str) -> None:
    body = (796_032 + 1) * 4
    fed = cnn(engine, classes=10, side=32)
    rows = 192 * 4
    assert fed.bytes == [{"down": 2 * (body + 10 * rows), "up": 2 * body + (3 + 2) * rows + 2 * 10 * 8, "once": 0}]


@engines
def test_bytes_of_a_fixed_head(engine: str) -> None:
    fed = ragged(FedNH(rho=1.0), engine=engine, draws=[[0, 1], [1, 2], [0, 2]]).run()
    body = (24 + 12 + 1) * 4
    assert [b["once"] for b in fed.bytes] == [2 * 15 * 4, 15 * 4, 0]
    assert all(b["down"] == b["up"] == 2 * body for b in fed.bytes)
    assert all("m" not in u and "n" not in u for u in fed.last.uploads)
    assert FedNH().constant == ()


def test_recorded_prototypes() -> None:
    fed = ragged(FedNH()).run()
    table = fed.method.prototypes(fed.shared, fed.private)
    assert table is not None and torch.equal(table.values, fed.shared.proto) and bool(table.has.all())
    rows, labels = fed.method.client_prototypes(fed.last.uploads[1])  # type: ignore[misc]
    assert labels.tolist() == [0] and float(rows.norm()) == pytest.approx(1)
    fixed = ragged(FedNH(rho=1.0)).run()
    assert fixed.method.client_prototypes(fixed.last.uploads[0]) is None


@engines
def test_refreshed_models_use_the_final_prototypes(engine: str) -> None:
    fed = ragged(FedNH(), engine=engine).run()
    models = fed.refreshed()
    assert sorted(models) == list(range(len(SIZES)))
    assert all(torch.equal(m.tree.proto, fed.shared.proto) for m in models.values())


def test_auxiliary_classifier_trains_along() -> None:
    net = build("mlp", classes=3, shape=(8, 8, 1), aux_classifier=True)
    fed = federation(FedNH(), net, images(6, 8, 1), torch.tensor([0, 1, 2] * 2), [range(6)])
    before = fed.shared.net["aux.weight"]
    fed.run()
    assert gap(before, fed.shared.net["aux.weight"]) > 1e-4


def test_one_batch_encodes_once() -> None:
    calls = []

    class Counting(Tiny):
        def encode(self, w: Tree, x: Tensor) -> Tensor:
            calls.append(len(x))
            return super().encode(w, x)

    net = Counting().bound("train")
    fed = ragged(FedNH())
    client = RunClient(fed.task, 0, 0)
    x = fed.task.x[:4]
    FedNH().loss(net, fed.shared.net, batch(x, [0, 1, 2, 3]), view(shared=fed.shared, counts=client.counts))
    assert calls == [4]
