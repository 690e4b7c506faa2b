"""Many clients in one call: programs in lockstep, equal requests stacked and vmapped, ragged clients masked.

Clients of a crew are sorted by number of steps; those that are done fall off the end, so that no work goes into
finished ones. Short batches are padded with rows that `mask` switches off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap
from torch.nn.utils.rnn import pad_sequence
from torch.utils import _pytree as pytree

from ..method import Batch, Collect, Group, Survey, Train, View
from ..tree import Tree, nbytes, same
from .base import Engine, Job, Plan, moving, split_loss, trains

if TYPE_CHECKING:
    from ..handles import RunTask

LIGHT = 2**18
"""Bytes of weights below which a step's calls cost more than its arithmetic: four times as many clients share them."""

BatchCall = Callable[[Tree, Batch, int], tuple[Any, Tree]]
"""(w, batch, real rows of the live clients) -> what a function says, what the layers remember."""


class Crew:
    """Jobs with equal requests, longest first, stacked; `narrow(live)` forgets those that are done."""

    def __init__(self, engine: Batched, jobs: list[Job], plans: list[Plan]) -> None:
        self.jobs, self.request = jobs, jobs[0].request
        dtype, device = engine.task.dtype, engine.task.device
        steps = [len(p.size) for p in plans]
        wide = max(p.rows.shape[1] for p in plans)

        def stacked(parts: list[Tensor], per_row: bool) -> Tensor:
            """[steps, clients, (B,) ...], padded with 0."""
            if per_row and any(t.shape[1] < wide for t in parts):
                parts = [F.pad(t, (0, 0) * (t.dim() - 2) + (0, wide - t.shape[1])) for t in parts]
            return pad_sequence(parts).contiguous()

        self.size = stacked([torch.tensor(p.size) for p in plans], False)  # real rows; 0: the client is done
        self.mask = (torch.arange(wide) < self.size[:, :, None]).to(device, dtype)
        self.rows = stacked([p.rows for p in plans], True)
        self.index = stacked([job.client.index[p.rows] for job, p in zip(jobs, plans)], True)
        epoch = stacked([torch.tensor(p.epoch, dtype=dtype) for p in plans], False)
        self.in_last_epoch = epoch == torch.tensor([p.epoch[-1] for p in plans])
        self.epoch, self.step = epoch.to(device), torch.arange(len(epoch), dtype=dtype).to(device)
        self.augment = self._numbers([p.augment for p in plans], stacked, True)
        per_row = bool(getattr(self.request, "noise", None) and self.request.noise.per == "row")
        self.noise = self._numbers([p.noise for p in plans], stacked, per_row)
        self.noise_per_row = per_row
        self.live_at = (self.size > 0).sum(1).tolist()
        self.wide_at = self.size.amax(1).tolist()
        self.real_at = self.size.sum(1).tolist()
        views = [engine.view(job, n, p.epoch[-1] + 1) for job, n, p in zip(jobs, steps, plans)]
        self.view_parts = StackedView(views)
        self.stacked = self.view_parts.stacked  # what differs between the live clients
        self.w = Tree()  # the weights of a pass, which mode "train" lets remember

    @staticmethod
    def _numbers(parts: list[Tensor | None], stacked: Callable[..., Tensor], per_row: bool) -> Tensor | None:
        present = [t for t in parts if t is not None]
        return stacked(present, per_row) if present else None

    def narrow(self, live: int) -> None:
        """Only the first `live` clients have steps left."""
        self.stacked = [v[:live] for v in self.view_parts.stacked]


class StackedView:
    """The views of a crew as one: `stacked` has what differs between clients, `of` puts it (or a share) in place.

    Fields that are the same object for all clients are never taken apart: they are most of a view, and this runs at
    every step.
    """

    def __init__(self, views: list[View]) -> None:
        self.whole = views[0]
        self.stacked: list[Tensor] = []
        self.parts: list[tuple[str, Any, list[Any]]] = []  # field, its structure, its leaves (None: stacked)
        made: dict[tuple[int, ...], Tensor] = {}  # what stands in two places is stacked once
        for name in View._fields:
            values = [getattr(v, name) for v in views]
            if same(values) or not any(isinstance(v, Tensor) for v in pytree.tree_leaves(values[0])):
                continue
            flat = zip(*map(pytree.tree_leaves, values))
            leaves = [self._leaf(one, made) for one in flat]
            if any(leaf is None for leaf in leaves):
                self.parts.append((name, pytree.tree_structure(values[0]), leaves))

    def _leaf(self, values: tuple[Any, ...], made: dict[tuple[int, ...], Tensor]) -> Any:
        """The common leaf of all clients, or None for one that was stacked."""
        if same(list(values)) or not isinstance(values[0], Tensor):
            return values[0]
        key = tuple(map(id, values))
        if key not in made:
            made[key] = torch.stack(values)
        self.stacked.append(made[key])
        return None

    def of(self, given: Sequence[Tensor]) -> View:
        """The view with `given` in the places of what was stacked, in its order."""
        rest = iter(given)
        changes = {}
        for name, spec, leaves in self.parts:
            placed = [next(rest) if leaf is None else leaf for leaf in leaves]
            changes[name] = placed[0] if spec.is_leaf() else pytree.tree_unflatten(placed, spec)
        return self.whole._replace(**changes)  # type: ignore[arg-type]


def own_copy(trees: list[Tree]) -> Tree:
    """Stacked tensors, in memory that may be written."""
    k = len(trees)

    def one(name: str) -> Tensor:
        values = [t[name] for t in trees]
        return values[0].expand(k, *values[0].shape).clone() if same(values) else torch.stack(values)

    return Tree({n: one(n) for n in trees[0]})


def live_part(w: Tree, momenta: Tree, names: list[str], live: int) -> tuple[Tree, Tree]:
    """Views of the first `live` clients: weights, those in `names` as leaves for autograd, and momenta.

    Writing to them writes to the whole, so that they are made anew only where a client is done.
    """
    now = Tree({k: v[:live].requires_grad_() if k in names else v[:live] for k, v in w.items()})
    return now, Tree({k: v[:live] for k, v in momenta.items()})


def unstack(tree: Any, k: int, lasting: bool = True) -> list[Any]:
    """One tree per client, each with memory of its own where it is lasting."""
    leaves, spec = pytree.tree_flatten(tree)
    if not leaves:
        return [tree] * k
    parts = zip(*[t.unbind(0) for t in leaves])
    return [pytree.tree_unflatten([v.clone() for v in values] if lasting else list(values), spec) for values in parts]


def column(values: Tensor, like: Tensor) -> Tensor:
    """[clients] -> [clients, 1, ...] for a tensor [clients, ...]."""
    return values.view(-1, *[1] * (like.dim() - 1))


class Batched(Engine):
    """vmap over the clients of a crew."""

    def __init__(self, task: RunTask) -> None:
        super().__init__(task)
        self.crew = self.protocol.crew * (4 if nbytes(task.initial) < LIGHT else 1)

    def answer(self, jobs: list[Job]) -> list[Any]:
        by_type: dict[type, Callable[[list[Job]], list[Any]]] = {
            Train: self.train, Survey: self.survey, Collect: self.collect,
        }  # fmt: skip
        order = sorted(range(len(jobs)), key=lambda i: -self.length(jobs[i]))
        answers = by_type[type(jobs[0].request)]([jobs[i] for i in order])
        back: list[Any] = [None] * len(jobs)
        for i, a in zip(order, answers):
            back[i] = a
        return back

    def length(self, job: Job) -> int:
        """Batches of a request."""
        r, client = job.request, job.client
        return client.steps(r.epochs) if isinstance(r, Train) else client.n

    def lift(self, fn: Callable[..., Any], mode: Any, crew: Crew, moves: bool = True) -> BatchCall:
        """fn(net, w, batch, view) -> the same for all live clients, with what the net's layers remember."""

        def call(w: Tree, batch: Batch, rows: int) -> tuple[Any, Tree]:
            passes: list[bool] = []
            names, k = tuple(w), len(w)
            frozen, spec = ([], None) if batch.frozen is None else pytree.tree_flatten(batch.frozen)
            noise = [] if batch.noise is None else [batch.noise]
            at = k + 4 + len(frozen)

            def one(*t: Tensor) -> tuple[Any, Tree]:  # flat lists: vmap's own handling of nested ones is slow
                x, y, mask, epoch = t[k : k + 4]
                told = pytree.tree_unflatten(list(t[k + 4 : at]), spec) if spec else None
                b = Batch(x, y, mask, told, t[at] if noise else None, epoch, batch.step)
                net = self.net.bound(mode, mask, moves)
                out = fn(net, Tree(zip(names, t)), b, crew.view_parts.of(t[at + len(noise) :]))
                passes.extend(net.passes)
                return out, net.updates

            given = (*w.values(), batch.x, batch.y, batch.mask, batch.epoch, *frozen, *noise, *crew.stacked)
            out: tuple[Any, Tree] = vmap(one)(*given)
            self.count(passes, rows)
            return out

        return call

    def lift_trees(self, fn: Callable[..., Tree], crew: Crew, *trees: Tree) -> Tree:
        """fn(tree, ..., view) for all live clients."""
        names = [tuple(t) for t in trees]

        def one(*t: Tensor) -> Tree:
            at, parts = 0, []
            for keys in names:
                parts.append(Tree(zip(keys, t[at : at + len(keys)])))
                at += len(keys)
            return fn(*parts, crew.view_parts.of(t[at:]))

        return vmap(one)(*[v for t in trees for v in t.values()], *crew.stacked)  # type: ignore[no-any-return]

    def batch(self, crew: Crew, s: int, live: int, full: Any = None) -> Batch:
        """Step s of the live clients; `full`: frozen features [clients, samples, ...]."""
        wide = crew.wide_at[s]
        u = None if crew.augment is None else crew.augment[s, :live, :wide]
        x, y = self.task.rows(crew.index[s, :live, :wide], u)
        frozen = None
        if full is not None:
            rows = crew.rows[s, :live, :wide]
            who = torch.arange(live, device=rows.device)[:, None]
            frozen = pytree.tree_map(lambda v: v[who, rows], full)
        noise = crew.noise
        if noise is not None:
            noise = noise[s, :live, :wide] if crew.noise_per_row else noise[s, :live]
        return Batch(x, y, crew.mask[s, :live, :wide], frozen, noise, crew.epoch[s, :live], crew.step[s])

    def train(self, jobs: list[Job]) -> list[Any]:
        r = jobs[0].request
        plans = [self.training_plan(j.client, j.request) for j in jobs]
        crew = Crew(self, jobs, plans)
        w = own_copy([j.request.start for j in jobs])
        groups = moving(r.groups, list(self.net.trainable(w)))
        names = [n for _, mine in groups for n in mine]
        momenta = self.start_momenta(jobs, names, w)
        objective = self.lift(r.loss, r.mode, crew, trains(names, self.net))
        frozen = self.lift(lambda net, _, b, v: r.frozen(net, b, v), r.frozen_mode, crew) if r.frozen else None
        full = self.per_sample(crew, frozen, w) if frozen and r.frozen_mode == "eval" and crew.augment is None else None
        sums, terms, live = None, None, len(jobs)
        now, moved = live_part(w, momenta, names, live)
        for s, alive in enumerate(crew.live_at):
            if alive < live:
                live = alive
                crew.narrow(live)
                now, moved = live_part(w, momenta, names, live)
            with torch.no_grad():
                b = self.batch(crew, s, live, full)
                real = crew.real_at[s]
                if frozen and full is None:
                    b = b._replace(frozen=frozen(now, b, real)[0])
                if r.tally:
                    sums = self.tally(r, crew, s, now, b, sums)
            returned, updates = objective(now, b, real)
            loss, parts = split_loss(returned)
            grads = torch.autograd.grad(loss.sum(), [now[k] for k in names], materialize_grads=True) if names else ()
            with torch.no_grad():
                seen = Tree(loss=loss.detach()) | parts.map(Tensor.detach)
                terms = self.gather(terms, seen, None, len(jobs))
                if names:
                    self.step(r, groups, now, Tree(zip(names, grads)), moved, crew)
                for k, v in updates.items():
                    now[k].copy_(v)
        left = unstack(momenta, len(jobs), self.protocol.optimizer_reset == "never")
        for job, out, kept, own_terms in zip(jobs, plans, left, unstack(terms, len(jobs))):
            self.keep_momenta(job, kept)
            job.terms = job.terms | (own_terms / len(out.size) if r.recorded else Tree())
        weights = unstack(w, len(jobs))
        return list(zip(weights, unstack(sums, len(jobs)))) if r.tally else weights

    def start_momenta(self, jobs: list[Job], names: list[str], w: Tree) -> Tree:
        """SGD's buffers, stacked: zero, or as they were left."""
        momenta = Tree({k: torch.zeros_like(w[k]) for k in names})
        for i, job in enumerate(jobs):
            for k, v in self.kept_momenta(job).items():
                if k in momenta:
                    momenta[k][i] = v
        return momenta

    def tally(self, r: Train, crew: Crew, s: int, w: Tree, b: Batch, sums: Any) -> Any:
        """Add what is gathered on the way, of those clients for which this step counts."""
        counts = crew.in_last_epoch[s, : len(b.y)] | (r.tally_epochs == "all")
        if not counts.any():
            return sums
        said = self.lift(r.tally, "train_frozen", crew)(w, b, int(crew.size[s, : len(counts)][counts].sum()))[0]  # type: ignore[arg-type]
        return self.gather(sums, said, counts.to(self.task.device), len(crew.jobs))

    def gather(self, total: Any, new: Any, counts: Tensor | None, k: int) -> Any:
        """Add the sums of those live clients for which this step counts (None: all)."""
        if total is None:
            total = pytree.tree_map(lambda v: v.new_zeros(k, *v.shape[1:]), new)

        def put(t: Tensor, v: Tensor) -> Tensor:
            t[: len(v)] += v if counts is None else torch.where(column(counts, v), v, torch.zeros_like(v))
            return t

        return pytree.tree_map(put, total, new)

    def step(
        self,
        r: Train,
        groups: list[tuple[Group, list[str]]],
        w: Tree,
        g: Tree,
        momenta: Tree,
        crew: Crew,
    ) -> None:
        """One SGD step of all live clients, in place on w (protocol 4.1)."""
        client = crew.jobs[0].client
        if r.correct:
            g = self.lift_trees(r.correct, crew, g, w.like(g))
        for limit, mine in self.clips(groups, client):
            squares = torch.stack([g[k].flatten(1).square().sum(1) for k in mine])
            factor = (limit / (squares.sum(0).sqrt() + 1e-6)).clamp_max(1)
            g = g | {k: g[k] * column(factor, g[k]) for k in mine}
        if r.after_clip:
            g = self.lift_trees(r.after_clip, crew, g, w.like(g))
        before = Tree({k: w[k].detach().clone() for k in g}) if r.after_step else Tree()
        for group, mine in groups:
            lr, rho, decay, _ = self.setting(group, client)
            p = [w[k] for k in mine]
            d = [g[k].contiguous() for k in mine]  # the fused step reads memory, not strides
            m = [momenta[k] for k in mine]
            torch._fused_sgd_(
                p, d, m if rho else [], weight_decay=decay, momentum=rho, lr=lr, dampening=0.0,
                nesterov=False, maximize=False, is_first_step=False,
            )  # fmt: skip
        if r.after_step:
            for k, v in self.lift_trees(r.after_step, crew, w.like(g), before).items():
                w[k].copy_(v)

    def per_sample(self, crew: Crew, fn: BatchCall, w: Tree) -> Any:
        """What constant models say of every sample of every client: [clients, samples, ...]."""
        with torch.no_grad():
            n = torch.tensor([j.client.n for j in crew.jobs])
            index = pad_sequence([j.client.index for j in crew.jobs], batch_first=True)
            x, y = self.task.rows(index, None)
            mask = (torch.arange(index.shape[1])[None] < n[:, None]).to(self.task.device, self.task.dtype)
            zero = self.task.scalar(0)
            return fn(w, Batch(x, y, mask, None, None, zero.expand(len(n)), zero), int(n.sum()))[0]

    def read(self, jobs: list[Job]) -> Iterator[tuple[Crew, int, Batch, Any]]:
        """The batches of one pass -> crew, step, batch, what fn says of it. Mode "train": w remembers (see survey)."""
        r = jobs[0].request
        crew = Crew(self, jobs, [self.reading_plan(j.client, j.request) for j in jobs])
        crew.w, live = own_copy([j.request.w for j in jobs]), len(jobs)
        fn = self.lift(r.fn, r.mode, crew)
        for s, alive in enumerate(crew.live_at):
            if alive < live:
                live = alive
                crew.narrow(live)
            b = self.batch(crew, s, live)
            now = Tree({k: v[:live] for k, v in crew.w.items()})
            out, updates = fn(now, b, crew.real_at[s])
            for k, v in updates.items():
                now[k].copy_(v)
            yield crew, s, b, out

    def survey(self, jobs: list[Job]) -> list[Any]:
        total: Any = None
        with torch.no_grad():
            for crew, _, _, sums in self.read(jobs):  # noqa: B007 - used below
                total = self.gather(total, sums, None, len(jobs))
        out = unstack(total, len(jobs))
        return list(zip(out, unstack(crew.w, len(jobs)))) if jobs[0].request.mode == "train" else out

    def collect(self, jobs: list[Job]) -> list[Any]:
        parts: list[list[Any]] = [[] for _ in jobs]
        positions: list[list[Tensor]] = [[] for _ in jobs]
        with torch.no_grad():
            for crew, s, b, out in self.read(jobs):
                for i, (one, n) in enumerate(zip(unstack(out, len(b.y)), crew.size[s].tolist())):
                    parts[i].append(pytree.tree_map(lambda v, n=n: v[:n], one))
                    positions[i].append(crew.rows[s, i, :n])
        return [_in_order(p, torch.cat(at)) for p, at in zip(parts, positions)]


def _in_order(parts: list[Any], read: Tensor) -> tuple[Any, Tensor]:
    """Rows by their position in the client's data."""
    order = read.argsort()
    return pytree.tree_map(lambda *v: torch.cat(v)[order], *parts), read[order]
