"""Normalisation statistics that stay with their client (bn_buffers=local): out of messages, into models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .tree import Tree


def find_buffers(tree: Mapping[str, Any], names: str) -> Tree:
    """The buffers of the first model inside a message."""
    mine = Tree(tree).only(names)
    for v in tree.values():
        if not mine and isinstance(v, Tree):
            mine = find_buffers(v, names)
    return mine


def put_buffers(tree: Tree, buffers: Tree) -> Tree:
    """The same message with these buffers in every model that has them."""
    return Tree({k: put_buffers(v, buffers) if isinstance(v, Tree) else buffers.get(k, v) for k, v in tree.items()})


def without_buffers(tree: Tree, names: str | None) -> Tree:
    """The same message without the buffers of its models."""
    if names is None:
        return tree
    kept = {k: without_buffers(v, names) if isinstance(v, Tree) else v for k, v in tree.items()}
    return Tree(kept).without(names)
