"""Sections on the geometry of prototypes and features; a function returns the blocks of its section."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import pandas as pd

from . import features, geometry, measures, space
from .blocks import Block, Heading, Text
from .content import Report
from .groups import Setting
from .markdown import escape
from .superclasses import by_superclass

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLANE = (
    "A plane keeps neighbours and not distances: sizes of clusters, gaps between them, and places in different panels "
    "cannot be compared."
)


def prototypes(made: Report, s: Setting) -> list[Block]:
    """Prototypes in the plane, their cosines, the clients side by side, numbers over rounds; and what is left out."""
    points, notes = geometry.prototypes([s])
    cosines = geometry.similarity([s])
    clients, more = geometry.representations([s])
    numbers = measures.over_rounds([s])
    names = _names(s, [*points["class_id"], *cosines["other_id"]])
    parts = [
        *_figure(
            made, s, "prototypes", points, "Prototypes in the plane of {}",
            "Stars: global prototypes; dots: the clients' own; colour: class. First, middle and last stored round, as far "
            f"as there is room, of one seed; each panel is projected by itself. {PLANE}",
            lambda data: space.draw_prototypes(data, len(names)),
        ),
        *_figure(
            made, s, "measures", numbers, "Distances and scatter of prototypes over rounds, of {}", _measures(s),
            space.draw_measures,
        ),
        *_figure(
            made, s, "similarity", cosines, "Cosines between the global prototypes of {}",
            "Cosine of every two global prototypes, last stored round of one seed, one scale for all panels; grey: no "
            "prototype. Off the diagonal two classes point the same way where it is red, are at right angles where white, "
            "opposed where blue"
            f"{'. Rows and columns are grouped by superclass' if by_superclass(names) else ''}.",
            lambda data: space.draw_similarity(data, names),
        ),
        *_figure(
            made, s, "representations", clients, "Client representations of chosen classes of {}",
            "Mean of a client's prototypes of a class, in the first two principal components of the points of a panel; "
            "colour: class, mark: client. The "
            f"{geometry.CHOSEN} classes that most clients have and the {geometry.CLIENTS} clients, at most, with most of "
            "them. Clients agree where marks of one colour lie together. Scales of panels differ.",
            lambda data: space.draw_representations(data, len(names)),
        ),
    ]  # fmt: skip
    parts += _remarks([*notes, *more])
    return [Heading("Prototypes", 3), *parts] if parts else []


def _measures(s: Setting) -> str:
    band = "Line: mean over seeds; band: lowest to highest seed" if len(s.seeds) > 1 else "One seed"
    return (
        f"Stored rounds alone. {band}. Distances are Euclidean; the clients are those of the round, and change from round "
        "to round where clients are drawn. *Drift* stands at the later of two stored rounds. *Scatter* is a mean squared "
        "distance: to the mean of the class; of the means of classes to their mean. *Agreement* is 1 where all clients "
        "point the same way. Methods differ in the width and length of their prototypes, hence in the level of "
        "everything but agreement: compare the courses. A method is missing where a number is not defined."
    )


def of_features(made: Report, s: Setting) -> list[Block]:
    """Test features by method, one class of one client, two classes before and after the server; what is left out."""
    found, notes = features.shown(s)
    tests, left = features.methods(s, found)
    one = features.one_class(s, found)
    two, more = features.confusable(s, found)
    classes = len(_names(s, [*tests["class_id"], *one["class_id"], *two["class_id"]]))
    parts = [
        *_figure(
            made, s, "features", tests, "Test features in the plane of {}",
            "What the heads classify, for the same test images, at most "
            f"{geometry.MOST}; colour: true class; last stored round of one seed. *% right*: of the points shown. First "
            "two clients alone, or right after their local training, then the other models. Each panel is projected by "
            f"itself. {PLANE}",
            lambda data: space.draw_methods(data, classes),
        ),
        *_figure(
            made, s, "one_class", one, "One class of one client with its prototypes, of {}",
            "Training features of one class of one client under its own model, their mean, and the prototypes of the class "
            "that it sent: the client and class with most samples. The distances above a panel are means over the points "
            f"in the full space, and several prototypes cannot but lie nearer. {PLANE}",
            lambda data: space.draw_one_class(data, classes),
        ),
        *_figure(
            made, s, "confusable", two, "Two classes before and after the server's own training, of {}",
            "Training features of the pictured clients in the two classes that the first model shown confuses most, before "
            "and after the server's own training, first and last stored round of one seed; colour: class, mark: client, "
            "hollow: classified wrongly, into any class. *% right*: of the points shown, which are training samples of "
            f"two hard classes: no accuracy of the method. Each panel is projected by itself. {PLANE}",
            lambda data: space.draw_confusable(data, classes),
        ),
    ]  # fmt: skip
    parts += _remarks([*notes, *left, *more])
    return [Heading("Features", 3), *parts] if parts else []


def _names(s: Setting, ids: Sequence[int]) -> list[str]:
    """The names of the classes, by their numbers where the record has none."""
    names = [str(name) for name in s.first.data.get("classes", [])]
    return names + [str(c) for c in range(len(names), int(max(ids, default=-1)) + 1)]


def _figure(
    made: Report, s: Setting, name: str, data: pd.DataFrame, alt: str, caption: str,
    draw: Callable[[pd.DataFrame], Figure],
) -> list[Block]:  # fmt: skip
    """A figure with the runs behind it; nothing where there is no data."""
    if data.empty:
        return []
    labels = list(dict.fromkeys(data["label"]))
    seeds = set(zip(data["label"], data["seed"])) if "seed" in data else None
    behind = [
        run for e in s.entries if e.label in labels for run in e.drawn if seeds is None or (e.label, run.seed) in seeds
    ]
    return [made.figure(name, behind, data, alt.format(", ".join(labels)), caption, draw, s)]


def _remarks(notes: Sequence[str]) -> list[Block]:
    return [Text(f"*{escape(note)}.*") for note in dict.fromkeys(notes)]
