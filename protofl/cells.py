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
    swept: tuple[tuple[str, str], ...] = ()
    """What tells it from the other cells of a grid beside method, beta and seed, in words."""

    @property
    def label(self) -> str:
        """method, beta, what is swept and seed in words."""
        p = self.protocol
        split = f"beta {p.beta:g}" if p.dirichlet else p.partition
        swept = "".join(f" {name} {value}" for name, value in self.swept)
        return f"{registry.label(self.method.name)} {split}{swept} seed {p.seed}"
