"""What a report is made of, whatever it is written as: headings, texts, tables, figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Heading:
    """A heading; level 1 is the title."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    """A paragraph or a list, in Markdown."""

    markdown: str


@dataclass(frozen=True)
class Code:
    """A command line."""

    text: str


@dataclass(frozen=True)
class Cell:
    """A cell: its text, not escaped; what it is sorted by, if not by its text; where it leads, if anywhere."""

    text: str
    order: float | None = None
    bold: bool = False
    link: str = ""


WORDS = {"status", "remark", "options", "paper", "table", "settings that differ", "not stated", "why", "acts with"}
"""Columns that hold words wherever they stand."""


@dataclass(frozen=True)
class Table:
    """A table. name: of its files; left: how many columns, from the first, hold words; notes: Markdown."""

    name: str
    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    notes: str = ""
    left: int = 1

    def aligned_left(self, i: int) -> bool:
        """Whether a column holds words."""
        return i < self.left or self.heads[i] in WORDS


@dataclass(frozen=True)
class Figure:
    """A figure. name: of its files; alt: what it shows, for who does not see it; caption: Markdown."""

    name: str
    alt: str
    caption: str
    digests: Sequence[str] = field(default=())
    """The runs behind it."""
    formats: Sequence[str] = ("svg", "pdf")
    """What it is written as, besides PNG."""


Block = Heading | Text | Code | Table | Figure


def cells(texts: Sequence[str]) -> list[Cell]:
    """Plain cells."""
    return [Cell(text) for text in texts]
