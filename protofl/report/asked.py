"""What a report is about: runs, and what was asked for where a table was recorded. Archives: a table in one small file.

An archive holds a recorded table with the rows of its runs, without weights, prototypes and features: enough to make
tables and curves again, small enough to be kept beside a paper.
"""

from __future__ import annotations

import io
import json
import lzma
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import UserError
from . import read
from .read import Run

FILES = ("protocol.json", "env.json", "rounds.jsonl", "summary.json", "done")
"""What an archive keeps of a run."""

TABLE = "table.json"

LARGEST = 64 * 2**20
"""Bytes that a file of an archive may have."""

KINDS: Mapping[str, Any] = {
    "title": str, "command": str, "notes": list, "runs": list, "ablation": (dict, type(None))
}  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """Runs, and what a recorded table says: its title, the command that ran it, notes, and the rows of an ablation."""

    runs: Sequence[Run]
    title: str = "protofl report"
    command: str = ""
    notes: Sequence[str] = ()
    ablation: Mapping[str, Any] | None = None
    folders: Sequence[str] = field(default=())
    """Of the runs, as they are recorded, in the order of `runs`."""


def find(paths: Sequence[Path]) -> Asked:
    """What is asked for by paths: one recorded table (`results/tables/NAME.json`), one archive (.tar.xz), or folders."""
    apart = [path for path in paths if path.suffix in (".json", ".xz")]
    if apart and len(paths) > 1:
        raise UserError(f"{apart[0]} is a table of its own: report it without other folders")
    if not apart:
        return Asked(read.runs(paths))
    return _archive(apart[0]) if apart[0].suffix == ".xz" else _table(apart[0])


def _table(path: Path) -> Asked:
    """A recorded table; its runs lie below the folder above."""
    try:
        document = _checked(json.loads(path.read_text("utf-8")), path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise UserError(f"{path} is not a recorded table: it is not whole JSON") from None
    results = path.parent.parent
    return _asked([read.read(results / folder) for folder in document["runs"]], document)


def _archive(path: Path) -> Asked:
    """A table that was packed. Nothing but the files of its runs is unpacked, into a folder that is gone afterwards."""
    try:
        with tarfile.open(path, "r:xz") as packed, tempfile.TemporaryDirectory() as place:
            document = _checked(json.loads(_content(packed, TABLE)), path)
            wanted = {f"{folder}/{name}" for folder in document["runs"] for name in FILES}
            for entry in packed:
                if entry.isfile() and entry.name in wanted:
                    file = Path(place) / entry.name
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_bytes(_content(packed, entry))
            made = [read.read(Path(place) / folder, path / folder) for folder in document["runs"]]
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    except (tarfile.TarError, lzma.LZMAError, EOFError, KeyError, ValueError):
        raise UserError(f"{path} is not an archive of protofl, or it is damaged") from None
    return _asked(made, document)


def _content(packed: tarfile.TarFile, entry: tarfile.TarInfo | str) -> bytes:
    """The content of a file of an archive."""
    file = packed.extractfile(entry)
    if file is None:
        raise ValueError("no file")
    content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise ValueError("larger than any file of a run")
    return content


def _asked(runs: Sequence[Run], document: Mapping[str, Any]) -> Asked:
    if not runs:
        raise UserError(f"the table {document['title']!r} has no runs")
    return Asked(
        runs, document["title"], document["command"], document["notes"], document["ablation"], document["runs"]
    )


def _checked(document: Any, path: Path) -> Mapping[str, Any]:
    """The document of a table, or a UserError."""
    good = isinstance(document, dict) and all(isinstance(document.get(k), kind) for k, kind in KINDS.items())
    if not good or not all(_inside(folder) for folder in document["runs"]):
        raise UserError(f"{path} is not a recorded table")
    return document  # type: ignore[no-any-return]


def _inside(folder: Any) -> bool:
    """Whether a folder is named as one below the results."""
    return (
        isinstance(folder, str) and not PurePosixPath(folder).is_absolute() and ".." not in PurePosixPath(folder).parts
    )


def pack(asked: Asked, path: Path) -> None:
    """Write an archive of a recorded table. Where data lay on this machine is left out."""
    document = {"title": asked.title, "command": asked.command, "notes": list(asked.notes), "runs": list(asked.folders),
                "ablation": asked.ablation}  # fmt: skip
    if path.suffixes[-2:] != [".tar", ".xz"]:
        raise UserError(f"--archive {str(path)!r}: an archive is named NAME.tar.xz")
    if not asked.folders:
        raise UserError("--archive packs a recorded table: report one of results/tables/NAME.json")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(path, "w:xz") as packed:
            _put(packed, TABLE, json.dumps(document, indent=1).encode())
            for name in FILES:  # files of a kind beside each other: they are much alike
                for folder, run in zip(asked.folders, asked.runs):
                    if (run.path / name).is_file():
                        _put(packed, f"{folder}/{name}", _told((run.path / name).read_bytes(), name))
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from None


def _told(content: bytes, name: str) -> bytes:
    """A file as it may be shown to others."""
    if name != "protocol.json":
        return content
    document = json.loads(content)
    for part, key in (("data", "source"), ("data", "asked"), ("method", "path")):
        if isinstance(value := document.get(part, {}).get(key), str):
            document[part][key] = Path(value).name
    return json.dumps(document, indent=1).encode()


def _put(packed: tarfile.TarFile, name: str, content: bytes) -> None:
    """Add a file, of no time and nobody, so that the same records give the same bytes."""
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    packed.addfile(entry, io.BytesIO(content))
