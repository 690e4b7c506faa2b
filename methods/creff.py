"""CReFF: FedAvg whose server trains a new output layer on features that it makes up to resemble the clients'.

Shang, Lu, Huang and Wang, "Federated learning on heterogeneous and long-tailed data via classifier re-training
with federated features", IJCAI 2022 (arXiv 2204.13399).

    paper                                                           here
    G_ic: gradient of the cross-entropy of client i's features of   `class_gradients`, before its training
        class c in the re-trained layer
    G_c = mean of G_ic over the clients that have c                 `targets`
    F_c <- F_c - eta grad D(S_c, G_c), S_c the same gradient of     `match`, `gradient` in closed form
        the M federated features F_c
    a new layer, trained on F                                       `retrain`
    w: as FedAvg                                                    FedAvg's `local` and `aggregate`

The re-trained layer predicts on the averaged body (the global model) and is what the next gradients are taken
in; training goes on with FedAvg's own. A client's personal model is FedAvg's too.

Where the authors' code (shangxinyi/CReFF-FL) and the FedNH benchmark's differ, the values are those of the
latter: rate of the features 0.01 for 0.1, which is unstable there, batches of 64 for 32, the training
transform for a richer one (`real_transform`). The latter trains the layer with a bias that it throws away
(`retrain_bias`=drop), the former keeps it. `--CReFF_num_of_fl_feature`, which that code ignores, is
`features_per_class`. Gradients before local training: fixed, as in both.

Checked against: plain NumPy; K = d = 2, an identity layer, real features (1, 2), (0, 1), federated ones
(1, 0), (0.5, -1): distance 2.2931387711. No table of the paper was at hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.random import RandomState
from torch import Tensor

from protofl.method import (
    Batch,
    Bill,
    Client,
    Collect,
    Model,
    Program,
    Rows,
    Server,
    Task,
    Train,
    Tree,
    View,
    choice,
    number,
)

from .fedavg import FedAvg
from .prototypes import merge

if TYPE_CHECKING:
    from protofl.nets import Net

LEAST = 1e-6
"""What is added to the product of two lengths before it divides."""


def one_minus_cosine(a: Tensor, b: Tensor) -> Tensor:
    """1 - <a, b> / (|a| |b| + 1e-6) along the last axis."""
    lengths: Tensor = torch.linalg.vector_norm(a, dim=-1) * torch.linalg.vector_norm(b, dim=-1)
    return 1 - (a * b).sum(-1) / (lengths + LEAST)


def flat(g: Tree) -> Tensor:
    """Gradients of classes, [C, numbers]: weight [C, K, d], then bias [C, K]."""
    return torch.cat([v.flatten(1) for v in g.values()], 1)


DISTANCES: dict[str, Callable[[Tree, Tree], Tensor]] = {
    "row_cosine": lambda a, b: torch.stack([one_minus_cosine(a[k], b[k]).sum() for k in a]).sum(),
    "flat_cosine": lambda a, b: one_minus_cosine(flat(a), flat(b)).sum(),
    "sq_error": lambda a, b: (flat(a) - flat(b)).square().sum(),
}
"""D of gradients Tree(weight [C, K, d][, bias [C, K]]), summed over their classes; a bias is one row more."""


@dataclass(frozen=True)
class CReFF(FedAvg):
    """shared: net, retrained = Tree(weight [K, d][, bias [K]]). private: features F [K, M, d].

    upload: net, grad = Tree(weight Rows [K, K, d][, bias Rows [K, K]]), n [K] if gradients are weighted by it.
    """

    cost: ClassVar[float] = 1.5  # the server's part takes the same time on any network: more than this on tiny ones

    # fmt: off
    retrain_bias: str = choice(
        "as_net", "drop", "keep", why="the layer as the net has it; trained with a bias that is then dropped; with a "
        "bias on every net", source="FedNH code; CReFF code")
    features_per_class: int = number(100, low=1, why="M", source="FedNH A.2")
    match_epochs: int = number(100, low=1, why="steps of the features in a round", source="FedNH A.2")
    retrain_epochs: int = number(300, low=1, why="epochs of the layer in a round", source="FedNH A.2")
    batch_real: int = number(64, 32, low=1, why="samples of a class in a draw; its own code 32", source="FedNH code")
    retrain_batch: int = number(64, 32, low=1, why="federated features per step; its own code 32", source="FedNH code")
    lr_feature: float = number(0.01, 0.1, above=0, why="0.1, of its own code, is unstable", source="FedNH A.2")
    lr_net: float = number(0.01, above=0, why="rate of the layer", source="FedNH A.2; CReFF code")
    distance: str = choice(
        "row_cosine", "flat_cosine", "sq_error", why="of gradients: 1 - cosine by rows, of the whole, squared error",
        source="CReFF code; FedNH code")
    grad_weighting: str = choice(
        "uniform", "count", why="a class's gradient: mean over its clients; by their samples of it", source="CReFF code")
    gradient_repeats: int = choice(10, 1, why="draws that a gradient is averaged over", source="CReFF code")
    real_transform: str = choice(
        "train_once", "test", why="augmented once per sample and round; or not", source="FedNH code")
    features_start: str = choice(
        "kept", "redraw", why="matching goes on where the last round left F; or from new noise", source="CReFF code")
    retrain_start: str = choice("new", "warm", why="a new layer in each round; or the last one", source="CReFF code")
    # fmt: on

    def bill(self) -> Bill:
        layer = {"as_net": "H", "drop": "K*q", "keep": "K*(q + 1)"}[self.retrain_bias]
        return Bill(
            down=f"P + {layer}",
            up=f"P + K_i*{layer}" + (" + K*int" if self.grad_weighting == "count" else ""),
            forward="n",
            server=f"an average, {self.match_epochs} steps of K*{self.features_per_class} features, "
            f"{self.retrain_epochs} epochs of a layer on them",
        )

    # ---- the layer -------------------------------------------------------------------------------------------

    def has_bias(self, task: Task) -> bool:
        """Whether the re-trained layer predicts with a bias."""
        return self.retrain_bias == "keep" or (self.retrain_bias == "as_net" and "head.bias" in task.initial)

    def start(self, task: Task) -> tuple[Tree, Tree]:
        shared, _ = super().start(task)
        like = next(v for v in task.initial.values() if v.is_floating_point())
        stream = task.stream("creff", "init")
        retrained = new_layer(task.classes, task.net.dim, self.has_bias(task), stream, like)
        features = self.noise(task.classes, task.net.dim, stream, like)
        kept = Tree(features=features) if self.features_start == "kept" else Tree()
        return shared | {"retrained": retrained}, kept

    def noise(self, classes: int, dim: int, stream: RandomState, like: Tensor) -> Tensor:
        """F [K, M, d] before it resembles anything."""
        return torch.from_numpy(stream.standard_normal((classes, self.features_per_class, dim))).to(like)

    # ---- client ----------------------------------------------------------------------------------------------

    def head_inputs(self, net: Net, w: Tree, batch: Batch, view: View) -> Tree:
        """Tree(z [rows, d])."""
        return Tree(z=net.embed(w, batch.x))

    def local(self, client: Client, shared: Tree, own: Tree) -> Program:
        stream, augment = client.stream("creff", "survey"), self.real_transform == "train_once"
        read, _ = yield Collect(shared.net, self.head_inputs, augment=augment, stream=stream)
        upload, changes = yield from super().local(client, shared, own)
        upload["grad"] = self.class_gradients(client, shared.retrained, read.z, stream)
        if self.grad_weighting == "count":
            upload["n"] = client.counts.round().to(torch.int64)
        return upload, changes

    def class_gradients(self, client: Client, layer: Tree, z: Tensor, stream: RandomState) -> Tree:
        """G_i: Tree(weight Rows [K, K, d][, bias Rows [K, K]]) of all samples' z [n, d] in stored order.

        The mean over draws of the mean over a draw is a weighted sum over the class, each sample as often as drawn.
        """
        classes, y = len(layer.weight), client.y.cpu().numpy()
        rows = {c: np.flatnonzero(y == c) for c in np.unique(y).tolist()}
        share = np.zeros(len(y))
        for _ in range(self.gradient_repeats):
            for mine in rows.values():
                share[mine[stream.permutation(len(mine))[: self.batch_real]]] += 1
        for mine in rows.values():
            share[mine] /= self.gradient_repeats * min(len(mine), self.batch_real)
        residual = excess(layer, z, client.y) * torch.from_numpy(share).to(z)[:, None]
        sums = Tree({k: z.new_zeros(classes, *v.shape) for k, v in layer.items()})
        for c, mine in rows.items():
            at = torch.from_numpy(mine).to(z.device)
            sums.weight[c] = residual[at].mT @ z[at]
            if "bias" in sums:
                sums.bias[c] = residual[at].sum(0)
        return sums.map(lambda v: Rows(v, client.counts > 0))

    # ---- server ----------------------------------------------------------------------------------------------

    def aggregate(self, server: Server, shared: Tree, private: Tree, uploads: list[Tree]) -> tuple[Tree, Tree]:
        changes, _ = super().aggregate(server, shared, private, uploads)
        layer = shared.retrained
        if self.features_start == "redraw":
            classes, dim = layer.weight.shape
            before = self.noise(classes, dim, server.stream("creff", "features"), layer.weight)
        else:
            before = private.features
        features = self.match(before, layer, self.targets(uploads))
        changes["retrained"] = self.retrain(server, layer, features)
        return changes, Tree(features=features) if self.features_start == "kept" else Tree()

    def targets(self, uploads: list[Tree]) -> Tree:
        """G_c: Tree(weight Rows [K, K, d][, bias Rows [K, K]]); a class that nobody sent is absent."""
        weights = [u.n for u in uploads] if self.grad_weighting == "count" else None
        tables = {k: [u.grad[k] for u in uploads] for k in uploads[0].grad}
        none = {k: Rows(torch.zeros_like(t[0].values), torch.zeros_like(t[0].has)) for k, t in tables.items()}
        return Tree({k: merge(t, none[k], weights) for k, t in tables.items()})

    def match(self, features: Tensor, layer: Tree, targets: Tree) -> Tensor:
        """F [K, M, d] after `match_epochs` steps towards the gradients; classes without a target stay."""
        own = targets.weight.has.nonzero()[:, 0]
        if not len(own):
            return features
        wanted, distance = targets.map(lambda table: table.values[own]), DISTANCES[self.distance]
        moving = features[own]
        for _ in range(self.match_epochs):
            moving.requires_grad_()
            (slope,) = torch.autograd.grad(distance(gradient(layer, moving, own), wanted), moving)
            moving = moving.detach() - self.lr_feature * slope
        return features.index_copy(0, own, moving)

    def retrain(self, server: Server, layer: Tree, features: Tensor) -> Tree:
        """The layer after its epochs on all K M features; those of class 0 come first."""
        stream, drops = server.stream("creff", "retrain"), self.retrain_bias == "drop"
        classes, each, dim = features.shape
        if self.retrain_start == "new":
            start = new_layer(classes, dim, drops or "bias" in layer, stream, features)
        else:
            start = layer | {"bias": features.new_zeros(classes)} if drops else layer
        y = torch.arange(classes, device=features.device).repeat_interleave(each)
        made = server.train(
            Train(start, self.retrain_loss), Tree(z=features.flatten(0, 1)), y, batch_size=self.retrain_batch,
            epochs=self.retrain_epochs, lr=self.retrain_rate, weight_decay=0.0, stream=stream,
        )  # fmt: skip
        return made.only("weight") if drops else made

    def retrain_loss(self, net: Net, w: Tree, batch: Batch, view: View) -> Tensor:
        return batch.mean(F.cross_entropy(logits(w, batch.x.z), batch.y, reduction="none"))

    def retrain_rate(self, epoch: int) -> float:
        return self.lr_net

    # ---- what is evaluated -----------------------------------------------------------------------------------

    def scores(self, net: Net, tree: Tree, x: Tensor) -> dict[str, Tensor]:
        """Logits of the re-trained layer; beside them those of FedAvg's own."""
        z = net.embed(tree.net, x)
        return {"retrained": logits(tree.retrained, z), "network": net.classify(tree.net, z, z)}

    def global_model(self, shared: Tree, private: Tree) -> Model:
        return Model(shared, self.scores)


def new_layer(classes: int, dim: int, bias: bool, stream: RandomState, like: Tensor) -> Tree:
    """Tree(weight [K, d][, bias [K]]) as a linear layer begins: uniform within 1/sqrt(d)."""
    shapes: dict[str, Any] = {"weight": (classes, dim), "bias": (classes,)} if bias else {"weight": (classes, dim)}
    end = 1 / math.sqrt(dim)
    return Tree({k: torch.from_numpy(stream.uniform(-end, end, shape)).to(like) for k, shape in shapes.items()})


def logits(layer: Tree, z: Tensor) -> Tensor:
    """[..., K] of z [..., d]."""
    return F.linear(z, layer.weight, layer.get("bias"))


def excess(layer: Tree, z: Tensor, y: Tensor) -> Tensor:
    """softmax - e_y [..., K] of z [..., d] and y [...]: the gradient of the cross-entropy in the logits."""
    p = logits(layer, z).softmax(-1)
    return p - F.one_hot(y, p.shape[-1]).to(p)


def gradient(layer: Tree, features: Tensor, classes: Tensor) -> Tree:
    """S_c of features [C, M, d] of these classes [C]: Tree(weight [C, K, d][, bias [C, K]])."""
    each = features.shape[1]
    residual = excess(layer, features, classes[:, None].expand(-1, each))
    made = Tree(weight=residual.mT @ features / each)
    return made | {"bias": residual.mean(1)} if "bias" in layer else made
