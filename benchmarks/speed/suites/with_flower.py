"""Flower's simulation on a task: its FedAvg, one Ray actor for each process. Prints one JSON line.

python benchmarks/speed/suites/with_flower.py TASK.npz --processes 2 --rounds 3
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

import torch
from task import arguments, load, tell, train

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

client_app = ClientApp()


@client_app.train()
def work(message: Message, context: Context) -> Message:
    """A client's part of a round. Its actor reads the task once, and is to use one thread."""
    torch.set_num_threads(1)
    task = load(message.content["config"]["task"])
    (x, y), model = task.client(int(context.node_config["partition-id"])), task.model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    train(task, model, x, y)
    told = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(y)})}
    return Message(RecordDict(told), reply_to=message)


class Timed(FedAvg):
    """Notes the time from a round's messages to its average."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.seconds: list[float] = []

    def configure_train(self, *given: Any) -> Iterable[Message]:
        self.began = time.perf_counter()
        return super().configure_train(*given)

    def aggregate_train(self, *given: Any) -> Any:
        averaged = super().aggregate_train(*given)
        self.seconds.append(time.perf_counter() - self.began)
        return averaged


def main() -> None:
    asked = arguments(__doc__)
    torch.set_num_threads(1)
    task, server_app = load(asked.task), ServerApp()
    model, strategy = task.model(), Timed(fraction_evaluate=0.0)

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        grid.pull_interval = 0.01  # its 0.1 s is as long as a round of a small network
        found = strategy.start(
            grid, ArrayRecord(model.state_dict()), asked.rounds + 1, train_config=ConfigRecord({"task": asked.task})
        )
        model.load_state_dict(found.arrays.to_torch_state_dict())

    backend = {"init_args": {"num_cpus": asked.processes}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app, client_app, len(task.sizes), backend_config=backend)
    tell("flwr", task, strategy.seconds, model)


if __name__ == "__main__":
    main()
