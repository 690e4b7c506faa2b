"""FedNTD: FedAvg whose clients keep the received model's opinion of the classes that a sample is not.

Lee, Jeong, Shin, Bae and Yun, "Preservation of the global knowledge by not-true distillation in federated
learning", NeurIPS 2022 (arXiv 2106.03097).

    l = CE + beta tau^2 KL(q~ || p~)    `loss`; p~, q~: softened scores without the true class, of w and of w^t
"""

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from protofl.methods.fedavg import FedAvg
from protofl.methods.once import once

from protofl.method import Bill, Train, Tree, choice, number


@dataclass(frozen=True)
class FedNTD(FedAvg):
    presets: ClassVar = {"paper": {}, "cspc_code": {"tau": 3.0}}

    preset: str = choice("paper", "cspc_code", why="the paper; cspc_code: tau=3", source="FedCSPC code loss.py")
    tau: float = number(1.0, 3.0, above=0, why="temperature of both opinions", source="FedNTD")
    beta: float = number(1.0, low=0, why="weight of the distillation; 0 is FedAvg", source="FedNTD")

    def bill(self):
        return Bill(forward="E*n")

    def received(self, net, batch, view):
        """Scores [rows, K] of the model as it was received; the runtime asks once for what stays the same."""
        return net(view.shared.net, batch.x)

    def opinion(self, scores, y):
        """log-probabilities [rows, K] of the wrong classes among themselves; the true one has none."""
        true = F.one_hot(y, scores.shape[1]).bool()
        return (scores / self.tau).masked_fill(true, -1e9).log_softmax(1)

    def loss(self, net, w, batch, view):
        net = once(net)  # the scores below read the same pass
        loss, terms = super().loss(net, w, batch, view)
        kept, mine = self.opinion(batch.frozen, batch.y), self.opinion(net(w, batch.x), batch.y)
        ntd = batch.mean((kept.exp() * (kept - mine)).sum(1))
        return loss + self.beta * self.tau**2 * ntd, terms | Tree(ntd=ntd)

    def local(self, client, shared, own):
        w = yield Train(shared.net, self.loss, frozen=self.received)
        return Tree(net=w), Tree()
