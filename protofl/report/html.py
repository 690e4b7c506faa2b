"""Blocks as one self-contained HTML file: no network, no framework; every name is escaped by the template."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from .blocks import Block, Code, Figure, Heading, Table, Text
from .tables import MISSING

LARGEST = 150_000
"""Bytes of an SVG beyond which the figure is a PNG."""

LONGEST = 30
"""Rows of a table beyond which it scrolls in a box of its own; a list of runs is folded too."""


def write(blocks: Sequence[Block], out: Path, command: str | None) -> str:
    """The page. out: where the figures lie; command: what makes the report again."""
    from jinja2 import Environment, PackageLoader
    from markdown_it import MarkdownIt
    from markupsafe import Markup

    def paragraphs(text: str) -> Markup:
        return Markup(MarkdownIt("commonmark", {"html": False}).render(text))

    env = Environment(loader=PackageLoader("protofl.report"), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    env.filters |= {
        "markdown": paragraphs,
        "kind": _kind,
        "sha256": _sha256,
        "source": lambda figure: _source(figure, out),
    }
    headings = [block for block in blocks if isinstance(block, Heading)]
    anchors = dict(zip(map(id, headings), _anchors(headings))) | _run_anchors(blocks)
    env.tests["named"] = lambda part: id(part) in anchors
    return env.get_template("page.html").render(
        title=headings[0].text if headings else "protofl", blocks=blocks, command=command,
        anchor=lambda block: anchors[id(block)], contents=[h for h in headings if h.level == 2],
        longest=LONGEST,
    )  # fmt: skip


def _kind(block: Block) -> str:
    return {Heading: "heading", Text: "text", Code: "code", Table: "table", Figure: "figure"}[type(block)]


def _anchors(headings: Sequence[Heading]) -> Iterator[str]:
    """A name for every heading: words cannot be relied on, they may be of any script."""
    return (f"part-{i}" for i, _ in enumerate(headings))


def _run_anchors(blocks: Sequence[Block]) -> dict[int, str]:
    """A name for the first row of every run in the list of runs: copies of a folder share a digest."""
    rows = [row for block in blocks if isinstance(block, Table) and block.name == "runs" for row in block.rows]
    first = {row[1].text: row for row in reversed(rows) if row[1].text != MISSING}
    return {id(row): f"run-{digest}" for digest, row in first.items()}


def _sha256(text: str) -> str:
    """The hash by which the page's own script, and no other, is let run."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _source(figure: Figure, out: Path) -> str:
    """The picture itself: as SVG, or as PNG where that is too large."""
    svg, png = (out / "figures" / f"{figure.name}.{kind}" for kind in ("svg", "png"))
    small = "svg" in figure.formats and svg.stat().st_size <= LARGEST
    drawn, kind = (svg, "svg+xml") if small else (png, "png")
    return f"data:image/{kind};base64,{base64.b64encode(drawn.read_bytes()).decode()}"
