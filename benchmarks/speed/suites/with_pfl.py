"""pfl-research's simulation on a task: its federated averaging, in as many processes as torchrun starts. Prints one JSON line.

python benchmarks/speed/suites/with_pfl.py TASK.npz --processes 2 --rounds 3
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from task import LR, Task, arguments, batches, load, optimiser, tell
from torch import Tensor, nn

ELASTIC = "TORCHELASTIC_RUN_ID"
"""Is set in a process that torchrun started."""


def simulate(asked: Any) -> None:
    """One process: its share of the clients of every round. They average among themselves."""
    os.environ["PFL_PYTORCH_DEVICE"] = "cpu"
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data import get_user_sampler
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    class Client(Dataset):
        """A client's samples, in batches as all suites get them."""

        def __init__(self, task: Task, i: int) -> None:
            super().__init__(raw_data=task.client(i), user_id=str(i))
            self.task = task

        def __len__(self) -> int:
            return len(self.raw_data[1])

        def iter(self, batch_size: int | None) -> Iterator[tuple[Tensor, Tensor]]:
            return batches(self.task, *self.raw_data)

    class Net(nn.Module):
        """The network with its loss, as PyTorchModel wants it."""

        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.net(x), y)

        def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
            return {"loss": Weighted(self.loss(x, y).item() * len(y), len(y))}

    class Clock(TrainingProcessCallback):
        """When each round ended."""

        def on_train_begin(self, *, model: Any) -> Metrics:
            self.at = [time.perf_counter()]
            return Metrics()

        def after_central_iteration(self, *given: Any, **more: Any) -> tuple[bool, Metrics]:
            self.at.append(time.perf_counter())
            return False, Metrics()

    torch.set_num_threads(1)
    np.random.seed(0)  # the same in all processes, which draw the same clients
    task = load(asked.task)
    net, everyone, clock = task.model(), range(len(task.sizes)), Clock()
    torch.manual_seed(int(os.environ["RANK"]))
    weight = {i: task.sizes[i] for i in everyone}
    clients = FederatedDataset(
        lambda i: Client(task, i), get_user_sampler("minimize_reuse", list(everyone)), user_id_to_weight=weight
    )
    wrapped = Net(net)
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=asked.rounds + 1, evaluation_frequency=asked.rounds + 1,
            train_cohort_size=len(everyone), val_cohort_size=None,
        ),
        SimulatedBackend(clients, clients, [WeightByDatapoints()]),
        PyTorchModel(wrapped, optimiser, torch.optim.SGD(wrapped.parameters(), lr=1.0)),
        NNTrainHyperParams(local_learning_rate=LR, local_num_epochs=task.epochs, local_batch_size=task.batch),
        callbacks=[clock],
        send_metrics_to_platform=False,
    )  # fmt: skip
    if os.environ["RANK"] == "0":
        tell("pfl", task, np.diff(clock.at).tolist(), net)


def main() -> None:
    asked = arguments(__doc__)
    if ELASTIC in os.environ:
        simulate(asked)
    else:
        words = ["--standalone", "--nproc-per-node", str(asked.processes), *sys.argv]
        subprocess.run([sys.executable, "-m", "torch.distributed.run", *words], check=True)


if __name__ == "__main__":
    main()
