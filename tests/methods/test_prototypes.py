"""The shared arithmetic of prototypes."""

from __future__ import annotations

import pytest
import torch
from protofl.methods.prototypes import alive, blank, class_means, class_sums, cosines, merge, present, unit
from ragged import table

from protofl.tree import Tree


@pytest.mark.parametrize("lifted", [False, True], ids=["plain", "vmap"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_unit_cuts_rows_without_direction(lifted: bool, dtype: torch.dtype) -> None:
    v = torch.tensor([[3, 4], [0, 0], [5e-7, 0], [2e-6, 0], [1e-30, 0]], dtype=dtype)

    def both(v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return unit(v), torch.func.grad(lambda v: unit(v).sum())(v)

    value, grad = (t[1] for t in torch.func.vmap(both)(torch.stack([v + 1, v]))) if lifted else both(v)
    assert value.tolist() == [pytest.approx(r) for r in ([0.6, 0.8], [0, 0], [0, 0], [1, 0], [0, 0])]
    assert grad[[1, 2, 4]].abs().max() == 0 and grad.isfinite().all()
    # the gradient of x/|v| + y/|v| at (3, 4): (y^2 - xy, x^2 - xy) / |v|^3
    assert grad[0].tolist() == pytest.approx([4 / 125, -3 / 125])
    assert alive(v).tolist() == [True, False, False, True, False]
    assert alive(v, 1e-12).tolist() == [True, False, True, True, False]


def test_cosines() -> None:
    z = torch.tensor([[1.0, 2, 2], [0, 0, 0]])
    found = cosines(z, torch.tensor([[3.0, 0, 4], [0, 2, 0], [-1, -1, 0.5], [0, 0, 0]]))
    assert found.tolist() == [pytest.approx([0.733333, 0.666667, -0.444444, 0], abs=1e-6), [0, 0, 0, 0]]


def test_means_of_sums() -> None:
    onehot = torch.tensor([[1.0, 0, 0], [1, 0, 0], [0, 0, 1], [0, 0, 0]])  # the last row is padding
    sums = class_sums(onehot, torch.tensor([[1.0, 2], [3, 4], [5, 6], [9, 9]]))
    assert sums.n.tolist() == [2, 0, 1]
    means = class_means(sums + sums)  # additive over batches
    assert means.values.tolist() == [[2, 3], [0, 0], [5, 6]] and means.has.tolist() == [True, False, True]
    rows, ids = present(means)
    assert rows.tolist() == [[2, 3], [5, 6]] and ids.tolist() == [0, 2]


def test_merge() -> None:
    old = table([[7, 7], [8, 8], [9, 9]], [True, False, True])
    one, two = (
        table([[1, 0], [4, 4], [5, 5]], [True, False, False]),
        table([[3, 2], [5, 5], [6, 6]], [True, False, False]),
    )
    assert merge([one, two], old).values.tolist() == [[2, 1], [8, 8], [9, 9]]
    assert merge([one, two], old).has.tolist() == [True, False, True]
    weights = [
        torch.tensor([3, 0, 0]),
        torch.tensor([1, 0, 2]),
    ]  # integers; a weight without a row counts for nothing
    assert merge([one, two], old, weights).values.tolist() == [[1.5, 0.5], [8, 8], [9, 9]]
    nobody = [torch.tensor([0, 0, 0])] * 2
    assert merge([one, two], old, nobody).values.tolist() == old.values.tolist()
    deep = table([[[1, 2], [3, 4]], [[5, 6], [7, 8]]], [True, False])  # rows of any shape
    assert merge([deep], blank_of(deep)).values.tolist() == [[[1, 2], [3, 4]], [[0, 0], [0, 0]]]


def blank_of(rows: object) -> object:
    """A table of the same shape without a valid row."""
    values, has = rows  # type: ignore[misc]
    return type(rows)(torch.zeros_like(values), torch.zeros_like(has))  # type: ignore[call-arg]


def test_blank_has_the_precision_of_the_weights() -> None:
    w = Tree(counter=torch.tensor(0), weight=torch.zeros(2, dtype=torch.float64))
    made = blank(3, 4, w)
    assert made.values.shape == (3, 4) and made.values.dtype == torch.float64 and not made.has.any()
