"""Features of stored models: `features/round-NNNNN.npz` of a run, read and put into the plane.

The pictures are of one seed: the first, by number, whose files can be read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from .frames import class_name
from .geometry import MOST, WHO, embed, readable, thin, usable, who
from .groups import Entry, Setting
from .read import Array, Prototypes, Run, made_of, stored
from .tables import frame, total

COLUMNS = [*WHO, "model", "projection", "kind", "client", "class", "class_id", "right", "x", "y"]
ONE_CLASS = [*COLUMNS, "to_mean", "to_nearest"]

PANELS = 10
"""The most panels of test features."""

METHODS = 3
"""The most methods that are shown before and after the server's step."""

GLOBAL = "global"
CLIENT = re.compile(r"client-(\d+)")
SAYS = ("predicted", "network_predicted")
"""Kinds of stored predictions."""


@dataclass(frozen=True, eq=False)
class Stage:
    """What one model makes of n samples."""

    z: Array
    """What the head classifies [n, d]."""
    encoded: Array | None
    """The encoder's output [n, q], where it is not z."""
    predicted: Array | None
    """Class ids [n], by the method's scores."""
    network: Array | None
    """Class ids [n], by the network's own output layer: what the models before and after a server's step share."""

    def of_width(self, width: int) -> Array | None:
        """The features with as many columns as prototypes have: the encoder's where both do."""
        return next((v for v in (self.encoded, self.z) if v is not None and v.shape[1] == width), None)


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples and what the models make of them, by the model's name."""

    index: Array
    labels: Array
    stages: Mapping[str, Stage]


@dataclass(frozen=True, eq=False)
class Features:
    """One stored round: the test samples, and the training samples of the pictured clients by client."""

    round: int
    test: Samples
    train: Mapping[int, Samples]


@dataclass(frozen=True, eq=False)
class Shown:
    """A method's run that is pictured, with its stored rounds, ascending and not empty."""

    entry: Entry
    run: Run
    rounds: Sequence[Features]

    @property
    def last(self) -> Features:
        return self.rounds[-1]

    @property
    def clients(self) -> list[str]:
        """The names of the pictured clients' own models, by client."""
        found = {int(m[1]): name for name in self.last.test.stages if (m := CLIENT.fullmatch(name))}
        return [found[i] for i in sorted(found)]

    @property
    def alone(self) -> bool:
        """Whether its clients trained alone: they have models, there is no global one, and nothing was sent."""
        sent = [total(self.run.rounds, name) for name in ("bytes_down", "bytes_up")]
        return bool(self.clients) and GLOBAL not in self.last.test.stages and sent == [0, 0]


def shown(setting: Setting) -> tuple[list[Shown], list[str]]:
    """Every method of a setting with features that can be read, and which files cannot."""
    found, notes = readable(setting, read)
    return [Shown(*x) for x in found], notes


# ---- files ------------------------------------------------------------------------------------------------


def read(run: Run) -> tuple[list[Features], list[str]]:
    """The features of every stored round, ascending, and why files are passed over."""
    return made_of(stored(run.path / "features"), _features)


def _features(t: int, given: Mapping[str, Array]) -> Features:
    """The arrays of a file in agreeing shapes, or a ValueError."""
    clients = sorted({int(m[1]) for name in given if (m := re.fullmatch(r"train_labels:(\d+)", name))})
    made = Features(t, _samples(given, "test"), {i: _samples(given, "train", f":{i}") for i in clients})
    widths: dict[str, int] = {}
    for samples in (made.test, *made.train.values()):
        for name, stage in samples.stages.items():
            if widths.setdefault(name, stage.z.shape[1]) != stage.z.shape[1]:
                raise ValueError(f"{name} has features of several widths")
    return made


def _samples(given: Mapping[str, Array], part: str, client: str = "") -> Samples:
    labels = _ids(given, f"{part}_labels{client}")
    n = len(labels)
    start = f"{part}{client}:"
    stages = {
        name.removeprefix(start): _stage(given, part, f"{client}:{name.removeprefix(start)}", n)
        for name in given
        if name.startswith(start)
    }
    return Samples(_ids(given, f"{part}_index{client}", n), labels, stages)


def _stage(given: Mapping[str, Array], part: str, model: str, n: int) -> Stage:
    encoded = f"{part}_encoded{model}"
    predicted = {kind: _ids(given, name, n) for kind in SAYS if (name := f"{part}_{kind}{model}") in given}
    return Stage(
        _points(given, f"{part}{model}", n),
        _points(given, encoded, n) if encoded in given else None,
        predicted.get("predicted"),
        predicted.get("network_predicted", predicted.get("predicted")),
    )


def _ids(given: Mapping[str, Array], name: str, n: int | None = None) -> Array:
    """Whole numbers from 0, or a ValueError."""
    found = given.get(name)
    if found is None or found.ndim != 1 or found.dtype.kind not in "iu" or (found.size and found.min() < 0):
        raise ValueError(name)
    if n is not None and len(found) != n:
        raise ValueError(name)
    return found.astype(np.int64)


def _points(given: Mapping[str, Array], name: str, n: int) -> Array:
    """Finite rows, or a ValueError."""
    found = given[name]
    if found.ndim != 2 or len(found) != n or found.dtype.kind != "f" or not (n == 0 or usable(found)):
        raise ValueError(name)
    return found.astype(np.float64)


# ---- test features of several methods ---------------------------------------------------------------------


def methods(setting: Setting, found: Sequence[Shown]) -> tuple[pd.DataFrame, list[str]]:
    """Test features of two clients, then of the methods' global models, in the last stored round (FedProc, figure 2).

    The clients are those of the method whose clients trained alone; where there is none, those of the first method with
    a global model, after their local training. A method without a global model shows its clients'. Each panel is
    projected by itself, from the same test images.
    """
    models = _models(found)
    if not models:
        return frame([], COLUMNS), []
    images = models[0][0].last.test.index
    same = [(x, name) for x, name in models if np.array_equal(x.last.test.index, images)]
    others = dict.fromkeys(x.entry.label for x, _ in models if not np.array_equal(x.last.test.index, images))
    notes = [f"{label}: other test images, features left out" for label in others]
    notes += [f"{x.entry.label}: no room for the features of {name}" for x, name in same[PANELS:]]
    rows: list[dict[str, Any]] = []
    for x, name in same[:PANELS]:
        samples = x.last.test
        at = thin(len(samples.labels))
        if len(at) < 2:
            notes.append(f"{x.entry.label}: {len(at)} test image(s), too few for a picture")
            continue
        rows += _rows(setting, x, x.last.round, name, [(None, samples, at, samples.stages[name].predicted)])
    return frame(rows, COLUMNS), list(dict.fromkeys(notes))


def _models(found: Sequence[Shown]) -> list[tuple[Shown, str]]:
    """Which models are shown, in order."""
    federated = [x for x in found if GLOBAL in x.last.test.stages]
    lead = ([x for x in found if x.alone] or federated)[:1]
    out = [(x, name) for x in lead for name in x.clients]
    for x in found:
        if x in federated:
            out.append((x, GLOBAL))
        elif x not in lead:
            out += [(x, name) for name in x.clients]
    return out


Picked = tuple[int | None, Samples, Array, Array | None]
"""A client, its samples, which of them are shown, and predictions for all of them."""


def _rows(setting: Setting, x: Shown, t: int, model: str, picked: Sequence[Picked]) -> Iterator[dict[str, Any]]:
    """The points of some samples, by client where they are a client's, in one projection."""
    plane, projection = embed(np.concatenate([samples.stages[model].z[at] for _, samples, at, _ in picked]))
    places = iter(plane.tolist())
    for client, samples, at, told in picked:
        for i in at.tolist():
            c = int(samples.labels[i])
            px, py = next(places)
            yield {
                **who(setting, x.entry, x.run, t),
                "model": model,
                "projection": projection,
                "kind": "feature",
                "client": client,
                "class": class_name(x.run, c),
                "class_id": c,
                "right": None if told is None else bool(told[i] == c),
                "x": px,
                "y": py,
            }


# ---- one class of one client ------------------------------------------------------------------------------


def one_class(setting: Setting, found: Sequence[Shown]) -> pd.DataFrame:
    """Training features of a client's one class, their mean and the client's prototypes (FedCSPC, figure 7).

    Of methods whose clients send several prototypes of a class, in the last stored round that has both: the pictured
    client and class with most samples, ties to the lower client, then class. The features are those of the client's own
    model, of the prototypes' width. `to_mean`, `to_nearest`: distance of a feature to the mean and to the nearest
    prototype, in the full space. One projection of all together.
    """
    return frame((row for x in found for row in _one_class(setting, x)), ONE_CLASS)


def _one_class(setting: Setting, x: Shown) -> Iterator[dict[str, Any]]:
    from scipy.spatial.distance import cdist

    by_round = {p.round: p for p in x.run.all_prototypes()[0]}
    for own in reversed(x.rounds):
        if own.round not in by_round or not (several := list(_several(own, by_round[own.round]))):
            continue
        _, client, c, features, centres = min(several, key=lambda one: one[:3])
        mean = features.mean(0)
        near = cdist(features, centres).min(1)
        far = np.linalg.norm(features - mean, axis=1)
        at = thin(len(features))
        plane, projection = embed(np.concatenate([features[at], [mean], centres]))
        kinds = ["feature"] * len(at) + ["mean"] + ["prototype"] * len(centres)
        for k, ((px, py), kind) in enumerate(zip(plane, kinds)):
            yield {
                **who(setting, x.entry, x.run, own.round),
                "model": f"client-{client}",
                "projection": projection,
                "kind": kind,
                "client": client,
                "class": class_name(x.run, c),
                "class_id": c,
                "x": float(px),
                "y": float(py),
                "to_mean": float(far[at[k]]) if kind == "feature" else None,
                "to_nearest": float(near[at[k]]) if kind == "feature" else None,
            }
        return


def _several(own: Features, prototypes: Prototypes) -> Iterator[tuple[int, int, int, Array, Array]]:
    """(-samples, client, class, features, prototypes) where a client has two or more prototypes of a class."""
    for client, samples in own.train.items():
        stage = samples.stages.get(f"client-{client}")
        points = None if stage is None else stage.of_width(prototypes.client_values.shape[1])
        for c in np.unique(samples.labels) if points is not None else ():
            centres = prototypes.client_values[(prototypes.client_ids == client) & (prototypes.client_labels == c)]
            features = points[samples.labels == c]  # type: ignore[index]
            if len(centres) > 1 and len(features) > 1 and usable(centres):
                yield -len(features), client, int(c), features, centres


# ---- before and after the server's step -------------------------------------------------------------------


def confusable(setting: Setting, found: Sequence[Shown]) -> tuple[pd.DataFrame, list[str]]:
    """Training features of two confusable classes before and after the server's own training (FedCSPC, figure 8).

    Of methods that store a stage besides the clients' models and the global one: that stage is before, `global` after;
    first and last stored round. The classes are the two that the first of these models confuses most, both ways, on the
    training samples of the pictured clients; ties go to the lower numbers. Each panel is projected by itself.
    """
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    stages = [(x, stage) for x in found if (stage := _before(x)) is not None]
    for x, before in stages[:METHODS]:
        rounds = [one for one in x.rounds if all(_pooled(one, name) for name in (before, GLOBAL))]
        pair = _pair(_pooled(rounds[0], before), before) if rounds else None
        if pair is None:
            notes.append(f"{x.entry.label}: no two classes of the pictured clients were confused, picture left out")
            continue
        for own in dict.fromkeys((rounds[0], rounds[-1])):
            for name in (before, GLOBAL):
                rows += _two(setting, x, own, name, pair)
    notes += [f"{x.entry.label}: no room for its confusable classes" for x, _ in stages[METHODS:]]
    return frame(rows, COLUMNS), notes


def _before(x: Shown) -> str | None:
    """The first stage that is neither a client's model nor the global one."""
    names = [name for own in x.rounds for samples in own.train.values() for name in samples.stages]
    return next((name for name in names if name != GLOBAL and not CLIENT.fullmatch(name)), None)


def _pooled(own: Features, model: str) -> list[tuple[int, Samples]]:
    """The clients whose training samples went through a model, with what its network says of them."""
    return [(i, s) for i, s in own.train.items() if model in s.stages and s.stages[model].network is not None]


def _pair(pooled: Sequence[tuple[int, Samples]], model: str) -> tuple[int, int] | None:
    """The two classes with most samples of one taken for the other; None where there is no such sample."""
    labels = np.concatenate([samples.labels for _, samples in pooled])
    told = np.concatenate([samples.stages[model].network for _, samples in pooled])  # type: ignore[misc]
    counts: dict[tuple[int, int], int] = {}
    for a, b in zip(labels.tolist(), told.tolist()):
        if a != b and b in labels:
            pair = (min(a, b), max(a, b))
            counts[pair] = counts.get(pair, 0) + 1
    return min(counts, key=lambda pair: (-counts[pair], pair), default=None)


def _two(setting: Setting, x: Shown, own: Features, model: str, pair: tuple[int, int]) -> Iterator[dict[str, Any]]:
    """The points of two classes of all pictured clients in one plane."""
    pooled = _pooled(own, model)
    picked: list[Picked] = []
    for client, samples in pooled:
        mine = np.flatnonzero(np.isin(samples.labels, pair))
        picked.append((client, samples, mine[thin(len(mine), MOST // len(pooled))], samples.stages[model].network))
    if sum(len(at) for _, _, at, _ in picked) > 1:
        yield from _rows(setting, x, own.round, model, picked)
