"""BlazeFL on a task: its FedAvg server, and its trainer of threads or of processes. Prints one JSON line.

    python benchmarks/speed/suites/with_blazefl.py TASK.npz --workers threads --processes 2 --rounds 3

Its threads are meant for a free-threaded Python, and wait for each other on one that has the interpreter lock.
"""

from __future__ import annotations

import multiprocessing as mp
import tempfile
import time
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from blazefl.contrib.fedavg import (
    FedAvgBaseServerHandler,
    FedAvgDownlinkPackage,
    FedAvgProcessPoolClientTrainer,
    FedAvgProcessPoolUplinkPackage,
    FedAvgThreadPoolClientTrainer,
    FedAvgUplinkPackage,
)
from blazefl.core import SHMHandle, deserialize_model, serialize_model
from task import Task, arguments, load, optimiser, tell, train
from torch import Tensor, nn


class Name(StrEnum):
    """The models that can be selected."""

    NET = "net"


class Selector:
    """The task's network."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def select_model(self, model_name: Name) -> nn.Module:
        return self.task.model()


def trained(path: str, cid: int, start: Tensor) -> tuple[Tensor, int]:
    """A client's part of a round -> its model as BlazeFL sends it, and its samples."""
    torch.set_num_threads(1)
    task = load(path)
    (x, y), model = task.client(cid), task.model()
    deserialize_model(model, start)
    train(task, model, x, y)
    return serialize_model(model), len(y)


class Threads(FedAvgThreadPoolClientTrainer):
    """Clients in threads."""

    def __init__(self, path: str, **common: Any) -> None:
        super().__init__(**common)
        self.path = path

    def progress_fn(self, it: Any) -> Any:
        return it

    def worker(self, cid: int, device: str, payload: FedAvgDownlinkPackage, stop_event: Any) -> FedAvgUplinkPackage:
        return FedAvgUplinkPackage(cid, *trained(self.path, cid, payload.model_parameters))


class Processes(FedAvgProcessPoolClientTrainer):
    """Clients in processes that are forked for a round, with the samples read and all that is needed imported."""

    def __init__(self, path: str, **common: Any) -> None:
        super().__init__(**common)
        self.path = path
        optimiser(load(path).model().parameters())  # the first one imports for seconds

    def progress_fn(self, it: Any) -> Any:
        return it

    def get_client_config(self, cid: int) -> Any:
        return self.path, cid

    @staticmethod
    def worker(
        config: Any, payload: FedAvgDownlinkPackage, device: str, stop_event: Any, *, shm_buffer: Any = None
    ) -> FedAvgProcessPoolUplinkPackage:
        path, cid = config
        model, size = trained(path, cid, payload.model_parameters)
        shm_buffer.model_parameters.copy_(model)
        return FedAvgProcessPoolUplinkPackage(cid, SHMHandle(), size)


def main() -> None:
    asked = arguments(__doc__, workers=("threads", "processes"))
    mp.set_start_method("fork")  # a pool is started for every round
    torch.set_num_threads(1)
    task = load(asked.task)
    common: dict[str, Any] = {
        "model_selector": Selector(task), "model_name": Name.NET, "dataset": None, "device": "cpu",
        "num_clients": len(task.sizes), "batch_size": task.batch, "seed": 0,
    }  # fmt: skip
    server = FedAvgBaseServerHandler(global_round=asked.rounds + 1, sample_ratio=1.0, **common)
    common |= {"path": asked.task, "epochs": task.epochs, "lr": 0.0, "num_parallels": asked.processes}
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        trainer: Any = Threads(**common) if asked.workers == "threads" else Processes(state_dir=Path(folder), **common)
        while not server.is_stopped():
            began = time.perf_counter()
            trainer.local_process(server.downlink_package(), server.sample_clients())
            for package in trainer.uplink_package():
                server.load(package)
            seconds.append(time.perf_counter() - began)
    tell("blazefl", task, seconds, server.model)


if __name__ == "__main__":
    main()
