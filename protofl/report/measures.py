"""The geometry of prototypes in numbers, over the stored rounds.

p_c: the server's prototype of class c, of the classes that have one. v_j, j = 1 ... n: the prototypes that the round's
clients sent, of class c(j). All distances are Euclidean, in the space of the method's prototypes.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from .frames import CURVES, whose
from .geometry import client_means, usable
from .groups import Entry, Setting
from .read import Prototypes
from .tables import frame


def nearest(stored: Prototypes) -> float | None:
    """min over classes c < e of |p_c - p_e|; None with fewer than two global prototypes."""
    from scipy.spatial.distance import pdist

    values = stored.values[stored.has]
    return float(pdist(values).min()) if len(values) > 1 and usable(values) else None


def within(stored: Prototypes) -> float | None:
    """(1 / n) sum_j |v_j - m_c(j)|^2, m_c the mean of the client prototypes of class c.

    Classes with a single client prototype are left out, of the sum and of n: they have no scatter. None where no class
    has two.
    """
    if not usable(stored.client_values):
        return None
    groups = [g for g in _classes(stored) if len(g) > 1]
    squares = [np.square(g - g.mean(0)).sum(1) for g in groups]
    return float(np.concatenate(squares).mean()) if squares else None


def between(stored: Prototypes) -> float | None:
    """(1 / C) sum_c |m_c - m|^2 over the C classes with client prototypes, m = (1 / C) sum_c m_c; None for C < 2."""
    if not usable(stored.client_values):
        return None
    means = np.array([g.mean(0) for g in _classes(stored)])
    return float(np.square(means - means.mean(0)).sum(1).mean()) if len(means) > 1 else None


def _classes(stored: Prototypes) -> list[Any]:
    """The client prototypes [n_c, d] of every class."""
    return [stored.client_values[stored.client_labels == c] for c in np.unique(stored.client_labels)]


def agreement(stored: Prototypes) -> float | None:
    """(1 / C) sum_c of the mean over clients i < k of cos(u_ic, u_kc), u_ic the mean of i's prototypes of class c.

    C: the classes that two clients or more have; means of length zero have no direction and are left out. None where no
    class is left.
    """
    if not usable(stored.client_values):
        return None
    units: dict[int, list[Any]] = {}
    for (_, c), mean in client_means(stored).items():
        if length := float(np.linalg.norm(mean)):
            units.setdefault(c, []).append(mean / length)
    found = []
    for many in units.values():
        if (n := len(many)) > 1:
            total = np.sum(many, axis=0)
            # the square of the sum has every pair twice and n ones
            found.append((float(total @ total) - n) / (n * (n - 1)))
    return statistics.fmean(found) if found else None


def drift(before: Prototypes, after: Prototypes) -> float | None:
    """(1 / C) sum_c |p_c^t - p_c^s| / (t - s), s and t consecutive stored rounds, over the C classes that both have.

    A chord: ways back and forth between s and t do not count. None for C = 0.
    """
    k = min(len(before.has), len(after.has))
    both = np.flatnonzero(before.has[:k] & after.has[:k])
    old, new = before.values[both], after.values[both]
    if not (usable(old) and usable(new)) or old.shape != new.shape or after.round <= before.round:
        return None
    return float(np.linalg.norm(new - old, axis=1).mean() / (after.round - before.round))


ROUND = {"nearest": nearest, "within": within, "between": between, "agreement": agreement}
"""The numbers of one round."""

RUNS = ["setting", "method", "label", "variant", "fate", "runs", "seed", "metric", "round", "value"]


def over_rounds(made: Sequence[Setting]) -> pd.DataFrame:
    """Setting x method x number x stored round -> mean, lowest and highest of the seeds, as in `frames.curves`.

    `drift` stands at the later round. Only rounds in which all seeds have the number.
    """
    each = frame((row for s in made for e in s.entries for row in _of_entry(s, e)), RUNS)
    keys = [name for name in RUNS if name not in ("seed", "value")]
    groups = each.groupby(keys, sort=False)["value"]
    found = groups.agg(n="size", mean="mean", low="min", high="max").reset_index()
    return found.loc[found["n"] == found["runs"], CURVES].reset_index(drop=True)


def _of_entry(setting: Setting, entry: Entry) -> Iterator[dict[str, Any]]:
    """Every number that a run of a method has; nothing for those that are not defined."""
    for run in entry.drawn:
        recorded = {row["round"] for row in entry.rows(run)}
        before: Prototypes | None = None
        for stored in run.all_prototypes()[0]:
            if stored.round not in recorded:
                continue
            values = {name: measure(stored) for name, measure in ROUND.items()}
            values["drift"] = None if before is None else drift(before, stored)
            before = stored
            for name, value in values.items():
                if value is not None:
                    yield {
                        **whose(setting, entry),
                        "runs": len(entry.drawn),
                        "seed": run.seed,
                        "metric": name,
                        "round": stored.round,
                        "value": value,
                    }
