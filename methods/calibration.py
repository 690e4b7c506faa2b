"""FedCSPC's server: the losses that calibrate projection and output layer on the clients' prototypes.

A pool is u [N, d], labels y [N] and source client ids [N], in the order (client id, class, cluster, repeat).
The losses take one batch of it; `mask` [rows] is 1 for real rows. Everything is pure torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from protofl.method import Rows, Tree

from .prototypes import unit
from .relations import LEAST, LOWEST, average

NOBODY = 2**62
"""A position that comes after every other."""

# ---- partners of a prototype -------------------------------------------------------------------------------


def neighbours(y: Tensor, source: Tensor, same_client: bool) -> tuple[Tree, Tree]:
    """Who may stand beside every prototype of a pool: -> per prototype ([N] each), tables (const).

    Kin are those of its class, strangers those of another class, both of its client or (same_client=False) of
    all clients. Per prototype: its kin's row in the table (`group`), how many these are (`size`) and which of
    them it is (`place`); where its client's prototypes begin (`first`) and how many they are (`reach`). Table
    `kin` [groups, most]: positions in the pool, ascending, filled up with `NOBODY`.
    """
    n = len(y)
    home = source if same_client else torch.zeros_like(source)
    group = torch.unique(torch.stack([home, y]), dim=1, return_inverse=True)[1]
    client = torch.unique(home, return_inverse=True)[1]
    size, reach = group.bincount(), client.bincount()
    order = group.argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(n, device=y.device) - (size.cumsum(0) - size)[group[order]]
    kin = order.new_full((len(size), int(size.max())), NOBODY)
    kin[group, place] = torch.arange(n, device=y.device)
    first = (reach.cumsum(0) - reach)[client]
    return Tree(group=group, size=size[group], place=place, first=first, reach=reach[client]), Tree(kin=kin)


def nth(uniform: Tensor, count: Tensor) -> Tensor:
    """floor(uniform count) [rows, m] for count [rows]; 0 where there is nothing to choose from."""
    chosen = (uniform.double() * count[:, None]).to(torch.int64)
    return chosen.clamp_max((count[:, None] - 1).clamp_min(0))


def friends(at: Tree, kin: Tensor, uniform: Tensor) -> Tensor:
    """Positions [rows, m] of kin, chosen by uniform [rows, m]; never itself but where it has no other."""
    others = at.size - 1
    item = nth(uniform, others)
    past = item + (item >= at.place[:, None])  # the list leaves itself out
    return kin[at.group[:, None], torch.where(others[:, None] > 0, past, at.place[:, None])]


def foes(at: Tree, kin: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Positions [rows, m] of strangers, chosen by uniform [rows, m] (else itself); whether there are any."""
    others, first = at.reach - at.size, at.first[:, None]
    item = nth(uniform, others)
    before = kin[at.group] - first - torch.arange(kin.shape[1], device=kin.device)  # strangers before each kin
    passed = (before[:, None] <= item[..., None]).sum(-1)
    itself = kin[at.group, at.place][:, None]
    return torch.where(others[:, None] > 0, first + item + passed, itself), others > 0


# ---- margin loss -------------------------------------------------------------------------------------------

POSITIVE: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "from_partner": lambda u, p, lam: p + lam * (p - u),
    "from_anchor": lambda u, p, lam: u + lam * (u - p),
}
NEGATIVE: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "toward_anchor": lambda u, m, lam: lam * u + (1 - lam) * m,
    "toward_negative": lambda u, m, lam: u + lam * (m - u),
}
"""Artificial prototypes by name: of anchor u and a partner p of its class, or m of another."""


def _l2(a: Tensor, b: Tensor) -> Tensor:
    distance: Tensor = torch.linalg.vector_norm(a - b, dim=-1)  # gradient 0 where rows are equal
    return distance


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    return 1 - (unit(a, LEAST) * unit(b, LEAST)).sum(-1)


DISTANCE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"l2": _l2, "cosine": _cosine}


def margin(z: Tensor, pos: Tensor, neg: Tensor, alpha: float, metric: str, valid: Tensor) -> Tensor:
    """L_mar: mean of max(0, |z - pos| - |z - neg| + alpha) over valid pairs.

    z [rows, q]; pos, neg [rows, m, q]; metric: a name in DISTANCE; valid [rows].
    """
    far = DISTANCE[metric]
    gap = far(z[:, None], pos) - far(z[:, None], neg) + alpha
    return average(gap.clamp_min(0), valid[:, None].to(gap.dtype).expand_as(gap))


# ---- contrastive loss --------------------------------------------------------------------------------------


class Sigma(NamedTuple):
    """Where the source weight stands: on positives and on negatives of the sum, the numerator, the term."""

    positives: bool
    negatives: bool
    numerator: bool
    term: bool


SIGMA = {
    "pull_push": Sigma(False, True, False, True),
    "denominator": Sigma(True, True, False, False),
    "exp_both": Sigma(True, True, True, False),
    "term": Sigma(False, False, False, True),
    "none": Sigma(False, False, False, False),
}


def _cosines(z: Tensor) -> Tensor:
    """[rows, rows] between the rows of z."""
    direction = unit(z, LEAST)
    return direction @ direction.mT


def contrast(z: Tensor, y: Tensor, source: Tensor, mask: Tensor, tau: float, mode: str) -> Tensor:
    """L_con: mean over the anchors that have a positive; z [rows, q]."""
    return average(*anchors(_cosines(z), y, source, mask, tau, mode))


def anchors(cosines: Tensor, y: Tensor, source: Tensor, mask: Tensor, tau: float, mode: str) -> tuple[Tensor, Tensor]:
    """Every anchor's term of L_con [rows], and 1 where it has a positive; mode: a name in SIGMA."""
    s, on = cosines / tau, SIGMA[mode]
    alike, home = y[:, None] == y, source[:, None] == source
    other = mask[:, None] * mask * (1 - torch.eye(len(y), dtype=mask.dtype, device=mask.device))
    sigma = torch.where(alike != home, 1.0, 0.5).to(s.dtype)
    in_sum = (alike & on.positives) | (~alike & on.negatives)
    log_sum = torch.where(other > 0, s + sigma.log() * in_sum, LOWEST).logsumexp(1, keepdim=True)
    term = log_sum - (s + sigma.log() if on.numerator else s)
    if on.term:
        term = term * sigma
    positive = alike * other
    count = positive.sum(1)
    return (term * positive).sum(1) / count.clamp_min(1), (count > 0).to(s.dtype)


def contrast_code(z: Tensor, y: Tensor, mask: Tensor, tau: float) -> Tensor:
    """The authors' code: unweighted, the anchor is one of its positives and in the sum, all rows count."""
    s = _cosines(z) / tau
    log_p = torch.where(mask > 0, s, LOWEST).log_softmax(1)
    positive = (y[:, None] == y) * mask
    return average(-(log_p * positive).sum(1) / positive.sum(1).clamp_min(1), mask)


# ---- learning rate -----------------------------------------------------------------------------------------


def base_rate(t: int, rounds: int, clock: str) -> float:
    """The first learning rate of the calibration of round t: 0.1, then 0.01, then 0.001 (re_training.py)."""
    early, middle = (20 * t <= rounds, 5 * t <= 2 * rounds) if clock == "fraction" else (t <= 5, t <= 40)
    return 0.1 if early else 0.01 if middle else 0.001


def rate(epoch: int, base: float) -> float:
    """A tenth after every 30 epochs (exp_lr_scheduler)."""
    return base * 0.1 ** (epoch // 30)


# ---- class tables ------------------------------------------------------------------------------------------


def class_table(rows: Tensor, y: Tensor, weight: Tensor, old: Rows) -> Rows:
    """Weighted class means [K, d] of rows [N, d]; a class without weight keeps its old row and validity."""
    onehot = F.one_hot(y, len(old.has)).to(rows.dtype) * weight[:, None]
    mass = onehot.sum(0)
    seen = mass > 0
    mean = onehot.mT @ rows / torch.where(seen, mass, 1.0)[:, None]
    return Rows(torch.where(seen[:, None], mean, old.values), seen | old.has)
