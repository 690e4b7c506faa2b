"""What holds of every mean of uploads, whatever is averaged: hypothesis looks for a counterexample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_run import cell

from protofl import run
from protofl.handles import RunServer, RunTask
from protofl.tree import Tree

numbers = st.floats(-1e6, 1e6, allow_nan=False, width=32)


@pytest.fixture(scope="module")
def task() -> RunTask:
    return run.task(run.prepare(cell("fedavg", precision="fp64")))[0]


@st.composite
def uploads(draw: st.DrawFn) -> tuple[list[int], list[Tree]]:
    """Some of ten clients and what they send: a matrix, a scalar and a counter."""
    ids = sorted(draw(st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True)))
    values = draw(st.lists(st.tuples(numbers, numbers, st.integers(0, 10**6)), min_size=len(ids), max_size=len(ids)))
    trees = [
        Tree(
            w=torch.tensor([[a, b], [b, a]], dtype=torch.float64),
            b=torch.tensor(b, dtype=torch.float64),
            n=torch.tensor(n),
        )
        for a, b, n in values
    ]
    return ids, trees


def close(a: Any, b: Any) -> bool:
    return bool(torch.allclose(a, b, rtol=1e-9, atol=1e-6))


@settings(deadline=None)
@given(sent=uploads())
def test_a_mean_lies_between_its_parts(task: RunTask, sent: tuple[list[int], list[Tree]]) -> None:
    """Weights are shares of those that sent; a counter is the largest."""
    ids, trees = sent
    server = RunServer(task, ids, 0)
    assert float(server.weights.sum()) == pytest.approx(1) and bool((server.weights > 0).all())
    mean, every = server.mean(trees), torch.stack([t.w for t in trees])
    assert bool((mean.w <= every.amax(0) + 1e-6).all() and (mean.w >= every.amin(0) - 1e-6).all())
    assert int(mean.n) == max(int(t.n) for t in trees) and mean.keys() == trees[0].keys()


@settings(deadline=None)
@given(sent=uploads(), a=st.floats(-4, 4), b=numbers)
def test_a_mean_is_linear(task: RunTask, sent: tuple[list[int], list[Tree]], a: float, b: float) -> None:
    ids, trees = sent
    server = RunServer(task, ids, 0)
    moved = [Tree(w=a * t.w + b) for t in trees]
    assert close(server.mean(moved).w, a * server.mean(trees).w + b)


@settings(deadline=None)
@given(sent=uploads())
def test_equal_uploads_are_their_own_mean(task: RunTask, sent: tuple[list[int], list[Tree]]) -> None:
    ids, trees = sent
    mean = RunServer(task, ids, 0).mean([trees[0]] * len(ids))
    assert close(mean.w, trees[0].w) and close(mean.b, trees[0].b) and int(mean.n) == int(trees[0].n)


@settings(deadline=None)
@given(sent=uploads(), share=st.floats(0.01, 1))
def test_merging_goes_part_of_the_way(task: RunTask, sent: tuple[list[int], list[Tree]], share: float) -> None:
    """old + server_lr (mean - old), at 1 the mean itself."""
    ids, trees = sent
    server, old = RunServer(task, ids, 0), Tree({k: v + 1 for k, v in trees[0].items()})
    mean = server.mean(trees)
    assert torch.equal(server.merge(old, trees).w, mean.w)
    before = task.protocol
    try:
        task.protocol = before.replace(server_lr=share)
        assert close(server.merge(old, trees).w, old.w + share * (mean.w - old.w))
    finally:
        task.protocol = before


@settings(deadline=None)
@given(sent=uploads(), data=st.data())
def test_uploads_of_no_weight_do_not_count(
    task: RunTask, sent: tuple[list[int], list[Tree]], data: st.DataObject
) -> None:
    ids, trees = sent
    server, k = RunServer(task, ids, 0), data.draw(st.integers(0, len(ids) - 1))
    alone = torch.zeros(len(ids), dtype=torch.float64)
    alone[k] = 1
    assert torch.equal(server.mean(trees, alone).w, trees[k].w)
