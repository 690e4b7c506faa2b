"""Blocks as Markdown, and text for it: names that may contain anything."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .blocks import Block, Cell, Code, Figure, Heading, Table, Text

_SPECIAL = str.maketrans({c: "\\" + c for c in "\\|`*_[]$~#!"} | {"&": "&amp;", "<": "&lt;", ">": "&gt;"})


def one_line(text: str) -> str:
    """A text without line breaks and control characters."""
    return re.sub(r"[\s\x00-\x1f\x7f-\x9f\u2028\u2029]+", " ", text).strip()


def escape(text: object) -> str:
    """A text that Markdown shows as it is, in a line, a cell of a table or the text of a link."""
    return one_line(str(text)).translate(_SPECIAL)


def write(blocks: Sequence[Block]) -> str:
    """The document."""
    return "\n\n".join(map(_block, blocks)) + "\n"


def _block(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {escape(text)}"
        case Text(markdown):
            return markdown
        case Code(text):
            return "    " + one_line(text)
        case Table():
            return _table(block)
        case Figure(name, alt, caption, _, formats):
            others = ", ".join(f"[{kind}](figures/{name}.{kind})" for kind in (*formats, "csv"))
            return f"![{escape(alt)}](figures/{name}.png)\n\n{caption} ({others})"


def _table(table: Table) -> str:
    rules = [":---" if table.aligned_left(i) else "---:" for i in range(len(table.heads))]
    lines = [[escape(h) for h in table.heads], rules, *([_cell(c) for c in row] for row in table.rows)]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    also = ", ".join(f"[{kind}](tables/{table.name}.{kind})" for kind in ("csv", "tex"))
    return "\n\n".join([f"### {escape(table.title)}", text, f"{table.notes} ({also})".strip()])


def _cell(cell: Cell) -> str:
    text = escape(cell.text)
    text = f"[{text}]({cell.link})" if cell.link else text
    return f"**{text}**" if cell.bold else text
