"""A small ragged federation of images with BatchNorm, augmentation and everything else switched on."""

from __future__ import annotations

from typing import Any

from harness import Harnessed, federation
from torch.utils import _pytree as pytree

from protofl import registry
from protofl.handles import DTYPES
from protofl.nets.base import Net
from protofl.protocol import Protocol
from protofl.tree import Tree
from protofl.trials import AWKWARD, CLASSES, SHAPE, SIZES, apart, images, transform
from protofl.trials import TrialNet as ToyBN

__all__ = ["AWKWARD", "CLASSES", "SHAPE", "SIZES", "ToyBN", "build", "everything", "gap", "images", "outputs", "toy"]


def toy(method: Any, *, engine: str = "loop", net: Net | None = None, augment: bool = True, **fields: Any) -> Harnessed:
    """The federation, ready to run; `method`: a name, or a method."""
    x, y, parts = images()
    protocol = {**AWKWARD, **fields}
    dtype = DTYPES[protocol.get("precision", "fp64")]
    pipeline = transform(*(("hflip", "rotate15") if augment else ()), dtype=dtype)
    made = build(method, **protocol) if isinstance(method, str) else method
    there = pipeline.on(protocol.get("device", "cpu"))
    return federation(made, net or ToyBN(), x, y, parts, engine=engine, augment=there, **protocol)


def build(name: str, options: dict[str, Any] | None = None, **fields: Any) -> Any:
    """A method by name."""
    return registry.Spec(name, tuple((options or {}).items())).build(Protocol(**{**AWKWARD, **fields}))


def everything(fed: Harnessed) -> list[Any]:
    """All that a run leaves behind: state of the server, memories of the clients."""
    return [fed.shared, fed.private, *[fed.memory.get(i) or Tree() for i in range(len(SIZES))]]


def outputs(fed: Harnessed) -> list[dict[str, Any]]:
    """Scores of the global model, and of the personal models as trained."""
    x = fed.task.pipeline.test(images()[0][:20].to(fed.task.device))
    models = [fed.global_model(), *fed.personal().values()]
    return [fed.scores(m, x) for m in models if m is not None]


def gap(a: Any, b: Any) -> float:
    """Largest difference between two trees of equal structure; equal infinities are no difference."""
    (_, sa), (_, sb) = pytree.tree_flatten(a), pytree.tree_flatten(b)
    assert sa == sb, f"structures differ: {sa} {sb}"
    return apart(a, b)[0]
