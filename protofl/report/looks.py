"""Where models look: Grad-CAM heat maps over test images, methods side by side (FedCSPC figure 9)."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .blocks import Block, Heading, Text
from .content import Report
from .figures import blank, plain, short
from .frames import class_name
from .groups import Setting
from .markdown import escape
from .read import Array, Run
from .tables import frame

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = ["setting", "label", "seed", "round", "image", "class", "predicted", "row", "column", "value"]
MOST = 8
"""Images in a figure."""

Looks = dict[str, Array]


def read(run: Run) -> Looks | None:
    """The arrays of a run's gradcam.npz; None where there is none, or it is damaged."""
    try:
        with np.load(run.path / "gradcam.npz", allow_pickle=False) as arrays:
            made = {name: arrays[name] for name in ("index", "labels", "predicted", "images", "maps", "round")}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None
    n = len(made["index"])
    whole = made["images"].ndim == 4 and made["maps"].ndim == 3 and np.isfinite(made["maps"]).all()
    return made if whole and all(len(made[k]) == n for k in ("labels", "predicted", "images", "maps")) else None


def gradcam(made: Report, s: Setting) -> list[Block]:
    """The first seed of every method whose maps are of the same images as the first one's."""
    found = [(e.label, run, looks) for e in s.entries for run in e.used[:1] if (looks := read(run)) is not None]
    if not found:
        return []
    images = found[0][2]["index"]
    shown = [one for one in found if np.array_equal(one[2]["index"], images)]
    others = [escape(label) for label, _, looks in found if not np.array_equal(looks["index"], images)]
    caption = (
        "Grad-CAM for the true class at the last convolution, over the test images; bright: raises its score most, each "
        "map by its own scale. Above an image: what the method says of it."
    )
    alt = f"Grad-CAM heat maps of {len(images)} test images by {', '.join(label for label, *_ in shown)}"
    tidy = frame((row for one in shown for row in _rows(s, *one)), COLUMNS)
    drawn = made.figure("gradcam", [run for _, run, _ in shown], tidy, alt, caption, lambda _: draw(shown), s)
    rest = [Text(f"*Other images, left out: {', '.join(others)}.*")] if others else []
    return [Heading("Where the models look", 3), drawn, *rest]


def _rows(s: Setting, label: str, run: Run, looks: Looks) -> list[dict[str, object]]:
    return [
        {
            "setting": s.number,
            "label": label,
            "seed": run.seed,
            "round": int(looks["round"]),
            "image": int(i),
            "class": class_name(run, int(looks["labels"][k])),
            "predicted": class_name(run, int(looks["predicted"][k])),
            "row": y,
            "column": x,
            "value": float(v),
        }
        for k, i in enumerate(looks["index"][:MOST])
        for (y, x), v in np.ndenumerate(looks["maps"][k])
    ]


def draw(shown: Sequence[tuple[str, Run, Looks]]) -> Figure:
    """Images down, methods across; the first column has the images alone."""
    n = min(MOST, len(shown[0][2]["index"]))
    figure, axes = blank(1.5 * (len(shown) + 1) + 0.3, 1.75 * n + 0.3, n, len(shown) + 1)
    for at, ax in enumerate(axes):
        k, column = divmod(at, len(shown) + 1)
        label, run, looks = shown[max(column - 1, 0)]
        image = looks["images"][k]
        side = (-0.5, image.shape[1] - 0.5, image.shape[0] - 0.5, -0.5)
        grey = image.shape[2] == 1
        ax.imshow(image[:, :, 0] if grey else image, cmap="gray" if grey else None, vmin=0, vmax=1, extent=side)
        said = class_name(run, int(looks["labels" if column == 0 else "predicted"][k]))
        if column:
            top = looks["maps"][k].max()
            heat = looks["maps"][k] / top if top > 0 else looks["maps"][k]
            ax.imshow(
                heat, cmap="inferno", vmin=0, vmax=1, alpha=0.3 + 0.4 * heat, extent=side, interpolation="bilinear"
            )
            right = looks["predicted"][k] == looks["labels"][k]
        ax.set_title(
            (f"{short(plain(label), 18)}\n" if k == 0 and column else "image\n" if k == 0 else "")
            + short(plain(said), 18),
            fontsize=8, loc="center", color="#333333" if not column or right else "#b2182b",
        )  # fmt: skip
        ax.set_axis_off()
    return figure
