"""FedProx: FedAvg whose clients are pulled back towards the model that they received.

Li, Sahu, Zaheer, Sanjabi, Talwalkar and Smith, "Federated optimization in heterogeneous networks", MLSys 2020
(arXiv 1812.06127), equation 2 and algorithm 2.

    paper                                       here
    min_y F_i(y) + (mu/2) |y - w^t|^2           FedAvg's `loss`; `pull` adds mu (y - w^t) to its gradient
    w^{t+1} = mean of the y_i                   FedAvg's `aggregate`

The pull is a hook on gradients instead of a term of the loss: the same step, paired by name, without an
infinite slope of a norm at y = w^t. The anchor is the received model all round long; buffers are not pulled
(fixed: every code pulls trainable tensors alone). Of the readings in codes, `prox_half`, `prox_in_momentum`
and `prox_before_clip` name those that change a step; the defaults are MOON's code. Stragglers (the paper's
gamma-inexact solutions) are not modelled: every client does all of its epochs, as in every table that quotes
FedProx here.

Checked against: MOON's paper, Table 1, CIFAR-10 at mu=0.01: 66.9 +- 0.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from protofl.method import Client, Program, Train, Tree, View, flag, number

from .fedavg import FedAvg


@dataclass(frozen=True)
class FedProx(FedAvg):
    """mu: weight of the proximal term; mu=0 is FedAvg bit for bit."""

    cost: ClassVar[float] = 1.3

    mu: float = number(0.01, 0.001, 0.1, 1.0, low=0, why="CIFAR-10: best of the four; CIFAR-100, Tiny: 0.001",
                       source="MOON 4.2")  # fmt: skip
    prox_half: bool = flag(True, why="(mu/2)|.|^2 as the paper and all codes; false: mu |.|^2", source="FedProx eq. 2")
    prox_in_momentum: bool = flag(
        True,
        why="follows from the printed loss; false: a plain pull beside the momentum buffer",
        source="MOON code",
    )
    prox_before_clip: bool = flag(
        True,
        why="follows from the printed loss; false: the clip sees the cross-entropy alone",
        source="MOON code",
    )

    def added(self, to: Tree, w: Tree, view: View, scale: float = 1.0) -> Tree:
        """`to` + scale * gradient of the proximal term at w, over the parameters of w; one pass per tensor."""
        strength = scale * (self.mu if self.prox_half else 2 * self.mu)
        return Tree({k: torch.add(v, w[k] - view.shared.net[k], alpha=strength) for k, v in to.items()})

    def pull(self, grads: Tree, w: Tree, view: View) -> Tree:
        """The pull inside the gradient."""
        return self.added(grads, w, view)

    def pull_beside(self, w: Tree, before: Tree, view: View) -> Tree:
        """The pull beside the momentum step, both taken at the weights before it (no proximal map)."""
        return self.added(w, before, view, -view.lr)

    def local(self, client: Client, shared: Tree, own: Tree) -> Program:
        hook: dict[str, Any] = {"after_step": self.pull_beside}
        if self.prox_in_momentum:
            hook = {"correct" if self.prox_before_clip else "after_clip": self.pull}
        w = yield Train(shared.net, self.loss, **hook)
        return Tree(net=w), Tree()
