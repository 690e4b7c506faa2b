"""SCAFFOLD: every local gradient is corrected by how the client's average gradient differs from everybody's.

Karimireddy, Kale, Mohri, Reddi, Stich and Suresh, "SCAFFOLD: Stochastic controlled averaging for federated
learning", ICML 2020 (arXiv 1910.06378), algorithm 1.

    paper                                                   here
    y <- y - eta (g_i(y) - c_i + c)               (line 10) `correct`, before clip, weight decay and momentum
    c_i+ = g_i(w)                            (12, option I) `gradient`, `renewed`
    c_i+ = c_i - c + (w - y) / (tau eta)    (12, option II) `renewed`
    w <- w + eta_g mean over S_t of (y_i - w)          (16) `aggregate`; eta_g is the field server_lr
    c <- c + |S_t|/N mean over S_t of (c_i+ - c_i)     (17) `aggregate`; N counts all clients with data

A client keeps c_i while it is idle and sends y_i itself, so that round 0 is FedAvg bit for bit. Control variates cover
the parameters alone, no buffer. The paper's SGD has no momentum: with rho > 0 a constant gradient enters w - y with
weight tau_eff > tau (`tau`); raw counting overestimates c up to tenfold and diverges. Which weights the sums have
decides whose objective is solved: all rows of a table solve the setting's (`weighting`). Steps are the client's own,
c and c_i begin at 0, and the correction stands before the clip (fixed: clipping first has a biased fixed point).

Against NIID-Bench (preset niid, its FL code `experiments.py`): it corrects after the optimiser's step, beside the
momentum; weighs models by n_i but c by 1/N; begins at the weights of random networks and corrects buffers too (both
not copied). MOON's repository has no SCAFFOLD.

Checked against: two quadratic clients by hand, w = .635, 1.1065, 1.4478225 after rounds 1, 2, 3; MOON's paper,
Table 1, CIFAR-10: 66.6 +- 0.2 (FedAvg there: 66.3 +- 0.5).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from protofl import same
from protofl.errors import UserError
from protofl.method import Batch, Bill, Client, Program, Same, Server, Survey, Task, Train, Tree, View, choice, need

from .fedavg import FedAvg

if TYPE_CHECKING:
    from protofl.nets import Net
    from protofl.protocol import Protocol


@dataclass(frozen=True)
class SCAFFOLD(FedAvg):
    """shared: net, c; own: c, the client's c_i; upload: net, dc = c_i+ - c_i. Control variates: name -> parameter."""

    cost: ClassVar[float] = 1.2

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"weighting": "uniform", "option": 2, "correction": "in_gradient", "tau": "momentum"},
        "niid": {"weighting": "niid", "correction": "after_step", "tau": "raw"},
    }
    same: ClassVar[tuple[Same, ...]] = (
        Same("tau", (), "without momentum steps are counted alike", same.field_is("momentum", 0.0), "--set momentum=0.9"),
        Same("correction", ("after_step",), "without momentum and clip both move by the same",
             same.both(same.field_is("momentum", 0.0), same.field_is("grad_clip_norm", 0.0)), "--set momentum=0.9", exact=False),
        Same("weighting", ("uniform",), "the setting's weights are uniform", same.field_is("model_weighting", "uniform"),
             "--set model_weighting=data_size"),
        Same("weighting", (), "all clients have equally many samples", same.equal_sizes, "--partition dir_class", exact=False),
    )  # fmt: skip
    together: ClassVar[Mapping[tuple[str, Any], Mapping[str, Any]]] = {("correction", "after_step"): {"tau": "raw"}}
    open_fields: ClassVar[tuple[str, ...]] = (
        "model_weighting", "server_lr", "momentum", "optimizer_reset", "bn_buffers", "grad_clip_norm", "weight_decay",
    )  # fmt: skip

    preset: str = choice(
        "setting", "paper", "niid", why="one objective for all rows of a table; paper: uniform weights; niid: that code",
        source="project",
    )  # fmt: skip
    weighting: str = choice(
        "follow_setting", "uniform", "niid",
        why="y and c by the setting's weights; 1/m and 1/N (paper); y by n_i, c by 1/N", source="project",
    )  # fmt: skip
    option: int = choice(2, 1, why="c_i+ from the path; 1: full-data gradient at w, one more pass",
                         source="SCAFFOLD alg. 1 l. 12")  # fmt: skip
    correction: str = choice(
        "in_gradient", "after_step", why="as printed; -eta (c - c_i) beside the momentum: NIID-Bench",
        source="SCAFFOLD alg. 1 l. 10",
    )  # fmt: skip
    tau: str = choice(
        "momentum", "raw", why="steps as momentum weighs a constant gradient; raw diverges at rho = 0.9",
        source="project",
    )  # fmt: skip

    def __post_init__(self) -> None:
        if self.correction == "after_step" and self.tau == "momentum":
            raise UserError(
                "scaffold correction=after_step needs tau=raw: w - y then holds tau copies of the correction, not tau_eff"
            )

    def check(self, protocol: Protocol, net: Net) -> None:
        if self.tau == "momentum":
            need("scaffold tau=momentum", protocol, optimizer_reset="per_round")

    def bill(self) -> Bill:
        return Bill("2*P", "2*P", trained="E*n" if self.option == 2 else "E*n + n", state="P")

    def start(self, task: Task) -> tuple[Tree, Tree]:
        return Tree(net=task.initial, c=self.zeros(task)), Tree()

    def enrol(self, client: Client) -> Tree:
        return Tree(c=self.zeros(client.task))

    def zeros(self, task: Task) -> Tree:
        """The control variate of a client that has not trained yet."""
        return task.net.trainable(task.initial).map(torch.zeros_like)

    # ---- client --------------------------------------------------------------------------------------------

    def correct(self, grads: Tree, w: Tree, view: View) -> Tree:
        """g + (c - c_i)."""
        return Tree({k: g + (view.shared.c[k] - view.own.c[k]) for k, g in grads.items()})

    def correct_beside(self, w: Tree, before: Tree, view: View) -> Tree:
        """w - eta (c - c_i), after the optimiser's step."""
        return Tree({k: v - view.lr * (view.shared.c[k] - view.own.c[k]) for k, v in w.items()})

    def gradient(self, net: Net, w: Tree, batch: Batch, view: View) -> Tree:
        """Gradient of the loss at w, summed over the rows: name -> parameter."""

        def total(parameters: Tree) -> Tensor:
            return net.loss(w | parameters, batch) * batch.mask.sum()

        grads: Tree = torch.func.grad(total)(net.trainable(w))
        return grads

    def weight(self, client: Client) -> float:
        """tau, or tau_eff: the weight in w - y of a gradient that is the same at every step, in units of eta."""
        if self.tau == "raw":
            return client.steps()
        total = velocity = 0.0
        for _ in range(client.steps()):
            velocity = client.momentum * velocity + 1
            total += velocity
        return total

    def renewed(self, client: Client, shared: Tree, own: Tree, y: Tree) -> Program:
        """c_i+ - c_i."""
        if self.option == 1:
            return (yield Survey(shared.net, self.gradient)) / client.n - own.c
        moved = Tree({k: shared.net[k] - y[k] for k in own.c})
        return moved / (self.weight(client) * client.lr) - shared.c

    def local(self, client: Client, shared: Tree, own: Tree) -> Program:
        inside = self.correction == "in_gradient"
        y = yield Train(
            shared.net,
            self.loss,
            correct=self.correct if inside else None,
            after_step=None if inside else self.correct_beside,
        )
        dc = yield from self.renewed(client, shared, own, y)
        return Tree(net=y, dc=dc), Tree(c=own.c + dc)

    # ---- server --------------------------------------------------------------------------------------------

    def shares(self, server: Server) -> tuple[Tensor, Tensor]:
        """p [m], the weights of the models, and q [m], those of the control variates among all N clients."""
        sizes = torch.tensor(server.task.sizes, dtype=torch.float64)
        n = sizes[server.ids]
        equal = torch.full_like(n, 1 / int((sizes > 0).sum()))
        if self.weighting == "uniform":
            return server.uniform, equal
        if self.weighting == "niid":
            return n / n.sum(), equal
        return server.weights, n / sizes.sum() if server.task.protocol.model_weighting == "data_size" else equal

    def aggregate(self, server: Server, shared: Tree, private: Tree, uploads: list[Tree]) -> tuple[Tree, Tree]:
        """w moves by p over S_t; c remains the q-weighted mean of the c_i of all clients."""
        p, q = self.shares(server)
        c = shared.c
        for u, share in zip(uploads, q.tolist()):
            c = c + u.dc * share
        return Tree(net=server.merge(shared.net, [u.net for u in uploads], p), c=c), Tree()
