"""The floor: the bare PyTorch loop that does the steps of a round of FedAvg on a resident tensor.

Modules, `torch.optim.SGD` and index arithmetic; no federation, no evaluation, no records. The sizes of the clients are those
of the setting, so that the number of steps is protofl's; the weights are averaged after every round. Prints one JSON line:
seconds of training per round, and the samples of a round.

    python benchmarks/speed/floor.py W1 --processes 2 --threads 1 --rounds 2 --data-dir DIR
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import time
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from workloads import WORKLOADS, Workload, data_and_sizes


class SimpleCNN(nn.Module):
    """6-16 convolutions, 120-84 linear, projection 84-84-256, output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2 = nn.Linear(400, 120), nn.Linear(120, 84)
        self.p1, self.p2, self.head = nn.Linear(84, 84), nn.Linear(84, 256), nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2).flatten(1)
        x = F.relu(self.fc2(F.relu(self.fc1(x))))
        out: Tensor = self.head(self.p2(F.relu(self.p1(x))))
        return out


class FedNHNet(nn.Module):
    """64-64 convolutions, 384-192 linear, output layer without bias."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 64, 5), nn.Conv2d(64, 64, 5)
        self.fc1, self.fc2, self.head = nn.Linear(1600, 384), nn.Linear(384, 192), nn.Linear(192, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2).flatten(1)
        out: Tensor = self.head(F.relu(self.fc2(F.relu(self.fc1(x)))))
        return out


class MLP(nn.Sequential):
    """64-128-64-10."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


NETS: dict[str, type[nn.Module]] = {"simple_cnn": SimpleCNN, "cnn_fednh": FedNHNet, "mlp_plain": MLP}


def batch(x: Tensor, rows: Tensor, augmented: bool) -> Tensor:
    """Images at `rows`, cropped out of the padded ones and flipped by index arithmetic, as floats in channels-last memory."""
    if not augmented:
        return x[rows]
    n = len(rows)
    at = torch.arange(32)
    i = torch.randint(0, 9, (n, 1)) + at
    j = torch.randint(0, 9, (n, 1)) + torch.where(torch.rand(n, 1) < 0.5, 31 - at, at)
    return x[rows[:, None, None], i[:, :, None], j[:, None, :]].permute(0, 3, 1, 2)


def train(work: Workload, model: nn.Module, x: Tensor, y: Tensor) -> None:
    """One client: the epochs of a round with a fresh optimiser, fused where PyTorch offers it."""
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-5, fused=True)
    for _ in range(work.epochs):
        for rows in torch.randperm(len(y)).split(work.batch):
            if len(rows) == work.batch or not work.drop_last:
                sgd.zero_grad(set_to_none=True)
                F.cross_entropy(model(batch(x, rows, work.augmented)), y[rows]).backward()
                sgd.step()


def prepare(work: Workload, data_dir: str | None) -> tuple[Tensor, Tensor, list[int]]:
    """Resident floats (padded where crops are taken), labels, and the sizes of the clients of a round."""
    images, labels, sizes = data_and_sizes(work, data_dir)
    x = torch.from_numpy(images.astype(np.float32) / images.max())
    x = F.pad(x.permute(0, 3, 1, 2), (4, 4, 4, 4), mode="reflect") if work.augmented else x.permute(0, 3, 1, 2)
    return (x.permute(0, 2, 3, 1).contiguous() if work.augmented else x), torch.from_numpy(labels), sizes


def rounds(work: Workload, threads: int, data_dir: str | None, share: int, of: int, count: int, pipe: Any) -> None:
    """A process: its share of the clients of every round, on its threads."""
    torch.set_num_threads(threads)
    x, y, sizes = prepare(work, data_dir)
    mine = sorted(range(len(sizes)), key=lambda i: -sizes[i])[share::of]
    model = NETS[work.net]()
    if not isinstance(model, MLP):
        model = model.to(memory_format=torch.channels_last)
    start = {k: v.clone() for k, v in model.state_dict().items()}
    ends = np.cumsum([0, *sizes])
    train(work, model, x[: 4 * work.batch], y[: 4 * work.batch])  # warm
    pipe.send("ready")
    for _ in range(count):
        pipe.recv()
        total = {k: torch.zeros_like(v) for k, v in start.items()}
        for i in mine:
            model.load_state_dict(start)
            train(work, model, x[ends[i] : ends[i + 1]], y[ends[i] : ends[i + 1]])
            for k, v in model.state_dict().items():
                total[k] += v * (sizes[i] / sum(sizes))
        pipe.send(None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=sorted(WORKLOADS))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--data-dir")
    asked = parser.parse_args()
    work, context = WORKLOADS[asked.workload], mp.get_context("spawn")
    pipes, processes = [], []
    for share in range(asked.processes):
        mine, theirs = context.Pipe()
        given = (work, asked.threads, asked.data_dir, share, asked.processes, asked.rounds, theirs)
        processes.append(context.Process(target=rounds, args=given))
        processes[-1].start()
        pipes.append(mine)
    for pipe in pipes:
        pipe.recv()
    seconds = []
    for _ in range(asked.rounds):
        began = time.perf_counter()
        for pipe in pipes:
            pipe.send(None)
        for pipe in pipes:
            pipe.recv()
        seconds.append(time.perf_counter() - began)
    for process in processes:
        process.join()
    _, _, sizes = data_and_sizes(work, asked.data_dir)
    print(json.dumps({"seconds": seconds, "samples": sum(sizes) * work.epochs}))


if __name__ == "__main__":
    main()
