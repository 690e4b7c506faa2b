"""Errors that speak to the user."""

from __future__ import annotations

import difflib
import errno
import os
import traceback
from collections.abc import Iterable


class UserError(ValueError):
    """What a user can mend: one clear line, whatever is quoted in it."""

    def __str__(self) -> str:
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in super().__str__())


MACHINE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EMFILE,
           errno.ENFILE, errno.ENOMEM}  # fmt: skip
"""Errors of the system that are no fault of a program: full disks, rights, limits."""


def failure(e: BaseException) -> tuple[str, str]:
    """What ended some work -> (one line, traceback). None of what a user or the machine's owner can mend, unless it is asked
    for: wrong input, a full disk, no memory."""
    line = str(e) if isinstance(e, UserError) else f"{type(e).__name__}: {e}"
    machine = None if isinstance(e, UserError) else _machine(e)
    if machine is not None:
        line = f"{machine}; what was finished is kept, the same command resumes"
    mendable = isinstance(e, UserError) or machine is not None
    shown = not mendable or os.environ.get("PROTOFL_DEBUG") == "1"
    return line, "".join(traceback.format_exception(e)) if shown else ""


def _machine(e: BaseException | None) -> str | None:
    """The limit of the machine that an error, or what it was raised from, ran into."""
    while e is not None:
        if isinstance(e, OSError) and e.errno in MACHINE:
            return f"{e.strerror}: {e.filename}" if e.filename else str(e.strerror)
        if isinstance(e, MemoryError) or (isinstance(e, RuntimeError) and "allocate memory" in str(e)):
            return f"out of memory ({' '.join(str(e).split())[:200] or 'MemoryError'})"
        if type(e).__name__ == "OutOfMemoryError":  # torch's, of a GPU; torch need not be loaded here
            return f"out of memory on the GPU ({' '.join(str(e).split())[:200]})"
        e = e.__cause__ or (None if e.__suppress_context__ else e.__context__)
    return None


def nearest(name: str, known: Iterable[str]) -> str:
    """' (did you mean X?)' for a misspelt name, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""
