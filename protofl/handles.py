"""The handles that methods are given, filled in: task, client, server (see method.py)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from numpy.random import RandomState
from torch import Tensor

from . import rng
from .data.augment import Pipeline
from .engine.base import Job
from .engine.rule import alone
from .method import Client, Server, Task, Train
from .nets import Net
from .protocol import Protocol
from .tree import Tree, placed

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


ONCE = 2**24
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
        self.net, self.protocol, self.pipeline = net, protocol, pipeline
        self.dtype, self.device = DTYPES[protocol.precision], torch.device(protocol.device)
        self.parts = [p.to(self.device) for p in parts]
        self.x: Any = placed(x, self.device)
        self.y = y.to(self.device)
        self.classes, self.clients, self.rounds = net.classes, len(parts), protocol.rounds
        self.sizes = [len(p) for p in parts]
        self.initial = self._place(initial if initial is not None else initial_weights(net, protocol))
        self.counts = [torch.bincount(self.y[p], minlength=self.classes) for p in self.parts]
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

    def since(self, began: float) -> float:
        """Seconds since then, with all that a GPU has yet to do of what it was told: it answers before it has done it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - began

    def rows(self, index: Tensor, drawn: Tensor | None) -> tuple[Any, Tensor]:
        """Samples at `index` [..., rows], augmented by the numbers drawn for them -> x [..., rows, C, H, W], y."""
        if self.transform is not None:
            return self.transform.train(self.x[index], drawn), self.y[index]
        x = self.x.map(lambda v: v[index]) if isinstance(self.x, Tree) else self.x[index]
        return x, self.y[index]

    def stream(self, method: str, tag: str, *axes: int) -> RandomState:
        return rng.private(method, tag, self.protocol.seed, -1, -1, *axes)

    def client_stream(self, method: str, tag: str, client: int, *axes: int) -> RandomState:
        return rng.private(method, tag, self.protocol.seed, -1, client, *axes)


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
        self.n, self.y = len(self.index), task.y[self.index]
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
        weights: Tree = alone(task.protocol.engine)(task).train(job)
        self.terms = {"server_loss" if k == "loss" else k: float(v) for k, v in job.terms.items()}
        return weights


def _with_stream(request: Train, stream: RandomState) -> Train:
    return Train(**{**{n: getattr(request, n) for n in request.__dataclass_fields__}, "stream": stream})


def _no_program(client: Client, shared: Tree, own: Tree) -> tuple[Tree, Tree]:
    return Tree(), Tree()
