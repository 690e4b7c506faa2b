"""A table as LaTeX, to be pasted into a paper; needs the package booktabs."""

from __future__ import annotations

import re

from .blocks import Cell, Table
from .markdown import one_line

_SPECIAL = str.maketrans(
    {c: "\\" + c for c in "&%$#_{}"}
    | {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "±": r"$\pm$",
        "×": r"$\times$",
    }
    | {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': r"\char34{}", "≥": r"$\geq$"}
    | {c: f"{{{c}}}" for c in "[]*"}
)
"""A bracket or a star at the start of a row would belong to the command that ends the row above, hence the braces."""


def escape(text: str) -> str:
    """A text that LaTeX shows as it is."""
    return one_line(text).translate(_SPECIAL)


LONG = 50
"""Characters beyond which a cell is broken into lines."""


def _columns(table: Table) -> str:
    """How the columns are aligned; those with long cells share half of the page's width."""
    long = [any(len(row[i].text) > LONG for row in table.rows) for i in range(len(table.heads))]
    wide = rf"p{{{0.5 / max(sum(long), 1):.2f}\linewidth}}"
    return "".join(wide if long[i] else "l" if table.aligned_left(i) else "r" for i in range(len(table.heads)))


def write(table: Table) -> str:
    """The table with its caption; what its notes say stands above it as comments."""
    rows = [" & ".join(map(escape, table.heads)), *(" & ".join(map(_cell, row)) for row in table.rows)]
    notes = [f"% {one_line(line)}" for line in re.split(r"(?<=[.;]) ", table.notes) if line.strip()]
    return "\n".join(
        [
            r"% needs \usepackage{booktabs}",
            *notes,
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{escape(table.title)}}}",
            rf"\label{{tab:{table.name}}}",
            rf"\begin{{tabular}}{{{_columns(table)}}}",
            r"\toprule",
            rows[0] + r" \\",
            r"\midrule",
            *(row + r" \\" for row in rows[1:]),
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def _cell(cell: Cell) -> str:
    text = escape(cell.text)
    return rf"\textbf{{{text}}}" if cell.bold else text
