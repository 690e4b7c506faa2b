"""The clients' side of a run: their programs, answered by an engine, and what they remember."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from typing import Protocol as Interface

from .buffers import find_buffers, put_buffers
from .engine.base import Engine, Job, located
from .engine.rule import ENGINES, choose
from .handles import RunClient, RunTask
from .method import Method
from .tree import Tree


class Memory(Interface):
    """Where idle clients' memories rest: own (the method's), buffers and momenta (the runtime's)."""

    def get(self, client: int) -> Tree | None:
        """What was put for a client, or None."""

    def put(self, client: int, memory: Tree) -> None:
        """Replace a client's memory."""


class DictMemory(dict[int, Tree]):
    """Memories in RAM."""

    def put(self, client: int, memory: Tree) -> None:
        self[client] = memory


@dataclass(frozen=True)
class Worked:
    """What became of a client's program: what it sends, shows to the evaluation alone, and remembers; loss terms."""

    upload: Tree
    shown: Tree
    memory: Tree
    terms: Tree


class Clients:
    """Runs programs of clients; holds nothing between calls but the task."""

    def __init__(self, method: Method, task: RunTask) -> None:
        self.method, self.task, self.protocol = method, task, task.protocol
        self.engine: Engine = ENGINES[choose(task.protocol.engine, task.net.name, task.protocol.device)](task)
        keeps = task.protocol.bn_buffers == "local"
        self.buffers = task.initial.only(task.net.buffers) if keeps else Tree()  # those that stay with their client

    def samples(self, ids: list[int]) -> int:
        """How many samples these clients hold."""
        return sum(self.task.sizes[i] for i in ids)

    def own(self, client: RunClient, shared: Tree, kept: Tree | None) -> Tree:
        """The method's part of a client's memory."""
        if kept is not None:
            return kept.own  # type: ignore[no-any-return]
        with located(self.method.enrol, client.round, f"client {client.id}", shared):
            return self.method.enrol(client)

    def received(self, shared: Tree, kept: Tree | None) -> Tree:
        """What a client gets to see of a broadcast: its own buffers take the place of others'."""
        return put_buffers(shared, (kept or Tree()).get("buffers", self.buffers)) if self.buffers else shared

    def jobs(
        self, program: Callable[..., Any], t: int, ids: list[int], shared: Tree, kept: list[Tree | None]
    ) -> list[Job]:
        """The clients' programs, with what each receives and remembers."""
        made = []
        for i, memory in zip(ids, kept):
            client = RunClient(self.task, i, t)
            momenta = (memory or Tree()).get("momenta")
            own = self.own(client, shared, memory)
            made.append(Job(client, program, self.received(shared, memory), own, momenta))
        return made

    def work(
        self, program: Callable[..., Any], t: int, ids: list[int], shared: Tree, kept: list[Tree | None]
    ) -> list[Worked]:
        """Run the programs of an exchange. kept: the clients' memories, None for one that has none."""
        jobs = self.jobs(program, t, ids, shared, kept)
        return [self._worked(job, *result) for job, result in zip(jobs, self.engine.finished(jobs))]

    def _worked(self, job: Job, upload: Tree, changes: Tree, shown: Tree) -> Worked:
        """What a program does not mention of its memory stays."""
        memory = Tree(own=job.own | changes)
        if self.buffers:
            memory["buffers"] = find_buffers(upload, self.task.net.buffers)
            upload = put_buffers(upload, self.buffers)
        if job.momenta:
            memory["momenta"] = job.momenta
        return Worked(upload, shown, memory, job.terms)


def crews(ids: list[int], size: int) -> list[list[int]]:
    """Consecutive groups of at most `size` clients, as few and as equal as can be."""
    count = -(-len(ids) // size)
    return [ids[k * len(ids) // count : (k + 1) * len(ids) // count] for k in range(count)]
