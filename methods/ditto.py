"""Ditto: FedAvg, and beside it a personal model of every client that is pulled towards the global weights.

Li, Hu, Beirami and Smith, "Ditto: Fair and robust federated learning through personalization", ICML 2021
(arXiv 2012.04221), the objective and its solver, algorithm 1.

    paper                                               here
    w: any federated training, here FedAvg              `loss`, FedAvg's `aggregate`
    min_v F_i(v) + (lambda/2) |v - w|^2                 `personal_loss`; `pull`, behind the step
    v_i <- v_i - eta (grad F_i(v_i) + lambda (v_i - w^t))
    evaluated: v_i (and w as global model)              `personal_model`

The personal branch is plain SGD at the rate of the round, from the v_i that the client kept (w^0 at first), with
normalisation statistics of its own, which are not pulled. It reads the training stream behind the global branch,
so that all that is sent equals FedAvg's bit for bit under every option. `refresh` runs it alone, on the beginning
of the stream of t = T, unless it needs the client's freshly trained model (`anchor`).

Against the codes: FedNH's, whose table has a row of it, pulls towards the freshly trained model, which hardly
pulls (`anchor`); the authors' trains both models batch by batch (`interleave`); PFLlib and FL-bench take one
epoch, FL-bench with the global branch's momentum and decay (`personal_epochs`, `personal_momentum`,
`personal_weight_decay`). The factor is lambda/2 |.|^2, and who is not drawn keeps its model (fixed).

Checked against: hand arithmetic on f(v) = (v - 2)^2 / 2 from v = 0.5, w^t = 0: 0.7053125 after two steps of 0.1,
fixed point 2/1.75. No table of the paper was at hand.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from protofl.errors import UserError
from protofl.method import (
    Batch,
    Bill,
    Client,
    Group,
    Last,
    Model,
    Program,
    Train,
    Tree,
    View,
    choice,
    flag,
    number,
)

from .fedavg import FedAvg

if TYPE_CHECKING:
    from protofl.nets import Net
    from protofl.protocol import Protocol

MINE = "personal."
"""What stands before the names of v where both models train in one request."""


@dataclass(frozen=True)
class Ditto(FedAvg):
    """lam: lambda, strength of the pull. own: v, a whole model, never sent."""

    cost: ClassVar[float] = 2.0
    keeps_personal: ClassVar[bool] = True
    open_fields: ClassVar[tuple[str, ...]] = (
        "model_weighting", "grad_clip_norm", "local_epochs", "client_lr", "bn_buffers", "pm_clients", "pm_protocol",
    )  # fmt: skip

    # fmt: off
    lam: float = number(
        0.75, 0.1, 1.0, 2.0, low=0, why="one value for all clients; the paper tunes it in 0.1, 1, 2",
        source="FedNH A.2")
    anchor: str = choice(
        "received", "local_trained", why="w^t; FedNH's code: the client's model after its global branch",
        source="Ditto alg. 1")
    interleave: bool = flag(
        False, why="one branch after the other; true: both at every batch of the global branch, v first",
        source="FedNH code; Ditto code")
    personal_epochs: int | str = number(
        "local_epochs", 1, words=("local_epochs",), low=1, why="as many as the global branch; PFLlib, FL-bench: 1",
        source="FedNH code")
    personal_momentum: float = number(
        0.0, 0.9, low=0, high=1, why="plain SGD; FL-bench: as the global branch. The pull stays outside the buffer",
        source="FedNH code, Ditto code")
    personal_weight_decay: float = number(
        0.0, 1e-5, low=0, why="plain SGD; FL-bench: as the global branch", source="FedNH code")
    clip_prox: bool = flag(
        False, why="the clip sees the cross-entropy alone; true: with the pull, as one gradient of the optimiser",
        source="FedNH code")
    # fmt: on

    def __post_init__(self) -> None:
        if self.interleave and self.anchor == "local_trained":
            raise UserError(
                "ditto interleave=true has no trained model to pull towards until the round is over: "
                "anchor=received, or interleave=false"
            )

    def check(self, protocol: Protocol, net: Net) -> None:
        super().check(protocol, net)
        if self.interleave and self.personal_epochs not in ("local_epochs", protocol.local_epochs):
            raise UserError(
                f"ditto interleave=true trains v on the global branch's batches, local_epochs={protocol.local_epochs}: "
                f"personal_epochs={self.personal_epochs} needs interleave=false"
            )
        if self.personal_momentum and protocol.optimizer_reset == "never":
            raise UserError(
                f"ditto personal_momentum={self.personal_momentum:g} begins every round with a fresh buffer, "
                f"optimizer_reset=never keeps buffers: personal_momentum=0, or optimizer_reset=per_round"
            )
        if self.lam * protocol.learning_rate(0) >= 2:
            raise UserError(
                f"ditto lam={self.lam:g}: a step of {protocol.learning_rate(0):g} overshoots the anchor by more than "
                f"it was away; lam must be below {2 / protocol.learning_rate(0):g}"
            )

    def bill(self) -> Bill:
        epochs = "2*E*n" if self.personal_epochs == "local_epochs" else f"(E + {self.personal_epochs})*n"
        return Bill(trained=epochs, state="P")

    def enrol(self, client: Client) -> Tree:
        """v starts from w^0 and its buffers."""
        return Tree(v=client.task.initial)

    # ---- the personal branch -------------------------------------------------------------------------------

    def personal_loss(self, net: Net, w: Tree, batch: Batch, view: View) -> tuple[Tensor, Tree]:
        """Mean cross-entropy of v; the pull is not a part of it."""
        ce = net.loss(w, batch)
        return ce, Tree(personal=ce)

    def pull(self, w: Tree, before: Tree, view: View) -> Tree:
        """v - eta lambda (v_before - a) for the parameters of v, behind the step: outside clip and buffer."""
        a, alpha = view.const.anchor, -view.lr * self.lam
        return Tree({k: torch.add(v, before[k] - a[k], alpha=alpha) for k, v in w.items() if k in a})

    def pull_inside(self, grads: Tree, w: Tree, view: View) -> Tree:
        """The pull as a part of the gradients of v, which clip and buffer then see."""
        a = view.const.anchor
        return grads | {k: torch.add(g, w[k] - a[k], alpha=self.lam) for k, g in grads.items() if k in a}

    def group(self, **place: Any) -> Group:
        """The optimiser of v."""
        return Group(momentum=self.personal_momentum, weight_decay=self.personal_weight_decay, **place)

    def hooks(self, anchor: Tree) -> dict[str, Any]:
        """What a request needs for the pull towards `anchor`, by the names of what is pulled."""
        where = {"correct": self.pull_inside} if self.clip_prox else {"after_step": self.pull}
        return {"const": Tree(anchor=anchor), **where}

    def personal(self, v: Tree, anchor: Tree) -> Train:
        """The request that trains v on its own."""
        epochs = None if isinstance(self.personal_epochs, str) else self.personal_epochs
        return Train(v, self.personal_loss, (self.group(),), epochs, **self.hooks(anchor))

    # ---- both branches in one request ----------------------------------------------------------------------

    def both(self, net: Net, w: Tree, batch: Batch, view: View) -> tuple[Tensor, Tree]:
        """The losses of both models on one batch; no parameter is in both."""
        mine, told = self.personal_loss(net.within(MINE), inside(w), batch, view)
        loss, terms = self.loss(net, outside(w), batch, view)
        return loss + mine, terms | told

    def at_once(self, net: Tree, v: Tree) -> Train:
        """The request that trains both, each under a clip of its own."""
        mine = re.escape(MINE)
        groups = (Group(f"(?!{mine})"), self.group(names=mine, norm=MINE))
        return Train(net | renamed(v), self.both, groups, **self.hooks(renamed(net)))

    # ---- client --------------------------------------------------------------------------------------------

    def local(self, client: Client, shared: Tree, own: Tree) -> Program:
        if self.interleave:
            w = yield self.at_once(shared.net, own.v)
            return Tree(net=outside(w)), Tree(v=inside(w))
        net = yield Train(shared.net, self.loss)
        v = yield self.personal(own.v, shared.net if self.anchor == "received" else net)
        return Tree(net=net), Tree(v=v)

    def refresh(self, client: Client, shared: Tree, own: Tree) -> Program:
        """The personal branch alone; with anchor=local_trained what it is pulled towards has to be trained first."""
        if self.anchor == "local_trained":
            return (yield from super().refresh(client, shared, own))
        v = yield self.personal(own.v, shared.net)
        return Model(v)

    def personal_model(self, client: Client, shared: Tree, own: Tree, last: Last | None) -> Model:
        """v_i, idle or not."""
        return Model(own.v)


def renamed(v: Tree) -> Tree:
    """A model under the names of v."""
    return Tree({MINE + k: t for k, t in v.items()})


def inside(w: Tree) -> Tree:
    """v among the entries of both models, under its own names."""
    return Tree({k.removeprefix(MINE): t for k, t in w.items() if k.startswith(MINE)})


def outside(w: Tree) -> Tree:
    """The global branch's model among the entries of both."""
    return Tree({k: t for k, t in w.items() if not k.startswith(MINE)})
