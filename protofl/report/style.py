"""One look for all figures: colours told apart by colour-blind readers, the same for a method everywhere."""

from __future__ import annotations

import zlib
from typing import Any

COLOURS = {
    "fedavg": "#333333",
    "fedprox": "#8c8c8c",
    "scaffold": "#56b4e9",
    "moon": "#e69f00",
    "fedproc": "#d55e00",
    "fednh": "#0072b2",
    "fedcspc": "#009e73",
    "fedproto": "#cc79a7",
    "creff": "#b8a000",
    "fedntd": "#882255",
    "feddecorr": "#999933",
    "fedper": "#44aa99",
    "fedrep": "#117733",
    "fedbabu": "#332288",
    "fedrod": "#aa4499",
    "ditto": "#7f4a1e",
    "ccvr": "#6699cc",
    "solo": "#b5b5b5",
}
"""Okabe and Ito's colours for the methods most often compared, Tol's for the others."""

OTHERS = ("#a6761d", "#6a3d9a", "#1b7837", "#c51b7d", "#2166ac", "#b2182b", "#35978f", "#8c510a")
"""For methods that are not in the table, by a hash of the name."""

DASHES: tuple[Any, ...] = (
    "-",
    (0, (5, 2)),
    (0, (1, 1.4)),
    (0, (5, 2, 1, 2)),
    (0, (9, 3)),
    (0, (4, 1.5, 1, 1.5, 1, 1.5)),
)
"""Line styles by set of options of the same method."""

CLASSES = (
    "#4477aa",
    "#ee6677",
    "#228833",
    "#ccbb44",
    "#66ccee",
    "#aa3377",
    "#888888",
    "#e69f00",
    "#222255",
    "#99552b",
    "#117733",
    "#dd99bb",
    "#44aa99",
    "#882255",
    "#bbcc33",
    "#0072b2",
    "#ddaa33",
    "#661100",
    "#77aadd",
    "#000000",
)
"""For up to 20 classes; more are shown on a continuous scale."""

STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.edgecolor": "#666666",
    "lines.linewidth": 1.6,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "savefig.dpi": 150,
    "figure.dpi": 150,
    "legend.frameon": False,
    "text.parse_math": False,
    "svg.hashsalt": "protofl",
    "pdf.fonttype": 42,
}


def colour(method: str) -> str:
    """The colour of a method."""
    return COLOURS.get(method) or OTHERS[zlib.crc32(method.encode()) % len(OTHERS)]


def dash(variant: int) -> Any:
    """The line style of a set of options."""
    return DASHES[variant % len(DASHES)]


def spread(wanted: list[float], gap: float, low: float, high: float) -> list[float]:
    """The places nearest to the wanted ones (least squares), `gap` apart or more, within [low, high]."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    blocks: list[list[float]] = []
    for k, i in enumerate(order):
        blocks.append([wanted[i] - k * gap])
        while len(blocks) > 1 and _mean(blocks[-2]) >= _mean(blocks[-1]):
            lower = blocks.pop()
            blocks[-1] += lower
    flat = [_mean(block) for block in blocks for _ in block]
    top = max(low, high - (len(wanted) - 1) * gap)
    placed = [0.0] * len(wanted)
    for k, i in enumerate(order):
        placed[i] = min(max(flat[k], low), top) + k * gap
    return placed


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
