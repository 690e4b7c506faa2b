"""Figures: tidy frames in, figures out, stored in one place. One style; no global state, no display, nothing left open."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from . import style
from .markdown import one_line
from .read import DIVERGED, UNFINISHED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

ACCURACIES = {"gm": "global model (GM)", "pm_v": "personalised models, PM(V)"}
MARKS = {DIVERGED: "X", UNFINISHED: "D"}
"""Marks where the curve of a method ends before its time."""


def plain(text: str) -> str:
    """A text as a figure can show it: one line, and not beginning with `_`, which hides a label."""
    made = one_line(text)
    return f" {made}" if made.startswith("_") else made


def short(text: str, most: int) -> str:
    """A text cut to a length."""
    return text if len(text) <= most else text[: most - 1] + "…"


@contextmanager
def one_style() -> Iterator[None]:
    """Figures look alike whatever the user's own settings are."""
    import matplotlib.style

    with matplotlib.style.context(["default", style.STYLE]):
        yield


VECTOR = ("svg", "pdf")
"""What figures are written as, besides PNG, where nothing else is asked for."""

FORMATS: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
"""What is written, without what is not of the figure: times and versions."""


def save(figure: Figure, *paths: Path) -> None:
    """Write .png, .svg or .pdf, by the paths' ends, so that the bytes depend on nothing but the figure."""
    figure.draw_without_rendering()
    figure.set_layout_engine(None)  # the layout and what is cut away are found once, not once a file
    frame = figure.get_tightbbox().padded(0.12)
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        figure.savefig(path, metadata=FORMATS[path.suffix[1:]], bbox_inches=frame)
        if path.suffix == ".png":
            _few_colours(path)


def _few_colours(path: Path) -> None:
    """256 colours are enough for lines, marks and letters, in a third of the bytes."""
    from PIL import Image

    with Image.open(path) as full:
        full.convert("RGB").quantize(256, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(path, optimize=True)


def blank(width: float, height: float, rows: int = 1, columns: int = 1, **grid: Any) -> tuple[Figure, list[Axes]]:
    """A new figure with its axes, row by row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, **grid).flat)


def draw_curves(tidy: pd.DataFrame, chance: float | None) -> Figure:
    """Accuracy over rounds of one setting, a panel per kind of accuracy."""
    kinds = [m for m in ACCURACIES if (tidy["metric"] == m).any()]
    labels = tidy["label"].nunique()
    figure, axes = blank(7.4, len(kinds) * max(3.3, 0.19 * labels + 1.2), len(kinds))
    for ax, metric in zip(axes, kinds):
        mine = tidy[tidy["metric"] == metric].assign(**{n: 100 * tidy[n] for n in ("mean", "low", "high")})
        lines(ax, mine)
        ax.set_title(ACCURACIES[metric])
        ax.set_ylabel("test accuracy, %")
        if chance is not None and metric == "gm":
            ax.axhline(100 * chance, color="#999999", linewidth=0.9, linestyle=(0, (2, 2)), zorder=1)
            ax.annotate(
                "chance",
                (1, 100 * chance),
                (-2, 2),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                color="#777777",
                fontsize=8,
                ha="right",
            )
        direct_labels(ax, mine)
    axes[-1].set_xlabel("round t")
    return figure


def draw_loss(tidy: pd.DataFrame) -> Figure:
    """Test loss over rounds of one setting."""
    figure, (ax,) = blank(7.4, max(3.0, 0.19 * tidy["label"].nunique() + 1.2))
    lines(ax, tidy)
    if wide(tidy["mean"]):
        ax.set_yscale("log")
        plain_numbers(ax.yaxis)
    ax.set_ylabel("test loss")
    ax.set_xlabel("round t")
    direct_labels(ax, tidy)
    return figure


BUDGET = {"mb": "sent and received until then, MB", "seconds": "training, prototypes and aggregation, seconds"}
"""What accuracy is drawn over, in words."""


def draw_budget(tidy: pd.DataFrame) -> Figure:
    """Accuracy over what was spent, a row of panels per kind of accuracy."""
    kinds = [m for m in ACCURACIES if (tidy["metric"] == m).any()]
    costs = [n for n in BUDGET if tidy[n].notna().any()]
    figure, axes = blank(
        max(5.0, 4.4 * len(costs)), 2.9 * len(kinds) + 0.6, len(kinds), len(costs), sharex="col", sharey="row"
    )
    for i, ax in enumerate(axes):
        metric, cost = kinds[i // len(costs)], costs[i % len(costs)]
        mine = tidy[(tidy["metric"] == metric) & tidy[cost].notna()]
        mine = mine.assign(**{n: 100 * mine[n] for n in ("mean", "low", "high")})
        lines(ax, mine, cost)
        if wide(mine.groupby("label")[cost].max()):
            ax.set_xscale("log")
            plain_numbers(ax.xaxis)
        if i % len(costs) == 0:
            ax.set_title(ACCURACIES[metric])
            ax.set_ylabel("test accuracy, %")
        if i // len(costs) == len(kinds) - 1:
            ax.set_xlabel(BUDGET[cost])
    legend(figure, tidy, 2)
    return figure


def wide(values: pd.Series[float]) -> bool:
    """Whether positive values span more than a factor of 10, and are shown on a log scale."""
    return bool(values.min() > 0 and values.max() / values.min() > 10)


def plain_numbers(axis: Axis) -> None:
    """Powers of ten as numbers, the ticks between them bare: labels are never read as mathematics."""
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(lambda value, _: "")


def draw_sweep(tidy: pd.DataFrame, over: str, by: str) -> Figure:
    """Accuracy over what is varied; a panel for each value of the second field."""
    word, groups = ACCURACIES[str(tidy["metric"].iloc[0])], list(tidy["group"].unique())
    labels = tidy["label"].nunique()
    figure, axes = blank(7.4, len(groups) * max(3.0, 0.19 * labels + 1.2), len(groups), sharex=True, sharey=True)
    places = tidy.drop_duplicates("place").sort_values("place")
    for ax, group in zip(axes, groups):
        mine = tidy[tidy["group"] == group].assign(**{n: 100 * tidy[n] for n in ("mean", "low", "high")})
        lines(ax, with_gaps(mine, list(places["place"])).assign(fate=""), "place")
        for _, point in mine[mine["fate"].isin(list(MARKS))].iterrows():
            mark(ax, point, "place")
        if wide(places["place"]):
            ax.set_xscale("log")
            ax.minorticks_off()
        ax.set_xticks(places["place"], [short(plain(str(v)), 14) for v in places["value"]])
        ax.set_title(f"{word}, {plain(by)} = {plain(str(group))}" if by else word)
        ax.set_ylabel("test accuracy, %")
    for ax, group in zip(axes, groups):  # once all is drawn: the panels share their limits
        mine = tidy[tidy["group"] == group]
        direct_labels(ax, mine.assign(mean=100 * mine["mean"], fate=""), "place")
    axes[-1].set_xlabel(plain(over))
    return figure


def with_gaps(tidy: pd.DataFrame, places: list[float]) -> pd.DataFrame:
    """The points with an empty one wherever a method has none between two of its own: no line crosses it."""
    parts = []
    for _, mine in tidy.groupby("label", sort=False):
        first, last = mine["place"].min(), mine["place"].max()
        made = mine.set_index("place").reindex([p for p in places if first <= p <= last])
        constant = ["method", "label", "variant"]
        parts.append(made.assign(**{n: mine[n].iloc[0] for n in constant}).reset_index())
    return pd.concat(parts)


def draw_terms(tidy: pd.DataFrame) -> Figure:
    """Terms of the training loss over rounds of one setting, a panel per term."""
    names = sorted(tidy["metric"].unique(), key=lambda n: (n != "loss", n))
    columns = 2 if len(names) == 4 else min(3, len(names))
    rows = math.ceil(len(names) / columns)
    figure, axes = blank(max(4.5, 2.9 * columns), 2.4 * rows + 0.6, rows, columns)
    for ax, name in zip(axes, names):
        lines(ax, tidy[tidy["metric"] == name])
        ax.set_title(short(plain(str(name)), 28))
    for ax in axes[len(names) :]:
        ax.remove()
    for ax in axes[: len(names)][-columns:]:
        ax.set_xlabel("round t")
    legend(figure, tidy, columns)
    return figure


def lines(ax: Axes, tidy: pd.DataFrame, x: str = "round") -> None:
    """Mean over the seeds, a band from the lowest to the highest, and a mark where a curve ends early.

    x: the column along the axis.
    """
    from matplotlib.ticker import MaxNLocator

    dots = tidy["round"].nunique() <= 30 if x != "place" else True
    for label, mine in tidy.groupby("label", sort=False):
        first = mine.iloc[0]
        colour = style.colour(str(first["method"]))
        ax.plot(
            mine[x],
            mine["mean"],
            color=colour,
            linestyle=style.dash(int(first["variant"])),
            marker="o" if dots else "",
            markersize=2.6,
            label=plain(str(label)),
        )
        if (mine["high"] > mine["low"]).any():
            ax.fill_between(mine[x], mine["low"], mine["high"], color=colour, alpha=0.2, linewidth=0)
        if first["fate"] in MARKS:
            mark(ax, mine.iloc[-1], x)
    if x == "round":
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if x == "round" and tidy[x].nunique() == 1:
        t = tidy[x].iloc[0]
        ax.set_xlim(t - 1, t + 1)
        ax.set_xticks([t])
    else:
        ax.margins(x=0.015)


def mark(ax: Axes, point: pd.Series[Any], x: str) -> None:
    """The mark of a point that is not a finished method's."""
    shape, colour = MARKS[point["fate"]], style.colour(str(point["method"]))
    ax.plot([point[x]], [point["mean"]], marker=shape, color=colour, markersize=7, markeredgecolor="white", zorder=5)


def direct_labels(ax: Axes, tidy: pd.DataFrame, x: str = "round") -> None:
    """The methods' names beside the ends of their curves, pushed apart where they would overlap.

    x: the column along the axis.
    """
    limits = ax.get_ylim()
    ends = [mine.iloc[-1] for _, mine in tidy.groupby("label", sort=False)]
    height = ax.get_figure(root=True).get_size_inches()[1] / len(ax.get_figure(root=True).axes)  # type: ignore[union-attr]
    gap = 0.165 / (height - 0.75)
    within = ax.transAxes.inverted()
    wanted = [float(within.transform(ax.transData.transform((e[x], e["mean"])))[1]) for e in ends]
    last = tidy[x].max()
    for end, y, place in zip(ends, wanted, style.spread(wanted, gap, 0.0, 1.0)):
        colour = style.colour(str(end["method"]))
        text = short(plain(str(end["label"])), 40) + (f" ({end['fate']})" if end["fate"] in MARKS else "")
        ax.annotate(text, (1.045, place), xycoords="axes fraction", color=colour, va="center", fontsize=8.5)
        if end[x] == last:
            ax.plot(
                [1.006, 1.038],
                [y, place],
                color=colour,
                linewidth=0.8,
                transform=ax.transAxes,
                clip_on=False,
                linestyle=style.dash(int(end["variant"])),
            )
    ax.set_ylim(*limits)


def legend(figure: Figure, tidy: pd.DataFrame, columns: int) -> None:
    """All methods below the panels."""
    from matplotlib.lines import Line2D

    firsts = [mine.iloc[0] for _, mine in tidy.groupby("label", sort=False)]
    handles = [
        Line2D([], [], color=style.colour(str(f["method"])), linestyle=style.dash(int(f["variant"]))) for f in firsts
    ]
    words = [short(plain(str(f["label"])), 40) for f in firsts]
    widest = max(map(len, words))
    fit = max(1, int(columns * 2.9 * 72 / (5.2 * widest + 40)))
    rows = math.ceil(len(words) / fit)
    figure.legend(handles, words, loc="outside lower center", ncols=math.ceil(len(words) / rows))


COSTS = {
    "crossed": "sent and received, MB\nper client and round",
    "work": "sample-passes\nper client and round",
    "state_mb": "kept by a client, MB",
    "seconds_aggregate": "server, seconds per round",
}
"""Panels of the cost picture: what is drawn, and its title."""


def draw_cost(tidy: pd.DataFrame) -> Figure:
    """What a method costs: bytes, samples, memory of clients and the server's time, a bar per method."""
    figure, axes = blank(10.2, 0.24 * len(tidy) + 1.3, 1, len(COSTS), sharey=True)
    mine = tidy.iloc[::-1]
    colours = [style.colour(str(m)) for m in mine["method"]]
    at = np.arange(len(mine))
    drawn = {
        "crossed": mine["down_mb"] + mine["up_mb"],
        "work": mine["trained"] + mine["forward"] / 3,
        "state_mb": mine["state_mb"],
        "seconds_aggregate": mine["seconds_aggregate"],
    }
    for ax, (name, title) in zip(axes, COSTS.items()):
        values = drawn[name].astype(float)
        bars = ax.barh(at, values.fillna(0), color=colours, height=0.7)
        ax.bar_label(
            bars,
            [" -" if v != v else f" {v:,.0f}" if v >= 1000 else f" {v:.3g}" for v in values],
            fontsize=7,
            color="#333333",
        )
        ax.set_title(title, fontsize=8.5)
        ax.margins(x=0.32)
        ax.locator_params(axis="x", nbins=3)
        ax.grid(False, axis="y")
        ax.tick_params(axis="y", length=0)
    axes[0].set_yticks(at, [short(plain(str(label)), 30) for label in mine["label"]])
    return figure


def draw_effects(tidy: pd.DataFrame, split: float | None) -> Figure:
    """Differences to the default with their intervals, a line per reading; split: what another split does, a share of 1."""
    figure, (ax,) = blank(7.4, 0.21 * len(tidy) + 1.1)
    mine = tidy.iloc[::-1].assign(**{n: 100 * tidy[n].astype(float) for n in ("mean", "low", "high")})
    at = np.arange(len(mine))
    if split is not None:
        ax.axvspan(-100 * split, 100 * split, color="#eeeeee", linewidth=0, zorder=0)
    ax.axvline(0, color="#666666", linewidth=0.9, zorder=1)
    ax.hlines(at, mine["low"], mine["high"], color="#8fb3d1", linewidth=2.4, zorder=2)
    clear = ((mine["low"] > 0) | (mine["high"] < 0)).to_numpy()
    ax.scatter(mine["mean"], at, s=26, zorder=3, edgecolor="#0072b2", facecolor=np.where(clear, "#0072b2", "#ffffff"))
    names = [short(plain(f"{choice} = {reading}"), 48) for choice, reading in zip(mine["choice"], mine["reading"])]
    ax.set_yticks(at, names, fontsize=7.5)
    ax.set_ylim(-0.7, len(mine) - 0.3)
    ax.set_xlabel("reading minus default, percentage points")
    if wide_signed(mine["mean"]):
        ax.set_xscale("symlog", linthresh=1.0)
        ax.set_xlabel("reading minus default, percentage points (beyond 1 logarithmic)")
        plain_numbers(ax.xaxis)
    ax.grid(False, axis="y")
    ax.tick_params(axis="y", length=0)
    return figure


def wide_signed(values: pd.Series) -> bool:
    """Whether a few values would press all others against 0."""
    sizes = values.abs()
    return bool(sizes.max() > 20 * max(float(sizes.median()), 0.1))


def draw_split(tidy: pd.DataFrame) -> Figure:
    """Samples by client and class as a heat map, with the clients' sizes beside it."""
    from matplotlib.colors import PowerNorm
    from matplotlib.ticker import MaxNLocator

    clients, classes = (
        tidy["client"].nunique(),
        tidy["class"].to_numpy()[: len(tidy) // tidy["client"].nunique()],
    )
    table = tidy["samples"].to_numpy().reshape(clients, len(classes))
    norm = PowerNorm(0.5, 0, max(int(table.max()), 1))
    height = min(max(0.27 * clients + 1.3, 2.4), 8.5)
    figure, (ax, bars) = blank(
        min(max(0.42 * len(classes) + 3.6, 5.5), 9), height, 1, 2, sharey=True, width_ratios=[3, 1]
    )
    image = ax.imshow(table, aspect="auto", cmap="Blues", norm=norm, interpolation="nearest")
    ax.grid(False)
    ax.set_title("samples by client and class")
    ax.set_ylabel("client")
    ax.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=min(clients, 20), min_n_ticks=1))
    if clients <= 25:
        ax.set_yticks(range(clients))
    name_classes(ax, [short(plain(str(c)), 14) for c in classes])
    drawn = bars.barh(np.arange(clients), table.sum(1), color="#4477aa", height=0.75)
    if clients <= 25 and len(classes) <= 12:
        write_counts(ax, table, norm(table) > 0.6)
        bars.bar_label(drawn, fontsize=6.5, padding=2, color="#333333")
        bars.margins(x=0.25)
    else:
        figure.colorbar(image, ax=ax, pad=0.02, fraction=0.05)
    bars.set_title("size")
    bars.tick_params(axis="y", length=0, labelleft=False)
    bars.grid(False, axis="y")
    bars.locator_params(axis="x", nbins=3)
    return figure


def name_classes(ax: Axes, names: Sequence[str]) -> None:
    """Class names below a heat map, or their numbers where there are too many."""
    if len(names) > 20:
        ax.set_xlabel("class id")
        return
    ax.set_xticks(range(len(names)), names)
    if max(map(len, names)) > 3:
        ax.tick_params(axis="x", rotation=45)
        for tick in ax.get_xticklabels():
            tick.set(horizontalalignment="right", rotation_mode="anchor")
    else:
        ax.set_xlabel("class")


def write_counts(ax: Axes, table: Any, dark: Any) -> None:
    """The counts in the cells of a heat map; none where there are no samples."""
    for (i, c), n in np.ndenumerate(table):
        if n:
            ax.text(
                c,
                i,
                str(n),
                ha="center",
                va="center",
                fontsize=6.5,
                color="white" if dark[i, c] else "#333333",
            )
