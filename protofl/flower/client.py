"""A node's part: its client's programs, run on its own data, with what it remembers in a folder of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import platformdirs
import torch
from flwr.app import ConfigRecord, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.utils import _pytree as pytree

from .. import __version__, records, run
from ..clients import Clients
from ..errors import UserError
from ..tree import Tree
from . import settings
from .data import client
from .messages import NEVER, record, replied, tree

Loader = Callable[[Any], Any]
"""Flower's context of a node -> x [n, H, W, C], y [n]."""


def client_app(train: Loader, place: str) -> Any:
    """The ClientApp of an exported app. place: a file of the app."""
    app, folder = ClientApp(), Path(place).parent
    app.query()(lambda message, context: replied(message, lambda: hello(context, train, folder)))
    app.train()(lambda message, context: replied(message, lambda: work(message.content, context, train, folder)))
    return app


def hello(context: Any, train: Loader, folder: Path) -> Any:
    """Who this node is: its client and how often it has each class."""
    app, i = settings.read(context.run_config, folder), client(context)
    _, y = settings.checked(app, train(context), "train() in data.py")
    counts = torch.bincount(y, minlength=app.net.classes).tolist()
    told = MetricRecord({"client": i, "counts": counts})
    return RecordDict({"told": told, "with": ConfigRecord({"protofl": __version__})})


def work(given: Any, context: Any, train: Loader, folder: Path) -> Any:
    """One client's part of an exchange."""
    run.set_up_process()  # sums hang on the number of threads
    order, i = given["order"], client(context)
    app = settings.read(context.run_config, folder)
    x, y = settings.checked(app, train(context), "train() in data.py")
    parts = [torch.arange(len(y) if k == i else 0) for k in range(len(order["sizes"]))]
    task = app.task(x, y, parts, app.pipeline)
    task.sizes = list(order["sizes"])  # a program may know how many samples others have, as in a simulation
    clients, memory = Clients(app.method, task), Memory(context, i)
    kept = memory.get(order["since"])
    kept = None if kept is None else pytree.tree_map(lambda v: v.to(task.device), kept)
    shared = tree(given["shared"], task.device)
    (worked,) = clients.work(getattr(app.method, order["hook"]), order["t"], [i], shared, [kept])
    keeps = any(worked.memory.values())
    if keeps:
        memory.put(order["t"], order["since"], worked.memory)
    told: dict[str, Any] = {"keeps": int(keeps), **clients.engine.samples, **clients.engine.seconds}
    return RecordDict({"upload": record(worked.upload), "terms": record(worked.terms), "told": MetricRecord(told)})


class Memory:
    """What a node's client remembers in one run, as files: its own state, momenta, buffers.

    Not in Flower's context: that lies in the SuperNode's RAM, and is gone when the SuperNode is started anew. `memory` of
    the --node-config names the folder; the file of the round before stays until the next one is written.
    """

    def __init__(self, context: Any, client: int) -> None:
        named = context.node_config.get("memory") or platformdirs.user_data_dir("protofl")
        self.client, self.folder = client, Path(str(named)) / f"run-{context.run_id}"

    def _file(self, t: int) -> Path:
        return self.folder / f"c{self.client:05d}-r{t + 1:05d}.safetensors"

    def get(self, t: int) -> Tree | None:
        """What was put in round t; None for NEVER."""
        if t == NEVER:
            return None
        try:
            return records.unpack(self._file(t).read_bytes())[0]
        except OSError:
            raise UserError(
                f"what it remembers of round {t} is not in {self.folder}: a node that moves takes this folder along"
            ) from None

    def put(self, t: int, before: int, memory: Tree) -> None:
        """Keep this for round t, and what round `before` left: until the server has the reply, that is what counts."""
        records.write_bytes(self._file(t), records.pack(memory, {}))
        for path in self.folder.glob(f"c{self.client:05d}-*.safetensors"):
            if path not in (self._file(t), self._file(before)):
                path.unlink(missing_ok=True)
