"""Arithmetic of class prototypes, shared by the prototype methods.

Pure torch without a Python branch on the value of a tensor, so that it runs under `vmap`; `merge` and
`present` are for the server.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from protofl.method import Rows, Tree

LEAST = 1e-6
"""A shorter row has no direction (protocol 2.2; moon.md, fedproc.md)."""


def alive(v: Tensor, least: float = LEAST) -> Tensor:
    """[...] bool for v [..., d]: whether a row is long enough to have a direction."""
    lives: Tensor = torch.linalg.vector_norm(v, dim=-1) >= least
    return lives


def unit(v: Tensor, least: float = LEAST) -> Tensor:
    """v / |v| along the last axis; a row shorter than `least` becomes 0 and passes no gradient.

    A clamped norm would give the same value with a gradient of 1/eps, a raw one NaN even under a later
    `where`: dead norms are replaced before the division.
    """
    norm = torch.linalg.vector_norm(v, dim=-1, keepdim=True)
    lives = norm >= least
    return torch.where(lives, v / torch.where(lives, norm, 1.0), 0.0)


def cosines(z: Tensor, table: Tensor) -> Tensor:
    """cos(z_b, C_c): [rows, K] for z [rows, d] and table [K, d]; 0 where either side is dead."""
    return unit(z) @ unit(table).mT


def class_sums(onehot: Tensor, z: Tensor) -> Tree:
    """Tree(sum [K, d], n [K]) of one batch: onehot [rows, K] (`batch.onehot`), z [rows, d]."""
    return Tree(sum=onehot.mT @ z, n=onehot.sum(0))


def class_means(sums: Tree) -> Rows:
    """Class means [K, d] from the sums of `class_sums`; a class without a sample is absent (its row is 0)."""
    return Rows(sums.sum / sums.n.clamp_min(1)[:, None], sums.n > 0)


def blank(classes: int, dim: int, like: Tree) -> Rows:
    """A table [classes, dim] of zeros without a valid row, in the precision and place of `like` (weights)."""
    values = next(v for v in like.values() if v.is_floating_point()).new_zeros(classes, dim)
    return Rows(values, torch.zeros(classes, dtype=torch.bool, device=values.device))


def merge(tables: Sequence[Rows], old: Rows, weights: Sequence[Tensor] | None = None) -> Rows:
    """Per class the mean over the tables that have it, weighted by `weights` ([K] each; None: equally).

    The sum runs in the order of the tables (ascending client id). A class that no table has, or none with a
    weight above 0, keeps its old row and its old validity. Rows may be of any shape: values [K, ...].
    """
    wide = (-1, *[1] * (old.values.dim() - 1))
    total = torch.zeros_like(old.values)
    mass = old.values.new_zeros(old.has.shape)
    for i, table in enumerate(tables):
        weight = table.has.to(mass.dtype) if weights is None else weights[i].to(mass.dtype) * table.has
        total = total + table.values * weight.view(wide)
        mass = mass + weight
    seen = mass > 0
    mean = total / torch.where(seen, mass, 1.0).view(wide)
    return Rows(torch.where(seen.view(wide), mean, old.values), seen | old.has)


def present(table: Rows) -> tuple[Tensor, Tensor]:
    """The valid rows [k, ...] and their class ids [k]."""
    return table.values[table.has], table.has.nonzero()[:, 0]
