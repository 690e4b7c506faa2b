"""What a model is worth: global and personalised accuracy, per class, loss (protocol section 5)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .data.augment import Pipeline
from .method import WEIGHTINGS, Model
from .nets import Net

READ = 500
"""Test images per call: fixed, since its size moves last bits."""


@dataclass(frozen=True)
class TestSet:
    """The whole test set, resident; the same for every client and method. x uint8 [M, H, W, C], y [M]."""

    x: Tensor
    y: Tensor
    pipeline: Pipeline
    classes: int

    __test__ = False  # not a test case of pytest

    def per_class(self) -> np.ndarray:
        """m_c: samples of every class, [K]."""
        return np.bincount(self.y.cpu().numpy(), minlength=self.classes)


@dataclass(frozen=True)
class Scored:
    """What a model got right on the whole test set.

    confusion: by the name of the scores, the headline first, [K, K] counts (true class, predicted class), or None
    where the scores are undefined; loss: mean cross-entropy, None where undefined; only: by the name of the scores, the
    weightings under which they mean something (default: all).
    """

    confusion: dict[str, np.ndarray | None]
    loss: float | None
    only: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def headline(self) -> np.ndarray | None:
        """The confusion matrix of the headline."""
        return next(iter(self.confusion.values()))


def score(model: Model, net: Net, test: TestSet) -> Scored:
    """Run a model over the whole test set, in eval mode and without gradients."""
    bound, k = net.bound("eval"), test.classes
    confusion: dict[str, Any] = {}
    losses: list[Tensor] | None = []
    with torch.no_grad():
        for at in range(0, len(test.y), READ):
            x, y = test.pipeline.test(test.x[at : at + READ]), test.y[at : at + READ]
            out = model.scores(bound, model.tree, x)
            named = out if isinstance(out, dict) else {"network": out}
            for name, scores in named.items():
                if scores is None:
                    confusion[name] = None
                    continue
                pairs = y * k + scores.argmax(1)
                confusion[name] = confusion.get(name, 0) + torch.bincount(pairs, minlength=k * k).view(k, k)
            told = named[model.loss or next(iter(named))]
            if told is None or losses is None:
                losses = None
            else:
                losses.append(F.cross_entropy(told, y, reduction="sum").double())
    loss = None if losses is None else float(torch.stack(losses).sum()) / len(test.y)
    found = {name: None if c is None else c.cpu().numpy() for name, c in confusion.items()}
    return Scored(found, loss, model.only)


def accuracy(confusion: np.ndarray | None) -> float | None:
    """Correct over all rows."""
    return None if confusion is None else float(np.trace(confusion) / confusion.sum())


def global_row(scored: Scored | None) -> dict[str, Any]:
    """The record of the global model; undefined figures are None."""
    if scored is None:
        return {"gm": None, "gm_scores": {}, "loss": None, "gm_correct": None}
    best = scored.headline
    return {
        "gm": accuracy(best),
        "gm_scores": {name: accuracy(c) for name, c in scored.confusion.items()},
        "loss": scored.loss if scored.loss is not None and math.isfinite(scored.loss) else None,
        "gm_correct": None if best is None else np.diag(best).tolist(),
    }


def personal_accuracy(correct: np.ndarray, per_class: np.ndarray, weights: np.ndarray) -> float | None:
    """acc_i = sum_c a_ic r_ic / sum_c a_ic m_c (protocol 5.2); None where nothing is to be evaluated. All [K]."""
    below = float((weights * per_class).sum())
    return float((weights * correct).sum()) / below if below > 0 else None


def class_weights(counts: np.ndarray) -> dict[str, np.ndarray]:
    """a_ic of a client with these class counts [K], by weighting."""
    return {
        "uniform": np.ones(len(counts)),
        "v": (counts > 0).astype(float),
        "l": counts / max(counts.sum(), 1),
    }


def fairness(values: list[float]) -> tuple[float, float]:
    """Population standard deviation over clients, and mean of the worst 10 % (protocol 5.4)."""
    lowest = sorted(values)[: math.ceil(0.1 * len(values))]
    return float(np.std(values)), float(np.mean(lowest))


def personal_row(
    scored: Mapping[int, Scored], counts: np.ndarray, per_class: np.ndarray, empty: int = 0
) -> dict[str, Any]:
    """The record of the personal models: plain means over the clients with something to evaluate.

    counts: [N, K] training samples of all clients; per_class: [K] test samples; empty: clients of the population
    that have no data, and hence no model.
    """
    names = list(dict.fromkeys(name for one in scored.values() for name in one.confusion))
    each = {name: _each(scored, name, counts, per_class) for name in names}
    headline = each[names[0]] if names else {}
    row: dict[str, Any] = {}
    for weighting in WEIGHTINGS:
        values = [v for v in headline.get(weighting, []) if v is not None]
        row[f"pm_{weighting}"] = float(np.mean(values)) if values else None
        row[f"pm_{weighting}_std"], row[f"pm_{weighting}_worst10"] = fairness(values) if values else (None, None)
    row["pm_clients"] = sum(v is not None for v in headline.get("v", []))
    row["pm_skipped"] = len(scored) + empty - row["pm_clients"]
    row["pm_each"] = {"client": list(scored), **headline}
    if len(names) > 1:
        row["pm_scores"] = {name: {w: _mean(values) for w, values in told.items()} for name, told in each.items()}
    return row


def _each(
    scored: Mapping[int, Scored], name: str, counts: np.ndarray, per_class: np.ndarray
) -> dict[str, list[float | None]]:
    """acc_i of one kind of scores, by weighting, in the order of the clients."""
    out: dict[str, list[float | None]] = {w: [] for w in WEIGHTINGS}
    for i, one in scored.items():
        confusion = one.confusion.get(name)
        defined = one.only.get(name, WEIGHTINGS)
        for weighting, weights in class_weights(counts[i]).items():
            value = None
            if confusion is not None and counts[i].sum() and weighting in defined:
                value = personal_accuracy(np.diag(confusion), per_class, weights)
            out[weighting].append(value)
    return out


def _mean(values: list[float | None]) -> float | None:
    there = [v for v in values if v is not None]
    return float(np.mean(there)) if there else None
