"""Ditto: the test vectors, every option, what is equal by construction, traps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import ENGINES, Harnessed, Quadratic, federation
from protofl.methods.ditto import Ditto
from protofl.methods.fedavg import FedAvg
from ragged import Shift, Tiny, gap, identical, ragged, state
from torch import Tensor
from toy import SIZES, ToyBN, build, everything, outputs, toy
from toy import gap as toy_gap

from protofl import registry, rng
from protofl.errors import UserError
from protofl.options import fields
from protofl.protocol import Protocol
from protofl.tree import Tree, nbytes

engines = pytest.mark.parametrize("engine", ENGINES)


def one(value: float) -> Tree:
    """A model of one weight."""
    return Tree(w=torch.tensor([value], dtype=torch.float64))


class Alone(Quadratic):
    """Without layers that remember, a net is the same wherever its names stand."""

    def within(self, place: str) -> Any:
        return self


class Within(Tiny):
    """The same."""

    def within(self, place: str) -> Any:
        return self


def scalar(options: dict[str, Any], *, stored: float | None = 0.5, engine: str = "loop", **fields: Any) -> Harnessed:
    """f(v) = (v - 2)^2 / 2, w^t = 0, two steps of 0.1; the client has kept v = 0.5."""
    x = torch.tensor([[1.0, 2.0]] * 3, dtype=torch.float64)
    fed = federation(Ditto(**options), Alone(), x, torch.zeros(3, dtype=torch.long), [range(3)], engine=engine,
                     initial=one(0.0), **{"local_epochs": 2, **fields})  # fmt: skip
    if stored is not None:
        fed.memory.put(0, Tree(own=Tree(v=one(stored))))
    return fed


# ---- the vectors

VECTORS: list[tuple[dict[str, Any], float, list[float], float | None]] = [
    ({}, 0.0, [0.6125, 0.7053125], 2 / 1.75),
    ({"anchor": "local_trained"}, 0.0, [0.641, 0.757325], 1.3057142857),
    ({"lam": 0.0}, 0.0, [0.65, 0.785], 2.0),
    ({"personal_momentum": 0.9}, 0.0, [0.6125, 0.8403125], 20 / 10.75),  # of 10 gradients and 1 pull
    ({"personal_momentum": 0.9, "clip_prox": True}, 0.0, [0.6125, 0.8065625], 2 / 1.75),
    ({"personal_weight_decay": 0.1}, 0.0, [0.6075, 0.6951125], 2 / 1.85),
    ({}, 1.0, [0.5624999333, 0.6203123688], None),
    ({"clip_prox": True}, 1.0, [0.5999999111, 0.6949999267], None),
]


@engines
@pytest.mark.parametrize(("options", "clip", "path", "fixed"), VECTORS, ids=str)
def test_vectors(engine: str, options: dict[str, Any], clip: float, path: list[float], fixed: float | None) -> None:
    def after(epochs: int | str) -> float:
        fed = scalar({**options, "personal_epochs": epochs}, engine=engine, grad_clip_norm=clip).run()
        y = float(fed.last.uploads[0].net.w)
        assert clip or y == pytest.approx(0.38, abs=1e-12)
        return float(fed.own(0).v.w)

    assert [after(1), after("local_epochs")] == pytest.approx(path, abs=2e-10)
    assert after(2) == after("local_epochs")
    if fixed is not None:
        assert after(450) == pytest.approx(fixed, abs=2e-10)


@engines
@pytest.mark.parametrize("case", [0, 2, 3, 4, 5, 6, 7])
def test_vectors_batch_by_batch(engine: str, case: int) -> None:
    """All rows are alike, so that the order of the branches cannot be seen; each has a clip of its own."""
    options, clip, path, _ = VECTORS[case]
    fed = scalar({**options, "interleave": True}, engine=engine, grad_clip_norm=clip).run()
    assert float(fed.own(0).v.w) == pytest.approx(path[1], abs=2e-10)
    alone = scalar(options, engine=engine, grad_clip_norm=clip).run()
    assert identical(fed.shared, alone.shared) and list(fed.last.uploads[0].net) == ["w"]


# ---- against a plain script


def by_hand(fed: Harnessed, t: int, i: int, v: Tree, anchor: Tree, skipped: int) -> Tree:
    """v of client i after its branch in round t, by a plain script, behind `skipped` epochs of the stream."""
    p, o, net = fed.protocol, fed.method, fed.task.net
    part = torch.as_tensor(fed.task.parts[i])
    stream = rng.train(p.seed, t, i)
    for _ in range(skipped):
        stream.permutation(len(part))
    b: dict[str, Tensor] = {}
    for _ in range(p.local_epochs if o.personal_epochs == "local_epochs" else o.personal_epochs):
        for rows in part[torch.from_numpy(stream.permutation(len(part)))].split(p.batch_size):
            v = Tree({k: u.detach().requires_grad_() for k, u in v.items()})
            loss = F.cross_entropy(net(v, fed.task.x[rows]), fed.task.y[rows])
            if o.clip_prox:
                loss = loss + o.lam / 2 * sum((v[k] - anchor[k]).square().sum() for k in v)
            g = torch.autograd.grad(loss, list(v.values()))
            factor = min(1.0, p.grad_clip_norm / (float(sum(d.square().sum() for d in g)) ** 0.5 + 1e-6))
            with torch.no_grad():
                for (k, u), d in zip(v.items(), g):
                    b[k] = o.personal_momentum * b.get(k, 0) + factor * d + o.personal_weight_decay * u
                    v[k] = u - p.client_lr * (b[k] + (0 if o.clip_prox else o.lam) * (u - anchor[k]))
    return v.map(Tensor.detach)


DRAWS = [[0, 1, 2], [0, 3], [1, 3, 4]]
DETAILS: list[dict[str, Any]] = [
    {},
    {"anchor": "local_trained", "lam": 2.0},
    {"personal_momentum": 0.9, "personal_weight_decay": 0.05, "personal_epochs": 1},
    {"clip_prox": True, "personal_momentum": 0.9, "lam": 0.1},
    {"interleave": True, "personal_momentum": 0.5},
]


@engines
@pytest.mark.parametrize("options", DETAILS, ids=str)
def test_by_hand(engine: str, options: dict[str, Any]) -> None:
    """Every client from its last v (w^0 at first), batches from behind the global branch, on partial draws."""
    fed = ragged(Ditto(**options), Within(), engine=engine, draws=DRAWS, grad_clip_norm=0.4)
    kept = dict.fromkeys(range(7), fed.task.initial)
    for t in range(3):
        received = fed.shared.net
        played = fed.play(t)
        skipped = 0 if fed.method.interleave else fed.protocol.local_epochs
        for i, upload in zip(played.ids, played.uploads):
            anchor = received if fed.method.anchor == "received" else upload.net
            kept[i] = by_hand(fed, t, i, kept[i], anchor, skipped)
            assert gap(kept[i], fed.own(i).v) < 1e-12
    for i, model in fed.personal().items():
        assert identical(model.tree, fed.own(i).v)


# ---- equal by construction

EVERY: list[dict[str, Any]] = [
    {},
    {"lam": 0.0},
    {"lam": 2.0},
    {"anchor": "local_trained"},
    {"interleave": True},
    {"personal_epochs": 1},
    {"personal_momentum": 0.9},
    {"personal_weight_decay": 1e-2},
    {"clip_prox": True},
    {"interleave": True, "clip_prox": True, "personal_momentum": 0.9, "personal_weight_decay": 1e-2},
]


@engines
def test_all_that_is_sent_is_fedavgs_bit_for_bit(engine: str) -> None:
    kw = {"engine": engine, "rounds": 2, "local_epochs": 1, "drop_last": True, "grad_clip_norm": 0.3, "server_lr": 0.5}
    plain = toy(FedAvg(), **kw).run()
    for options in EVERY:
        fed = toy(Ditto(**options), **kw).run()
        assert identical(fed.shared, plain.shared) and fed.bytes == plain.bytes, options
        assert identical([r.uploads for r in fed.rounds], [r.uploads for r in plain.rounds]), options
        assert identical(fed.global_model().tree, plain.global_model().tree)


@engines
@pytest.mark.parametrize("fields", [{"optimizer_reset": "never"}, {"bn_buffers": "local"}], ids=str)
def test_the_global_branch_keeps_its_own_momenta_and_buffers(engine: str, fields: dict[str, Any]) -> None:
    kw = {"engine": engine, "rounds": 3, "local_epochs": 1, "draws": [[0, 1, 3], [1, 2], [0, 1, 5]], **fields}
    plain = toy(FedAvg(), **kw).run()
    for options in ({}, {"interleave": True}, {"anchor": "local_trained", "clip_prox": True}):
        fed = toy(Ditto(**options), **kw).run()
        assert identical(fed.shared, plain.shared)
        assert identical([r.uploads for r in fed.rounds], [r.uploads for r in plain.rounds])
        for i in (0, 1, 2, 3, 5):
            mine, theirs = ((f.memory.get(i) or Tree()) for f in (fed, plain))
            assert identical(mine.get("buffers", Tree()), theirs.get("buffers", Tree()))
            assert identical(mine.get("momenta", Tree()).without("personal"), theirs.get("momenta", Tree()))


def kept(fed: Harnessed) -> list[Tree]:
    """v of all clients."""
    return [fed.own(i).get("v", Tree()) for i in range(fed.task.clients)]


@engines
def test_equal_by_construction(engine: str) -> None:
    def v(options: dict[str, Any], **fields: Any) -> list[Tree]:
        return kept(ragged(Ditto(**options), engine=engine, rounds=2, local_epochs=1, **fields).run())

    inside, mine = {"clip_prox": True}, {"personal_momentum": 0.9}
    assert gap(v({}), v(inside)) < 1e-14  # no clip: one step either way
    assert gap(v(mine), v(mine | inside)) > 1e-6  # unless a buffer sees the pull
    assert gap(v({}, grad_clip_norm=0.4), v(inside, grad_clip_norm=0.4)) > 1e-6
    none = {"lam": 0.0}
    for other in (inside, {"anchor": "local_trained"}):
        assert identical(v(none, grad_clip_norm=0.4), v(none | other, grad_clip_norm=0.4))
    # decay reads v, the pull its distance: they differ, though both are linear
    assert gap(v({"lam": 0.1}), v({"lam": 0.0, "personal_weight_decay": 0.1})) > 1e-6


@engines
def test_every_option_moves_v(engine: str) -> None:
    options = [o for o in EVERY[:-1] if o != {"clip_prox": True}]
    runs = [kept(ragged(Ditto(**o), Within(), engine=engine, rounds=1, draws=[[0, 2, 5]]).run()) for o in options]
    for i, a in enumerate(runs):
        assert all(gap(a, b) > 1e-6 for b in runs[:i]), options[i]


# ---- traps


@engines
def test_idle_clients_keep_v_and_the_others_have_w0(engine: str) -> None:
    fed = ragged(Ditto(), engine=engine, draws=DRAWS, pm_clients="all")
    fed.play(0)
    mine = fed.own(2).v.map(torch.clone)
    fed.play(1)
    fed.play(2)
    assert sorted(personal := fed.personal()) == list(range(7))
    assert identical(personal[2].tree, mine)
    for never in (5, 6):
        assert identical(personal[never].tree, fed.task.initial) and fed.memory.get(never) is None
    assert gap(personal[0].tree, fed.shared.net) > 1e-6


def test_all_clients_can_be_evaluated_as_trained() -> None:
    protocol = Protocol(pm_clients="all", metrics=("gm", "pm_v"))
    registry.check(Ditto(), protocol, protocol, ToyBN())
    with pytest.raises(UserError, match="keeps its personal models"):
        registry.check(FedAvg(), protocol, protocol, ToyBN())


@engines
@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("where", ["average", "local"])
def test_buffers_of_v_are_its_own_and_not_pulled(engine: str, interleave: bool, where: str) -> None:
    kw = {"engine": engine, "draws": [[0, 1, 3], [0, 1, 3]], "rounds": 2, "bn_buffers": where}
    fed = toy(Ditto(interleave=interleave), **kw).run()
    for i in (0, 1, 3):
        v, n = fed.own(i).v, SIZES[i]
        assert list(v) == list(fed.task.initial)
        assert int(v["encoder.norm1.num_batches_tracked"]) == 2 * 2 * -(-n // 8)
        mean = v["encoder.norm1.running_mean"]
        assert gap(mean, fed.shared.net["encoder.norm1.running_mean"]) > 1e-3
    # a pull far stronger than training moves all weights, and no buffer, next to the anchor
    strong = toy(Ditto(interleave=interleave, lam=19.99), **kw | {"rounds": 1, "client_lr": 0.05})
    received = strong.shared.net
    strong.run()
    v = strong.own(0).v
    assert gap(v["encoder.norm1.running_var"], received["encoder.norm1.running_var"]) > 0.1


@engines
def test_nothing_aliases(engine: str) -> None:
    for options in ({}, {"interleave": True}):
        fed = ragged(Ditto(**options), Tiny(norm=True), engine=engine, rounds=1) if not options else toy(
            Ditto(**options), engine=engine, rounds=1)  # fmt: skip
        before = {k: v.clone() for k, v in fed.task.initial.items()}
        fed.run()
        assert identical(fed.task.initial, Tree(before))
        trees = [fed.shared.net, fed.task.initial, *[u.net for u in fed.last.uploads],
                 *[fed.own(i).v for i in fed.last.ids]]  # fmt: skip
        places = [v.data_ptr() for tree in trees for v in tree.values()]
        assert len(set(places)) == len(places)


@engines
def test_a_buffer_of_momentum_lives_for_one_round(engine: str) -> None:
    # One step a round from v = 0.5: without a pull the second round begins with a buffer of 0 again.
    fed = scalar({"lam": 0.0, "personal_momentum": 0.9}, engine=engine, local_epochs=1, rounds=2).run()
    assert float(fed.own(0).v.w) == pytest.approx(0.785, abs=1e-12)


@pytest.mark.parametrize(("speed", "stable"), [(1.99, True), (2.01, False)])
def test_stable_while_eta_times_lam_and_curvature_stay_below_2(speed: float, stable: bool) -> None:
    fed = scalar({"lam": 10 * speed - 1, "personal_epochs": 1000}).run()
    assert (abs(float(fed.own(0).v.w)) < 2) == stable


# ---- refresh


@engines
def test_refresh_runs_the_personal_branch_alone(engine: str) -> None:
    fed = ragged(Ditto(), engine=engine, draws=DRAWS, grad_clip_norm=0.4).run()
    before = [v.clone() for v in state(fed)]
    refreshed = fed.refreshed()
    assert identical(state(fed), before) and sorted(refreshed) == list(range(7))
    for i, model in refreshed.items():
        v = fed.own(i).get("v", fed.task.initial)
        alone = by_hand(fed, fed.protocol.rounds, i, v, fed.shared.net, 0)  # the stream of t = T from its beginning
        assert gap(alone, model.tree) < 1e-12
    assert all(fed.memory.get(i) is None for i in (5, 6))


@engines
def test_refresh_of_v_that_is_pulled_to_the_trained_model_runs_both(engine: str) -> None:
    fed = scalar({"anchor": "local_trained"}, engine=engine).run()
    assert float(fed.shared.net.w) == pytest.approx(0.38)
    y = 2 - 0.81 * (2 - 0.38)
    v = float(fed.own(0).v.w)
    for _ in range(2):
        v = v + 0.1 * (2 - v) - 0.1 * 0.75 * (v - y)
    assert float(fed.refreshed()[0].tree.w) == pytest.approx(v, abs=1e-12)
    plain = scalar({}, engine=engine).run()
    v = float(plain.own(0).v.w)
    for _ in range(2):
        v = v + 0.1 * (2 - v) - 0.1 * 0.75 * (v - 0.38)
    assert float(plain.refreshed()[0].tree.w) == pytest.approx(v, abs=1e-12)


# ---- refusals


def test_refusals() -> None:
    with pytest.raises(UserError, match="anchor=received, or interleave=false"):
        Ditto(interleave=True, anchor="local_trained")
    checked = [
        ({"interleave": True, "personal_epochs": 1}, {}, "personal_epochs=1 needs interleave=false"),
        ({"personal_momentum": 0.9}, {"optimizer_reset": "never"}, "optimizer_reset=per_round"),
        ({"lam": 2.0}, {"client_lr": 1.0}, "lam must be below 2"),
    ]
    for options, fields_, said in checked:
        with pytest.raises(UserError, match=said):
            Ditto(**options).check(Protocol(**fields_), ToyBN())
    for options, fields_ in (
        ({"interleave": True, "personal_epochs": 10}, {}),
        ({"interleave": True}, {}),
        ({}, {"optimizer_reset": "never"}),
        ({"lam": 2.0}, {"client_lr": 0.99}),
    ):
        Ditto(**options).check(Protocol(**fields_), ToyBN())


def test_values() -> None:
    made = build("ditto", {"personal_epochs": "1", "lam": "2", "clip_prox": "true"})
    assert made == Ditto(personal_epochs=1, lam=2.0, clip_prox=True)
    assert build("ditto") == Ditto(lam=0.75, anchor="received", personal_epochs="local_epochs")
    for bad in ({"personal_epochs": "0"}, {"personal_epochs": "many"}, {"lam": "-1"}, {"anchor": "w"}):
        with pytest.raises(UserError):
            build("ditto", bad)
    assert set(Ditto.open_fields) <= set(fields(Protocol)) - set(fields(Ditto))


# ---- cost, engines


@engines
@pytest.mark.parametrize("options", [{}, {"interleave": True}, {"personal_epochs": 1}, {"anchor": "local_trained"}])
def test_bill(engine: str, options: dict[str, Any]) -> None:
    fed = toy(Ditto(**options), engine=engine, participation=1.0, rounds=1).run()
    bill, size = fed.method.bill(), nbytes(fed.task.initial) // 4
    symbols = {"P": size, "E": 2, "n": sum(SIZES)}
    assert fed.last.bytes == {k: 7 * 4 * eval(e, symbols) for k, e in (("down", bill.down), ("up", bill.up))} | {
        "once": 0
    }
    assert fed.last.samples == {"trained": eval(bill.trained, symbols), "forward": eval(bill.forward, symbols)}
    assert fed.last.state_bytes == 4 * eval(bill.state, symbols)


def test_engines_agree() -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {"drop_last": True}),
        ({"anchor": "local_trained", "personal_epochs": 3}, {"augment": False, "bn_buffers": "local"}),
        ({"personal_momentum": 0.9, "personal_weight_decay": 1e-2, "clip_prox": True}, {"crew": 1}),
        ({"interleave": True, "personal_momentum": 0.9, "clip_prox": True}, {"optimizer_reset": "per_round"}),
        ({"interleave": True}, {"optimizer_reset": "never", "bn_buffers": "local"}),
    ]
    for options, kw in cases:
        a, b = (toy(Ditto(**options), engine=e, rounds=2, local_epochs=1, **kw).run() for e in ENGINES)
        assert toy_gap(everything(a), everything(b)) < 1e-12
        assert toy_gap(outputs(a), outputs(b)) < 1e-12
        assert a.bytes == b.bytes and a.terms[-1] == pytest.approx(b.terms[-1])
    a, b = (ragged(Ditto(), engine=e, augment=Shift(), participation=0.5).run() for e in ENGINES)
    assert gap(state(a), state(b)) < 1e-12
    assert set(a.terms[-1]) == {"loss", "ce", "personal"}
