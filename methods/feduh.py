"""FedUH: FedNH whose prototypes never move: a fixed, uniform cosine head.

Dai, Chen, Li, Heinecke, Sun and Xu, "Tackling data heterogeneity in federated learning with class prototypes",
AAAI 2023 (arXiv 2212.02758), the ablation without semantic update (4.3).

W, K unit vectors as far apart as can be, is sent once; nobody measures class means. It is `fednh` with rho=1 under
a name of its own, with FedNH's streams, so that the two are the same run bit for bit; the options of the update
(`proto_client_weight`, `client_proto_norm`, `proto_pre_normalize`, `proto_post_normalize`, `proto_transform`,
`proto_timing`, `pm_proto`) have nothing to act on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from protofl.method import choice

from .fednh import FedNH


@dataclass(frozen=True)
class FedUH(FedNH):
    """shared: net (the body and `scale` [1]), proto W [K, d]. upload: net."""

    cost: ClassVar[float] = 1.0

    rho: float = choice(1.0, why="W stays where it starts; any other value is fednh", source="FedNH 4.3")
