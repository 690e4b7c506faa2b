"""What should make a reader look twice: equal curves, terms of a loss that are never there, accuracies at chance."""

from __future__ import annotations

import math
from collections.abc import Iterator

from .groups import Entry, Setting
from .select import KINDS, evaluated, last, value

WEIGHTS = 2.0
"""Standard errors of a guess within which an accuracy is called chance."""


def oddities(s: Setting) -> list[str]:
    """Sentences on one setting, names not escaped; empty where there is nothing odd."""
    return [*_equal(s), *_nothing(s), *_chance(s)]


def _equal(s: Setting) -> Iterator[str]:
    """Methods that have the same accuracies in every round of every seed."""
    for metric, word in KINDS.items():
        alike: dict[tuple[object, ...], list[str]] = {}
        for e in s.entries:
            if curves := _curves(e, metric):
                alike.setdefault(curves, []).append(e.label)
        for labels in alike.values():
            if len(labels) > 1:
                yield f"the same {word} in every round of every seed: {', '.join(labels)} (by construction, or by their settings)"


def _curves(e: Entry, metric: str) -> tuple[object, ...]:
    """Seed, round and accuracy of all that was measured."""
    found = [
        (run.seed, row["round"], v)
        for run in e.used
        for row in evaluated(e.rows(run))
        if (v := value(row, metric)) is not None
    ]
    return tuple(sorted(found))


def _nothing(s: Setting) -> Iterator[str]:
    """Terms of a loss that are exactly 0 in all that was recorded."""
    for e in s.entries:
        told = [row.get("terms", {}) for run in e.used for row in e.rows(run) if row["round"] >= 0]
        names = list(dict.fromkeys(name for terms in told for name in terms))
        gone = [name for name in names if all(terms.get(name, 0) == 0 for terms in told)]
        if gone:
            yield f"exactly 0 in every round of {e.label}: {', '.join(gone)} (it trains as if that were not there)"


def _chance(s: Setting) -> Iterator[str]:
    """Methods whose last global model is not told from guessing."""
    classes, test = len(s.first.data.get("classes", [])), s.first.data.get("test")
    if classes < 2 or not isinstance(test, int) or test < 1:
        return
    guess = 1 / classes
    limit = guess + WEIGHTS * math.sqrt(guess * (1 - guess) / test)
    for e in s.entries:
        found = [v for run in e.used if (v := last(e.rows(run), "gm")) is not None]
        if found and sum(found) / len(found) <= limit:
            yield f"{e.label} is at chance: {100 * sum(found) / len(found):.2f} % GM, of {classes} classes"
