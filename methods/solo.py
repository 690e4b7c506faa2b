"""SOLO: every client trains alone on its own data; nothing is shared after the common start.

The lower reference of Li, He and Song, "Model-contrastive federated learning", CVPR 2021 (arXiv 2103.16257), section
4.1 and Table 1, and ("Local") of Dai et al., "Tackling data heterogeneity in federated learning with class
prototypes", AAAI 2023 (arXiv 2212.02758).

    paper                                                       here
    every party trains 300 epochs in one go (MOON, FedProc)     `adapt` with budget=epochs: one round of 300 epochs
    as many rounds as a FedAvg client is drawn for (FedNH)      `adapt` with budget=match_participation: R blocks
    top-1 of every party, mean +- std over parties (MOON)       `personal_model`; std_over, read by the report
    PM(V), PM(L) of all clients (FedNH)                         `personal_model`

A block is a round of an adapted protocol with all clients: a fresh optimiser, the rate and the streams of round b. MOON
at 300 epochs spends less than a federated client (100 rounds of 10), FedNH's budget is the same in expectation. T ratio
is cut to a whole number after 1e-9 was added (fixed: 200 * 0.29 is 57.99999). A drawn client that `short_client`
leaves out stays at its initial weights, and counts.

Against MOON's code: its parties begin at weights of their own (`common_init`), and 300 epochs must be asked for there.
FedNH's code lets all clients shuffle alike (field `client_seed`).

Checked against: MOON's paper, Table 1: CIFAR-10 46.3 +- 5.1, CIFAR-100 22.3 +- 1.0, Tiny-ImageNet 8.6 +- 0.4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from protofl.method import Bill, Client, Model, Program, Server, Task, Train, Tree, choice, flag, number
from protofl.protocol import Protocol

from .fedavg import FedAvg


@dataclass(frozen=True)
class GlobalClock(Protocol):
    """A protocol whose rounds b stand for the rounds t(b) = b T // R of a longer one, as far as the rate goes."""

    table_rounds: int = number(1, low=1, why="T, over which the rate decays", source="SOLO lr_clock")

    def learning_rate(self, t: int) -> float:
        return super().learning_rate(t * self.table_rounds // self.rounds)


@dataclass(frozen=True)
class SOLO(FedAvg):
    """shared: nothing; own: net, the client's model; nothing is sent."""

    keeps_personal: ClassVar[bool] = True

    open_fields: ClassVar[tuple[str, ...]] = (
        "grad_clip_norm", "lr_decay_offset", "short_client", "optimizer_reset", "client_seed",
    )  # fmt: skip

    budget: str = choice(
        "epochs", "match_participation", why="epochs in one go; or the expected participations of a client",
        source="MOON 4.1; FedNH A.2",
    )  # fmt: skip
    epochs: int | str = number(
        "T*E", 300, words=("T*E",), low=1, why="budget=epochs: MOON's 300, or rounds * local_epochs of the table",
        source="MOON 4.1",
    )  # fmt: skip
    common_init: bool = flag(True, why="one w^0 for all; false: an own draw each, as in MOON's code",
                             source="protocol 2.6")  # fmt: skip
    lr_clock: str = choice(
        "local_block", "global_round", why="the rate decays by block; by the table's rounds, t(b) = b T // R",
        source="FedNH code",
    )  # fmt: skip
    std_over: str = choice(
        "seeds", "parties", why="of reports: +- over seeds, or over the parties of a run (MOON's table)",
        source="MOON Table 1",
    )  # fmt: skip
    std_ddof: int = choice(1, 0, why="of reports, over parties: 0 in MOON's code; over seeds the table's counts",
                           source="MOON code")  # fmt: skip

    def bill(self) -> Bill:
        return Bill("0", "0", state="P", server="nothing")

    def blocks(self, protocol: Protocol) -> int:
        """R: the rounds in which a client of this protocol is expected to be drawn."""
        return max(1, int(protocol.rounds * protocol.participation + 1e-9))

    def adapt(self, protocol: Protocol) -> Protocol:
        """All clients, every personal model, and the budget as rounds and local epochs."""
        everybody: dict[str, Any] = {
            "participation": 1.0, "client_sampling": "independent", "pm_clients": "all", "pm_protocol": "as_trained",
            "metrics": ("gm", "pm_v", "pm_l"),
        }  # fmt: skip
        if self.budget == "epochs":
            epochs = protocol.rounds * protocol.local_epochs if self.epochs == "T*E" else self.epochs
            return protocol.replace(**everybody, rounds=1, local_epochs=epochs)
        alone = protocol.replace(**everybody, rounds=self.blocks(protocol))
        if self.lr_clock == "local_block":
            return alone
        return GlobalClock(**vars(alone), table_rounds=protocol.rounds)

    def start(self, task: Task) -> tuple[Tree, Tree]:
        return Tree(), Tree()

    def enrol(self, client: Client) -> Tree:
        w = client.task.initial
        if not self.common_init:
            drawn = client.task.net.init(client.task.client_stream("solo", "init", client.id))
            w = Tree({k: v.to(w[k]) for k, v in drawn.items()})
        return Tree(net=w)

    def local(self, client: Client, shared: Tree, own: Tree) -> Program:
        w = yield Train(own.net, self.loss)
        return Tree(), Tree(net=w)

    def aggregate(self, server: Server, shared: Tree, private: Tree, uploads: list[Tree]) -> tuple[Tree, Tree]:
        return Tree(), Tree()

    def global_model(self, shared: Tree, private: Tree) -> None:
        return None

    def personal_model(self, client: Client, shared: Tree, own: Tree, last: Any) -> Model:
        """w_i, of every client after every block."""
        return Model(own.net)
