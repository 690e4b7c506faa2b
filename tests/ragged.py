"""A ragged federation with a tiny network, for the tests of methods: unlike sizes, classes that are missing.

All sizes are pairwise different (inputs 6, r 4, z 3, classes 5, clients 7), so that no axis can be taken for
another.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from harness import Harnessed, ToyNet, federation
from numpy.random import RandomState
from torch import Tensor

from protofl import rng
from protofl.data.partition import partition
from protofl.data.sources import load
from protofl.method import Method
from protofl.nets import build
from protofl.tree import Rows, Tree, tensors

SIZES = (23, 5, 16, 9, 31, 12, 18)
CLASSES = 5


class Tiny(ToyNet):
    """Linear, maybe batch normalisation, tanh = r; linear = z; linear head. No layer of the package."""

    name, classes, encoded = "tiny", CLASSES, 4

    def __init__(self, norm: bool = False, projected: int | None = 3, z_normalize: bool = False) -> None:
        super().__init__()
        self.norm, self.projected, self.z_normalize = norm, projected, z_normalize
        self.dim = projected or self.encoded

    def init(self, stream: Any) -> Tree:
        def drawn(*shape: int) -> Tensor:
            return torch.from_numpy(stream.uniform(-0.6, 0.6, shape).astype("float32"))

        w = Tree({"encoder.weight": drawn(self.encoded, 6)})
        if self.norm:
            w["encoder.running_mean"], w["encoder.running_var"] = (
                torch.zeros(self.encoded),
                torch.ones(self.encoded),
            )
            w["encoder.num_batches_tracked"] = torch.tensor(0)
        if self.projected:
            w["projection.weight"] = drawn(self.projected, self.encoded)
        return w | {"head.weight": drawn(self.classes, self.dim), "head.bias": drawn(self.classes)}

    def encode(self, w: Tree, x: Tensor) -> Tensor:
        r = x @ w["encoder.weight"].mT
        return torch.tanh(self._normalised(w, r) if self.norm else r)

    def _normalised(self, w: Tree, r: Tensor) -> Tensor:
        mean, var = w["encoder.running_mean"], w["encoder.running_var"]
        if self.mode != "eval":
            m = (torch.ones_like(r[:, 0]) if self.mask is None else self.mask)[:, None]
            old, mean = mean, (r * m).sum(0) / m.sum()
            spread = ((r - mean).square() * m).sum(0) / m.sum()
            if self.mode == "train":
                self.updates["encoder.running_mean"] = (0.9 * old + 0.1 * mean).detach()
                self.updates["encoder.running_var"] = (0.9 * var + 0.1 * spread).detach()
                self.updates["encoder.num_batches_tracked"] = w["encoder.num_batches_tracked"] + 1
            var = spread
        return (r - mean) / (var + 1e-5).sqrt()

    def project(self, w: Tree, r: Tensor) -> Tensor:
        z = r @ w["projection.weight"].mT if self.projected else r
        return F.normalize(z, dim=-1) if self.z_normalize else z


class Shift:
    """An augmentation: every sample is moved by a number of its own."""

    width = 1

    def __repr__(self) -> str:  # in the names of tests, which must be the same in every process
        return "Shift()"

    def draw(self, stream: RandomState, n: int) -> Tensor:
        return torch.from_numpy(stream.random_sample((n, 1)))

    def train(self, x: Tensor, drawn: Tensor | None) -> Tensor:
        return x if drawn is None else x + drawn


def data() -> tuple[Tensor, Tensor, list[list[int]]]:
    """x [114, 6], y [114], positions by client. Client 1 has class 0 alone, 2 and 5 alone have class 4."""
    stream = RandomState(5)
    y = torch.from_numpy(stream.randint(0, CLASSES - 1, sum(SIZES)))
    ends = torch.tensor([0, *SIZES]).cumsum(0).tolist()
    parts = [list(range(a, b)) for a, b in itertools.pairwise(ends)]
    y[parts[1]] = 0
    y[parts[2][:4]] = y[parts[5][:3]] = 4
    centre = torch.from_numpy(stream.standard_normal((CLASSES, 6)))
    return centre[y] + 0.5 * torch.from_numpy(stream.standard_normal((len(y), 6))), y, parts


def ragged(method: Method, net: Tiny | None = None, **fields: Any) -> Harnessed:
    """Three rounds of two epochs, batches of 8, momentum, weight decay; `fields` override the protocol."""
    x, y, parts = data()
    plain = {"rounds": 3, "local_epochs": 2, "batch_size": 8, "momentum": 0.9, "weight_decay": 1e-2}
    return federation(method, net or Tiny(), x, y, parts, **{**plain, **fields})


def digits(method: Method, rounds: int, engine: str) -> list[tuple[float, float]]:
    """(norm of the weights, test loss) of each round in the setting digits.digits, float64, seed 0."""
    d = load("digits")
    x, y, test, right = (torch.from_numpy(np.array(v)) for v in (d.x_train, d.y_train, d.x_test, d.y_test))
    split = partition(d.y_train, scheme="dir_class", clients=10, beta=0.5, seed=0, classes=10)
    net = build("mlp", classes=10, shape=(8, 8, 1), projection_dim=32)
    fed = federation(
        method,
        net,
        x.permute(0, 3, 1, 2).double() / 16,
        y,
        [p.tolist() for p in split.indices],
        engine=engine,
        rounds=20,
        local_epochs=10,
        batch_size=32,
        client_lr=0.01,
        momentum=0.9,
        weight_decay=1e-5,
    )
    fed.introduce()
    out = []
    for t in range(rounds):
        fed.play(t)
        norm = torch.stack([v.square().sum() for v in fed.shared.net.values()]).sum().sqrt()
        logits = next(iter(fed.scores(fed.global_model(), test.permute(0, 3, 1, 2).double() / 16).values()))
        out.append((float(norm), float(F.cross_entropy(logits, right))))
    return out


def path(fed: Any, steps: int = 3) -> list[list[float]]:
    """Each client's weight after 1, 2, .. steps, by runs of so many epochs."""
    runs = [fed(local_epochs=e).run().last.uploads for e in range(1, steps + 1)]
    return [[float(u[i].net.w) for u in runs] for i in range(len(runs[0]))]


def by_hand(
    fed: Harnessed,
    loss: Callable[..., Tensor],
    trained: Callable[..., None],
    done: Callable[..., None] = lambda t: None,
) -> Tree:
    """The global weights after all rounds, by a plain script with torch's own optimiser (no clip).

    loss(w, x, y, received, t, i) of a batch; trained(w, t, i) after each client; done(t) after each round.
    """
    p, w = fed.protocol, Tree(fed.task.initial)
    for t in range(p.rounds):
        models, ids = [], fed.taking_part(t)
        for i in ids:
            q = Tree({k: v.clone().requires_grad_() for k, v in w.items()})
            sgd = torch.optim.SGD(list(q.values()), lr=p.client_lr, momentum=p.momentum, weight_decay=p.weight_decay)
            stream = rng.train(p.seed, t, i)
            for _ in range(p.local_epochs):
                order = torch.from_numpy(stream.permutation(len(fed.task.parts[i])))
                for rows in fed.task.parts[i][order].split(p.batch_size):
                    sgd.zero_grad()
                    loss(q, fed.task.x[rows], fed.task.y[rows], w, t, i).backward()
                    sgd.step()
            models.append(q.map(Tensor.detach))
            trained(models[-1], t, i)
        sizes = [len(fed.task.parts[i]) for i in ids]
        w = Tree({k: sum(m[k] * (n / sum(sizes)) for m, n in zip(models, sizes)) for k in w})
        done(t)
    return w


def state(fed: Harnessed) -> list[Tensor]:
    """Every tensor of a federation: shared, private, the clients' memories."""
    kept = [fed.memory.get(i) or Tree() for i in range(fed.task.clients)]
    return tensors([fed.shared, fed.private, kept])


def gap(a: Any, b: Any) -> float:
    """Largest absolute difference between the tensors of two trees of equal structure."""
    left, right = tensors(a), tensors(b)
    assert [v.shape for v in left] == [v.shape for v in right]
    return max((float((p.double() - q.double()).abs().max()) for p, q in zip(left, right) if p.numel()), default=0.0)


def identical(a: Any, b: Any) -> bool:
    """Whether all tensors are the same bits (in value)."""
    left, right = tensors(a), tensors(b)
    return len(left) == len(right) and all(map(torch.equal, left, right))


def table(values: Any, has: Any) -> Rows:
    """Class rows from lists."""
    return Rows(torch.tensor(values, dtype=torch.float64), torch.tensor(has, dtype=torch.bool))
