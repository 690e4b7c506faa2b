"""MOON: the test vectors, every option, what is equal by construction, traps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import ENGINES, Harnessed, ToyNet, federation
from protofl.methods.fedavg import FedAvg
from protofl.methods.moon import MOON
from ragged import Shift, Tiny, by_hand, gap, identical, ragged, state
from torch import Tensor

from protofl import rng
from protofl.handles import RunClient, RunServer
from protofl.options import fields
from protofl.protocol import Protocol
from protofl.registry import Spec
from protofl.tree import Tree, tensors

engines = pytest.mark.parametrize("engine", ENGINES)

# ---- the vectors: a net that is told its representations


class Told(ToyNet):
    """A row is (z, z_glob, z_prev, a second z_prev), two numbers each.

    The model in training sees z (plus a shift that it may learn); a frozen model sees what its weights pick.
    """

    name, classes, encoded, dim = "told", 3, 2, 2

    def encode(self, w: Tree, x: Tensor) -> Tensor:
        told = x.reshape(len(x), 4, 2)
        if self.mode == "train":
            return told[:, 0] + w["encoder.shift"]
        return torch.einsum("k,rkq->rq", w["encoder.pick"], told)


ZERO_HEAD = [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]


def told(pick: int, head: Any = ZERO_HEAD) -> Tree:
    """The weights of a model that, frozen, sees entry `pick` of a row."""
    return Tree({
        "encoder.shift": torch.zeros(2, dtype=torch.float64),
        "encoder.pick": F.one_hot(torch.tensor(pick), 4).double(),
        "head.weight": torch.tensor(head, dtype=torch.float64),
    })  # fmt: skip


def answer(
    method: MOON,
    rows: list[list[tuple[float, float]]],
    engine: str,
    prev: int = 1,
    y: int = 1,
    head: Any = ZERO_HEAD,
) -> tuple[dict[str, float], list[float]]:
    """One step of one client (rate 1) on these rows -> loss terms, minus the shift: the gradient in z."""
    x = torch.tensor([[v for pair in row + [(9.0, 9.0)] * (4 - len(row)) for v in pair] for row in rows]).double()
    fed = federation(
        method,
        Told(),
        x,
        torch.full((len(x),), y),
        [range(len(x))],
        engine=engine,
        initial=told(1, head),
        local_epochs=1,
        client_lr=1.0,
        rounds=2,
    )
    if prev:
        queue = Tree({f"p{k}": told(2 + k) for k in range(prev)})
        fed.memory.put(0, Tree(own=Tree(prev=queue, last=torch.tensor(0))))
    fed.play(1)
    return fed.last.terms, (-fed.shared.net["encoder.shift"]).tolist()


Z, G, P, SECOND = (1.0, 0.0), (0.6, 0.8), (0.0, 1.0), (-0.6, 0.8)


@engines
@pytest.mark.parametrize(("tau", "wanted"), [(0.5, 0.263282), (0.1, 0.002476), (1.0, 0.437488)])
def test_contrast(engine: str, tau: float, wanted: float) -> None:
    terms, grad = answer(MOON(temperature=tau), [[Z, G, P]], engine)
    assert terms["con"] == pytest.approx(wanted, abs=5e-7)
    if tau == 0.5:
        assert grad == pytest.approx([0, 0.092590], abs=5e-7)


@engines
def test_two_negatives(engine: str) -> None:
    terms, _ = answer(MOON(prev_buffer=2), [[Z, G, P, SECOND]], engine, prev=2)
    assert terms["con"] == pytest.approx(0.330678, abs=5e-7)


@engines
@pytest.mark.parametrize(("mu", "wanted"), [(1.0, 1.670888), (5.0, 2.724018)])
def test_loss(engine: str, mu: float, wanted: float) -> None:
    terms, _ = answer(MOON(mu=mu), [[Z, G, P]], engine, head=[[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    assert terms["ce"] == pytest.approx(1.407606, abs=5e-7)
    assert terms["loss"] == pytest.approx(wanted, abs=1e-6)


@engines
def test_prev_that_equals_the_received_model(engine: str) -> None:
    terms, grad = answer(MOON(), [[Z, G, G]], engine)
    assert terms["con"] == pytest.approx(0.693147, abs=5e-7)
    assert grad == [0.0, 0.0]  # exactly


@engines
def test_no_previous_model(engine: str) -> None:
    terms, grad = answer(MOON(), [[Z, G]], engine, prev=0)
    assert terms["con"] == 0 and grad == [0.0, 0.0]


@engines
def test_l2(engine: str) -> None:
    for prev in (0, 1):  # needs no previous model and reads none
        terms, grad = answer(MOON(second_term="l2"), [[Z, G, P]], engine, prev=prev)
        assert terms["con"] == pytest.approx(0.894427, abs=5e-7)
        assert grad == pytest.approx([0.447214, -0.894427], abs=5e-7)
    terms, grad = answer(MOON(second_term="l2"), [[Z, Z]], engine)
    assert terms["con"] == 0 and grad == [0.0, 0.0]


@engines
@pytest.mark.parametrize("dead", [0, 1, 2], ids=["z", "z_glob", "z_prev"])
@pytest.mark.parametrize("length", [0.0, 1e-7, 1e-200])
def test_a_row_without_direction(engine: str, dead: int, length: float) -> None:
    row = [Z, G, P]
    row[dead] = (length, 0.0)
    terms, grad = answer(MOON(), [[Z, G, P], row], engine)
    assert terms["con"] == pytest.approx(0.131641, abs=5e-7)  # it counts in B
    assert grad == pytest.approx([0, 0.092590 / 2], abs=5e-7)
    terms, grad = answer(MOON(), [row], engine)
    assert terms["con"] == 0 and grad == [0.0, 0.0]


def test_aggregation() -> None:
    x = torch.zeros(100, 8, dtype=torch.float64)
    parts = [range(30), range(30, 40), range(40, 100)]
    fed = federation(MOON(), Told(), x, torch.zeros(100, dtype=torch.long), parts, initial=told(1))
    uploads = [Tree(net=Tree(w=torch.tensor([v]))) for v in (1.0, 5.0)]
    shared, _ = fed.method.aggregate(RunServer(fed.task, [0, 1], 0), fed.shared, fed.private, uploads)
    assert float(shared.net.w) == pytest.approx(2.0)  # 0.8 if the idle third counted


# ---- against a plain script


@engines
@pytest.mark.parametrize("options", [{"mu": 2.0}, {"mu": 0.7, "temperature": 0.1, "prev_buffer": 2}])
def test_by_hand(engine: str, options: dict[str, Any]) -> None:
    method = MOON(**options)
    fed = ragged(method, engine=engine, participation=0.5, rounds=4).run()
    net, before = fed.task.net, {i: [] for i in range(7)}

    def loss(w: Tree, x: Tensor, y: Tensor, received: Tree, t: int, i: int) -> Tensor:
        z = net.embed(w, x)
        with torch.no_grad():
            others = [net.embed(m, x) for m in (received, *before[i][: method.prev_buffer])]
        sims = torch.stack([F.cosine_similarity(z, o) for o in others], 1) / method.temperature
        con = F.cross_entropy(sims, torch.zeros(len(x), dtype=torch.long))
        return F.cross_entropy(net(w, x), y) + method.mu * con

    assert gap(by_hand(fed, loss, lambda w, t, i: before[i].insert(0, w)), fed.shared.net) < 1e-12


# ---- options

DRAWS = [[0, 1, 2], [0, 3, 4], [0, 1, 3], [1, 4, 5]]  # client 0 always, 1 with a pause, 3 late, 5 last


def joined(engine: str = "loop", net: Tiny | None = None, **options: Any) -> Harnessed:
    """Four rounds in which clients come late and pause."""
    draws = options.pop("draws", DRAWS)
    return ragged(MOON(**options), net, engine=engine, rounds=4, draws=draws).run()


def everybody(engine: str, **options: Any) -> Harnessed:
    """Two rounds with all clients."""
    return ragged(MOON(**options), engine=engine, rounds=2).run()


@engines
def test_first_prev(engine: str) -> None:
    none, copy, late, own = (joined(engine, first_prev=f)
                             for f in ("none", "global_copy", "own_init_late", "own_init"))  # fmt: skip
    assert identical(state(none), state(copy))  # the gradient is exactly 0; only the logged loss differs
    assert none.terms[0]["con"] == 0 and copy.terms[0]["con"] == pytest.approx(math.log(2))
    assert late.terms[0]["con"] == 0 and own.terms[0]["con"] > 0
    assert gap(none.shared, late.shared) > 1e-6 < gap(late.shared, own.shared)
    full = [everybody(engine, first_prev=f) for f in ("none", "own_init_late", "own_init")]
    assert identical(state(full[0]), state(full[1]))
    assert gap(full[0].shared, full[2].shared) > 1e-6


def test_own_init_is_the_client_s_private_stream() -> None:
    fed = ragged(MOON(first_prev="own_init"), Tiny(norm=True), seed=3)
    for t in (0, 2):
        client = RunClient(fed.task, 4, t)
        queue = fed.method.negatives(client, fed.shared, Tree())
        wanted = fed.task.net.init(rng.private("moon", "init", 3, -1, 4)).map(
            lambda v: v.double() if v.is_floating_point() else v
        )
        assert list(queue) == ["p0"] and identical(queue.p0, wanted)
        assert all(v.dtype in (torch.float64, torch.int64) for v in tensors(queue))
    assert not identical(wanted, fed.task.initial)


@engines
def test_the_stand_in_is_never_stored(engine: str) -> None:
    for first in ("global_copy", "own_init"):
        fed = joined(engine, first_prev=first, prev_buffer=4)
        assert {i: len(fed.own(i).get("prev", ())) for i in range(7)} == {
            0: 3,
            1: 3,
            2: 1,
            3: 2,
            4: 2,
            5: 1,
            6: 0,
        }


@engines
def test_prev_age(engine: str) -> None:
    latest, fresh = (joined(engine, prev_age=a) for a in ("latest", "previous_round_only"))
    assert gap(latest.shared, fresh.shared) > 1e-6  # client 1 pauses in round 1
    full = [everybody(engine, prev_age=a) for a in ("latest", "previous_round_only")]
    assert identical(state(full[0]), state(full[1]))
    own = fresh.own(1)
    for t, used in ((int(own.last) + 1, True), (int(own.last) + 2, False)):
        negatives = fresh.method.negatives(RunClient(fresh.task, 1, t), fresh.shared, own)
        assert bool(negatives) is used


def test_idle_client_has_no_stand_in() -> None:
    fed = joined(prev_age="previous_round_only", first_prev="own_init")
    assert not fed.method.negatives(RunClient(fed.task, 2, 3), fed.shared, fed.own(2))


@engines
@pytest.mark.parametrize("size", [1, 2, 4])
def test_prev_buffer_keeps_the_last_participations(engine: str, size: int) -> None:
    fed = ragged(MOON(prev_buffer=size), engine=engine, rounds=5, draws=[*DRAWS[:3], [0, 1, 2], [0, 1, 4]])
    sent = []
    for t in range(5):
        fed.play(t)
        sent.insert(0, fed.last.uploads[0].net)  # client 0 takes part in every round
    queue = fed.own(0).prev
    assert list(queue) == [f"p{k}" for k in range(size)]
    assert all(identical(queue[f"p{k}"], sent[k]) for k in range(size))


@engines
def test_prev_buffer_moves_the_result(engine: str) -> None:
    results = [joined(engine, prev_buffer=size, draws=[[0, 1]] * 4).shared for size in (1, 2, 4)]
    assert gap(results[0], results[1]) > 1e-6 < gap(results[1], results[2])


@engines
def test_frozen_mode(engine: str) -> None:
    plain = [everybody(engine, frozen_mode=m) for m in ("eval", "train")]
    assert gap(state(plain[0]), state(plain[1])) < 1e-12
    normed = [ragged(MOON(frozen_mode=m), Tiny(norm=True), engine=engine, rounds=2).run() for m in ("eval", "train")]
    assert gap(normed[0].shared, normed[1].shared) > 1e-6
    # neither mode moves a buffer: all are what the training alone would count
    counters = [int(fed.shared.net["encoder.num_batches_tracked"]) for fed in normed]
    assert counters == [2 * 2 * 4] * 2


@engines
def test_contrast_feature(engine: str) -> None:
    z, r = (everybody(engine, contrast_feature=f) for f in ("z", "r"))
    assert gap(z.shared, r.shared) > 1e-6
    bare = [ragged(MOON(contrast_feature=f), Tiny(projected=None), engine=engine, rounds=2).run() for f in ("z", "r")]
    assert identical(state(bare[0]), state(bare[1]))


@engines
def test_second_term(engine: str) -> None:
    kw = {"engine": engine, "rounds": 2, "augment": Shift(), "grad_clip_norm": 0.7}
    plain = ragged(FedAvg(), **kw).run().shared
    for off in (MOON(second_term="none", mu=5.0), MOON(mu=0.0), MOON(second_term="l2", mu=0.0)):
        assert identical(ragged(off, **kw).run().shared, plain)
    kw |= {"rounds": 1}
    first = ragged(FedAvg(), **kw).run().shared
    assert identical(ragged(MOON(), **kw).run().shared, first)  # no previous model in round 0
    assert gap(ragged(MOON(second_term="l2"), **kw).run().shared, first) > 1e-6  # needs none
    for term in ("l2", "none"):
        assert not ragged(MOON(second_term=term), **kw).run().own(0)  # nothing is remembered that nobody reads


@engines
def test_mu_and_temperature_move_the_result(engine: str) -> None:
    results = [everybody(engine, **o).shared for o in ({}, {"mu": 5.0}, {"temperature": 0.1})]
    assert gap(results[0], results[1]) > 1e-6 < gap(results[0], results[2])


def test_presets() -> None:
    for name, first in (("paper", "none"), ("official_code", "own_init_late")):
        assert Spec("moon", (("preset", name),)).build(Protocol()) == MOON(preset=name, first_prev=first)
    given = (("preset", "official_code"), ("first_prev", "own_init"))
    assert Spec("moon", given).build(Protocol()).first_prev == "own_init"
    assert Spec("moon", (), "moon.cifar10").build(Protocol()).mu == 5


def test_open_fields_are_protocol_fields() -> None:
    assert set(MOON.open_fields) <= set(fields(Protocol)) - set(fields(MOON))


# ---- memory, bytes, engines


@engines
def test_prev_is_the_model_before_averaging_and_survives_idle_rounds(engine: str) -> None:
    fed = ragged(MOON(), Tiny(norm=True), engine=engine, rounds=4, draws=DRAWS)
    fed.play(0)
    mine = Tree({k: v.clone() for k, v in fed.last.uploads[2].net.items()})  # client 2 never comes back
    for t in (1, 2, 3):
        fed.play(t)
    assert identical(fed.own(2).prev.p0, mine) and int(fed.own(2).last) == 0
    assert gap(fed.own(5).prev.p0, fed.shared.net) > 1e-6
    kept = {v.data_ptr() for i in range(7) for v in tensors(fed.own(i).get("prev", Tree()))}
    assert not kept & {v.data_ptr() for v in tensors(fed.shared)}


@engines
def test_personal_model_is_the_new_prev(engine: str) -> None:
    fed = joined(engine)
    personal = fed.personal()
    assert sorted(personal) == [1, 4, 5]
    assert all(identical(model.tree, fed.own(i).prev.p0) for i, model in personal.items())
    assert set(fed.refreshed()) == set(range(7))  # with a queue, an old one, and none at all


@engines
def test_no_traffic_beyond_fedavg(engine: str) -> None:
    plain = ragged(FedAvg(), Tiny(norm=True), engine=engine, rounds=4, draws=DRAWS).run()
    assert joined(engine, Tiny(norm=True), prev_buffer=4).bytes == plain.bytes


def test_engines_agree() -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"prev_buffer": 2, "first_prev": "own_init"}, {"augment": Shift(), "drop_last": True}),
        ({"frozen_mode": "train", "first_prev": "own_init_late"}, {"bn_buffers": "local"}),
        ({"second_term": "l2", "contrast_feature": "r"}, {"augment": Shift()}),
    ]
    for options, kw in cases:
        a, b = (ragged(MOON(**options), Tiny(norm=True), engine=e, rounds=4, draws=DRAWS, **kw).run() for e in ENGINES)
        assert gap(state(a), state(b)) < 1e-12
        assert a.bytes == b.bytes and a.terms[-1] == pytest.approx(b.terms[-1])
