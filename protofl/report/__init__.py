"""Reports: records in; Markdown, a page, figures and tables out. Reads run folders and nothing else; never imports torch.

`read` finds and checks runs, `select` says which round is reported, `groups` puts comparable runs side by side.
`tables`, `frames`, `stats`, and on prototypes `geometry`, `features` and `measures`, are functions from runs to tidy
data; `figures` and `space` draw them in the one look of `style`. `summary`, `sections`, `comparison`, `sweeps`, `papers`,
`pictures`, `shapes` and `looks` are the parts of a report, made of `blocks` that `markdown`, `html` and `latex` write;
`describe` says what was run, `content` stores figures and tables, `page` puts all together.
"""

from __future__ import annotations

from .page import report
from .read import Run, runs

__all__ = ["Run", "report", "runs"]
