"""An app's settings, `[tool.flwr.app.config]` of its pyproject.toml: written once, read by the server and every node.

Flower hands them on as one flat record, with what `flwr run --run-config` changes: `protocol.NAME`, `options.NAME`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import options, registry, run
from .. import protocol as protocols
from ..data import Data
from ..data.augment import Pipeline
from ..errors import UserError
from ..handles import RunTask
from ..method import Method
from ..nets import Net
from ..protocol import Protocol
from ..run import Prepared

DEPLOYED: dict[str, Any] = {"engine": "loop", "metrics": ("gm",)}
"""Protocol fields of every app: a node is one client, and no personal model is at the server to be measured."""

Setting = Mapping[str, Any]
"""Settings by their flat names."""


def tables(ready: Prepared, method: str) -> dict[str, dict[str, Any]]:
    """The settings of a cell by table, for TOML; method: its name, or the name of its file in the app's folder."""
    p, told, data = ready.cell.protocol, ready.document["method"], ready.data
    fields = {n: getattr(p, n) for n, f in options.fields(p).items() if options.option(f).digest and n not in DEPLOYED}
    for name in ("dataset", "partition_file"):  # a path must mean the same wherever a node is started
        if Path(fields[name]).suffix or "/" in fields[name]:
            fields[name] = str(Path(fields[name]).resolve())
    return {
        "": {"out": f"{registry.label(method)}.safetensors", "wait": 600, "timeout": 3600},
        "method": {"name": method, "class": told["class"]},
        "options": {n: _plain(v) for n, v in told["options"].items()},
        "data": {
            "classes": len(data.classes), "shape": options.text(data.x_train.shape[1:]), "scale": data.scale,
            "folder": str(Path(ready.cell.data_dir).resolve()) if ready.cell.data_dir else "",
        },
        "protocol": {n: _plain(v) for n, v in fields.items()},
    }  # fmt: skip


def _plain(v: Any) -> Any:
    """What Flower's settings can hold: a list is text."""
    return v if isinstance(v, bool | int | float | str) else options.text(v)


def table(setting: Setting, name: str) -> dict[str, Any]:
    """The entries of one table."""
    return {k.removeprefix(f"{name}."): v for k, v in setting.items() if k.startswith(f"{name}.")}


def protocol(setting: Setting) -> Protocol:
    """The table's protocol, before the method adapts it."""
    return Protocol(**protocols.coerce({**table(setting, "protocol"), **DEPLOYED}))


@dataclass(frozen=True)
class App:
    """What the server and the nodes have in common. protocol: as the method adapts it."""

    method: Method
    protocol: Protocol
    net: Net
    pipeline: Pipeline

    def task(self, x: Any, y: Tensor, parts: list[Tensor], pipeline: Pipeline | None) -> RunTask:
        """The task of one place, with the data that are there."""
        return RunTask(self.net, x, y, parts, self.protocol, pipeline=pipeline)


def read(setting: Setting, folder: Path) -> App:
    """The app that the settings describe; folder: where the app lies, for a method that is a file of it."""
    name, cls = setting["method.name"], setting["method.class"]
    path = str(folder / name) if registry.is_path(name) else name
    asked = protocol(setting)
    method = registry.Spec(path, tuple(table(setting, "options").items()), stored=cls).build(asked)
    adapted, data = method.adapt(asked), _no_data(setting)
    made = App(method, adapted, run.network(asked, data), run.pipeline(adapted, data).on(adapted.device))
    registry.check(method, asked, adapted, made.net)
    return made


def _no_data(setting: Setting) -> Data:
    """What is known of the data without any: the classes, the shape of x, and what it is divided by."""
    shape = tuple(int(n) for n in str(setting["data.shape"]).split(","))
    x, y = np.zeros((0, *shape), dtype=np.uint8), np.zeros(0, dtype=np.int64)
    classes = tuple(str(c) for c in range(int(setting["data.classes"])))
    return Data("flower", x, y, x, y, classes, float(setting["data.scale"]), "", "", "")


def checked(app: App, given: Any, where: str) -> tuple[Tensor, Tensor]:
    """What a loader gives -> x [n, H, W, C], y int64 [n]; `UserError` for what is not of the app's shape and classes."""
    try:
        x, y = (np.require(v, requirements=["C", "W"]) for v in given)
    except (TypeError, ValueError):
        raise UserError(f"{where} must return two arrays, x and y") from None
    shape, k = app.pipeline.shape, app.net.classes
    if x.dtype not in (np.uint8, np.float32) or x.shape[1:] != tuple(shape) or len(x) != len(y):
        raise UserError(
            f"{where} must return x uint8 (or float32) [n, {', '.join(map(str, shape))}] and y [n], "
            f"not {x.dtype} {list(x.shape)} and {list(y.shape)}"
        )
    if y.ndim != 1 or y.dtype.kind not in "iu" or (len(y) and not 0 <= int(y.min()) <= int(y.max()) < k):
        raise UserError(f"{where} must return y as class ids, integers from 0 to {k - 1}")
    return torch.from_numpy(x), torch.from_numpy(y.astype(np.int64))
