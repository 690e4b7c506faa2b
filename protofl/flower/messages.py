"""What crosses between the server and its nodes: trees as Flower's array records, and a few numbers beside them.

  query   asks who a node is       -> client, class counts, version of protofl
  train   one client's part of an exchange: hook of the method, t, the round whose memory it continues, everybody's sizes,
          `shared`                 -> upload, loss terms, what it cost

A client's own memory never crosses. What goes wrong with a method or with a user's data comes back as one line.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from ..engine.base import MethodError
from ..errors import UserError
from ..method import Diverged
from ..records import flatten, unflatten
from ..tree import Tree

LOG = logging.getLogger("flwr")
"""Flower's own: what a server tells there is what `flwr run --stream` and `flwr log` show."""

HELLO, WORK = "query", "train"
"""Flower's types of message."""

NEVER = -2
"""In place of a round: a client that has no memory yet."""

FAILURES: dict[str, type[Exception]] = {e.__name__: e for e in (UserError, MethodError, Diverged)}
"""What a node tells in one line; anything else is a fault, whose traceback is in the node's own log."""


def record(tree: Tree) -> Any:
    """A tree as an array record: names are paths, the order of entries is kept, nothing is pickled."""
    return ArrayRecord({k: Array(v.detach().cpu().contiguous().numpy()) for k, v in flatten(tree).items()})


def tree(arrays: Any, device: torch.device) -> Tree:
    """The inverse of `record`."""
    return unflatten({k: torch.from_numpy(v.numpy()).to(device) for k, v in arrays.items()})


def replied(message: Any, work: Callable[[], Any]) -> Any:
    """The reply with what `work` makes, or with the line that says why it could not."""
    try:
        content = work()
    except tuple(FAILURES.values()) as e:
        LOG.error("%s", e, exc_info=isinstance(e, MethodError))  # the way through a method's code is seen here alone
        content = RecordDict({"failed": ConfigRecord({"kind": type(e).__name__, "line": str(e)})})
    return Message(content, reply_to=message)


def content(reply: Any, who: str) -> Any:
    """What a node replied; its failures are raised here, with who and in which round."""
    if reply.has_error():
        raise RuntimeError(f"{who}, gave no result: {' '.join(str(reply.error.reason).split())}")
    if "failed" in reply.content:
        told = reply.content["failed"]
        raise FAILURES[told["kind"]](f"{who}: {told['line']}")
    return reply.content
