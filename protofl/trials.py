"""Small made-up federations on which methods are tried, by `protofl verify` and by the tests.

A `Scene` is data, network and protocol; a `Trial` a method at work there; `Watched` a trial that looks over the
method's shoulder and notes what it must not do.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from . import registry
from .clients import Clients, Memory
from .data.augment import Pipeline
from .data.partition import partition
from .engine.base import Job, split_loss
from .engine.loop import Loop
from .federation import Federation, Round
from .handles import RunClient, RunTask
from .method import Batch, Collect, Exchange, Method, Survey
from .nets import Net, build
from .nets.base import Entry, Options, affine, declare_conv, declare_linear, declare_norm
from .protocol import Protocol
from .tree import Rows, Tree, tensors

CLASSES, SHAPE = 5, (8, 8, 3)
SIZES = (23, 5, 16, 9, 31, 12, 18)
TOLERANCE = 1e-10
"""How far two ways to the same float64 number may be apart."""

AWKWARD: Mapping[str, Any] = dict(
    rounds=3, local_epochs=2, batch_size=8, client_lr=0.05, lr_decay_per_round=0.9, momentum=0.9, weight_decay=1e-2,
    grad_clip_norm=1.0, participation=0.6, seed=1, partition_min_size=1, precision="fp64", drop_last=False,
)  # fmt: skip
"""A protocol with everything switched on that a method may stumble over."""


class TrialNet(Net):
    """conv, BatchNorm (norm=False: none), ReLU, pool; linear; projection; head."""

    def __init__(self, projection: int | None = 7, z_normalize: bool = False, norm: bool = True) -> None:
        self.norm = norm
        super().__init__("trial", 10, Options(CLASSES, SHAPE, projection, True, z_normalize))

    def encoder_table(self) -> list[Entry]:
        out = declare_conv("encoder.conv1", 3, 6, 3)
        out += declare_norm("encoder.norm1", 6, True) if self.norm else []
        return out + declare_linear("encoder.fc", 24, 10)

    def _encode(self, w: Tree, x: Tensor, relu: bool) -> Tensor:
        x = F.conv2d(x, w["encoder.conv1.weight"], w["encoder.conv1.bias"], padding=1)
        x = self.batch_norm(w, "encoder.norm1", x) if self.norm else x
        x = F.relu(F.max_pool2d(x, 4))
        return F.relu(affine(x.flatten(1), w["encoder.fc.weight"], w["encoder.fc.bias"]))


@functools.cache
def images() -> tuple[Tensor, Tensor, list[Tensor]]:
    """x uint8 [n, 8, 8, 3], y [n], ragged parts; client 1 has one class, client 3 two, class 4 is rare."""
    rs = np.random.RandomState(3)
    y = torch.from_numpy(rs.randint(0, CLASSES, sum(SIZES)))
    ends = np.cumsum((0, *SIZES))
    parts = [torch.arange(a, b) for a, b in zip(ends, ends[1:])]
    y[parts[1]] = 0
    y[parts[3]] = 1 + y[parts[3]] % 2
    centre = rs.uniform(60, 190, (CLASSES, *SHAPE))
    x = np.clip(centre[y.numpy()] + rs.normal(0, 50, (len(y), *SHAPE)), 0, 255).astype(np.uint8)
    return torch.from_numpy(x), y, parts


def transform(
    *augment: str, shape: tuple[int, int, int] = SHAPE, dtype: torch.dtype = torch.float64
) -> Pipeline:  # fmt: skip
    """Images to floats."""
    return Pipeline(augment, (0.5,), (0.25,), 255.0, shape, dtype)


# ---- scenes ---------------------------------------------------------------------------------------------------------


class Scene(NamedTuple):
    """Where a trial takes place: data by client, a network, protocol fields, and who takes part in which round."""

    net: Net
    x: Tensor
    y: Tensor
    parts: list[Tensor]
    pipeline: Pipeline
    fields: Mapping[str, Any]
    draws: list[list[int]] | None = None

    def protocol(self, **fields: Any) -> Protocol:
        """The protocol of a trial here."""
        return Protocol(**{**self.fields, "clients": len(self.parts), **fields})


def awkward() -> Scene:
    """Ragged clients, BatchNorm, augmentation, momentum, decay, clip; clients that come late and pause."""
    draws = [[0, 1, 2, 4, 5], [6, 1, 3, 4], [0, 1, 4, 5]]
    return Scene(TrialNet(), *images(), transform("hflip", "rotate15"), AWKWARD, draws)


def billed() -> Scene:
    """The same without BatchNorm, in two rounds: who takes part in the second has taken part before."""
    draws = [list(range(len(SIZES))), [0, 1, 4, 5]]
    return awkward()._replace(net=TrialNet(norm=False), fields={**AWKWARD, "rounds": 2}, draws=draws)


def skewed() -> Scene:
    """One client a round: of a single sample, without any, and six of a split at beta 0.05; nobody has class 4."""
    x, y, _ = images()
    mine = torch.arange(len(y))[y != CLASSES - 1]
    split = partition(y[mine].numpy(), scheme="dir_class", clients=6, beta=0.05, seed=0, classes=CLASSES, min_size=1)
    parts = [mine[torch.from_numpy(i.astype(np.int64))] for i in split.indices]
    first, cut = parts[0][:1], parts[0][1:]
    fields = {**AWKWARD, "rounds": 6, "local_epochs": 1, "participation": 0.1, "client_lr": 0.01, "seed": 3}
    draws = [[0], [1], [0], [3], [5], [6]]
    return Scene(TrialNet(), x, y, [first, cut, *parts[1:], cut[:0]], transform("hflip"), fields, draws)


def separable() -> Scene:
    """Four clouds of points far apart, of which each of four clients has two, and few points of the others."""
    y = torch.arange(240) % 4
    centre = torch.tensor([[60.0, 60], [60, 200], [200, 60], [200, 200]])
    spread = 12 * torch.randn(240, 2, generator=torch.Generator().manual_seed(0))
    x = (centre[y] + spread).clamp(0, 255).round().to(torch.uint8).view(240, 1, 1, 2)
    pairs = [(0, 1), (1, 2), (2, 3), (3, 0)]
    parts = []
    for k, (a, b) in enumerate(pairs):
        mine = (y == a) | (y == b)
        parts.append(torch.cat([mine.nonzero()[:: 3 + k % 2 * 2, 0], (~mine).nonzero()[k::13, 0]]))
    net = build("mlp", classes=4, shape=(1, 1, 2), projection_dim=8)
    fields = dict(rounds=25, local_epochs=4, batch_size=16, client_lr=0.05, momentum=0.9, weight_decay=0.0,
                  drop_last=False, precision="fp64", seed=0)  # fmt: skip
    return Scene(net, x, y, parts, transform(shape=(1, 1, 2)), fields)


# ---- a federation at work -------------------------------------------------------------------------------------------


@contextmanager
def undisturbed() -> Iterator[None]:
    """The global generators are afterwards what they were before."""
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        torch.set_rng_state(kept[2])


def begin(salt: int) -> None:
    """Set the global generators, which no method may read."""
    random.seed(salt)
    np.random.seed(salt)
    torch.manual_seed(salt)


class Trial(Federation):
    """A method at work in a scene; remembers its rounds, and its state after each.

    salt: what the global generators begin every exchange with. Raises `UserError` where the method refuses the scene.
    """

    def __init__(
        self, method: Method, scene: Scene, *, engine: str = "loop", salt: int = 0, memory: Memory | None = None,
        **fields: Any,
    ) -> None:  # fmt: skip
        asked = scene.protocol(engine=engine, **fields)
        adapted = method.adapt(asked)
        registry.check(method, asked, adapted, scene.net)
        as_asked = (adapted.rounds, adapted.participation) == (asked.rounds, asked.participation)
        self.draws = scene.draws if as_asked else None
        self.salt = salt
        self.rounds: list[Round] = []
        self.states: list[Tree] = []
        self.mets: list[list[int]] = []
        begin(salt)
        super().__init__(
            method, RunTask(scene.net, scene.x, scene.y, scene.parts, adapted, pipeline=scene.pipeline), memory
        )

    def drawn(self, t: int) -> list[int]:
        return super().drawn(t) if self.draws is None else self.draws[t]

    def exchange(self, exchange: Exchange, t: int, ids: list[int] | None = None) -> Round:
        begin(1000 * self.salt + t + 2)
        played = super().exchange(exchange, t, ids)
        self.rounds.append(played)
        self.states.append(copied(self.state()))
        self.mets.append(sorted(self.met))
        return played

    def run(self, start: int = 0) -> Trial:
        """All rounds from `start`, with what stands before the first and after the last."""
        if not start:
            self.introduce()
        for t in range(start, self.protocol.rounds):
            self.play(t)
        self.conclude()
        return self

    def state(self) -> Tree:
        """Everything that later rounds hang on."""
        kept = {str(i): self.memory.get(i) or Tree() for i in range(self.task.clients)}
        return Tree(shared=self.shared, private=self.private, clients=Tree(kept))

    def trained(self) -> list[Round]:
        """The rounds, without what stands before the first and after the last."""
        return [r for r in self.rounds if 0 <= r.t < self.protocol.rounds]

    @property
    def personalised(self) -> bool:
        """Whether the method has personal models (it need not)."""
        return type(self.method).personal_model is not Method.personal_model

    def scores(self, limit: int = 20) -> Tree:
        """What the models of the last round say of the first images: Tree(global model, client 3, ...)."""
        models: dict[str, Any] = {"global model": self.global_model()}
        if self.personalised:
            models |= {f"client {i}": model for i, model in self.personal(self.trained()[-1])}
        assert self.task.pipeline is not None
        x = self.task.x[:limit] if self.task.transform is None else self.task.pipeline.test(self.task.x[:limit])
        out, net = Tree(), self.task.net.bound("eval")
        with torch.no_grad():
            for name, model in models.items():
                if model is not None:
                    said = model.scores(net, model.tree, x)
                    named = said if isinstance(said, dict) else {"network": said}
                    out[name] = Tree({k: v for k, v in named.items() if v is not None})
        return out


# ---- trees ----------------------------------------------------------------------------------------------------------


def leaves(tree: Any, head: str = "") -> Iterator[tuple[str, Any]]:
    """Everything that a tree holds, with its place."""
    if isinstance(tree, dict):
        inside: Any = tree.items()
    elif hasattr(tree, "_asdict"):
        inside = tree._asdict().items()
    elif isinstance(tree, list | tuple):
        inside = enumerate(tree)
    else:
        yield head, tree
        return
    for name, one in inside:
        yield from leaves(one, f"{head}/{name}" if head else str(name))


def copied(tree: Any) -> Any:
    """The same with tensors of its own."""
    return pytree.tree_map(lambda v: v.detach().clone() if isinstance(v, Tensor) else v, tree)


def apart(a: Any, b: Any) -> tuple[float, str]:
    """Largest difference between two trees, in units of the larger of 1 and the value, and its place.

    Infinite where the trees differ in kind; equal infinities, and NaN on both sides, are no difference.
    """
    left, right = dict(leaves(a)), dict(leaves(b))
    for path in (*left, *right):
        if (path in left) != (path in right):
            return math.inf, f"{path}, which only one of them has"
    found = [(_apart(p, right[path]), path) for path, p in left.items()]
    return max(found, key=lambda one: one[0], default=(0.0, ""))


def _apart(p: Any, q: Any) -> float:
    if not (isinstance(p, Tensor) and isinstance(q, Tensor)):
        return 0.0 if type(p) is type(q) and p == q else math.inf
    if p.shape != q.shape or p.dtype != q.dtype:
        return math.inf
    if not p.numel() or torch.equal(p, q):
        return 0.0
    x, y = p.detach().double(), q.detach().double()
    same = (x == y) | (x.isnan() & y.isnan())
    distance = torch.where(same, 0.0, (x - y).abs() / x.abs().clamp(1, 1e300))
    return float(distance.nan_to_num(math.inf).max())


# ---- watched trials -------------------------------------------------------------------------------------------------

FUNCTIONS: Mapping[str, tuple[str, ...]] = {
    "loss": ("net", "w", "batch", "view"),
    "tally": ("net", "w", "batch", "view"),
    "fn": ("net", "w", "batch", "view"),
    "frozen": ("net", "batch", "view"),
    "correct": ("grads", "w", "view"),
    "after_clip": ("grads", "w", "view"),
    "after_step": ("w", "before", "view"),
}
"""Functions of a request, with what they are given."""

Fault = Callable[[str, str], None]
"""(check, line): something that a watched run saw."""


class Held:
    """What something was, to be asked later whether it still is."""

    def __init__(self, things: Mapping[str, Any], copy: bool = True) -> None:
        self.things = things
        self.seen = {path: v for path, v in leaves(things) if isinstance(v, Tensor)}
        self.versions = {path: v._version for path, v in self.seen.items()}
        self.copies = copied(self.seen) if copy else {}

    def changed(self) -> str:
        """The place of the first change; empty if there is none."""
        now = {path: v for path, v in leaves(self.things) if isinstance(v, Tensor)}
        for path in (*self.seen, *now):
            if now.get(path) is not self.seen.get(path):
                return path
        for path, v in self.seen.items():
            if v._version != self.versions[path] or (path in self.copies and apart(v, self.copies[path])[0]):
                return path
        return ""


def shown(fn: Any) -> str:
    """A function's name."""
    return str(getattr(fn, "__qualname__", None) or type(fn).__name__)


def place(client: RunClient) -> str:
    """Round and client in words."""
    return f"[round {client.round}, client {client.id}, {client.n} samples]"


def misplaced(tree: Any, path: str) -> str:
    """What a tree must not hold; empty if it can be counted, stored and read back."""
    if not isinstance(tree, Tree):
        return f"{path} is {type(tree).__name__}, not a Tree"
    for name, v in tree.items():
        at = f"{path}/{name}"
        if not isinstance(name, str) or not name or "/" in name or "::" in name:
            return f"{path} has the name {name!r}: names are texts without / and ::"
        if isinstance(v, Rows):
            if not (isinstance(v.values, Tensor) and isinstance(v.has, Tensor)) or v.has.dtype != torch.bool \
                    or v.has.shape != v.values.shape[:1]:  # fmt: skip
                return f"{at}: Rows are values [K, ...] and has [K] bool"
        elif not isinstance(v, Tensor):
            if not isinstance(v, Tree):
                return f"{at} is {type(v).__name__}: trees hold tensors, Rows and trees"
            if wrong := misplaced(v, at):
                return wrong
        if any(one.requires_grad for one in tensors(v)):
            return f"{at} keeps the graph of a gradient: detach it"
    return ""


class Watched(Trial):
    """A trial in the loop that looks over the method's shoulder.

    faults: what was seen, by the check that it belongs to; error: what ended the run early.
    """

    def __init__(self, method: Method, scene: Scene) -> None:
        self.faults: dict[str, list[str]] = {}
        self.error: Exception | None = None
        self.given: list[tuple[Job, Held]] = []
        super().__init__(method, scene, salt=1)
        self.clients = WatchedClients(method, self.task, self)
        for name, tree in (("shared", self.shared), ("private", self.private)):
            self.hold(misplaced(tree, name), "[start]")
        try:
            self.run()
        except Exception as e:
            self.error = e

    def fault(self, of: str, line: str) -> None:
        """Note what was seen."""
        self.faults.setdefault(of, []).append(line)

    def hold(self, wrong: str, where: str) -> None:
        """Note a tree that cannot be stored."""
        if wrong:
            self.fault("trees", f"{wrong} {where}")

    def exchange(self, exchange: Exchange, t: int, ids: list[int] | None = None) -> Any:
        name = shown(exchange.aggregate)

        @functools.wraps(exchange.aggregate)
        def aggregate(server: Any, shared: Tree, private: Tree, uploads: list[Tree]) -> tuple[Tree, Tree]:
            where, train = f"[round {t}, server]", server.train

            def watched_train(request: Any, *a: Any, **k: Any) -> Any:
                return train(watched(request, self.fault, where), *a, **k)

            server.train = watched_train
            sent = {f"upload of client {i}": u for i, u in zip(server.ids, uploads)}
            held = Held({"shared": shared, "private": private, **sent})
            out = exchange.aggregate(server, shared, private, uploads)
            if wrong := held.changed():
                self.fault("aggregate", f"{name} changed {wrong} in place {where}")
            for what, tree in zip(("shared", "private"), out if isinstance(out, tuple) else ()):
                self.hold(misplaced(tree, f"{name}: {what}"), where)
            return out

        self.given.clear()
        played = super().exchange(Exchange(exchange.program, aggregate), t, ids)
        for job, held in self.given:
            if wrong := held.changed():
                self.fault("functions", f"{shown(exchange.program)} changed {wrong} in place {place(job.client)}")
        return played


class WatchedClients(Clients):
    """Clients in the loop, whose programs and functions of a batch are watched."""

    def __init__(self, method: Method, task: RunTask, trial: Watched) -> None:
        super().__init__(method, task)
        self.engine, self.trial = WatchedLoop(task, trial.fault), trial

    def jobs(self, *given: Any) -> list[Job]:
        made = super().jobs(*given)
        for job in made:
            self.trial.hold(misplaced(job.own, "what a client has kept"), place(job.client))
            self.trial.given.append((job, Held({"shared": job.shared, "own": job.own})))
        return made


class WatchedLoop(Loop):
    """The loop, whose functions of a batch are watched."""

    def __init__(self, task: RunTask, fault: Fault) -> None:
        super().__init__(task)
        self.fault = fault

    def reset(self) -> None:
        super().reset()
        self.first: dict[tuple[Any, ...], Any] = {}  # the functions that the first client of an exchange asked for

    def finished(self, jobs: list[Job]) -> list[tuple[Tree, Tree, Tree]]:
        out = super().finished(jobs)
        for job, told in zip(jobs, out):
            for what, tree in zip(("the upload", "what it keeps", "what it shows"), told):
                if wrong := misplaced(tree, what):
                    self.fault("trees", f"{shown(job.program)}: {wrong} {place(job.client)}")
        return out

    def answer(self, jobs: list[Job]) -> list[Any]:
        (job,) = jobs
        asked, where = job.request, place(job.client)
        for name in FUNCTIONS:
            fn = getattr(asked, name, None)
            known = self.first.setdefault((type(asked), name, shown(fn)), fn)
            if fn is not None and fn != known:
                self.fault("requests", f"{name}={shown(fn)} is made anew for every client {where}")
        held = Held({"request": [getattr(asked, n) for n in ("start", "w", "const") if hasattr(asked, n)]})
        job.request = watched(asked, self.fault, where)
        try:
            return super().answer(jobs)
        finally:
            job.request = asked
            if wrong := held.changed():
                self.fault("functions", f"{shown(getattr(asked, 'loss', None) or asked.fn)} changed {wrong} {where}")


def watched(request: Any, fault: Fault, where: str) -> Any:
    """The same request, whose functions are looked at as they are called."""
    there = {name: fn for name in FUNCTIONS if (fn := getattr(request, name, None)) is not None}
    return dataclasses.replace(request, **{k: WatchedFunction(fn, k, request, fault, where) for k, fn in there.items()})


class WatchedFunction:
    """A function of a request that is looked at as it is called; of its first batch with padding and in halves too."""

    def __init__(self, fn: Callable[..., Any], role: str, request: Any, fault: Fault, where: str) -> None:
        self.fn, self.role, self.request, self.fault, self.where = fn, role, request, fault, where
        self.called = False

    def __call__(self, *given: Any) -> Any:
        named = dict(zip(FUNCTIONS[self.role], given))
        held = Held({k: v for k, v in named.items() if k != "net"}, copy=not self.called)
        out = self.fn(*given)
        if wrong := held.changed():
            self.note("functions", f"changed {wrong} in place")
        elif not self.called and isinstance(getattr(named.get("batch"), "x", None), Tensor):
            with torch.no_grad():
                self.note("padding", self.padded(named, out))
                if self.role == "tally" or isinstance(self.request, Survey):
                    self.note("sums", self.halved(named))
        self.called = True
        return out

    def note(self, of: str, wrong: str) -> None:
        """Note what is wrong, if anything is."""
        if wrong:
            self.fault(of, f"{shown(self.fn)} {wrong} {self.where}")

    def padded(self, named: dict[str, Any], out: Any, extra: int = 3) -> str:
        """Rows that `mask` switches off must not be seen."""
        batch, net = named["batch"], named["net"]
        n = len(batch.y)
        at = torch.cat([torch.arange(n), torch.zeros(extra, dtype=torch.long)])
        mask = torch.cat([batch.mask, batch.mask.new_zeros(extra)])
        wider = {**named, "net": net.bound(net.mode, mask, net.moves), "batch": self.picked(batch, at, mask)}
        try:
            again = self.fn(*wider.values())
        except Exception as e:
            return f"raises {type(e).__name__} where rows of padding are there: {e}"
        if self.role == "frozen" or isinstance(self.request, Collect):
            again = rows_at(again, torch.arange(n))
        pair = (
            [Tree(loss=loss) | terms for loss, terms in map(split_loss, (out, again))]
            if self.role == "loss"
            else (out, again)
        )
        difference, path = apart(*pair)
        return f"is moved by {difference:.1e} by rows of padding, at {path}" if difference > TOLERANCE else ""

    def halved(self, named: dict[str, Any]) -> str:
        """The sums of two halves are those of the whole (in eval mode, where rows do not see each other)."""
        batch, net = named["batch"], named["net"]
        n = len(batch.y)

        def sums(at: Tensor) -> Any:
            part = self.picked(batch, at, batch.mask[at])
            return self.fn(*{**named, "net": net.bound("eval"), "batch": part}.values())

        if n < 2:
            return ""
        whole, left, right = sums(torch.arange(n)), sums(torch.arange(n // 2)), sums(torch.arange(n // 2, n))
        difference, path = apart(whole, pytree.tree_map(torch.add, left, right))
        return f"is {difference:.1e} off the sum over two halves, at {path}" if difference > TOLERANCE else ""

    def picked(self, batch: Batch, at: Tensor, mask: Tensor) -> Batch:
        """The rows at `at` of a batch."""
        noise = getattr(self.request, "noise", None)
        return batch._replace(
            x=batch.x[at], y=batch.y[at], mask=mask, frozen=rows_at(batch.frozen, at),
            noise=batch.noise[at] if noise is not None and noise.per == "row" else batch.noise,
        )  # fmt: skip


def rows_at(tree: Any, at: Tensor) -> Any:
    """Rows of every tensor."""
    return pytree.tree_map(lambda v: v[at] if isinstance(v, Tensor) else v, tree)
