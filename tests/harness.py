"""A small federation for tests: made-up data, tiny nets, float64."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from protofl.federation import Federation, Round
from protofl.handles import RunTask
from protofl.method import Batch, Method, View
from protofl.protocol import Protocol
from protofl.tree import Tree

ENGINES = ("loop", "batched")

PLAIN = dict(
    rounds=1, local_epochs=3, batch_size=64, client_lr=0.1, momentum=0.0, weight_decay=0.0, drop_last=False,
    grad_clip_norm=0.0, precision="fp64", model="mlp",
)  # fmt: skip


class ToyNet:
    """What the runtime asks of a net, for features that are the inputs."""

    name, classes, encoded, dim, projected = "toy", 1, 1, 1, None
    default_scale, optional_relu, z_normalize = 1.0, False, False
    encoder, projection, head, aux = r"encoder\.", r"projection\.", r"head\.", r"aux\."
    buffers = r".*\.(running_mean|running_var|num_batches_tracked)$"
    mode, mask, place = "eval", None, ""

    def __init__(self) -> None:
        self.updates = Tree()
        self.passes: list[bool] = []

    def bound(self, mode: str, mask: Tensor | None = None, moves: bool = True) -> Any:
        import copy

        net = copy.copy(self)
        net.mode, net.mask, net.updates, net.passes = mode, mask, Tree(), []
        return net

    def init(self, stream: Any) -> Tree:
        return Tree()

    def trainable(self, w: Tree) -> Tree:
        return w.without(self.buffers)

    def encode(self, w: Tree, x: Tensor) -> Tensor:
        return x

    def project(self, w: Tree, r: Tensor) -> Tensor:
        return F.normalize(r, dim=-1) if self.z_normalize else r

    def classify(self, w: Tree, r: Tensor, z: Tensor) -> Tensor:
        out = z @ w["head.weight"].mT
        return out + w["head.bias"] if "head.bias" in w else out

    def embed(self, w: Tree, x: Tensor) -> Tensor:
        return self.project(w, self.encode(w, x))

    def __call__(self, w: Tree, x: Tensor) -> Tensor:
        r = self.encode(w, x)
        return self.classify(w, r, self.project(w, r))

    def aux_loss(self, w: Tree, r: Tensor, batch: Batch) -> float:
        return 0.0

    def loss(self, w: Tree, batch: Batch) -> Tensor:
        return batch.mean(F.cross_entropy(self(w, batch.x), batch.y, reduction="none"))


class Quadratic(ToyNet):
    """f = h/2 (w - a)^2, rows (h, a)."""

    name = "quadratic"

    def init(self, stream: Any) -> Tree:
        return Tree(w=torch.zeros(1))

    def loss(self, w: Tree, batch: Batch) -> Tensor:
        return batch.mean(batch.x[:, 0] / 2 * (w["w"] - batch.x[:, 1]).square())


class Identity(ToyNet):
    """The features are the inputs."""

    name = "identity"

    def __init__(self, classes: int, dim: int, z_normalize: bool = False) -> None:
        super().__init__()
        self.classes, self.dim, self.encoded, self.z_normalize = classes, dim, dim, z_normalize

    def init(self, stream: Any) -> Tree:
        return Tree({"head.weight": torch.zeros(self.classes, self.dim), "head.bias": torch.zeros(self.classes)})


class Harnessed(Federation):
    """A federation whose draws may be given, and which remembers its rounds."""

    draws: list[list[int]] | None = None

    def drawn(self, t: int) -> list[int]:
        return self.draws[t] if self.draws else super().drawn(t)

    def run(self) -> Harnessed:
        self.introduce()
        for t in range(self.protocol.rounds):
            self.play(t)
        return self

    def exchange(self, exchange: Any, t: int, ids: list[int] | None = None) -> Round:
        self.last = super().exchange(exchange, t, ids)
        self.rounds = [*getattr(self, "rounds", []), self.last]
        return self.last

    @property
    def bytes(self) -> list[dict[str, int]]:
        return [r.bytes for r in self.rounds]

    @property
    def terms(self) -> list[dict[str, float]]:
        return [r.terms for r in self.rounds]

    def own(self, client: int) -> Tree:
        """The method's part of a client's memory; empty if it has none."""
        kept = self.memory.get(client)
        return Tree() if kept is None else kept.own

    def personal(self, played: Round | None = None) -> dict[int, Any]:  # type: ignore[override]
        return dict(super().personal(played or self.last))

    def refreshed(self) -> dict[int, Any]:  # type: ignore[override]
        return dict(super().refreshed())

    def scores(self, model: Any, x: Tensor) -> dict[str, Any]:
        with torch.no_grad():
            out = model.scores(self.task.net.bound("eval"), model.tree, x)
        return out if isinstance(out, dict) else {"network": out}


def federation(
    method: Method, net: Any, x: Tensor, y: Tensor, parts: list[Any], *, engine: str = "loop",
    initial: Tree | None = None, draws: list[list[int]] | None = None, augment: Any = None, **fields: Any,
) -> Harnessed:  # fmt: skip
    """x float64 [n, ...]; y [n]; parts: sample positions by client; draws: ids per round; fields: of the protocol."""
    protocol = method.adapt(Protocol(**{**PLAIN, "clients": len(parts), "engine": engine, **fields}))
    index = [torch.as_tensor(p, dtype=torch.long) for p in parts]
    task = RunTask(net, x, y, index, protocol, pipeline=augment, initial=initial)
    fed = Harnessed(method, task)
    fed.draws = draws
    return fed


def quadratic(method: Method, *, rows: Any = ((1, 1), (2, 3)), n: Any = (10, 30), **kw: Any) -> Harnessed:
    """Clients f_i = h_i/2 (w - a_i)^2 with n_i equal rows each."""
    x = torch.cat([torch.tensor([r], dtype=torch.float64).repeat(k, 1) for r, k in zip(rows, n)])
    ends = torch.tensor([0, *n]).cumsum(0).tolist()
    parts = [range(a, b) for a, b in zip(ends, ends[1:])]
    return federation(method, Quadratic(), x, torch.zeros(len(x), dtype=torch.long), parts, **kw)


def view(**given: Any) -> View:
    """A view for a function of one batch."""
    one = torch.tensor(1.0, dtype=torch.float64)
    plain = dict(shared=Tree(), own=Tree(), const=Tree(), n=one, counts=one[None], steps=one, epochs=one, lr=0.1,
                 round=0, rounds=4)  # fmt: skip
    return View(**{**plain, **given})


def batch(x: Any, y: Any, **given: Any) -> Batch:
    """A batch of real rows."""
    x = torch.as_tensor(x, dtype=torch.float64)
    return Batch(x, torch.as_tensor(y), torch.ones(len(x), dtype=torch.float64), **given)
