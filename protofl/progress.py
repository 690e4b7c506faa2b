"""Live progress of a table: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

EVERY = 10.0
"""Seconds between the plain lines of a cell."""


class Display:
    """What happens to the cells of a table, for somebody who waits. `cells`: (label, rounds still to play)."""

    def __init__(self, console: Console, cells: Sequence[tuple[str, int]]) -> None:
        self.console, self.cells = console, cells
        self.total = sum(n for _, n in cells)
        self.played = [0] * len(cells)
        self.began = time.monotonic()
        self.told: dict[int, float] = {}
        self.bars = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.fields[said]}"),
            TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=console, disable=not console.is_terminal,
        )  # fmt: skip
        self.all = self.bars.add_task(f"[bold]{len(cells)} runs[/bold]", total=self.total, said="")
        self.bar: dict[int, Any] = {}

    def __enter__(self) -> Display:
        self.bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bars.stop()

    def show(self, cell: int, event: Mapping[str, Any]) -> None:
        """A cell started, played a round, or ended."""
        label, kind = self.cells[cell][0], event["kind"]
        if kind == "start":
            resumed = f", resumed after round {event['round']}" if event["round"] else ""
            self.line(f"{label}: started{resumed}")
            if cell in self.bar:  # it is played again after its node died
                self.bars.remove_task(self.bar.pop(cell))
            self.bar[cell] = self.bars.add_task(label, total=event["rounds"], completed=event["round"], said="")
            self.told[cell] = time.monotonic()
        elif kind == "round":
            self._round(cell, label, event)
        else:
            self.line(f"{label}: {event['said']}")
            if cell in self.bar:
                self.bars.remove_task(self.bar.pop(cell))
            self.bars.advance(self.all, self.cells[cell][1] - self.played[cell])
            self.played[cell] = self.cells[cell][1]

    def _round(self, cell: int, label: str, event: Mapping[str, Any]) -> None:
        self.played[cell] += 1
        value = event["gm"] if event["gm"] is not None else event["pm_v"]
        name = "GM" if event["gm"] is not None else "PM(V)"
        said = f"{name} {100 * value:.2f} %" if value is not None else ""
        self.bars.advance(self.all)
        self.bars.update(self.bar[cell], completed=event["round"], said=said)
        now = time.monotonic()
        if not self.console.is_terminal and now - self.told[cell] >= EVERY:
            self.told[cell] = now
            self.line(f"{label}: round {event['round']}/{event['rounds']} {said}, {self.left()} left in all")

    def left(self) -> str:
        """Time left, from the rounds played so far."""
        played = sum(self.played)
        seconds = (time.monotonic() - self.began) / max(played, 1) * (self.total - played)
        return duration(seconds)

    def line(self, text: str) -> None:
        """A plain line, above the bars where there are some."""
        if not self.console.is_terminal:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """Seconds in words: '45 s', '3 min 20 s', '2 h 5 min'."""
    s = round(seconds)
    if s < 60:
        return f"{s} s"
    if s < 3600:
        return f"{s // 60} min {s % 60} s"
    return f"{s // 3600} h {s % 3600 // 60} min"
