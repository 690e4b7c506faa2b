"""FedPer: clients share a body and keep the output layer to themselves; both are trained together.

Arivazhagan, Aggarwal, Singh and Choudhary, "Federated learning with personalization layers", arXiv 1912.00818,
2019, algorithms 1 and 2.

    paper                                           here
    W_B base layers, W_P^i personalization layers   shared.net, own.head; told apart by name (`private`)
    client: SGD on (W_B, W_P^i), sends W_B          `local`: one optimiser, one clip over both
    server: W_B <- sum_i gamma_i W_B^i              FedAvg's `aggregate`
    evaluated: (W_B^i, W_P^i) after training        `personal_model`; there is no global model

`PrivateHead` is what FedRep has in common with it. All heads start alike, from w^0; a client that is not drawn
keeps its head as it is, however old the body that it was fitted to.

Against FedNH's code (Yutong-Dai/FedNH, FedPer.py), whose settings these are: it prints a global accuracy, of the
body with a head that was never trained; here it is undefined. The paper's own experiments sweep the number of
private layers (`head_layers`), weight clients by samples (field `model_weighting`) and let all take part
(`participation`).

Checked against: plain arithmetic on a net of two numbers, targets 2 and -1, two steps a round: the shared one is
1.019125 after round 1, 1.0915812499 after round 2. No table of the paper was at hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from protofl.errors import UserError
from protofl.method import Bill, Client, Last, Model, Program, Task, Train, Tree, choice, number

from .fedavg import FedAvg

if TYPE_CHECKING:
    from protofl.nets import Net
    from protofl.protocol import Protocol


@dataclass(frozen=True)
class PrivateHead(FedAvg):
    """FedAvg of bodies alone. shared and upload: net, the body; own: head, what the client never sends."""

    open_fields: ClassVar[tuple[str, ...]] = (
        "model_weighting", "grad_clip_norm", "participation", "bn_buffers", "pm_protocol",
    )  # fmt: skip

    def private(self, net: Net) -> str:
        """Names (a regular expression) of the tensors that stay with their client."""
        return net.head

    def start(self, task: Task) -> tuple[Tree, Tree]:
        return Tree(net=task.initial.without(self.private(task.net))), Tree()

    def enrol(self, client: Client) -> Tree:
        return Tree(head=client.task.initial.only(self.private(client.task.net)))

    def parted(self, net: Net, w: Tree) -> tuple[Tree, Tree]:
        """A model -> what is sent, what is kept."""
        return Tree(net=w.without(self.private(net))), Tree(head=w.only(self.private(net)))

    def refuse_old_momentum(self, option: str, protocol: Protocol) -> None:
        """What is trained for the evaluation alone must leave nothing behind."""
        if protocol.optimizer_reset == "never":
            raise UserError(
                f"{option} needs optimizer_reset=per_round: with never, the momentum of what is trained for the "
                f"evaluation alone would move the next round"
            )

    def global_model(self, shared: Tree, private: Tree) -> Model | None:
        return None

    def personal_model(self, client: Client, shared: Tree, own: Tree, last: Last) -> Model:
        """The client's own body and head after training, or the copy that was made of them to be shown."""
        return Model(last.shown.net if "net" in last.shown else last.upload.net | own.head)


@dataclass(frozen=True)
class FedPer(PrivateHead):
    """FedAvg's local training on body and head; the head stays."""

    head_layers: str = choice(
        "last_linear", "last_block", why="private: the output layer; or the projection (without one the encoder's last "
        "layers) too: the paper sweeps the number", source="FedNH A.2",
    )  # fmt: skip
    pm_body: str = choice(
        "own", "aggregated", why="body of the personal model: as trained, or as averaged after the round",
        source="FedNH code",
    )  # fmt: skip
    finetune_epochs: int = number(
        0, 5, low=0, why="epochs on a copy of the whole model, for the evaluation alone", source="FedNH code; FL-bench"
    )

    def __post_init__(self) -> None:
        if self.pm_body == "aggregated" and self.finetune_epochs:
            raise UserError(
                "fedper finetune_epochs needs pm_body=own: clients fine-tune in their round, when the average is not "
                "there yet"
            )

    def check(self, protocol: Protocol, net: Net) -> None:
        if self.head_layers == "last_block" and net.last_block is None:
            raise UserError(
                f"fedper head_layers=last_block: {net.name} does not tell its last layers apart, "
                f"head_layers=last_linear works on every net"
            )
        if self.finetune_epochs:
            self.refuse_old_momentum("fedper finetune_epochs", protocol)

    def bill(self) -> Bill:
        """V: the last block. Fine-tuning is done in evaluated rounds."""
        trained = f"(E + {self.finetune_epochs})*n" if self.finetune_epochs else "E*n"
        if self.head_layers == "last_block":
            return Bill("B - V", "B - V", trained, state="H + V")
        return Bill("B", "B", trained, state="H")

    def private(self, net: Net) -> str:
        return net.head if self.head_layers == "last_linear" else f"{net.head}|{net.last_block}"

    def local(self, client: Client, shared: Tree, own: Tree) -> Program:
        w = yield Train(shared.net | own.head, self.loss)
        body, head = self.parted(client.task.net, w)
        if not (self.finetune_epochs and client.measured):
            return body, head
        tuned = yield Train(w, self.loss, epochs=self.finetune_epochs, recorded=False)
        return body, head, Tree(net=tuned)

    def personal_model(self, client: Client, shared: Tree, own: Tree, last: Last) -> Model:
        if self.pm_body == "own":
            return super().personal_model(client, shared, own, last)
        body = shared.net
        if client.task.protocol.bn_buffers == "local":  # statistics that are not averaged are the client's own
            body = body | last.upload.net.only(client.task.net.buffers)
        return Model(body | own.head)
