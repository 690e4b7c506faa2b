"""A small ragged federation of images with BatchNorm, augmentation and everything else switched on."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from harness import Harnessed, federation
from torch import Tensor
from torch.utils import _pytree as pytree

from protofl import registry
from protofl.data.augment import Pipeline
from protofl.nets.base import Entry, Net, Options, affine, declare_conv, declare_linear, declare_norm
from protofl.protocol import Protocol
from protofl.tree import Tree

CLASSES, SHAPE = 5, (8, 8, 3)
SIZES = (23, 5, 16, 9, 31, 12, 18)

AWKWARD = dict(
    rounds=3, local_epochs=2, batch_size=8, client_lr=0.05, lr_decay_per_round=0.9, momentum=0.9, weight_decay=1e-2,
    grad_clip_norm=1.0, participation=0.6, seed=1, partition_min_size=1, precision="fp64", drop_last=False,
)  # fmt: skip


class ToyBN(Net):
    """conv, BatchNorm, ReLU, pool, twice; linear; projection; head."""

    def __init__(self, projection: int | None = 7, z_normalize: bool = False) -> None:
        super().__init__("toy_bn", 10, Options(CLASSES, SHAPE, projection, True, z_normalize))

    def encoder_table(self) -> list[Entry]:
        return [
            *declare_conv("encoder.conv1", 3, 4, 3), *declare_norm("encoder.norm1", 4, True),
            *declare_conv("encoder.conv2", 4, 6, 3), *declare_norm("encoder.norm2", 6, True),
            *declare_linear("encoder.fc", 24, 10),
        ]  # fmt: skip

    def _encode(self, w: Tree, x: Tensor, relu: bool) -> Tensor:
        for i in (1, 2):
            x = F.conv2d(x, w[f"encoder.conv{i}.weight"], w[f"encoder.conv{i}.bias"], padding=1)
            x = F.relu(F.max_pool2d(self.batch_norm(w, f"encoder.norm{i}", x), 2))
        return F.relu(affine(x.flatten(1), w["encoder.fc.weight"], w["encoder.fc.bias"]))


@functools.cache
def images() -> tuple[Tensor, Tensor, list[Tensor]]:
    """x uint8 [n, 8, 8, 3], y [n], ragged parts; client 1 has one class, client 3 two, class 4 is rare."""
    rs = np.random.RandomState(3)
    y = torch.from_numpy(rs.randint(0, CLASSES, sum(SIZES)))
    ends = np.cumsum((0, *SIZES))
    parts = [torch.arange(a, b) for a, b in zip(ends, ends[1:])]
    y[parts[1]] = 0
    y[parts[3]] = 1 + y[parts[3]] % 2
    centre = rs.uniform(60, 190, (CLASSES, *SHAPE))
    x = np.clip(centre[y.numpy()] + rs.normal(0, 50, (len(y), *SHAPE)), 0, 255).astype(np.uint8)
    return torch.from_numpy(x), y, parts


def toy(method: Any, *, engine: str = "loop", net: Net | None = None, augment: bool = True, **fields: Any) -> Harnessed:
    """The federation, ready to run; `method`: a name, or a method."""
    x, y, parts = images()
    names = ("hflip", "rotate15") if augment else ()
    pipeline = Pipeline(names, (0.5,), (0.25,), 255.0, SHAPE, torch.float64)
    protocol = {**AWKWARD, **fields}
    made = build(method, **protocol) if isinstance(method, str) else method
    return federation(made, net or ToyBN(), x, y, parts, engine=engine, augment=pipeline, **protocol)


def build(name: str, options: dict[str, Any] | None = None, **fields: Any) -> Any:
    """A method by name."""
    return registry.Spec(name, tuple((options or {}).items())).build(Protocol(**{**AWKWARD, **fields}))


def everything(fed: Harnessed) -> list[Any]:
    """All that a run leaves behind: state of the server, memories of the clients."""
    return [fed.shared, fed.private, *[fed.memory.get(i) or Tree() for i in range(len(SIZES))]]


def outputs(fed: Harnessed) -> list[dict[str, Any]]:
    """Scores of the global model, and of the personal models as trained."""
    x = fed.task.pipeline.test(images()[0][:20])
    models = [fed.global_model(), *fed.personal().values()]
    return [fed.scores(m, x) for m in models if m is not None]


def gap(a: Any, b: Any) -> float:
    """Largest difference between two trees of equal structure; equal infinities are no difference."""
    la, sa = pytree.tree_flatten(a)
    lb, sb = pytree.tree_flatten(b)
    assert sa == sb, f"structures differ: {sa} {sb}"
    worst = 0.0
    for p, q in zip(la, lb):
        if isinstance(p, Tensor) and p.numel():
            assert p.shape == q.shape
            d = torch.where(p == q, 0.0, (p.double() - q.double()).abs())
            worst = max(worst, float(d.max()))
    return worst
