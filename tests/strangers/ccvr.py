"""CCVR: after the last round of FedAvg the output layer is trained anew on features drawn from class Gaussians.

Luo, Chen, Hu, Zhang, Liang and Feng, "No fear of heterogeneity: classifier calibration for federated learning with
non-IID data", NeurIPS 2021 (arXiv 2106.05001).

    mu_ic, Sigma_ic, n_ic of the features z of client i     `tell`, once, with the final model; ddof 1
    mu_c, Sigma_c from those of all clients                 `pooled`
    virtual features N(mu_c, Sigma_c), cross-entropy        `calibrate`

The paper was not at hand: how many features and how they are trained on are FL-bench's, so a row of a table is that
code's (200, flb, train) and not the paper's.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from protofl.methods.fedavg import FedAvg

from protofl.method import Bill, Collect, Exchange, Rows, Train, Tree, choice, number


@dataclass(frozen=True)
class CCVR(FedAvg):
    per_class: int = number(200, low=1, why="virtual features of a class", source="FL-bench")
    retrain: str = choice("flb", why="an epoch of plain SGD at the clients' rate and batch size", source="FL-bench")
    transform: str = choice("train", "test", why="features of augmented samples", source="FL-bench")

    def bill(self):
        return Bill(server="an average; after the last round, for K_i*(q + q*q) + K*int more, a new output layer")

    def final(self):
        return Exchange(self.tell, self.calibrate)

    def features(self, net, w, batch, view):
        return Tree(z=net.embed(w, batch.x))

    def tell(self, client, shared, own):
        stream, augment = client.stream("ccvr", "survey"), self.transform == "train"
        rows, at = yield Collect(shared.net, self.features, augment=augment, stream=stream)
        y, (k, d) = client.y[at.to(client.y.device)], (client.task.classes, rows.z.shape[1])
        mean, cov, n = rows.z.new_zeros(k, d), rows.z.new_zeros(k, d, d), y.bincount(minlength=k)
        for c in y.unique().tolist():
            mean[c] = rows.z[y == c].mean(0)
            centred = rows.z[y == c] - mean[c]
            cov[c] = centred.mT @ centred / max(len(centred) - 1, 1)
        return Tree(mean=Rows(mean, n > 0), cov=Rows(cov, n > 0), n=n), Tree()

    def pooled(self, uploads):
        """n [K], mu [K, d] and Sigma [K, d, d] of a class, as if all its samples were in one place."""
        n, mu, cov = (torch.stack(v).double() for v in zip(*[(u.n, u.mean.values, u.cov.values) for u in uploads]))
        total, mean = n.sum(0), torch.einsum("ik,ikd->kd", n, mu) / n.sum(0).clamp_min(1)[:, None]
        within = torch.einsum("ik,ikde->kde", n - 1, cov)
        between = torch.einsum("ik,ikd,ike->kde", n, mu, mu) - torch.einsum("k,kd,ke->kde", total, mean, mean)
        return total, mean, (within + between) / (total - 1).clamp_min(1)[:, None, None]

    def calibrate(self, server, shared, private, uploads):
        (n, mean, cov), p = self.pooled(uploads), server.task.protocol
        values, axes = torch.linalg.eigh(cov)
        root = (axes * (values.clamp_min(0) + 1e-6).sqrt()[:, None]) @ axes.mT  # of Sigma + 1e-6 I
        noise = server.stream("ccvr", "features").standard_normal((len(n), self.per_class, mean.shape[1]))
        z = (mean[:, None] + torch.from_numpy(noise).to(mean) @ root).to(uploads[0].mean.values)
        some, rate = (n > 1).nonzero()[:, 0], p.learning_rate(server.round)  # one sample has no spread
        head = server.train(
            Train(shared.net.only(server.task.net.head), self.head_loss), Tree(z=z[some].flatten(0, 1)),
            some.repeat_interleave(self.per_class), batch_size=p.batch_size, epochs=1, lr=lambda epoch: rate,
            weight_decay=0.0, stream=server.stream("ccvr", "retrain"),
        )  # fmt: skip
        return Tree(net=shared.net | head), Tree()

    def head_loss(self, net, w, batch, view):
        return batch.mean(F.cross_entropy(net.classify(w, batch.x.z, batch.x.z), batch.y, reduction="none"))
