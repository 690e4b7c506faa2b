"""Reports: records in, Markdown, PNG and CSV out. Reads run folders and nothing else; never imports torch.

`read` finds and checks runs, `select` says which round is reported, `groups` puts comparable runs side by
side, `tables`, `frames` and `geometry` are functions from runs to tidy data, `figures` draws them in one
style, `describe` says what was run, `sections` and `pictures` fill the page, `page` writes the report.
"""

from __future__ import annotations

from .page import report
from .read import Run, runs

__all__ = ["Run", "report", "runs"]
