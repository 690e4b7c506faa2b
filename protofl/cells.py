"""A cell of a table: one run that is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from . import registry
from .protocol import Protocol


@dataclass(frozen=True)
class Cell:
    """One run that is asked for."""

    method: registry.Spec
    protocol: Protocol
    data_dir: str | None = None

    @property
    def label(self) -> str:
        """method, beta and seed in words."""
        p = self.protocol
        split = f"beta {p.beta:g}" if p.dirichlet else p.partition
        return f"{registry.label(self.method.name)} {split} seed {p.seed}"
