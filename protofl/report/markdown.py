"""Text for Markdown: names that may contain anything, and tables."""

from __future__ import annotations

import re
from collections.abc import Sequence

_SPECIAL = str.maketrans({c: "\\" + c for c in "\\|`*_[]$~#!"} | {"&": "&amp;", "<": "&lt;", ">": "&gt;"})


def one_line(text: str) -> str:
    """A text without line breaks and control characters."""
    return re.sub(r"[\s\x00-\x1f\x7f-\x9f\u2028\u2029]+", " ", text).strip()


def escape(text: object) -> str:
    """A text that Markdown shows as it is, in a line, a cell of a table or the text of a link."""
    return one_line(str(text)).translate(_SPECIAL)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A table of escaped cells; the first `left` columns and one named `status` are aligned left."""
    rules = [":---" if i < left or h == "status" else "---:" for i, h in enumerate(heads)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (heads, rules, *rows))


def block(text: str) -> str:
    """A line of code, shown as it is whatever it contains."""
    return "    " + one_line(text)


def image(alt: str, file: str) -> str:
    """A picture with its text."""
    return f"![{escape(alt)}]({file})"
