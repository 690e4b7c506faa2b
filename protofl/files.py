"""Plain files of the results store, and its locks. Needs no torch: some processes do nothing else."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from .errors import UserError


def write_bytes(path: Path, content: bytes) -> None:
    """Write to a temporary name, then rename: a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with naming(path), os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An error of writing says which file: the system names those that cannot be opened only."""
    try:
        yield
    except OSError as e:
        raise OSError(e.errno, e.strerror, str(path)) from e


def write_json(path: Path, document: Any) -> None:
    """Strict JSON, readable."""
    write_bytes(path, (json.dumps(document, indent=1, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """What `write_json` wrote; None if it is missing or damaged."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None


def hold(folder: Path, lock: FileLock) -> None:
    """Create the folder of a run and take its lock."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(f"another process is at work on {folder}: wait for it, or use another --results") from None


def lock(folder: Path) -> FileLock:
    """The lock of a run's folder, not taken yet."""
    return FileLock(str(folder / "lock"), timeout=0)
