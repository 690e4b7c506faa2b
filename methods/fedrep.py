"""FedRep: a client first fits its private head on the received body, then improves the body under that head.

Collins, Hassani, Mokhtari and Shakkottai, "Exploiting shared representations for personalized federated
learning", ICML 2021 (arXiv 2102.07078), algorithm 1.

    paper                                                       here
    phi the representation, h_i the heads                       shared.net, own.head (FedPer's `PrivateHead`)
    h_i <- GRD(f_i(h_i, phi^t), h_i), tau_h local updates       `fit_head`: the head alone moves
    phi_i <- GRD(f_i(h_i, phi_i), phi_i), tau_phi updates       `fit_body`: the body alone moves
    phi^{t+1} = mean of the phi_i                               FedAvg's `aggregate`
    evaluated: (phi_i, h_i) after both                          `personal_model`; there is no global model

Frozen means frozen: what does not move gets neither gradient nor weight decay, and its normalisation layers are
in eval mode. Both phases read one training stream at one rate; that they restart it, as FedNH's code does, so
that both see the same batches, has no option. The loss of the head phase is recorded as `head_ce`.

Against the codes: FL-bench trains both phases with one optimiser and sets gradients to zero, so that weight decay
and momentum go on moving the other part (`fresh_opt=shared`); FedNH's nets have no BatchNorm, its frozen body would
move the statistics (`frozen_bn=train`).

Checked against: plain arithmetic on a net of two numbers, targets 2 and -1, two head steps and a body step a
round: the shared one is 1.0346275 after round 1, 1.0840089443 after round 2. No table of the paper was at hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from protofl.method import Batch, Bill, Client, Group, Program, Train, Tree, View, choice, flag, number

from .fedper import PrivateHead

if TYPE_CHECKING:
    from protofl.nets import Net
    from protofl.protocol import Protocol


@dataclass(frozen=True)
class FedRep(PrivateHead):
    """tau_h: head_epochs; tau_phi: body_epochs."""

    cost: ClassVar[float] = 1.7

    head_epochs: int = number(10, 5, 1, 0, low=0, why="0: the head never moves, as in FedBABU", source="FedNH A.2")
    body_epochs: int | str = number(
        "local_epochs", 1, words=("local_epochs",), low=1,
        why="as many as FedAvg has; the original CIFAR setting is 1", source="FedNH A.2",
    )  # fmt: skip
    fresh_opt: str = choice(
        "fresh", "shared", why="an optimiser per phase; shared: one, whose decay and momentum leak into the other part",
        source="FedNH code; FL-bench",
    )  # fmt: skip
    pm_refit_head: bool = flag(
        False, why="true: head_epochs more on the final body, for the evaluation alone", source="FedNH code"
    )
    frozen_bn: str = choice(
        "eval", "train", why="normalisation layers of the frozen body; train: its statistics move", source="project"
    )

    def check(self, protocol: Protocol, net: Net) -> None:
        if self.pm_refit_head:
            self.refuse_old_momentum("fedrep pm_refit_head=true", protocol)

    def bill(self) -> Bill:
        """A frozen encoder is passed forward alone, one whose gradient is set to zero is not."""
        body = "E" if self.body_epochs == "local_epochs" else self.body_epochs
        refit = self.head_epochs if self.pm_refit_head else 0  # in evaluated rounds
        if self.fresh_opt == "shared":
            return Bill("B", "B", f"({self.head_epochs} + {body})*n", f"{refit}*n", "H")
        return Bill("B", "B", f"{body}*n", f"{self.head_epochs + refit}*n", "H")

    def head_loss(self, net: Net, w: Tree, batch: Batch, view: View) -> tuple[Tensor, Tree]:
        """FedAvg's loss, recorded under another name."""
        loss, terms = self.loss(net, w, batch, view)
        return loss, Tree(head_ce=terms.ce)

    def head_alone(self, grads: Tree, w: Tree, view: View) -> Tree:
        """The gradient with that of the body set to zero."""
        return Tree({k: v if k in view.own.head else torch.zeros_like(v) for k, v in grads.items()})

    def body_alone(self, grads: Tree, w: Tree, view: View) -> Tree:
        """The gradient with that of the head set to zero."""
        return Tree({k: torch.zeros_like(v) if k in view.own.head else v for k, v in grads.items()})

    def fit_head(self, net: Net, w: Tree, recorded: bool = True) -> Train:
        """The head alone, the body as it is."""
        head = (Group(self.private(net)),)
        return Train(w, self.head_loss, head, self.head_epochs, mode=self.frozen_bn, recorded=recorded)

    def fit_body(self, net: Net, w: Tree) -> Train:
        """The body alone, the head as it is."""
        return Train(w, self.loss, (Group(f"(?!{self.private(net)})"),), self.epochs)

    def fit_head_leaking(self, w: Tree) -> Train:
        """The head with its gradient, the body with weight decay (and momentum, once there is some)."""
        return Train(w, self.head_loss, epochs=self.head_epochs, mode=self.frozen_bn, correct=self.head_alone)

    def fit_body_leaking(self, w: Tree) -> Train:
        """The body with its gradient, the head with weight decay and the momentum of its own phase."""
        return Train(w, self.loss, epochs=self.epochs, correct=self.body_alone, optimizer="same")

    @property
    def epochs(self) -> int | None:
        """Of the body phase; None: as the protocol says."""
        return None if isinstance(self.body_epochs, str) else self.body_epochs

    def local(self, client: Client, shared: Tree, own: Tree) -> Program:
        net, w, fresh = client.task.net, shared.net | own.head, self.fresh_opt == "fresh"
        if self.head_epochs:
            w = yield self.fit_head(net, w) if fresh else self.fit_head_leaking(w)
        w = yield self.fit_body(net, w) if fresh else self.fit_body_leaking(w)
        body, head = self.parted(net, w)
        if not (self.pm_refit_head and self.head_epochs and client.measured):
            return body, head
        shown = yield self.fit_head(net, w, recorded=False)
        return body, head, Tree(net=shown)
