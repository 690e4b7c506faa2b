"""Run folders, read and checked. A damaged folder is kept with the reason and never raises."""

from __future__ import annotations

import json
import math
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ..errors import UserError

MARKS = ("protocol.json", "rounds.jsonl", "summary.json")
"""A folder with one of these is a run."""

FINISHED, UNFINISHED, DIVERGED, FAILED, DAMAGED = "finished", "unfinished", "diverged", "failed", "damaged"

SHARES = re.compile(r"gm|pm_(uniform|v|l)(_std|_worst10)?")
"""Fields of a row that are shares of 1."""

Document = Mapping[str, Any]
Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Prototypes:
    """Class prototypes of one round: global [K, d] with a mask, the clients' own with class and client."""

    round: int
    values: Array
    has: Array
    client_values: Array
    client_labels: Array
    client_ids: Array


@dataclass(frozen=True, eq=False)
class Run:
    """One run folder. `reason` says what is wrong or unusual with it; empty if nothing."""

    path: Path
    status: str
    reason: str = ""
    digest: str = ""
    method: str = ""
    name: str = ""
    options: Document = field(default_factory=dict)
    protocol: Document = field(default_factory=dict)
    data: Document = field(default_factory=dict)
    partition: Document = field(default_factory=dict)
    network: Document = field(default_factory=dict)
    env: Document = field(default_factory=dict)
    rounds: tuple[Document, ...] = ()
    """One row per round, ascending; -1 is the exchange before round 0."""
    total: int | None = None
    """T, the rounds that were asked for."""
    source: str = ""
    """Hash of the method's source."""
    numbers: Any = None
    """The version of the code that makes the numbers."""
    adapted: Document = field(default_factory=dict)
    """Protocol fields in which the method departs from the table's: its own budget, its own population."""

    @property
    def known(self) -> bool:
        """Whether it can be told what was run."""
        return bool(self.method)

    @property
    def seed(self) -> int:
        """The run seed; -1 if it is not known."""
        return int(self.protocol.get("seed", -1))

    @property
    def played(self) -> int:
        """Rounds that are recorded."""
        return sum(r["round"] >= 0 for r in self.rounds)

    @property
    def diverged_at(self) -> int | None:
        """The round in which the run diverged, if a row says so."""
        return next((r["round"] for r in self.rounds if r.get("diverged")), None)

    def prototypes(self) -> tuple[Prototypes | None, str]:
        """The prototypes of the last stored round (None: there are none), and why they cannot be read."""
        made, problems = made_of(dict(list(stored(self.path / "prototypes").items())[-1:]), _prototypes)
        return (made[0] if made else None), "".join(problems)

    def all_prototypes(self) -> tuple[list[Prototypes], list[str]]:
        """The prototypes of every stored round, ascending, and which files cannot be read."""
        return made_of(stored(self.path / "prototypes"), _prototypes)


_ROUND = re.compile(r"round-(\d+)\.npz")

_DAMAGE = (OSError, ValueError, TypeError, EOFError, RuntimeError, MemoryError, zipfile.BadZipFile, zlib.error)
"""What NumPy raises for files that are cut, foreign or pickled."""


def stored(folder: Path) -> dict[int, Path]:
    """The files round-NNNNN.npz of a folder by round, ascending; none where there is no folder."""
    return dict(sorted((int(m[1]), path) for path in folder.glob("*.npz") if (m := _ROUND.fullmatch(path.name))))


def arrays(path: Path) -> dict[str, Array]:
    """All arrays of an .npz file, or a ValueError that says the file cannot be read."""
    try:
        with np.load(path, allow_pickle=False) as found:
            return {name: array for name, array in found.items() if isinstance(array, np.ndarray)}
    except _DAMAGE as error:
        raise ValueError(f"{path.name} cannot be read") from error


def runs(paths: Sequence[Path | str]) -> list[Run]:
    """All runs at or below the given folders, each once: as given, below a folder by method and seed."""
    out: dict[Path, Run] = {}
    for path in map(Path, paths):
        if not path.exists():
            raise UserError(f"there is no folder {path}")
        below = [read(p) for p in find(path)]
        for run in sorted(below, key=lambda r: (not r.known, r.name.casefold(), _canonical(r.options), r.seed)):
            out.setdefault(run.path.resolve(), run)
    if not out:
        raise UserError(f"no runs below {', '.join(map(str, paths)) or 'the given folders'}")
    return list(out.values())


def find(path: Path) -> Iterator[Path]:
    """The run folders at or below a folder, by name. A run's own folders are not searched."""
    for folder, inner, files in os.walk(path):
        if any(mark in files for mark in MARKS):
            inner.clear()
            yield Path(folder)
        inner.sort()


def read(path: Path, shown: Path | None = None) -> Run:
    """One run folder, whatever its state; shown: the path that it goes by, if it is another."""
    document, problem = _document(path / "protocol.json")
    problem = problem or _protocol_problem(document)
    if problem:
        return Run(shown or path, DAMAGED, problem)
    rounds, notes, broken = _rounds(path / "rounds.jsonl")
    summary, summary_problem = _document(path / "summary.json")
    env, _ = _document(path / "env.json")
    protocol = document["protocol"]
    adapted = document.get("adapted", {})
    total = _whole({**protocol, **adapted}.get("rounds")) or _whole(summary.get("of"))
    status, reason = _status(summary, (path / "done").exists(), rounds, total)
    if broken:
        status, reason = DAMAGED, broken
    elif summary_problem and status != FINISHED:
        notes = [*notes, summary_problem]
    return Run(
        shown or path,
        status,
        "; ".join(filter(None, [reason, *notes])),
        str(document.get("digest", "")),
        document["method"]["name"],
        str(document.get("name") or document["method"]["name"]),
        document["method"].get("options", {}),
        protocol,
        document.get("data", {}),
        document.get("partition", {}),
        document.get("network", {}),
        env,
        tuple(rounds),
        total,
        str(document["method"].get("source") or ""),
        document.get("numbers"),
        adapted,
    )


def number(value: Any) -> float | None:
    """A finite number as a float; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _document(path: Path) -> tuple[dict[str, Any], str]:
    """A JSON object and what is wrong with it."""
    try:
        made = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}, f"{path.name} is missing"
    except OSError as error:
        return {}, f"{path.name} cannot be read ({error.strerror})"
    except (ValueError, RecursionError):
        return {}, f"{path.name} is not whole JSON"
    return (made, "") if isinstance(made, dict) else ({}, f"{path.name} is not a JSON object")


def _protocol_problem(document: Document) -> str:
    """What is wrong with the content of protocol.json; empty if nothing."""
    for name in ("method", "protocol", "data", "partition", "network", "adapted"):
        if not isinstance(document.get(name, {}), dict):
            return f"protocol.json: {name} is not an object"
    method = document.get("method", {})
    if not (isinstance(method.get("name"), str) and method["name"] and isinstance(method.get("options", {}), dict)):
        return "protocol.json does not name the method"
    if _whole(document.get("protocol", {}).get("seed")) is None:
        return "protocol.json has no seed"
    if not isinstance(document.get("data", {}).get("classes", []), list):
        return "protocol.json: the classes are not a list"
    if counts(document.get("partition", {})) is None and "counts" in document.get("partition", {}):
        return "protocol.json: the counts of the split are not a table of whole numbers"
    return ""


def counts(partition: Document) -> Array | None:
    """The samples by client and class [N, K] of a split, if they are such a table."""
    try:
        table = np.array(partition.get("counts"))
    except ValueError:
        return None
    good = table.ndim == 2 and table.size and table.dtype.kind in "iu" and table.min() >= 0
    return table.astype(np.int64) if good else None


def _rounds(path: Path) -> tuple[list[dict[str, Any]], list[str], str]:
    """The rows in ascending order, remarks, and what is broken beyond a cut last line."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return [], ["rounds.jsonl is missing"], ""
    except OSError as error:
        return [], [], f"rounds.jsonl cannot be read ({error.strerror})"
    rows: dict[int, dict[str, Any]] = {}
    cut = bool(lines[-1].strip()) and bool(_row(lines[-1])[1])
    lines = [line for line in (lines[:-1] if cut else lines) if line.strip()]
    for i, line in enumerate(lines):
        row, problem = _row(line)
        if problem:
            return [], [], f"line {i + 1} of rounds.jsonl: {problem}"
        if row["round"] in rows and rows[row["round"]].get("gm") != row.get("gm"):
            return [], [], f"rounds.jsonl has two different rows for round {row['round']}"
        rows[row["round"]] = row
    notes = ["the last line of rounds.jsonl is cut off and left out"] if cut else []
    return [rows[t] for t in sorted(rows)], notes, ""


def _row(line: bytes) -> tuple[dict[str, Any], str]:
    """One row and what is wrong with it."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return {}, "not whole JSON"
    if not isinstance(row, dict) or (t := _whole(row.get("round"))) is None or t < -1:
        return {}, "not a row of a round"
    kinds = {"gm_scores": dict, "seconds": dict, "terms": dict, "clients": list}
    wrong = [n for n, kind in kinds.items() if n in row and not isinstance(row[n], kind)]
    wrong += [n for n, v in row.items() if SHARES.fullmatch(n) and not _share(v)]
    wrong += ["pm_each"] if not _columns(row.get("pm_each", {})) else []
    if not wrong:
        wrong = [f"gm_scores {n}" for n, v in row.get("gm_scores", {}).items() if not _share(v)]
    return row, f"{wrong[0]} is not what it should be" if wrong else ""


def _columns(value: Any) -> bool:
    """Whether a value is a table by columns: lists of numbers, some of them missing."""
    return isinstance(value, dict) and all(
        isinstance(column, list) and all(v is None or isinstance(v, int | float) for v in column)
        for column in value.values()
    )


def _share(value: Any) -> bool:
    """Whether a value is a share of 1, missing or not finite (which reads as missing)."""
    if value is None:
        return True
    known = number(value)
    return isinstance(value, int | float) and (known is None or 0 <= known <= 1)


def _status(summary: Document, done: bool, rounds: Sequence[Document], total: int | None) -> tuple[str, str]:
    """What became of a run, and in words what a reader should know about it."""
    said = summary.get("status")
    played = [r["round"] for r in rounds if r["round"] >= 0]
    if said == DIVERGED or any(r.get("diverged") for r in rounds):
        return DIVERGED, next((f"diverged at round {r['round']}" for r in rounds if r.get("diverged")), "diverged")
    if said == FAILED:
        return FAILED, f"failed: {summary.get('error') or 'no reason recorded'}"
    if not (done or said == FINISHED):
        return (
            UNFINISHED,
            f"{len(played)} of {'?' if total is None else total} rounds: still running, or killed",
        )
    if played != list(range(total or len(played))) or not played:
        return DAMAGED, f"marked finished, but has {len(played)} of {total} rounds"
    return FINISHED, ""


T = TypeVar("T")


def made_of(files: Mapping[int, Path], make: Callable[[int, Mapping[str, Array]], T]) -> tuple[list[T], list[str]]:
    """What is made of the arrays of files, by round, and which of them cannot be read."""
    made, problems = [], []
    for t, path in files.items():
        try:
            made.append(make(t, arrays(path)))
        except ValueError:
            problems.append(f"{path.parent.name}/{path.name} cannot be read")
    return made, problems


def _prototypes(round: int, arrays: Mapping[str, Array]) -> Prototypes:
    """The arrays of a file in agreeing shapes, or a ValueError."""
    values = np.asarray(arrays.get("values", np.zeros((0, 0))), dtype=np.float64)
    own = np.asarray(arrays.get("client_values", np.zeros((0, values.shape[-1]))), dtype=np.float64)
    has = np.asarray(arrays.get("has", np.ones(len(values))), dtype=bool)
    labels = np.asarray(arrays.get("client_labels", np.zeros(0)), dtype=np.int64)
    ids = np.asarray(arrays.get("client_ids", np.full(len(own), -1)), dtype=np.int64)
    if len(values) == 0:
        values = np.zeros((0, own.shape[-1]))
    fits = values.ndim == own.ndim == 2 and values.shape[1] == own.shape[1]
    if not fits or has.shape != values.shape[:1] or labels.shape != own.shape[:1] or ids.shape != own.shape[:1]:
        raise ValueError("the arrays do not fit together")
    return Prototypes(round, values, has, own, labels, ids)
