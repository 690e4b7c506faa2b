"""protofl with one of its optimisations taken out, to see what it brings. One process: others would not know of it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch.nn.functional as F


@dataclass(frozen=True)
class Part:
    """An optimisation: where it shows most, and what stands in its place (a place in the source, and a value)."""

    workload: str
    words: tuple[str, ...]
    place: str
    instead: Any


PARTS = {
    "freed memory stays in the process": Part("W2", (), "protofl.heap:keep", lambda: None),
    "clients in lockstep": Part("W3", (), "protofl.engine.rule:TINY", ()),
    "64 clients in a call, not 16": Part("W3", (), "protofl.engine.batched:LIGHT", 0),
    "floats made once where nothing is random": Part("W3", (), "protofl.handles:ONCE", 0),
    "fresh memory not filled with NaN": Part("W1", (), "protofl.heap:leave_unfilled", lambda: None),
    "mean and deviation over whole images": Part(
        "W1", (), "protofl.data.augment:_over_image", lambda v, shape: None if v is None else v.permute(1, 2, 0)
    ),
    "pooling without gradients by maxima of neighbours": Part(
        "W1", ("--method", "moon"), "protofl.nets.small:halved", lambda x: F.max_pool2d(x, 2)
    ),
    "features of frozen models once a round": Part(
        "W1", ("--method", "moon", "--set", "augment=none"),
        "protofl.engine.loop:Loop.constant_features", lambda engine, request, plan: False,
    ),
}  # fmt: skip


def take_out(name: str) -> None:
    """Put something else in an optimisation's place."""
    module, _, path = PARTS[name].place.partition(":")
    owner: Any = import_module(module)
    *above, last = path.split(".")
    for one in above:
        owner = getattr(owner, one)
    if not hasattr(owner, last):
        raise SystemExit(f"{PARTS[name].place} is not there")
    setattr(owner, last, PARTS[name].instead)
