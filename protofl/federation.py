"""The round loop: draw, broadcast, let programs run, aggregate, count bytes. Knows no method by name."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from numpy.random import RandomState

from . import rng
from .buffers import put_buffers, without_buffers
from .clients import Clients, DictMemory, Memory, Worked, crews
from .engine.base import located
from .handles import RunClient, RunServer, RunTask
from .method import Exchange, Last, Method, Model
from .tree import Tree, nbytes, tensors


@dataclass
class Round:
    """What happened in one exchange; lists are in the order of `ids`."""

    t: int
    ids: list[int]  # those that took part, ascending
    drawn: list[int]  # S_t in the order of the draw
    received: list[Tree] = field(default_factory=list)  # shared, as each of them got it
    uploads: list[Tree] = field(default_factory=list)
    shown: list[Tree] = field(default_factory=list)  # what is neither sent nor kept
    bytes: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    samples: dict[str, int] = field(default_factory=dict)
    state_bytes: int = 0  # the largest memory among the clients of this round
    terms: dict[str, float] = field(default_factory=dict)
    client_terms: list[Tree] = field(default_factory=list)  # means over the steps of each of them
    local: dict[int, Tree] = field(default_factory=dict)  # bn_buffers=local: the clients' own buffers

    @property
    def lost(self) -> list[int]:
        """Clients whose loss is not finite."""
        return [i for i, terms in zip(self.ids, self.client_terms)
                if not all(math.isfinite(float(v)) for v in terms.values())]  # fmt: skip


class Federation:
    """A method at work: the state of server and clients, and one function per phase.

    pool: where crews are worked on side by side; None: here, one after the other.
    """

    def __init__(self, method: Method, task: RunTask, memory: Memory | None = None, pool: Any = None) -> None:
        self.method, self.task, self.protocol = method, task, task.protocol
        self.clients, self.pool = Clients(method, task), pool
        self.memory: Memory = DictMemory() if memory is None else memory
        with located(method.start, -1, "server", Tree()):
            self.shared, self.private = method.start(task)
        self.met: set[int] = set()  # clients that have taken part, to whom constants need not be sent again

    # -- who takes part -------------------------------------------------------------------------------------------

    def able(self) -> list[int]:
        """Clients that have data."""
        return [i for i, n in enumerate(self.task.sizes) if n]

    def drawn(self, t: int) -> list[int]:
        """S_t in the order of the draw (protocol 4.3)."""
        p, n = self.protocol, self.task.clients
        m = max(1, int(p.participation * n + 1e-9))
        if p.client_sampling == "moon_compat":
            earlier = random.Random(p.seed)
            return [earlier.sample(range(n), m) for _ in range(t + 1)][t]
        compat = p.client_sampling == "fednh_compat"
        stream = RandomState((t + 1 + p.seed) % 2**32) if compat else rng.draw(p.seed, t)
        holds = set(self.able())
        return [i for i in stream.permutation(n).tolist() if i in holds][:m]

    def taking_part(self, t: int) -> list[int]:
        """S_t in ascending order, without those that short_client=skip leaves out."""
        p = self.protocol
        short = p.drop_last and p.short_client == "skip"
        return sorted(i for i in self.drawn(t) if not (short and self.task.sizes[i] < p.batch_size))

    # -- exchanges ------------------------------------------------------------------------------------------------

    def introduce(self) -> Round | None:
        """The exchange before round 0, if the method has one: with the clients of S_0, t = -1."""
        first = self.method.first()
        return None if first is None else self.exchange(first, -1)

    def play(self, t: int) -> Round:
        """Round t: clients train, the server aggregates."""
        return self.exchange(Exchange(self.method.local, self.method.aggregate), t)

    def conclude(self) -> Round | None:
        """The exchange after the last round, if the method has one: with all clients that have data, t = T."""
        final = self.method.final()
        return None if final is None else self.exchange(final, self.protocol.rounds, self.able())

    def exchange(self, exchange: Exchange, t: int, ids: list[int] | None = None) -> Round:
        """One meeting of the server and S_t (or `ids`)."""
        drawn = self.drawn(max(t, 0)) if ids is None else ids
        made = Round(t, self.taking_part(max(t, 0)) if ids is None else ids, drawn)
        self._clients_part(exchange.program, made)
        made.bytes = self.charge(made.ids, made.uploads)
        made.terms = mean_terms([self.task.sizes[i] for i in made.ids], made.client_terms)
        began = time.perf_counter()
        if made.ids:
            server = RunServer(self.task, made.ids, t)
            who = f"server, clients {', '.join(map(str, made.ids[:5]))}"
            with located(exchange.aggregate, t, who, self.shared):
                shared, private = exchange.aggregate(server, self.shared, self.private, made.uploads)
            self.shared, self.private = self.shared | shared, self.private | private
            made.terms |= server.terms
        made.seconds["aggregate"] = self.task.since(began)
        return made

    def _clients_part(self, program: Callable[..., Any], made: Round) -> None:
        """Run the programs; what a client keeps is put away as soon as its crew is done."""
        found: dict[int, tuple[Tree, Worked]] = {}
        began = time.perf_counter()
        self.clients.engine.reset()
        for crew, worked in self._crews(program, made.t, made.ids):
            for i, one in zip(crew, worked):
                found[i] = (self.clients.received(self.shared, self.memory.get(i)), replace(one, memory=Tree()))
                if one.memory.get("buffers"):
                    made.local[i] = one.memory.buffers
                if any(one.memory.values()):
                    self.memory.put(i, one.memory)
                made.state_bytes = max(made.state_bytes, nbytes(one.memory))
        for i in made.ids:
            received, one = found[i]
            made.received.append(received)
            made.uploads.append(one.upload)
            made.shown.append(one.shown)
            made.client_terms.append(one.terms)
        made.samples = dict(self.clients.engine.samples)
        made.seconds = scaled(self.clients.engine.seconds, time.perf_counter() - began)

    def _crews(self, program: Callable[..., Any], t: int, ids: list[int]) -> Iterator[tuple[list[int], list[Worked]]]:
        """The crews of an exchange as they are done."""
        hook = getattr(program, "__name__", "")
        cut = crews(ids, self.clients.engine.crew)
        shared_out = self.pool is not None and (self.pool.everything or len(cut) > 1)
        if shared_out and getattr(self.method, hook, None) == program:
            yield from self.pool.work(self.clients, hook, t, cut, self.shared, self.memory.get)
            return
        for crew in cut:
            kept = [self.memory.get(i) for i in crew]
            yield crew, self.clients.work(program, t, crew, self.shared, kept)

    def charge(self, ids: list[int], uploads: list[Tree]) -> dict[str, int]:
        """Bytes that crossed (protocol 6.1). Constants are billed apart, with a client's first participation."""
        hidden = self.task.net.buffers if self.clients.buffers else None
        constants = Tree({k: v for k, v in self.shared.items() if k in self.method.constant})
        moving = Tree({k: v for k, v in self.shared.items() if k not in constants})
        new = [i for i in ids if i not in self.met]
        self.met.update(new)
        return {
            "down": len(ids) * nbytes(without_buffers(moving, hidden)),
            "up": sum(nbytes(without_buffers(u, hidden)) for u in uploads),
            "once": len(new) * nbytes(constants),
        }

    def broken(self, played: Round) -> str:
        """What is no longer finite after an exchange, in words; empty if all is."""
        if played.lost:
            return f"loss of client {played.lost[0]} is not finite"
        finite = all(bool(torch.isfinite(v).all()) for v in tensors(self.shared) if v.is_floating_point())
        return "" if finite else "weights are not finite"

    # -- what is evaluated ----------------------------------------------------------------------------------------

    def global_model(self) -> Model | None:
        """The server's model; none where clients keep their normalisation statistics to themselves."""
        with located(self.method.global_model, self.protocol.rounds, "server", self.shared):
            return None if self.clients.buffers else self.method.global_model(self.shared, self.private)

    def personal(self, played: Round) -> Iterator[tuple[int, Model]]:
        """As trained: what the clients of this round use right after their local training (protocol 5.3), by id.

        With pm_clients=all every client with data, for methods whose clients keep their personal model. One at a time:
        the models of all clients need not fit into memory.
        """
        place = {i: k for k, i in enumerate(played.ids)}
        for i in self.able() if self.protocol.pm_clients == "all" else played.ids:
            last = None
            if i in place:
                k = place[i]
                upload = put_buffers(played.uploads[k], played.local[i]) if i in played.local else played.uploads[k]
                last = Last(played.received[k], upload, played.shown[k])
            yield i, self._personal(RunClient(self.task, i, played.t), last)

    def _personal(self, client: RunClient, last: Last | None) -> Model:
        own = self.clients.own(client, self.shared, self.memory.get(client.id))
        with located(self.method.personal_model, client.round, f"client {client.id}", self.shared):
            return self.method.personal_model(client, self.shared, own, last)

    def refreshed(self) -> Iterator[tuple[int, Model]]:
        """Every client receives the final state and runs its program once more, t = T; nothing of it is kept."""
        for crew in crews(self.able(), self.clients.engine.crew):
            kept = [self.memory.get(i) for i in crew]
            jobs = self.clients.jobs(self.method.refresh, self.protocol.rounds, crew, self.shared, kept)
            yield from zip(crew, self.clients.engine.run(jobs))


def mean_terms(sizes: list[int], told: list[Tree]) -> dict[str, float]:
    """Loss terms of clients -> means by number of samples."""
    total = sum(n for n, terms in zip(sizes, told) if terms)
    out: dict[str, float] = {}
    for n, terms in zip(sizes, told):
        for name, v in terms.items():
            out[name] = out.get(name, 0.0) + float(v) * n / total
    return out


def scaled(parts: dict[str, float], passed: float) -> dict[str, float]:
    """Seconds by part; of processes side by side, whose sum is more than what passed, their shares of that."""
    total = sum(parts.values())
    return {k: v * passed / total for k, v in parts.items()} if total > passed else dict(parts)
