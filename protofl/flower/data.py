"""What an app trains on as it was exported: the very split that protofl itself would make."""

from __future__ import annotations

from typing import Any

from ..data import Data
from ..errors import UserError
from ..inputs import load_data, split
from . import settings


def client(context: Any) -> int:
    """Which client a node is: `partition-id` of its --node-config."""
    config, n = context.node_config, settings.protocol(context.run_config).clients
    i = config.get("partition-id")
    if type(i) is not int or not 0 <= i < n:
        raise UserError(f"--node-config must say partition-id=K with K from 0 to {n - 1}, it says {dict(config)}")
    if config.get("num-partitions", n) != n:
        raise UserError(f"--node-config says num-partitions={config['num-partitions']}, the app is for {n} clients")
    return i


def _stored(context: Any) -> Data:
    p = settings.protocol(context.run_config)
    return load_data(p.dataset, _folder(context), p.data_order)


def _folder(context: Any) -> str | None:
    return context.run_config["data.folder"] or None


def part(context: Any) -> tuple[Any, Any]:
    """A node's training samples: x [n, H, W, C], y [n]."""
    index = split(settings.protocol(context.run_config), _folder(context)).indices[client(context)]
    data = _stored(context)
    return data.x_train[index], data.y_train[index]


def test_set(context: Any) -> tuple[Any, Any]:
    """The server's test samples: x [n, H, W, C], y [n]."""
    data = _stored(context)
    return data.x_test, data.y_test
