"""Figures of geometry: points in the plane, cosines between classes, and their numbers over rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from . import style
from .figures import blank, legend, lines, name_classes, plain, plain_numbers, short, wide
from .superclasses import by_superclass

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MEASURES = {
    "nearest": "smallest distance between\nglobal prototypes",
    "drift": "drift of global prototypes\nper round",
    "agreement": "agreement between clients,\ncosine",
    "within": "within-class scatter\nof client prototypes",
    "between": "between-class scatter\nof client prototypes",
}
"""Panels of the numbers over rounds, and their titles."""

DISTANCES = ("nearest", "drift", "within", "between")
"""Panels with a logarithmic axis where the numbers allow: methods differ in the length of their prototypes."""

MARKS = ("o", "^", "s", "D", "v", "P", "X", "<", ">", "p")
"""Marks by client."""


def draw_prototypes(tidy: pd.DataFrame, classes: int) -> Figure:
    """Prototypes in the plane: a row per method where there are several rounds, stars global, dots the clients'."""
    panels = list(tidy.groupby(["label", "round"], sort=False))
    labels = list(tidy["label"].unique())
    several = len(panels) > len(labels)
    columns = max(tidy.groupby("label")["round"].nunique()) if several else _columns(len(labels))
    figure, axes = _grid(len(labels) if several else math.ceil(len(labels) / columns), columns)
    at = {label: columns * i if several else i for i, label in enumerate(labels)}
    used = []
    for (label, t), mine in panels:
        ax = axes[at[label]]
        at[label] += 1
        used.append(ax)
        own, server = mine[mine["kind"] == "client"], mine[mine["kind"] == "global"]
        _dots(ax, own, classes, size=13, alpha=0.6)
        _dots(ax, server, classes, marker="*", size=80 if classes <= 20 else 40, edge="black", alpha=1, zorder=3)
        first = mine.iloc[0]
        _name(ax, label, f"{first['projection']}, round {t}, seed {first['seed']}")
    _drop(axes, used)
    marks = [("global", "*", 9.0, "black"), ("client", "o", 4.0, "none")]
    class_legend(figure, tidy, classes, marks)
    return figure


def draw_methods(tidy: pd.DataFrame, classes: int) -> Figure:
    """Test features by class, a panel per model."""
    panels = list(tidy.groupby(["label", "model"], sort=False))
    columns = _columns(len(panels))
    figure, axes = _grid(math.ceil(len(panels) / columns), columns)
    for ax, ((label, model), mine) in zip(axes, panels):
        _dots(ax, mine, classes, size=9, alpha=0.75)
        first = mine.iloc[0]
        _name(ax, label, f"{_model(model)}, round {first['round']}, seed {first['seed']}\n{_counted(mine)}")
    _drop(axes, axes[: len(panels)])
    class_legend(figure, tidy, classes)
    return figure


def _model(name: object) -> str:
    """A stored model in words."""
    return {"global": "global model"}.get(str(name), str(name).replace("client-", "own model of client "))


def _counted(mine: pd.DataFrame) -> str:
    """How the points came here, how many they are, and which share of them is classified rightly."""
    right = mine["right"].dropna()
    accuracy = f", {100 * right.astype(float).mean():.1f} % right" if len(right) == len(mine) else ""
    return f"{mine.iloc[0]['projection']} of {len(mine)}{accuracy}"


def draw_one_class(tidy: pd.DataFrame, classes: int) -> Figure:
    """One class of one client: features, their mean, and the client's prototypes; a panel per method."""
    panels = list(tidy.groupby("label", sort=False))
    columns = _columns(len(panels))
    figure, axes = _grid(math.ceil(len(panels) / columns), columns, size=3.7, beside=0)
    for ax, (label, mine) in zip(axes, panels):
        kinds = {kind: mine[mine["kind"] == kind] for kind in ("feature", "mean", "prototype")}
        _dots(ax, kinds["feature"], classes, size=14, alpha=0.55)
        _dots(ax, kinds["prototype"], classes, marker="*", size=170, edge="black", alpha=1, zorder=4)
        ax.scatter(kinds["mean"]["x"], kinds["mean"]["y"], marker="X", s=95, c="white", edgecolors="black", zorder=5)
        first, features = mine.iloc[0], kinds["feature"]
        near, far = features["to_nearest"].mean(), features["to_mean"].mean()
        subtitle = (
            f"client {first['client']}, class {short(plain(str(first['class'])), 16)}, round {first['round']}, "
            f"seed {first['seed']}, {first['projection']} of {len(features)}\n"
            f"distance to the mean {far:.3g}, to the nearest prototype {near:.3g}"
        )
        _name(ax, label, subtitle)
    _drop(axes, axes[: len(panels)])
    look = [("feature", "o", 4.5, "none"), ("their mean", "X", 8.0, "black"), ("prototype", "*", 10.0, "black")]
    handles = [_mark(marker, size, edge, "white" if marker == "X" else "#888888") for _, marker, size, edge in look]
    figure.legend(handles, [word for word, *_ in look], loc="outside lower center", ncols=3, fontsize=8)
    return figure


def draw_confusable(tidy: pd.DataFrame, classes: int) -> Figure:
    """Two classes before and after the server's step: a row per method, marks by client, wrong points hollow."""
    panels = list(tidy.groupby(["label", "round", "model"], sort=False))
    labels = list(tidy["label"].unique())
    columns = max(len([1 for (label, *_), _ in panels if label == one]) for one in labels)
    figure, axes = _grid(len(labels), columns)
    at = {label: columns * i for i, label in enumerate(labels)}
    used = []
    for (label, t, model), mine in panels:
        ax = axes[at[label]]
        at[label] += 1
        used.append(ax)
        clients = sorted(mine["client"].unique())
        for client, marker in zip(clients, MARKS):
            part = mine[mine["client"] == client]
            for right in (True, False):
                _dots(ax, part[part["right"] == right], classes, marker=marker, size=15, hollow=not right, alpha=0.8)
        state = "after" if model == "global" else f"before ({short(plain(str(model)), 14)})"
        _name(ax, label, f"{state}, round {t}, seed {mine.iloc[0]['seed']}\n{_counted(mine)}")
    _drop(axes, used)
    many = sorted(tidy["client"].unique())
    marks = [(f"client {i}", marker, 5.0, "none") for i, marker in zip(many, MARKS)]
    class_legend(figure, tidy, classes, marks, hollow="classified wrongly")
    return figure


def draw_representations(tidy: pd.DataFrame, classes: int) -> Figure:
    """Client representations of a few classes in two principal components: a panel per method, marks by client."""
    panels = list(tidy.groupby("label", sort=False))
    columns = _columns(len(panels))
    figure, axes = _grid(math.ceil(len(panels) / columns), columns)
    clients = sorted(tidy["client"].unique())
    for ax, (label, mine) in zip(axes, panels):
        for client, marker in zip(clients, MARKS):
            _dots(ax, mine[mine["client"] == client], classes, marker=marker, size=32, edge="white", alpha=0.9)
        first = mine.iloc[0]
        _name(ax, label, f"round {first['round']}, seed {first['seed']}")
        ax.set_xlabel(f"PC 1, {100 * first['share_1']:.0f} % of variance", fontsize=7.5)
        ax.set_ylabel(f"PC 2, {100 * first['share_2']:.0f} %", fontsize=7.5)
    _drop(axes, axes[: len(panels)])
    marks = [(f"client {i}", marker, 5.0, "none") for i, marker in zip(clients, MARKS)]
    class_legend(figure, tidy, classes, marks)
    return figure


def draw_similarity(tidy: pd.DataFrame, names: Sequence[str]) -> Figure:
    """Cosine matrices of global prototypes, a panel per method; CIFAR-100 in the order of its superclasses."""
    groups = by_superclass(names)
    order = [c for members in groups.values() for c in members] or list(range(len(names)))
    place = {c: i for i, c in enumerate(order)}
    panels = list(tidy.groupby("label", sort=False))
    columns = _columns(len(panels))
    size = 3.3 if groups else 2.9
    figure, axes = _grid(math.ceil(len(panels) / columns), columns, size)
    for ax, (label, mine) in zip(axes, panels):
        table = np.full((len(order), len(order)), np.nan)
        rows, cols = mine["class_id"].map(place).to_numpy(), mine["other_id"].map(place).to_numpy()
        table[rows, cols] = table[cols, rows] = mine["cosine"].to_numpy()
        ax.set_facecolor("#cccccc")
        image = ax.imshow(table, cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest")
        first = mine.iloc[0]
        _title(ax, label, f"round {first['round']}, seed {first['seed']}")
        ax.grid(False)
        if groups:
            _name_superclasses(ax, groups, bool(axes.index(ax) % columns))
        else:
            name_classes(ax, [short(plain(str(n)), 12) for n in names])
            if len(names) <= 20:
                ax.set_yticks(range(len(names)), [short(plain(str(n)), 12) for n in names])
            ax.tick_params(labelsize=7)
    _drop(axes, axes[: len(panels)])
    figure.colorbar(image, ax=axes[: len(panels)], label="cosine", shrink=0.6, aspect=30)
    return figure


def _name_superclasses(ax: Axes, groups: dict[str, list[int]], bare: bool) -> None:
    """Superclasses beside a matrix, with lines between them."""
    ends = np.cumsum([len(members) for members in groups.values()]) - 0.5
    for end in ends[:-1]:
        ax.axhline(end, color="#888888", linewidth=0.4)
        ax.axvline(end, color="#888888", linewidth=0.4)
    ax.set_xticks([])
    middles = ends - [len(members) / 2 for members in groups.values()]
    ax.set_yticks(middles, [] if bare else list(groups), fontsize=6.5)
    ax.tick_params(axis="y", length=0)


def draw_measures(tidy: pd.DataFrame) -> Figure:
    """The numbers of the prototypes over rounds, a panel per number."""
    names = [name for name in MEASURES if (tidy["metric"] == name).any()]
    columns = _columns(len(names))
    rows = math.ceil(len(names) / columns)
    figure, axes = blank(max(4.5, 2.9 * columns), 2.5 * rows + 0.6, rows, columns)
    for ax, name in zip(axes, names):
        mine = tidy[tidy["metric"] == name]
        lines(ax, mine)
        if name in DISTANCES and mine["low"].min() > 0 and wide(mine["mean"]):
            ax.set_yscale("log")
            plain_numbers(ax.yaxis)
        ax.set_title(MEASURES[name], fontsize=9)
        ax.set_xlabel("round t")
    _drop(axes, axes[: len(names)])
    legend(figure, tidy, columns)
    return figure


# ---- parts ------------------------------------------------------------------------------------------------


def _columns(panels: int) -> int:
    """Panels beside each other."""
    return 2 if panels == 4 else min(3, panels)


def _grid(rows: int, columns: int, size: float = 2.9, beside: float = 1.3) -> tuple[Figure, list[Axes]]:
    """Square panels, with room for what stands beside them."""
    figure, axes = blank(size * columns + beside, (size + 0.35) * rows, rows, columns)
    figure.set_layout_engine("constrained", h_pad=0.1)
    return figure, axes


def _dots(
    ax: Axes, part: pd.DataFrame, classes: int, *, size: float, alpha: float, marker: str = "o", edge: str = "none",
    hollow: bool = False, zorder: float = 2,
) -> None:  # fmt: skip
    """Points in the colours of their classes."""
    colours = [class_colour(int(c), classes) for c in part["class_id"]]
    look: dict[str, Any] = (
        {"facecolors": "none", "edgecolors": colours} if hollow else {"c": colours, "edgecolors": edge}
    )
    ax.scatter(part["x"], part["y"], s=size, marker=marker, linewidths=0.7, alpha=alpha, zorder=zorder, **look)


def _title(ax: Axes, label: object, subtitle: str) -> None:
    """A method's name above a panel, and smaller what the panel shows."""
    ax.set_title(short(plain(str(label)), 30), fontsize=9.5, pad=14 + 10 * subtitle.count("\n"))
    ax.annotate(
        subtitle, (0, 1), (0, 3), xycoords="axes fraction", textcoords="offset points", fontsize=7.5, color="#666666",
        linespacing=1.2,
    )  # fmt: skip


def _name(ax: Axes, label: object, subtitle: str) -> None:
    """The same for a plane whose axes mean nothing by themselves."""
    _title(ax, label, subtitle)
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[:].set(visible=True, linewidth=0.6, color="#bbbbbb")
    ax.margins(0.08)
    ax.set_aspect("equal", adjustable="datalim")


def _drop(axes: Sequence[Axes], used: Sequence[Axes]) -> None:
    """Take the empty panels away."""
    for ax in axes:
        if ax not in used:
            ax.remove()


def class_colour(c: int, classes: int) -> Any:
    """The colour of a class."""
    if classes <= len(style.CLASSES):
        return style.CLASSES[c % len(style.CLASSES)]
    import matplotlib

    return matplotlib.colormaps["turbo"](c / max(classes - 1, 1))


def class_legend(
    figure: Figure, tidy: pd.DataFrame, classes: int, marks: Sequence[tuple[str, str, float, str]] = (),
    hollow: str = "",
) -> None:  # fmt: skip
    """What the marks (word, marker, size, edge) and hollow ones are, and which colour is which class.

    Of many classes some are named, evenly spaced.
    """
    handles = [_mark(marker, size, edge, "#555555") for _, marker, size, edge in marks]
    words = [word for word, *_ in marks]
    if hollow:
        handles.append(_mark("o", 5, "#555555", "none"))
        words.append(hollow)
    named = tidy[["class_id", "class"]].drop_duplicates().sort_values("class_id")
    told = list(named.itertuples(index=False, name=None))
    if len(told) > len(style.CLASSES):
        told = [(int(c), f"class id {c}") for c in np.unique(np.linspace(0, classes - 1, 6).round().astype(int))]
    for c, name in told:
        handles.append(_mark("s", 5, "none", class_colour(c, classes)))
        words.append(short(plain(str(name)), 18))
    figure.legend(handles, words, loc="outside right center", fontsize=8)


def _mark(marker: str, size: float, edge: str, colour: Any) -> Any:
    """A mark in a legend."""
    from matplotlib.lines import Line2D

    return Line2D([], [], marker=marker, markersize=size, linestyle="", markerfacecolor=colour, markeredgecolor=edge)
