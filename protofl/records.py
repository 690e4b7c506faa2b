"""The results store: one folder per run, rows appended as rounds end, state that survives a kill.

results/<group>/<digest>/
  protocol.json   what was run: protocol, method, data, split, network
  env.json        versions and machine
  rounds.jsonl    one row per round, flushed
  summary.json    status and how far
  prototypes/     round-NNNNN.npz of chosen rounds
  features/       round-NNNNN.npz of the same rounds (features.py)
  state/          round-NNNNN-<sum>.safetensors, the last two; clients/ has the memories of idle clients
  done            exists when the run is finished

A row is written before its state; on resume, rows at or after the state's round are dropped and played again, so that
every round stands there once. File names carry the first 16 hex digits of the content's SHA-256: a half-written or
damaged state is noticed and the one before it is used. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from . import heap
from .files import hold, lock, naming, read_json, write_bytes, write_json
from .tree import Rows, Tree, nbytes, placed

STATE = re.compile(r"round-(\d{5,})-([0-9a-f]{16})\.safetensors")
CLIENT = re.compile(r"c\d{5,}-r\d{5,}-[0-9a-f]{16}\.safetensors")
CACHE = 64 * 2**20
"""Bytes of client memories that stay in RAM beside the files."""
TRIM = 10
"""Rounds after which freed memory is handed back: a long run must not grow by what lies between blocks in use."""


# ---- trees as safetensors -------------------------------------------------------------------------------------------


def flatten(tree: Any, head: str = "") -> dict[str, Tensor]:
    """A tree -> tensors by path; `Rows` are two tensors, an empty tree is a mark."""
    if isinstance(tree, Tensor):
        return {head: tree}
    if isinstance(tree, Rows):
        return {f"{head}::values": tree.values, f"{head}::has": tree.has}
    if not isinstance(tree, dict):
        raise TypeError(f"{head}: a tree holds tensors, Rows and trees, not {type(tree).__name__}")
    if not tree:
        return {f"{head}::empty": torch.zeros(0)}
    return {k: v for name, one in tree.items() for k, v in flatten(one, f"{head}/{name}").items()}


def unflatten(tensors: Mapping[str, Tensor]) -> Tree:
    """The inverse of `flatten`."""
    out = Tree()
    for path, v in tensors.items():
        place, _, mark = path.partition("::")
        *above, name = place.split("/")[1:] or [""]
        at = out
        for step in above:
            at = at.setdefault(step, Tree())
        if mark == "empty":
            if name:
                at[name] = Tree()
        elif mark == "values":
            at[name] = Rows(v, tensors[f"{place}::has"])
        elif not mark:
            at[name] = v
    return out


def pack(tree: Tree, notes: Mapping[str, Any]) -> bytes:
    """A tree and its notes as one file; the order of entries is kept."""
    flat = flatten(tree)
    told = json.dumps({"order": list(flat), "notes": notes})  # one entry: safetensors shuffles several
    apart = {k: v.detach().cpu().contiguous().clone() for k, v in flat.items()}
    return save_tensors(apart, {"protofl": told})


def unpack(content: bytes) -> tuple[Tree, dict[str, Any]]:
    """The inverse of `pack`."""
    length = int.from_bytes(content[:8], "little")
    told = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["protofl"])
    flat = load_tensors(content)
    return unflatten({k: flat[k] for k in told["order"]}), told["notes"]


def checksum(content: bytes) -> str:
    """First 16 hex digits of SHA-256."""
    return hashlib.sha256(content).hexdigest()[:16]


def read_checked(path: Path) -> bytes | None:
    """A file whose name ends in its checksum; None if it is missing or damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    return content if checksum(content) == path.stem.rsplit("-", 1)[-1] else None


# ---- clients' memories ----------------------------------------------------------------------------------------------


@dataclass
class StoredMemory:
    """Memories of idle clients, one file each (see `federation.Memory`), which are read onto a device."""

    folder: Path
    files: dict[int, str] = field(default_factory=dict)
    round: int = 0
    device: torch.device | str = "cpu"
    cache: dict[int, Tree] = field(default_factory=dict)
    cached: int = 0

    def get(self, client: int) -> Tree | None:
        if client not in self.files:
            return None
        if client not in self.cache:
            content = read_checked(self.folder / self.files[client])
            if content is None:
                raise RuntimeError(f"the memory of client {client} in {self.folder} vanished or is damaged")
            self._remember(client, placed(unpack(content)[0], self.device))
        return self.cache[client]

    def put(self, client: int, memory: Tree) -> None:
        content = pack(memory, {})
        name = f"c{client:05d}-r{self.round + 1:05d}-{checksum(content)}.safetensors"
        write_bytes(self.folder / name, content)
        self.files[client] = name
        self._remember(client, memory)

    def _remember(self, client: int, memory: Tree) -> None:
        size = nbytes(memory)
        if self.cached + size > CACHE:
            self.cache.clear()
            self.cached = 0
            heap.trim()
        self.cache[client] = memory
        self.cached += size


# ---- a run's folder -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """Everything that later rounds hang on, after `round` rounds."""

    round: int
    shared: Tree
    private: Tree
    met: list[int]
    clients: dict[int, str]


class RunFolder:
    """One run on disk. `open` takes the lock; a second process on the same run is refused."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.used: dict[str, set[str]] = {}  # client files by the state that needs them
        self.lock = lock(path)

    @property
    def done(self) -> bool:
        """Whether the run is finished."""
        return (self.path / "done").exists()

    def open(self, document: Mapping[str, Any]) -> None:
        """Create the folder and take its lock."""
        hold(self.path, self.lock)
        if read_json(self.path / "protocol.json") != document:
            write_json(self.path / "protocol.json", document)
        write_json(self.path / "env.json", environment())

    def close(self) -> None:
        """Give the lock back."""
        self.lock.release()

    # -- rows --------------------------------------------------------------------------------------------------------

    def rows(self) -> list[dict[str, Any]]:
        """All whole rows."""
        return read_rows(self.path / "rounds.jsonl")

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row, flushed to the system."""
        path = self.path / "rounds.jsonl"
        with naming(path), open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")

    def keep_rows_before(self, t: int) -> None:
        """Drop the rows of rounds that will be played again."""
        kept = [r for r in self.rows() if r["round"] < t]
        text = "".join(json.dumps(r, allow_nan=False) + "\n" for r in kept)
        write_bytes(self.path / "rounds.jsonl", text.encode())

    def summarise(self, **summary: Any) -> None:
        """Status and how far."""
        write_json(self.path / "summary.json", summary)

    def finish(self) -> None:
        """Mark the run as finished."""
        write_bytes(self.path / "done", b"")

    def save_arrays(self, kind: str, t: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Arrays of round t in the folder `kind`, as npz without pickles."""
        content = io.BytesIO()
        np.savez(content, **dict(arrays))  # type: ignore[arg-type]
        write_bytes(self.path / kind / f"round-{t:05d}.npz", content.getvalue())

    # -- state -------------------------------------------------------------------------------------------------------

    def memory(
        self, files: Mapping[int, str] | None = None, round: int = 0, device: torch.device | str = "cpu"
    ) -> StoredMemory:
        """The clients' memories as of a state."""
        return StoredMemory(self.path / "state" / "clients", dict(files or {}), round, device)

    def save_state(self, state: State) -> None:
        """Write the state after a round, then drop all but the last two."""
        notes = {
            "round": state.round,
            "met": state.met,
            "clients": {str(k): v for k, v in state.clients.items()},
        }
        content = pack(Tree(shared=state.shared, private=state.private), notes)
        name = f"round-{state.round:05d}-{checksum(content)}.safetensors"
        write_bytes(self.path / "state" / name, content)
        self.used[name] = set(state.clients.values())
        self._tidy()
        if state.round % TRIM == 0:
            heap.trim()

    def _names(self) -> list[str]:
        """State files, newest first."""
        folder = self.path / "state"
        found = [p.name for p in folder.iterdir() if STATE.fullmatch(p.name)] if folder.is_dir() else []
        return sorted(found, key=lambda n: int(STATE.fullmatch(n)[1]), reverse=True)  # type: ignore[index]

    def _tidy(self) -> None:
        names = self._names()
        for name in names[2:]:
            (self.path / "state" / name).unlink(missing_ok=True)
        self.used = {name: self.used[name] for name in names[:2] if name in self.used}
        used = set().union(*self.used.values())
        folder = self.path / "state" / "clients"
        if folder.is_dir():
            for p in folder.iterdir():
                if CLIENT.fullmatch(p.name) and p.name not in used:
                    p.unlink(missing_ok=True)

    def states(self) -> list[State]:
        """Whole states, newest first; damaged ones are passed over."""
        return [s for s in map(self._read_state, self._names()) if s is not None]

    def _read_state(self, name: str) -> State | None:
        content = read_checked(self.path / "state" / name)
        if content is None:
            return None
        tree, notes = unpack(content)
        clients = {int(k): v for k, v in notes["clients"].items()}
        folder = self.path / "state" / "clients"
        if any(read_checked(folder / file) is None for file in clients.values()):
            return None
        self.used[name] = set(clients.values())
        return State(notes["round"], tree.shared, tree.private, notes["met"], clients)


def write_table(
    results: Path, name: str, *, title: str, command: str, notes: Sequence[str], runs: Sequence[Path],
    ablation: Mapping[str, Any] | None = None,
) -> Path:  # fmt: skip
    """Record what a table was asked for, `tables/NAME.json` below the results: a report is made of it again and again.

    runs: their folders; ablation: as `protofl.ablation.document` has it.
    """
    path = results / "tables" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    folders = [folder.relative_to(results).as_posix() for folder in runs]
    write_json(path, {"title": title, "command": command, "notes": list(notes), "runs": folders, "ablation": ablation})
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The whole rows of a rounds.jsonl; a line that a kill cut short is left out, and what stands after it."""
    rows: list[dict[str, Any]] = []
    try:
        text = path.read_text("utf-8")
    except OSError:
        return rows
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            break
        if not isinstance(row, dict) or not isinstance(row.get("round"), int):
            break
        rows.append(row)
    return rows


@functools.cache
def environment() -> dict[str, Any]:
    """Versions and machine, for the record."""
    packages = ("protofl", "torch", "torchvision", "numpy", "scikit-learn")
    return {
        "python": platform.python_version(),
        **{p: _version(p) for p in packages},
        "system": platform.platform(),
        "machine": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cpus": os.cpu_count(),
        "git": _git_revision(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_revision() -> str | None:
    """The revision of the checkout that protofl runs from, if it is one; '+' marks changes that are not committed."""
    here = Path(__file__).resolve().parent
    if not (here.parent / ".git").exists():
        return None
    try:
        told = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"],
            capture_output=True, text=True, timeout=5, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return told.stdout.strip() or None


def reset_peak_memory() -> None:
    """Begin a new measurement of `peak_memory_mb`, where the system can (Linux)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory_mb() -> float | None:
    """Peak resident memory of this process since `reset_peak_memory`, in MB (1e6 bytes); None where unknown."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return round(int(line.split()[1]) * 1024 / 1e6, 1)
    return None
