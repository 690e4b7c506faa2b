"""One pass of the encoder for everybody who reads r: a loss and the plug-in that adds to it."""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any

from torch import Tensor

from protofl.method import Tree

if TYPE_CHECKING:
    from protofl.nets import Net


def once(net: Net) -> Net:
    """The same bound net, whose `encode` answers an equal question (the same objects) from memory.

    A second pass would cost as much as the first, and normalisation layers would remember the batch twice.
    """
    if hasattr(net, "answered"):
        return net
    twin: Any = copy.copy(net)
    twin.__class__ = _remembering(twin.__class__)
    twin.answered = []
    return twin  # type: ignore[no-any-return]


@functools.cache
def _remembering(kind: type[Any]) -> type[Any]:
    """A subclass, so that the net's own functions (`loss`, `embed`, copies by `within`) meet its `encode`."""

    class Remembering(kind):  # type: ignore[misc]
        answered: list[tuple[Any, Any, Any, Tensor]]

        def encode(self, w: Tree, x: Tensor, **how: Any) -> Tensor:
            for w_before, x_before, how_before, known in self.answered:
                if w is w_before and x is x_before and how == how_before:
                    return known
            r: Tensor = super().encode(w, x, **how)
            self.answered.append((w, x, how, r))
            return r

    return Remembering
