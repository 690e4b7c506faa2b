"""FedProc: features are first pulled to global class prototypes, then cross-entropy takes over.

Mu, Shen, Cheng, Geng, Fu, Zhang and Zhang, "FedProc: Prototypical contrastive federated learning on non-IID
data", Future Generation Computer Systems 143, 2023 (arXiv 2109.12273), algorithm 1, equations 4 and 5.

    paper                                                           here
    L = alpha L_gpc + (1 - alpha) L_ce, alpha = 1 - t/T             `loss`, `alpha`
    L_gpc = -cos(z, C_y) + log sum_c exp cos(z, C_c)        (4)     `pull`
    p_ic = mean of z over D_ic                              (5)     `class_sums`, in `survey` after training
    C_c = 1/m sum_i p_ic                            (alg. 1, 9)     `adopt`
    w = sum_i n_i/n w_i                            (alg. 1, 10)     FedAvg's `aggregate`

C is constant within a round and no gradient passes through it (fixed). Against the first author's code
(MuXutong/FedProc, which does not import as published; preset official_code sets all of it at once): it weighs
prototypes by counts (`proto_weighting`), decays over 100 rounds whatever T (`alpha_schedule`), trains round 0
by cross-entropy alone (`round0_loss`), keeps a zero row for a class never seen (`absent_class`), measures
prototypes in train mode, which moves BatchNorm statistics before they are averaged (`proto_bn_mode`), and
without the last short batch (`proto_drop_last`). Its weights under partial participation, which do not sum to
1, are not copied (`partial_weights` = sampled: fixed). Everything else that paper and code leave open is an
option below. `report_proto_time`, `tab6_protocol`, `n_seeds` and `baseline_source` are the suite's and the
report's; the gains that the paper quotes are absolute points (fixed).

Checked against: no number of the paper is known; the setting digits.digits (T=20) in float64, seed 0, by a
plain script, one client after the other: norm of the weights 10.1046227038 after round 1, 278 of 355 test
images right after round 20.
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
    Exchange,
    Last,
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

from . import prototypes
from .fedavg import FedAvg
from .prototypes import alive, cosines, unit

if TYPE_CHECKING:
    from protofl.nets import Net

SURVEY_MODES = {"eval": "eval", "train_frozen_stats": "train_frozen", "train": "train"}

SCHEDULES: dict[str, Callable[[Any, int], Any]] = {
    "linear_T": lambda u, rounds: 1 - u / rounds,
    "linear_100": lambda u, rounds: 1 - u / 100,
    "linear_T_minus_1": lambda u, rounds: 1 - u / (rounds - 1) if rounds > 1 else 1.0,
    "const_0.5": lambda u, rounds: 0.5,
    "ce_only": lambda u, rounds: 0.0,
    "gpc_only": lambda u, rounds: 1.0,
    "reverse": lambda u, rounds: u / rounds,
}
"""alpha before clipping, of the time u in rounds and T."""

constant_alpha = same.option_is("alpha_schedule", "const_0.5", "ce_only", "gpc_only")
"""The schedule does not hang on the time."""

WITHIN: dict[str, Callable[[Batch, View], Any]] = {
    "round": lambda batch, view: 0.0,
    "epoch": lambda batch, view: batch.epoch / view.epochs,
    "step": lambda batch, view: batch.step / view.steps,
}
"""The part of a round that has passed, by granularity."""


@dataclass(frozen=True)
class FedProc(FedAvg):
    """shared: net, proto=Rows [K, Q]; private: seen [K], latest=the clients' latest tables (all_latest).

    own: proto=the client's means of its last participation (unless loss_prototype_source=global).
    """

    cost: ClassVar[float] = 1.4

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {},
        "official_code": {
            "proto_weighting": "count",
            "alpha_schedule": "linear_100",
            "round0_loss": "ce_only",
            "absent_class": "keep_zero",
            "proto_bn_mode": "train",
            "proto_transform": "train",
            "proto_drop_last": True,
        },
    }
    needs: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "official_code": {"z_normalize": True, "client_lr": 0.1, "drop_last": True}
    }
    same: ClassVar[tuple[Same, ...]] = (
        Same("alpha_schedule", ("linear_100",), "T is 100", same.field_is("rounds", 100), "another --rounds"),
        Same("alpha_schedule", ("ce_only",), "FedAvg on the same network", method="fedavg", exact=False),
        Same("alpha_granularity", (), "alpha is constant", constant_alpha, "alpha_schedule=linear_T"),
        Same("schedule_t0", (), "alpha is constant", constant_alpha, "alpha_schedule=linear_T"),
        Same("round0_loss", ("ce_only",), "there is no prototype in round 0", same.option_is("proto_init", "zeros_masked"),
             "proto_init=first_clients"),
        Same("round0_loss", ("ce_only",), "alpha is 0 in round 0", same.option_is("alpha_schedule", "ce_only", "reverse"),
             "alpha_schedule=linear_T"),
        Same("proto_weighting", ("count",), "the owners of a class have equally many samples of it", same.equal_counts,
             "--partition dir_class"),
        Same("empty_class", ("zero_fill",), "a cosine reads the direction of a mean, and zeros turn none", exact=False),
        Same("empty_class", ("carry_received",), "a lacking class has weight 0", same.option_is("proto_weighting", "count"),
             "proto_weighting=uniform", exact=False),
        Same("empty_class", (), "every client has every class", same.every_class_everywhere, "a smaller --beta"),
        Same("absent_class", (), "in every round somebody has every class", same.every_class_held, "--participation 0.2"),
        Same("proto_participants", (), "all clients take part", same.everybody_drawn, "--participation 0.2"),
        Same("proto_bn_mode", (), "the network has no BatchNorm", same.no_batchnorm, "--net resnet18_bn", exact=False),
        Same("proto_transform", (), "nothing is augmented", same.no_augmentation, "--dataset cifar10"),
        Same("proto_drop_last", (), "no client has a short last batch", same.no_short_batch, "another --batch-size", exact=False),
    )  # fmt: skip
    together: ClassVar[Mapping[tuple[str, Any], Mapping[str, Any]]] = {
        ("alpha_schedule", "gpc_only"): {"eval_head": "prototype"}
    }
    crossed: ClassVar[tuple[tuple[str, str], ...]] = (("z_normalize", "client_lr"),)
    open_fields: ClassVar[tuple[str, ...]] = (
        "model_weighting", "classifier_input", "z_normalize", "report", "partition_seed", "local_epochs",
        "client_lr",
    )  # fmt: skip

    preset: str = choice("paper", "official_code", why="the printed algorithm", source="FedProc alg. 1")
    loss_prototype_source: str = choice(
        "global", "local", "global_pos_local_neg",
        why="text and code agree; alg. 1 line 18 has a client's index", source="FedProc 3.2",
    )  # fmt: skip
    proto_weighting: str = choice("uniform", "count", why="printed; the code counts samples", source="FedProc alg. 1")
    empty_class: str = choice(
        "skip", "zero_fill", "carry_received", why="a client without a class says nothing about it",
        source="FedProc code",
    )  # fmt: skip
    absent_class: str = choice(
        "keep_mask", "keep_zero", "drop",
        why="of a class that nobody in S_t holds; keep_zero is the code's artefact", source="project",
    )  # fmt: skip
    gpc_denominator: str = choice(
        "softmax",
        "literal_double",
        why="eq. 4 and code; alg. 1 counts the positive twice",
        source="FedProc eq. 4",
    )
    gpc_temperature: float = number(1.0, 0.5, 0.1, above=0, why="none in paper and code", source="FedProc eq. 4")
    alpha_schedule: str = choice(*SCHEDULES, why="printed; the code divides by 100 whatever T", source="FedProc 3.2")
    alpha_granularity: str = choice("round", "epoch", "step", why="printed: once per round", source="FedProc alg. 1")
    round0_loss: str = choice("as_scheduled", "ce_only", why="printed: alpha_0 = 1", source="FedProc alg. 1")
    schedule_t0: int = choice(0, 1, why="alg. 1 counts rounds from 0", source="FedProc alg. 1")
    proto_init: str = choice(
        "first_clients", "zeros_masked", "random_unit",
        why="means of the initial model at the clients of round 0", source="FedProc code",
    )  # fmt: skip
    proto_bn_mode: str = choice(
        "eval", "train_frozen_stats", "train", why="the code's train mode is a side effect", source="project"
    )
    proto_transform: str = choice("train", "test", why="the code's means see augmented images", source="FedProc code")
    proto_drop_last: bool = flag(False, why="all samples of class k, as the text says", source="FedProc eq. 5")
    proto_participants: str = choice(
        "sampled", "all_latest",
        why="the server averages what arrives; or every client's latest means", source="FedProc alg. 1",
    )  # fmt: skip
    eval_head: str = choice("classifier", "prototype", why="prototypes are not used for prediction",
                            source="FedProc 3.2")  # fmt: skip

    def __post_init__(self) -> None:
        if self.alpha_schedule == "gpc_only" and self.eval_head != "prototype":
            raise UserError(
                "fedproc alpha_schedule=gpc_only never trains the output layer, which would stay at chance: "
                "it needs eval_head=prototype"
            )

    # ---- one batch --------------------------------------------------------------------------------------

    def alpha(self, batch: Batch, view: View) -> Any:
        """Weight of L_gpc at this step, in [0, 1]."""
        if view.round == 0 and (self.round0_loss == "ce_only" or self.proto_init == "zeros_masked"):
            return 0.0  # without a valid prototype only weight decay would act in a round of alpha = 1
        u = view.round + self.schedule_t0 + WITHIN[self.alpha_granularity](batch, view)
        a = SCHEDULES[self.alpha_schedule](u, view.rounds)
        return a.clamp(0, 1) if isinstance(a, Tensor) else min(max(a, 0.0), 1.0)

    def pull(self, z: Tensor, y: Tensor, table: Rows, positives: Rows) -> tuple[Tensor, Tensor]:
        """Equation 4 for z [rows, Q], y [rows] -> losses [rows], which rows have a positive [rows] bool.

        `table` and `positives` are one unless loss_prototype_source=global_pos_local_neg. Masked classes are
        left out of the denominator; a z without direction contributes 0 and no gradient.
        """
        mine = F.one_hot(y, len(table.has)).bool()
        u = cosines(z, table.values)
        if positives is not table:
            u = torch.where(mine, cosines(z, positives.values), u)
        u = u / self.gpc_temperature
        top = -F.nll_loss(u, y, reduction="none")  # the backward pass of gather may wait for a GPU
        total = torch.where(mine | table.has, u, -torch.inf).logsumexp(1)
        if self.gpc_denominator == "literal_double":
            total = torch.logaddexp(total, top)
        return torch.where(alive(z), total - top, 0.0), (mine & positives.has).any(1)

    def loss(self, net: Net, w: Tree, batch: Batch, view: View) -> tuple[Tensor, Tree]:
        """alpha L_gpc + (1 - alpha) L_ce; both always computed, so that weight decay acts on everything."""
        r = net.encode(w, batch.x)
        z = net.project(w, r)
        ce = batch.mean(F.cross_entropy(net.classify(w, r, z), batch.y, reduction="none"))
        table = view.const.proto
        positives = view.shared.proto if self.loss_prototype_source == "global_pos_local_neg" else table
        gpc = batch.mean(*self.pull(z, batch.y, table, positives))
        alpha = self.alpha(batch, view)
        total = alpha * gpc + (1 - alpha) * ce + net.aux_loss(w, r, batch)
        return total, Tree(ce=ce, gpc=gpc, alpha=torch.zeros_like(ce) + alpha)

    def class_sums(self, net: Net, w: Tree, batch: Batch, view: View) -> Tree:
        """Sums of z by class [K, Q] and counts [K] (equation 5)."""
        return prototypes.class_sums(batch.onehot(net.classes), net.project(w, net.encode(w, batch.x)))

    # ---- one client -------------------------------------------------------------------------------------

    def survey(self, client: Client, w: Tree) -> Program:
        """-> (w, Tree(proto=class means, n=counts [K])); proto_bn_mode=train moves the statistics of w."""
        mode = SURVEY_MODES[self.proto_bn_mode]
        answer = yield Survey(
            w,
            self.class_sums,
            mode=mode,
            augment=self.proto_transform == "train",
            drop_last=self.proto_drop_last,
            stream=client.stream("fedproc", "survey"),
        )
        sums, w = answer if mode == "train" else (answer, w)
        return w, Tree(proto=prototypes.class_means(sums), n=sums.n.round().long())

    def bill(self) -> Bill:
        state = "K_i*z" if self.loss_prototype_source == "local" else "0"
        return Bill("P + K_t*z", "P + K_i*z + K*int", forward="n", state=state)

    def memory(self, upload: Tree) -> Tree:
        """What a client keeps: its own means where the loss reads them."""
        return Tree() if self.loss_prototype_source == "global" else Tree(proto=upload.proto)

    def introduce(self, client: Client, shared: Tree, own: Tree) -> Program:
        """Before round 0: prototypes of the initial model."""
        _, upload = yield from self.survey(client, shared.net)
        return upload, self.memory(upload)

    def local(self, client: Client, shared: Tree, own: Tree) -> Program:
        table = shared.proto if self.loss_prototype_source == "global" else own.get("proto", shared.proto)
        w = yield Train(shared.net, self.loss, const=Tree(proto=table))
        w, upload = yield from self.survey(client, w)
        return Tree(net=w) | upload, self.memory(upload)

    # ---- the server -------------------------------------------------------------------------------------

    def start(self, task: Task) -> tuple[Tree, Tree]:
        table = prototypes.blank(task.classes, task.net.projected or task.net.encoded, task.initial)
        private = Tree(seen=table.has, latest=Tree())
        if self.proto_init == "random_unit":
            drawn = torch.from_numpy(task.stream("fedproc", "init").standard_normal(table.values.shape))
            table = Rows(unit(drawn).to(table.values), ~table.has)
        return Tree(net=task.initial, proto=table), private

    def first(self) -> Exchange | None:
        return Exchange(self.introduce, self.adopt) if self.proto_init == "first_clients" else None

    def filled(self, table: Rows, received: Rows) -> Rows:
        """A client's table with what `empty_class` says about the classes that it lacks."""
        if self.empty_class == "zero_fill":
            return Rows(torch.where(table.has[:, None], table.values, 0.0), torch.ones_like(table.has))
        if self.empty_class == "carry_received":
            return Rows(torch.where(table.has[:, None], table.values, received.values), table.has | received.has)
        return table

    def adopt(self, server: Server, shared: Tree, private: Tree, uploads: list[Tree]) -> tuple[Tree, Tree]:
        """The new prototypes: means over the clients that hold a class (algorithm 1, line 9)."""
        old = shared.proto
        arrived = {str(i): Tree(proto=self.filled(u.proto, old), n=u.n) for i, u in zip(server.ids, uploads)}
        latest = private.latest | arrived
        pool = [latest[i] for i in sorted(latest, key=int)]
        weights = [u.n for u in pool] if self.proto_weighting == "count" else None
        mean = prototypes.merge([u.proto for u in pool], old, weights).values
        held = torch.stack([u.n for u in pool]).sum(0) > 0
        seen = private.seen | held
        values = torch.where(held[:, None], mean, old.values)
        has = torch.where(held, alive(mean), old.has & (self.absent_class != "drop"))
        if self.absent_class == "keep_zero":
            values, has = torch.where(seen[:, None], values, 0.0), has | ~seen
        kept = latest if self.proto_participants == "all_latest" else Tree()
        return Tree(proto=Rows(values, has)), Tree(seen=seen, latest=kept)

    def aggregate(self, server: Server, shared: Tree, private: Tree, uploads: list[Tree]) -> tuple[Tree, Tree]:
        model, _ = super().aggregate(server, shared, private, uploads)
        table, kept = self.adopt(server, shared, private, uploads)
        return model | table, kept

    # ---- evaluation -------------------------------------------------------------------------------------

    def both_heads(self, net: Net, tree: Tree, x: Tensor) -> dict[str, Tensor | None]:
        """Scores [rows, K] of the output layer, and cosines with the valid prototypes; headline first."""
        r = net.encode(tree.net, x)
        z = net.project(tree.net, r)
        near = torch.where(tree.proto.has, cosines(z, tree.proto.values), -torch.inf)
        return self.ordered(net.classify(tree.net, r, z), near)

    def one_head(self, net: Net, tree: Tree, x: Tensor) -> dict[str, Tensor | None]:
        """The same while no prototype is valid."""
        return self.ordered(net(tree.net, x), None)

    def ordered(self, classifier: Tensor, prototype: Tensor | None) -> dict[str, Tensor | None]:
        """Both by name, the headline first."""
        heads = {"classifier": classifier, "prototype": prototype}
        return {self.eval_head: heads[self.eval_head], **heads}

    def model(self, w: Tree, table: Rows) -> Model:
        """Weights and prototypes as something to evaluate; its loss is that of the output layer."""
        scores = self.both_heads if bool(table.has.any()) else self.one_head
        return Model(Tree(net=w, proto=table), scores, loss="classifier")

    def global_model(self, shared: Tree, private: Tree) -> Model | None:
        return self.model(shared.net, shared.proto)

    def personal_model(self, client: Client, shared: Tree, own: Tree, last: Last) -> Model:
        return self.model(last.upload.net, shared.proto)

    def prototypes(self, shared: Tree, private: Tree) -> Rows | None:
        return shared.proto  # type: ignore[no-any-return]

    def client_prototypes(self, upload: Tree) -> tuple[Tensor, Tensor] | None:
        return prototypes.present(upload.proto)
