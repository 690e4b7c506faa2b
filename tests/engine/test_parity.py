"""The batched engine equals the loop, for every method and every reading of every option."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from harness import ENGINES
from toy import ToyBN, build, everything, gap, outputs, toy

from protofl import options, registry
from protofl.engine import batched as engine_module
from protofl.engine.batched import Batched
from protofl.engine.rule import alone, choose
from protofl.errors import UserError
from protofl.tree import Tree

TOLERANCE = 1e-10
QUICK = {"fedcspc": {"calib_epochs": 3}, "solo": {"epochs": 3}, "creff": {"match_epochs": 5, "retrain_epochs": 2}}
"""What would take long, or (SOLO's 300 epochs in one go) let rounding grow beyond any tolerance."""
SHORT = {"rounds": 2, "local_epochs": 1, "batch_size": 16}
"""Two rounds, whose clients take one step or two."""


def readings() -> list[Any]:
    """Every method with its defaults, and with every other reading of each option (of one that is a number: one).

    Of the other readings of an option all but the first are slow tests.
    """
    out: list[Any] = []
    for name in registry.names():
        out.append(pytest.param((name, {}), id=name))
        for option, field in options.fields(registry.load(name)).items():
            others = [r for r in options.option(field).readings if r != field.default]
            if all(isinstance(r, float | int) and not isinstance(r, bool) for r in others):
                others = others[-1:]  # another number takes the same path
            for i, r in enumerate(others if option not in QUICK.get(name, {}) else []):
                marks = pytest.mark.slow if i else ()
                out.append(pytest.param((name, {option: r}), id=f"{name}-{option}={r}", marks=marks))
    return out


def agree(method: Any, **fields: Any) -> None:
    """Run under both engines; everything left behind, every score and every byte must agree."""
    runs = [toy(method, engine=e, **fields).run() for e in ENGINES]
    assert gap(*map(everything, runs)) < TOLERANCE
    assert gap(*map(outputs, runs)) < TOLERANCE
    assert runs[0].bytes == runs[1].bytes
    assert [r.samples for r in runs[0].rounds] == [r.samples for r in runs[1].rounds]
    for a, b in zip(*[r.terms for r in runs]):
        assert a == pytest.approx(b, abs=TOLERANCE)


@pytest.mark.parametrize("case", readings())
def test_engines_agree(case: tuple[str, dict[str, Any]]) -> None:
    name, given = case
    try:
        method = build(name, {**QUICK.get(name, {}), **given})
        registry.check(method, toy("fedavg").protocol, method.adapt(toy("fedavg").protocol), ToyBN())
    except UserError as refusal:
        pytest.skip(f"refused: {refusal}")
    agree(method, **(SHORT if given else {"rounds": 3}))


PROTOCOLS: list[dict[str, Any]] = [
    {"augment": False, "drop_last": True, "short_client": "skip", "participation": 1.0, "crew": 1},
    {"bn_buffers": "local", "optimizer_reset": "never"},
    {"grad_clip_norm": 0.0, "momentum": 0.0, "weight_decay": 0.0, "server_lr": 0.5, "model_weighting": "uniform"},
    {"participation": 0.15},
    {"batch_size": 1, "client_lr": 0.005, "rounds": 1},
]


@pytest.mark.parametrize("name", registry.names())
@pytest.mark.parametrize(
    "fields", [PROTOCOLS[0], *(pytest.param(p, marks=pytest.mark.slow) for p in PROTOCOLS[1:])], ids=str
)
def test_engines_agree_under_protocol(name: str, fields: dict[str, Any]) -> None:
    agree(build(name, QUICK.get(name)), **{**SHORT, **fields})


def test_crew_size_is_seen_in_rounding_alone() -> None:
    a, b = (toy("fedavg", engine="batched", crew=c, participation=1.0).run() for c in (1, 16))
    assert gap(everything(a), everything(b)) < TOLERANCE


# ---- deliberate faults ----------------------------------------------------------------------------------------------


class NoMask(Batched):
    def batch(self, *a: Any, **k: Any) -> Any:
        b = super().batch(*a, **k)
        return b._replace(mask=torch.ones_like(b.mask))


class NoShrink(Batched):
    """Clients that are done go on training."""

    def train(self, jobs: list[Any]) -> list[Any]:
        made = engine_module.Crew

        class Endless(made):
            def __init__(self, *a: Any) -> None:
                super().__init__(*a)
                self.live_at = [len(jobs)] * len(self.live_at)

        engine_module.Crew = Endless
        try:
            return super().train(jobs)
        finally:
            engine_module.Crew = made


class LooseClip(Batched):
    def clips(self, groups: Any, client: Any) -> Any:
        return [(limit * 1.01, names) for limit, names in super().clips(groups, client)]


class NoDecay(Batched):
    def setting(self, g: Any, client: Any) -> Any:
        lr, rho, _, clip = super().setting(g, client)
        return lr, rho, 0.0, clip


class Unsorted(Batched):
    def length(self, job: Any) -> int:
        return 0


class NoBuffers(Batched):
    def lift(self, *a: Any) -> Any:
        call = super().lift(*a)
        return lambda w, b, rows: (call(w, b, rows)[0], Tree())


class StaleFeatures(Batched):
    def per_sample(self, *a: Any) -> Any:
        return engine_module.pytree.tree_map(lambda v: v.roll(1, 0), super().per_sample(*a))


class LastEpochOnly(Batched):
    """Forgets the momentum between epochs."""

    def step(self, r: Any, groups: Any, w: Any, g: Any, momenta: Any, crew: Any, live: int) -> None:
        super().step(r, groups, w, g, Tree({k: torch.zeros_like(v) for k, v in momenta.items()}), crew, live)


class SwappedAugmentation(Batched):
    def training_plan(self, client: Any, r: Any) -> Any:
        made = super().training_plan(client, r)
        return dataclasses.replace(made, augment=None if made.augment is None else made.augment.flip(1))


FAULTS = [
    NoMask,
    NoShrink,
    LooseClip,
    NoDecay,
    Unsorted,
    NoBuffers,
    StaleFeatures,
    LastEpochOnly,
    SwappedAugmentation,
]


STRAIGHT: list[tuple[str, dict[str, Any]]] = [("fedavg", {}), ("moon", {"augment": False}), ("fedproc", {})]


@functools.cache
def straight(i: int) -> list[Any]:
    """What a run of the loop leaves behind."""
    name, fields = STRAIGHT[i]
    return everything(toy(name, **fields).run())


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_noticed(fault: type[Batched]) -> None:
    """Equality has teeth: each fault is seen by FedAvg, MOON or FedProc."""
    noticed = 0
    for i, (name, fields) in enumerate(STRAIGHT):
        faulty = toy(name, engine="batched", **fields)
        faulty.clients.engine = fault(faulty.task)
        try:
            noticed += gap(straight(i), everything(faulty.run())) > 1e-6
        except Exception:
            noticed += 1
    assert noticed


# ---- the rule behind auto -------------------------------------------------------------------------------------------


def test_auto_is_a_fixed_rule() -> None:
    assert choose("auto", "mlp", "cpu") == "batched"
    assert choose("auto", "simple_cnn", "cpu") == "loop"
    assert choose("auto", "simple_cnn", "cuda") == "batched"
    assert choose("loop", "mlp", "cpu") == "loop"
    assert choose("graphs", "mlp", "cuda") == "graphs"


def test_the_server_trains_one_client() -> None:
    assert [alone(engine).__name__ for engine in ("loop", "batched", "graphs")] == ["Loop", "Loop", "Graphs"]
