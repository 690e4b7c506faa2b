"""What both engines share: driving programs to their ends, and which rows are read when. No step code."""

from __future__ import annotations

import dataclasses
import inspect
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.random import RandomState
from torch import Tensor
from torch.utils import _pytree as pytree

from ..errors import UserError
from ..method import OFF, Batch, Collect, Diverged, Group, Survey, Train, View
from ..tree import Tree, tensors

if TYPE_CHECKING:
    from ..handles import RunClient, RunTask

READ = 512
"""Rows per call of a pass in which the cut into batches cannot be seen."""


class MethodError(RuntimeError):
    """What raised in a method, with the place: method, function, round, client and shapes."""


@dataclass
class Job:
    """One client program under way.

    momenta: SGD's buffers by parameter name, kept between requests of optimizer_reset=never; latest: those that the
    last Train left, until the program ends. terms: means over steps of the loss terms, by name.
    """

    client: RunClient
    program: Callable[..., Any]
    shared: Tree
    own: Tree
    momenta: Tree | None = None
    latest: Tree = field(default_factory=Tree)
    request: Any = None
    result: Any = None
    terms: Tree = field(default_factory=Tree)
    running: Any = None

    def advance(self, answer: Any = None) -> bool:
        """Send the answer; False when the program has returned."""
        if self.running is None:
            self.running = self.program(self.client, self.shared, self.own)
        if not inspect.isgenerator(self.running):
            self.result = self.running
            return False
        try:
            self.request = self.running.send(answer)
            return True
        except StopIteration as stop:
            self.result, self.latest = stop.value, Tree()
            return False


@dataclass
class Plan:
    """The batches of one client: positions into its own data, padded with 0.

    rows [steps, B] long; size: real rows per step; epoch [steps]; augment [steps, B, a] or None; noise: per batch
    [steps, ...], per row [steps, B, ...], or None. Where the clients' data are, so that no step has to send anything.
    """

    rows: Tensor
    size: list[int]
    epoch: list[int]
    augment: Tensor | None = None
    noise: Tensor | None = None

    def on(self, device: torch.device) -> Plan:
        """The same on a device."""
        there: dict[str, Any] = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return dataclasses.replace(self, **there)


def plan(
    n: int,
    size: int,
    epochs: int,
    *,
    stream: RandomState | None,
    shuffle: bool,
    drop_last: bool,
    draw: Callable[[RandomState, int], Tensor | None] | None,
    noise: Any = None,
    noise_stream: RandomState | None = None,
) -> Plan:
    """Cut n samples into batches of `size`, per epoch: permutation, augmentation, noise (protocol section 0)."""
    full, rest = divmod(n, size)
    if drop_last and full:
        rest = 0
    steps, used = full + (rest > 0), full * size + rest
    rows = np.zeros((epochs, steps * size), dtype=np.int64)
    drawn: list[Tensor] = []
    per_row: list[np.ndarray] = []
    for e in range(epochs):
        order = stream.permutation(n) if shuffle and stream is not None else np.arange(n)
        rows[e, :used] = order[:used]
        numbers = draw(stream, n) if draw and stream is not None else None
        if numbers is not None:
            drawn.append(_widen(numbers[:used], steps * size))
        if noise is not None and noise.per == "row":
            uniform = noise_stream.random_sample((n, *noise.shape))  # type: ignore[union-attr]
            per_row.append(uniform[rows[e]])
    sizes = [size] * full + [rest] * (rest > 0)
    made = Plan(
        torch.from_numpy(rows).view(epochs * steps, size),
        sizes * epochs,
        [e for e in range(epochs) for _ in range(steps)],
        torch.stack(drawn).view(epochs * steps, size, -1) if drawn else None,
    )
    if per_row:
        made.noise = torch.from_numpy(np.stack(per_row)).view(epochs * steps, size, *noise.shape)
    elif noise is not None:
        made.noise = torch.from_numpy(noise_stream.random_sample((epochs * steps, *noise.shape)))  # type: ignore[union-attr]
    return made


def _widen(t: Tensor, length: int) -> Tensor:
    return torch.cat([t, t.new_zeros(length - len(t), *t.shape[1:])]) if len(t) < length else t


def moving(groups: tuple[Group, ...], names: Sequence[str]) -> list[tuple[Group, list[str]]]:
    """The parameters of every group: the first that matches takes one; in no group: frozen."""
    out: list[tuple[Group, list[str]]] = [(g, []) for g in groups]
    for name in names:
        for g, mine in out:
            if re.match(g.names, name):
                mine.append(name)
                break
    return [(g, mine) for g, mine in out if mine]


def trains(names: Sequence[str], net: Any) -> bool:
    """Whether an encoder is among the parameters that move (a program may keep a model under a prefix)."""
    return any(re.search(net.encoder, name) for name in names)


def split_loss(returned: Any) -> tuple[Tensor, Tree]:
    """What `loss` returned -> scalar, named terms."""
    return returned if isinstance(returned, tuple) else (returned, Tree())


def add(total: Any, new: Any) -> Any:
    """Sums of surveys."""
    return new if total is None else pytree.tree_map(torch.add, total, new)


class Engine:
    """Drives client programs and answers their requests; knows no method.

    crew: how many clients are driven together.
    """

    crew = 1

    def __init__(self, task: RunTask) -> None:
        self.task, self.protocol, self.net = task, task.protocol, task.net
        self.reset()

    def reset(self) -> None:
        """Forget what was measured."""
        self.seconds = {"train": 0.0, "prototype": 0.0}
        self.samples = {"trained": 0, "forward": 0}

    def count(self, passes: Sequence[bool], rows: int) -> None:
        """Add what the encoder did for a batch of so many real rows (protocol 6.2)."""
        for trained in passes:
            self.samples["trained" if trained else "forward"] += rows

    def answer(self, jobs: list[Job]) -> list[Any]:
        """Answers to equal requests of a crew."""
        raise NotImplementedError

    def run(self, crew: list[Job]) -> list[Any]:
        """Drive the programs of a crew to their ends, in lockstep -> what they returned, in the order of the jobs."""
        waiting = [job for job in crew if self._advance(job)]
        while waiting:
            # Training waits until nobody asks for anything cheaper, so that all train together.
            cheap = [j for j in waiting if not isinstance(j.request, Train)]
            group = _alike(cheap or waiting)
            answers = self._answer(group)
            done = {id(job) for job, a in zip(group, answers) if not self._advance(job, a)}
            waiting = [j for j in waiting if id(j) not in done]
        return [job.result for job in crew]

    def finished(self, jobs: list[Job]) -> list[tuple[Tree, Tree, Tree]]:
        """The same for programs of an exchange -> upload, changes of own, what is shown to the evaluation alone."""
        for job, result in zip(jobs, self.run(jobs)):
            if not (isinstance(result, tuple) and len(result) in (2, 3) and all(isinstance(t, Tree) for t in result)):
                wrong = TypeError(f"a program returns (upload, changes of own), two trees, not {type(result).__name__}")
                raise described(wrong, getattr(job.program, "__qualname__", str(job.program)), [job])
        return [(*job.result, Tree())[:3] for job in jobs]

    def _advance(self, job: Job, answer: Any = None) -> bool:
        began = time.perf_counter()
        try:
            return job.advance(answer)
        except Diverged:
            raise
        except Exception as e:
            raise described(e, getattr(job.program, "__qualname__", str(job.program)), [job]) from e
        finally:
            self.seconds["prototype"] += time.perf_counter() - began

    def _answer(self, jobs: list[Job]) -> list[Any]:
        request = jobs[0].request
        if not isinstance(request, Train | Survey | Collect):
            raise described(TypeError(f"a program yields Train, Survey or Collect, not {request!r}"), "local", jobs)
        given = [(v, v._version) for j in jobs for v in tensors((j.shared, j.own, j.request.const))]
        began = time.perf_counter()
        function = request.loss if isinstance(request, Train) else request.fn
        try:
            answers = self.answer(jobs)
            if any(v._version != version for v, version in given):
                raise RuntimeError("a function of a batch wrote into what it was given")
        except (MethodError, Diverged):
            raise
        except Exception as e:
            raise described(e, getattr(function, "__qualname__", str(function)), jobs) from e
        self.seconds["train" if isinstance(request, Train) else "prototype"] += self.task.since(began)
        return answers

    # -- shared by both --------------------------------------------------------------------------------------------

    def setting(self, g: Group, client: RunClient) -> tuple[float, float, float, float]:
        """lr, momentum, weight decay and clip of a group; None means the protocol's."""
        p = self.protocol
        limit = p.grad_clip_norm or OFF

        def pick(mine: float | None, default: float) -> float:
            return default if mine is None else mine

        return (
            pick(g.lr, client.lr),
            pick(g.momentum, client.momentum),
            pick(g.weight_decay, client.weight_decay),
            pick(g.clip, limit if client.clipped else OFF),
        )

    def clips(self, groups: list[tuple[Group, list[str]]], client: RunClient) -> list[tuple[float, list[str]]]:
        """(limit, names whose gradients share one norm)."""
        together: dict[tuple[str, float], list[str]] = {}
        for g, mine in groups:
            together.setdefault((g.norm, self.setting(g, client)[3]), []).extend(mine)
        return [(limit, names) for (_, limit), names in together.items() if limit < OFF]

    def training_plan(self, client: RunClient, r: Train) -> Plan:
        """The batches of a Train, from the training stream; its noise from the request's own."""
        return plan(
            client.n, client.batch_size, r.epochs or client.epochs,
            stream=client.batches, shuffle=True, drop_last=client.drop_last, draw=self.task.draw,
            noise=r.noise, noise_stream=r.stream,
        ).on(self.task.device)  # fmt: skip

    def reading_plan(self, client: RunClient, r: Survey | Collect) -> Plan:
        """The batches of a pass: in stored order; shuffled only where batches can be seen."""
        seen = r.mode != "eval" or r.drop_last
        draw = self.task.draw if r.augment else None
        return plan(
            client.n, client.batch_size if seen else min(client.n, READ), 1,
            stream=r.stream, shuffle=seen, drop_last=r.drop_last, draw=draw,
        ).on(self.task.device)  # fmt: skip

    def view(self, job: Job, steps: int, epochs: int) -> View:
        """What a function of a batch may know of this client and request."""
        c, like = job.client, self.task.scalar
        return View(job.shared, job.own, job.request.const, like(c.n), c.counts, like(steps), like(epochs),
                    c.lr, c.round, c.rounds)  # fmt: skip

    def kept_momenta(self, job: Job) -> Tree:
        """SGD's buffers as the client, or the Train before, left them; those of others start at zero."""
        return (job.momenta or Tree()) | (job.latest if job.request.optimizer == "same" else Tree())

    def keep_momenta(self, job: Job, momenta: Tree) -> None:
        """The buffers outlive the request; with optimizer_reset=never the program too."""
        job.latest = momenta
        if self.protocol.optimizer_reset == "never":
            job.momenta = (job.momenta or Tree()) | momenta


def _alike(waiting: list[Job]) -> list[Job]:
    """The first job and those with an equal request."""
    key = kind(waiting[0])
    return [job for job in waiting if kind(job) == key]


def kind(job: Job) -> tuple[Any, ...]:
    """Requests of the same kind can be answered in one call. Epochs may be ragged, streams are each client's."""
    r = job.request
    out: list[Any] = [type(r)]
    if dataclasses.is_dataclass(r):
        for f in dataclasses.fields(r):
            if f.name not in ("epochs", "stream"):
                v = getattr(r, f.name)
                out.append(_shape(v) if isinstance(v, Tree) else v)
    return (*out, _shape(job.own))


def _shape(tree: Any) -> tuple[Any, ...]:
    leaves, spec = pytree.tree_flatten(tree)
    return spec, tuple((v.shape, v.dtype) if isinstance(v, Tensor) else v for v in leaves)


@contextmanager
def located(function: Callable[..., Any], t: int, who: str, shared: Tree) -> Iterator[None]:
    """What raises within is reported with its place: function, round, who, shapes."""
    try:
        yield
    except (MethodError, UserError, Diverged):
        raise
    except Exception as e:
        name = getattr(function, "__qualname__", str(function))
        raise MethodError(f"{name} raised {type(e).__name__}: {e} [round {t}, {who}; {_shapes(shared)}]") from e


def _shapes(shared: Tree) -> str:
    """The first few entries of what was broadcast, with their shapes."""
    return "shared: " + ", ".join(f"{k} {list(v.shape)}" for k, v in _named(shared)[:8])


def described(e: BaseException, function: str, jobs: list[Job]) -> MethodError:
    """The error with its place: function, round, clients, shapes of what was sent and asked."""
    c = jobs[0].client
    clients = ", ".join(str(j.client.id) for j in jobs[:5]) + (", ..." if len(jobs) > 5 else "")
    return MethodError(
        f"{function} raised {type(e).__name__}: {e} "
        f"[round {c.round}, client {clients}, {c.n} samples; {_shapes(jobs[0].shared)}]"
    )


def _named(tree: Any, head: str = "") -> list[tuple[str, Tensor]]:
    if isinstance(tree, Tensor):
        return [(head, tree)]
    items = tree.items() if isinstance(tree, dict) else tree._asdict().items() if hasattr(tree, "_asdict") else ()
    return [pair for k, v in items for pair in _named(v, f"{head}/{k}" if head else str(k))]


__all__ = [
    "Batch",
    "Engine",
    "Job",
    "MethodError",
    "Plan",
    "add",
    "described",
    "kind",
    "located",
    "moving",
    "plan",
    "split_loss",
]
