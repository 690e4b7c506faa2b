"""SCAFFOLD: the test vectors, every option, what is equal by construction, traps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import ENGINES, Harnessed, Quadratic, federation, quadratic
from protofl.methods.fedavg import FedAvg
from protofl.methods.scaffold import SCAFFOLD
from ragged import SIZES, Shift, Tiny, gap, identical, ragged, state
from toy import everything, toy
from toy import gap as toy_gap

from protofl import rng
from protofl.errors import UserError
from protofl.handles import RunClient, RunServer
from protofl.nets import build
from protofl.options import fields
from protofl.protocol import Protocol
from protofl.registry import Spec
from protofl.tree import Tree, nbytes, tensors

engines = pytest.mark.parametrize("engine", ENGINES)

NIID = {"correction": "after_step", "tau": "raw"}
UNIFORM = SCAFFOLD(weighting="uniform")


def numbers(fed: Harnessed) -> dict[str, Any]:
    """y, c_i, c and w of the two (or three) quadratic clients."""
    return {
        "y": [float(u.net.w) for u in fed.last.uploads],
        "c_i": [float(fed.own(i).c.w) if fed.own(i) else 0.0 for i in range(fed.task.clients)],
        "c": float(fed.shared.c.w),
        "w": float(fed.shared.net.w),
    }


# ---- vector 1: h = (1, 2), a = (1, 3), eta = .1, tau = 2


@engines
def test_path(engine: str) -> None:
    fed = quadratic(UNIFORM, engine=engine, local_epochs=2, rounds=3)
    for y, c_i, c, w in [
        ((0.19, 1.08), (-0.95, -5.4), -3.175, 0.635),
        ((1.1271, 1.0859), (-0.2355, -4.4795), -2.3575, 1.1065),
        ((1.489445, 1.4062), (0.207275, -3.6205), -1.7066125, 1.4478225),
    ]:
        fed.play(0)
        got = numbers(fed)
        assert got["y"] == pytest.approx(y, abs=1e-12) and got["c_i"] == pytest.approx(c_i, abs=1e-12)
        assert (got["c"], got["w"]) == pytest.approx((c, w), abs=1e-12)


@engines
def test_full_gradient(engine: str) -> None:
    fed = quadratic(SCAFFOLD(weighting="uniform", option=1), engine=engine, local_epochs=2, rounds=3)
    for w, c_i in ((0.635, (-1, -6)), (1.107875, (0.635 - 1, 2 * (0.635 - 3))), (1.449121875, None)):
        fed.play(0)
        assert numbers(fed)["w"] == pytest.approx(w, abs=1e-12)
        assert c_i is None or numbers(fed)["c_i"] == pytest.approx(c_i, abs=1e-12)


WEIGHTINGS = [
    ("uniform", "data_size", [0.635, 1.1065, 1.4478225], None, 7 / 3),
    ("follow_setting", "uniform", [0.635, 1.1065, 1.4478225], None, 7 / 3),
    ("niid", "data_size", [0.8575, 1.24805625, 1.5318976094], None, 7 / 3),
    ("niid", "uniform", [0.8575, 1.24805625, 1.5318976094], None, 7 / 3),
    ("follow_setting", "data_size", [0.8575, 1.4510875, 1.8553658125], [-4.2875, -2.9679375, -2.0213915625], 19 / 7),
]


@engines
@pytest.mark.parametrize(("weighting", "setting", "w", "c", "limit"), WEIGHTINGS)
def test_weighting(engine: str, weighting: str, setting: str, w: list[float], c: Any, limit: float) -> None:
    fed = quadratic(SCAFFOLD(weighting=weighting), engine=engine, model_weighting=setting, local_epochs=2)
    seen = []
    for _ in range(3):
        fed.play(0)
        seen.append(numbers(fed))
    assert [s["w"] for s in seen] == pytest.approx(w, abs=5e-11)
    assert c is None or [s["c"] for s in seen] == pytest.approx(c, abs=1e-11)
    for _ in range(97):
        fed.play(0)
    assert numbers(fed)["w"] == pytest.approx(limit, abs=1e-9)


# ---- vector 2: partial participation


@engines
@pytest.mark.parametrize(
    ("method", "first", "second"),
    [
        (UNIFORM, (-1.2666666667, 0.38), (2.3243333333, -0.4918888889, 0.1684666667)),
        (SCAFFOLD(), (-0.95, 0.475), (2.39875, 0.48925, 0.18525)),
    ],
)
def test_partial(engine: str, method: SCAFFOLD, first: tuple[float, ...], second: tuple[float, ...]) -> None:
    fed = quadratic(method, rows=((1, 1), (1, 3), (1, -2)), n=(10, 30, 60), engine=engine, draws=[[0, 1], [2]],
                    local_epochs=2, rounds=2)  # fmt: skip
    fed.play(0)
    got = numbers(fed)
    assert got["y"] == pytest.approx([0.19, 0.57]) and got["c_i"] == pytest.approx([-0.95, -2.85, 0])
    assert (got["c"], got["w"]) == pytest.approx(first, abs=5e-11)
    fed.play(1)
    got = numbers(fed)
    assert got["c_i"][:2] == pytest.approx([-0.95, -2.85])  # kept while idle
    assert (got["c_i"][2], got["c"], got["w"]) == pytest.approx(second, abs=5e-11)
    assert got["y"] == pytest.approx([second[2]], abs=5e-11)


# ---- vectors 3 and 4: momentum and clip. A plain script goes to the last round but one, the engines play it.


def plain(
    method: SCAFFOLD, rounds: int, steps: tuple[int, int], *, h: Any = (1, 2), n: Any = (10, 30), lr: float = 0.005,
    rho: float = 0.9, clip: float = 0.0,
) -> tuple[float, float, list[float]]:  # fmt: skip
    """w, c and c_i of two quadratic clients (a = 1, 3) after so many rounds, in Python's own numbers."""
    equal = method.weighting == "uniform"
    p = [0.5, 0.5] if equal else [k / sum(n) for k in n]
    w, c, own = 0.0, 0.0, [0.0, 0.0]
    for _ in range(rounds):
        ends, changes = [], []
        for i, a in enumerate((1, 3)):
            y, v, push, tau = w, 0.0, c - own[i], steps[i]
            for _ in range(tau):
                g = h[i] * (y - a) + (push if method.correction == "in_gradient" else 0.0)
                g *= min(1.0, clip / (abs(g) + 1e-6)) if clip else 1.0
                v = rho * v + g
                y -= lr * v + (lr * push if method.correction == "after_step" else 0.0)
            raw = method.tau == "raw" or not rho
            weight = tau if raw else (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)
            ends.append(y)
            changes.append((w - y) / (weight * lr) - c)
        w += sum(k * (y - w) for k, y in zip(p, ends))
        c += sum(k * d for k, d in zip(p, changes))
        own = [o + d for o, d in zip(own, changes)]
    return w, c, own


def resumed(method: SCAFFOLD, engine: str, rounds: int, steps: tuple[int, int], **kw: Any) -> float:
    """w after the last of so many rounds, which the engine plays; the plain script plays the others."""
    h, rho, lr, clip = kw.get("h", (1, 2)), kw.get("rho", 0.9), kw.get("lr", 0.005), kw.get("clip", 0.0)
    sizes = (10, 30) if steps[0] == steps[1] else (10, 40)
    batch = 64 if steps[0] == steps[1] else 10
    fed = quadratic(
        method, rows=((h[0], 1), (h[1], 3)), n=sizes, engine=engine, momentum=rho, client_lr=lr, grad_clip_norm=clip,
        local_epochs=steps[0], batch_size=batch,
    )  # fmt: skip
    assert [RunClient(fed.task, i, 0).steps() for i in (0, 1)] == list(steps)
    w, c, own = plain(method, rounds - 1, steps, n=sizes, **kw)
    one = torch.tensor([1.0], dtype=torch.float64)
    fed.shared = Tree(net=Tree(w=w * one), c=Tree(w=c * one))
    for i, c_i in enumerate(own):
        fed.memory.put(i, Tree(own=Tree(c=Tree(w=c_i * one))))
    fed.play(0)
    got, wanted = numbers(fed), plain(method, rounds, steps, n=sizes, **kw)
    assert (got["w"], got["c"], *got["c_i"]) == pytest.approx((wanted[0], wanted[1], *wanted[2]), rel=1e-11)
    return float(got["w"])


@engines
@pytest.mark.parametrize(
    ("options", "uniform", "by_size"),
    [({}, 2.3333333333, 2.7142857143), (NIID, 2.3690489624, 2.7336690598)],
    ids=["in_gradient", "after_step"],
)
def test_momentum(engine: str, options: dict[str, str], uniform: float, by_size: float) -> None:
    for weighting, wanted in (("uniform", uniform), ("follow_setting", by_size)):
        method = SCAFFOLD(weighting=weighting, **options)
        for rounds in (1, 2, 3):
            resumed(method, engine, rounds, (20, 20))
        assert resumed(method, engine, 200, (20, 20)) == pytest.approx(wanted, abs=6e-11)


@engines
@pytest.mark.parametrize("weighting", ["uniform", "follow_setting"])
def test_raw_steps_with_momentum_diverge(engine: str, weighting: str) -> None:
    fed = quadratic(SCAFFOLD(weighting=weighting, tau="raw"), engine=engine, momentum=0.9, client_lr=0.005,
                    local_epochs=20, rounds=14).run()  # fmt: skip
    assert abs(float(fed.shared.net.w)) > 1e6


@engines
def test_unequal_steps(engine: str) -> None:
    assert resumed(UNIFORM, engine, 3000, (5, 20)) == pytest.approx(2.3333333333, abs=6e-11)
    biased = SCAFFOLD(weighting="uniform", **NIID)
    assert resumed(biased, engine, 3000, (5, 20)) == pytest.approx(2.6839687681, abs=6e-11)


@engines
def test_clip(engine: str) -> None:
    fed = quadratic(UNIFORM, engine=engine, local_epochs=2, grad_clip_norm=2.0)
    seen = []
    for _ in range(3):
        fed.play(0)
        seen.append(numbers(fed)["w"])
    assert seen == pytest.approx([0.2949999655, 0.6118499096, 0.9380953325], abs=6e-11)
    far = {"h": (10, 20), "clip": 10.0, "rho": 0.0}
    assert resumed(UNIFORM, engine, 400, (5, 5), **far) == pytest.approx(2.3333333333, abs=6e-11)


def test_weight_of_a_constant_gradient() -> None:
    def weight(epochs: int, rho: float, **options: Any) -> float:
        fed = quadratic(SCAFFOLD(**options), momentum=rho, local_epochs=epochs)
        return fed.method.weight(RunClient(fed.task, 0, 0))

    assert weight(20, 0.9) == pytest.approx(120.9418989, abs=5e-8)
    for tau, rho in ((1, 0.9), (7, 0.5), (300, 0.9)):
        wanted = (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)
        assert weight(tau, rho) == pytest.approx(wanted, rel=1e-12)
    assert weight(20, 0.0) == weight(20, 0.9, tau="raw") == 20
    assert weight(4, 1.0) == 1 + 2 + 3 + 4


# ---- against a plain script


def by_hand(fed: Harnessed, option: int) -> tuple[Tree, Tree, list[Tree]]:
    """w, c and c_i after all rounds with torch's optimiser and its clip; correction inside the gradient, p and q by n."""
    p, net, parts = fed.protocol, fed.task.net, fed.task.parts
    w = Tree(fed.task.initial)
    c = w.map(torch.zeros_like)
    own = [c] * len(parts)
    for t in range(p.rounds):
        ids, models, changes = fed.taking_part(t), [], []
        for i in ids:
            q = Tree({k: v.clone().requires_grad_() for k, v in w.items()})
            lr = p.client_lr * p.lr_decay_per_round**t
            sgd = torch.optim.SGD(list(q.values()), lr=lr, momentum=p.momentum, weight_decay=p.weight_decay)
            stream, steps = rng.train(p.seed, t, i), 0
            for _ in range(p.local_epochs):
                order = torch.from_numpy(stream.permutation(len(parts[i])))
                for rows in parts[i][order].split(p.batch_size):
                    sgd.zero_grad()
                    F.cross_entropy(net(q, fed.task.x[rows]), fed.task.y[rows]).backward()
                    for k, v in q.items():
                        v.grad += c[k] - own[i][k]
                    torch.nn.utils.clip_grad_norm_(list(q.values()), p.grad_clip_norm)
                    sgd.step()
                    steps += 1
            y = q.map(torch.Tensor.detach)
            rho = p.momentum
            tau = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
            new = own[i] - c + (w - y) / (tau * lr)
            if option == 1:
                q = Tree({k: v.clone().requires_grad_() for k, v in w.items()})
                F.cross_entropy(net(q, fed.task.x[parts[i]]), fed.task.y[parts[i]]).backward()
                new = q.map(lambda v: v.grad)
            changes.append(new - own[i])
            models.append(y)
            own[i] = new
        part = sum(SIZES[i] for i in ids)
        w = Tree({k: sum(m[k] * (SIZES[i] / part) for m, i in zip(models, ids)) for k in w})
        c = Tree({k: c[k] + sum(d[k] * (SIZES[i] / sum(SIZES)) for d, i in zip(changes, ids)) for k in c})
    return w, c, own


@engines
@pytest.mark.parametrize("option", [1, 2])
def test_by_hand(engine: str, option: int) -> None:
    fed = ragged(SCAFFOLD(option=option), engine=engine, participation=0.5, rounds=4, grad_clip_norm=0.6,
                 lr_decay_per_round=0.7).run()  # fmt: skip
    w, c, own = by_hand(fed, option)
    assert gap(w, fed.shared.net) < 1e-12 and gap(c, fed.shared.c) < 1e-11
    for i in range(7):
        assert not fed.own(i) or gap(own[i], fed.own(i).c) < 1e-11


# ---- equal by construction

HARD = {"participation": 0.5, "augment": Shift(), "grad_clip_norm": 0.7, "drop_last": True}


@engines
@pytest.mark.parametrize("options", [{}, {"option": 1}, {"tau": "raw"}, NIID], ids=str)
def test_round_0_is_fedavg_bit_for_bit(engine: str, options: dict[str, Any]) -> None:
    for weighting, setting, same in [
        ("follow_setting", "data_size", "data_size"),
        ("follow_setting", "uniform", "uniform"),
        ("uniform", "data_size", "uniform"),
        ("niid", "uniform", "data_size"),
    ]:
        kw = {**HARD, "engine": engine, "rounds": 1}
        method = SCAFFOLD(weighting=weighting, **options)
        ours = ragged(method, Tiny(norm=True), model_weighting=setting, **kw).run()
        plain = ragged(FedAvg(), Tiny(norm=True), model_weighting=same, **kw).run()
        assert identical(ours.shared.net, plain.shared.net)
        assert all(identical(a.net, b.net) for a, b in zip(ours.last.uploads, plain.last.uploads))
        assert float(ours.shared.c["head.bias"].abs().max()) > 0


@engines
def test_equal_by_construction(engine: str) -> None:
    def fed(options: dict[str, Any], **kw: Any) -> list[Any]:
        return state(ragged(SCAFFOLD(**options), engine=engine, participation=0.5, **kw).run())

    still = {"momentum": 0.0}
    assert identical(fed({"tau": "raw"}, **still), fed({}, **still))  # without momentum
    assert gap(fed({"tau": "raw"}, **still), fed(NIID, **still)) < 1e-12  # and without a clip
    uniform = {"model_weighting": "uniform"}
    assert identical(fed({}, **uniform), fed({"weighting": "uniform"}, **uniform))
    same = [quadratic(SCAFFOLD(weighting=w), n=(20, 20), engine=engine, rounds=3).run()
            for w in ("follow_setting", "uniform", "niid")]  # fmt: skip
    assert identical(same[0].shared, same[1].shared) and identical(same[0].shared, same[2].shared)


@engines
def test_every_option_moves_the_result(engine: str) -> None:
    results = [
        ragged(SCAFFOLD(**o), engine=engine, participation=0.5, rounds=3, grad_clip_norm=0.5).run().shared
        for o in ({}, {"weighting": "uniform"}, {"weighting": "niid"}, {"option": 1}, {"tau": "raw"}, NIID)
    ]
    for i, one in enumerate(results):
        assert all(gap(one, other) > 1e-6 for other in results[:i])


# ---- c is the mean of all control variates


@engines
@pytest.mark.parametrize("options", [{}, {"weighting": "uniform"}, {"weighting": "niid"}, {"option": 1}, NIID], ids=str)
def test_c_is_the_mean_of_all(engine: str, options: dict[str, Any]) -> None:
    for server_lr, setting in ((1.0, "data_size"), (0.5, "uniform")):
        fed = ragged(SCAFFOLD(**options), engine=engine, participation=0.3, rounds=5, server_lr=server_lr,
                     model_weighting=setting)  # fmt: skip
        by_size = options.get("weighting", "follow_setting") == "follow_setting" and setting == "data_size"
        for t in range(5):
            fed.play(t)
            mean = fed.shared.c.map(torch.zeros_like)
            for i, n in enumerate(SIZES):
                share = n / sum(SIZES) if by_size else 1 / len(SIZES)
                mean = mean + (fed.own(i).c * share if fed.own(i) else mean * 0)
            assert gap(mean, fed.shared.c) < 1e-12
        assert len(fed.memory) < len(SIZES)  # some never came: their c_i is 0


def test_clients_without_data_do_not_count() -> None:
    fed = quadratic(UNIFORM, rows=((1, 1), (2, 3), (5, 5)), n=(10, 30, 0), local_epochs=2, rounds=3).run()
    assert numbers(fed)["w"] == pytest.approx(1.4478225) and numbers(fed)["c"] == pytest.approx(-1.7066125)


@engines
def test_own_steps(engine: str) -> None:
    """A constant gradient is found whatever the number of steps: f = g w has c_i = g."""

    class Slope(Quadratic):
        def loss(self, w: Tree, batch: Any) -> Any:
            return batch.mean(batch.x[:, 0] * w["w"])

    x = torch.tensor([[2.0, 0]] * 10 + [[-3.0, 0]] * 40, dtype=torch.float64)
    for rho in (0.0, 0.9):
        fed = federation(SCAFFOLD(), Slope(), x, torch.zeros(50).long(), [range(10), range(10, 50)], engine=engine,
                         momentum=rho, batch_size=10).run()  # fmt: skip
        assert numbers(fed)["c_i"] == pytest.approx([2, -3]) and numbers(fed)["c"] == pytest.approx(-2)


# ---- traps


def test_everything_starts_at_zero() -> None:
    fed = ragged(SCAFFOLD(), Tiny(norm=True))
    first = fed.method.enrol(RunClient(fed.task, 3, 2))
    assert all(not v.any() for v in tensors((fed.shared.c, first.c)))
    assert list(fed.shared.c) == list(first.c) == list(fed.task.net.trainable(fed.task.initial))


@engines
def test_buffers_are_neither_corrected_nor_remembered(engine: str) -> None:
    kw = {"engine": engine, "rounds": 3}
    ours, plain = (ragged(m, Tiny(norm=True), **kw).run() for m in (SCAFFOLD(), FedAvg()))
    names = {k for k in ours.shared.net if "running" in k or "tracked" in k}
    assert len(names) == 3 and not names & set(ours.shared.c) | names & set(ours.own(0).c)
    assert not names & set(ours.last.uploads[0].dc)
    assert int(ours.shared.net["encoder.num_batches_tracked"]) == int(plain.shared.net["encoder.num_batches_tracked"])
    assert (ours.shared.net["encoder.running_var"] > 0).all()
    local = ragged(SCAFFOLD(), Tiny(norm=True), bn_buffers="local", **kw).run()
    assert local.global_model() is None and set(local.shared.c) == set(ours.shared.c)


@engines
def test_full_gradient_is_read_at_the_received_model(engine: str) -> None:
    """Eval mode, stored samples, every row, no weight decay."""
    net = Tiny(norm=True)
    fed = ragged(SCAFFOLD(option=1), net, engine=engine, rounds=2, **{**HARD, "participation": 1.0}, weight_decay=0.5)
    fed.play(0)
    received = fed.shared.net
    fed.play(1)
    for i in (0, 4):
        q = Tree({k: v.clone().requires_grad_(v.is_floating_point()) for k, v in received.items()})
        rows = fed.task.parts[i]
        F.cross_entropy(net(q, fed.task.x[rows]), fed.task.y[rows]).backward()
        wanted = Tree({k: q[k].grad for k in fed.shared.c})
        assert gap(wanted, fed.own(i).c) < 1e-12


@engines
def test_the_path_contains_weight_decay_and_the_rate_of_its_round(engine: str) -> None:
    # f = 0, so that w shrinks by decay alone; c_i+ = (w - y) / (tau eta_t) at w = 2
    two = Tree(w=torch.tensor([2.0], dtype=torch.float64))
    fed = quadratic(SCAFFOLD(), rows=((0, 0),), n=(4,), initial=two, engine=engine, weight_decay=0.5,
                    local_epochs=1, lr_decay_per_round=0.5, rounds=4)  # fmt: skip
    fed.play(3)
    assert numbers(fed)["y"] == pytest.approx([2 - 0.1 * 0.125 * 1.0]) and numbers(fed)["c"] == pytest.approx(1.0)


@engines
def test_who_takes_no_step_changes_nothing(engine: str) -> None:
    kw = {"rows": ((1, 1), (2, 3)), "engine": engine, "drop_last": True, "batch_size": 20, "local_epochs": 2}
    fed = quadratic(SCAFFOLD(), n=(10, 30), short_client="skip", rounds=3, **kw).run()
    assert fed.last.ids == [1] and not fed.own(0)
    assert numbers(fed)["c"] == pytest.approx(0.75 * numbers(fed)["c_i"][1])  # q counts it
    nobody = quadratic(SCAFFOLD(), n=(10, 15), short_client="skip", rounds=2, **kw).run()
    assert numbers(nobody) == {"y": [], "c_i": [0.0, 0.0], "c": 0.0, "w": 0.0}
    # whoever is asked takes a step
    kept = quadratic(SCAFFOLD(), n=(1, 30), rounds=1, **kw).run()
    assert RunClient(kept.task, 0, 0).steps() == 2 and numbers(kept)["c_i"][0] == pytest.approx(-0.95)


@engines
def test_personal_model_is_what_was_sent(engine: str) -> None:
    fed = ragged(SCAFFOLD(), Tiny(norm=True), engine=engine, participation=0.5).run()
    assert all(identical(m.tree, u.net) for m, u in zip(fed.personal().values(), fed.last.uploads))
    assert identical(fed.global_model().tree, fed.shared.net)
    before = state(fed)
    again = fed.refreshed()
    assert set(again) == set(range(7)) and identical(before, state(fed))
    # the refresh is corrected as a round is: with c and the client's own c_i
    on = ragged(SCAFFOLD(), Tiny(norm=True), engine=engine, participation=0.5, draws=[[], [], [], [4]], rounds=3)
    on.shared, on.memory = fed.shared, fed.memory
    on.play(3)
    assert gap(again[4].tree, on.last.uploads[0].net) < 1e-12


@engines
def test_nothing_aliases(engine: str) -> None:
    fed = ragged(SCAFFOLD(), engine=engine)
    fed.play(0)
    before, own = Tree(fed.shared).map(torch.clone), {i: fed.own(i).map(torch.clone) for i in range(7)}
    received, memories = fed.shared, {i: fed.own(i) for i in range(7)}
    fed.play(1)
    assert identical(before, received) and identical(list(own.values()), list(memories.values()))


# ---- refusals and presets


def test_refused() -> None:
    with pytest.raises(UserError, match="after_step needs tau=raw"):
        SCAFFOLD(correction="after_step")
    never = Protocol(optimizer_reset="never")
    with pytest.raises(UserError, match="optimizer_reset=per_round"):
        SCAFFOLD().check(never, Tiny())
    SCAFFOLD(tau="raw").check(never, Tiny())
    SCAFFOLD(**NIID).check(never, Tiny())
    SCAFFOLD().check(Protocol(), Tiny())


def test_presets() -> None:
    def built(setting: str = "moon.common", **given: Any) -> SCAFFOLD:
        return Spec("scaffold", tuple(given.items()), setting).build(Protocol())  # type: ignore[return-value]

    niid = SCAFFOLD(weighting="niid", correction="after_step", tau="raw")
    assert built() == SCAFFOLD() and SCAFFOLD().weighting == "follow_setting"
    assert built("niid.cifar10") == niid
    for setting in ("moon.cifar10", "niid.cifar10", "fednh.cifar10", "digits.digits"):
        assert built(setting, preset="paper") == SCAFFOLD(preset="paper", weighting="uniform")
        wanted = {"weighting": "niid", "correction": "after_step", "tau": "raw"}
        assert built(setting, preset="niid") == SCAFFOLD(preset="niid", **wanted)
        assert built(setting, preset="niid", weighting="uniform").weighting == "uniform"
    assert set(SCAFFOLD.open_fields) <= set(fields(Protocol)) - set(fields(SCAFFOLD))


# ---- cost, engines


@engines
@pytest.mark.parametrize(("options", "passes"), [({}, 2), ({"option": 1}, 3), (NIID, 2)], ids=str)
def test_bill(engine: str, options: dict[str, Any], passes: int) -> None:
    net = build("mlp", classes=5, shape=(8, 8, 1), projection_dim=32)
    x = torch.rand(114, 1, 8, 8, dtype=torch.float64)
    fed = federation(SCAFFOLD(**options), net, x, torch.arange(114) % 5, [range(14), range(14, 114)], engine=engine,
                     local_epochs=2, draws=[[1]], model="mlp").run()  # fmt: skip
    size = net.count()["total"]
    bill = fed.method.bill()
    known = {"P": size, "E": 2, "n": 100, "int": 2}
    down, up, trained, forward, kept = (eval(e, {}, known) for e in bill[:5])
    assert fed.last.bytes == {"down": 4 * down, "up": 4 * up, "once": 0}
    assert fed.last.samples == {"trained": trained, "forward": forward} == {"trained": passes * 100, "forward": 0}
    assert fed.last.state_bytes == 4 * kept == nbytes(fed.own(1)) == 4 * size


@pytest.mark.parametrize(("classes", "wanted"), [(10, 6_383_616), (100, 6_521_856)])
def test_bytes(classes: int, wanted: int) -> None:
    net = build("cnn_fednh", classes=classes, shape=(32, 32, 3), projection_dim=256)
    x = torch.zeros(4, 3, 32, 32)
    fed = federation(SCAFFOLD(), net, x, torch.arange(4), [[0, 1], [2], [3]], local_epochs=1, precision="fp32",
                     draws=[[0, 2]]).run()  # fmt: skip
    assert fed.last.bytes == {"down": 2 * wanted, "up": 2 * wanted, "once": 0}


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"option": 1, "weighting": "uniform"}, {"augment": Shift(), "drop_last": True}),
    (NIID, {"grad_clip_norm": 0.5, "server_lr": 0.5}),
    ({"tau": "raw"}, {"bn_buffers": "local", "optimizer_reset": "never", "model_weighting": "uniform"}),
]


@pytest.mark.parametrize(("options", "kw"), CASES, ids=str)
def test_engines_agree(options: dict[str, Any], kw: dict[str, Any]) -> None:
    a, b = (ragged(SCAFFOLD(**options), Tiny(norm=True), engine=e, participation=0.5, rounds=4, **kw).run()
            for e in ENGINES)  # fmt: skip
    assert gap(state(a), state(b)) < 1e-11
    assert a.bytes == b.bytes and a.terms[-1] == pytest.approx(b.terms[-1])
    assert [r.samples for r in a.rounds] == [r.samples for r in b.rounds]


@pytest.mark.parametrize("options", [{}, {"option": 1}, NIID], ids=str)
def test_engines_agree_on_images(options: dict[str, Any]) -> None:
    a, b = (toy(SCAFFOLD(**options), engine=e, rounds=2).run() for e in ENGINES)
    assert toy_gap(everything(a), everything(b)) < 1e-10
    assert [r.samples for r in a.rounds] == [r.samples for r in b.rounds]


def test_shares_sum_to_one_over_everybody() -> None:
    fed = ragged(SCAFFOLD())
    for weighting in ("follow_setting", "uniform", "niid"):
        p, q = SCAFFOLD(weighting=weighting).shares(RunServer(fed.task, list(range(7)), 0))
        assert float(p.sum()) == pytest.approx(1) and float(q.sum()) == pytest.approx(1)
