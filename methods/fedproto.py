"""FedProto: clients share no weights, only the mean embeddings of their classes, and train towards the global ones.

Tan, Long, Liu, Zhou, Lu, Jiang and Zhang, "FedProto: Federated prototype learning across heterogeneous
clients", AAAI 2022 (arXiv 2105.00243), algorithm 1.

    paper                                                       here
    h = f_i(x), logits g_i(h); every client keeps its own       `features`; `enrol` and `local`
    L = L_S + lambda L_R                                        `loss`
    L_R: distance to the global prototypes of the batch         `penalty`; the code's form by default (`reg_form`)
    p_ic = mean of h over the class c of client i               `class_sums`, with the final weights
    C_c = mean of p_ic over the owners of c                     `aggregate`; the code's by default (`proto_weighting`)
    y = argmin_c |h - C_c|                                      `scores`, "proto"; "head" beside it

There is no global model. A class without a global prototype pulls nobody. The personal model of a round
predicts with the prototypes that the round made.

Against the authors' code (yuetan031/FedProto; preset official_code): it averages embeddings on the way through
the last epoch, in train mode (`proto_timing`), predicts among the client's own classes (`proto_candidates`),
and every client starts from weights of its own (`common_init`); on CIFAR-10 its ResNet's prototype is the
feature map before pooling (`embed`). Not copied: counters of right answers that are never reset between
clients and rules, an ImageNet start, another network per client. Preset fednh_code is the FedProto of
Yutong-Dai/FedNH. What a setting fixes (batch size, momentum, clip, last short batch, epochs) is the
experiment's; published are E = 1, batches of 8, rate 0.01, momentum 0.5.

Checked against: hand-made vectors; two clients with 30 and 10 samples whose means are (1, 0) and (3, 4) give
C = (2, 2), and (1.5, 1) by counts. No table of the paper was at hand.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    number,
)

from .once import once
from .prototypes import blank, class_means, class_sums, merge, present

if TYPE_CHECKING:
    from protofl.nets import Net
    from protofl.protocol import Protocol

TALLIES = {"last_epoch": "last", "all_epochs": "all"}
"""Epochs whose embeddings are averaged, by `proto_timing`."""

FEDNH_CODE = {"lam": 0.1, "proto_init": "rand_uniform", "proto_timing": "last_epoch", "pm_proto": "train_time"}
OFFICIAL_CODE = {"proto_timing": "last_epoch", "proto_candidates": "own_known", "common_init": False}


def times_owners(fed: Any, played: Any, shared: Tree) -> Tree:
    """Prototypes without the second division by their owners that proto_weighting=paper_literal makes."""
    owners = torch.stack([u.proto.has for u in played.uploads]).sum(0).clamp_min(1)
    return shared | Tree(proto=Rows(shared.proto.values * owners[:, None], shared.proto.has))


known_at_once = same.both(
    same.everybody_drawn, same.option_is("proto_timing", "final_pass"), same.option_is("min_count", 1)
)
"""After round 0 every class that a client holds has a prototype, and in round 0 none has."""


@dataclass(frozen=True)
class FedProto(Method):
    """shared: proto C Rows [K, d] (and net, as far as it is averaged). own: net; with pm_proto=train_time proto.

    upload: proto p_i Rows [K, d], n [K] unless the weighting is uniform (and net, as far as it is averaged).
    """

    cost: ClassVar[float] = 1.2
    keeps_personal: ClassVar[bool] = True

    # fmt: off
    preset: str = choice(
        "cross_device", "paper", "official_code", "fednh_code", why="every setting here is shared by methods; paper: "
        "the same values", source="project")
    lam: float = number(
        0.1, 1.0, low=0, why="published for mse: CIFAR-10 0.1, MNIST and FEMNIST 1; FedNH's code 0.1",
        source="FedProto app. A; FedNH A.2")
    reg_form: str = choice(
        "mse", "sample_sq_l2", "class_mean_l2", why="published lambdas are for mse, d times smaller than the squared "
        "distance of the appendix; class_mean_l2: the printed one", source="FedProto code")
    reg_missing: str = choice(
        "self", "mask", why="rows without a global prototype are averaged as 0, or left out", source="FedProto code")
    proto_weighting: str = choice(
        "uniform", "count", "paper_literal", why="equal owners; by samples; the printed formula, which divides by the "
        "number of owners once more", source="FedProto code")
    proto_init: str = choice(
        "none", "rand_uniform", why="no penalty in round 0; or random prototypes", source="FedProto code; FedNH code")
    proto_timing: str = choice(
        "final_pass", "last_epoch", "all_epochs", why="means of the final weights, or on the way in train mode",
        source="FedProto paper")
    embed: str = choice(
        "pooled", "feature_map", why="of ResNets: what the output layer reads, or the map before pooling",
        source="FedProto paper; code")
    embed_relu: str = choice(
        "as_net", "add", why="add: a ReLU more before output layer and prototypes", source="FL-bench code")
    predict: str = choice(
        "proto", "head", why="the headline; both are recorded", source="FedProto paper")
    proto_candidates: str = choice(
        "all_known", "own_known", why="classes among which prototypes decide; own_known means something under PM(V) "
        "alone", source="FedProto paper; protocol 5.2")
    pm_proto: str = choice(
        "updated", "train_time", why="prototypes of the personal model: what this round made, or what it trained with",
        source="FedProto code; FedNH code")
    share_model: str = choice(
        "none", "fedavg_body", "fedavg_all", why="the others average the body or everything, as FedAvg",
        source="FedProto paper")
    absent_class: str = choice(
        "keep_old", "drop", why="a class that nobody sent in a round", source="FedNH code")
    common_init: bool = flag(
        True, why="prototypes are compared across bodies; the code: own weights for each", source="protocol 2.6")
    min_count: int = number(
        1, low=1, why="classes with fewer samples stay home: the mean of one sample is its embedding", source="project")
    # fmt: on

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "cross_device": {"lam": 0.1},
        "paper": {},
        "official_code": OFFICIAL_CODE,
        "fednh_code": FEDNH_CODE,
    }
    same: ClassVar[tuple[Same, ...]] = (
        Same("proto_weighting", ("count",), "the owners of a class have equally many samples of it", same.equal_counts,
             "--partition dir_class", exact=False),
        Same("proto_weighting", ("paper_literal",), "a class is divided by its owners once more", exact=False,
             against={"proto_weighting": "count"}, beside={"lam": 0.0}, rescale=times_owners),
        Same("reg_form", ("sample_sq_l2",), "the same distance times the embedding's width", same.option_is("embed", "pooled"),
             exact=False, scaled={"lam": lambda scene: scene.method.lam / scene.net.dim}),
        Same("reg_missing", (), "every class of a client has a prototype from round 1 on", known_at_once, "--participation 0.2"),
        Same("reg_missing", (), "no row asks which classes are known",
             same.either(same.option_is("reg_form", "class_mean_l2"), same.option_is("proto_init", "rand_uniform")),
             "reg_form=mse"),
        Same("absent_class", (), "in every round somebody sends every class", known_at_once, "--participation 0.2"),
        Same("proto_candidates", (), "every client has every class", same.every_class_everywhere, "a smaller --beta"),
        Same("pm_clients", (), "all clients take part", same.everybody_drawn, "--participation 0.2"),
    )  # fmt: skip
    open_fields: ClassVar[tuple[str, ...]] = (
        "batch_size", "momentum", "grad_clip_norm", "drop_last", "local_epochs", "pm_clients",
    )  # fmt: skip

    def bill(self) -> Bill:
        """m: numbers of a feature map."""
        row = "m" if self.on_map else "q"
        net = {"none": "", "fedavg_body": "B + ", "fedavg_all": "P + "}[self.share_model]
        return Bill(
            down=f"{net}K_t*{row}",
            up=f"{net}K_i*{row}" + ("" if self.proto_weighting == "uniform" else " + K*int"),
            forward="E*n" if self.proto_timing == "all_epochs" else "n",
            state=f"P + K_t*{row}" if self.pm_proto == "train_time" else "P",
            server="class means" if self.share_model == "none" else "an average, class means",
        )

    def check(self, protocol: Protocol, net: Net) -> None:
        if self.on_map and not net.pools:
            raise UserError(
                f"fedproto embed=feature_map: {net.name} pools no feature map, the ResNets do; embed=pooled reads any net"
            )
        if self.preset == "official_code" and protocol.dataset == "cifar10" and net.pools and not self.on_map:
            raise UserError(
                f"fedproto preset=official_code on cifar10 with {net.name}: that code's prototype is the feature map; "
                "add embed=feature_map, or set preset=paper and its options one by one"
            )

    # ---- the network -----------------------------------------------------------------------------------------

    @property
    def on_map(self) -> bool:
        """Whether prototypes are feature maps."""
        return self.embed == "feature_map"

    def features(self, net: Net, w: Tree, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """r [rows, net.encoded], what the output layer reads [rows, net.dim], h [rows, d]; encodes once."""
        net = once(net)
        maps = net.feature_map(w, x) if self.on_map else None
        r = net.encode(w, x) if maps is None else net.pool(maps)
        read = net.embed(w, x) if maps is None else net.project(w, r) if net.reads_z else r
        if self.embed_relu == "add":
            read = F.relu(read)
        return r, read, read if maps is None else maps.flatten(1)

    def scores(self, net: Net, tree: Tree, x: Tensor) -> dict[str, Tensor | None]:
        """Of a model Tree(net[, proto Rows of the candidates]): minus the distances, -inf for other classes; logits.

        By name, the headline first; without a candidate "proto" is undefined.
        """
        _, read, h = self.features(net, tree.net, x)
        near: Tensor | None = None
        if "proto" in tree:  # by differences: products would break ties at random
            far = torch.cdist(h, tree.proto.values, compute_mode="donot_use_mm_for_euclid_dist")
            near = torch.where(tree.proto.has, -far, -torch.inf)
        found = {"proto": near, "head": net.classify(tree.net, read, read)}
        return {name: found[name] for name in sorted(found, key=lambda name: name != self.predict)}

    # ---- client ----------------------------------------------------------------------------------------------

    def enrol(self, client: Client) -> Tree:
        """The first weights: everybody's, or drawn as those are, from the client's private stream."""
        task = client.task
        own = Tree(net=task.initial)
        if not self.common_init:
            fresh = task.net.init(task.client_stream("fedproto", "init", client.id))
            own = Tree(net=Tree({k: v.to(task.initial[k]) for k, v in fresh.items()}))
        if self.pm_proto == "train_time":
            own["proto"] = blank(task.classes, self.width(task), task.initial)
        return own

    def penalty(self, h: Tensor, batch: Batch, proto: Rows) -> Tensor:
        """L_R of embeddings h [rows, d]; rows and classes without a prototype pass no gradient."""
        if self.reg_form == "class_mean_l2":
            mean = class_means(class_sums(batch.onehot(len(proto.has)), h))
            both = mean.has & proto.has
            gaps = torch.where(both[:, None], mean.values - proto.values, 0.0)
            lengths: Tensor = torch.linalg.vector_norm(gaps, dim=1)
            return lengths.sum()
        known = proto.has[batch.y]
        squares = torch.where(known[:, None], proto.values[batch.y] - h, 0.0).square()
        rows = squares.mean(1) if self.reg_form == "mse" else squares.sum(1)
        return batch.mean(rows, known if self.reg_missing == "mask" else None)

    def loss(self, net: Net, w: Tree, batch: Batch, view: View) -> tuple[Tensor, Tree]:
        """L_S + lambda L_R. Recorded beside the terms: the smallest distance of two prototypes."""
        r, read, h = self.features(net, w, batch.x)
        ce = batch.mean(F.cross_entropy(net.classify(w, read, read), batch.y, reduction="none"))
        pull = self.penalty(h, batch, view.shared.proto)
        return ce + net.aux_loss(w, r, batch) + self.lam * pull, Tree(ce=ce, pull=pull) | view.const

    def class_sums(self, net: Net, w: Tree, batch: Batch, view: View) -> Tree:
        """Tree(sum [K, d] of the embeddings, n [K])."""
        return class_sums(batch.onehot(net.classes), self.features(net, w, batch.x)[2])

    def local(self, client: Client, shared: Tree, own: Tree) -> Program:
        start, const = own.net | shared.get("net", Tree()), closest(shared.proto)
        if self.proto_timing == "final_pass":
            w = yield Train(start, self.loss, const=const)
            stream = client.stream("fedproto", "survey")
            sums = yield Survey(w, self.class_sums, augment=True, stream=stream)
        else:
            epochs = TALLIES[self.proto_timing]
            w, sums = yield Train(start, self.loss, const=const, tally=self.class_sums, tally_epochs=epochs)
        kept = Tree(net=w, proto=shared.proto) if self.pm_proto == "train_time" else Tree(net=w)
        return self.message(client, sums) | self.averaged(client.task.net, w), kept

    def message(self, client: Client, sums: Tree) -> Tree:
        """Class sums -> Tree(proto Rows [K, d][, n [K] int64: samples of the classes that are sent])."""
        mean = class_means(sums)
        has = mean.has & (client.counts >= self.min_count)
        upload = Tree(proto=Rows(mean.values, has))
        if self.proto_weighting != "uniform":
            upload["n"] = (client.counts * has).round().to(torch.int64)
        return upload

    def averaged(self, net: Net, w: Tree) -> Tree:
        """Tree(net=what of w is averaged as FedAvg does), or nothing."""
        if self.share_model == "none":
            return Tree()
        return Tree(net=w.without(net.head) if self.share_model == "fedavg_body" else w)

    # ---- server ----------------------------------------------------------------------------------------------

    def start(self, task: Task) -> tuple[Tree, Tree]:
        proto = blank(task.classes, self.width(task), task.initial)
        if self.proto_init == "rand_uniform":
            drawn = task.stream("fedproto", "init").random_sample(tuple(proto.values.shape))
            proto = Rows(torch.from_numpy(drawn).to(proto.values), torch.ones_like(proto.has))
        return Tree(proto=proto) | self.averaged(task.net, task.initial), Tree()

    def width(self, task: Task) -> int:
        """d of the embedding."""
        net = task.net
        if not self.on_map:
            return net.dim
        like = next(v for v in task.initial.values() if v.is_floating_point())
        height, wide, channels = net.shape
        with torch.no_grad():
            return net.bound("eval").feature_map(task.initial, like.new_zeros(1, channels, height, wide)).numel()

    def aggregate(self, server: Server, shared: Tree, private: Tree, uploads: list[Tree]) -> tuple[Tree, Tree]:
        changes = Tree(proto=self.means(shared.proto, uploads))
        if "net" in shared:
            changes["net"] = server.merge(shared.net, [u.net for u in uploads])
        return changes, Tree()

    def means(self, old: Rows, uploads: list[Tree]) -> Rows:
        """C [K, d] after a round; what becomes of a class that nobody sent says `absent_class`."""
        tables = [u.proto for u in uploads]
        if any(table.values.shape != old.values.shape for table in tables):
            raise RuntimeError(f"fedproto: an uploaded table is not of shape {list(old.values.shape)}")
        if self.absent_class == "drop":
            old = Rows(old.values, torch.zeros_like(old.has))
        weights = None if self.proto_weighting == "uniform" else [u.n for u in uploads]
        proto = merge(tables, old, weights)
        if self.proto_weighting != "paper_literal":
            return proto
        owners = torch.stack([table.has for table in tables]).sum(0)
        return Rows(proto.values / owners.clamp_min(1)[:, None], proto.has)

    # ---- what is evaluated -----------------------------------------------------------------------------------

    def personal_model(self, client: Client, shared: Tree, own: Tree, last: Last | None) -> Model:
        """The client's weights, and C after this round, or C as this client last received it to train with."""
        tree, table = Tree(net=own.net), own.proto if self.pm_proto == "train_time" else shared.proto
        few = self.proto_candidates == "own_known"
        has = table.has & (client.counts > 0) if few else table.has
        if bool(has.any()):
            tree["proto"] = Rows(table.values, has)
        return Model(tree, self.scores, loss="head", only={"proto": ("v",)} if few else {})

    def prototypes(self, shared: Tree, private: Tree) -> Rows:
        table: Rows = shared.proto
        return table

    def client_prototypes(self, upload: Tree) -> tuple[Tensor, Tensor]:
        return present(upload.proto)


def closest(proto: Rows) -> Tree:
    """Tree(proto_gap [], the smallest distance of two known prototypes: a collapse shows here), if there are two."""
    known = proto.values[proto.has]
    return Tree(proto_gap=torch.pdist(known).min()) if len(known) > 1 else Tree()
