"""Sweeps by name: what they vary over which values, for which methods, and where the values come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Sweep:
    """over: values, with commas, by protocol field or METHOD.OPTION; methods: what is run if the user names none."""

    what: str
    over: Mapping[str, str]
    methods: str | None = None

    @property
    def shown(self) -> str:
        """The values in words."""
        return ", ".join(f"{key}={values}" for key, values in self.over.items())


SWEEPS = {
    "heterogeneity": Sweep("label skew (MOON, table 4; FedNH, table 1)", {"beta": "0.1,0.3,0.5,1,5"}),
    "scalability": Sweep(
        "clients x participation (MOON, table 3, made smaller)", {"clients": "10,20,50", "participation": "0.2,1"}
    ),
    "local-epochs": Sweep("local epochs (MOON, figure 7)", {"local_epochs": "1,5,10,20,40"}),
    "rho": Sweep(
        "FedNH's weight of the old prototypes (FedNH, table 3)", {"fednh.rho": "0.1,0.3,0.5,0.7,0.9"}, "fednh"
    ),
    "clusters": Sweep("FedCSPC's clusters per class (FedCSPC, 5)", {"fedcspc.n_clusters": "1,2,3,4"}, "fedcspc"),
    "repeats": Sweep(
        "FedCSPC's subsets per cluster (FedCSPC, figure 5)", {"fedcspc.n_repeat": "1,2,4,5,8,16"}, "fedcspc"
    ),
    "n-aug": Sweep("FedCSPC's artificial pairs per prototype (FedCSPC, 5)", {"fedcspc.n_aug": "1,3,5,7,9"}, "fedcspc"),
}
