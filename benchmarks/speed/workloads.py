"""The workloads that are timed, as protofl's settings and as numbers for the bare loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Workload:
    """settings: what `protofl bench` is given; the rest says the same to the floor."""

    net: str
    dataset: str
    settings: dict[str, Any]
    clients: int
    drawn: int
    epochs: int
    batch: int
    augmented: bool
    drop_last: bool


WORKLOADS = {
    "W1": Workload("simple_cnn", "cifar10", {"preset": "moon.cifar10", "local_epochs": 1}, 10, 10, 1, 64, True, True),
    "W1-10": Workload("simple_cnn", "cifar10", {"preset": "moon.cifar10"}, 10, 10, 10, 64, True, True),
    "W2": Workload("cnn_fednh", "cifar10", {"preset": "fednh.cifar10", "metrics": "gm"}, 100, 10, 5, 64, True, False),
    "W3": Workload(
        "mlp_plain", "digits",
        {"preset": "digits.digits", "model": "mlp_plain", "clients": 50, "local_epochs": 5, "batch_size": 16,
         "partition": "iid", "metrics": "gm"},
        50, 50, 5, 16, False, False,
    ),
}  # fmt: skip
"""W1: CIFAR-10 in MOON's setting, 1 local epoch (W1-10: the paper's 10). W2: FedNH's setting. W3: digits, 50 clients."""


def cells(work: Workload, method: str, data_dir: str | None, **more: Any) -> Any:
    """The cell of a workload, as `protofl bench` would make it."""
    from protofl.experiment import Settings
    from protofl.experiment import cells as make

    settings = Settings(methods=[method])
    for name, value in {"dataset": work.dataset, "seeds": 0, **work.settings, **more}.items():
        if "." in name:
            settings.take_text(f"{name}={value}")
        else:
            settings.take(name, value, "workload")
    if data_dir:
        settings.data_dir = data_dir
    (cell,) = make(settings)
    return cell


def data_and_sizes(work: Workload, data_dir: str | None) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Images [M, H, W, C], labels [M], and the sizes of the clients that take part in round 0."""
    from protofl import inputs, rng

    cell = cells(work, "fedavg", data_dir)
    data = inputs.load_data(work.dataset, data_dir, cell.protocol.data_order)
    split = inputs.split(cell.protocol, data_dir)
    drawn = rng.draw(0, 0).permutation(work.clients)[: work.drawn]
    return (
        np.asarray(data.x_train),
        np.asarray(data.y_train).astype(np.int64),
        [int(split.sizes[i]) for i in sorted(drawn)],
    )
