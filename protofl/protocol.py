"""The protocol: everything that can change a number, in one frozen, checked, hashable record.

A run is a pure function of its protocol, the content of the data and the split. The digest of the three names the
run's folder. Field names and defaults are those of the papers' settings (presets.toml).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any

from . import options
from .errors import UserError, nearest
from .options import choice, flag, number, value

NUMBERS = 1
"""Raised with every change of the code that moves a number, so that old runs are never taken for new ones."""

METRICS = ("gm", "pm_v", "pm_l")

ALIASES = {"lr": "client_lr", "net": "model"}
"""Short names of protocol fields."""


@dataclasses.dataclass(frozen=True)
class Protocol:
    """One experiment's settings, shared by all methods of a table."""

    # data
    dataset: str = value("digits", why="the embedded default: no download", source="project")
    data_order: str = choice(
        "folder_sorted",
        "torchvision",
        why="the same split for every layout of the files",
        source="protocol 1.1",
    )
    augment: tuple[str, ...] = value(
        (), why="what the setting's code does; none: images as they are", source="protocol 3"
    )
    mean: tuple[float, ...] = value((0.0,), why="per channel, of x/scale; none: not normalised", source="protocol 3")
    std: tuple[float, ...] = value((1.0,), why="per channel, of x/scale", source="protocol 3")
    # split
    partition: str = choice(
        "dir_class", "dir_class_fednh", "dir_client", "iid", "file",
        why="NIID-Bench, MOON, FedProc and FedCSPC; 'dirichlet' is another name for it", source="protocol 1.2",
    )  # fmt: skip
    partition_file: str = value("", why="a split saved by `protofl partition --save`", source="project")
    beta: float = number(0.5, 0.05, 0.1, 0.3, 1.0, 5.0, above=0, why="Dirichlet concentration; smaller: more skewed",
                         source="MOON 4.1")  # fmt: skip
    alpha_convention: str = choice(
        "per_class",
        "total",
        why="dir_client: beta per class, or in total (beta/K per class)",
        source="protocol 1.4",
    )
    clients: int = number(10, 100, low=1, why="MOON, FedProc, FedCSPC: 10; FedNH: 100", source="MOON 4.1")
    partition_seed: Any = number(
        0, words=("run",), low=0, high=2**32 - 1, why="0: one split for the whole table; run: a split per run seed",
        source="protocol 1.7",
    )  # fmt: skip
    partition_min_size: int = number(10, low=0, why="every client's least number of samples", source="MOON code")
    partition_min_classes: int = choice(2, 1, why="dir_class_fednh only", source="FedNH code")
    partition_cap: bool = flag(
        True, why="a client with the mean size gets no more of later classes", source="MOON code"
    )
    max_tries: int = number(1000, 3, low=1, why="draws before on_min_fail", source="protocol 1.6")
    on_min_fail: str = choice("error", "accept_last", "repair", why="never an endless loop", source="protocol 1.6")
    # network
    model: str = value("simple_cnn", why="MOON's network for CIFAR-10", source="protocol 2")
    projection_dim: int = number(256, 64, 128, 512, low=1, why="MOON 4.1", source="MOON 4.1")
    use_projection_head: bool = flag(True, why="every method of a table has it", source="MOON 4.1")
    classifier_input: str = choice("z", "r", why="FedProc: z, not r", source="FedProc code")
    z_normalize: bool = flag(False, why="true in fedproc.* for every row of the table", source="protocol 2.2")
    aux_classifier: bool = flag(False, why="FedCSPC's paper has none, its code has", source="protocol 2.2")
    stem: str = choice("cifar", "k7s2", "imagenet", why="open for VireoFood172", source="protocol 2.5")
    resnet_norm: str = choice("groupnorm2", "none_fednh", "batchnorm", why="FedNH's text: GroupNorm for all",
                              source="protocol 2.3")  # fmt: skip
    init: str = choice("numpy", "torch", why="the same bits on every kernel", source="protocol 2.6")
    init_seed: Any = number("run_seed", 2022, words=("run_seed",), low=0, high=2**32 - 1,
                            why="2022 reproduces FedNH's code", source="protocol 2.6")  # fmt: skip
    # rounds and clients
    rounds: int = number(100, 20, 50, 200, low=1, why="MOON 4.1", source="MOON 4.1")
    participation: float = number(1.0, 0.1, 0.2, 0.3, above=0, high=1, why="share of clients drawn per round",
                                  source="MOON 4.1")  # fmt: skip
    client_sampling: str = choice(
        "independent", "fednh_compat", "moon_compat",
        why="fednh_compat makes the seeds shifted copies; niid_compat is left out: its draws hang on all earlier ones",
        source="protocol 4.3",
    )  # fmt: skip
    client_seed: str = choice("per_client", "shared", why="shared reproduces FedNH's code", source="protocol 4.4")
    # local training
    local_epochs: int = number(10, 1, 5, 20, low=1, why="MOON 4.1", source="MOON 4.1")
    batch_size: int = number(64, low=1, why="MOON 4.1", source="MOON 4.1")
    drop_last: bool = flag(True, why="MOON family; false in fednh.*, niid.*", source="MOON code")
    short_client: str = choice(
        "keep_batch", "skip", why="drop_last and n_i < B: every drawn client takes part under every method",
        source="FedAvg, open choice",
    )  # fmt: skip
    client_lr: float = number(0.01, 0.1, above=0, why="MOON's paper; its argparse says 0.1", source="MOON 4.1")
    lr_decay_per_round: float = number(1.0, 0.99, above=0, high=1, why="none but FedNH: 0.99^t", source="MOON code")
    lr_decay_offset: int = choice(0, 1, why="the exponent in round 0", source="FedNH code")
    momentum: float = number(0.9, 0.0, low=0, high=1, why="MOON 4.1", source="MOON 4.1")
    weight_decay: float = number(1e-5, 1e-3, low=0, why="MOON 4.1", source="MOON 4.1")
    grad_clip_norm: float = number(0.0, 10.0, low=0, why="0: off; 10 in fednh.*", source="FedNH code")
    optimizer_reset: str = choice(
        "per_round", "never", why="momentum restarts: all codes", source="FedAvg, open choice"
    )
    # aggregation
    model_weighting: str = choice("data_size", "uniform", why="uniform in fednh.*", source="MOON code")
    server_lr: float = number(1.0, above=0, why="plain average", source="FedAvg, open choice")
    bn_buffers: str = choice("average", "local", why="MOON, FedProc and FedCSPC codes average every entry",
                             source="FedAvg, open choice")  # fmt: skip
    # evaluation
    eval_every: int = number(1, low=1, why="rounds between evaluations; the last is always one", source="FedNH code")
    metrics: tuple[str, ...] = value(("gm",), readings=METRICS, why="gm, pm_v, pm_l; only FedNH reports the latter",
                                     source="protocol 5")  # fmt: skip
    pm_clients: str = choice("active", "all", why="FedNH's code", source="protocol 5.3")
    pm_protocol: str = choice("as_trained", "refresh", why="FedNH's code", source="protocol 5.3")
    prototype_rounds: int = number(5, low=0, why="evenly spread rounds whose prototypes are stored", source="project")
    # arithmetic
    seed: int = number(0, 1, 2, low=0, high=2**32 - 1, why="the run seed", source="protocol 4.4")
    precision: str = choice("fp32", "fp64", why="fp64 for checks", source="protocol 4.1")
    engine: str = choice(
        "auto", "loop", "batched", "graphs", why="a fixed rule of network and device", source="project"
    )
    crew: int = number(16, low=1, why="clients per batched call, 4 times as many of a net below 256 kB; moves last bits",
                       source="project")  # fmt: skip
    device: str = value("cpu", why="cpu, cuda or cuda:N", source="project")
    # what is stored and what a table reports; moves no number of a run
    features: int = number(300, 0, low=0, why="test samples, and samples of each of two clients, whose features are stored "
                           "with the prototypes; 0: none", source="project", digest=False)  # fmt: skip
    report: str = choice("last", "best", "mean_last_5", why="fixed round budget", source="protocol 5.5", digest=False)
    std_over: str = choice("seeds", why="what the +- is over", source="protocol 5.4", digest=False)
    std_ddof: int = choice(1, 0, why="sample standard deviation", source="protocol 5.4", digest=False)

    def __post_init__(self) -> None:
        options.validate(self, "")
        if (self.partition == "file") != bool(self.partition_file):
            raise UserError("partition=file needs --partition-file FILE, and no other scheme takes one")
        if self.engine == "graphs" and self.device == "cpu":
            raise UserError("engine=graphs records the steps of a GPU: give --device cuda as well, or engine=loop")
        for metric in self.metrics:
            if metric not in METRICS:
                raise UserError(f"metrics: {metric!r} is not one of {', '.join(METRICS)}{nearest(metric, METRICS)}")
        if "gm" not in self.metrics:
            raise UserError("metrics must contain gm")

    def replace(self, **changes: Any) -> Protocol:
        """The same protocol with other values."""
        return dataclasses.replace(self, **changes)

    @property
    def dirichlet(self) -> bool:
        """Whether the split hangs on beta."""
        return self.partition.startswith("dir")

    def learning_rate(self, t: int) -> float:
        """eta_t of round t."""
        return self.client_lr * self.lr_decay_per_round ** (t + self.lr_decay_offset) if self.lr_decay_per_round != 1 \
            else self.client_lr  # fmt: skip

    def measures(self, t: int) -> bool:
        """Whether round t is evaluated, personal models included, as trained."""
        due = (t + 1) % self.eval_every == 0 or t + 1 == self.rounds
        return due and t >= 0 and len(self.metrics) > 1 and self.pm_protocol == "as_trained"

    def split_seed(self) -> int:
        """The seed of the partition stream."""
        return self.seed if self.partition_seed == "run" else int(self.partition_seed)

    def weights_seed(self) -> int:
        """The seed of the initial weights."""
        return self.seed if self.init_seed == "run_seed" else int(self.init_seed)

    def document(self) -> dict[str, Any]:
        """The fields that can change a number, as JSON knows them. The file of a split is known by its content."""
        kept = {n for n, f in options.fields(self).items() if options.option(f).digest} - {"partition_file"}
        if not self.dirichlet:
            kept -= {"beta", "alpha_convention"}
        return {n: list(v) if isinstance(v, tuple) else v for n, v in dataclasses.asdict(self).items() if n in kept}


def digest(document: Mapping[str, Any]) -> str:
    """SHA-256 of the canonical JSON of a document, first 16 hex digits."""
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def coerce(given: Mapping[str, Any]) -> dict[str, Any]:
    """Texts or file values -> checked protocol fields. `dirichlet` is another name of dir_class."""
    given = {k: "dir_class" if k == "partition" and v == "dirichlet" else v for k, v in given.items()}
    return options.read(Protocol, given, "")


# ---- presets ----------------------------------------------------------------------------------------------------


@functools.cache
def presets() -> dict[str, Any]:
    """The tables of presets.toml."""
    return tomllib.loads((resources.files("protofl") / "presets.toml").read_text("utf-8"))


def preset_names() -> list[str]:
    """`family.setting`, one per section of presets.toml, `family.common` included."""
    return [f"{family}.{name}" for family, tables in presets().items() if family != "common"
            for name in tables if name != "method"]  # fmt: skip


def _chain(name: str) -> tuple[str, list[str]]:
    """'moon.cifar100_n50' -> family, its settings from weakest to strongest."""
    if name not in preset_names():
        raise UserError(
            f"there is no preset {name!r}{nearest(name, preset_names())}; presets: {', '.join(preset_names())}"
        )
    family, setting = name.split(".")
    chain = ["common"]
    if setting != "common":
        base = presets()[family][setting].get("base")
        chain += [base, setting] if base else [setting]
    return family, chain


def preset(name: str) -> dict[str, Any]:
    """The protocol fields of a preset; of a list (beta) the first entry is the value, the others the paper's sweep."""
    family, chain = _chain(name)
    merged = dict(presets()["common"])
    for setting in chain:
        merged |= {k: v for k, v in presets()[family][setting].items() if not isinstance(v, dict) and k != "base"}
    lists = {n for n, f in options.fields(Protocol).items() if isinstance(f.default, tuple)} | {"seeds"}
    return {k: v[0] if isinstance(v, list) and k not in lists else v for k, v in merged.items()}


def method_setting(name: str, method: str) -> dict[str, Any]:
    """The option values that a preset gives a method; of a list the first."""
    family, chain = _chain(name)
    tables = [presets()[family].get("method", {})]
    tables += [presets()[family][s].get("method", {}) for s in chain if s != "common"]
    merged: dict[str, Any] = {}
    for table in tables:
        merged |= table.get(method, {})
    return {k: v[0] if isinstance(v, list) else v for k, v in merged.items()}


def default_preset(dataset: str) -> str | None:
    """The setting that a data set chooses where none is asked for; None: moon.common without augmentation."""
    return {"digits": "digits.quick", "cifar10": "moon.cifar10", "cifar100": "moon.cifar100",
            "tiny-imagenet": "fednh.tinyimagenet", "vireo172": "fedcspc.vireofood172"}.get(dataset)  # fmt: skip
