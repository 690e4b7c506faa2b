"""How the clients of a round are cut into calls."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy import toy

from protofl.clients import crews
from protofl.engine.batched import LIGHT
from protofl.tree import nbytes


@given(st.integers(0, 200), st.integers(1, 70))
def test_crews_are_few_and_equal_and_keep_the_order(clients: int, size: int) -> None:
    cut = crews(list(range(clients)), size)
    sizes = [len(c) for c in cut]
    assert [i for c in cut for i in c] == list(range(clients))
    assert len(cut) == -(-clients // size)
    assert not cut or (max(sizes) <= size and max(sizes) - min(sizes) <= 1)


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_small_nets_share_larger_calls(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small = toy("fedavg", engine=engine, crew=3)
    assert nbytes(small.task.initial) < LIGHT
    assert small.clients.engine.crew == (12 if engine == "batched" else 1)
    monkeypatch.setattr("protofl.engine.batched.LIGHT", nbytes(small.task.initial))
    assert toy("fedavg", engine=engine, crew=3).clients.engine.crew == (3 if engine == "batched" else 1)
