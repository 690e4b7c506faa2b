"""The metric examples of protocol section 5, and what is undefined."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from harness import Identity
from hypothesis import given
from hypothesis import strategies as st

from protofl.data.augment import Pipeline
from protofl.evaluate import (
    Scored,
    TestSet,
    accuracy,
    class_weights,
    fairness,
    global_row,
    personal_accuracy,
    personal_row,
    score,
)
from protofl.method import Model
from protofl.tree import Tree


def personal(m: tuple[int, ...], r: tuple[int, ...], n: tuple[int, ...]) -> list[float | None]:
    return [personal_accuracy(np.array(r), np.array(m), w) for w in class_weights(np.array(n)).values()]


def test_examples_of_5_2() -> None:
    assert personal((100, 100, 100), (90, 60, 30), (8, 2, 0)) == pytest.approx([0.60, 0.75, 0.84])
    unbalanced = [0.74375, 0.7333333333, 0.8444444444]
    assert personal((100, 50, 10), (90, 20, 9), (8, 2, 0)) == pytest.approx(unbalanced, abs=1e-10)


def test_example_of_fednh() -> None:
    assert personal((10, 10, 10), (8, 3, 5), (7, 3, 0)) == pytest.approx([0.533333, 0.55, 0.65], abs=1e-6)


def test_fairness_of_5_4() -> None:
    accs = [0.75, 0.84, 0.50, 0.61]
    std, worst = fairness(accs)
    assert (np.mean(accs), std) == (pytest.approx(0.675), pytest.approx(0.130096, abs=1e-6))
    assert worst == 0.50  # ceil(.1 * 4) = 1 lowest
    assert fairness([i / 20 for i in range(20)])[1] == pytest.approx(0.025)


def scored(correct: list[int], m: int = 10) -> Scored:
    """A confusion matrix with these diagonals; the rest goes to the next class."""
    c = np.diag(correct)
    for i, right in enumerate(correct):
        c[i, (i + 1) % len(correct)] += m - right
    return Scored({"network": c}, 1.0)


def test_clients_with_nothing_to_evaluate_are_left_out_and_counted() -> None:
    counts = np.array([[7, 3, 0], [0, 0, 0], [0, 0, 5]])
    row = personal_row(
        {0: scored([8, 3, 5]), 1: scored([10, 10, 10]), 2: scored([0, 0, 10])}, counts, np.array([10, 10, 0])
    )
    # client 1 has no data; client 2 only a class that the test set lacks
    assert (row["pm_clients"], row["pm_skipped"]) == (1, 2)
    assert row["pm_v"] == pytest.approx(0.55)
    assert personal_row({0: scored([8, 3, 5])}, counts, np.array([10, 10, 10]), 1)["pm_skipped"] == 1
    nobody = personal_row({1: scored([1, 1, 1])}, counts, np.array([10, 10, 10]))
    assert nobody["pm_v"] is None and nobody["pm_v_std"] is None and nobody["pm_clients"] == 0


def test_undefined_figures_are_missing_not_zero() -> None:
    assert global_row(None) == {"gm": None, "gm_scores": {}, "loss": None, "gm_correct": None}
    row = global_row(Scored({"network": np.eye(2), "exemplar": None}, float("inf")))
    assert row["gm_scores"] == {"network": 1.0, "exemplar": None} and row["loss"] is None


def test_score_counts_every_test_image_once() -> None:
    rs = np.random.RandomState(0)
    x = torch.from_numpy(rs.randint(0, 256, (1203, 1, 1, 4)).astype(np.uint8))
    y = torch.from_numpy(rs.randint(0, 3, 1203))
    w = Tree(
        {
            "head.weight": torch.randn(3, 4, dtype=torch.float64),
            "head.bias": torch.zeros(3, dtype=torch.float64),
        }
    )
    pipeline = Pipeline((), (0.0,), (1.0,), 255, (1, 1, 4), torch.float64)

    def flat(net: Identity, tree: Tree, x: torch.Tensor) -> torch.Tensor:
        return net(tree, x.flatten(1))

    got = score(Model(w, flat), Identity(3, 4), TestSet(x, y, pipeline, 3))
    logits = (x.double().flatten(1) / 255) @ w["head.weight"].T
    assert got.headline is not None and got.headline.sum() == 1203
    assert accuracy(got.headline) == float((logits.argmax(1) == y).double().mean())
    assert got.loss == pytest.approx(float(torch.nn.functional.cross_entropy(logits, y)), abs=1e-12)
    for c in range(3):
        assert got.headline[c].sum() == int((y == c).sum())


@given(st.lists(st.tuples(st.integers(1, 50), st.floats(0, 1), st.integers(0, 20)), min_size=1, max_size=8))
def test_personal_accuracy_is_an_accuracy(rows: list[tuple[int, float, int]]) -> None:
    m = np.array([a for a, _, _ in rows])
    r = np.array([int(a * f) for a, f, _ in rows])
    n = np.array([c for _, _, c in rows])
    for value in personal(tuple(m), tuple(r), tuple(n)):
        assert value is None or (0 <= value <= 1 and math.isfinite(value))
    if n.sum() and (m == m[0]).all():  # on balanced test sets: the weighted mean of class accuracies
        wanted = float((n * r / m).sum() / n.sum())
        assert personal(tuple(m), tuple(r), tuple(n))[2] == pytest.approx(wanted)
