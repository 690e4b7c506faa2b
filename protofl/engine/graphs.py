"""The loop on a GPU with its step recorded: what small networks wait for there is the next call, not arithmetic.

Of each client the first step of a kind runs as it stands; then one is recorded as a CUDA graph and replayed for the rest,
with the next batch copied to where the recorded step reads it. All that a step leaves stays where it was, in place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..tree import tensors
from .base import Job, Plan
from .loop import Loop, Visit

if TYPE_CHECKING:
    from ..handles import RunTask

LEAST = 4
"""Steps of a kind that must be left for one to be recorded: recording costs about as much as a step or two."""

Kind = tuple[int, bool, float | None]
"""What a recorded step cannot change: its rows, whether something is gathered, a rate of its epoch's own."""


class Recorder:
    """Graphs on a stream of their own, which is where PyTorch wants them recorded."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.latest: torch.cuda.CUDAGraph | None = None  # its memory serves the next one, since no two run at a time
        self.failed: list[torch.cuda.CUDAGraph] = []  # PyTorch's allocator goes on to ask them

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """What runs within follows on all before it, and has ended when this ends: then graphs may be freed."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with torch.cuda.stream(self.stream):
                yield
        except BaseException:
            with contextlib.suppress(RuntimeError):  # what was raised first says why
                self.stream.synchronize()
            raise
        self.stream.synchronize()

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """Record what `step` would do, without doing it -> a function that does it."""
        graph = torch.cuda.CUDAGraph()
        collects = gc.isenabled()
        gc.disable()  # what is freed by chance while a graph is recorded would become part of it
        try:
            graph.capture_begin(*(() if self.latest is None else (self.latest.pool(),)))
            try:
                step()
            except BaseException:
                self.failed.append(graph)
                with contextlib.suppress(RuntimeError):  # says that there is no graph, and not why
                    graph.capture_end()
                raise
            graph.capture_end()
        finally:
            if collects:
                gc.enable()
        self.latest = graph
        return graph.replay


@functools.cache
def recorder(device: torch.device) -> Recorder:
    """The one of this process: a stream has memory of its own, and the server trains with an engine of its own."""
    return Recorder(device)


@dataclasses.dataclass
class Recorded:
    """A step that is replayed. rows: where batches come from, and the one place from which the step reads; samples: what
    it adds to the engine's count."""

    replay: Callable[[], None]
    rows: list[tuple[Tensor, Tensor]]
    samples: Counter[str]


class Graphs(Loop):
    """The loop, replayed."""

    def __init__(self, task: RunTask) -> None:
        super().__init__(task)
        self.recorder = recorder(task.device)
        self.recorded: dict[Kind, Recorded] = {}  # of the latest visit

    def train(self, job: Job) -> Any:
        with self.recorder.apart():
            return super().train(job)

    def steps(self, visit: Visit, plan: Plan, clock: Tensor) -> None:
        kinds = [self.kind(visit, plan, s) for s in range(len(plan.size))]
        left, known = Counter(kinds), set[Kind]()
        recorded = self.recorded = {}
        visit.w = visit.w.map(lambda v: v if v.requires_grad else v.clone())  # written to, and not the visit's own
        for s, kind in enumerate(kinds):
            if kind in known and kind not in recorded and left[kind] >= LEAST:
                recorded[kind] = self.record(visit, plan, clock, s)
            if kind in recorded:
                one = recorded[kind]
                for source, place in one.rows:
                    place.copy_(source[s : s + 1])
                one.replay()
                for what, n in one.samples.items():
                    self.samples[what] += n
            else:
                self.in_place(visit, plan, clock, s)
                known.add(kind)
            left[kind] -= 1

    def kind(self, visit: Visit, plan: Plan, s: int) -> Kind:
        """What step s has in common with those that can be replayed for it."""
        rate = visit.job.client.rate
        return plan.size[s], self.tallies(visit, plan, s), rate(plan.epoch[s]) if rate else None

    def in_place(self, visit: Visit, plan: Plan, clock: Tensor, s: int) -> None:
        """Step s, its results where those of the step before were."""
        w, sums, terms = visit.w, visit.sums, visit.terms
        self.advance(visit, plan, clock, s)
        with torch.no_grad():
            visit.w, visit.sums, visit.terms = (
                moved(new, old) for new, old in ((visit.w, w), (visit.sums, sums), (visit.terms, terms))
            )

    def record(self, visit: Visit, plan: Plan, clock: Tensor, s: int) -> Recorded:
        """Record step s as one of a plan of one step."""
        parts = {k: v for k, v in (*vars(plan).items(), ("clock", clock)) if isinstance(v, Tensor)}
        places = {k: v[s : s + 1].clone() for k, v in parts.items()}
        rows = [(v, places[k]) for k, v in parts.items()]
        now = places.pop("clock")
        one = dataclasses.replace(plan, size=[plan.size[s]], epoch=[plan.epoch[s]], **places)  # type: ignore[arg-type]
        before = Counter(self.samples)
        replay = self.recorder.record(lambda: self.in_place(visit, one, now, 0))
        samples = Counter(self.samples) - before
        self.samples = dict(before)
        return Recorded(replay, rows, samples)


def moved(new: Any, old: Any) -> Any:
    """The new values in the memory of the old ones; in memory of their own where there were none."""
    if new is old:
        return old
    if not tensors(old):
        return pytree.tree_map(torch.clone, new)
    return pytree.tree_map(lambda there, v: there if there is v else there.copy_(v), old, new)
