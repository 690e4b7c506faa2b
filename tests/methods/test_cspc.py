"""CSPC as a plug-in: compositions by name, what they equal, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from harness import ENGINES
from protofl.methods.cspc import CSPC
from protofl.methods.fedavg import FedAvg
from protofl.methods.fedcspc import FedCSPC
from protofl.methods.fedprox import FedProx
from protofl.methods.moon import MOON
from ragged import Tiny, gap, identical, ragged, state

from protofl import options, registry
from protofl.errors import UserError
from protofl.protocol import Protocol

QUICK = {"calib_epochs": 2}


def build(name: str, preset: str = "moon.common", **given: Any) -> Any:
    return registry.Spec(name, tuple({**QUICK, **given}.items()), preset).build(Protocol())


@pytest.mark.parametrize("engine", ENGINES)
def test_on_fedavg_it_is_fedcspc(engine: str) -> None:
    runs = [ragged(build(name), Tiny(norm=True), engine=engine).run() for name in ("fedavg+cspc", "fedcspc")]
    assert identical(state(runs[0]), state(runs[1])) and runs[0].bytes == runs[1].bytes


@pytest.mark.parametrize("engine", ENGINES)
def test_on_moon_it_is_fedcspc_with_moon_at_the_clients(engine: str) -> None:
    names = ({"name": "moon+cspc"}, {"name": "fedcspc", "local_base": "moon"})
    made = [build(preset="moon.cifar10", **n) for n in names]
    assert made[0].mu == made[1].mu == 5.0
    runs = [ragged(m, engine=engine).run() for m in made]
    assert identical(state(runs[0]), state(runs[1]))
    assert not identical(state(runs[0]), state(ragged(build("fedavg+cspc"), engine=engine).run()))


@pytest.mark.parametrize("name", ["fedavg+cspc", "moon+cspc", "fedprox+cspc"])
def test_engines_agree(name: str) -> None:
    runs = [
        ragged(build(name), Tiny(norm=True), engine=e, participation=0.6, grad_clip_norm=1.0).run() for e in ENGINES
    ]
    assert gap(state(runs[0]), state(runs[1])) < 1e-10
    assert runs[0].bytes == runs[1].bytes and [r.samples for r in runs[0].rounds] == [r.samples for r in runs[1].rounds]


@pytest.mark.parametrize("base", [FedAvg, FedProx, MOON])
def test_without_prototypes_only_the_base_is_left(base: type[FedAvg]) -> None:
    off = build(f"{base.__name__.lower()}+cspc", n_repeat=0)
    plain = registry.Spec(base.__name__.lower()).build(Protocol())
    assert identical(ragged(off).run().shared.net, ragged(plain).run().shared.net)
    assert off.bill() == plain.bill()


def test_options_are_those_of_both_and_take_the_values_of_both() -> None:
    made = registry.load("fedprox+cspc")
    assert made.__name__ == "FedProx+CSPC" and issubclass(made, CSPC) and issubclass(made, FedProx)
    assert set(options.fields(made)) == set(options.fields(CSPC)) | set(options.fields(FedProx))
    spec = registry.Spec("moon+cspc", (("mu", "2"), ("kappa", "0.1")), "digits.quick")
    method: Any = spec.build(Protocol())
    assert (method.mu, method.kappa, method.calib_epochs) == (2.0, 0.1, 5)  # 5: what the setting gives fedcspc
    assert registry.load("moon+cspc") is registry.load("moon+cspc")
    stored = registry.Spec("moon+cspc", tuple(registry.describe(method)["options"].items()), stored="MOON+CSPC")
    assert stored.build(Protocol()) == method


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fednh+cspc", "predicts otherwise; fedavg, fedprox and moon fit"),
        ("fedproc+cspc", "predicts otherwise"),
        ("fedcspc+cspc", "FedCSPC has this plug-in already"),
        ("moon+cspc+cspc", "has this plug-in already"),
    ],
)
def test_senseless_compositions_are_refused_with_the_reason(name: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        registry.load(name)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fedavg+cspcc", "did you mean 'cspc'"),
        ("fedavgg+cspc", "did you mean 'fedavg'"),
        ("fedavg+moon", "there is no plug-in 'moon'"),
        ("cspc", "cspc is a plug-in: it stands behind a method, as in fedavg\\+cspc"),
    ],
)
def test_unknown_parts_are_named(name: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        registry.known(name)


def test_a_part_whose_options_clash_is_refused() -> None:
    class Other(FedAvg):
        __annotations__ = {"kappa": float}
        kappa: float = options.number(1.0)

    import dataclasses

    with pytest.raises(UserError, match="both have an option named kappa"):
        registry._compose(dataclasses.dataclass(frozen=True)(Other), "cspc")
    assert FedCSPC().bill().up == "P + N_i*d + N_i*int"
