"""Prototypes as points: planes of global and client prototypes, cosines between classes, clients side by side.

The pictures are of one seed: the first, by number, whose files can be read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from .frames import class_name
from .groups import Entry, Setting
from .read import Array, Prototypes, Run
from .tables import frame

WHO = ["setting", "method", "label", "seed", "round"]
POINTS = [*WHO, "projection", "kind", "client", "class", "class_id", "x", "y"]
COSINES = [*WHO, "class", "class_id", "other", "other_id", "cosine"]
REPRESENTATIONS = [*WHO, "client", "class", "class_id", "share_1", "share_2", "x", "y"]

MOST = 500
"""More points than this in a panel are thinned out."""

PANELS = 12
"""The most panels of a figure."""

ROUNDS = 3
"""The most rounds of a method: first, middle, last."""

LARGEST = 1e15
"""Squares of larger numbers do not fit single precision."""

FEWEST = 6
"""With fewer distinct points t-SNE means nothing: PCA."""

CHOSEN = 3
"""Classes whose client representations are shown."""

CLIENTS = 10
"""The most clients that are told apart by a mark."""

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Shown:
    """A method's run that is pictured, with the prototypes of its stored rounds, ascending and not empty."""

    entry: Entry
    run: Run
    rounds: Sequence[Prototypes]


def shown(setting: Setting) -> tuple[list[Shown], list[str]]:
    """Every method of a setting with prototypes that can be read, and which files cannot."""
    found, notes = readable(setting, Run.all_prototypes)
    return [Shown(*x) for x in found], notes


def readable(
    setting: Setting, read: Callable[[Run], tuple[list[T], list[str]]]
) -> tuple[list[tuple[Entry, Run, list[T]]], list[str]]:
    """The first run of every method of which `read` gets something, with that, and the problems on the way."""
    found, notes = [], []
    for e in setting.entries:
        for run in e.drawn:
            rounds, problems = read(run)
            notes += [f"{e.label}, seed {run.seed}: {problem}" for problem in problems]
            if rounds:
                found.append((e, run, rounds))
                break
    return found, notes


def who(setting: Setting, entry: Entry, run: Run, t: int) -> dict[str, Any]:
    """Whose rows they are."""
    return {"setting": setting.number, "method": entry.method, "label": entry.label, "seed": run.seed, "round": t}


def usable(points: Array) -> bool:
    """Whether there are points, finite and of a size whose squares can be summed."""
    return bool(points.size) and bool((np.abs(points) < LARGEST).all())


def thin(n: int, most: int = MOST) -> Array:
    """Ascending places of at most so many of n points, drawn without replacement; the same for the same n."""
    return np.arange(n) if n <= most else np.sort(np.random.RandomState(0).permutation(n)[:most])


# ---- planes -----------------------------------------------------------------------------------------------


def prototypes(made: Sequence[Setting]) -> tuple[pd.DataFrame, list[str]]:
    """The points of every method that stored prototypes, in its first, middle and last stored round, and remarks.

    Fewer rounds where there are many methods: no more than `PANELS` planes, each projected by itself. The remarks say
    what was left out and why.
    """
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    for s in made:
        found, problems = shown(s)
        notes += problems
        each = max(1, min(ROUNDS, PANELS // max(1, len(found))))
        for x in found[:PANELS]:
            for stored in spaced(x.rounds, each):
                points, note = _points(s, x, stored)
                rows += points
                notes += [f"{x.entry.label}: {note}"] if note else []
        notes += [f"{x.entry.label}: no room in the picture" for x in found[PANELS:]]
    return frame(rows, POINTS), list(dict.fromkeys(notes))


def spaced(items: Sequence[T], n: int) -> list[T]:
    """At most n of the items, evenly spaced, the last and (for two and more) the first among them."""
    if n == 1:
        return list(items[-1:])
    return [items[i] for i in sorted({k * (len(items) - 1) // (n - 1) for k in range(n)})]


def _points(setting: Setting, x: Shown, stored: Prototypes) -> tuple[list[dict[str, Any]], str]:
    """The tidy points of one stored round."""
    own = thin(len(stored.client_labels))
    points = np.concatenate([stored.values[stored.has], stored.client_values[own]])
    if not usable(points) and len(points):
        return [], "prototypes not finite or too large, picture left out"
    if len(points) < 2:
        return [], f"{len(points)} stored prototype(s), too few for a picture"
    plane, projection = embed(points)
    globals_ = np.flatnonzero(stored.has)
    labels = [*globals_, *stored.client_labels[own]]
    clients = [*[None] * len(globals_), *stored.client_ids[own]]
    rows = [
        {
            **who(setting, x.entry, x.run, stored.round),
            "projection": projection,
            "kind": "global" if client is None else "client",
            "client": None if client is None or client < 0 else int(client),
            "class": class_name(x.run, int(c)),
            "class_id": int(c),
            "x": float(px),
            "y": float(py),
        }
        for (px, py), c, client in zip(plane, labels, clients)
    ]
    thinned = len(own) < len(stored.client_labels)
    return rows, f"{MOST} of the client prototypes drawn, chosen at random" if thinned else ""


def embed(points: Array) -> tuple[Array, str]:
    """[n, d] finite points -> [n, 2] and how. The same input gives the same output on any number of cores."""
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    n, d = points.shape
    with threadpool_limits(1):
        if len(np.unique(points, axis=0)) < FEWEST or d < 2:
            return principal(points)[0], "PCA"
        tsne = TSNE(perplexity=min(30, (n - 1) / 3), init="pca", max_iter=300, random_state=0)
        return np.asarray(tsne.fit_transform(points), dtype=np.float64), "t-SNE"


def principal(points: Array) -> tuple[Array, Array]:
    """[n, d] -> the first two principal components [n, 2] and their shares of the variance [2].

    The largest entry of a component is positive; components that do not exist are zeros.
    """
    centred = points - points.mean(0)
    u, s, _ = np.linalg.svd(centred, full_matrices=False)
    plane, shares = np.zeros((len(points), 2)), np.zeros(2)
    k = min(2, len(s))
    plane[:, :k] = (u * s)[:, :k]
    if s.any():
        shares[:k] = (s**2 / (s**2).sum())[:k]
    signs = np.sign(plane[np.abs(plane).argmax(0), [0, 1]])
    return plane * np.where(signs == 0, 1, signs), shares


# ---- cosines ----------------------------------------------------------------------------------------------


def similarity(made: Sequence[Setting]) -> pd.DataFrame:
    """Cosine of every two global prototypes p_c, p_e in the last stored round, c <= e.

        cos(p_c, p_e) = <p_c, p_e> / (|p_c| |p_e|)

    Classes without a prototype, or with one of length zero, have no rows.
    """
    return frame((row for s in made for x in shown(s)[0][:PANELS] for row in _cosines(s, x)), COSINES)


def _cosines(setting: Setting, x: Shown) -> Iterator[dict[str, Any]]:
    stored = x.rounds[-1]
    ids = np.flatnonzero(stored.has)
    if not usable(stored.values[ids]):
        return
    ids = ids[np.linalg.norm(stored.values[ids], axis=1) > 0]
    table = np.clip(cosines(stored.values[ids]), -1, 1)
    for i, j in zip(*np.triu_indices(len(ids))) if len(ids) > 1 else ():
        c, e = int(ids[i]), int(ids[j])
        yield {
            **who(setting, x.entry, x.run, stored.round),
            "class": class_name(x.run, c),
            "class_id": c,
            "other": class_name(x.run, e),
            "other_id": e,
            "cosine": round(float(table[i, j]), 6),
        }


def cosines(points: Array) -> Array:
    """[n, d] points, none of them zero -> [n, n]."""
    units = points / np.linalg.norm(points, axis=1, keepdims=True)
    return np.asarray(units @ units.T)


# ---- clients side by side ---------------------------------------------------------------------------------


def representations(made: Sequence[Setting]) -> tuple[pd.DataFrame, list[str]]:
    """The clients' mean prototypes of a few classes in their first two principal components (FedNH, figure 6).

    Last stored round. The classes are the `CHOSEN` that most clients have, counted over all methods shown; the clients
    the `CLIENTS` with most of them; ties go to the lower number. The components are those of the points shown, by method.
    """
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    for s in made:
        means = [(x, client_means(x.rounds[-1])) for x in shown(s)[0]]
        means = [(x, m) for x, m in means if m and usable(np.array(list(m.values())))][:PANELS]
        classes = _most(Counter(c for _, m in means for _, c in m), CHOSEN)
        clients = _most(Counter(i for _, m in means for i, c in m if c in classes), CLIENTS)
        for x, m in means:
            mine = {key: v for key, v in m.items() if key[0] in clients and key[1] in classes}
            if len(mine) < 3:
                notes.append(f"{x.entry.label}: {len(mine)} client representation(s) of the chosen classes, too few")
                continue
            rows += _representations(s, x, mine)
    return frame(rows, REPRESENTATIONS), notes


def _most(counts: Counter[int], n: int) -> list[int]:
    """The n that are counted most, ties to the lower number."""
    return sorted(counts, key=lambda k: (-counts[k], k))[:n]


def _representations(setting: Setting, x: Shown, means: dict[tuple[int, int], Array]) -> Iterator[dict[str, Any]]:
    plane, shares = principal(np.array(list(means.values())))
    for (client, c), (px, py) in zip(means, plane):
        yield {
            **who(setting, x.entry, x.run, x.rounds[-1].round),
            "client": client,
            "class": class_name(x.run, c),
            "class_id": c,
            "share_1": float(shares[0]),
            "share_2": float(shares[1]),
            "x": float(px),
            "y": float(py),
        }


def client_means(stored: Prototypes) -> dict[tuple[int, int], Array]:
    """(client, class) -> the mean [d] of the client's prototypes of the class; clients without a number are left out."""
    keys = list(zip(stored.client_ids.tolist(), stored.client_labels.tolist()))
    at: dict[tuple[int, int], list[int]] = {}
    for row, key in enumerate(keys):
        if key[0] >= 0:
            at.setdefault(key, []).append(row)
    return {key: stored.client_values[at[key]].mean(0) for key in sorted(at)}
