"""FedProx: the test vectors, every option, what is equal by construction."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import ENGINES, Harnessed, quadratic
from protofl.methods.fedavg import FedAvg
from protofl.methods.fedprox import FedProx
from ragged import Shift, Tiny, gap, identical, path, ragged, state

from protofl.tree import Tree

engines = pytest.mark.parametrize("engine", ENGINES)

VECTORS = [
    (0.0, 0.0, [0.1, 0.185, 0.25725], [0.6, 1.05, 1.3875], 1.1049375),
    (0.0, 0.9, [0.1, 0.275, 0.49125], [0.6, 1.59, 2.6835], 2.1354375),
    (0.5, 0.0, [0.55, 0.5925, 0.628625], [1.0, 1.375, 1.65625], 1.39934375),
    (0.5, 0.9, [0.55, 0.6375, 0.745625], [1.0, 1.825, 2.73625], 2.23859375),
]


def started(w0: float, method: FedProx, **kw: Any) -> Harnessed:
    """The two quadratic clients, from w0."""
    return quadratic(method, initial=Tree(w=torch.tensor([w0], dtype=torch.float64)), **kw)


@engines
@pytest.mark.parametrize(("w0", "rho", "first", "second", "average"), VECTORS)
def test_quadratic(engine: str, w0: float, rho: float, first: list[float], second: list[float], average: float) -> None:
    def fed(**kw: Any) -> Harnessed:
        return started(w0, FedProx(mu=0.5), engine=engine, momentum=rho, **kw)

    assert path(fed) == [pytest.approx(first, abs=1e-12), pytest.approx(second, abs=1e-12)]
    assert float(fed().run().shared.net.w) == pytest.approx(average, abs=1e-12)


@engines
@pytest.mark.parametrize(
    ("option", "w0", "rho", "wanted"),
    [
        ("prox_in_momentum", 0.0, 0.0, 1.1049375),
        ("prox_in_momentum", 0.0, 0.9, 2.1568125),
        ("prox_in_momentum", 0.5, 0.9, 2.25603125),
        ("prox_half", 0.0, 0.0, 1.0465),
        ("prox_half", 0.0, 0.9, 2.03425),
    ],
)
def test_options(engine: str, option: str, w0: float, rho: float, wanted: float) -> None:
    fed = started(w0, FedProx(mu=0.5, **{option: False}), engine=engine, momentum=rho).run()
    assert float(fed.shared.net.w) == pytest.approx(wanted, abs=1e-12)


@engines
def test_pull_beside_the_momentum(engine: str) -> None:
    def fed(**kw: Any) -> Harnessed:
        return started(0.0, FedProx(mu=0.5, prox_in_momentum=False), engine=engine, momentum=0.9, **kw)

    assert path(fed) == [pytest.approx([0.1, 0.275, 0.49575]), pytest.approx([0.6, 1.59, 2.7105])]


@engines
@pytest.mark.parametrize(("before", "wanted"), [(True, 0.9643123475), (False, 0.9286873566)])
def test_clip(engine: str, before: bool, wanted: float) -> None:
    fed = started(0.0, FedProx(mu=0.5, prox_before_clip=before), engine=engine, momentum=0.9, grad_clip_norm=2.0)
    assert float(fed.run().shared.net.w) == pytest.approx(wanted, abs=1e-10)


# ---- equal by construction


@engines
@pytest.mark.parametrize(
    "options",
    [{}, {"prox_in_momentum": False}, {"prox_before_clip": False}, {"prox_half": False}],
    ids=lambda o: next(iter(o), "default"),
)
def test_mu_0_is_fedavg_bit_for_bit(engine: str, options: dict[str, bool]) -> None:
    for rho, wanted in ((0.0, 1.16575), (0.9, 2.239)):
        fed = started(0.0, FedProx(mu=0.0, **options), engine=engine, momentum=rho).run()
        assert float(fed.shared.net.w) == pytest.approx(wanted)
    kw = {
        "engine": engine,
        "grad_clip_norm": 0.7,
        "participation": 0.5,
        "augment": Shift(),
        "drop_last": True,
        "rounds": 2,
    }
    plain, prox = (ragged(m, Tiny(norm=True), **kw).run() for m in (FedAvg(), FedProx(mu=0.0, **options)))
    assert identical(state(plain), state(prox))


@engines
def test_equal_by_construction(engine: str) -> None:
    def fed(options: dict[str, Any], **kw: Any) -> Harnessed:
        return ragged(FedProx(**{"mu": 0.3, **options}), engine=engine, rounds=2, **kw).run()

    base, beside, clip = fed({}), {"prox_in_momentum": False}, {"grad_clip_norm": 0.5}
    # without momentum, and without a clip or with the pull behind it, the pull may stand beside the step
    assert gap(fed({}, momentum=0.0).shared, fed(beside, momentum=0.0).shared) < 1e-12
    behind = fed({"prox_before_clip": False}, momentum=0.0, **clip)
    assert gap(behind.shared, fed(beside, momentum=0.0, **clip).shared) < 1e-12
    # without a clip there is no order
    assert identical(fed({"prox_before_clip": False}).shared, base.shared)
    # beside the momentum the pull is never clipped
    assert identical(fed(beside, **clip).shared, fed(beside | {"prox_before_clip": False}, **clip).shared)
    # mu |.|^2 is (2 mu / 2) |.|^2
    assert gap(fed({"prox_half": False, "mu": 0.15}).shared, base.shared) < 1e-12


@engines
def test_every_option_moves_the_result(engine: str) -> None:
    results = [
        ragged(FedProx(**{"mu": 0.3, **o}), engine=engine, rounds=1, grad_clip_norm=0.5).run().shared
        for o in (
            {},
            {"mu": 0.01},
            {"prox_half": False},
            {"prox_in_momentum": False},
            {"prox_before_clip": False},
        )
    ]
    for i, one in enumerate(results):
        assert all(gap(one, other) > 1e-6 for other in results[:i])


# ---- traps


@engines
def test_first_step_has_no_pull(engine: str) -> None:
    one = {"engine": engine, "local_epochs": 1, "rounds": 1, "batch_size": 64}
    assert identical(ragged(FedProx(mu=5.0), **one).run().shared, ragged(FedAvg(), **one).run().shared)


@engines
def test_the_anchor_is_the_received_model_all_round_long(engine: str) -> None:
    # f = 0: with h = 0 and weight decay as the only other force, the pull is mu (w - 2), from w = 2 on.
    def fed(epochs: int) -> float:
        two = Tree(w=torch.tensor([2.0], dtype=torch.float64))
        return float(quadratic(FedProx(mu=1.0), rows=((0, 0),), n=(3,), initial=two, engine=engine,
                               weight_decay=1.0, local_epochs=epochs).run().shared.net.w)  # fmt: skip

    w = 2.0
    for _ in range(4):
        w -= 0.1 * ((w - 2.0) + w)
    assert fed(4) == pytest.approx(w)
    assert fed(200) == pytest.approx(1.0)  # an anchor renewed per epoch would drift to 0


@engines
def test_buffers_are_not_pulled(engine: str) -> None:
    fed = ragged(FedProx(mu=1e-9), Tiny(norm=True), engine=engine, rounds=1).run()
    plain = ragged(FedAvg(), Tiny(norm=True), engine=engine, rounds=1).run()
    moved = fed.shared.net["encoder.running_mean"]
    assert float(moved.abs().max()) > 0.01
    assert gap(moved, plain.shared.net["encoder.running_mean"]) < 1e-7


@pytest.mark.parametrize(("speed", "stable"), [(3.7, True), (3.9, False)])
def test_stable_while_below_2_plus_2_rho(speed: float, stable: bool) -> None:
    # eta (mu + h) < 2 (1 + rho) = 3.8
    fed = quadratic(FedProx(mu=10 * speed - 1), rows=((1, 1),), n=(2,), momentum=0.9, local_epochs=500).run()
    assert (abs(float(fed.shared.net.w)) < 1) == stable


def test_engines_agree() -> None:
    for options in ({}, {"prox_in_momentum": False}, {"prox_before_clip": False}):
        kw = {"augment": Shift(), "grad_clip_norm": 0.5, "participation": 0.5, "drop_last": True}
        a, b = (ragged(FedProx(mu=0.3, **options), engine=e, **kw).run() for e in ENGINES)
        assert gap(state(a), state(b)) < 1e-12
        assert a.bytes == b.bytes == ragged(FedAvg(), **kw).run().bytes
