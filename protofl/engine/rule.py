"""Which engine answers: what was asked for, or a fixed rule."""

from __future__ import annotations

from .base import Engine
from .batched import Batched
from .graphs import Graphs
from .loop import Loop

ENGINES: dict[str, type[Engine]] = {"loop": Loop, "batched": Batched, "graphs": Graphs}

TINY = ("mlp", "mlp_plain")
"""Nets whose step costs more in calls than in arithmetic: batched is faster on a CPU."""


def choose(engine: str, model: str, device: str) -> str:
    """The engine behind `auto`: a fixed rule of network and device, since the kind of arithmetic moves last bits."""
    if engine != "auto":
        return engine
    return "batched" if device.startswith("cuda") or model in TINY else "loop"


def alone(engine: str) -> type[Loop]:
    """The engine of the server's own training, which is one client's."""
    return Graphs if engine == "graphs" else Loop
