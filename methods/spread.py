"""Class directions on the unit sphere that are as far from each other as can be.

`maxmin(K, d, stream)` maximises the smallest distance between K unit vectors of R^d: the regular simplex
while it fits, the cross-polytope up to 2d vectors (Rankin's bound), beyond that a solver. All in float64.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

Matrix = NDArray[np.float64]

STARTS, STEPS = 5, 2000  # of the solver


def maxmin(classes: int, dim: int, stream: RandomState) -> Matrix:
    """[K, d] unit rows with the largest smallest distance."""
    if classes > 2 * dim:
        starts = stream.standard_normal((STARTS, classes, dim))
        return _solve(starts.tobytes(), starts.shape).copy()
    corners = simplex(classes, dim) if dim >= classes - 1 else cross_polytope(classes, dim)
    return corners @ rotation(dim, stream)


def orthogonal(classes: int, dim: int, stream: RandomState) -> Matrix:
    """[K, d] orthonormal rows, K <= d."""
    return rotation(dim, stream)[:classes]


def random_unit(classes: int, dim: int, stream: RandomState) -> Matrix:
    """[K, d] independent, uniformly distributed unit rows."""
    return _unit(stream.standard_normal((classes, dim)))


def rotation(dim: int, stream: RandomState) -> Matrix:
    """[d, d] Haar-distributed: the signs make the factorisation of a Gaussian matrix unique."""
    q, r = np.linalg.qr(stream.standard_normal((dim, dim)))
    return q * np.sign(np.diag(r))


def simplex(classes: int, dim: int) -> Matrix:
    """[K, d] corners of the regular simplex, d >= K-1; squared distance 2K/(K-1)."""
    corners = _unit(np.eye(classes) - 1 / classes)
    if dim == classes - 1:
        return corners @ _helmert(classes)
    return np.pad(corners, ((0, 0), (0, dim - classes)))


def cross_polytope(classes: int, dim: int) -> Matrix:
    """[K, d] the first K of e_1..e_d, -e_1..-e_d; squared distance 2."""
    return np.concatenate([np.eye(dim), -np.eye(dim)])[:classes]


def _helmert(classes: int) -> Matrix:
    """[K, K-1] orthonormal basis of vectors that sum to 0: column j is j ones, then -j, over sqrt(j(j+1))."""
    j = np.arange(1, classes)
    below = np.arange(classes)[:, None]
    return np.asarray(np.where(below < j, 1.0, np.where(below == j, -j, 0.0)) / np.sqrt(j * (j + 1)))


@functools.lru_cache(maxsize=8)
def _solve(starts: bytes, shape: tuple[int, int, int]) -> Matrix:
    """The best of several descents from `starts` (bytes of float64); equal starts are solved once."""
    ends = [_descend(start) for start in np.frombuffer(starts).reshape(shape)]
    return max(ends, key=_smallest_distance)


def _descend(start: Matrix) -> Matrix:
    """Push close pairs apart: descent on a soft maximum of the inner products that hardens step by step."""
    w = _unit(start)
    classes = len(w)
    itself = np.eye(classes, dtype=bool)
    for step in range(STEPS):
        beta = 10 * 1000 ** (step / (STEPS - 1))
        logits = np.where(itself, -np.inf, beta * (w @ w.T))
        p = np.exp(logits - logits.max())
        w = _unit(w - classes / beta * (p / p.sum()) @ w)
    return w


def _smallest_distance(w: Matrix) -> float:
    return float(-np.max(w @ w.T - 4 * np.eye(len(w))))  # by inner products, without those of a row with itself


def _unit(v: Matrix) -> Matrix:
    return np.asarray(v / np.maximum(np.linalg.norm(v, axis=-1, keepdims=True), 1e-12))
