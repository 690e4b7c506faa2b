"""Errors that speak to the user."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """What a user can mend: one clear line."""


def nearest(name: str, known: Iterable[str]) -> str:
    """' (did you mean X?)' for a misspelt name, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""
