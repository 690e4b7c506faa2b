"""FedAvg: every client trains the received model on its own data, and the server averages the results.

McMahan, Moore, Ramage, Hampson and Aguera y Arcas, "Communication-efficient learning of deep networks from
decentralized data", AISTATS 2017 (arXiv 1602.05629), algorithm 1.

    paper                                       here
    y <- y - eta grad l(y; b)                   `loss` in `local`: mean cross-entropy
    w <- sum_i p_i y_i                          `aggregate`: w + server_lr sum_i p_i (y_i - w), i over S_t
    evaluated: w, and y_i as personal model     `global_model`, `personal_model`

The paper has no code of its own; those of later papers differ in the weights p_i (MOON: n_i, FedNH: uniform),
the clip, the decay and its first exponent, the last short batch, the averaging of BatchNorm buffers, the life
of a momentum buffer. All of these are protocol fields (`open_fields`), shared by every method of a table.

Checked against: MOON's paper, Table 1, CIFAR-10: 66.3 +- 0.5; the setting digits.digits in float64, seed 0,
by a plain script, one client after the other: norm of the weights 10.1623072048 after round 1, 292 of 355
test images right after round 20.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from protofl.method import Batch, Client, Last, Method, Model, Program, Server, Task, Train, Tree, View

if TYPE_CHECKING:
    from protofl.nets import Net


@dataclass(frozen=True)
class FedAvg(Method):
    """Weighted model averaging. shared: Tree(net=w), P floats each way; a client keeps nothing."""

    open_fields: ClassVar[tuple[str, ...]] = (
        "model_weighting", "bn_buffers", "grad_clip_norm", "pm_protocol", "lr_decay_offset", "short_client",
        "optimizer_reset", "server_lr",
    )  # fmt: skip

    def start(self, task: Task) -> tuple[Tree, Tree]:
        return Tree(net=task.initial), Tree()

    def loss(self, net: Net, w: Tree, batch: Batch, view: View) -> tuple[Tensor, Tree]:
        """Mean cross-entropy of the batch (with that of an auxiliary classifier, where the net has one)."""
        ce = net.loss(w, batch)
        return ce, Tree(ce=ce)

    def local(self, client: Client, shared: Tree, own: Tree) -> Program:
        w = yield Train(shared.net, self.loss)
        return Tree(net=w), Tree()

    def aggregate(self, server: Server, shared: Tree, private: Tree, uploads: list[Tree]) -> tuple[Tree, Tree]:
        return Tree(net=server.merge(shared.net, [u.net for u in uploads])), Tree()

    def global_model(self, shared: Tree, private: Tree) -> Model | None:
        return Model(shared.net)

    def personal_model(self, client: Client, shared: Tree, own: Tree, last: Last) -> Model:
        """y_i: after this round's training, before the client sees the average."""
        return Model(last.upload.net)
