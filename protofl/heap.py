"""What becomes of freed memory, and of fresh: it moves no number, only time and memory."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch

TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3
"""malloc.h."""


def keep() -> None:
    """Do not hand freed memory back after every step, only to fetch it anew, page by page, in the next.

    Where the C library is glibc. Blocks of more than 32 MB always go back: it takes no higher bound.
    """
    setting = _glibc("mallopt")
    if setting is not None:
        for which, size in ((MMAP_THRESHOLD, 2**25), (TRIM_THRESHOLD, 2**31 - 1), (TOP_PAD, 2**26)):
            setting(which, size)


def leave_unfilled() -> None:
    """Deterministic PyTorch writes NaN into all memory that is about to be written: a twentieth of the time of a step."""
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def trim() -> None:
    """Hand freed memory back, where the C library is glibc: a gigabyte when 500 models were read in turn."""
    trimmed = _glibc("malloc_trim")
    if trimmed is not None:
        trimmed(0)


def _glibc(name: str) -> Any:
    """A function of the C library, or None where it has no such."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
