"""Named tensors that nest and add: a model, a gradient, a message, a client's memory.

Leaves are tensors, `Rows` or further trees, so that every tree can be counted (`nbytes`) and stored.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class Tree(dict[str, Any]):
    """A dict of tensors (or trees) with attribute access and arithmetic by name."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no {name!r} among {list(self)}") from None

    def __or__(self, other: dict[str, Any]) -> Tree:  # type: ignore[override]
        """This tree, with the entries of `other` put in or replaced."""
        return Tree({**self, **other})

    def map(self, fn: Callable[[Any], Any]) -> Tree:
        """`fn` of every leaf."""
        return Tree({k: v.map(fn) if isinstance(v, Tree) else fn(v) for k, v in self.items()})

    def only(self, names: str) -> Tree:
        """The entries whose names match the regular expression from their start."""
        return Tree({k: v for k, v in self.items() if re.match(names, k)})

    def without(self, names: str) -> Tree:
        """The entries whose names do not match the regular expression from their start."""
        return Tree({k: v for k, v in self.items() if not re.match(names, k)})

    def like(self, names: Iterable[str]) -> Tree:
        """The entries of these names (another tree will do), in their order."""
        return Tree({k: self[k] for k in names})

    def _pair(self, other: Any, op: Callable[[Any, Any], Any]) -> Tree:
        """By name; the left side decides which names, the right side must have them all."""
        if not isinstance(other, dict):
            return self.map(lambda v: op(v, other))
        if not self.keys() <= other.keys():
            raise KeyError(f"the right side lacks {sorted(self.keys() - other.keys())}")
        return Tree({k: v._pair(other[k], op) if isinstance(v, Tree) else op(v, other[k]) for k, v in self.items()})

    def __add__(self, other: Any) -> Tree:
        return self._pair(other, operator.add)

    def __sub__(self, other: Any) -> Tree:
        return self._pair(other, operator.sub)

    def __mul__(self, other: Any) -> Tree:
        return self._pair(other, operator.mul)

    def __truediv__(self, other: Any) -> Tree:
        return self._pair(other, operator.truediv)

    __rmul__ = __mul__


pytree.register_pytree_node(Tree, lambda t: (list(t.values()), tuple(t)), lambda v, k: Tree(zip(k, v)))


class Rows(NamedTuple):
    """A table of class rows of which only those with `has` are valid, sent and billed.

    values: [K, ...] float; has: [K] bool. Rows without `has` hold anything finite.
    """

    values: Tensor
    has: Tensor


def same(tensors: list[Any]) -> bool:
    """Whether all entries are one and the same object."""
    return all(t is tensors[0] for t in tensors)


def nbytes(tree: Any) -> int:
    """Bytes on the wire (protocol 6.1): 4 per float whatever the precision, 8 per integer, present `Rows` only.

    Boolean masks (which rows are valid) are not billed.
    """
    if isinstance(tree, Rows):
        return int(tree.has.sum()) * tree.values[0].numel() * 4
    if isinstance(tree, Tensor):
        return tree.numel() * (4 if tree.is_floating_point() else 0 if tree.dtype == torch.bool else 8)
    return sum(nbytes(v) for v in tree.values())


def tensors(tree: Any) -> list[Tensor]:
    """All tensors of a tree, in order."""
    return [v for v in pytree.tree_leaves(tree) if isinstance(v, Tensor)]


def placed(tree: Any, device: torch.device | str) -> Any:
    """The same on a device."""
    return pytree.tree_map(lambda v: v.to(device) if isinstance(v, Tensor) else v, tree)


def stack(trees: list[Any]) -> Any:
    """Trees of equal shape, stacked along a new first axis."""
    return pytree.tree_map(lambda *v: torch.stack(v), *trees)
