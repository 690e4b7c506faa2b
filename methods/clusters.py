"""FedCSPC's prototypes of one class: k-means, then means of random subsets of its clusters.

NumPy on float64 rows in the order of the client's data; every draw comes from the stream that is handed in.
"""

from __future__ import annotations

import warnings

import numpy as np
import sklearn
from numpy.random import RandomState
from numpy.typing import NDArray
from sklearn.cluster import KMeans, kmeans_plusplus
from sklearn.exceptions import ConvergenceWarning

Rows = NDArray[np.float64]
Labels = NDArray[np.intp]


def kmeans(rows: Rows, k: int, stream: RandomState, *, init: str = "kmeans++", unit: bool = False) -> Labels:
    """Cluster ids [n] of rows [n, d] in at most k clusters; unit: by their directions.

    No more clusters than there are distinct rows, or an empty one would have no mean. A single cluster draws
    nothing. Rows of a diverged run (not finite) are one cluster.
    """
    space = (_unit(rows) if unit else rows) + 0.0  # -0 and 0 are one value
    if k == 1 or not np.isfinite(space).all():
        return np.zeros(len(rows), dtype=np.intp)
    first = first_seen(space)
    k = min(k, len(first))
    if k == 1:
        return np.zeros(len(rows), dtype=np.intp)
    with sklearn.config_context(assume_finite=True, skip_parameter_validation=True):  # checked above
        if init == "random":
            starts = space[first[stream.permutation(len(first))[:k]]]
        else:
            starts, _ = kmeans_plusplus(space, k, random_state=stream, n_local_trials=1)
        return lloyd(space, starts).labels_  # type: ignore[no-any-return]


def first_seen(rows: Rows) -> Labels:
    """Where distinct rows [n, d] first appear, ascending; by their bytes, as sorting them takes longer."""
    positions: dict[bytes, int] = {}
    for i, row in enumerate(rows):
        positions.setdefault(row.tobytes(), i)
    return np.array(list(positions.values()), dtype=np.intp)


def lloyd(rows: Rows, starts: Rows) -> KMeans:
    """Lloyd's algorithm from these starts, fitted; an empty cluster takes the farthest row."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        # The starts are given, so nothing is drawn; a fixed random_state leaves NumPy's global stream alone.
        return KMeans(len(starts), init=starts, n_init=1, max_iter=50, tol=1e-4, random_state=0).fit(rows)


def subset_means(cluster: Rows, stream: RandomState, *, ratio: float, repeats: int, replacement: bool) -> Rows:
    """[repeats, d] means of random subsets of a cluster's rows [g, d], max(1, floor(ratio g)) rows each.

    Where every repeat must be the same row, there is one.
    """
    g = len(cluster)
    m = max(1, int(ratio * g))
    if g == 1 or (m == g and not replacement):
        return np.asarray(cluster.mean(0, keepdims=True))
    draws = [stream.randint(0, g, m) if replacement else stream.permutation(g)[:m] for _ in range(repeats)]
    return np.asarray(cluster[np.stack(draws)].mean(1))


def _unit(rows: Rows) -> Rows:
    return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12))
