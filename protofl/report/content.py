"""What the parts of one report share: the settings, the tidy data, and how tables and figures are stored."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from . import describe, figures, latex, tables
from .blocks import Block, Figure, Table, Text
from .groups import Setting, settings
from .markdown import escape
from .read import Run

if TYPE_CHECKING:
    import matplotlib.figure

DATA = {
    "accuracy.csv": "means over seeds by metric and selection rule",
    "runs.csv": "the same by run",
    "cost.csv": "bytes, seconds, memory",
    "settings.csv": "every setting and option",
}


@dataclass(eq=False)
class Report:
    """What is shared by the parts of one report."""

    runs: Sequence[Run]
    out: Path
    baseline: str | None = None
    target: float | None = None
    formats: Sequence[str] = figures.VECTOR
    stored: Sequence[str] = tuple(DATA)
    """Which of the data are written: an ablation's settings and runs would be the largest part of it and are in its tables."""
    settings: list[Setting] = field(init=False)
    data: dict[str, pd.DataFrame] = field(init=False)

    def __post_init__(self) -> None:
        self.settings = settings(self.runs)
        self.data = {
            "accuracy.csv": tables.accuracy(self.settings),
            "runs.csv": tables.per_run(self.settings),
            "cost.csv": tables.cost(self.settings),
            "settings.csv": describe.every_setting(self.settings),
        }
        for name in self.stored:
            self._write(self.data[name], self.out / "data" / name)

    def of(self, name: str, setting: Setting) -> pd.DataFrame:
        """The rows of a setting."""
        data = self.data[name]
        return data[data["setting"] == setting.number]

    def name(self, name: str, setting: Setting | None) -> str:
        """The name of a table or figure, with the setting's number where there are several."""
        return name if setting is None or len(self.settings) == 1 else f"{name}-{setting.number}"

    def figure(
        self, name: str, runs: Sequence[Run], data: pd.DataFrame, alt: str, caption: str,
        draw: Callable[[pd.DataFrame], matplotlib.figure.Figure], setting: Setting | None = None,
    ) -> Block:  # fmt: skip
        """Draw a figure and store it with its data; a failure is a remark in the report and not its end."""
        name = self.name(name, setting)
        try:
            with figures.one_style():
                figures.save(draw(data), *(self.out / "figures" / f"{name}.{kind}" for kind in ("png", *self.formats)))
        except Exception as error:
            return Text(f"*Figure {escape(name)} left out: {escape(type(error).__name__)}: {escape(error)}*")
        self._write(data, self.out / "figures" / f"{name}.csv")
        return Figure(name, alt, caption, [run.digest for run in runs], self.formats)

    def table(self, table: Table) -> Table:
        """Store a table as CSV and LaTeX."""
        folder = self.out / "tables"
        folder.mkdir(exist_ok=True)
        with open(folder / f"{table.name}.csv", "w", encoding="utf-8", newline="") as file:
            lines = csv.writer(file, lineterminator="\n")
            lines.writerow(table.heads)
            lines.writerows([c.text for c in row] for row in table.rows)
        (folder / f"{table.name}.tex").write_text(latex.write(table), "utf-8", newline="\n")
        return table

    def _write(self, data: pd.DataFrame, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        data.to_csv(path, index=False, lineterminator="\n")
