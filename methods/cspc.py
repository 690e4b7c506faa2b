"""CSPC: calibrated prototypes of clusters on top of another method's clients: `fedavg+cspc`, `moon+cspc`.

The part of FedCSPC (Qi et al., ACM Multimedia 2023, arXiv 2308.03457) that its paper presents as a module for
other algorithms; `fedcspc` is it on FedAvg. What stands where in the paper, and against the authors' code:
fedcspc.py.

The method behind it trains as it does, its loss gains kappa (L_P + L_A + L_Ed) on h = E(x); then clients send
prototypes of clusters, on which the server calibrates projection and output layer and builds exemplars. So the
method must share a whole network with a plain output layer, and predict with it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.random import RandomState
from torch import Tensor

from protofl import same
from protofl.errors import UserError
from protofl.method import (
    Batch,
    Bill,
    Client,
    Collect,
    Diverged,
    Method,
    Model,
    Noise,
    Plugin,
    Program,
    Rows,
    Same,
    Server,
    Task,
    Train,
    Tree,
    View,
    choice,
    flag,
    number,
)

from . import calibration, clusters, relations
from .fedavg import FedAvg
from .once import once
from .prototypes import blank, unit

if TYPE_CHECKING:
    from protofl.nets import Net

BATCH = 100  # of the calibration
WEIGHT_DECAY = 1e-5  # of the calibration
ALL_TRIPLETS = 64  # batches up to this size use all their triplets
TRIES = 20  # halvings of a calibration's rate that blows up

REGULARISERS: dict[str, tuple[str, ...]] = {
    "P+A+E": ("point", "angle", "edge"),
    "P": ("point",),
    "P+A": ("point", "angle"),
    "P+E": ("point", "edge"),
    "none": (),
}
REG_WEIGHTS = {
    "1/1/1": {"point": 1.0, "angle": 1.0, "edge": 1.0},
    "1/0.2/0.2": {"point": 1.0, "angle": 0.2, "edge": 0.2},
}
BN_MODES = {"eval": "eval", "train": "train_frozen"}

Fuse = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]


def _raw(o: Tensor, q: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    return o, (q / tau).exp()


def _softmax(o: Tensor, q: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    return o.softmax(-1), (q / tau).softmax(-1)


def _l2(o: Tensor, q: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    return F.normalize(o, dim=-1, eps=1e-12), F.normalize(q.clamp_min(-1), dim=-1, eps=1e-12)


def _minmax(o: Tensor, q: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    def scaled(v: Tensor) -> Tensor:
        low = v.amin(-1, keepdim=True)
        return (v - low) / (v.amax(-1, keepdim=True) - low).clamp_min(1e-12)

    return scaled(o), scaled(q.clamp_min(-1))


NORMS: dict[str, Fuse] = {"softmax": _softmax, "code_raw": _raw, "l2": _l2, "minmax": _minmax}
"""Logits o and similarities q [rows, K] (-inf: no exemplar) made comparable."""


@dataclass(frozen=True)
class CSPC(Plugin):
    """shared: + u_g Rows U [K, d]. upload: + u [N_i, d], label [N_i] (per_sample: + owned [K_i], the client's
    samples of the classes in label). private: exemplars Rows e [K, q]; averaged, (H, F) before the calibration, which
    is stored for pictures alone (latest_all: latest, the sets by client id; previous_calibrated: head, the last (H, F)).
    """

    cost: ClassVar[float] = 3.5
    values_of: ClassVar[str] = "fedcspc"

    same: ClassVar[tuple[Same, ...]] = (
        *(Same(option, (), "a class has one cluster", same.option_is("n_clusters", 1), "n_clusters=3")
          for option in ("kmeans_init", "kmeans_space")),
        *(Same(option, (), "neither angles nor edges are compared", same.option_is("local_reg", "P", "none"),
               "local_reg=P+A+E") for option in ("reg_form", "reg_weights")),
        Same("max_triplets", (), "batches of up to 64 use all their triplets",
             lambda scene: scene.protocol.batch_size <= ALL_TRIPLETS, "--batch-size 128"),
        Same("max_triplets", (), "no angle is compared, or all are",
             same.either(same.option_is("local_reg", "P", "P+E", "none"), same.option_is("reg_form", "smooth_l1_code")),
             "local_reg=P+A+E"),
        Same("neg_mix", (), "half-way is the same from both ends", same.option_is("lam_u", 0.5), "lam_u=0.3", exact=False),
        *(Same(option, (), "there is no margin loss", same.option_is("calib_losses", "ce", "ce+con"), "calib_losses=ce+con+mar")
          for option in ("pos_mix", "neg_mix", "mix_scope", "n_aug", "lam_u", "margin_metric", "alpha")),
        *(Same(option, (), "there is no contrastive loss", same.option_is("calib_losses", "ce", "ce+mar"),
               "calib_losses=ce+con+mar") for option in ("con_form", "tau_g", "sigma_mode")),
        Same("sigma_mode", (), "that form has no source weights", same.option_is("con_form", "supcon_code"), "con_form=weighted"),
        Same("sigma_mode", ("exp_both",), "the losses differ by a constant", exact=False, against={"sigma_mode": "denominator"}),
        *(Same(option, (), "nothing is calibrated", same.option_is("calib_epochs", 0), "calib_epochs=100")
          for option in ("pos_mix", "neg_mix", "mix_scope", "n_aug", "lam_u", "margin_metric", "alpha", "con_form", "tau_g",
                         "sigma_mode", "calib_losses", "eta", "calib_lr_schedule", "calib_lr_clock")),
        Same("calib_lr_clock", (), "T is 100", same.field_is("rounds", 100), "another --rounds"),
        Same("calib_lr_clock", (), "the rate is constant", same.option_is("calib_lr_schedule", "const_0.01"),
             "calib_lr_schedule=code"),
        Same("proto_bn_mode", (), "the network has no BatchNorm", same.no_batchnorm, "--net resnet18_bn", exact=False),
        Same("proto_transform", (), "nothing is augmented", same.no_augmentation, "--dataset cifar10"),
        Same("proto_drop_last", (), "no client has a short last batch", same.no_short_batch, "another --batch-size", exact=False),
        Same("pool", (), "all clients take part in every round", same.everybody_drawn, "--participation 0.2"),
    )  # fmt: skip

    @classmethod
    def refuses(cls, base: type[Method]) -> str:
        mine = (base.global_model, base.prototypes, base.client_prototypes)
        if mine == (FedAvg.global_model, Method.prototypes, Method.client_prototypes):
            return ""
        return (f"cspc calibrates the output layer of a network that all share and predict with, {base.__name__} "
                "predicts otherwise; fedavg, fedprox and moon fit")  # fmt: skip

    def bill(self) -> Bill:
        b = super().bill()
        if not self.n_repeat:
            return b
        up = f"{b.up} + N_i*d + N_i*int" + (" + K_i*int" if self.ug_weighting == "per_sample" else "")
        return b._replace(
            down=f"{b.down} + K_t*d",
            up=up,
            forward="n" if b.forward == "0" else f"{b.forward} + n",
            server="an average, calibration",
        )

    # fmt: off
    n_clusters: int = number(
        3, 1, 2, 4, low=1, why="k: middle of the paper's set; the code has one", source="FedCSPC 5")
    kmeans_init: str = choice(
        "kmeans++", "random", why="the paper is silent; never two equal starts", source="project")
    kmeans_space: str = choice(
        "raw", "l2norm", why="the paper is silent; l2norm: clusters of directions", source="project")
    sample_ratio: float = number(
        0.5, 0.8, 1.0, above=0, high=1, why="r: share of a cluster in a subset; code 0.8", source="FedCSPC 5")
    sample_replacement: bool = flag(
        False, why="a proportion names a subset; the code draws with replacement", source="FedCSPC 4")
    min_samples_per_class: int = number(
        5, 1, low=1, why="a smaller class sends one mean; 1: off", source="FedCSPC code")
    n_repeat: int = number(
        5, 0, 1, 2, 4, 8, 16, low=0, why="R: subsets per cluster; 0: FedAvg", source="FedCSPC 5, Fig. 5")
    local_reg: str = choice(
        "P+A+E", "P", "P+A", "P+E", "none", why="all three; the code runs P alone", source="FedCSPC 4")
    reg_form: str = choice(
        "abs", "smooth_l1_code", why="differences over different labels; code: all entries, smooth L1",
        source="FedCSPC 4; code RGA.py")
    reg_weights: str = choice(
        "1/1/1", "1/0.2/0.2", why="of P, A, Ed: the paper has one kappa; code: the other", source="FedCSPC 4")
    max_triplets: int | str = number(
        512, 4096, words=("all",), low=1, why="of a batch of more than 64; the paper is silent",
        source="project")
    kappa: float = number(
        0.5, 0.01, 0.05, 0.1, low=0, why="weight of P + A + Ed: of the paper's set the code's value",
        source="FedCSPC 5; code mu")
    tau_l: float = number(
        0.5, above=0, why="temperature of L_P", source="FedCSPC 5; code temperature")
    pos_mix: str = choice(
        "from_partner", "from_anchor", why="extrapolation beyond the partner, p + lam_u (p - u), as in the "
        "code; beyond the anchor it lies nearer than the partner", source="FedCSPC 4 (equation not at hand); code")
    neg_mix: str = choice(
        "toward_anchor", "toward_negative", why="positive information goes into negatives; code: the other",
        source="FedCSPC 4")
    mix_scope: str = choice(
        "same_client", "any", why="partners from the local prototype set", source="FedCSPC 4; code")
    n_aug: int = number(
        5, 1, 3, 7, 9, low=1, why="artificial pairs per prototype; code: one", source="FedCSPC 5")
    lam_u: float = number(
        0.5, 0.1, 0.3, low=0, high=1, why="mixing weight: of the paper's set the code's value",
        source="FedCSPC 5; code posi_lambda, nega_lambda")
    margin_metric: str = choice(
        "l2", "cosine", why="a triplet loss on z; the code's norm runs over the batch", source="FedCSPC 4")
    alpha: float = number(
        1.0, low=0, why="margin of L_mar", source="FedCSPC 5; code margin")
    con_form: str = choice(
        "weighted", "supcon_code", why="weighted by source; code: not, and with the anchor itself",
        source="FedCSPC 4")
    tau_g: float = number(
        0.5, 0.07, above=0, why="temperature of L_con; code 0.07", source="FedCSPC 5")
    sigma_mode: str = choice(
        "pull_push", "denominator", "exp_both", "term", "none", why="place of the source weight: only here "
        "it favours both pulling across and pushing within sources", source="FedCSPC 4 (equation not at hand)")
    calib_losses: str = choice(
        "ce+con+mar", "ce", "ce+con", "ce+mar", why="all three; the code's command runs ce alone",
        source="FedCSPC 4")
    eta: float = number(
        0.1, 0.01, 0.05, 0.5, low=0, why="weight of L_con + L_mar: of the paper's set the code's value",
        source="FedCSPC 5; code re_mu, re_beta")
    calib_epochs: int = number(
        100, 0, 10, 50, low=0, why="the paper is silent", source="FedCSPC code")
    calib_lr_schedule: str = choice(
        "code", "const_0.01", why="falls with rounds and epochs", source="FedCSPC code re_training.py:37-44")
    calib_lr_clock: str = choice(
        "absolute", "fraction", why="falls after rounds 5 and 40, or these shares of T", source="FedCSPC code")
    calib_init: str = choice(
        "averaged", "previous_calibrated", why="where (H, F) start", source="FedCSPC code")
    exemplar: str = choice(
        "correct_only", "all", why="means of the correctly classified prototypes", source="FedCSPC code")
    ug_weighting: str = choice(
        "per_prototype", "per_client", "per_sample", why="what counts equally in U_c", source="FedCSPC code")
    fusion_norm: str = choice(
        "softmax", "code_raw", "l2", "minmax", why="the paper's Norm() is not specified; code: logits, exp",
        source="FedCSPC 4; code")
    tau_f: float = number(
        0.5, 0.1, 1.0, above=0, why="temperature of the exemplars", source="FedCSPC code temp_final")
    lam_p: float = number(
        0.1, 0.0, 0.3, 0.5, 1.0, low=0, high=1, why="weight of the network in the fusion",
        source="FedCSPC 5; code final_weights")
    proto_bn_mode: str = choice(
        "eval", "train", why="of the pass that is clustered; train: batch statistics", source="FedCSPC code")
    proto_transform: str = choice(
        "train", "test", why="augmented samples are clustered", source="FedCSPC code")
    proto_drop_last: bool = flag(
        False, why="a dropped batch can lose a class; the code drops it", source="project")
    pool: str = choice(
        "round", "latest_all", why="sets of this round; code: the last set of every client", source="FedCSPC 4")
    # fmt: on

    # ---- client: three regularisers of h -------------------------------------------------------------------

    def loss(self, net: Net, w: Tree, batch: Batch, view: View) -> tuple[Tensor, Tree]:
        """The loss of the method behind this plug-in + kappa (L_P + L_A + L_Ed)."""
        net = once(net)  # both read the same h
        returned = super().loss(net, w, batch, view)  # type: ignore[misc]
        loss, terms = returned if isinstance(returned, tuple) else (returned, Tree())
        if not self.n_repeat or self.local_reg == "none":
            return loss, terms
        mine = self.regularisers(net.encode(w, batch.x), batch, view.shared.u_g)
        weights = REG_WEIGHTS[self.reg_weights]
        return loss + self.kappa * torch.stack([weights[k] * v for k, v in mine.items()]).sum(), terms | mine

    def regularisers(self, h: Tensor, batch: Batch, table: Rows) -> Tree:
        """The terms in use, of a batch of embeddings h [rows, d]; batch.noise chooses triplets, None: all."""
        at = relations.places(h, batch.y, batch.mask, table)
        out = Tree(point=relations.point(at, self.tau_l))
        others = REGULARISERS[self.local_reg][1:]
        shapes = (relations.lengths(at.h), at.wanted()) if others else ()
        for name in others:
            if name == "angle" and batch.noise is not None:
                out[name] = relations.sampled_angle(at, batch.noise)
            else:
                out[name] = relations.FORMS[self.reg_form][name](at, *shapes)
        return out

    def samples_triplets(self, batch_size: int) -> bool:
        """Whether batches are so large that L_A reads a sample of their triplets."""
        angle = "angle" in REGULARISERS[self.local_reg] and self.reg_form == "abs"
        return angle and self.n_repeat > 0 and batch_size > ALL_TRIPLETS and self.max_triplets != "all"

    def with_triplets(self, client: Client, program: Program) -> Program:
        """The same program, whose training by this loss receives the numbers that choose triplets."""
        stream, answer = client.stream("fedcspc", "triplets"), None
        while True:
            try:
                request = program.send(answer)
            except StopIteration as stop:
                return stop.value
            if isinstance(request, Train) and request.loss == self.loss:
                request = dataclasses.replace(request, noise=Noise((int(self.max_triplets),)), stream=stream)
            answer = yield request

    # ---- client: prototypes --------------------------------------------------------------------------------

    def local(self, client: Client, shared: Tree, own: Tree) -> Program:
        program = super().local(client, shared, own)
        if self.samples_triplets(client.task.protocol.batch_size):
            program = self.with_triplets(client, program)
        upload, *rest = yield from program
        if not self.n_repeat:
            return upload, *rest
        rows, read = yield Collect(
            upload.net,
            self.encoded,
            mode=self.collect_mode(client.task.net, upload.net),
            augment=self.proto_transform == "train",
            drop_last=self.proto_drop_last,
            stream=client.stream("fedcspc", "survey"),
        )
        return upload | self.represent(client, rows.h, client.y[read.to(client.y.device)]), *rest

    def collect_mode(self, net: Net, w: Tree) -> str:
        """Without batch statistics nobody sees batches: then both values read the samples in stored order."""
        return BN_MODES[self.proto_bn_mode] if w.only(net.buffers) else "eval"

    def encoded(self, net: Net, w: Tree, batch: Batch, view: View) -> Tree:
        """h of every row."""
        return Tree(h=net.encode(w, batch.x))

    def represent(self, client: Client, h: Tensor, y: Tensor) -> Tree:
        """Prototypes u [N_i, d] and their label [N_i], of embeddings h [n, d] with classes y [n]."""
        rows, labels = h.double().cpu().numpy(), y.cpu().numpy()
        classes = np.unique(labels).tolist()
        parts = [self.class_prototypes(rows[labels == c], client.stream("fedcspc", "kmeans", c)) for c in classes]
        sizes = torch.tensor([len(p) for p in parts])
        out = Tree(
            u=torch.from_numpy(np.concatenate(parts)).to(h.device, h.dtype),
            label=torch.tensor(classes).repeat_interleave(sizes).to(h.device),
        )
        if self.ug_weighting == "per_sample":
            out["owned"] = client.counts[classes].to(torch.int64)
        return out

    def class_prototypes(self, rows: clusters.Rows, stream: RandomState) -> clusters.Rows:
        """Prototypes [p, d] of one class with embeddings rows [n, d], by cluster, then by repeat."""
        if len(rows) < self.min_samples_per_class:
            return rows.mean(0, keepdims=True)  # type: ignore[no-any-return]
        labels = clusters.kmeans(
            rows, self.n_clusters, stream, init=self.kmeans_init, unit=self.kmeans_space == "l2norm"
        )
        means = [
            clusters.subset_means(
                rows[labels == j], stream,
                ratio=self.sample_ratio, repeats=self.n_repeat, replacement=self.sample_replacement,
            )
            for j in np.unique(labels)
        ]  # fmt: skip
        return np.concatenate(means)

    # ---- server --------------------------------------------------------------------------------------------

    def start(self, task: Task) -> tuple[Tree, Tree]:
        shared, private = super().start(task)
        net = task.net
        if not shared.get("net", Tree()).only(net.head):
            raise UserError(
                f"cspc calibrates the server's output layer, {type(self).__name__} has none there; "
                f"methods that share the whole network have (fedavg, fedprox, moon)"
            )
        u_g = blank(task.classes, net.encoded, task.initial)
        exemplars = blank(task.classes, net.projected or net.encoded, task.initial)
        return shared | Tree(u_g=u_g), private | Tree(exemplars=exemplars)

    def aggregate(self, server: Server, shared: Tree, private: Tree, uploads: list[Tree]) -> tuple[Tree, Tree]:
        changed, kept = super().aggregate(server, shared, private, uploads)
        if not self.n_repeat:
            return changed, kept
        sets = Tree({str(i): u.like(k for k in ("u", "label", "owned") if k in u) for i, u in zip(server.ids, uploads)})
        if self.pool == "latest_all":
            sets = private.get("latest", Tree()) | sets
            kept = kept | Tree(latest=sets)
        pool = pooled(sets)
        net = server.task.net
        averaged = changed.net.only(f"({net.projection}|{net.head})")
        head = self.calibrate(server, self.head_start(averaged, private), pool)
        if self.calib_init == "previous_calibrated":
            kept = kept | Tree(head=head)
        calibrated = changed.net | head
        u_g = calibration.class_table(pool.u, pool.label, self.importance(pool), shared.u_g)
        exemplars = self.exemplars(net, calibrated, pool, private.exemplars)
        return changed | Tree(net=calibrated, u_g=u_g), kept | Tree(exemplars=exemplars, averaged=averaged)

    def importance(self, pool: Tree) -> Tensor:
        """[N] weight of every pooled prototype in U."""
        if self.ug_weighting == "per_prototype":
            return torch.ones_like(pool.u[:, 0])
        alike = calibration.neighbours(pool.label, pool.source, same_client=True)[0].size.to(pool.u.dtype)
        weight: Tensor = (pool.owned if self.ug_weighting == "per_sample" else 1) / alike
        return weight

    def head_start(self, averaged: Tree, private: Tree) -> Tree:
        """(H, F) that the calibration starts from; averaged: those of the clients' average."""
        if self.calib_init == "previous_calibrated" and "head" in private:
            return private.head  # type: ignore[no-any-return]
        return averaged

    def calibrate(self, server: Server, head: Tree, pool: Tree) -> Tree:
        """(H, F) after `calib_epochs` on the pool. A rate that blows up is halved, with the same draws."""
        if not self.calib_epochs or not finite(head | Tree(u=pool.u)):  # a diverged run stays what it is
            return head
        mine, tables = calibration.neighbours(pool.label, pool.source, self.mix_scope == "same_client")
        pairs = Noise((self.n_aug, 2), per="row") if "mar" in self.beside_ce() else None
        request = Train(head, self.calibration_loss, const=tables | Tree(u=pool.u), noise=pairs)
        for tries in range(TRIES):
            trained = server.train(
                request, Tree(u=pool.u, source=pool.source) | mine, pool.label, batch_size=BATCH,
                epochs=self.calib_epochs, lr=functools.partial(self.calibration_rate, server, 0.5**tries),
                weight_decay=WEIGHT_DECAY, stream=server.stream("fedcspc", "calib"),
            )  # fmt: skip
            if finite(trained):
                return trained
        raise Diverged(
            f"fedcspc: the calibration of round {server.round} is not finite even at 2^-{TRIES - 1} of its rate"
        )

    def calibration_rate(self, server: Server, share: float, epoch: int) -> float:
        """Learning rate of an epoch of the calibration."""
        if self.calib_lr_schedule == "const_0.01":
            return 0.01 * share
        base = calibration.base_rate(server.round, server.rounds, self.calib_lr_clock)
        return calibration.rate(epoch, base) * share

    def calibration_loss(self, net: Net, w: Tree, batch: Batch, view: View) -> tuple[Tensor, Tree]:
        """L_CE + eta (L_con + L_mar); batch.x: rows of the pool, batch.noise [rows, n_aug, 2]: partners."""
        u, source = batch.x.u, batch.x.source
        z = net.project(w, u)
        loss = batch.mean(F.cross_entropy(net.classify(w, u, z), batch.y, reduction="none"))
        terms = Tree(calib_ce=loss)
        if "con" in self.beside_ce():
            terms["calib_con"] = self.contrast_sources(z, batch.y, source, batch.mask)
            loss = loss + self.eta * terms["calib_con"]
        if "mar" in self.beside_ce():
            terms["calib_mar"] = self.margin_of(net, w, z, batch, view.const)
            loss = loss + self.eta * terms["calib_mar"]
        return loss, terms

    def beside_ce(self) -> tuple[str, ...]:
        """The server's losses beside cross-entropy. One that does not count draws nothing either."""
        return tuple(self.calib_losses.split("+")[1:]) if self.eta else ()

    def contrast_sources(self, z: Tensor, y: Tensor, source: Tensor, mask: Tensor) -> Tensor:
        """L_con in the form asked for."""
        if self.con_form == "supcon_code":
            return calibration.contrast_code(z, y, mask, self.tau_g)
        return calibration.contrast(z, y, source, mask, self.tau_g, self.sigma_mode)

    def margin_of(self, net: Net, w: Tree, z: Tensor, batch: Batch, pool: Tree) -> Tensor:
        """L_mar between the batch's z and artificial positives and negatives of prototypes of the pool."""
        partner = calibration.friends(batch.x, pool.kin, batch.noise[..., 0])
        stranger, found = calibration.foes(batch.x, pool.kin, batch.noise[..., 1])
        anchor = batch.x.u[:, None]
        pos = calibration.POSITIVE[self.pos_mix](anchor, pool.u[partner], self.lam_u)
        neg = calibration.NEGATIVE[self.neg_mix](anchor, pool.u[stranger], self.lam_u)
        mixed = torch.stack([pos, neg])
        z_pos, z_neg = net.project(w, mixed.flatten(0, 2)).view(*mixed.shape[:3], -1)
        return calibration.margin(z, z_pos, z_neg, self.alpha, self.margin_metric, found * batch.mask)

    def exemplars(self, net: Net, w: Tree, pool: Tree, old: Rows) -> Rows:
        """e_c [K, q]: mean of z over the prototypes of a class that the head gets right, if there are any."""
        z = net.project(w, pool.u)
        right = net.classify(w, pool.u, z).argmax(1) == pool.label
        table = calibration.class_table(z, pool.label, torch.ones_like(z[:, 0]), old)
        if self.exemplar == "all":
            return table
        return calibration.class_table(z, pool.label, right.to(z.dtype), table)

    # ---- what is evaluated ---------------------------------------------------------------------------------

    def global_model(self, shared: Tree, private: Tree) -> Model:
        fused = bool(private.exemplars.has.any())
        return Model(
            Tree(net=shared.net, exemplars=private.exemplars),
            self.three_scores if fused else self.network_alone,
            "network",
        )

    def three_scores(self, net: Net, tree: Tree, x: Tensor) -> dict[str, Tensor | None]:
        """Of the network, of the exemplars, and of both [rows, K]."""
        r = net.encode(tree.net, x)
        z = net.project(tree.net, r)
        return self.fused(net.classify(tree.net, r, z), z, tree.exemplars)

    def fused(self, o: Tensor, z: Tensor, exemplars: Rows) -> dict[str, Tensor | None]:
        """lam_p N(o) + (1 - lam_p) N(cos(z, e)); o [rows, K], z [rows, q]."""
        cosines = unit(z, relations.LEAST) @ unit(exemplars.values, relations.LEAST).mT
        q = torch.where(exemplars.has, cosines, -torch.inf)
        network, exemplar = NORMS[self.fusion_norm](o, q, self.tau_f)
        return {"fused": self.lam_p * network + (1 - self.lam_p) * exemplar, "network": o, "exemplar": q}

    def network_alone(self, net: Net, tree: Tree, x: Tensor) -> dict[str, Tensor | None]:
        """Without any exemplar there is nothing to fuse."""
        o = net(tree.net, x)
        return {"fused": o.softmax(-1), "network": o, "exemplar": None}

    def stages(self, shared: Tree, private: Tree) -> Mapping[str, Tree]:
        """The network as averaged, before the calibration."""
        mine = {"averaged": private.averaged} if "averaged" in private else {}
        return {**super().stages(shared, private), **mine}

    def prototypes(self, shared: Tree, private: Tree) -> Rows | None:
        return shared.u_g  # type: ignore[no-any-return]

    def client_prototypes(self, upload: Tree) -> tuple[Tensor, Tensor] | None:
        return (upload.u, upload.label) if "u" in upload else None


def pooled(sets: Tree) -> Tree:
    """Clients' sets by id -> u [N, d], label, source [N] (and owned [N], its client's samples of its class)."""
    ids = sorted(sets, key=int)
    parts = [sets[i] for i in ids]
    out = Tree(
        u=torch.cat([p.u for p in parts]),
        label=torch.cat([p.label for p in parts]),
        source=torch.cat([torch.full_like(p.label, int(i)) for i, p in zip(ids, parts)]),
    )
    if "owned" in parts[0]:
        counts = [p.owned[torch.unique_consecutive(p.label, return_inverse=True)[1]] for p in parts]
        out["owned"] = torch.cat(counts)
    return out


def finite(tree: Tree) -> bool:
    """Whether every number is."""
    return all(bool(v.isfinite().all()) for v in tree.values())
