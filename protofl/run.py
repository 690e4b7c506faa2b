"""One cell of a table: a method under a protocol, from its data to its records. Resumes where it was stopped."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from . import features, heap, nets, records, registry
from . import protocol as protocols
from .cells import Cell
from .clients import DictMemory, Memory
from .data import Data
from .data.augment import Pipeline
from .data.partition import Partition
from .engine.base import located
from .engine.rule import choose
from .errors import UserError
from .evaluate import Scored, TestSet, global_row, personal_row, score
from .federation import Federation, Round
from .handles import DTYPES, RunTask, initial_weights
from .inputs import load_data, split
from .method import Diverged, Method, Model
from .nets import Net
from .pool import Pool
from .protocol import NUMBERS, Protocol
from .tree import Tree, placed, tensors

UNDIGESTED = ("partition_file", "features", "report", "std_over", "std_ddof")
"""Fields that are recorded but move no number: a split is known by its content."""

Event = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class Prepared:
    """A cell with everything that it hangs on."""

    cell: Cell
    protocol: Protocol  # the table's, as the method adapts it
    method: Method
    data: Data
    split: Partition
    net: Net
    document: dict[str, Any]

    @property
    def digest(self) -> str:
        """The name of the run's folder."""
        return str(self.document["digest"])

    @property
    def folder(self) -> Path:
        """<group>/<digest> below the results."""
        p = self.cell.protocol
        split = f"{p.partition}-{p.beta:g}" if p.dirichlet else p.partition
        return Path(f"{_portable(self.data.name)}-{split}") / self.digest


def _portable(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in name)


def network(protocol: Protocol, data: Data) -> Net:
    """The network of an experiment, for these images and classes."""
    p = protocol
    return nets.build(
        p.model, classes=len(data.classes), shape=tuple(data.x_train.shape[1:]), projection_dim=p.projection_dim,
        use_projection_head=p.use_projection_head, classifier_input=p.classifier_input, z_normalize=p.z_normalize,
        aux_classifier=p.aux_classifier, stem=p.stem, resnet_norm=p.resnet_norm,
    )  # fmt: skip


def pipeline(protocol: Protocol, data: Data) -> Pipeline:
    """The transform of an experiment."""
    shape = tuple(data.x_train.shape[1:])
    return Pipeline(protocol.augment, protocol.mean, protocol.std, data.scale, shape, DTYPES[protocol.precision])


def prepare(cell: Cell, here: bool = True) -> Prepared:
    """Check a cell and find all that it hangs on; raises `UserError` before any work starts.

    here: whether it is to run on this machine, whose GPUs are then checked.
    """
    p = cell.protocol
    data = load_data(p.dataset, cell.data_dir, p.data_order)
    net = network(p, data)
    pipeline(p, data)
    _check_device(p.device, here)
    try:
        method = cell.method.build(p)
        adapted = method.adapt(p)
        registry.check(method, p, adapted, net)
    except UserError:
        raise
    except Exception as e:
        raise UserError(f"{cell.method.name} cannot be set up: {type(e).__name__}: {e}") from e
    made = split(p, cell.data_dir)
    if p.drop_last and p.short_client == "skip" and int(made.sizes.max()) < p.batch_size:
        raise UserError(
            f"short_client=skip leaves out every client: the largest has {made.sizes.max()} samples, fewer than "
            f"batch_size {p.batch_size}: use short_client=keep_batch or a smaller batch"
        )
    if p.client_sampling == "moon_compat" and made.min_size == 0:
        raise UserError("client_sampling=moon_compat draws among all clients and some are empty: use independent")
    engine = choose(p.engine, net.name, p.device)
    source = registry.source_hash(cell.method.name)
    name = registry.label(cell.method.name)
    told = {"name": name, **registry.describe(method), "source": source}
    as_asked = p.document()
    fields_told = {**as_asked, "engine": engine, "dataset": data.name}
    identity = {
        "numbers": NUMBERS,
        "method": told,
        "protocol": fields_told,
        "data": data.fingerprint,
        "partition": made.index_hash(),
    }
    document = {
        "digest": protocols.digest(identity),
        "name": type(method).__name__,
        "method": {**told, "path": cell.method.name},
        "protocol": {**fields_told, **{n: getattr(p, n) for n in UNDIGESTED}},
        "adapted": {n: v for n, v in adapted.document().items() if v != as_asked.get(n)},
        "preset": cell.method.preset,
        "numbers": NUMBERS,
        "data": {
            "asked": p.dataset, "fingerprint": data.fingerprint, "classes": list(data.classes), "train": len(data.y_train),
            "test": len(data.y_test), "source": data.source, "note": data.note,
        },
        "partition": {
            "counts": made.counts.tolist(), "index_hash": made.index_hash(), "count_hash": made.count_hash(),
            "min_size": int(made.min_size), "one_class": int(made.one_class),
            "attempts": made.attempts, "note": made.note, "skew": dataclasses.asdict(made.skew),
        },
        "network": {"name": net.name, "engine": engine, "parameters": net.count()},
    }  # fmt: skip
    return Prepared(cell, adapted, method, data, made, net, document)


def _check_device(device: str, here: bool) -> None:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise UserError(f"device {device!r} is not one of cpu, cuda, cuda:N")
    if not here:
        return
    if device != "cpu" and not torch.cuda.is_available():
        raise UserError(f"device {device!r}: torch finds no GPU on this machine; use --device cpu")
    if ":" in device and int(device.split(":")[1]) >= torch.cuda.device_count():
        raise UserError(f"device {device!r}: this machine has {torch.cuda.device_count()} GPUs, numbered from 0")


def set_up_process() -> None:
    """What every process does before it trains.

    One intra-op thread: sums hang on the number of threads; cores are filled with processes.
    """
    heap.keep()
    heap.leave_unfilled()
    torch.set_num_threads(1)
    threadpool_limits(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.set_deterministic_debug_mode("warn")  # use_deterministic_algorithms would import a compiler, for seconds


def task(ready: Prepared, initial: Tree | None = None) -> tuple[RunTask, TestSet]:
    """Resident data, split and initial weights of a prepared cell."""
    p, data = ready.protocol, ready.data
    parts = [torch.from_numpy(np.array(i, dtype=np.int64)) for i in ready.split.indices]
    transform = pipeline(p, data).on(p.device)
    made = RunTask(ready.net, _resident(data.x_train), torch.from_numpy(np.asarray(data.y_train)), parts, p,
                   pipeline=transform, initial=initial)  # fmt: skip
    test = TestSet(_resident(data.x_test).to(p.device), torch.from_numpy(np.asarray(data.y_test)).to(p.device),
                   transform, len(data.classes))  # fmt: skip
    return made, test


def _resident(x: np.ndarray) -> torch.Tensor:
    """A tensor over the (memory-mapped) array, without a copy; nothing writes to it."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "not writable": it need not be
        return torch.from_numpy(x)


class Run:
    """A prepared cell at work in its folder.

    processes: in how many the clients of a round are worked on; it moves no bit. On a GPU there is one. pool: where they
    are worked on instead.
    """

    def __init__(self, ready: Prepared, results: Path, processes: int = 1, pool: Any = None) -> None:
        self.ready, self.folder = ready, records.RunFolder(results / ready.folder)
        self.protocol, self.method = ready.protocol, ready.method
        self.scored: Scored | None = None
        shared = processes > 1 and self.protocol.device == "cpu"
        self.pool = Pool(ready.cell, processes) if pool is None and shared else pool

    def start(self) -> int:
        """Make the federation, from the newest whole state if there is one -> the next round."""
        initial = initial_weights(self.ready.net, self.protocol)
        weights = nets.weights_hash(self.ready.net, initial)
        made, self.test = task(self.ready, initial)
        self.memory = self.folder.memory(device=self.protocol.device)
        self.federation = Federation(self.method, made, self.memory, self.pool)
        document = self.ready.document
        document["network"]["w0"] = weights
        trained = tensors(self.federation.shared.get("net", Tree()))
        document["network"]["trained"] = sum(v.numel() for v in trained if v.is_floating_point())
        self.folder.open(document)
        return self._resume(next(iter(self.folder.states()), None))

    def _resume(self, state: records.State | None) -> int:
        if state is None:
            self.folder.keep_rows_before(-1)
            return -1
        self.restore(state)
        self.folder.keep_rows_before(state.round)
        return state.round

    def restore(self, state: records.State) -> None:
        """Put the federation where a state left it."""
        fed = self.federation
        place = fed.task.device
        fed.shared, fed.private = placed(state.shared, place), placed(state.private, place)
        fed.met = set(state.met)
        self.memory = fed.memory = self.folder.memory(state.clients, state.round, place)

    def play(self, tell: Event) -> dict[str, Any]:
        """Play the remaining rounds -> the summary."""
        set_up_process()  # now that everything is loaded: a library that comes later brings its own threads
        t, fed, p = self.start(), self.federation, self.protocol
        records.reset_peak_memory()
        tell({"kind": "start", "round": max(t, 0), "rounds": p.rounds})
        try:
            if t < 0:
                first = fed.introduce()
                if first is not None:
                    self.folder.append({"round": -1, **self._cost(first)})
                self._save(0)
                t = 0
            for now in range(t, p.rounds):
                row = self.step(now)
                self.folder.append(row)
                self._save(now + 1)
                self.folder.summarise(status="running", rounds=now + 1, of=p.rounds)
                tell(
                    {
                        "kind": "round",
                        "round": now + 1,
                        "rounds": p.rounds,
                        "gm": row.get("gm"),
                        "pm_v": row.get("pm_v"),
                    }
                )
        except Diverged as e:
            done = len([r for r in self.folder.rows() if r["round"] >= 0 and "diverged" not in r])
            summary = {"status": "diverged", "rounds": done, "of": p.rounds, "error": str(e)}
        except Exception as e:
            done = len([r for r in self.folder.rows() if r["round"] >= 0])
            with contextlib.suppress(OSError):  # of a full disk, say: what counts is why the run failed
                self.folder.summarise(status="failed", rounds=done, of=p.rounds, error=str(e))
            raise
        else:
            summary = {
                "status": "finished",
                "rounds": p.rounds,
                "of": p.rounds,
                "confusion": self.confusion(),
            }
        self.folder.summarise(**summary)
        self.folder.finish()
        return summary

    def close(self) -> None:
        """Give the folder back, end the processes."""
        if self.pool is not None:
            self.pool.close()
        self.folder.close()

    def step(self, t: int) -> dict[str, Any]:
        """Round t -> its row."""
        fed, p = self.federation, self.protocol
        self.memory.round = t
        try:
            played = fed.play(t)
        except Diverged:
            self.folder.append({"round": t, "diverged": True})
            raise
        self._check_finite(t, played)
        final = fed.conclude() if t + 1 == p.rounds else None
        row: dict[str, Any] = {
            "round": t,
            "lr": p.learning_rate(t),
            **self._cost(played),
            "terms": _finite(played.terms),
        }
        if final is not None:
            self._check_finite(t, final)
            row["final"] = {**self._cost(final), "terms": _finite(final.terms)}
        began = time.perf_counter()
        if (t + 1) % p.eval_every == 0 or t + 1 == p.rounds:
            row |= self.evaluate(played)
        row["seconds"] = {**row["seconds"], "evaluate": time.perf_counter() - began}
        row["memory_mb"] = records.peak_memory_mb()
        pictured = prototype_rounds(p)
        if t in pictured:
            self._save_prototypes(t, played)
        if t in (min(pictured), max(pictured)):
            self._save_features(t, played)
        return row

    def evaluate(self, played: Round) -> dict[str, Any]:
        """The metrics after a round."""
        fed, p = self.federation, self.protocol
        model = fed.global_model()
        self.scored = None if model is None else self._score(model, played.t, "global model")
        row = global_row(self.scored)
        if set(p.metrics) & {"pm_v", "pm_l"}:
            last = played.t + 1 == p.rounds
            if p.pm_protocol == "as_trained":
                row |= self._personal(fed.personal(played), played.t)
            elif last:
                row |= self._personal(fed.refreshed(), p.rounds)
        return row

    def _personal(self, models: Iterable[tuple[int, Model]], t: int) -> dict[str, Any]:
        scored = {i: self._score(m, t, f"personal model of client {i}") for i, m in models}
        everybody = self.protocol.pm_protocol == "refresh" or self.protocol.pm_clients == "all"
        empty = int((self.ready.split.sizes == 0).sum()) if everybody else 0
        return personal_row(scored, self.ready.split.counts, self.test.per_class(), empty)

    def _score(self, model: Model, t: int, who: str) -> Scored:
        with located(model.scores, t, who, model.tree):
            return score(model, self.ready.net, self.test)

    def confusion(self) -> list[list[int]] | None:
        """Of the global model after the last round: [true class][predicted class]."""
        if self.scored is None and (model := self.federation.global_model()) is not None:
            self.scored = self._score(model, self.protocol.rounds - 1, "global model")  # resumed after the last round
        best = self.scored.headline if self.scored is not None else None
        return None if best is None else best.tolist()

    def _cost(self, played: Round) -> dict[str, Any]:
        billed = {f"bytes_{k}": v for k, v in played.bytes.items()}
        return {"clients": played.ids, "drawn": played.drawn, **billed, "samples": played.samples,
                "state_bytes": played.state_bytes, "seconds": played.seconds}  # fmt: skip

    def _check_finite(self, t: int, played: Round) -> None:
        if broken := self.federation.broken(played):
            self.folder.append({"round": t, "diverged": True, **self._cost(played), "terms": _finite(played.terms)})
            raise Diverged(f"{broken} in round {t}")

    def _save(self, done: int) -> None:
        fed = self.federation
        files = dict(sorted(self.memory.files.items()))
        self.folder.save_state(records.State(done, fed.shared, fed.private, sorted(fed.met), files))

    def _save_prototypes(self, t: int, played: Round) -> None:
        fed = self.federation
        arrays: dict[str, np.ndarray] = {}
        with located(self.method.prototypes, t, "server", fed.shared):
            table = self.method.prototypes(fed.shared, fed.private)
        if table is not None:
            arrays |= {"values": table.values.cpu().numpy(), "has": table.has.cpu().numpy()}
        told = [(i, self.method.client_prototypes(u)) for i, u in zip(played.ids, played.uploads)]
        mine = [(i, rows) for i, rows in told if rows is not None]
        if mine:
            arrays["client_values"] = torch.cat([r[0] for _, r in mine]).cpu().numpy()
            arrays["client_labels"] = torch.cat([r[1] for _, r in mine]).cpu().numpy()
            arrays["client_ids"] = np.concatenate([np.full(len(r[1]), i) for i, r in mine])
        if arrays:
            self.folder.save_arrays("prototypes", t, arrays)

    def _save_features(self, t: int, played: Round) -> None:
        if arrays := features.collect(self.federation, played, self.test):
            self.folder.save_arrays("features", t, arrays)


def _finite(terms: Mapping[str, float]) -> dict[str, float | None]:
    return {k: v if math.isfinite(v) else None for k, v in terms.items()}


def prototype_rounds(protocol: Protocol) -> set[int]:
    """Evenly spread rounds, first and last included."""
    n, last = min(protocol.prototype_rounds, protocol.rounds), protocol.rounds - 1
    return {last} if n == 1 else {round(i * last / (n - 1)) for i in range(n)}


def play(ready: Prepared, results: Path, tell: Event, processes: int = 1, pool: Any = None) -> dict[str, Any]:
    """Run or resume one cell -> its summary. processes, pool: as `Run` has them."""
    run = Run(ready, results, processes, pool)
    try:
        return run.play(tell)
    finally:
        run.close()


class Overlay:
    """Memories in RAM above stored ones, which stay as they are."""

    def __init__(self, below: Memory) -> None:
        self.below, self.above = below, DictMemory()

    def get(self, client: int) -> Tree | None:
        return self.above.get(client) or self.below.get(client)

    def put(self, client: int, memory: Tree) -> None:
        self.above.put(client, memory)


def stored_cell(document: Mapping[str, Any], data_dir: str | None) -> Cell:
    """The cell that a run's protocol.json tells of."""
    method = document["method"]
    fields = {**document["protocol"], "dataset": document["data"]["asked"]}
    spec = registry.Spec(method["path"], tuple(method["options"].items()), document["preset"], method["class"])
    return Cell(spec, Protocol(**protocols.coerce(fields)), data_dir)


def _stored(path: Path, data_dir: str | None) -> Run:
    """A stored run with its data, split and initial weights, in no state yet. Nothing in the folder changes."""
    document = records.read_json(path / "protocol.json")
    try:
        cell = stored_cell(document, data_dir)
    except (KeyError, TypeError, AttributeError):
        raise UserError(f"{path} is not the folder of a run: it has no readable protocol.json") from None
    ready = prepare(cell)
    if ready.digest != document["digest"]:
        raise UserError(
            f"{path} cannot be evaluated again: its digest is {document['digest']}, the same settings now give "
            f"{ready.digest} (other data, another method source or another version of protofl)"
        )
    run = Run(ready, path.parent)
    run.folder = records.RunFolder(path)
    set_up_process()
    made, run.test = task(ready)
    run.federation = Federation(ready.method, made)
    return run


def reopened(path: Path, data_dir: str | None) -> tuple[Run, int]:
    """A stored run as its newest whole state left it, and the rounds that had been played."""
    run = _stored(path, data_dir)
    state = next(iter(run.folder.states()), None)
    if state is None:
        raise UserError(f"{path} has no whole state")
    run.restore(state)
    return run, state.round


def replay(path: Path, data_dir: str | None) -> dict[str, Any]:
    """Re-evaluate a stored run -> {"round", "stored": figures of its last round, "again": the same, measured anew}.

    The global model is the stored one. Personal models are not stored: the state before the last round is played once
    more, which gives them back to the last digit on the machine type that made them. Nothing in the folder changes.
    """
    run = _stored(path, data_dir)
    rows = [r for r in run.folder.rows() if "gm" in r]
    states = {s.round: s for s in run.folder.states()}
    t = rows[-1]["round"] if rows else -1
    if t not in states or t + 1 not in states:
        raise UserError(f"{path} has no whole state of its last evaluated round, so that it cannot be evaluated again")
    run.restore(states[t])
    run.federation.memory = Overlay(run.memory)
    played = run.federation.play(t)
    run.federation.shared, run.federation.private = states[t + 1].shared, states[t + 1].private
    again = run.evaluate(played)
    return {"round": t, "stored": {k: rows[-1].get(k) for k in again}, "again": again}
