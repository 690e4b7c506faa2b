"""The round loop: draw, broadcast, let programs run, aggregate, count bytes. Knows no method by name."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from typing import Protocol as Interface

import torch
from numpy.random import RandomState
from torch import Tensor

from . import rng
from .data.augment import Pipeline
from .engine.base import Engine, Job, located
from .engine.loop import Loop
from .engine.rule import ENGINES, choose
from .method import Client, Exchange, Last, Method, Model, Server, Task, Train
from .nets import Net
from .protocol import Protocol
from .tree import Tree, nbytes

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


ONCE = 2**26
"""Values up to which data without augmentation are normalised once instead of batch by batch."""


class RunTask(Task):
    """Resident data, the split, the net and its initial weights.

    x: uint8 [M, H, W, C] (on the server: a tree of what it trains on); parts: sample positions by client. pipeline: what
    makes floats of x, at every batch or, where that comes to the same, once; None: x is ready.
    """

    def __init__(
        self, net: Net, x: Any, y: Tensor, parts: list[Tensor], protocol: Protocol, *,
        pipeline: Pipeline | None = None, initial: Tree | None = None,
    ) -> None:  # fmt: skip
        self.net, self.parts, self.protocol, self.pipeline = net, parts, protocol, pipeline
        self.dtype, self.device = DTYPES[protocol.precision], torch.device(protocol.device)
        self.x: Any = _to(x, self.device)
        self.y = y.to(self.device)
        self.classes, self.clients, self.rounds = net.classes, len(parts), protocol.rounds
        self.sizes = [len(p) for p in parts]
        self.initial = self._place(initial if initial is not None else initial_weights(net, protocol))
        self.counts = [torch.bincount(self.y[p], minlength=self.classes) for p in parts]
        self.draw = pipeline.draw if pipeline is not None and pipeline.width else None
        self.transform = pipeline  # what is left to do for a batch
        if pipeline is not None and self.draw is None and self.x.numel() <= ONCE:
            self.x, self.transform = pipeline.test(self.x), None
        self._ones: dict[int, Tensor] = {}

    def _place(self, w: Tree) -> Tree:
        return w.map(lambda v: v.to(self.device, self.dtype) if v.is_floating_point() else v.to(self.device))

    def scalar(self, v: float) -> Tensor:
        """A number as functions of a batch see it."""
        return torch.tensor(float(v), dtype=self.dtype, device=self.device)

    def ones(self, n: int) -> Tensor:
        """The mask of a batch without padding."""
        if n not in self._ones:
            self._ones[n] = torch.ones(n, dtype=self.dtype, device=self.device)
        return self._ones[n]

    def rows(self, index: Tensor, drawn: Tensor | None) -> tuple[Any, Tensor]:
        """Samples at `index` [..., rows], augmented by the numbers drawn for them -> x [..., rows, C, H, W], y."""
        if self.device.type != "cpu":
            index = index.to(self.device)
            drawn = None if drawn is None else drawn.to(self.device)
        if self.transform is not None:
            return self.transform.train(self.x[index], drawn), self.y[index]
        x = self.x.map(lambda v: v[index]) if isinstance(self.x, Tree) else self.x[index]
        return x, self.y[index]

    def stream(self, method: str, tag: str, *axes: int) -> RandomState:
        return rng.private(method, tag, self.protocol.seed, -1, -1, *axes)

    def client_stream(self, method: str, tag: str, client: int, *axes: int) -> RandomState:
        return rng.private(method, tag, self.protocol.seed, -1, client, *axes)


def _to(x: Any, device: torch.device) -> Any:
    return x.map(lambda v: v.to(device)) if isinstance(x, Tree) else x.to(device)


def initial_weights(net: Net, protocol: Protocol) -> Tree:
    """w^0 of protocol 2.6, float32."""
    seed = protocol.weights_seed()
    return net.init(rng.init(seed)) if protocol.init == "numpy" else net.init_torch(seed)


class RunClient(Client):
    """One client in one round. `t`: the round whose streams and rate it uses (-1: before round 0; T: refresh)."""

    clipped = True
    rate: Callable[[int], float] | None = None

    def __init__(self, task: RunTask, id: int, t: int) -> None:
        p = task.protocol
        self.task, self.id, self.round, self.rounds = task, id, t, p.rounds
        self.index = task.parts[id]
        self.n, self.y = len(self.index), task.y[self.index.to(task.device)]
        self.counts = task.counts[id].to(task.dtype)
        self.batch_size, self.drop_last, self.epochs = (
            min(p.batch_size, max(self.n, 1)),
            p.drop_last,
            p.local_epochs,
        )
        self.lr, self.momentum, self.weight_decay = p.learning_rate(max(t, 0)), p.momentum, p.weight_decay
        self.measured = t >= p.rounds or p.measures(t)
        self.batches = rng.train(p.seed, t, 0 if p.client_seed == "shared" else id)

    def steps(self, epochs: int | None = None) -> int:
        full, rest = divmod(self.n, self.batch_size)
        return (epochs or self.epochs) * (full if self.drop_last and full else full + (rest > 0))

    def stream(self, method: str, tag: str, *axes: int) -> RandomState:
        return rng.private(method, tag, self.task.protocol.seed, self.round, self.id, *axes)


class PoolClient(RunClient):
    """The server training on tensors of its own: no momentum, no clip, a rate per epoch, one private stream."""

    clipped = False

    def __init__(
        self, task: RunTask, t: int, batch_size: int, epochs: int, lr: Callable[[int], float], weight_decay: float,
        stream: RandomState,
    ) -> None:  # fmt: skip
        super().__init__(task, 0, t)
        self.batch_size, self.drop_last, self.epochs = min(batch_size, self.n), False, epochs
        self.rate, self.momentum, self.weight_decay, self.batches = lr, 0.0, weight_decay, stream


class RunServer(Server):
    """The server in one exchange."""

    def __init__(self, task: RunTask, ids: list[int], t: int) -> None:
        p = task.protocol
        self.task: RunTask = task
        self.ids, self.round, self.rounds = ids, t, p.rounds
        n = torch.tensor([float(len(task.parts[i])) for i in ids], dtype=torch.float64)
        self.uniform = torch.full_like(n, 1 / len(ids))
        self.weights = n / n.sum() if p.model_weighting == "data_size" else self.uniform
        self.terms: dict[str, float] = {}  # of what `train` minimised last

    def stream(self, method: str, tag: str, *axes: int) -> RandomState:
        return rng.private(method, tag, self.task.protocol.seed, self.round, -1, *axes)

    def mean(self, trees: list[Tree], weights: Tensor | None = None) -> Tree:
        p = (self.weights if weights is None else weights).tolist()

        def one(values: list[Tensor]) -> Any:
            if not values[0].is_floating_point():
                return torch.stack(values).amax(0)
            total = values[0] * p[0]
            for v, share in zip(values[1:], p[1:]):
                total = total + v * share
            return total

        return Tree({k: one([t[k] for t in trees]) for k in trees[0]})

    def merge(self, old: Tree, trees: list[Tree], weights: Tensor | None = None) -> Tree:
        mean, eta = self.mean(trees, weights), self.task.protocol.server_lr
        if eta == 1:
            return mean
        trained = self.task.net.trainable(mean)
        return mean | {k: old[k] + eta * (v - old[k]) for k, v in trained.items()}

    def train(
        self, request: Train, x: Tree, y: Tensor, *, batch_size: int, epochs: int, lr: Callable[[int], float],
        weight_decay: float, stream: RandomState,
    ) -> Tree:  # fmt: skip
        task = RunTask(
            self.task.net, x, y, [torch.arange(len(y))], self.task.protocol.replace(optimizer_reset="per_round"),
            initial=Tree(),
        )  # fmt: skip
        client = PoolClient(task, self.round, batch_size, epochs, lr, weight_decay, stream)
        if request.noise is not None:
            request = _with_stream(request, stream)
        job = Job(client, _no_program, Tree(), Tree(), request=request)
        weights: Tree = Loop(task).train(job)
        self.terms = {"server_loss" if k == "loss" else k: float(v) for k, v in job.terms.items()}
        return weights


def _with_stream(request: Train, stream: RandomState) -> Train:
    return Train(**{**{n: getattr(request, n) for n in request.__dataclass_fields__}, "stream": stream})


def _no_program(client: Client, shared: Tree, own: Tree) -> tuple[Tree, Tree]:
    return Tree(), Tree()


# ---- what clients remember ------------------------------------------------------------------------------------------


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


# ---- one round ------------------------------------------------------------------------------------------------------


@dataclass
class Round:
    """What happened in one exchange."""

    t: int
    ids: list[int]  # those that took part, ascending
    drawn: list[int]  # S_t in the order of the draw
    received: list[Tree]  # shared, as each of them got it
    uploads: list[Tree]
    shown: list[Tree]  # what is neither sent nor kept
    bytes: dict[str, int]
    seconds: dict[str, float]
    samples: dict[str, int]
    state_bytes: int  # the largest memory among the clients of this round
    terms: dict[str, float]
    client_terms: list[Tree]  # means over the steps of each of them
    local: dict[int, Tree] = field(default_factory=dict)  # bn_buffers=local: the clients' own buffers

    @property
    def lost(self) -> list[int]:
        """Clients whose loss is not finite."""
        return [i for i, terms in zip(self.ids, self.client_terms)
                if not all(math.isfinite(float(v)) for v in terms.values())]  # fmt: skip


class Federation:
    """A method at work: the state of server and clients, and one function per phase."""

    def __init__(self, method: Method, task: RunTask, memory: Memory | None = None) -> None:
        self.method, self.task, self.protocol = method, task, task.protocol
        self.engine: Engine = ENGINES[choose(task.protocol.engine, task.net.name, task.protocol.device)](task)
        self.memory: Memory = DictMemory() if memory is None else memory
        with located(method.start, -1, "server", Tree()):
            self.shared, self.private = method.start(task)
        self.met: set[int] = set()  # clients that have taken part, to whom constants need not be sent again
        keeps = task.protocol.bn_buffers == "local"
        self.buffers = task.initial.only(task.net.buffers) if keeps else Tree()  # those that stay with their client

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
        return sorted(i for i in self.drawn(t) if not (short and len(self.task.parts[i]) < p.batch_size))

    # -- clients' memories ----------------------------------------------------------------------------------------

    def own(self, client: RunClient) -> Tree:
        """The method's part of a client's memory."""
        kept = self.memory.get(client.id)
        if kept is not None:
            return kept.own  # type: ignore[no-any-return]
        with located(self.method.enrol, client.round, f"client {client.id}", self.shared):
            return self.method.enrol(client)

    def job(self, program: Callable[..., Any], client: RunClient, t: int) -> Job:
        """A client's program, with what it receives and remembers."""
        kept = self.memory.get(client.id) or Tree()
        shared = self.shared
        if self.buffers:
            shared = put_buffers(shared, kept.get("buffers", self.buffers))
        return Job(client, program, shared, self.own(client), kept.get("momenta"))

    def keep(self, job: Job, changes: Tree, buffers: Tree) -> int:
        """Remember what a program changed; what it does not mention stays -> bytes of it."""
        memory = Tree(own=job.own | changes)
        if buffers:
            memory["buffers"] = buffers
        if job.momenta:
            memory["momenta"] = job.momenta
        if any(memory.values()):
            self.memory.put(job.client.id, memory)
        return nbytes(memory)

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
        ids = self.taking_part(max(t, 0)) if ids is None else ids
        self.engine.reset()
        made = Round(t, ids, drawn, [], [], [], {}, {}, {}, 0, {}, [])
        for crew in batches(ids, self.protocol.crew):  # what a client keeps rests on disk before the next crew begins
            jobs = [self.job(exchange.program, RunClient(self.task, i, t), t) for i in crew]
            for job, (upload, changes, shown) in zip(jobs, self.engine.finished(jobs)):
                i = job.client.id
                if self.buffers:
                    made.local[i] = find_buffers(upload, self.task.net.buffers)
                    upload = put_buffers(upload, self.buffers)
                made.received.append(job.shared)
                made.uploads.append(upload)
                made.shown.append(shown)
                made.client_terms.append(job.terms)
                made.state_bytes = max(made.state_bytes, self.keep(job, changes, made.local.get(i, Tree())))
        made.bytes = self.charge(ids, made.uploads)
        made.terms = mean_terms([self.task.sizes[i] for i in ids], made.client_terms)
        began = time.perf_counter()
        if ids:
            server = RunServer(self.task, ids, t)
            with located(exchange.aggregate, t, f"server, clients {', '.join(map(str, ids[:5]))}", self.shared):
                shared, private = exchange.aggregate(server, self.shared, self.private, made.uploads)
            self.shared, self.private = self.shared | shared, self.private | private
            made.terms |= server.terms
        made.samples = dict(self.engine.samples)
        made.seconds = {**self.engine.seconds, "aggregate": time.perf_counter() - began}
        return made

    def charge(self, ids: list[int], uploads: list[Tree]) -> dict[str, int]:
        """Bytes that crossed (protocol 6.1). Constants are billed apart, with a client's first participation."""
        hidden = self.task.net.buffers if self.buffers else None
        constants = Tree({k: v for k, v in self.shared.items() if k in self.method.constant})
        moving = Tree({k: v for k, v in self.shared.items() if k not in constants})
        new = [i for i in ids if i not in self.met]
        self.met.update(new)
        return {
            "down": len(ids) * nbytes(without_buffers(moving, hidden)),
            "up": sum(nbytes(without_buffers(u, hidden)) for u in uploads),
            "once": len(new) * nbytes(constants),
        }

    # -- what is evaluated ----------------------------------------------------------------------------------------

    def global_model(self) -> Model | None:
        """The server's model; none where clients keep their normalisation statistics to themselves."""
        with located(self.method.global_model, self.protocol.rounds, "server", self.shared):
            return None if self.buffers else self.method.global_model(self.shared, self.private)

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
        with located(self.method.personal_model, client.round, f"client {client.id}", self.shared):
            return self.method.personal_model(client, self.shared, self.own(client), last)

    def refreshed(self) -> Iterator[tuple[int, Model]]:
        """Every client receives the final state and runs its program once more, t = T; nothing of it is kept."""
        for crew in batches(self.able(), self.protocol.crew):
            clients = [RunClient(self.task, i, self.protocol.rounds) for i in crew]
            yield from zip(crew, self.engine.run([self.job(self.method.refresh, c, c.round) for c in clients]))


def batches(ids: list[int], size: int) -> Iterator[list[int]]:
    """Consecutive groups of at most `size`."""
    for at in range(0, len(ids), size):
        yield ids[at : at + size]


def mean_terms(sizes: list[int], told: list[Tree]) -> dict[str, float]:
    """Loss terms of clients -> means by number of samples."""
    total = sum(n for n, terms in zip(sizes, told) if terms)
    out: dict[str, float] = {}
    for n, terms in zip(sizes, told):
        for name, v in terms.items():
            out[name] = out.get(name, 0.0) + float(v) * n / total
    return out


# ---- normalisation statistics that stay with their client (bn_buffers=local) ---------------------------------------


def find_buffers(tree: Mapping[str, Any], names: str) -> Tree:
    """The buffers of the first model inside a message."""
    mine = Tree(tree).only(names)
    for v in tree.values():
        if not mine and isinstance(v, Tree):
            mine = find_buffers(v, names)
    return mine


def put_buffers(tree: Tree, buffers: Tree) -> Tree:
    """The same message with these buffers in every model that has them."""
    return Tree({k: put_buffers(v, buffers) if isinstance(v, Tree) else buffers.get(k, v) for k, v in tree.items()})


def without_buffers(tree: Tree, names: str | None) -> Tree:
    """The same message without the buffers of its models."""
    if names is None:
        return tree
    kept = {k: without_buffers(v, names) if isinstance(v, Tree) else v for k, v in tree.items()}
    return Tree(kept).without(names)


__all__ = [
    "DictMemory",
    "Federation",
    "Memory",
    "Round",
    "RunClient",
    "RunServer",
    "RunTask",
    "initial_weights",
]
