"""Who holds which training sample.

A partition is a pure function of the labels, the scheme, the number of clients, the concentration, the
minimum size and the partition seed; no method, network or run seed enters. The streams follow the code the
schemes come from draw by draw, so that the index lists are the same as theirs:

- `dir_class` (`dirichlet`): for every class a Dirichlet draw over clients, as in NIID-Bench
  (`partition_data`, noniid-labeldir), MOON, FedProc, FedCSPC and FedLab.
- `dir_class_fednh`: FedNH's `sampler` (its src/utils.py): the same with a swap for clients that hold a single
  class.
- `dir_client`: for every client a Dirichlet draw over classes, equal sizes (Hsu et al. 2019, arXiv
  1909.06335).
- `iid`: one shuffle, cut into equal parts.

A smaller beta means more skew in the labels; as beta grows every client's mix tends to the mix of the whole
set.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.random import RandomState

from protofl import rng
from protofl.errors import UserError, nearest

IntArray = npt.NDArray[Any]

SCHEMES = ("dir_class", "dir_class_fednh", "dir_client", "iid")
ALIASES = {"dirichlet": "dir_class"}
ON_MIN_FAIL = ("error", "accept_last", "repair")
ALPHA_CONVENTIONS = ("per_class", "total")
FORMAT = 1


@dataclass(frozen=True)
class Skew:
    """How unlike the clients are; empty clients enter `size_cv` alone.

    `label_entropy`: mean entropy of a client's labels, in nats (0: one class; ln K: all alike);
    `label_entropy_normalised`: the same over ln K. `classes_per_client`: mean number of classes held.
    `size_cv`: standard deviation of the sizes (ddof 0) over their mean. `total_variation` and `js_distance`
    (square root of the Jensen-Shannon divergence to base 2): mean distance, 0 to 1, of a client's label mix
    to the mix of all rows that were handed out.
    """

    label_entropy: float
    label_entropy_normalised: float
    classes_per_client: float
    size_cv: float
    total_variation: float
    js_distance: float


@dataclass(frozen=True, eq=False)
class Partition:
    """Index lists by client, in the order in which the clients store their rows, and facts about them."""

    indices: tuple[IntArray, ...]
    """int64 [n_i] by client: rows of the training set."""
    counts: IntArray
    """int32 [N, K]: samples by client and class."""
    attempts: int
    """Draws made until this one was taken (1 where a scheme never redraws)."""
    scheme: str
    note: str = ""
    """What a reader of the log should know, such as 'accepted after 3 failed attempts'; empty if nothing."""

    @property
    def clients(self) -> int:
        """N, the empty ones included."""
        return len(self.indices)

    @cached_property
    def sizes(self) -> IntArray:
        """int64 [N]: samples by client."""
        return np.array([len(part) for part in self.indices], dtype=np.int64)

    @property
    def min_size(self) -> int:
        """Samples of the smallest client."""
        return int(self.sizes.min())

    @property
    def max_size(self) -> int:
        """Samples of the largest client."""
        return int(self.sizes.max())

    @property
    def one_class(self) -> int:
        """Number of clients that hold at most one class."""
        return int(((self.counts > 0).sum(1) <= 1).sum())

    def count_hash(self) -> str:
        """First 16 hex digits of the SHA-256 of `counts`, int32 little-endian in C order."""
        return hashlib.sha256(np.ascontiguousarray(self.counts, dtype="<i4").tobytes()).hexdigest()[:16]

    def index_hash(self) -> str:
        """First 16 hex digits of the SHA-256 of the index lists in client order, int32 little-endian."""
        return hashlib.sha256(np.concatenate(self.indices).astype("<i4").tobytes()).hexdigest()[:16]

    @cached_property
    def skew(self) -> Skew:
        """The skew figures, computed from `counts` alone."""
        return _skew(np.asarray(self.counts, dtype=np.float64))


def partition(
    labels: npt.ArrayLike,
    *,
    scheme: str,
    clients: int,
    beta: float | None = None,
    seed: int,
    classes: int,
    min_size: int = 10,
    min_classes: int | None = None,
    cap: bool = True,
    max_tries: int = 1000,
    on_min_fail: str = "error",
    alpha_convention: str = "per_class",
) -> Partition:
    """Hand the rows with these labels (int [M], values 0 to classes-1) out to clients.

    `beta`: concentration of the Dirichlet draws, > 0; smaller is more skewed (`iid` does not read it).
    `seed`: partition seed, 0 to 2^32-1. `min_size`: an attempt of the class-wise schemes with a smaller
    client is drawn again, the stream going on. `min_classes`: the same for the number of classes; by default
    2 for `dir_class_fednh`, where a value below 2 also turns its swaps off, and 1 (no such rule) elsewhere.
    `cap`: a client that already holds at least M/N rows gets nothing more of the later classes (the
    class-wise schemes). `max_tries` failed attempts end as `on_min_fail` says: `error`, `accept_last` (take
    the last attempt as it is), `repair` (take it and move samples from the largest clients to the smallest
    until all have `min_size`). `alpha_convention` (`dir_client` only): `per_class` draws Dir(beta, ...,
    beta); `total` reads beta as Hsu's alpha, the sum of the concentrations, so that each class has beta/K.

    Raises UserError for settings that cannot work, or if `max_tries` attempts fail and `on_min_fail` is
    `error`.
    """
    scheme = _scheme(scheme)
    y = _labels(labels, classes)
    _check(y, scheme, clients, seed, min_size, max_tries, on_min_fail, alpha_convention)
    rs = rng.partition(seed)
    if scheme == "iid":
        return _finish(_iid(rs, len(y), clients), y, classes, 1, scheme)
    beta = _beta(beta)
    if scheme == "dir_client":
        concentration = beta / classes if alpha_convention == "total" else beta
        return _finish(_client_wise(rs, y, classes, clients, concentration), y, classes, 1, scheme)
    fednh = scheme == "dir_class_fednh"
    need = (2 if fednh else 1) if min_classes is None else min_classes
    if need > classes:
        raise UserError(f"partition_min_classes {need} cannot be met with {classes} classes; give at most {classes}")
    rule = _Rule(
        scheme,
        clients,
        beta,
        min_size,
        need if need > 1 else 0,
        cap,
        fednh and need >= 2,
        max_tries,
        on_min_fail,
    )
    if fednh:
        rs.permutation(len(y))  # FedNH's sampler draws this and drops it
    return _class_wise(rs, y, classes, rule)


# ---------------------------------------------------------------------------------------------------- checks


def _scheme(name: str) -> str:
    name = ALIASES.get(name, name)
    if name not in SCHEMES:
        raise UserError(f"unknown partition {name!r}{nearest(name, (*SCHEMES, *ALIASES))}; known: {', '.join(SCHEMES)}")
    return name


def _labels(labels: npt.ArrayLike, classes: int) -> IntArray:
    y = np.asarray(labels)
    if y.ndim != 1 or y.dtype.kind not in "iu" or y.size == 0:
        raise UserError(f"labels to partition must be a non-empty list of integers, not {y.dtype} of shape {y.shape}")
    if classes < 1 or int(y.min()) < 0 or int(y.max()) >= classes:
        raise UserError(f"labels must lie in 0..{classes - 1}; found {int(y.min())} to {int(y.max())}")
    return y.astype(np.int64)


def _check(
    y: IntArray,
    scheme: str,
    clients: int,
    seed: int,
    min_size: int,
    max_tries: int,
    on_min_fail: str,
    convention: str,
) -> None:
    rows = len(y)
    if clients < 1:
        raise UserError(f"clients must be at least 1, not {clients}")
    if clients > rows:
        raise UserError(f"{clients} clients cannot share {rows} training rows; give at most {rows} clients")
    if min_size < 0:
        raise UserError(f"partition_min_size must be 0 or more, not {min_size}")
    if clients * min_size > rows:
        raise UserError(
            f"{clients} clients with at least {min_size} samples each need {clients * min_size} training "
            f"rows and there are {rows}; give at most {rows // min_size} clients or a partition_min_size of "
            f"at most {rows // clients}"
        )
    if not 0 <= seed < 2**32:
        raise UserError(f"partition_seed must lie in 0..{2**32 - 1}, not {seed}")
    if max_tries < 1:
        raise UserError(f"max_tries must be at least 1, not {max_tries}")
    if on_min_fail not in ON_MIN_FAIL:
        raise UserError(
            f"unknown on_min_fail {on_min_fail!r}{nearest(on_min_fail, ON_MIN_FAIL)}; known: {', '.join(ON_MIN_FAIL)}"
        )
    if convention not in ALPHA_CONVENTIONS:
        close = nearest(convention, ALPHA_CONVENTIONS)
        raise UserError(f"unknown alpha_convention {convention!r}{close}; known: {', '.join(ALPHA_CONVENTIONS)}")
    if convention == "total" and scheme != "dir_client":
        raise UserError(f"alpha_convention=total belongs to partition dir_client; {scheme} reads beta per_class")


def _beta(beta: float | None) -> float:
    try:
        value = float("nan") if beta is None else float(beta)
    except (TypeError, ValueError):
        value = float("nan")
    if not (math.isfinite(value) and value > 0):
        raise UserError(f"beta must be a finite number above 0 (smaller means more skewed labels), not {beta!r}")
    return value


# --------------------------------------------------------------------------------------------------- schemes


def _equal_sizes(rows: int, clients: int) -> list[int]:
    return [rows // clients + (i < rows % clients) for i in range(clients)]


def _iid(rs: RandomState, rows: int, clients: int) -> list[IntArray]:
    cuts = np.cumsum(_equal_sizes(rows, clients))[:-1]
    return list(np.split(rs.permutation(rows), cuts))


def _by_class(y: IntArray, classes: int) -> list[IntArray]:
    """The rows of each class, ascending."""
    return [np.flatnonzero(y == c) for c in range(classes)]


def _client_wise(rs: RandomState, y: IntArray, classes: int, clients: int, beta: float) -> list[IntArray]:
    """Client after client draws its samples from its own class mix, classes that have run out being masked.

    The uniform numbers of a client are drawn at once (the same stream as one by one) and used in runs: until
    a class runs out, the mask and hence the cumulated mix stay as they are.
    """
    rows = _by_class(y, classes)
    for of_class in rows:
        rs.shuffle(of_class)
    mixes = rs.dirichlet(np.full(classes, beta), size=clients)
    if not (np.isfinite(mixes).all() and np.allclose(mixes.sum(1), 1)):
        raise UserError(f"dir_client: beta {beta:g} is so small that class mixes underflow: use 0.001 or more")
    left = np.array([len(of_class) for of_class in rows])
    parts = []
    for mix, size in zip(mixes, _equal_sizes(len(y), clients), strict=True):
        u = rs.random_sample(size)
        picked = np.empty(0, dtype=np.int64)
        while len(u):
            run = _until_one_runs_out(_choose(mix, left, u), left)
            left = left - np.bincount(run, minlength=classes)
            picked = np.concatenate([picked, run])
            u = u[len(run) :]
        parts.append(_take_last(rows, left, picked))
    return parts


def _choose(mix: IntArray, left: IntArray, u: IntArray) -> IntArray:
    """Class by draw: the first whose cumulated share exceeds u times the total."""
    share = np.where(left > 0, mix, 0.0)
    if not share.sum() > 0:  # all classes of the mix have run out
        share = (left > 0).astype(np.float64)
    edges = np.cumsum(share)
    last = np.searchsorted(edges, edges[-1], side="left")  # u times the total can round up to the total
    chosen: IntArray = np.minimum(np.searchsorted(edges, u * edges[-1], side="right"), last)
    return chosen


def _until_one_runs_out(drawn: IntArray, left: IntArray) -> IntArray:
    """The draws up to the one that takes the last sample of a class, that one included."""
    stop = len(drawn)
    for c in np.flatnonzero(np.bincount(drawn, minlength=len(left)) >= left):
        if left[c] > 0:
            stop = min(stop, int(np.flatnonzero(drawn == c)[left[c] - 1]) + 1)
    return drawn[:stop]


def _take_last(rows: list[IntArray], left: IntArray, picked: IntArray) -> IntArray:
    """The samples of the drawn classes: each is the last of its class list; the lists are cut to `left`."""
    part = np.empty(len(picked), dtype=np.int64)
    for c in np.unique(picked):
        part[picked == c] = rows[c][left[c] :][::-1]
        rows[c] = rows[c][: left[c]]
    return part


@dataclass(frozen=True)
class _Rule:
    """The settings of a class-wise split."""

    scheme: str
    clients: int
    beta: float
    min_size: int
    min_classes: int
    cap: bool
    swap: bool
    max_tries: int
    on_min_fail: str


@dataclass(frozen=True)
class _Attempt:
    """One class-wise draw: per class the shuffled rows and, by client, the slice of them."""

    rows: list[IntArray]
    starts: IntArray  # [K, N]
    stops: IntArray  # [K, N]

    @property
    def counts(self) -> IntArray:
        return self.stops - self.starts  # [K, N]

    def parts(self) -> list[IntArray]:
        slices = [
            [rows[a:b] for a, b in zip(first.tolist(), stop.tolist(), strict=True)]
            for rows, first, stop in zip(self.rows, self.starts, self.stops, strict=True)
        ]
        return [np.concatenate(own) for own in zip(*slices, strict=True)]


def _class_wise(rs: RandomState, y: IntArray, classes: int, rule: _Rule) -> Partition:
    by_class = _by_class(y, classes)
    last: _Attempt | None = None
    best, met = -1, False
    tries = 0
    while not met and tries < rule.max_tries:
        tries += 1
        attempt = _attempt(rs, by_class, len(y), rule)
        if attempt is not None:
            last = attempt
            smallest = int(attempt.counts.sum(0).min())
            best = max(best, smallest)
            held = int((attempt.counts > 0).sum(0).min())
            met = smallest >= rule.min_size and held >= rule.min_classes
    if last is None:
        raise UserError(
            f"partition {rule.scheme}: with beta {rule.beta:g} and {rule.clients} clients all {tries} tries "
            f"left the range of double precision; use a beta nearer to 1"
        )
    if not met and rule.on_min_fail == "error":
        raise UserError(_cannot(rule, len(y), tries, best))
    parts = last.parts()
    for part in parts:
        rs.shuffle(part)
    note = ""
    if not met:
        note = f"accepted after {tries} failed attempts"
        if rule.on_min_fail == "repair":
            parts, moves = _repair(parts, y, classes, rule.min_size)
            note = f"repaired after {tries} failed attempts: {moves} samples moved from the largest clients"
    return _finish(parts, y, classes, tries, rule.scheme, note)


def _cannot(rule: _Rule, rows: int, tries: int, best: int) -> str:
    wish = f"{rule.min_size} samples" + (f" of {rule.min_classes} classes" if rule.min_classes > 1 else "")
    return (
        f"partition {rule.scheme}: none of {tries} tries to split {rows} rows over {rule.clients} clients "
        f"with beta {rule.beta:g} gave every client {wish} (the smallest client had {best} at best); use "
        f"on_min_fail=repair, a larger beta, fewer clients or a smaller partition_min_size"
    )


def _attempt(rs: RandomState, by_class: list[IntArray], total: int, rule: _Rule) -> _Attempt | None:
    """One draw over all classes; None if the proportions of a class underflow, where the attempt stops."""
    n = rule.clients
    concentration = np.repeat(rule.beta, n)
    sizes = np.zeros(n, dtype=np.int64)
    held = np.zeros(n, dtype=np.int64)
    shuffled, starts, stops = [], [], []
    for c, of_class in enumerate(by_class):
        rows = of_class.copy()
        rs.shuffle(rows)
        q = rs.dirichlet(concentration)
        if rule.cap:
            q = q * (sizes < total / n)
        if len(rows) == 0:  # nothing to hand out, and perhaps nobody below the mean size
            cuts = np.zeros(n - 1, dtype=np.int64)
        elif (mass := q.sum()) > 0:
            cuts = (np.cumsum(q / mass) * len(rows)).astype(np.int64)[:-1]
        else:  # zero, or NaN
            return None
        start, stop = np.concatenate([[0], cuts]), np.concatenate([cuts, [len(rows)]])
        if rule.swap and c >= 2:
            _swap(start, stop, held)
        shuffled.append(rows)
        starts.append(start)
        stops.append(stop)
        sizes += stop - start
        held += stop > start
    return _Attempt(shuffled, np.stack(starts), np.stack(stops))


def _swap(start: IntArray, stop: IntArray, held: IntArray) -> None:
    """FedNH: the j-th client with at most one class so far trades its slice with the j-th from the end."""
    for j, poor in enumerate(np.flatnonzero(held <= 1).tolist(), 1):
        for edge in (start, stop):
            edge[poor], edge[-j] = edge[-j], edge[poor]


def _repair(parts: list[IntArray], y: IntArray, classes: int, min_size: int) -> tuple[list[IntArray], int]:
    """Move samples from the largest client to the smallest until all have `min_size`; low ids win ties.

    The sample is the last one, in the largest client's list, of that client's most frequent class.
    """
    lists = [part.tolist() for part in parts]
    sizes = np.array([len(own) for own in lists])
    counts = _counts(parts, y, classes)
    moves = 0
    while sizes.min() < min_size:
        poor, rich = int(sizes.argmin()), int(sizes.argmax())
        common = int(counts[rich].argmax())
        at = next(k for k in range(len(lists[rich]) - 1, -1, -1) if y[lists[rich][k]] == common)
        lists[poor].append(lists[rich].pop(at))
        for client, change in ((poor, 1), (rich, -1)):
            sizes[client] += change
            counts[client, common] += change
        moves += 1
    return [np.array(own, dtype=np.int64) for own in lists], moves


# --------------------------------------------------------------------------------------------- what came out


def _counts(parts: Sequence[IntArray], y: IntArray, classes: int) -> IntArray:
    return np.stack([np.bincount(y[part], minlength=classes) for part in parts]).astype(np.int32)


def _finish(
    parts: Sequence[IntArray], y: IntArray, classes: int, attempts: int, scheme: str, note: str = ""
) -> Partition:
    indices = tuple(np.asarray(part, dtype=np.int64) for part in parts)
    counts = _counts(indices, y, classes)
    for array in (*indices, counts):
        array.setflags(write=False)
    return Partition(indices, counts, attempts, scheme, note)


def _entropy(p: IntArray) -> IntArray:
    """Entropy of each row, in nats."""
    entropy: IntArray = -(p * np.log(np.where(p > 0, p, 1.0))).sum(-1)
    return entropy


def _skew(counts: IntArray) -> Skew:
    sizes = counts.sum(1)
    full = counts[sizes > 0]
    mix = full / full.sum(1, keepdims=True)
    overall = full.sum(0) / full.sum()
    entropy = float(_entropy(mix).mean())
    js = _entropy((mix + overall) / 2) - (_entropy(mix) + _entropy(overall)) / 2
    return Skew(
        label_entropy=entropy,
        label_entropy_normalised=entropy / math.log(counts.shape[1]) if counts.shape[1] > 1 else 0.0,
        classes_per_client=float((full > 0).sum(1).mean()),
        size_cv=float(sizes.std() / sizes.mean()),
        total_variation=float(np.abs(mix - overall).sum(1).mean() / 2),
        js_distance=float(np.sqrt(np.maximum(js, 0.0) / math.log(2)).mean()),
    )


# ----------------------------------------------------------------------------------------------------- files


def save(split: Partition, path: str | os.PathLike[str]) -> Path:
    """Write a partition to `path`: .json as text, .npz as arrays (nothing pickled). Returns the path.

    The file appears whole or not at all: it is written under a temporary name and renamed.
    """
    target = Path(path)
    _suffix(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    about = {"format": FORMAT, "scheme": split.scheme, "attempts": split.attempts, "note": split.note}
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as out:
            if target.suffix == ".npz":
                np.savez(
                    out,
                    indices=np.concatenate(split.indices).astype("<i4"),
                    sizes=split.sizes.astype("<i4"),
                    counts=np.asarray(split.counts, dtype="<i4"),
                    about=np.array(json.dumps(about)),
                )
            else:
                lists = [part.tolist() for part in split.indices]
                out.write(json.dumps(about | {"counts": split.counts.tolist(), "indices": lists}).encode())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return target


def load(path: str | os.PathLike[str], labels: npt.ArrayLike, classes: int | None = None) -> Partition:
    """Read a stored partition and check it against the labels (int [M]) it is to be used with.

    A .json file may be as little as {"indices": [[...], ...]}. Every index must lie in 0..M-1 and occur once,
    and stored counts must be those of the labels; rows that no client holds are said in `note`. Raises
    UserError otherwise.
    """
    source = Path(path)
    y = np.asarray(labels)
    k = int(y.max()) + 1 if classes is None else classes
    y = _labels(y, k)
    parts, counts, about = _read(source)
    for client, part in enumerate(parts):
        if len(part) and (int(part.min()) < 0 or int(part.max()) >= len(y)):
            raise UserError(
                f"partition file {source}: client {client} holds index {_outside(part, len(y))}, which is "
                f"outside the {len(y)} training rows; it was made for other data"
            )
    seen = np.bincount(np.concatenate(parts), minlength=len(y))
    if seen.max() > 1:
        twice = int(seen.argmax())
        raise UserError(
            f"partition file {source}: row {twice} is handed out {int(seen[twice])} times; it must occur once"
        )
    split = _finish(parts, y, k, int(about.get("attempts", 1)), str(about.get("scheme", "file")))
    if counts is not None and not np.array_equal(counts, split.counts):
        raise UserError(
            f"partition file {source}: its class counts are not those of this data set; it was made for "
            f"other data or another data order"
        )
    missing = int((seen == 0).sum())
    notes = [
        str(about.get("note", "")),
        f"{missing} of {len(y)} training rows belong to no client" if missing else "",
    ]
    return Partition(
        split.indices, split.counts, split.attempts, split.scheme, "; ".join(text for text in notes if text)
    )


def _suffix(path: Path) -> None:
    if path.suffix not in (".npz", ".json"):
        raise UserError(f"partition file {path}: the name must end in .npz or .json")


def _outside(part: IntArray, rows: int) -> int:
    return int(part[(part < 0) | (part >= rows)][0])


def _read(source: Path) -> tuple[list[IntArray], IntArray | None, dict[str, Any]]:
    """Index lists, stored counts if any, and the rest; UserError for whatever is no partition file."""
    _suffix(source)
    try:
        if source.suffix == ".npz":
            with np.load(source, allow_pickle=False) as file:
                flat, sizes, counts = _integers(file["indices"]), _integers(file["sizes"]), file["counts"]
                about = json.loads(str(file["about"]))
            if sizes.min() < 0 or sizes.sum() != len(flat):
                raise ValueError("sizes and indices do not belong together")
            parts = list(np.split(flat, np.cumsum(sizes)[:-1]))
        else:
            about = json.loads(source.read_bytes())
            parts = [_integers(np.array(own)) if own else np.empty(0, dtype=np.int64) for own in about["indices"]]
            counts = np.array(about["counts"]) if "counts" in about else None
        if not any(len(part) for part in parts):
            raise ValueError("no clients")
        if about.get("format", FORMAT) != FORMAT:
            raise ValueError(f"format {about['format']}, not {FORMAT}")
    except FileNotFoundError:
        raise UserError(f"partition file {source} does not exist") from None
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as fault:
        raise UserError(f"partition file {source} cannot be read: {' '.join(str(fault).split())}") from None
    return parts, counts, about


def _integers(values: IntArray) -> IntArray:
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise ValueError("indices must be lists of integers")
    return values.astype(np.int64)
