"""What the parts of one report share: the settings, the tidy data, and how a picture gets into the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from . import describe, figures, frames, geometry, tables
from .groups import Setting, settings
from .markdown import escape, image
from .read import Run

DATA = {
    "accuracy.csv": "means over seeds by metric and selection rule",
    "runs.csv": "the same by run",
    "cost.csv": "bytes, seconds, memory",
    "curves.csv": "accuracies and test loss by round",
    "terms.csv": "terms of the training loss by round",
    "split.csv": "samples by client and class",
    "prototypes.csv": "points of the prototype pictures",
    "settings.csv": "every setting and option",
}


@dataclass(eq=False)
class Report:
    """What is shared by the parts of one report."""

    runs: Sequence[Run]
    out: Path
    settings: list[Setting] = field(init=False)
    data: dict[str, pd.DataFrame] = field(init=False)
    notes: dict[int, list[str]] = field(init=False)

    def __post_init__(self) -> None:
        self.settings = settings(self.runs)
        points, self.notes = geometry.prototypes(self.runs)
        self.data = {
            "accuracy.csv": tables.accuracy(self.runs),
            "runs.csv": tables.per_run(self.runs),
            "cost.csv": tables.cost(self.runs),
            "curves.csv": frames.curves(self.runs),
            "terms.csv": frames.terms(self.runs),
            "split.csv": frames.split(self.runs),
            "prototypes.csv": points,
            "settings.csv": describe.every_setting(self.settings),
        }

    def of(self, name: str, setting: Setting) -> pd.DataFrame:
        """The rows of a setting."""
        data = self.data[name]
        return data[data["setting"] == setting.number]

    def picture(self, name: str, setting: Setting, alt: str, caption: str, draw: Callable[[Path], None]) -> str:
        """Draw a picture; a failure is a remark in the report and not its end."""
        file = f"{name}.png" if len(self.settings) == 1 else f"{name}-{setting.number}.png"
        try:
            with figures.one_style():
                draw(self.out / file)
        except Exception as error:
            return f"*Picture {file} left out: {escape(type(error).__name__)}: {escape(error)}*"
        return f"{image(alt, file)}\n\n{caption}"
