"""What the C library does with freed memory, where it is glibc: it moves no number, only time and memory."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3
"""malloc.h."""


def keep() -> None:
    """Do not hand freed memory back to the system after every step, only to fetch it anew, page by page, in the next.

    Blocks of more than 32 MB always go back: glibc takes no higher bound.
    """
    setting = _glibc("mallopt")
    if setting is not None:
        for which, size in ((MMAP_THRESHOLD, 2**25), (TRIM_THRESHOLD, 2**31 - 1), (TOP_PAD, 2**26)):
            setting(which, size)


def trim() -> None:
    """Hand freed memory back: a gigabyte when 500 models were read in turn."""
    trimmed = _glibc("malloc_trim")
    if trimmed is not None:
        trimmed(0)


def _glibc(name: str) -> Any:
    """A function of the C library, or None where it has no such."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
