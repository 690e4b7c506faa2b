"""FedDecorr: FedAvg whose clients keep the dimensions of their features from saying the same.

Shi, Liang, Zhang, Tan and Bai, "Towards understanding and mitigating dimensional collapse in heterogeneous
federated learning", ICLR 2023 (arXiv 2210.00226).

    l = CE + beta mean_{i != j} (Z'Z)_ij^2 / N      `loss`, `penalty`; Z: standardised features of the batch's N rows
    printed: (beta / d^2) |Z'Z / (N - 1)|_F^2       `scale=paper`; beta=0.1 belongs to the code's

The feature is the input of the output layer, as in the authors' code (bytedance/FedDecorr @973e4af).
"""

from dataclasses import dataclass

from protofl.methods.fedavg import FedAvg
from protofl.methods.once import once

from protofl.method import Tree, choice, number


@dataclass(frozen=True)
class FedDecorr(FedAvg):
    scale: str = choice(
        "code", "paper", why="beta belongs to the code's; paper: as printed", source="FedDecorr code loss.py"
    )
    beta: float = number(0.1, 0.05, low=0, why="weight; 0.05 on CIFAR-100, 0 is FedAvg", source="FedDecorr code")

    def penalty(self, z, mask):
        """Mean squared correlation of the dimensions of z [rows, d] over the rows with mask 1; 0 for one row."""
        n, d = mask.sum(), z.shape[1]
        centred = (z - mask @ z / n.clamp_min(1)) * mask[:, None]
        unit = centred / (centred.square().sum(0) / (n - 1).clamp_min(1) + 1e-8).sqrt()
        squares = (unit.mT @ unit).square()
        if self.scale == "paper":
            return squares.mean() / (n - 1).clamp_min(1).square()
        return (squares.sum() - squares.diagonal().sum()) / max(d * (d - 1), 1) / n.clamp_min(1)

    def loss(self, net, w, batch, view):
        net = once(net)  # the features below are of the same pass
        loss, terms = super().loss(net, w, batch, view)
        decorr = self.penalty(net.embed(w, batch.x), batch.mask)
        return loss + self.beta * decorr, terms | Tree(decorr=decorr)
