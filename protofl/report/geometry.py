"""Prototypes in the plane: t-SNE of the global prototypes together with the clients' means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from .frames import class_name
from .groups import Entry, Setting
from .read import Array, Prototypes, Run
from .tables import frame

COLUMNS = [
    "setting",
    "method",
    "label",
    "seed",
    "round",
    "projection",
    "kind",
    "client",
    "class",
    "class_id",
    "x",
    "y",
]

MOST = 500
"""More client means than this are thinned out."""

LARGEST = 1e15
"""Squares of larger numbers do not fit single precision."""

FEWEST = 6
"""With fewer distinct points t-SNE means nothing: PCA."""


def prototypes(made: Sequence[Setting]) -> tuple[pd.DataFrame, list[str]]:
    """The points of every method that stored prototypes (first seed in use, last stored round), and remarks.

    The remarks say what was left out and why.
    """
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    for s in made:
        for e in s.entries:
            points, note = _of_entry(s, e)
            rows += points
            if note:
                notes.append(f"{e.label}: {note}")
    return frame(rows, COLUMNS), notes


def _of_entry(setting: Setting, entry: Entry) -> tuple[list[dict[str, Any]], str]:
    problems = ""
    for run in entry.drawn:
        stored, problem = run.prototypes()
        if stored is not None:
            return _points(setting, entry, run, stored)
        problems = problems or problem
    return [], problems and f"{problems}, picture left out"


def _points(setting: Setting, entry: Entry, run: Run, stored: Prototypes) -> tuple[list[dict[str, Any]], str]:
    """The tidy points of one stored file."""
    own = np.arange(len(stored.client_labels))
    thinned = len(own) > MOST
    if thinned:
        own = np.sort(np.random.RandomState(0).permutation(len(own))[:MOST])
    points = np.concatenate([stored.values[stored.has], stored.client_values[own]])
    if not (np.abs(points) < LARGEST).all():
        return [], "prototypes not finite or too large, picture left out"
    if len(points) < 2:
        return [], f"{len(points)} stored prototype(s), too few for a picture"
    plane, projection = embed(points)
    globals_ = np.flatnonzero(stored.has)
    labels = [*globals_, *stored.client_labels[own]]
    clients = [*[None] * len(globals_), *stored.client_ids[own]]
    rows = [
        {
            "setting": setting.number,
            "method": entry.method,
            "label": entry.label,
            "seed": run.seed,
            "round": stored.round,
            "projection": projection,
            "kind": "global" if client is None else "client",
            "client": None if client is None or client < 0 else int(client),
            "class": class_name(run, int(c)),
            "class_id": int(c),
            "x": float(x),
            "y": float(y),
        }
        for (x, y), c, client in zip(plane, labels, clients)
    ]
    return rows, f"{MOST} of {len(stored.client_labels)} client means drawn" if thinned else ""


def embed(points: Array) -> tuple[Array, str]:
    """[n, d] finite points -> [n, 2] and how. The same input gives the same output on any number of cores."""
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    n, d = points.shape
    with threadpool_limits(1):
        if len(np.unique(points, axis=0)) < FEWEST or d < 2:
            return _pca(points), "PCA"
        tsne = TSNE(perplexity=min(30, (n - 1) / 3), init="pca", max_iter=500, random_state=0)
        return np.asarray(tsne.fit_transform(points), dtype=np.float64), "t-SNE"


def _pca(points: Array) -> Array:
    """The first two principal components (zeros where there are fewer), largest entry positive."""
    centred = points - points.mean(0)
    u, s, _ = np.linalg.svd(centred, full_matrices=False)
    plane = np.zeros((len(points), 2))
    plane[:, : min(2, len(s))] = (u * s)[:, :2]
    signs = np.sign(plane[np.abs(plane).argmax(0), [0, 1]])
    return plane * np.where(signs == 0, 1, signs)
