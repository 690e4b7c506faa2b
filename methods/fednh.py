"""FedNH: a cosine head whose class prototypes start evenly spread and follow the clients' class means slowly.

Dai, Chen, Li, Heinecke, Sun and Xu, "Tackling data heterogeneity in federated learning with class
prototypes", AAAI 2023 (arXiv 2212.02758).

    paper                                                           here
    W^0: K unit vectors, their smallest distance the largest        `start`, with spread.py
    logits s <h/|h|, W_c>; cross-entropy over body and s, W fixed   `logits`, `loss`; the groups of `local`
    a client's class means of unit embeddings               (3)     `class_sums`, `directions`
    W_c <- unit(rho W_c + (1 - rho) m_c), m_c the clients'  (4)     `move`
        weighted mean direction
    personal model: the body as trained, and the W it had           `personal_model`

rho = 1 is FedUH, the fixed uniform head: W is sent once and nobody measures class means.

Against the authors' code (Yutong-Dai/FedNH @60c3161): it starts from K orthonormal rows, which is not the
problem that the paper states (`proto_init`); it drops the normalisation inside blocks for FedNH alone on
Tiny-ImageNet (field `resnet_norm`); its seeds are shifted copies of each other and all its clients shuffle
alike (fields `client_sampling`, `client_seed`). Preset official_code restores all of these. What the text
leaves open follows the code; its norm-10 clip and plain average are fields (`grad_clip_norm`,
`model_weighting`).

Checked against: plain NumPy on three vectors; from W = I and rho = 0.9 two clients that own class 0 with 3
and 1 samples move W_0 to (0.997269, 0.073856, 0). No table of the paper was at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from protofl import same
from protofl.errors import UserError
from protofl.method import (
    Batch,
    Bill,
    Client,
    Diverged,
    Group,
    Last,
    Method,
    Model,
    Program,
    Rows,
    Same,
    Server,
    Survey,
    Task,
    Train,
    Tree,
    View,
    choice,
    flag,
    need,
    number,
)

from . import spread
from .once import once
from .prototypes import alive, class_sums, present, unit

if TYPE_CHECKING:
    from protofl.nets import Net
    from protofl.protocol import Protocol

LEAST = 1e-12
"""A shorter embedding or mean has no direction."""

ABSENT = -1e9
"""The logit of a masked class: its softmax is exactly 0, yet the loss of a padding row stays finite."""

STARTS: dict[str, Callable[..., Any]] = {
    "maxmin": spread.maxmin,
    "orthogonal": spread.orthogonal,
    "random_unit": spread.random_unit,
}

Weight = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
WEIGHTS: dict[str, Weight] = {
    "count": lambda n, has, mu, w: n * has,
    "uniform_present": lambda n, has, mu, w: has,
    "uniform_all": lambda n, has, mu, w: torch.ones_like(has),
    "confidence": lambda n, has, mu, w: (w * mu).sum(1).exp() * has,
}
"""Weight [K] of a client's means mu [K, d]: n [K] samples, has [K] 1 or 0, w [K, d] the prototypes."""


@dataclass(frozen=True)
class FedNH(Method):
    """shared: net (the body and `scale` [1]), proto W [K, d]. upload: net, m Rows n_c mu_c [K, d], n [K]."""

    cost: ClassVar[float] = 1.2

    same: ClassVar[tuple[Same, ...]] = (
        *(Same(option, (), "with rho = 1 prototypes never move", same.option_is("rho", 1.0), "rho=0.9")
          for option in ("proto_client_weight", "client_proto_norm", "proto_pre_normalize", "proto_post_normalize",
                         "proto_transform", "pm_proto", "proto_timing")),
        Same("proto_client_weight", ("uniform_all",), "the mean is normalised before it is used",
             same.option_is("proto_pre_normalize", True), exact=False, against={"proto_client_weight": "uniform_present"}),
        Same("scale_init", (1,), "the network's own start", lambda scene: scene.net.default_scale == 1, "--net resnet18_gn2"),
        Same("scale_init", (20,), "the network's own start", lambda scene: scene.net.default_scale == 20, "--net simple_cnn"),
        Same("scale_weight_decay", (), "the scale does not move", same.option_is("scale_trainable", False),
             "scale_trainable=true"),
        Same("proto_transform", (), "nothing is augmented", same.no_augmentation, "--dataset cifar10"),
        Same("pm_proto", (), "only the global model is measured", same.global_model_alone, "--set metrics=gm,pm_v,pm_l"),
        Same("mask_absent_logits", (), "every client has every class", same.every_class_everywhere, "a smaller --beta"),
        Same("embed_layer", (), "the network has no projection", same.no_projection, "--net simple_cnn"),
    )  # fmt: skip
    together: ClassVar[Mapping[tuple[str, Any], Mapping[str, Any]]] = {
        ("pm_clients", "all"): {"pm_protocol": "refresh"}
    }

    # fmt: off
    preset: str = choice(
        "paper", "official_code", why="the text before the code; on Tiny-ImageNet official_code needs "
        "resnet_norm=none_fednh too", source="project")
    rho: float = number(
        0.9, 0.1, 0.3, 0.5, 0.7, 1.0, low=0, high=1, why="smoothing of W: the paper's sweep; 1 is FedUH",
        source="FedNH A.2, 4.3")
    proto_init: str = choice(
        "maxmin", "orthogonal", "random_unit", why="the stated problem; code: K orthonormal rows (K <= d)",
        source="FedNH 3; code FedUH.py:60")
    proto_client_weight: str = choice(
        "count", "uniform_present", "uniform_all", "confidence", why="by samples of the class; equally among "
        "its owners; their sum over all drawn; exp <W_c, mu>, means weighted by probability, unused in the code",
        source="FedNH eq. 4; code FedNH.py:123-144")
    client_proto_norm: str = choice(
        "unit_mean_unit", "unit_mean", "raw_mean_unit", why="mean of unit embeddings, made unit; not made "
        "unit; mean of raw ones, made unit", source="FedNH eq. 3; code")
    proto_pre_normalize: bool = flag(
        True, why="the mean is made unit before it is mixed in; a short one raises rho", source="FedNH code")
    proto_post_normalize: bool = flag(
        True, why="W is made unit after the mixing", source="FedNH code")
    scale_init: int | str = number(
        "by_net", 1, 20, 30, words=("by_net",), low=1, why="by_net: 20 for ResNets, else 1; 30: off in the code",
        source="FedNH code CNN.py:51, 108")
    scale_trainable: bool = flag(
        True, why="stated", source="FedNH 3")
    scale_weight_decay: bool = flag(
        True, why="one parameter group", source="FedNH code")
    proto_transform: str = choice(
        "train", "test", why="class means of augmented samples", source="FedNH code")
    proto_timing: str = choice(
        "final_pass", "last_epoch", why="class means of the final weights, or on the way in the last epoch",
        source="FedNH code")
    pm_proto: str = choice(
        "train_time", "updated", why="W of the personal model: as in training", source="FedNH code")
    mask_absent_logits: bool = flag(
        False, why="training keeps the logits of classes that a client lacks", source="FedNH code")
    embed_relu: bool = flag(
        True, why="false: no ReLU before h, which may then reach all of the sphere; cnn_fednh only",
        source="FedNH code")
    embed_layer: str = choice(
        "head_input", "encoder", why="nets with a projection: z, so that all methods share a body; or r",
        source="project")
    # fmt: on

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {},
        "official_code": {"proto_init": "orthogonal"},
    }
    needs: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "official_code": {
            "init": "torch", "init_seed": 2022, "partition_seed": "run", "client_sampling": "fednh_compat",
            "client_seed": "shared",
        }
    }  # fmt: skip
    open_fields: ClassVar[tuple[str, ...]] = (
        "model_weighting", "grad_clip_norm", "resnet_norm", "pm_clients", "report", "partition_min_classes",
        "client_seed",
    )  # fmt: skip

    @property
    def constant(self) -> tuple[str, ...]:  # type: ignore[override]
        """With rho = 1 the prototypes never move: they are sent once."""
        return ("proto",) if self.fixed else ()

    @property
    def fixed(self) -> bool:
        """Whether this is FedUH."""
        return self.rho == 1

    def bill(self) -> Bill:
        """The scale is one more parameter; B here is the body, without a projection that is not read."""
        if self.fixed:
            return Bill("B + 1", "B + 1")
        return Bill("B + 1 + K*q", "B + 1 + K_i*q + K*int", forward="n")

    def check(self, protocol: Protocol, net: Net) -> None:
        if self.proto_init == "orthogonal" and net.classes > self.width(net):
            raise UserError(
                f"fednh proto_init=orthogonal: {net.classes} classes cannot have orthogonal rows in "
                f"{self.width(net)} dimensions; proto_init=maxmin spreads any number"
            )
        if not self.embed_relu and not net.optional_relu:
            raise UserError(
                f"fednh embed_relu=false: {net.name} has no last ReLU that can be left out; model=cnn_fednh has one"
            )
        if self.preset == "official_code" and protocol.dataset == "tiny-imagenet":
            need("fednh preset=official_code on tiny-imagenet", protocol, resnet_norm="none_fednh")

    # ---- the network: a body and cosine logits -------------------------------------------------------------

    def on_encoder(self, net: Net) -> bool:
        """Whether the embedding is r although the net has a projection."""
        return self.embed_layer == "encoder" and net.projected is not None

    def width(self, net: Net) -> int:
        """d of the embedding."""
        return net.encoded if self.on_encoder(net) else net.dim

    def start(self, task: Task) -> tuple[Tree, Tree]:
        net = task.net
        body = task.initial.without(net.head)
        if self.on_encoder(net):
            body = body.without(net.projection)
        like = next(v for v in task.initial.values() if v.is_floating_point())
        scale = net.default_scale if self.scale_init == "by_net" else self.scale_init
        rows = STARTS[self.proto_init](task.classes, self.width(net), task.stream("fednh", "init"))
        proto = torch.from_numpy(rows).to(like.device, like.dtype)
        return Tree(net=body | {"scale": like.new_tensor([scale])}, proto=proto), Tree()

    def embed(self, net: Net, w: Tree, x: Tensor) -> tuple[Tensor, Tensor]:
        """r [rows, net.encoded] and the embedding h [rows, d]; `net` encodes once."""
        if not self.embed_relu:
            r = net.encode(w, x, relu=False)
            return F.relu(r), net.project(w, r)
        r = net.encode(w, x)
        return r, r if self.on_encoder(net) else net.embed(w, x)

    def logits(self, w: Tree, h: Tensor, proto: Tensor) -> Tensor:
        """s <h/|h|, W_c> [rows, K]; 0 without gradient for a dead row."""
        out: Tensor = w["scale"] * (unit(h, LEAST) @ proto.mT)
        return out

    def scores(self, net: Net, tree: Tree, x: Tensor) -> Tensor:
        """The cosine logits of a model Tree(net, proto)."""
        return self.logits(tree.net, self.embed(once(net), tree.net, x)[1], tree.proto)

    # ---- client --------------------------------------------------------------------------------------------

    def loss(self, net: Net, w: Tree, batch: Batch, view: View) -> tuple[Tensor, Tree]:
        r, h = self.embed(once(net), w, batch.x)
        logits = self.logits(w, h, view.shared.proto)
        if self.mask_absent_logits:
            logits = torch.where(view.counts > 0, logits, ABSENT)
        ce = batch.mean(F.cross_entropy(logits, batch.y, reduction="none"))
        return ce + net.aux_loss(w, r, batch), Tree(ce=ce, scale=w["scale"][0])

    def class_sums(self, net: Net, w: Tree, batch: Batch, view: View) -> Tree:
        """Tree(sum [K, d] of what `client_proto_norm` averages, n [K] rows of a class)."""
        h = self.embed(once(net), w, batch.x)[1]
        rows = batch.onehot(net.classes)
        if self.proto_client_weight == "confidence":
            p = self.logits(w, h, view.shared.proto).softmax(-1)
            return Tree(sum=class_sums(rows * p, unit(h, LEAST)).sum, n=rows.sum(0))
        return class_sums(rows, h if self.client_proto_norm == "raw_mean_unit" else unit(h, LEAST))

    def directions(self, sums: Tree) -> Tree:
        """Class sums -> Tree(m Rows n_c mu_c [K, d], n [K] int64); a class without a direction is absent."""
        mean = sums.sum / sums.n.clamp_min(1)[:, None]
        again = self.client_proto_norm != "unit_mean" or self.proto_client_weight == "confidence"
        has = (sums.n > 0) & alive(mean, LEAST)
        n = sums.n * has
        return Tree(m=Rows(n[:, None] * (unit(mean, LEAST) if again else mean), has), n=n.round().to(torch.int64))

    def local(self, client: Client, shared: Tree, own: Tree) -> Program:
        self.refuse_long(shared.proto)
        groups = self.groups()
        if self.fixed:
            return Tree(net=(yield Train(shared.net, self.loss, groups))), Tree()
        if self.proto_timing == "last_epoch":
            w, sums = yield Train(shared.net, self.loss, groups, tally=self.class_sums)
        else:
            w = yield Train(shared.net, self.loss, groups)
            stream = client.stream("fednh", "survey")
            sums = yield Survey(w, self.class_sums, augment=self.proto_transform == "train", stream=stream)
        return Tree(net=w) | self.directions(sums), Tree()

    def groups(self) -> tuple[Group, ...]:
        """What moves: the body, and the scale with or without decay. All share one clip."""
        body, decay = Group("(?!scale$)"), None if self.scale_weight_decay else 0.0
        return (body, Group("scale$", weight_decay=decay)) if self.scale_trainable else (body,)

    def refuse_long(self, proto: Tensor) -> None:
        """Cosine logits need unit rows. Diverged (not finite) rows pass: the run record says so."""
        if self.proto_post_normalize and bool(((proto.norm(dim=1) - 1).abs() > 1e-5).any()):
            raise RuntimeError("fednh: the received prototypes are not of length 1")

    # ---- server --------------------------------------------------------------------------------------------

    def aggregate(self, server: Server, shared: Tree, private: Tree, uploads: list[Tree]) -> tuple[Tree, Tree]:
        net = server.merge(shared.net, [u.net for u in uploads])
        if bool(net["scale"] <= 0):
            raise Diverged(
                f"fednh: the averaged scale fell to {float(net['scale']):g} in round {server.round}; below 0 it "
                f"reverses every prediction, a lower client_lr or scale_trainable=false keeps it positive"
            )
        if self.fixed:
            return Tree(net=net), Tree()
        return Tree(net=net, proto=self.move(shared.proto, uploads)), Tree()

    def move(self, proto: Tensor, uploads: list[Tree]) -> Tensor:
        """Equation 4: W [K, d] after a round; a class that no client sent keeps its row bit for bit."""
        total, mass = torch.zeros_like(proto), proto.new_zeros(len(proto))
        seen = torch.zeros(len(proto), dtype=torch.bool, device=proto.device)
        for u in uploads:
            has, n = u.m.has.to(proto.dtype), u.n.to(proto.dtype)
            mu = torch.where(u.m.has[:, None], u.m.values / n.clamp_min(1)[:, None], 0.0)
            weight = WEIGHTS[self.proto_client_weight](n, has, mu, proto)
            total, mass, seen = total + weight[:, None] * mu, mass + weight, seen | u.m.has
        mean = total / torch.where(seen, mass, 1.0)[:, None]
        target = unit(mean, LEAST) if self.proto_pre_normalize else mean
        new = self.rho * proto + (1 - self.rho) * target
        moves = seen & alive(new, LEAST)  # W_c and its target may cancel: then W_c stays too
        return torch.where(moves[:, None], unit(new, LEAST) if self.proto_post_normalize else new, proto)

    # ---- what is evaluated ---------------------------------------------------------------------------------

    def global_model(self, shared: Tree, private: Tree) -> Model:
        return Model(shared, self.scores)

    def personal_model(self, client: Client, shared: Tree, own: Tree, last: Last) -> Model:
        proto = last.received.proto if self.pm_proto == "train_time" else shared.proto
        return Model(Tree(net=last.upload.net, proto=proto), self.scores)

    def prototypes(self, shared: Tree, private: Tree) -> Rows:
        return Rows(shared.proto, torch.ones(len(shared.proto), dtype=torch.bool, device=shared.proto.device))

    def client_prototypes(self, upload: Tree) -> tuple[Tensor, Tensor] | None:
        if "m" not in upload:
            return None
        rows, labels = present(upload.m)
        return unit(rows, LEAST), labels
