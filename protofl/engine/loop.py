"""One client after the other: the definition that other engines must equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..method import Batch, Collect, Group, Survey, Train, View
from ..tree import Tree
from .base import READ, Engine, Job, Plan, add, moving, split_loss, trains


@dataclass
class Visit:
    """A client's training under way: what its steps share, and what they change.

    names: the parameters that move; moves: whether an encoder is among them; last: the last epoch; full: frozen features
    of every sample, where they are constant. momenta, w, sums and terms (of the loss) change.
    """

    job: Job
    view: View
    groups: list[tuple[Group, list[str]]]
    names: list[str]
    moves: bool
    last: int
    full: Any
    momenta: Tree
    w: Tree
    sums: Any = None
    terms: Tree = field(default_factory=Tree)


class Loop(Engine):
    """Plain PyTorch, one step at a time."""

    def answer(self, jobs: list[Job]) -> list[Any]:
        (job,) = jobs
        by_type: dict[type, Callable[[Job], Any]] = {
            Train: self.train,
            Survey: self.survey,
            Collect: self.collect,
        }
        return [by_type[type(job.request)](job)]

    def clock(self, plan: Plan) -> Tensor:
        """[steps, 2]: epoch and step, as functions of a batch see them."""
        told = torch.tensor([plan.epoch, range(len(plan.epoch))], dtype=self.task.dtype)
        return told.to(self.task.device).mT

    def batch(self, job: Job, plan: Plan, clock: Tensor, s: int, full: Any = None) -> Batch:
        """Step s; `full`: frozen features of every sample of the client."""
        size = plan.size[s]
        rows = plan.rows[s, :size]
        u = None if plan.augment is None else plan.augment[s, :size]
        x, y = self.task.rows(job.client.index[rows], u)
        frozen = None if full is None else pytree.tree_map(lambda v: v[rows], full)
        noise = plan.noise
        if noise is not None:
            noise = noise[s, :size] if job.request.noise.per == "row" else noise[s]
        return Batch(x, y, self.task.ones(size), frozen, noise, *clock[s])

    def train(self, job: Job) -> Any:
        r = job.request
        plan = self.training_plan(job.client, r)
        visit = self.visit(job, plan)
        self.steps(visit, plan, self.clock(plan))
        self.keep_momenta(job, visit.momenta)
        job.terms = job.terms | (visit.terms / len(plan.size) if r.recorded else Tree())
        w = visit.w.map(Tensor.detach)
        return (w, visit.sums) if r.tally else w

    def visit(self, job: Job, plan: Plan) -> Visit:
        """A client's training before its first step."""
        r, last = job.request, plan.epoch[-1]
        view = self.view(job, len(plan.size), last + 1)
        groups = moving(r.groups, list(self.net.trainable(r.start)))
        names = [n for _, mine in groups for n in mine]
        w = r.start | {k: r.start[k].clone().requires_grad_() for k in names}
        kept = self.kept_momenta(job)
        momenta = Tree({k: kept[k].clone() if k in kept else torch.zeros_like(w[k]) for k in names})
        full = self.frozen_features(job, view) if r.frozen and self.constant_features(r, plan) else None
        return Visit(job, view, groups, names, trains(names, self.net), last, full, momenta, w)

    def steps(self, visit: Visit, plan: Plan, clock: Tensor) -> None:
        """All of a visit."""
        for s in range(len(plan.size)):
            self.advance(visit, plan, clock, s)

    def tallies(self, visit: Visit, plan: Plan, s: int) -> bool:
        """Whether something is gathered on the way in step s."""
        r = visit.job.request
        return bool(r.tally) and (r.tally_epochs == "all" or plan.epoch[s] == visit.last)

    def advance(self, visit: Visit, plan: Plan, clock: Tensor, s: int) -> None:
        """Step s of a visit."""
        r, view, names = visit.job.request, visit.view, visit.names
        b = self.batch(visit.job, plan, clock, s, visit.full)
        with torch.no_grad():
            if r.frozen and visit.full is None:
                b = b._replace(frozen=self.asked(r.frozen, r.frozen_mode, len(b.y), b, view))
            if self.tallies(visit, plan, s):
                visit.sums = add(visit.sums, self.asked(r.tally, "train_frozen", len(b.y), visit.w, b, view))
        net, w = self.net.bound(r.mode, moves=visit.moves), visit.w
        loss, parts = split_loss(r.loss(net, w, b, view))
        grads = torch.autograd.grad(loss, [w[k] for k in names], materialize_grads=True) if names else ()
        with torch.no_grad():
            seen = Tree(loss=loss.detach()) | parts.map(Tensor.detach)
            visit.terms = add(visit.terms, seen) if visit.terms else seen.map(Tensor.clone)  # a term may be a parameter
            self.step(visit, Tree(zip(names, grads)), plan.epoch[s])
            visit.w = w | net.updates
        self.count(net.passes, len(b.y))

    def step(self, visit: Visit, g: Tree, epoch: int) -> None:
        """One SGD step, in place on the moving entries of w (protocol 4.1)."""
        r, client, view, w = visit.job.request, visit.job.client, visit.view, visit.w
        if r.correct:
            g = r.correct(g, w.like(g), view)
        for limit, mine in self.clips(visit.groups, client):
            norm = torch.stack([g[k].square().sum() for k in mine]).sum().sqrt()
            g = g | g.like(mine) * (limit / (norm + 1e-6)).clamp_max(1)
        if r.after_clip:
            g = r.after_clip(g, w.like(g), view)
        before = w.like(g).map(lambda v: v.detach().clone()) if r.after_step else Tree()
        for group, mine in visit.groups:
            lr, rho, decay, _ = self.setting(group, client)
            lr = client.rate(epoch) if client.rate and group.lr is None else lr
            p, m = [w[k] for k in mine], [visit.momenta[k] for k in mine]
            d: Any = [g[k] for k in mine]
            if decay:
                d = torch._foreach_add(d, p, alpha=decay)
            if rho:
                torch._foreach_mul_(m, rho)
                torch._foreach_add_(m, d)
            torch._foreach_add_(p, m if rho else d, alpha=-lr)
        if r.after_step:
            for k, v in r.after_step(w.like(g), before, view).items():
                w[k].copy_(v)

    def asked(self, fn: Callable[..., Any], mode: Any, rows: int, *given: Any) -> Any:
        """What a function that changes nothing says of a batch."""
        net = self.net.bound(mode)
        out = fn(net, *given)
        self.count(net.passes, rows)
        return out

    def constant_features(self, r: Train, plan: Plan) -> bool:
        """Whether the frozen models say the same of a sample in every epoch."""
        return r.frozen_mode == "eval" and plan.augment is None

    def frozen_features(self, job: Job, view: View) -> Any:
        """What `frozen` says of every sample of the client, once per request."""
        client = job.client
        parts: list[Any] = []
        with torch.no_grad():
            for at in range(0, client.n, READ):
                x, y = self.task.rows(client.index[at : at + READ], None)
                b = Batch(x, y, self.task.ones(len(y)))
                parts.append(self.asked(job.request.frozen, "eval", len(y), b, view))
        return pytree.tree_map(lambda *v: torch.cat(v), *parts)

    def survey(self, job: Job) -> Any:
        r, total = job.request, None
        plan, w = self.reading_plan(job.client, r), r.w
        view, clock = self.view(job, len(plan.size), 1), self.clock(plan)
        with torch.no_grad():
            for s in range(len(plan.size)):
                net = self.net.bound(r.mode)
                total = add(total, r.fn(net, w, self.batch(job, plan, clock, s), view))
                w = w | net.updates
                self.count(net.passes, plan.size[s])
        return (total, w) if r.mode == "train" else total

    def collect(self, job: Job) -> Any:
        r = job.request
        plan = self.reading_plan(job.client, r)
        view, clock = self.view(job, len(plan.size), 1), self.clock(plan)
        with torch.no_grad():
            parts = [
                self.asked(r.fn, r.mode, size, r.w, self.batch(job, plan, clock, s), view)
                for s, size in enumerate(plan.size)
            ]
        read = torch.cat([plan.rows[s, :size] for s, size in enumerate(plan.size)])
        order = read.argsort()
        return pytree.tree_map(lambda *v: torch.cat(v)[order], *parts), read[order]
