"""FedCSPC's client regularisers: a batch of embeddings is to lie as the global prototypes of its classes do.

Each is a mean over valid rows, triplets or pairs, 0 if there are none. A row is valid (`ok` [rows], 1 or 0)
if it is real and its class has a global prototype. Everything is pure torch without a branch on the value of
a tensor. Norms of equal rows pass no gradient, and zero rows have no direction: neither can make a NaN.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from protofl.method import Rows

from .prototypes import unit

LEAST = 1e-8
"""A shorter vector has no direction: every cosine with it is 0."""

HALF_ROOT = math.sqrt(0.5)

LOWEST = -1e9
"""The similarity to a missing prototype: its softmax is exactly 0, and a row without any stays finite."""


def lengths(x: Tensor) -> Tensor:
    """[v, a] distances of rows [rows, d], from their differences; 0 with gradient 0 where rows are equal."""
    return torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist")


def inverse(length: Tensor) -> Tensor:
    """1 / length, 0 where there is no direction."""
    return F.threshold(length, LEAST, torch.inf).reciprocal()


def angles(length: Tensor) -> Tensor:
    """[v, a, b] cosines at x_v between the directions to x_a and x_b, 0 where x_v equals one of them.

    By the law of cosines from the distances, which costs rows^3 where differences cost rows^2 d.
    """
    one_over, square = inverse(length), length.square()
    twice = square[:, :, None] + square[:, None] - square  # 2 <x_a - x_v, x_b - x_v>
    return twice * (one_over / 2)[:, :, None] * one_over[:, None]


class Places(NamedTuple):
    """Embeddings h [rows, d], their classes y and validity ok [rows], prototypes U (table [K, d])."""

    h: Tensor
    y: Tensor
    ok: Tensor
    table: Rows

    def other(self) -> Tensor:
        """[rows, rows] 1 for two valid rows of different classes."""
        return (self.y[:, None] != self.y) * self.ok[:, None] * self.ok

    def wanted(self) -> Tensor:
        """[rows, rows] distances between the prototypes of the rows' classes, looked up in those of all classes."""
        return lengths(self.table.values)[self.y[:, None], self.y]


def places(h: Tensor, y: Tensor, mask: Tensor, table: Rows) -> Places:
    """Embeddings [rows, d] and the prototypes of their classes."""
    return Places(h, y, table.has[y].to(h.dtype) * mask, table)


def average(values: Tensor, weight: Tensor) -> Tensor:
    """Weighted mean of all entries, 0 where nothing has weight."""
    return (values * weight).sum() / weight.sum().clamp_min(1)


def point(p: Places, tau: float) -> Tensor:
    """L_P: cross-entropy of cos(h, U_c)/tau over the valid prototypes."""
    along = p.h @ (unit(p.table.values, LEAST).mT / tau)  # |h| is divided out of [rows, K], not of [rows, d]
    sims = torch.where(p.table.has, along * inverse(torch.linalg.vector_norm(p.h, dim=-1, keepdim=True)), LOWEST)
    return average(sims.logsumexp(-1) + F.nll_loss(sims, p.y, reduction="none"), p.ok)


# ---- differences of norms and angles (the paper) -----------------------------------------------------------


def edge(p: Places, h: Tensor, u: Tensor) -> Tensor:
    """L_Ed: mean | |h_a - h_b| - |U_a - U_b| | over pairs of different classes."""
    return average((h - u).abs(), p.other())


def angle(p: Places, h: Tensor, u: Tensor) -> Tensor:
    """L_A: mean | cos at v of (a, v, b) - the same among prototypes | over triplets of three classes."""
    other = p.other()
    total: Tensor = AngleGaps.apply(h, u, other)[0]  # type: ignore[no-untyped-call]
    return total / (other @ other * other).sum().clamp_min(1)  # every triplet counts twice above and below


class AngleGaps(torch.autograd.Function):
    """`angle_gaps` for autograd, by h alone. vmap hands over all clients at once."""

    @staticmethod
    def forward(h: Tensor, u: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        return angle_gaps(h, u, other)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, by_total: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        return by_total[..., None, None] * ctx.saved_tensors[0], None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], *given: Tensor
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        clients = info.batch_size
        stacked = [x.expand(clients, *x.shape) if d is None else x.movedim(d, 0) for x, d in zip(given, in_dims)]
        return AngleGaps.apply(*stacked), (0, 0)  # type: ignore[no-untyped-call]


def angle_gaps(h: Tensor, u: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of |cos_h - cos_u| at v between a and b over all (v, a, b) of three classes; its gradient by h.

    h, u [..., rows, rows]: distances; other [..., rows, rows]: 1 where classes differ. This is where the time of
    FedCSPC's training goes, so that tensors of rows^3 are passed over as rarely as can be, and the gradient falls
    off on the way. With W = other / (sqrt(2) length) and S = length^2, the law of cosines says

        cos_vab = S_va W_va W_vb + W_va S_vb W_vb - S_ab W_va W_vb,

    whose first two parts are products of matrices. With s = sign(cos_h - cos_u) where a and b differ, the sums

        R_va = sum_b s W_vb,  E_va = sum_b s S_vb W_vb,  F_va = sum_b s S_ab W_vb,  N_ab = sum_v s S_ab W_va W_vb

    give the gradient 2 W (length R - (E - F) / length) - 2 N / length.
    """
    one_over, square, square_u = inverse(h), h.square(), u.square()
    w, w_u = one_over * other * HALF_ROOT, inverse(u) * other * HALF_ROOT
    near, near_u = square * w, square_u * w_u
    gaps = torch.stack([near, w, -near_u, -w_u], -2).mT @ torch.stack([w, near, w_u, near_u], -2)
    opposite = square[..., None, :, :] * w[..., None]
    gaps.addcmul_(opposite, w[..., None, :], value=-1)
    gaps.addcmul_(square_u[..., None, :, :] * w_u[..., None], w_u[..., None, :])
    sign = gaps.sign().mul_(other[..., None, :, :])
    r, e = (torch.stack([w, near], -2) @ sign).unbind(-2)
    f = opposite.mul_(sign).sum(-2)
    n = opposite.mul_(w[..., None, :]).sum(-3)
    total = (gaps.abs_().sum(-3) * other).sum((-2, -1))
    return total, 2 * (w * (h * r - (e - f) * one_over) - n * one_over)


def sampled_angle(p: Places, uniform: Tensor) -> Tensor:
    """L_A over some of the valid triplets: items floor(uniform count) of their list in the order (v, a < b).

    uniform [m].
    """
    other, n = p.other(), len(p.y)
    ends = other.triu(1)  # [a, b], a < b
    completed = (other * (other @ ends.mT)).to(torch.int64).flatten()  # [v, a]: so many b
    until = completed.cumsum(0)
    count = until[-1]
    item = (uniform.double() * count).to(torch.int64).clamp_max((count - 1).clamp_min(0))
    pair = torch.searchsorted(until, item, right=True).clamp_max(n * n - 1)
    v, a = pair // n, pair % n
    before = item - (until[pair] - completed[pair])  # so many b of this pair come first
    ends_here = (other[v] * ends[a]).to(torch.int64).cumsum(1)
    b = (ends_here <= before[:, None]).sum(1).clamp_max(n - 1)

    def cosine(x: Tensor) -> Tensor:
        return (unit(x[a] - x[v], LEAST) * unit(x[b] - x[v], LEAST)).sum(-1)

    return average((cosine(p.h) - cosine(p.table.values[p.y])).abs(), (count > 0).to(p.h.dtype).expand(len(item)))


# ---- smooth L1 on matrices (the authors' code) -------------------------------------------------------------


def code_edge(p: Places, h: Tensor, u: Tensor) -> Tensor:
    """Smooth L1 between the distances, each divided by their mean, over all N^2 entries of the valid rows."""
    both = p.ok[:, None] * p.ok
    return average(F.smooth_l1_loss(_relative(h, both), _relative(u, both), reduction="none"), both)


def code_angle(p: Places, h: Tensor, u: Tensor) -> Tensor:
    """Smooth L1 between the angles, over all N^3 entries of the valid rows, equal ones included."""
    triple = p.ok[:, None, None] * p.ok[:, None] * p.ok
    return average(F.smooth_l1_loss(angles(h), angles(u), reduction="none"), triple)


def _relative(length: Tensor, both: Tensor) -> Tensor:
    """[rows, rows] distances over their mean, with squares of at least 1e-12 off the diagonal."""
    off = both * (1 - torch.eye(len(both), dtype=both.dtype, device=both.device))
    distance = length.clamp_min(1e-6) * off
    return distance / torch.where(off.sum() > 0, average(distance, off), 1.0)


FORMS = {
    "abs": {"angle": angle, "edge": edge},
    "smooth_l1_code": {"angle": code_angle, "edge": code_edge},
}
"""L_A and L_Ed by name: (places, distances of the embeddings, distances of their prototypes) -> scalar."""
