"""FedLab on a task: its standalone pipeline, or a server and several client processes. Prints one JSON line.

python benchmarks/speed/suites/with_fedlab.py TASK.npz --processes 2 --rounds 3  # 1: standalone
"""

from __future__ import annotations

import logging
import multiprocessing as mp
import socket
import time

import torch
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.core.client.manager import PassiveClientManager
from fedlab.core.client.trainer import SerialClientTrainer
from fedlab.core.network import DistNetwork
from fedlab.core.server.manager import SynchronousServerManager
from fedlab.core.standalone import StandalonePipeline
from fedlab.utils.aggregator import Aggregators
from fedlab.utils.serialization import SerializationTool
from task import Task, arguments, load, tell, train
from torch import Tensor


class Trainer(SerialClientTrainer):
    """A process's share of the clients: every so many'th, so that all have as much to do."""

    def __init__(self, task: Task, share: int, of: int) -> None:
        self.task, self.mine = task, range(len(task.sizes))[share::of]
        super().__init__(task.model(), len(self.mine), cuda=False)
        self.trained: list[list[Tensor]] = []

    def local_process(self, payload: list[Tensor], id_list: list[int]) -> None:
        for i in id_list:
            x, y = self.task.client(self.mine[i])
            self.set_model(payload[0])
            train(self.task, self._model, x, y)
            self.trained.append([self.model_parameters, torch.tensor([float(len(y))])])

    @property
    def uplink_package(self) -> list[list[Tensor]]:
        packages, self.trained = self.trained, []
        return packages


class Handler(SyncServerHandler):
    """The average by number of samples, and the time from drawing a round's clients to it."""

    def __init__(self, task: Task, rounds: int) -> None:
        super().__init__(task.model(), rounds, sample_ratio=1.0)
        self.seconds: list[float] = []

    def sample_clients(self) -> list[int]:
        self.began = time.perf_counter()
        drawn: list[int] = super().sample_clients()
        return drawn

    def global_update(self, buffer: list[list[Tensor]]) -> None:
        models, sizes = zip(*buffer)
        averaged = Aggregators.fedavg_aggregate(list(models), torch.cat(sizes))
        SerializationTool.deserialize_model(self._model, averaged)
        self.seconds.append(time.perf_counter() - self.began)


class Alone(StandalonePipeline):
    """All in one process."""

    def evaluate(self) -> None:
        """Not between rounds."""


def network(port: int, rank: int, processes: int) -> DistNetwork:
    """A process's end of the network; rank 0 is the server's."""
    logging.disable(logging.INFO)  # it tells of every message
    return DistNetwork(("127.0.0.1", str(port)), processes + 1, rank)


def clients(path: str, port: int, rank: int, processes: int) -> None:
    """A client process."""
    torch.set_num_threads(1)
    there = network(port, rank, processes)
    PassiveClientManager(there, Trainer(load(path), rank - 1, processes)).run()


def across(handler: Handler, path: str, processes: int) -> None:
    """Play all rounds with client processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    others = [context.Process(target=clients, args=(path, port, rank + 1, processes)) for rank in range(processes)]
    for other in others:
        other.start()
    SynchronousServerManager(network(port, 0, processes), handler).run()
    for other in others:
        other.join()


def main() -> None:
    asked = arguments(__doc__)
    torch.set_num_threads(1)
    task = load(asked.task)
    handler = Handler(task, asked.rounds + 1)
    if asked.processes == 1:
        Alone(handler, Trainer(task, 0, 1)).main()
    else:
        across(handler, asked.task, asked.processes)
    tell("fedlab", task, handler.seconds, handler.model)


if __name__ == "__main__":
    main()
