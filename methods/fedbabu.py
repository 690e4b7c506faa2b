"""FedBABU: clients train the body alone, under one random head that never moves; heads are tuned at the very end.

Oh, Kim and Yun, "FedBABU: Toward enhanced representation for federated image classification", ICLR 2022
(arXiv 2106.06042), algorithm 1.

    paper                                                       here
    theta_G,cls: as initialised, the same everywhere            shared.head, a constant: sent once
    client: theta_ext <- SGD, cls not updated; sends ext        `local`: the body alone moves
    theta_G,ext <- weighted mean of the ext                     FedAvg's `aggregate`
    evaluated: (ext, cls)                                       `global_model`
    personalised: fine-tuned from it on the client's data       `refresh`, after the last round, for all clients

Personal models are made once, at the end: `adapt` turns every protocol into pm_protocol=refresh with all clients.
A frozen part gets neither gradient nor weight decay; with finetune_part=head the body's normalisation layers are
in eval mode.

Against FedNH's code (Yutong-Dai/FedNH): it does not send the last average before the fine-tuning, so that every
client is tuned from the body of its own last participation (`finetune_start=stale_local`); its client draws leave
out the run seed.

Checked against: plain arithmetic on a net of two numbers, targets 2 and 0, two steps a round: the body is 1.049375
after round 1, 1.0963121094 after round 2, and 1.2499487008 and 1.0482192555 after the fine-tuning. No table of
the paper was at hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from protofl.errors import UserError
from protofl.method import Bill, Client, Group, Last, Model, Program, Task, Train, Tree, choice, number

from . import spread
from .fedavg import FedAvg

if TYPE_CHECKING:
    from protofl.nets import Net
    from protofl.protocol import Protocol


@dataclass(frozen=True)
class FedBABU(FedAvg):
    """shared: net, the body; head, which never changes. upload: net. own: body (finetune_start=stale_local alone)."""

    constant: ClassVar[tuple[str, ...]] = ("head",)
    open_fields: ClassVar[tuple[str, ...]] = ("model_weighting", "grad_clip_norm", "bn_buffers", "client_sampling")

    # fmt: off
    finetune_start: str = choice(
        "aggregated", "stale_local", why="the final average; or the client's own last body, as the code",
        source="FedBABU alg. 1; FedNH code")
    finetune_part: str = choice(
        "full", "head", "body", why="what the fine-tuning moves", source="FedNH code")
    finetune_lr: str = choice(
        "continued", "initial", why="rate of the round after the last; or client_lr", source="FedNH code")
    finetune_epochs: int = number(
        5, 0, 1, 10, low=0, why="0: the untuned model, the same for all", source="FedNH A.2")
    head_init: str = choice(
        "default", "orthogonal", why="that of the initial weights; or orthonormal rows (K <= d)",
        source="FedNH code")
    # fmt: on

    def check(self, protocol: Protocol, net: Net) -> None:
        if self.head_init == "orthogonal" and net.classes > net.dim:
            raise UserError(
                f"fedbabu head_init=orthogonal: {net.classes} classes cannot have orthogonal rows in {net.dim} "
                f"dimensions, head_init=default works for any number"
            )
        if self.finetune_start == "stale_local" and protocol.pm_protocol == "refresh":
            raise UserError(
                "fedbabu finetune_start=stale_local: with pm_protocol=refresh every client receives the final body, "
                "finetune_start=aggregated begins there"
            )
        if self.finetune_epochs and protocol.optimizer_reset == "never":
            raise UserError(
                "fedbabu fine-tunes with a new optimiser, it needs optimizer_reset=per_round (or finetune_epochs=0)"
            )

    def adapt(self, protocol: Protocol) -> Protocol:
        return protocol.replace(pm_protocol="refresh", pm_clients="all")

    def bill(self) -> Bill:
        """Besides, the head once; the fine-tuning is not part of a round."""
        return Bill("B", "B", state="B" if self.finetune_start == "stale_local" else "0")

    def start(self, task: Task) -> tuple[Tree, Tree]:
        head = task.initial.only(task.net.head)
        if self.head_init == "orthogonal":
            rows = torch.from_numpy(spread.orthogonal(task.classes, task.net.dim, task.stream("fedbabu", "init")))
            head = head.map(lambda v: rows.to(v) if v.dim() == 2 else torch.zeros_like(v))
        return Tree(net=task.initial.without(task.net.head), head=head), Tree()

    def enrol(self, client: Client) -> Tree:
        if self.finetune_start == "aggregated":
            return Tree()
        return Tree(body=client.task.initial.without(client.task.net.head))

    def local(self, client: Client, shared: Tree, own: Tree) -> Program:
        head = client.task.net.head
        w = yield Train(shared.net | shared.head, self.loss, (Group(f"(?!{head})"),))
        body = w.without(head)
        return Tree(net=body), Tree(body=body) if self.finetune_start == "stale_local" else Tree()

    def global_model(self, shared: Tree, private: Tree) -> Model:
        return Model(shared.net | shared.head)

    def personal_model(self, client: Client, shared: Tree, own: Tree, last: Last | None) -> Model:
        """Before the fine-tuning: where it begins. Not reported (`adapt`)."""
        return Model(self.begin(shared, own))

    def begin(self, shared: Tree, own: Tree) -> Tree:
        """The model that is fine-tuned."""
        body: Tree = own.body if self.finetune_start == "stale_local" else shared.net
        whole: Tree = body | shared.head
        return whole

    def refresh(self, client: Client, shared: Tree, own: Tree) -> Program:
        """The fine-tuning: t = T, training stream and rate included."""
        w = self.begin(shared, own)
        if self.finetune_epochs:
            head = client.task.net.head
            names = {"full": ".*", "head": head, "body": f"(?!{head})"}[self.finetune_part]
            lr = client.task.protocol.client_lr if self.finetune_lr == "initial" else None
            mode = "eval" if self.finetune_part == "head" else "train"
            w = yield Train(w, self.loss, (Group(names, lr=lr),), self.finetune_epochs, mode=mode)
        return Model(w)
