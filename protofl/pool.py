"""The clients of a round in several processes, one thread each: whole crews, so that more of them change no number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

from .cells import Cell
from .clients import Clients, Worked
from .engine.base import MethodError
from .engine.workers import Worker
from .method import Diverged
from .records import pack, unpack
from .tree import Tree


@dataclass(frozen=True)
class Order:
    """What a process is told: whose clients it is to run (once), what was broadcast (once an exchange), one crew."""

    cell: Cell | None
    hook: str
    t: int
    ids: list[int]
    shared: bytes | None
    kept: list[bytes | None]


@dataclass(frozen=True)
class Done:
    """What comes back of a crew, or why the run diverged."""

    worked: list[bytes]
    seconds: dict[str, float]
    samples: dict[str, int]
    diverged: str = ""


class Pool:
    """Processes that work on crews of one cell. They are started with the first crew and stopped by `close`."""

    everything = False  # a single crew is not worth a process

    def __init__(self, cell: Cell, count: int) -> None:
        self.cell, self.count = cell, count
        self.workers: list[Worker] = []

    def close(self) -> None:
        """End the processes."""
        for worker in self.workers:
            worker.stop()
        self.workers = []

    def work(
        self, clients: Clients, hook: str, t: int, groups: list[list[int]], shared: Tree,
        memory: Callable[[int], Tree | None],
    ) -> Iterator[tuple[list[int], list[Worked]]]:  # fmt: skip
        """Run a hook of the method for these crews, the largest first -> each crew as it is done."""
        waiting = sorted(groups, key=clients.samples, reverse=True)
        told, broadcast = set[int](), pack(shared, {})
        busy: dict[int, list[int]] = {}

        def give(number: int) -> None:
            ids = waiting.pop(0)
            new = number >= len(self.workers)
            if new:
                self.workers.append(Worker(serve))
            kept = [None if (m := memory(i)) is None else pack(m, {}) for i in ids]
            given = Order(self.cell if new else None, hook, t, ids, None if number in told else broadcast, kept)
            try:
                self.workers[number].give(number, given)
            except OSError:
                raise died(self.workers[number]) from None
            told.add(number)
            busy[number] = ids

        for number in range(min(self.count, len(waiting))):
            give(number)
        while busy:
            for pipe in wait([self.workers[k].pipe for k in busy]):
                number = next(k for k in busy if self.workers[k].pipe is pipe)
                done = answer(self.workers[number])
                ids = busy.pop(number)
                if waiting:
                    give(number)
                yield ids, taken(clients, done)


def crew(clients: Clients, hook: str, t: int, ids: list[int], shared: Tree, kept: list[Tree | None]) -> list[Worked]:
    """In a process that works for another: run a hook of the method for a crew."""
    clients.engine.reset()
    return clients.work(getattr(clients.method, hook), t, ids, shared, kept)


def packed(clients: Clients, worked: list[Worked]) -> Done:
    """What goes back of a crew."""
    told = [pack(Tree(upload=w.upload, shown=w.shown, memory=w.memory, terms=w.terms), {}) for w in worked]
    return Done(told, dict(clients.engine.seconds), dict(clients.engine.samples))


def taken(clients: Clients, done: Done) -> list[Worked]:
    """What was packed of a crew; its seconds and samples are added to this process's own."""
    for part, v in done.seconds.items():
        clients.engine.seconds[part] += v
    for kind, n in done.samples.items():
        clients.engine.samples[kind] += n
    told = [unpack(one)[0] for one in done.worked]
    return [Worked(one.upload, one.shown, one.memory, one.terms) for one in told]


def died(worker: Worker) -> RuntimeError:
    """What is said of a process that is gone, whether that is noticed when it is spoken to or when it should answer."""
    worker.process.join()
    return RuntimeError(
        f"a process of this run ended (exit code {worker.process.exitcode}); finished rounds are stored, "
        "the same command resumes"
    )


def answer(worker: Worker) -> Done:
    """What a process says of its crew; its death and the failures of a method are raised."""
    try:
        kind, what = worker.pipe.recv()
    except (EOFError, ConnectionResetError):
        raise died(worker) from None
    if kind == "failed":
        line, trace = what
        raise MethodError(
            line.removeprefix("MethodError: ") + (f"\n{trace}" if trace and "MethodError" not in line else "")
        )
    done: Done = what
    if done.diverged:
        raise Diverged(done.diverged)
    return done


_open: list[Any] = []
"""In a process of a pool: its `Clients`, and what was broadcast last."""


def serve(order: Order, tell: Callable[[Any], None]) -> Done:
    """A process's part: one crew, from what it is told to what comes back."""
    from . import run

    if order.cell is not None:
        ready = run.prepare(order.cell)
        _open[:] = [Clients(ready.method, run.task(ready)[0]), Tree()]
        run.set_up_process()
    if order.shared is not None:
        _open[1] = unpack(order.shared)[0]
    clients, shared = _open
    kept = [None if m is None else unpack(m)[0] for m in order.kept]
    try:
        return packed(clients, crew(clients, order.hook, order.t, order.ids, shared, kept))
    except Diverged as e:
        return Done([], {}, {}, str(e))
