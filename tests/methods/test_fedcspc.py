"""FedCSPC: the test vectors, every option, what is equal by construction, traps, bytes."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import ENGINES, Harnessed, Identity, batch, federation, view
from protofl.methods import calibration, clusters, relations
from protofl.methods.cspc import CSPC, pooled
from protofl.methods.fedavg import FedAvg
from protofl.methods.fedcspc import FedCSPC, MoonCSPC
from protofl.methods.fednh import FedNH
from protofl.methods.moon import MOON
from ragged import CLASSES, SIZES, Shift, Tiny, data, gap, identical, ragged, state
from sklearn.cluster import KMeans, kmeans_plusplus
from torch import Tensor

from protofl import rng
from protofl.errors import UserError
from protofl.handles import RunServer
from protofl.method import Noise, Train
from protofl.nets import build
from protofl.options import fields, option
from protofl.protocol import Protocol
from protofl.registry import Spec, describe
from protofl.tree import Rows, Tree

engines = pytest.mark.parametrize("engine", ENGINES)


def T(v: Any) -> Tensor:
    return torch.as_tensor(np.array(v)).double()


def close(got: Any, wanted: Any, digits: int = 6) -> None:
    """Equal to so many decimals, as the vectors are given."""
    got = torch.as_tensor(got, dtype=torch.float64)
    assert torch.allclose(got, torch.as_tensor(wanted, dtype=torch.float64), rtol=0, atol=0.51 * 10**-digits), got


def quick(**options: Any) -> FedCSPC:
    """Two epochs of calibration are enough to see an effect."""
    return FedCSPC(**{"calib_epochs": 2, **options})


# ---- vector 1: the three regularisers ----------------------------------------------------------------------


class Shifted(Identity):
    """Features are the inputs plus a shift that is learnt: its gradient is the sum of the rows' gradients."""

    def init(self, stream: Any) -> Tree:
        return Tree({"encoder.shift": torch.zeros(self.dim)}) | super().init(stream)

    def encode(self, w: Tree, x: Tensor) -> Tensor:
        return x + w["encoder.shift"]


H, U = [[1.0, 0], [0, 2], [3, 4]], [[1.0, 1], [-1, 1], [0, 2]]


def stepped(
    engine: str, h: Any = H, y: Any = (0, 1, 2), u: Any = U, has: Any = (1, 1, 1), extra: int = 2, **kw: Any
) -> Harnessed:
    """One step on the rows h; beside them a client with more rows, so that batches are padded."""
    method = quick(**{k: kw.pop(k) for k in list(kw) if k in fields(FedCSPC)})
    n, classes = len(h), len(u)
    x = torch.cat([T(h), T(np.random.RandomState(0).standard_normal((n + extra, len(h[0]))))])
    labels = torch.tensor([*y, *(i % classes for i in range(n + extra))])
    net = Shifted(classes, len(h[0]))
    fed = federation(method, net, x, labels, [range(n), range(n, len(x))], engine=engine, local_epochs=1, **kw)
    fed.shared = fed.shared | Tree(u_g=Rows(T(u), torch.tensor(has) > 0))
    fed.before = fed.shared
    fed.play(0)
    return fed


def term(fed: Harnessed, name: str, client: int = 0) -> float:
    """A recorded loss term of one client."""
    return float(fed.last.client_terms[client][name])


REGULARISERS = [
    ("abs", (1, 1, 1), 0.867480, 0.602164, 1.828443),
    ("abs", (1, 1, 0), 0.375286, 0, 0.236068),
    ("abs", (1, 0, 0), 0, 0, 0),
    ("abs", (0, 0, 0), 0, 0, 0),
    ("smooth_l1_code", (1, 1, 1), 0.867480, 0.053930, 0.061985),
    ("smooth_l1_code", (0, 1, 0), 0, 0, 0),
    ("smooth_l1_code", (0, 0, 0), 0, 0, 0),
]


@engines
@pytest.mark.parametrize(("form", "has", "point", "angle", "edge"), REGULARISERS)
def test_regularisers(engine: str, form: str, has: Any, point: float, angle: float, edge: float) -> None:
    fed = stepped(engine, has=has, reg_form=form)
    close([term(fed, k) for k in ("point", "angle", "edge")], [point, angle, edge])
    terms = fed.last.client_terms[0]
    close(terms.loss - terms.ce, 0.5 * (terms.point + terms.angle + terms.edge), 12)


def test_angle_at_a_vertex() -> None:
    close(relations.angles(relations.lengths(T(H)))[1, 0, 2], -0.124035)
    close(relations.angles(relations.lengths(T(U)))[1, 0, 2], 0.707107)


def naive(h: Tensor, u: Tensor, y: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The differences of angles of all triplets in the order (v, a < b), and of norms of all pairs."""
    n, c = len(y), y.tolist()
    pairs = list(itertools.combinations(range(n), 2))
    triplets = [(v, a, b) for v in range(n) for a, b in pairs if len({c[v], c[a], c[b]}) == 3]
    v, a, b = torch.tensor(triplets, dtype=torch.long).view(-1, 3).T

    def angles(x: Tensor) -> Tensor:
        return F.cosine_similarity(x[a] - x[v], x[b] - x[v], dim=1, eps=1e-8)

    edges = [((h[i] - h[j]).norm() - (u[y[i]] - u[y[j]]).norm()).abs() for i, j in pairs if c[i] != c[j]]
    return list((angles(h) - angles(u[y])).abs()), edges


def cloud(n: int, d: int, classes: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Rows h [n, d], labels, prototypes [classes, d]."""
    rs = np.random.RandomState(seed)
    return (
        T(rs.standard_normal((n, d))),
        torch.from_numpy(rs.randint(0, classes, n)),
        T(rs.standard_normal((classes, d))),
    )


def test_values_and_gradients_against_the_definition() -> None:
    h, y, u = cloud(9, 5, 4)
    h.requires_grad_()
    table = Rows(u, torch.tensor([True, True, False, True]))
    ok = table.has[y]
    angles, edges = naive(h[ok], u, y[ok])
    sims = F.cosine_similarity(h[ok][:, None], u[table.has][None], dim=-1) / 0.7
    slot = torch.cumsum(table.has, 0) - 1
    wanted = [F.cross_entropy(sims, slot[y[ok]]), torch.stack(angles).mean(), torch.stack(edges).mean()]
    got = FedCSPC(tau_l=0.7).regularisers(h, batch(h, y), table)
    for mine, theirs in zip(got.values(), wanted):
        close(mine.detach(), theirs.detach(), 12)
        pair = [torch.autograd.grad(v, h, retain_graph=True)[0] for v in (mine, theirs)]
        assert gap(*[[p] for p in pair]) < 1e-11


def test_smooth_form_against_the_definition() -> None:
    h, y, u = cloud(7, 5, 3)
    h.requires_grad_()
    table = Rows(u, torch.tensor([True, False, True]))
    x, t = h[table.has[y]], u[y[table.has[y]]]

    def distances(v: Tensor) -> Tensor:
        square = (v[:, None] - v).square().sum(-1).clamp_min(1e-12)
        d = square.sqrt() * (1 - torch.eye(len(v)))
        return d / d[d > 0].mean()

    def angles(v: Tensor) -> Tensor:
        e = F.normalize(v[None] - v[:, None], dim=-1)
        return torch.bmm(e, e.transpose(1, 2))

    wanted = [F.smooth_l1_loss(angles(x), angles(t)), F.smooth_l1_loss(distances(x), distances(t))]
    got = FedCSPC(reg_form="smooth_l1_code").regularisers(h, batch(h, y), table)
    for mine, theirs in zip((got.angle, got.edge), wanted):
        close(mine.detach(), theirs.detach(), 12)
        pair = [torch.autograd.grad(v, h, retain_graph=True)[0] for v in (mine, theirs)]
        assert gap(*[[p] for p in pair]) < 1e-11


@engines
@pytest.mark.parametrize("chosen", ["P+A+E", "P", "P+A", "P+E", "none"])
@pytest.mark.parametrize("weights", ["1/1/1", "1/0.2/0.2"])
def test_terms_in_use(engine: str, chosen: str, weights: str) -> None:
    fed = stepped(engine, local_reg=chosen, reg_weights=weights, kappa=0.1)
    terms = fed.last.client_terms[0]
    share = 0.2 if weights == "1/0.2/0.2" else 1.0
    values = {"P": ("point", 0.867480), "A": ("angle", 0.602164 * share), "E": ("edge", 1.828443 * share)}
    used = [values[k] for k in "PAE" if k in chosen and chosen != "none"]
    assert set(terms) == {"loss", "ce", *(name for name, _ in used)}
    close(terms.loss - terms.ce, 0.1 * sum(v for _, v in used))


# ---- triplets of a large batch -----------------------------------------------------------------------------


class Frozen(Identity):
    """Nothing trains: the terms of all steps are those of the first."""

    def trainable(self, w: Tree) -> Tree:
        return Tree()


def large(engine: str, n: tuple[int, ...] = (66, 70), **kw: Any) -> Harnessed:
    """Two epochs of clients with more samples than 64 in one batch."""
    method = quick(**{k: kw.pop(k) for k in list(kw) if k in fields(FedCSPC)})
    h, y, u = cloud(sum(n), 3, 4)
    ends = np.cumsum([0, *n])
    parts = [range(a, b) for a, b in itertools.pairwise(ends)]
    fed = federation(method, Frozen(4, 3), h, y, parts, engine=engine, **{"batch_size": 128, "local_epochs": 2, **kw})
    fed.shared = fed.shared | Tree(u_g=Rows(u, torch.ones(4) > 0))
    fed.play(0)
    return fed


@engines
@pytest.mark.parametrize("most", [50, "all"])
def test_triplets_of_a_large_batch(engine: str, most: Any) -> None:
    fed = large(engine, max_triplets=most)
    for i, part in enumerate(fed.task.parts):
        stream, shuffles, means = rng.private("fedcspc", "triplets", 0, 0, i), rng.train(0, 0, i), []
        for _ in range(2):
            rows = part[torch.from_numpy(shuffles.permutation(len(part)))]
            gaps = torch.stack(naive(fed.task.x[rows], cloud(136, 3, 4)[2], fed.task.y[rows])[0])
            chosen = slice(None) if most == "all" else (stream.random_sample(most) * len(gaps)).astype(int)
            means.append(gaps[chosen].mean())
        close(term(fed, "angle", i), torch.stack(means).mean(), 12)


@engines
def test_where_the_number_of_triplets_matters(engine: str) -> None:
    assert term(large(engine), "angle") != term(large(engine, max_triplets=4096), "angle")
    for same in ({"batch_size": 64}, {"local_reg": "P+E"}, {"reg_form": "smooth_l1_code"}, {"n_repeat": 0}):
        assert identical(state(large(engine, **same)), state(large(engine, max_triplets=7, **same)))


@engines
def test_few_triplets_in_a_large_batch(engine: str) -> None:
    """No triplet at all: 0; a single one is every item."""
    h, y = [[1.0, 0], [0, 2], [3, 4]], [0, 1, 2]
    for labels, wanted in ((y, 0.602164), ([0, 1, 1], 0.0)):
        fed = stepped(engine, h[:3], labels, batch_size=65, client_lr=1e-9)
        only = {0.602164: 3, 0.0: 0}[wanted]
        if only == 0:
            assert term(fed, "angle") == 0
        else:
            v = rng.private("fedcspc", "triplets", 0, 0, 0).random_sample(512)
            gaps = torch.stack(naive(T(h), T(U), torch.tensor(y))[0])
            close(term(fed, "angle"), gaps[(v * only).astype(int)].mean(), 12)


# ---- vector 2: k-means prototypes --------------------------------------------------------------------------

POINTS = [[0.0, 0], [0, 1], [1, 0], [10, 10], [10, 11]]


def test_lloyd() -> None:
    fit = clusters.lloyd(np.array(POINTS), np.array(POINTS)[[0, 3]])
    assert fit.labels_.tolist() == [0, 0, 0, 1, 1] and fit.n_iter_ == 2
    close(fit.cluster_centers_, [[1 / 3, 1 / 3], [10, 10.5]], 12)
    close(fit.inertia_, 1.833333)


def test_starts_of_run_0() -> None:
    stream = rng.private("fedcspc", "kmeans", 0, 0, 0, 0)
    assert kmeans_plusplus(np.array(POINTS), 2, random_state=stream, n_local_trials=1)[1].tolist() == [0, 3]
    stream = rng.private("fedcspc", "kmeans", 0, 0, 0, 0)
    assert clusters.kmeans(np.array(POINTS), 2, stream).tolist() == [0, 0, 0, 1, 1]


def sent(engine: str, h: Any, y: Any = None, **options: Any) -> Tree:
    """What a client uploads whose embeddings are h."""
    labels = torch.tensor([0] * len(h) if y is None else list(y))
    fed = federation(quick(**options), Identity(3, len(h[0])), T(h), labels, [range(len(h))], engine=engine)
    return fed.run().last.uploads[0]


@engines
def test_prototypes_of_run_0(engine: str) -> None:
    upload = sent(engine, POINTS, n_clusters=2, n_repeat=2)
    close(upload.u, [[1, 0], [1, 0], [10, 11], [10, 11]], 12)
    assert upload.label.tolist() == [0] * 4 and upload.label.dtype == torch.int64


@engines
def test_prototypes_against_the_definition(engine: str) -> None:
    rs = np.random.RandomState(3)
    h, y = rs.standard_normal((40, 4)), rs.choice([0, 2], 40)
    for ratio, replacement in ((0.5, False), (0.8, True), (1.0, True)):
        upload = sent(engine, h, y, sample_ratio=ratio, sample_replacement=replacement, n_repeat=4)
        wanted, labels = [], []
        for c in (0, 2):
            stream, mine = rng.private("fedcspc", "kmeans", 0, 0, 0, c), h[y == c]
            starts = kmeans_plusplus(mine, 3, random_state=stream, n_local_trials=1)[0]
            found = KMeans(3, init=starts, n_init=1, max_iter=50, tol=1e-4).fit_predict(mine)
            for j in range(3):
                cluster = mine[found == j]
                m = max(1, int(ratio * len(cluster)))
                for _ in range(4):
                    g = len(cluster)
                    rows = stream.randint(0, g, m) if replacement else stream.permutation(g)[:m]
                    wanted.append(cluster[rows].mean(0).tolist())
                labels += [c] * 4
        close(upload.u, wanted, 11)
        assert upload.label.tolist() == labels


def test_random_starts() -> None:
    """The first of a permutation over the distinct rows in order of first appearance."""
    rows = np.array([[5.0, 5], [0, 0], [5, 5], [0, 1], [9, 9], [0, 0], [9, 8]])
    distinct = rows[[0, 1, 3, 4, 6]]
    for seed in range(5):
        order = np.random.RandomState(seed).permutation(5)[:3]
        wanted = clusters.lloyd(rows, distinct[order]).labels_
        got = clusters.kmeans(rows, 3, np.random.RandomState(seed), init="random")
        assert got.tolist() == wanted.tolist()


@engines
def test_clustering_options_show(engine: str) -> None:
    rows = [[1.0, 0], [9, 0], [10, 0.1], [0, 1], [0, 9], [0.1, 10]]
    raw, by_angle = (sent(engine, rows, n_clusters=2, sample_ratio=1.0, kmeans_space=s).u for s in ("raw", "l2norm"))
    close(by_angle[by_angle[:, 0].argsort()], [[0.1 / 3, 20 / 3], [20 / 3, 0.1 / 3]], 12)  # means of raw rows
    assert sorted(raw.tolist()) != sorted(by_angle.tolist())
    wide = np.random.RandomState(0).standard_normal((30, 3))
    ways = [sent(engine, wide, kmeans_init=i).u for i in ("kmeans++", "random")]
    assert ways[0].shape == ways[1].shape and gap(ways[0], ways[1]) > 1e-3
    for k, r in itertools.product((1, 2, 4), (1, 2, 16)):
        assert len(sent(engine, wide, n_clusters=k, n_repeat=r).u) == k * r


@engines
def test_small_classes_send_their_mean_once(engine: str) -> None:
    h, y = np.arange(9.0).reshape(9, 1) ** 2, [0, 0, 0, 0, 1, 1, 1, 1, 1]
    upload = sent(engine, h, y)
    assert upload.label.tolist().count(0) == 1
    close(upload.u[0], h[:4].mean(0), 12)
    assert upload.label.tolist().count(1) > 5
    assert sent(engine, h, y, min_samples_per_class=1).label.tolist().count(0) > 5


def test_repeats_that_must_be_equal_are_sent_once() -> None:
    rows = np.arange(10.0).reshape(5, 2)
    rs = np.random.RandomState

    def sizes(rows: Any, **kw: Any) -> int:
        return len(clusters.subset_means(rows, rs(0), **{"ratio": 0.5, "repeats": 4, "replacement": False, **kw}))

    assert sizes(rows) == 4 and sizes(rows[:1]) == 1 and sizes(rows[:1], replacement=True) == 1
    assert sizes(rows, ratio=1.0) == 1 and sizes(rows, ratio=1.0, replacement=True) == 4
    close(clusters.subset_means(rows[:1], rs(0), ratio=0.5, repeats=4, replacement=False), rows[:1])


# ---- vector 3: margin loss ---------------------------------------------------------------------------------

POOL_U, POOL_Y = [[1.0, 2], [2, 0], [-1, 1]], [0, 0, 1]
MARGINS = [
    ("from_partner", "toward_anchor", 2.341641, 1.516397),
    ("from_partner", "toward_negative", 3.236068, 1.766122),
    ("from_anchor", "toward_anchor", 0.105573, 0.743419),
    ("from_anchor", "toward_negative", 1.000000, 0.993144),
]


@pytest.mark.parametrize(("pos", "neg", "l2", "cosine"), MARGINS)
def test_margin(pos: str, neg: str, l2: float, cosine: float) -> None:
    pool, labels = T(POOL_U), torch.tensor(POOL_Y)
    mine, tables = calibration.neighbours(labels, torch.zeros_like(labels), True)
    x = (Tree(u=pool, source=torch.zeros_like(labels)) | mine).map(lambda v: v[:1])
    for metric, wanted in (("l2", l2), ("cosine", cosine)):
        method = FedCSPC(pos_mix=pos, neg_mix=neg, margin_metric=metric, lam_u=0.3, n_aug=1)
        b = batch(torch.zeros(1), labels[:1], noise=torch.full((1, 1, 2), 0.99))._replace(x=x)
        w = Tree({"head.weight": torch.zeros(2, 2).double()})
        loss, terms = method.calibration_loss(Identity(2, 2), w, b, view(const=tables | Tree(u=pool)))
        close(terms.calib_mar, wanted)
        close(loss, np.log(2) + 0.1 * wanted)  # no positive in the batch: L_con is 0


def test_margin_of_the_partner_itself() -> None:
    u, p, m = T([[1.0, 2]]), T([[2.0, 0]]), T([[-1.0, 1]])
    for neg, l2, cosine in (("toward_anchor", 1.670820, 1.276142), ("toward_negative", 2.565248, 1.525867)):
        mixed = calibration.NEGATIVE[neg](u, m, 0.3)
        for metric, wanted in (("l2", l2), ("cosine", cosine)):
            close(calibration.margin(u, p[None], mixed[None], 1.0, metric, torch.ones(1)), wanted)
    close(calibration.margin(u, p[None], m[None], 0.0, "l2", torch.ones(1)), 0.0)
    close(calibration.POSITIVE["from_partner"](u, p, 0.3), [[2.3, -0.6]])
    close(calibration.POSITIVE["from_anchor"](u, p, 0.3), [[0.7, 2.6]])
    close(calibration.NEGATIVE["toward_anchor"](u, m, 0.3), [[-0.4, 1.3]])
    close(calibration.NEGATIVE["toward_negative"](u, m, 0.3), [[0.4, 1.7]])


@pytest.mark.parametrize("same_client", [True, False])
def test_partners_against_candidate_lists(same_client: bool) -> None:
    rs = np.random.RandomState(0)
    source = torch.from_numpy(np.sort(rs.randint(0, 4, 60))) * 3
    y = torch.cat([torch.from_numpy(np.sort(rs.randint(0, 5, int((source == i).sum())))) for i in source.unique()])
    y[source == 3] = 2  # a client with one class
    y[:3] = torch.tensor([0, 1, 1])  # a class with one prototype
    mine, tables = calibration.neighbours(y, source, same_client)
    v = torch.from_numpy(rs.random_sample((60, 7, 2)))
    partner = calibration.friends(mine, tables.kin, v[..., 0])
    stranger, found = calibration.foes(mine, tables.kin, v[..., 1])
    for i in range(60):
        scope = [j for j in range(60) if not same_client or source[j] == source[i]]
        kin = [j for j in scope if y[j] == y[i] and j != i] or [i]
        others = [j for j in scope if y[j] != y[i]]
        assert partner[i].tolist() == [kin[int(p * len(kin))] for p in v[i, :, 0].tolist()]
        assert bool(found[i]) == bool(others)
        if others:
            assert stranger[i].tolist() == [others[int(p * len(others))] for p in v[i, :, 1].tolist()]
    assert bool(found.all()) != same_client


# ---- vector 4: contrastive loss ----------------------------------------------------------------------------

Z, ZY, ZS = [[1.0, 0], [0.8, 0.6], [0.96, 0.28], [0, 1], [-0.6, 0.8]], [0, 0, 0, 1, 1], [0, 1, 0, 0, 1]
CONTRASTS = [
    ("pull_push", 0.613374, [0.639349, 0.911194, 0.630880, 0.636847, 0.248601], -0.425162, 0.291626),
    ("denominator", 0.574155, [0.492776, 0.911194, 0.581356, 0.636847, 0.248601], 0.041197, -0.283069),
    ("exp_both", 0.712784, [0.839349, 0.911194, 0.927930, 0.636847, 0.248601], 0.041197, -0.283069),
    ("term", 0.684549, [0.648037, 1.022391, 0.642890, 0.800059, 0.309369], -0.431783, 0.282508),
    ("none", 0.758344, [0.810716, 1.022391, 0.849187, 0.800059, 0.309369], -0.242377, 0.043344),
]
PUSHES = {"pull_push": (0.116058, 0.017478), "term": (0.114721, 0.034553), "none": (0.152962, 0.046071)}


@pytest.mark.parametrize(("mode", "mean", "anchors", "across", "within"), CONTRASTS)
def test_contrast(mode: str, mean: float, anchors: list[float], across: float, within: float) -> None:
    z, y, source, ones = T(Z), torch.tensor(ZY), torch.tensor(ZS), torch.ones(5).double()
    close(calibration.contrast(z, y, source, ones, 0.5, mode), mean)
    cosines = (z @ z.T).requires_grad_()
    terms, valid = calibration.anchors(cosines, y, source, ones, 0.5, mode)
    close(terms.detach(), anchors)
    assert valid.tolist() == [1] * 5
    g = torch.autograd.grad(terms[0], cosines)[0][0]
    close(g[[1, 2]], [across, within])
    if mode in PUSHES:
        close(g[[3, 4]], PUSHES[mode])


def test_contrast_of_the_code() -> None:
    z, y, ones = T(Z), torch.tensor(ZY), torch.ones(5).double()
    close(calibration.contrast_code(z, y, ones, 0.07), 1.481246)


def test_padding_takes_no_part_in_the_contrast() -> None:
    z, y, source = T([*Z, [1, 1], [0.3, 0.1]]), torch.tensor([*ZY, 0, 1]), torch.tensor([*ZS, 1, 0])
    mask = torch.tensor([1.0] * 5 + [0, 0]).double()
    close(calibration.contrast(z, y, source, mask, 0.5, "pull_push"), 0.613374)
    close(calibration.contrast_code(z, y, mask, 0.07), 1.481246)


def test_contrast_without_a_positive() -> None:
    z, source, ones = T(Z), torch.tensor(ZS), torch.ones(5).double()
    for mode in calibration.SIGMA:
        assert float(calibration.contrast(z, torch.arange(5), source, ones, 0.5, mode)) == 0
    lone = calibration.contrast(z[:2], torch.zeros(2), torch.zeros(2), torch.ones(2).double(), 0.5, "denominator")
    close(lone, np.log(0.5))  # may be negative


# ---- vector 5: fusion --------------------------------------------------------------------------------------

EXEMPLARS = [[0.0, 1], [1, 1], [-1, 0]]
FUSIONS = [
    ("softmax", (0.381704, 0.590664, 0.027632), (0.916298, 0.024473, 0.059230), True),
    ("code_raw", (3.901925, 6.750150, 0.218805), (3.901925, 0.1, 0.218805), False),
    ("l2", (0.539443, 0.681117, -0.450000), (0.539443, -0.591675, -0.450000), True),
    ("minmax", (0.845584, 0.950000, 0), (1, 0.05, 0.154416), True),
]


@pytest.mark.parametrize(("norm", "wanted", "masked", "flips"), FUSIONS)
def test_fusion(norm: str, wanted: Any, masked: Any, flips: bool) -> None:
    o, z, some = T([[2.0, 1, 0]]), T([[1.0, 1]]), Rows(T(EXEMPLARS), torch.tensor([True, False, True]))
    full = Rows(T(EXEMPLARS), torch.ones(3) > 0)
    scores = FedCSPC(fusion_norm=norm).fused(o, z, full)
    assert list(scores) == ["fused", "network", "exemplar"]
    close(scores["fused"], [wanted])
    close(scores["exemplar"], [[0.707107, 1, -0.707107]])
    assert torch.equal(scores["network"], o)  # type: ignore[arg-type]
    close(FedCSPC(fusion_norm=norm).fused(o, z, some)["fused"], [masked])
    half = FedCSPC(fusion_norm=norm, lam_p=0.5).fused(o, z, full)["fused"]
    assert half is not None and int(half.argmax()) == (0 if flips else 1)
    for lam, winner in ((1.0, 0), (0.0, 1)):  # the network alone, the exemplars alone
        for tau in (0.1, 0.5, 1.0):
            one = FedCSPC(fusion_norm=norm, lam_p=lam, tau_f=tau).fused(o, z, full)["fused"]
            assert one is not None and int(one.argmax()) == winner
    taus = [FedCSPC(fusion_norm=norm, tau_f=t).fused(o, z, full)["fused"] for t in (0.1, 1.0)]
    assert torch.equal(*taus) == (norm in ("l2", "minmax"))  # type: ignore[arg-type]


def test_no_exemplar_at_all() -> None:
    fed = federation(quick(n_repeat=0), Identity(3, 2), T([[2.0, 1]] * 5), torch.tensor([0] * 5), [range(5)])
    fed.shared.net["head.weight"] = T([[1.0, 0], [0, 1], [0, 0]])
    model = fed.global_model()
    assert model is not None and model.loss == "network"
    scores = fed.scores(model, T([[2.0, 1]]))
    close(scores["fused"], [[0.665241, 0.244728, 0.090031]])
    close(scores["network"], [[2, 1, 0]])
    assert scores["exemplar"] is None


# ---- vector 6: clock of the learning rate ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rounds", "clock", "wanted"),
    [(100, "absolute", (6, 35, 59)), (100, "fraction", (6, 35, 59)), (50, "absolute", (6, 35, 9)),
     (50, "fraction", (3, 18, 29)), (10, "absolute", (6, 4, 0)), (10, "fraction", (1, 4, 5))],
)  # fmt: skip
def test_clock(rounds: int, clock: str, wanted: tuple[int, int, int]) -> None:
    bases = [calibration.base_rate(t, rounds, clock) for t in range(rounds)]
    assert tuple(bases.count(b) for b in (0.1, 0.01, 0.001)) == wanted


def test_rate_falls_with_epochs() -> None:
    fed = ragged(quick())
    server = RunServer(fed.task, [0], 7)
    rates = [quick().calibration_rate(server, 1.0, e) for e in (0, 29, 30, 60, 99)]
    assert rates == pytest.approx([0.01, 0.01, 0.001, 0.0001, 0.00001])
    constant = quick(calib_lr_schedule="const_0.01")
    assert {constant.calibration_rate(server, 1.0, e) for e in range(100)} == {0.01}
    assert quick(calib_lr_clock="fraction").calibration_rate(server, 1.0, 0) == 0.001  # T = 3


# ---- the whole method by a plain script --------------------------------------------------------------------


def calibrated(method: FedCSPC, net: Tiny, w: Tree, pool: list[tuple[Tensor, int, int]], t: int, rounds: int) -> Tree:
    """Projection and head after the calibration, from candidate lists and sums written out."""
    u, y, src = torch.stack([p[0] for p in pool]), [p[1] for p in pool], [p[2] for p in pool]
    n, stream = len(pool), rng.private("fedcspc", "calib", 0, t, -1)
    names = [k for k in w if not k.startswith("encoder")]
    q = Tree({k: w[k].clone().requires_grad_() for k in names})
    base = calibration.base_rate(t, rounds, method.calib_lr_clock)
    same = method.mix_scope == "same_client"
    for epoch in range(method.calib_epochs):
        order, v = stream.permutation(n), stream.random_sample((n, method.n_aug, 2))
        for at in range(0, n, 100):
            rows = order[at : at + 100].tolist()
            z = net.project(q, u[rows])
            labels, sources = torch.tensor(y)[rows], torch.tensor(src)[rows]
            loss = F.cross_entropy(z @ q["head.weight"].T + q["head.bias"], labels)
            triplets = []
            for k, i in enumerate(rows):
                scope = [j for j in range(n) if not same or src[j] == src[i]]
                kin = [j for j in scope if y[j] == y[i] and j != i] or [i]
                others = [j for j in scope if y[j] != y[i]]
                for a in range(method.n_aug if others else 0):
                    p, m = kin[int(v[i, a, 0] * len(kin))], others[int(v[i, a, 1] * len(others))]
                    pos, neg = u[p] + 0.5 * (u[p] - u[i]), 0.5 * u[i] + 0.5 * u[m]
                    near, far = (z[k] - net.project(q, pos)).norm(), (z[k] - net.project(q, neg)).norm()
                    triplets.append((near - far + 1).clamp_min(0))
            c = F.normalize(z, dim=1) @ F.normalize(z, dim=1).T
            terms = []
            for i in range(len(rows)):
                friends = [j for j in range(len(rows)) if labels[j] == labels[i] and j != i]
                foes = [j for j in range(len(rows)) if labels[j] != labels[i]]
                sig = [1.0 if (labels[a] == labels[i]) != (sources[a] == sources[i]) else 0.5 for a in range(len(rows))]
                total = sum((c[i, a] / 0.5).exp() for a in friends) + sum(sig[a] * (c[i, a] / 0.5).exp() for a in foes)
                if friends:
                    parts = [-sig[j] * (c[i, j] / 0.5 - torch.log(total)) for j in friends]  # type: ignore
                    terms.append(torch.stack(parts).mean())
            loss = loss + 0.1 * (torch.stack(terms).mean() + torch.stack(triplets).mean())
            grads = torch.autograd.grad(loss, list(q.values()))
            lr = base * 0.1 ** (epoch // 30)
            q = Tree({k: (p - lr * (g + 1e-5 * p)).detach().requires_grad_() for (k, p), g in zip(q.items(), grads)})
    return q.map(Tensor.detach)


def plainly(fed: Harnessed) -> tuple[Tree, Rows, Rows]:
    """w, U and exemplars after all rounds, one client after the other, sums written out."""
    method, net, p = fed.method, Tiny(), fed.protocol
    assert isinstance(method, FedCSPC)
    w, u_g, has = (
        Tree(fed.task.initial),
        torch.zeros(CLASSES, 4).double(),
        torch.zeros(CLASSES, dtype=torch.bool),
    )
    e, e_has = torch.zeros(CLASSES, 3).double(), torch.zeros(CLASSES, dtype=torch.bool)
    for t in range(p.rounds):
        ids, models, pool = fed.taking_part(t), [], []
        for i in ids:
            q = Tree({k: v.clone().requires_grad_() for k, v in w.items()})
            sgd = torch.optim.SGD(list(q.values()), lr=p.client_lr, momentum=p.momentum, weight_decay=p.weight_decay)
            stream, part = rng.train(0, t, i), fed.task.parts[i]
            for _ in range(p.local_epochs):
                for rows in part[torch.from_numpy(stream.permutation(len(part)))].split(p.batch_size):
                    sgd.zero_grad()
                    h, y = net.encode(q, fed.task.x[rows]), fed.task.y[rows]
                    loss = F.cross_entropy(net.project(q, h) @ q["head.weight"].T + q["head.bias"], y)
                    ok = has[y]
                    if ok.any():
                        sims = F.cosine_similarity(h[ok][:, None], u_g[has][None], dim=-1) / 0.5
                        loss = loss + 0.5 * F.cross_entropy(sims, (has.cumsum(0) - 1)[y[ok]])
                        for gaps in naive(h[ok], u_g, y[ok]):
                            loss = loss + 0.5 * (torch.stack(gaps).mean() if gaps else 0)
                    loss.backward()
                    sgd.step()
            models.append(q.map(Tensor.detach))
            h, y = net.encode(models[-1], fed.task.x[part]).numpy(), fed.task.y[part].numpy()
            for c in sorted(set(y.tolist())):
                rows, stream = h[y == c], rng.private("fedcspc", "kmeans", 0, t, i, c)
                pool += [(torch.from_numpy(u), c, i) for u in method.class_prototypes(rows, stream)]
        sizes = [len(fed.task.parts[i]) for i in ids]
        w = Tree({k: sum(m[k] * (n / sum(sizes)) for m, n in zip(models, sizes)) for k in w})
        w = w | calibrated(method, net, w, pool, t, p.rounds)
        for c in {c for _, c, _ in pool}:
            mine = torch.stack([u for u, k, _ in pool if k == c])
            u_g[c], has[c] = mine.mean(0), True
            z = net.project(w, mine)
            right = (z @ w["head.weight"].T + w["head.bias"]).argmax(1) == c
            e[c], e_has[c] = (z[right] if right.any() else z).mean(0), True
    return w, Rows(u_g, has), Rows(e, e_has)


@pytest.mark.parametrize("options", [pytest.param({}, marks=pytest.mark.slow), {"mix_scope": "any", "n_aug": 2}])
def test_two_rounds_by_hand(options: dict[str, Any]) -> None:
    runs = [ragged(quick(**options), engine=e, rounds=2, participation=0.6) for e in ENGINES]
    w, u_g, exemplars = plainly(runs[0])
    for fed in runs:
        fed.run()
        assert gap(fed.shared.net.like(w), w) < 1e-11
        assert gap([*fed.shared.u_g], [*u_g]) < 1e-11
        assert gap([*fed.private.exemplars], [*exemplars]) < 1e-11


OPTION_SETS: list[dict[str, Any]] = [
    {},
    {
        "reg_form": "smooth_l1_code",
        "con_form": "supcon_code",
        "ug_weighting": "per_sample",
        "pool": "latest_all",
    },
    {
        "calib_init": "previous_calibrated",
        "mix_scope": "any",
        "proto_bn_mode": "train",
        "sigma_mode": "exp_both",
    },
    {"proto_drop_last": True, "kmeans_init": "random", "kmeans_space": "l2norm", "sample_replacement": True},
    {"margin_metric": "cosine", "ug_weighting": "per_client", "exemplar": "all", "proto_transform": "test"},
    dict(FedCSPC.presets["official_code"]),
]


@pytest.mark.parametrize("options", OPTION_SETS)
@pytest.mark.parametrize("norm", [False, True])
def test_engines_agree(options: dict[str, Any], norm: bool) -> None:
    runs = [ragged(quick(**options), Tiny(norm), engine=e, augment=Shift(), participation=0.6).run() for e in ENGINES]
    assert gap(state(runs[0]), state(runs[1])) < 1e-11
    assert runs[0].bytes == runs[1].bytes


# ---- options -----------------------------------------------------------------------------------------------

READINGS = {
    "preset": ("paper", "official_code"),
    "n_clusters": (3, 1, 2, 4),
    "kmeans_init": ("kmeans++", "random"),
    "kmeans_space": ("raw", "l2norm"),
    "sample_ratio": (0.5, 0.8, 1.0),
    "sample_replacement": (False, True),
    "min_samples_per_class": (5, 1),
    "n_repeat": (5, 0, 1, 2, 4, 8, 16),
    "local_reg": ("P+A+E", "P", "P+A", "P+E", "none"),
    "reg_form": ("abs", "smooth_l1_code"),
    "reg_weights": ("1/1/1", "1/0.2/0.2"),
    "max_triplets": (512, 4096),  # and the word "all"
    "pos_mix": ("from_partner", "from_anchor"),
    "neg_mix": ("toward_anchor", "toward_negative"),
    "mix_scope": ("same_client", "any"),
    "n_aug": (5, 1, 3, 7, 9),
    "margin_metric": ("l2", "cosine"),
    "con_form": ("weighted", "supcon_code"),
    "tau_g": (0.5, 0.07),
    "sigma_mode": ("pull_push", "denominator", "exp_both", "term", "none"),
    "calib_losses": ("ce+con+mar", "ce", "ce+con", "ce+mar"),
    "eta": (0.1, 0.01, 0.05, 0.5),
    "calib_epochs": (100, 0, 10, 50),
    "calib_lr_schedule": ("code", "const_0.01"),
    "calib_lr_clock": ("absolute", "fraction"),
    "calib_init": ("averaged", "previous_calibrated"),
    "exemplar": ("correct_only", "all"),
    "ug_weighting": ("per_prototype", "per_client", "per_sample"),
    "fusion_norm": ("softmax", "code_raw", "l2", "minmax"),
    "tau_f": (0.5, 0.1, 1.0),
    "lam_p": (0.1, 0.0, 0.3, 0.5, 1.0),
    "proto_bn_mode": ("eval", "train"),
    "proto_transform": ("train", "test"),
    "proto_drop_last": (False, True),
    "pool": ("round", "latest_all"),
    "alpha": (1.0,),
    "tau_l": (0.5,),
    "kappa": (0.5, 0.01, 0.05, 0.1),
    "lam_u": (0.5, 0.1, 0.3),
    "local_base": ("ce", "moon"),
}


def test_all_options_are_there() -> None:
    table = {name: option(field) for name, field in fields(FedCSPC).items()}
    assert {name: o.readings for name, o in table.items()} == READINGS
    assert table["max_triplets"].words == ("all",)
    assert all(o.why and o.source for o in table.values())
    assert FedCSPC.open_fields == ("aux_classifier",) and "aux_classifier" in fields(Protocol)


def test_presets() -> None:
    asked = (("preset", "official_code"),)
    with pytest.raises(UserError, match="needs aux_classifier=true"):
        Spec("fedcspc", asked, "fedcspc.cifar10").build(Protocol())
    made = Spec("fedcspc", asked, "fedcspc.cifar10").build(Protocol(aux_classifier=True))
    assert isinstance(made, FedCSPC)
    assert (made.n_clusters, made.sample_ratio, made.local_reg, made.pool) == (1, 0.8, "P", "latest_all")
    assert (made.calib_losses, made.fusion_norm, made.tau_g, made.n_aug) == ("ce", "code_raw", 0.07, 1)


def run(norm: bool = False, **kw: Any) -> Harnessed:
    """Three ragged rounds; options and protocol fields mixed."""
    method = quick(**{k: kw.pop(k) for k in list(kw) if k in fields(FedCSPC)})
    return ragged(method, Tiny(norm), **kw).run()


@functools.cache
def reference(**kw: Any) -> Harnessed:
    """A run that several tests compare with."""
    return run(**kw)


@pytest.mark.parametrize(
    "change",
    [{"kappa": 0.1}, {"tau_l": 1.0}, {"reg_weights": "1/0.2/0.2"}, {"reg_form": "smooth_l1_code"},
     {"pos_mix": "from_anchor"}, {"neg_mix": "toward_negative", "lam_u": 0.3}, {"lam_u": 0.3},
     {"mix_scope": "any"}, {"n_aug": 3}, {"margin_metric": "cosine"}, {"alpha": 0.5}, {"tau_g": 0.07},
     {"con_form": "supcon_code"},
     {"sigma_mode": "term"}, {"calib_losses": "ce"}, {"calib_losses": "ce+con"}, {"calib_losses": "ce+mar"},
     {"eta": 0.5}, {"calib_epochs": 3}, {"calib_lr_schedule": "const_0.01"}, {"calib_lr_clock": "fraction"},
     {"calib_init": "previous_calibrated"}, {"ug_weighting": "per_client"}, {"ug_weighting": "per_sample"},
     {"proto_drop_last": True}, {"sample_ratio": 0.8}, {"sample_replacement": True}, {"n_repeat": 2}],
)  # fmt: skip
def test_options_show_in_the_weights(change: dict[str, Any]) -> None:
    base = reference(rounds=2, **({"lam_u": 0.3} if "neg_mix" in change else {}))
    assert gap(base.shared.net, run(rounds=2, **change).shared.net) > 1e-6


def test_where_weights_of_global_prototypes_stand() -> None:
    """Client 0: three prototypes of class 0 from 7 samples; client 1: one from 2, and one of class 1."""
    sets = [Tree(u=T([[1.0], [2], [3]]), label=torch.tensor([0, 0, 0]), owned=torch.tensor([7])),
            Tree(u=T([[8.0], [5]]), label=torch.tensor([0, 1]), owned=torch.tensor([2, 4]))]  # fmt: skip
    fed = federation(quick(), Identity(2, 1), T([[0.0], [1]]), torch.tensor([0, 1]), [[0], [1]])
    for way, wanted in (("per_prototype", 14 / 4), ("per_client", 5.0), ("per_sample", (7 * 2 + 2 * 8) / 9)):
        method = quick(ug_weighting=way, calib_epochs=0)
        uploads = [Tree(net=fed.shared.net) | s for s in sets]
        server = RunServer(fed.task, [0, 1], 0)
        shared, _ = method.aggregate(server, fed.shared, fed.private, uploads)
        close(shared.u_g.values[:, 0], [wanted, 5], 12)
    fed = run(ug_weighting="per_sample")
    shown = fed.last
    for i, upload in zip(shown.ids, shown.uploads):
        classes = upload.label.unique()
        assert upload.owned.tolist() == fed.task.counts[i][classes].tolist() and upload.owned.dtype == torch.int64


def test_exemplars() -> None:
    """z of class 0: two right, one wrong; of class 1: none right; class 2 is absent."""
    pool = Tree(u=T([[2.0, 0], [1, 0], [0, 3], [1, 0.5]]), label=torch.tensor([0, 0, 0, 1]))
    w = Tree({"head.weight": T([[1.0, 0], [0, 1], [-1, -1]])})
    old = Rows(T([[9.0, 9]] * 3), torch.tensor([False, False, True]))
    right = quick().exemplars(Identity(3, 2), w, pool, old)
    close(right.values, [[1.5, 0], [1, 0.5], [9, 9]], 12)
    every = quick(exemplar="all").exemplars(Identity(3, 2), w, pool, old)
    close(every.values, [[1, 1], [1, 0.5], [9, 9]], 12)
    assert right.has.tolist() == every.has.tolist() == [True] * 3


@engines
def test_pool(engine: str) -> None:
    """latest_all: the last set of every client that ever took part, with its id."""
    draws = [[0, 1], [4, 2], [0]]
    fed = run(engine=engine, pool="latest_all", draws=draws)
    assert set(fed.private.latest) == {"0", "1", "2", "4"}
    last = {i: r.uploads[r.ids.index(i)] for r in fed.rounds for i in r.ids}
    assert all(torch.equal(fed.private.latest[str(i)].u, u.u) for i, u in last.items())
    u, y = (torch.cat([last[i][k] for i in sorted(last)]) for k in ("u", "label"))
    close(fed.shared.u_g.values[0], u[y == 0].mean(0), 12)
    plain = run(engine=engine, draws=draws)
    assert "latest" not in plain.private
    assert gap(plain.shared.u_g.values, fed.shared.u_g.values) > 1e-3


def test_a_pool_is_in_the_order_of_client_ids() -> None:
    """As numbers, whenever a set came in."""
    sets = {
        str(i): Tree(u=T([[float(i)]] * 2), label=torch.tensor([0, 3]), owned=torch.tensor([i, 1])) for i in (10, 2, 4)
    }
    pool = pooled(Tree(sets))
    assert pool.source.tolist() == [2, 2, 4, 4, 10, 10] and pool.label.tolist() == [0, 3] * 3
    assert pool.u[:, 0].tolist() == pool.source.tolist() and pool.owned.tolist() == [2, 1, 4, 1, 10, 1]


@engines
def test_calibration_starts_where_it_is_told(engine: str) -> None:
    fed = run(engine=engine, calib_init="previous_calibrated", calib_epochs=0)
    first = run(engine=engine, calib_epochs=0, rounds=1)
    head = r"(projection|head)\."
    assert identical(fed.shared.net.only(head), first.shared.net.only(head))
    moved = run(engine=engine, calib_init="previous_calibrated")
    assert identical(moved.private.head, moved.shared.net.only(head))


@engines
def test_calibration_leaves_the_encoder_alone(engine: str) -> None:
    """E and its statistics are the average, whatever the calibration does."""
    runs = [run(True, engine=engine, rounds=1, calib_epochs=n) for n in (0, 5)]
    encoder = r"encoder\."
    assert identical(runs[0].shared.net.only(encoder), runs[1].shared.net.only(encoder))
    assert gap(runs[0].shared.net.without(encoder), runs[1].shared.net.without(encoder)) > 1e-3
    server = RunServer(runs[0].task, runs[0].last.ids, 0)
    average = server.mean([u.net for u in runs[0].last.uploads])
    assert identical(runs[0].shared.net, average)


@engines
def test_pass_over_the_data(engine: str) -> None:
    """Augmented by the survey stream, in stored order; the training stream does not see it."""
    one_mean = {"rounds": 1, "augment": Shift(), "n_clusters": 1, "sample_ratio": 1.0}
    runs = {t: run(engine=engine, proto_transform=t, **one_mean) for t in ("train", "test")}
    assert identical(*[[u.net for u in r.last.uploads] for r in runs.values()])
    x, y, parts = data()
    for t, r in runs.items():
        for i, upload in enumerate(r.last.uploads):
            shift = rng.private("fedcspc", "survey", 0, 0, i).random_sample((SIZES[i], 1))
            h = Tiny().encode(upload.net, x[parts[i]] + (torch.from_numpy(shift) if t == "train" else 0))
            wanted = torch.stack([h[y[parts[i]] == c].mean(0) for c in y[parts[i]].unique()])
            close(upload.u, wanted, 12)


@engines
def test_dropped_batch_and_batch_statistics(engine: str) -> None:
    full, dropped = (
        run(engine=engine, rounds=1, proto_drop_last=d, n_clusters=1, sample_ratio=1.0).last for d in (False, True)
    )
    order = rng.private("fedcspc", "survey", 0, 0, 0).permutation(23)[:16]  # client 0: two batches of 8
    rows = data()[2][0]
    kept = [rows[i] for i in sorted(order)]
    h = Tiny().encode(dropped.uploads[0].net, data()[0][kept])
    close(
        dropped.uploads[0].u,
        torch.stack([h[data()[1][kept] == c].mean(0) for c in data()[1][kept].unique()]),
        12,
    )
    assert full.uploads[0].u.shape[0] >= dropped.uploads[0].u.shape[0]
    ways = [run(True, engine=engine, rounds=1, proto_bn_mode=m) for m in ("eval", "train")]
    assert gap(ways[0].shared.u_g.values, ways[1].shared.u_g.values) > 1e-2
    buffers = Tiny.buffers
    assert identical(*[[u.net.only(buffers) for u in r.last.uploads] for r in ways])


# ---- MOON at the clients -----------------------------------------------------------------------------------


def test_moon_at_the_clients_takes_its_values_from_the_setting() -> None:
    made = Spec("fedcspc", (("local_base", "moon"), ("kappa", 0.1)), "moon.cifar10").build(Protocol())
    assert isinstance(made, MoonCSPC) and (made.mu, made.kappa, made.temperature) == (5.0, 0.1, 0.5)
    assert made == MoonCSPC(mu=5.0, kappa=0.1)
    again = Spec("fedcspc", tuple(describe(made)["options"].items()), stored="MoonCSPC").build(Protocol())
    assert again == made
    plain = Spec("fedcspc", (("local_base", "ce"),), "moon.cifar10").build(Protocol())
    assert type(plain) is FedCSPC
    with pytest.raises(UserError, match="another class"):
        FedCSPC(local_base="moon")
    shared = set(fields(CSPC)) & set(fields(MOON))
    assert not shared and set(fields(MoonCSPC)) == set(fields(CSPC)) | set(fields(MOON))
    helpers = {n for n in vars(CSPC) if not n.startswith("_")} & {n for n in vars(MOON) if not n.startswith("_")}
    assert helpers - {"cost", "same"} == {
        "bill",
        "local",
        "loss",
    }  # an estimate of time, and claims of which both count


def test_moon_at_the_clients() -> None:
    method = FedCSPC.build({"local_base": "moon", "calib_epochs": 2}, lambda name: {"mu": 5.0})
    runs = [ragged(method, engine=e).run() for e in ENGINES]
    assert gap(state(runs[0]), state(runs[1])) < 1e-11
    assert {"ce", "con", "point", "angle", "edge"} <= set(runs[0].terms[1])
    assert "prev" in runs[0].own(0)
    off = FedCSPC.build({"local_base": "moon", "n_repeat": 0}, lambda name: {"mu": 5.0})
    assert identical(ragged(off).run().shared.net, ragged(MOON(mu=5.0)).run().shared.net)
    assert gap(runs[0].shared.net, ragged(quick()).run().shared.net) > 1e-4
    silent = FedCSPC.build({"local_base": "moon", "calib_epochs": 2}, lambda name: {"mu": 0.0})
    assert gap(ragged(silent).run().shared.net, ragged(quick()).run().shared.net) < 1e-12


def test_a_base_without_a_shared_head_is_refused() -> None:
    class Odd(CSPC, FedNH):
        pass

    with pytest.raises(UserError, match="cspc calibrates the server's output layer, Odd has none there"):
        ragged(Odd())


# ---- equal by construction ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        ({"n_clusters": 1}, [{"kmeans_init": "random"}, {"kmeans_space": "l2norm"}]),
        ({"sample_ratio": 1.0}, [{"n_repeat": 1}, {"n_repeat": 16}]),
        ({"local_reg": "P"}, [{"reg_form": "smooth_l1_code"}, {"reg_weights": "1/0.2/0.2"}]),
        ({"local_reg": "none"}, [{"reg_form": "smooth_l1_code"}, {"reg_weights": "1/0.2/0.2"}]),
        ({}, [{"max_triplets": "all"}, {"proto_bn_mode": "train"}]),
        ({"calib_losses": "ce+con"}, [{"pos_mix": "from_anchor", "neg_mix": "toward_negative"},
                                      {"mix_scope": "any", "n_aug": 9}, {"margin_metric": "cosine"}]),
        ({"calib_losses": "ce+mar"}, [{"con_form": "supcon_code"}, {"tau_g": 0.07}, {"sigma_mode": "none"}]),
        ({"con_form": "supcon_code"}, [{"sigma_mode": "none"}, {"sigma_mode": "exp_both"}]),
        ({"calib_epochs": 0}, [{"pos_mix": "from_anchor", "neg_mix": "toward_negative", "mix_scope": "any",
                                "n_aug": 1, "margin_metric": "cosine", "con_form": "supcon_code",
                                "sigma_mode": "none", "eta": 0.5, "calib_lr_schedule": "const_0.01",
                                "calib_lr_clock": "fraction"},
                               {"calib_losses": "ce"}]),
        ({"calib_lr_schedule": "const_0.01"}, [{"calib_lr_clock": "fraction"}]),
        ({"local_reg": "none"}, [{"local_reg": "P+A+E", "kappa": 0.0}]),
        ({"calib_losses": "ce"}, [{"calib_losses": "ce+con+mar", "eta": 0.0}]),
        ({"calib_losses": "ce"}, [{"n_aug": 9}]),
    ],
)  # fmt: skip
def test_bit_for_bit(base: dict[str, Any], changes: list[dict[str, Any]]) -> None:
    wanted = state(reference(rounds=2, **base))
    for change in changes:
        assert identical(wanted, state(run(rounds=2, **{**base, **change}))), change


def test_equal_up_to_rounding() -> None:
    half = [run(rounds=2, lam_u=0.5, neg_mix=m) for m in ("toward_anchor", "toward_negative")]
    assert gap(state(half[0]), state(half[1])) < 1e-11
    sums = [run(rounds=2, sigma_mode=m) for m in ("denominator", "exp_both")]
    assert gap(state(sums[0]), state(sums[1])) < 1e-11
    per = [run(rounds=2, n_clusters=1, sample_ratio=1.0, ug_weighting=g) for g in ("per_prototype", "per_client")]
    assert gap(per[0].shared.u_g.values, per[1].shared.u_g.values) < 1e-12
    assert gap(per[0].shared.net, per[1].shared.net) < 1e-11


def test_latest_sets_are_those_of_the_round_at_full_participation() -> None:
    runs = [run(rounds=2, pool=p) for p in ("round", "latest_all")]
    assert identical(runs[0].shared, runs[1].shared) and identical(runs[0].private.exemplars, runs[1].private.exemplars)


@engines
def test_without_prototypes_it_is_fedavg(engine: str) -> None:
    for fields_ in ({}, {"participation": 0.4, "augment": Shift(), "grad_clip_norm": 0.5}):
        base = ragged(FedAvg(), Tiny(True), engine=engine, **fields_).run()
        for change in (
            {},
            {"kappa": 0.1, "pool": "latest_all"},
            {"proto_bn_mode": "train", "ug_weighting": "per_sample"},
        ):
            other = ragged(FedCSPC(n_repeat=0, **change), Tiny(True), engine=engine, **fields_).run()
            assert identical(base.shared.net, other.shared.net) and base.bytes == other.bytes
            assert not other.shared.u_g.has.any() and not other.private.exemplars.has.any()
            assert base.terms == other.terms


# ---- traps -------------------------------------------------------------------------------------------------


@engines
@pytest.mark.parametrize("form", ["abs", "smooth_l1_code"])
def test_zero_and_equal_rows(engine: str, form: str) -> None:
    """Embeddings of different classes that are zero or the same: finite, norms of zero pass no gradient."""
    fed = stepped(engine, [[0.0, 0], [0, 0], [0, 0]], reg_form=form, kappa=1.0)
    after = fed.last.uploads[0].net
    assert all(bool(v.isfinite().all()) for v in after.values())
    assert torch.equal(after["encoder.shift"], torch.zeros(2).double())
    close(term(fed, "point"), np.log(3), 12)
    twins = stepped(engine, [[1.0, 2], [1, 2], [3, 4]], reg_form=form)
    assert all(bool(v.isfinite().all()) for v in twins.last.uploads[0].net.values())
    assert float(twins.last.uploads[0].net["encoder.shift"].abs().max()) < 1


def test_gradient_at_zero_and_equal_rows() -> None:
    for rows in ([[0.0, 0], [0, 0], [0, 0]], [[1.0, 2], [1, 2], [1, 2]]):
        h = T(rows).requires_grad_()
        got = FedCSPC().regularisers(h, batch(h, [0, 1, 2]), Rows(T(U), torch.ones(3) > 0))
        for name in ("angle", "edge"):
            assert torch.equal(torch.autograd.grad(got[name], h, retain_graph=True)[0], torch.zeros(3, 2).double())
    z = torch.zeros(4, 2, dtype=torch.float64, requires_grad=True)
    ones = torch.ones(4).double()
    for loss in (
        calibration.contrast(z, torch.tensor([0, 0, 1, 1]), torch.zeros(4), ones, 0.5, "pull_push"),
        calibration.contrast_code(z, torch.tensor([0, 0, 1, 1]), ones, 0.07),
        calibration.margin(z, z[:, None], z[:, None], 1.0, "l2", ones),
        calibration.margin(z, z[:, None], z[:, None], 1.0, "cosine", ones),
    ):
        assert torch.equal(torch.autograd.grad(loss, z)[0], torch.zeros(4, 2).double())


@engines
@pytest.mark.parametrize("form", ["abs", "smooth_l1_code"])
def test_batch_of_one_class_and_of_one_row(engine: str, form: str) -> None:
    one_class = stepped(engine, y=(1, 1, 1), reg_form=form)
    assert all(bool(v.isfinite().all()) for v in one_class.last.uploads[0].net.values())
    if form == "abs":
        assert term(one_class, "angle") == term(one_class, "edge") == 0
    one_row = stepped(engine, [[1.0, 0]], (0,), reg_form=form)
    assert term(one_row, "angle") == term(one_row, "edge") == 0


@engines
def test_absent_classes_keep_their_rows(engine: str) -> None:
    fed = run(engine=engine, draws=[[0], [1], [1]])
    before = fed.rounds[1].received[0]
    assert torch.equal(fed.shared.u_g.values[1:], before.u_g.values[1:])
    assert torch.equal(fed.shared.u_g.has, before.u_g.has) and not before.u_g.has.all()
    assert bool(fed.shared.u_g.values.isfinite().all()) and bool(fed.private.exemplars.values.isfinite().all())
    scores = fed.scores(fed.global_model(), data()[0])
    assert all(bool(scores[k].isfinite().all()) for k in ("fused", "network"))
    masked = ~fed.private.exemplars.has
    assert bool((scores["exemplar"][:, masked] == -torch.inf).all()) and bool((scores["fused"][:, masked] < 0.2).all())


def test_duplicates_make_no_empty_cluster() -> None:
    rows = np.array([[0.0, 0], [0, 0], [1, 1], [1, 1], [0, 0]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed, init, unit in itertools.product(range(50), ("kmeans++", "random"), (False, True)):
            labels = clusters.kmeans(rows, 3, np.random.RandomState(seed), init=init, unit=unit)
            assert sorted(np.unique(labels)) == [0, 1] and len({labels[0], labels[1], labels[4]}) == 1
        same = clusters.kmeans(np.ones((6, 2)), 3, np.random.RandomState(0))
        assert same.tolist() == [0] * 6
        signs = clusters.kmeans(np.array([[0.0], [-0.0], [0.0]]), 3, np.random.RandomState(0))
        assert signs.tolist() == [0] * 3


def test_global_numpy_stream_is_left_alone() -> None:
    np.random.seed(0)
    before = np.random.get_state()[1].copy()  # type: ignore[index, union-attr]
    clusters.kmeans(np.array(POINTS), 2, np.random.RandomState(0))
    assert np.array_equal(before, np.random.get_state()[1])  # type: ignore[index]


@engines
def test_single_sample_clusters_and_classes(engine: str) -> None:
    upload = sent(engine, POINTS, n_clusters=4, min_samples_per_class=1)
    lone = [u for u in upload.u.tolist() if u in POINTS]
    assert lone and len(upload.u) < 20
    one = sent(engine, [[3.0, 1]], (2,))
    close(one.u, [[3, 1]], 12)
    assert one.label.tolist() == [2]


@engines
def test_client_with_one_class_has_no_negative(engine: str) -> None:
    fed = run(engine=engine, draws=[[1]] * 3)  # client 1: class 0 alone
    assert all(bool(v.isfinite().all()) for v in fed.shared.net.values())
    one = {"engine": engine, "draws": [[1]] * 3, "calib_epochs": 1}  # the draws of a second epoch would differ
    with_margin, without = (run(calib_losses=c, **one) for c in ("ce+con+mar", "ce+con"))
    assert identical(with_margin.shared.net, without.shared.net)


class Server:
    """A server whose training blows up above a rate."""

    round, rounds = 0, 3

    def __init__(self, limit: float) -> None:
        self.limit, self.rates, self.draws = limit, [], []  # type: ignore[var-annotated]
        self.task: Any = None

    def stream(self, *names: str) -> Any:
        return rng.private(*names, 0, 0, -1)  # type: ignore[arg-type]

    def train(self, request: Train, x: Tree, y: Tensor, *, lr: Any, stream: Any, **how: Any) -> Tree:
        self.rates.append(lr(0))
        self.draws.append(stream.random_sample())
        assert request.noise == Noise((5, 2), per="row") and how == {
            "batch_size": 100,
            "epochs": 2,
            "weight_decay": 1e-5,
        }
        return request.start.map(lambda v: v + (torch.inf if lr(0) > self.limit else 1.0))


POOL = Tree(u=T(POOL_U), label=torch.tensor(POOL_Y), source=torch.zeros(3, dtype=torch.long))


def test_a_rate_that_blows_up_is_halved() -> None:
    head = Tree({"head.weight": torch.zeros(2, 2)})
    server: Any = Server(0.03)
    out = quick().calibrate(server, head, POOL)
    assert server.rates == [0.1, 0.05, 0.025] and len(set(server.draws)) == 1
    assert torch.equal(out["head.weight"], torch.ones(2, 2))
    with pytest.raises(RuntimeError, match="calibration of round 0 is not finite"):
        quick().calibrate(Server(0.0), head, POOL)  # type: ignore[arg-type]


def test_a_diverged_run_is_not_calibrated() -> None:
    server: Any = Server(1.0)
    for head, u in ((torch.nan, 1.0), (0.0, torch.inf)):
        start = Tree({"head.weight": torch.full((2, 2), head)})
        assert quick().calibrate(server, start, POOL | Tree(u=torch.full((3, 2), u))) is start
    assert not server.rates
    labels = clusters.kmeans(np.array([[0.0], [np.nan], [1.0]]), 2, np.random.RandomState(0))
    assert labels.tolist() == [0, 0, 0]


def test_a_calibration_that_cannot_be_saved_says_so() -> None:
    fed = federation(quick(calib_epochs=5), Identity(2, 2), T(POOL_U), torch.tensor(POOL_Y), [range(3)])
    head = fed.shared.net.only(r"head\.")
    with pytest.raises(RuntimeError, match="not finite even at"):
        quick(calib_epochs=5).calibrate(RunServer(fed.task, [0], 0), head, POOL | Tree(u=1e200 * T(POOL_U)))


# ---- bytes and the record ----------------------------------------------------------------------------------


def expected_bytes(fed: Harnessed, p: int, d: int, owned: bool = False) -> Iterator[dict[str, int]]:
    """Protocol 6.1: down P + K_t d, up P + N_i d floats and N_i integers (and K_i more)."""
    for r in fed.rounds:
        rows = [len(u.u) for u in r.uploads]
        classes = sum(len(u.label.unique()) for u in r.uploads) if owned else 0
        down = len(r.ids) * 4 * (p + int(r.received[0].u_g.has.sum()) * d)
        yield {"down": down, "up": sum(4 * (p + n * d) + 8 * n for n in rows) + 8 * classes, "once": 0}


@engines
def test_bytes_of_the_rounds(engine: str) -> None:
    fed = run(engine=engine, draws=[[1], [2, 4], [0, 1]])
    size = 24 + 12 + 15 + 5
    assert fed.bytes == list(expected_bytes(fed, size, 4))
    assert fed.bytes[0] == {
        "down": 4 * size,
        "up": 4 * size + len(fed.rounds[0].uploads[0].u) * (16 + 8),
        "once": 0,
    }
    assert fed.bytes[1]["down"] == 2 * 4 * (size + 4)  # client 1 has told of one class
    counted = run(engine=engine, ug_weighting="per_sample")
    assert counted.bytes == list(expected_bytes(counted, size, 4, owned=True))


def images(n: int, side: int, channels: int) -> Tensor:
    return torch.from_numpy(np.random.RandomState(3).standard_normal((n, channels, side, side)))


@engines
def test_bytes_of_the_paper_net(engine: str) -> None:
    net = build("simple_cnn", classes=10, shape=(32, 32, 3))
    y = torch.tensor([3] * 10 + [5] * 6)
    fed = federation(
        quick(calib_epochs=1), net, images(16, 32, 3), y, [range(16)], engine=engine, model="simple_cnn",
        rounds=2, local_epochs=1, client_lr=1e-3,
    ).run()  # fmt: skip
    assert [b["down"] for b in fed.bytes] == [370_504, 370_504 + 2 * 84 * 4]
    for r, b in zip(fed.rounds, fed.bytes):
        n = len(r.uploads[0].u)
        assert n <= 30 and b["up"] == 370_504 + n * 84 * 4 + n * 8


def test_real_nets_run_in_both_engines() -> None:
    """With an auxiliary classifier, which the calibration leaves alone, and without a projection."""
    y = torch.tensor([0, 1, 2] * 8)
    for name, aux in (("mlp", True), ("mlp_plain", False)):
        net = build(name, classes=3, shape=(8, 8, 1), aux_classifier=aux, projection_dim=7)
        runs = [
            federation(
                quick(), net, images(24, 8, 1), y, [range(9), range(9, 24)], engine=e, model=name, rounds=2,
                batch_size=6, client_lr=1e-2, aux_classifier=aux,
            ).run()
            for e in ENGINES
        ]  # fmt: skip
        assert gap(state(runs[0]), state(runs[1])) < 1e-11
        if aux:
            average = RunServer(runs[0].task, [0, 1], 1).mean([u.net for u in runs[0].last.uploads])
            assert identical(average.only(r"aux\."), runs[0].shared.net.only(r"aux\."))


def test_one_step_encodes_once() -> None:
    calls = []

    class Counting(Tiny):
        def encode(self, w: Tree, x: Tensor) -> Tensor:
            calls.append(len(x))
            return super().encode(w, x)

    for method in (quick(), MoonCSPC()):
        calls.clear()
        fed = ragged(method)
        table = Rows(torch.ones(CLASSES, 4).double(), torch.ones(CLASSES) > 0)
        method.loss(
            Counting().bound("train"), fed.shared.net, batch(fed.task.x[:4], [0, 1, 2, 3]),
            view(shared=fed.shared | Tree(u_g=table)),
        )  # fmt: skip
        assert calls == [4]


def test_recorded_prototypes() -> None:
    fed = run()
    assert fed.method.prototypes(fed.shared, fed.private) is fed.shared.u_g
    rows, labels = fed.method.client_prototypes(fed.last.uploads[0])  # type: ignore[misc]
    assert rows.shape == (len(labels), 4)
    assert ragged(FedCSPC(n_repeat=0)).run().method.client_prototypes(fed.last.received[0]) is None


@engines
def test_refreshed_and_personal_models_are_networks(engine: str) -> None:
    fed = run(engine=engine)
    assert sorted(fed.refreshed()) == list(range(len(SIZES)))
    models = fed.personal()
    assert all(identical(m.tree, u.net) for m, u in zip(models.values(), fed.last.uploads))
    assert list(fed.scores(models[0], data()[0])) == ["network"]
