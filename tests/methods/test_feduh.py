"""FedUH: the same run as FedNH with rho=1, and none of the options of the update acts."""

from __future__ import annotations

from typing import Any

import pytest
from harness import ENGINES
from protofl.methods.fednh import FedNH
from protofl.methods.feduh import FedUH
from ragged import Tiny, identical, ragged, state

from protofl import registry
from protofl.errors import UserError
from protofl.protocol import Protocol


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("given", [{}, {"proto_init": "random_unit"}, {"scale_init": 20}], ids=str)
def test_it_is_fednh_with_rho_1(engine: str, given: dict[str, Any]) -> None:
    runs = [ragged(m, Tiny(norm=True), engine=engine).run() for m in (FedUH(**given), FedNH(rho=1.0, **given))]
    assert identical(state(runs[0]), state(runs[1]))
    assert runs[0].bytes == runs[1].bytes and runs[0].bytes[0]["once"] > 0 == runs[0].bytes[-1]["once"]
    assert not identical(state(runs[0]), state(ragged(FedNH(**given), Tiny(norm=True), engine=engine).run()))


@pytest.mark.parametrize(
    "given",
    [
        {"proto_client_weight": "confidence"}, {"client_proto_norm": "raw_mean_unit"}, {"proto_pre_normalize": False},
        {"proto_transform": "test"}, {"proto_timing": "last_epoch"}, {"pm_proto": "updated"},
    ],
    ids=str,
)  # fmt: skip
def test_the_options_of_the_update_have_nothing_to_act_on(given: dict[str, Any]) -> None:
    plain, other = ragged(FedUH()).run(), ragged(FedUH(**given)).run()
    assert identical(state(plain), state(other))
    assert all(identical(a.tree, b.tree) for a, b in zip(plain.personal().values(), other.personal().values()))


def test_rho_is_not_to_be_had() -> None:
    with pytest.raises(UserError, match=r"feduh rho: '0.9' is not one of 1"):
        registry.Spec("feduh", (("rho", "0.9"),)).build(Protocol())
    assert registry.Spec("feduh", (("preset", "paper"),)).build(Protocol()) == FedUH()
