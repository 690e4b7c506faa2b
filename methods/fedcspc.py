"""FedCSPC: clients send cluster-level prototypes, on which the server calibrates projection and output layer.

Qi, Meng, Chen, Hu, Lin and Meng, "Cross-silo prototypical calibration for federated learning with non-IID
data", ACM Multimedia 2023 (arXiv 2308.03457). h = E(x), z = H(h), logits F(z); U_c: global class prototypes.

    paper                                               here
    local training, CE + kappa (L_P + L_A + L_Ed)       `loss`, with relations.py
    data prototypical modelling: k-means of a class,
        means of random subsets of its clusters         `represent`, with clusters.py
    U_c, means of the pooled prototypes                 `aggregate`
    calibration, L_CE + eta (L_con + L_mar) on H, F     `calibrate`, `calibration_loss`, with calibration.py
    exemplars e_c, fused with the network's scores      `exemplars`, `three_scores`

All of it stands in cspc.py, a plug-in: it adds to whatever method stands behind it, in the paper FedAvg or MOON
(`local_base`, or `moon+cspc`). The paper's equations were not at hand, their readings are options.

Against the authors' code (qizhuang-qz/FedCSPC @e1630bf, which lacks files and cannot run): no clustering
there, larger subsets with replacement (`n_clusters`, `sample_ratio`, `sample_replacement`); L_P alone
(`local_reg`; `reg_form`, `reg_weights` for its L_A, L_Ed); an auxiliary classifier on h (field
`aux_classifier`); the last sets of all clients, without the short batch (`pool`, `proto_drop_last`);
calibration by cross-entropy alone, its other losses in other forms (`calib_losses`, `con_form`, `tau_g`,
`n_aug`, `neg_mix`); a fusion of raw logits (`fusion_norm`). Preset official_code restores these. Two faults
there have no option: a margin loss whose norm runs over the batch, and idle clients' old nets in the average.

Checked against: the paper's text, CIFAR-10, one subset per cluster: about 1.2 (beta 0.1) and 2.2 points (beta
0.5) above FedAvg; the code's RGA.py on three rows: L_A 0.053930, L_Ed 0.061985 (`reg_form=smooth_l1_code`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from protofl.errors import UserError
from protofl.method import Method, Same, choice

from .cspc import CSPC
from .fedavg import FedAvg
from .moon import MOON


@dataclass(frozen=True)
class FedCSPC(CSPC, FedAvg):
    """The paper's method: the plug-in on FedAvg."""

    preset: str = choice(
        "paper", "official_code", why="the text before the code, no fault of the code", source="project"
    )
    local_base: str = choice(
        "ce",
        "moon",
        why="moon: MOON at the clients with this setting's mu, the same run as moon+cspc",
        source="FedCSPC 5",
    )

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {},
        "official_code": {
            "n_clusters": 1, "sample_ratio": 0.8, "sample_replacement": True, "local_reg": "P",
            "proto_drop_last": True, "pool": "latest_all", "neg_mix": "toward_negative", "n_aug": 1,
            "con_form": "supcon_code", "tau_g": 0.07, "calib_losses": "ce", "fusion_norm": "code_raw",
        },
    }  # fmt: skip
    same: ClassVar[tuple[Same, ...]] = (
        Same("n_repeat", (0,), "FedAvg on the same network", method="fedavg", exact=False),
        Same("local_base", ("moon",), "the plug-in on MOON", method="moon+cspc"),
    )
    needs: ClassVar[Mapping[str, Mapping[str, Any]]] = {"official_code": {"aux_classifier": True}}
    open_fields: ClassVar[tuple[str, ...]] = ("aux_classifier",)

    def __post_init__(self) -> None:
        if self.local_base == "moon":
            raise UserError("fedcspc local_base=moon is another class: FedCSPC.build(options, setting) makes it")

    @classmethod
    def build(cls, options: Mapping[str, Any], setting: Callable[[str], Mapping[str, Any]]) -> Method:
        """local_base=moon: the plug-in on MOON, which takes its own values from the setting."""
        if options.get("local_base") != "moon":
            return cls(**options)
        mine = {k: v for k, v in options.items() if k not in ("local_base", "preset")}
        return MoonCSPC(**{**setting("moon"), **mine})


@dataclass(frozen=True)
class MoonCSPC(CSPC, MOON):
    """The plug-in on MOON."""
