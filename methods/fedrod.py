"""FedROD: one body with two heads, a generic one under a balanced loss and a personal one on top of it.

Chen and Chao, "On bridging generic and personalized federated learning for image classification", ICLR 2022
(arXiv 2107.00778). z: what the output layer reads; pi_i: class frequencies of client i.

    paper                                                           here
    generic: CE(z phi_g + log pi_i, y) over body and phi_g          `loss` (balanced softmax), `log_prior`
    personal: CE(z phi_g + z phi_p, y) over phi_p alone             `personal_loss`; the group PERSONAL
    phi_p kept by the client, or h_psi(pi_i) of a hypernetwork      `enrol`, `start`, `head`
    the server averages body, phi_g and psi                         `aggregate`
    evaluated: phi_g; as personal model phi_g + phi_p               FedAvg's `global_model`; `scores`

The prior belongs to the training loss alone: at test time it would make the global model a personal one. Classes
are counted over all of a client's data, whatever batches are dropped. The personal phase is plain SGD at the rate
of the round, without momentum, decay or clip; psi is not in the optimiser of the body (fixed, as FedNH's code).

Against the codes: FedNH's, whose scripts set the defaults (hypernetwork, two phases), evaluates the phi_p from
before the last step (`stale_phead`) and has no normalisation layers (`frozen_bn`); PFLlib and FL-bench take
log 0 for an absent class (`prior`); FL-bench trains and predicts with phi_p alone, whose loss reaches the body
(`pm_logits`, `detach`), and has a narrow hypernetwork (`hyper_width`). The paper's other re-weighted losses are
not here: all codes have the balanced softmax.

Checked against: plain NumPy on logits (1, 0.5, -0.2), counts (6, 2, 0), class 1: balanced loss 1.7827462742. No
table of the paper was at hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from protofl.errors import UserError
from protofl.method import (
    OFF,
    Batch,
    Bill,
    Client,
    Group,
    Last,
    Method,
    Model,
    Program,
    Server,
    Task,
    Train,
    Tree,
    View,
    choice,
    flag,
    number,
)

from .fedavg import FedAvg
from .once import once

if TYPE_CHECKING:
    from protofl.nets import Net

NAMES = r"(psi|phead)\."
"""The personal part: the hypernetwork psi, or the head itself."""

GENERIC = Group(rf"(?!{NAMES})")
PERSONAL = Group(NAMES, momentum=0.0, weight_decay=0.0, clip=OFF)

PRIORS: dict[str, Callable[[Tensor], Tensor]] = {
    "eps": lambda n: n.clamp_min(1e-12),
    "zero": lambda n: n,
    "add_one": lambda n: n + 1,
}
"""What a client's class counts n [K] become before they are made frequencies."""


@dataclass(frozen=True)
class FedROD(FedAvg):
    """shared: net (body and phi_g); psi with phead=hyper. own: phead with phead=linear, else nothing."""

    cost: ClassVar[float] = 1.4
    open_fields: ClassVar[tuple[str, ...]] = (
        "model_weighting", "local_epochs", "client_lr", "grad_clip_norm", "bn_buffers", "pm_clients", "pm_protocol",
    )  # fmt: skip

    # fmt: off
    phead: str = choice(
        "hyper", "linear", why="phi_p from a shared hypernetwork; linear: private, as FedNH's Tiny-ImageNet rows",
        source="FedNH code FedROD_hyper_clf")
    hyper_width: int | str = choice(
        "d", 32, why="hidden layer of psi: as wide as z; FL-bench: 32, psi 6 to 16 times smaller", source="FedNH code")
    schedule: str = choice(
        "separate", "together", why="all epochs of the body, then all of phi_p; or both at every batch",
        source="FedNH scripts FedROD_phead_separate")
    prior: str = choice(
        "eps", "zero", "add_one", why="an absent class counts 1e-12; 0, log -inf; every class one more",
        source="FedNH code; PFLlib, FL-bench")
    gamma: float = number(
        1.0, 0.5, 2.0, above=0, why="exponent of the prior", source="FedNH code; FL-bench gamma")
    pm_logits: str = choice(
        "sum", "p_only", why="phi_g + phi_p, in the personal loss and at prediction; FL-bench: phi_p alone",
        source="FedNH code, PFLlib; FL-bench")
    detach: str = choice(
        "yes", "no", why="the personal loss stops at z; no: both losses train the body (together only)",
        source="FedNH code, PFLlib; FL-bench")
    stale_phead: bool = flag(
        False, why="phi_p from the final psi; true: as it was before the last step (hyper only)",
        source="FedNH code")
    frozen_bn: str = choice(
        "eval", "train", why="frozen means frozen; train: BatchNorm statistics move in the personal phase",
        source="project; FedNH code")
    # fmt: on

    @classmethod
    def build(cls, options: Mapping[str, Any], setting: Callable[[str], Mapping[str, Any]]) -> Method:
        """detach=no implies schedule=together where nothing else was asked for."""
        implied = {"schedule": "together"} if options.get("detach") == "no" else {}
        return super().build({**implied, **options}, setting)

    def __post_init__(self) -> None:
        if self.detach == "no" and self.schedule == "separate":
            raise UserError(
                "fedrod detach=no: the personal phase of schedule=separate has no body to reach; schedule=together"
            )

    @property
    def hyper(self) -> bool:
        """Whether phi_p comes from a hypernetwork."""
        return self.phead == "hyper"

    def bill(self) -> Bill:
        h = "q" if self.hyper_width == "d" else f"{self.hyper_width}"
        sent = f"P + K*{h} + {h} + {h}*q*K + q*K" if self.hyper else "P"
        forward = "E*n" if self.schedule == "separate" else "0"
        return Bill(sent, sent, forward=forward, state="0" if self.hyper else "H")

    # ---- the personal head ---------------------------------------------------------------------------------

    def start(self, task: Task) -> tuple[Tree, Tree]:
        shared = Tree(net=task.initial)
        return (shared | Tree(psi=self.hypernetwork(task)) if self.hyper else shared), Tree()

    def hypernetwork(self, task: Task) -> Tree:
        """psi: Linear(K, h), ReLU, Linear(h, d K), drawn as any linear layer."""
        k, d = task.classes, task.net.dim
        h = d if self.hyper_width == "d" else int(self.hyper_width)
        stream, psi = task.stream("fedrod", "init"), Tree()
        like = next(v for v in task.initial.values() if v.is_floating_point())
        for layer, n_in, n_out in (("psi.0", k, h), ("psi.2", h, d * k)):
            bound = 1 / math.sqrt(n_in)
            for part, shape in (("weight", (n_out, n_in)), ("bias", (n_out,))):
                drawn = stream.uniform(-bound, bound, shape).astype("float32")
                psi[f"{layer}.{part}"] = torch.from_numpy(drawn).to(like.device, like.dtype)
        return psi

    def enrol(self, client: Client) -> Tree:
        """A private head starts as a copy of the generic one (phi_g^0)."""
        if self.hyper:
            return Tree()
        generic = client.task.initial.only(client.task.net.head)
        return Tree(phead=Tree({f"p{k}": v for k, v in generic.items()}))

    def head(self, w: Tree, counts: Tensor) -> Tree:
        """phi_p of a client with these class counts [K]: phead.weight [K, d], and phead.bias [K] where it has one."""
        if not self.hyper:
            return w.only(r"phead\.")
        pi = counts / counts.sum()
        hidden = F.relu(w["psi.0.weight"] @ pi + w["psi.0.bias"])
        phi = (w["psi.2.weight"] @ hidden + w["psi.2.bias"]).reshape(-1, len(pi))  # [d, K]
        return Tree({"phead.weight": phi.mT})

    def logits(self, g: Tensor, z: Tensor, head: Tree) -> Tensor:
        """What the personal model says [rows, K]: g [rows, K] the generic logits, z [rows, d]."""
        p: Tensor = z @ head["phead.weight"].mT
        if "phead.bias" in head:
            p = p + head["phead.bias"]
        return p if self.pm_logits == "p_only" else g + p

    # ---- losses --------------------------------------------------------------------------------------------

    def log_prior(self, counts: Tensor) -> Tensor:
        """gamma log pi [K] of class counts [K]."""
        n = PRIORS[self.prior](counts)
        return self.gamma * (n / n.sum()).log()

    def loss(self, net: Net, w: Tree, batch: Batch, view: View) -> tuple[Tensor, Tree]:
        """The balanced softmax of body and generic head."""
        net = once(net)
        z = net.embed(w, batch.x)
        real = batch.mask[:, None] > 0  # padding has a class, maybe an absent one: without prior its loss is finite
        balanced = net.classify(w, z, z) + torch.where(real, self.log_prior(view.counts), 0.0)
        ce = batch.mean(F.cross_entropy(balanced, batch.y, reduction="none"))
        return ce + net.aux_loss(w, net.encode(w, batch.x), batch), Tree(generic=ce)

    def personal_loss(self, net: Net, w: Tree, batch: Batch, view: View) -> tuple[Tensor, Tree]:
        """The plain cross-entropy of the personal model."""
        z = net.embed(w, batch.x)
        g = net.classify(w, z, z)
        if self.detach == "yes":
            z, g = z.detach(), g.detach()
        ce = batch.mean(F.cross_entropy(self.logits(g, z, self.head(w, view.counts)), batch.y, reduction="none"))
        return ce, Tree(personal=ce)

    def both(self, net: Net, w: Tree, batch: Batch, view: View) -> tuple[Tensor, Tree]:
        """Their sum, on one pass of the encoder."""
        net = once(net)
        loss, terms = self.loss(net, w, batch, view)
        mine, told = self.personal_loss(net, w, batch, view)
        return loss + mine, terms | told

    def lagging(self, net: Net, w: Tree, batch: Batch, view: View) -> Tree:
        """A sum over steps to which the last alone contributes: phi_p as it is before that step."""
        last = batch.step == view.steps - 1
        return self.head(w, view.counts).map(lambda v: torch.where(last, v, 0.0))

    # ---- a round -------------------------------------------------------------------------------------------

    def local(self, client: Client, shared: Tree, own: Tree) -> Program:
        mine = shared.psi if self.hyper else own.phead
        stale = self.hyper and self.stale_phead
        tally = self.lagging if stale else None
        if self.schedule == "together":
            answer = yield Train(shared.net | mine, self.both, (GENERIC, PERSONAL), tally=tally)
        else:
            net = yield Train(shared.net, self.loss)
            answer = yield Train(net | mine, self.personal_loss, (PERSONAL,), mode=self.frozen_bn, tally=tally)
        w, before = answer if stale else (answer, Tree())
        net, mine = w.without(NAMES), w.only(NAMES)
        if not self.hyper:
            return Tree(net=net), Tree(phead=mine)
        upload = Tree(net=net, psi=mine)
        return (upload, Tree(), Tree(phead=before)) if stale else (upload, Tree())

    def aggregate(self, server: Server, shared: Tree, private: Tree, uploads: list[Tree]) -> tuple[Tree, Tree]:
        changed, kept = super().aggregate(server, shared, private, uploads)
        if self.hyper:
            changed = changed | Tree(psi=server.merge(shared.psi, [u.psi for u in uploads]))
        return changed, kept

    # ---- what is evaluated ---------------------------------------------------------------------------------

    def scores(self, net: Net, tree: Tree, x: Tensor) -> Tensor:
        """Logits of a personal model Tree(net, phead)."""
        z = net.embed(tree.net, x)
        return self.logits(net.classify(tree.net, z, z), z, tree.phead)

    def personal_model(self, client: Client, shared: Tree, own: Tree, last: Last) -> Model:
        """The client's own body after its training, with both heads."""
        if not self.hyper:
            head = own.phead
        else:
            head = last.shown.phead if self.stale_phead else self.head(last.upload.psi, client.counts)
        return Model(Tree(net=last.upload.net, phead=head), self.scores)
