"""Decoded data sets on disk, so that images are decoded once and shared by all processes.

An entry is a folder of .npy files and a meta.json. It is written under a temporary name and renamed, so that
it is whole or not there; what cannot be read is made again. Nothing is pickled. Where the folder cannot be
written, everything works from memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import platformdirs

from protofl.data.images import Allocate

Array = npt.NDArray[Any]
FORMAT = 1
"""Part of every key; to be raised whenever decoding gives other numbers or an entry looks otherwise."""


@dataclass(frozen=True, eq=False)
class Content:
    """What a data set holds, wherever it came from."""

    x_train: Array
    y_train: Array
    x_test: Array
    y_test: Array
    classes: tuple[str, ...]
    scale: float
    note: str

    def fingerprint(self) -> str:
        """First 16 hex digits of a SHA-256 over images or numbers, labels, class names and scale."""
        digest = hashlib.sha256(json.dumps([list(self.classes), self.scale]).encode())
        for array in (self.x_train, self.y_train, self.x_test, self.y_test):
            digest.update(f"{array.dtype.str}{array.shape}".encode())
            for at in range(0, len(array), 4096):  # in pieces: the array may be a map of a file larger than memory
                digest.update(np.ascontiguousarray(array[at : at + 4096]).data)
        return digest.hexdigest()[:16]


def cache_dir() -> Path:
    """`PROTOFL_CACHE` if set, else the platform's cache folder for protofl."""
    own = os.environ.get("PROTOFL_CACHE")
    return Path(own).expanduser() if own else platformdirs.user_cache_path("protofl")


def stamp(files: Iterable[Path], *facts: str) -> str:
    """A key for what files hold and how they are read: names, sizes, times of change, and `facts`."""
    digest = hashlib.sha256(repr((FORMAT, facts)).encode())
    for file in files:
        about = file.stat()
        digest.update(os.fsencode(file) + f"\0{about.st_size} {about.st_mtime_ns} {about.st_ino}\n".encode())
    return digest.hexdigest()[:24]


def in_memory(name: str, shape: tuple[int, ...]) -> Array:
    """An `Allocate` that keeps to memory."""
    return np.empty(shape, dtype=np.uint8)


def cached(name: str, key: str, build: Callable[[Allocate], Content]) -> tuple[Content, str]:
    """The content under this key and its fingerprint: from disk, else built and if possible stored."""
    entry = cache_dir() / "decoded" / f"{name}-{key}"
    known = _load(entry)
    if known is not None:
        return known
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        _sweep(entry.parent)
        work = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=entry.parent))
    except (OSError, RuntimeError):
        content = build(in_memory)
        return content, content.fingerprint()
    try:
        content = build(_mapped_in(work))
        fingerprint = content.fingerprint()
        try:
            _store(work, content, fingerprint)
        except OSError:
            return content, fingerprint
        # where another process was first, its entry stays and is as good
        with contextlib.suppress(OSError):
            os.rename(work, entry)
        return _load(entry) or (content, fingerprint)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Remove what decodings that were killed a day or more ago have left."""
    for left in folder.glob(".*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > 86400:
                shutil.rmtree(left, ignore_errors=True)


def _mapped_in(work: Path) -> Allocate:
    """An `Allocate` that maps .npy files in `work`, or keeps to memory where the disk cannot take them."""

    def allocate(name: str, shape: tuple[int, ...]) -> Array:
        file = work / f"{name}.npy"
        try:
            array = np.lib.format.open_memmap(file, mode="w+", dtype=np.uint8, shape=shape)
            if hasattr(os, "posix_fallocate"):  # a full disk must show here, not as a signal while pixels are written
                with file.open("r+b") as out:
                    os.posix_fallocate(out.fileno(), 0, file.stat().st_size)
            return array
        except OSError:
            file.unlink(missing_ok=True)
            return in_memory(name, shape)

    return allocate


def _store(work: Path, content: Content, fingerprint: str) -> None:
    for part in ("x_train", "y_train", "x_test", "y_test"):
        array = getattr(content, part)
        file = work / f"{part}.npy"
        if isinstance(array, np.memmap) and file.exists():
            array.flush()
        else:
            np.save(file, array, allow_pickle=False)
    meta = {
        "classes": list(content.classes),
        "scale": content.scale,
        "note": content.note,
        "fingerprint": fingerprint,
        "rows": [len(content.y_train), len(content.y_test)],
    }
    (work / "meta.json").write_text(json.dumps(meta), encoding="utf-8")


def _load(entry: Path) -> tuple[Content, str] | None:
    """A stored entry, images mapped read-only; None (and the entry gone) if it is not whole."""
    try:
        meta = json.loads((entry / "meta.json").read_text(encoding="utf-8"))
        x_train, x_test = (np.load(entry / f"x_{part}.npy", mmap_mode="r") for part in ("train", "test"))
        y_train, y_test = (np.load(entry / f"y_{part}.npy") for part in ("train", "test"))
        if [len(x_train), len(x_test)] != meta["rows"] or [len(y_train), len(y_test)] != meta["rows"]:
            raise ValueError("rows are missing")
        classes = tuple(map(str, meta["classes"]))
        content = Content(x_train, y_train, x_test, y_test, classes, float(meta["scale"]), str(meta["note"]))
        return content, str(meta["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        if entry.exists():
            shutil.rmtree(entry, ignore_errors=True)
    return None
