"""What every suite is given: the clients' samples, the network, the steps of local training, and how a model is scored.

Needs torch and numpy alone: `export.py` writes a workload's file with protofl, and a suite's own environment reads it.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import platform
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


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


LR = 0.01

NETS: dict[str, type[nn.Module]] = {"simple_cnn": SimpleCNN, "cnn_fednh": FedNHNet, "mlp_plain": MLP}


class Steps(Protocol):
    """What local training has to know."""

    @property
    def epochs(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def augmented(self) -> bool: ...
    @property
    def drop_last(self) -> bool: ...


def padded(x: Tensor, augmented: bool) -> Tensor:
    """Floats [n, C, H, W] as `batches` takes them: where crops are taken, padded and [n, H, W, C]."""
    if not augmented:
        return x.contiguous()
    return F.pad(x, (4, 4, 4, 4), mode="reflect").permute(0, 2, 3, 1).contiguous()


def batches(steps: Steps, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """One epoch in a new order. Images are cropped and flipped by index arithmetic, into channels-last memory.

    All of it where the samples are.
    """
    at = torch.arange(32, device=x.device)
    for rows in torch.randperm(len(y), device=x.device).split(steps.batch):
        n = len(rows)
        if n < steps.batch and steps.drop_last:
            continue
        if steps.augmented:
            i, j = torch.randint(0, 9, (2, n, 1), device=x.device)
            i, j = i + at, j + torch.where(torch.rand(n, 1, device=x.device) < 0.5, 31 - at, at)
            yield x[rows[:, None, None], i[:, :, None], j[:, None, :]].permute(0, 3, 1, 2), y[rows]
        else:
            yield x[rows], y[rows]


def optimiser(params: Iterable[Tensor], lr: float = LR) -> torch.optim.SGD:
    """A client's, fused: the fastest that PyTorch offers."""
    return torch.optim.SGD(params, lr=lr, momentum=0.9, weight_decay=1e-5, fused=True)


def train(steps: Steps, model: nn.Module, x: Tensor, y: Tensor) -> None:
    """One client: the epochs of a round with a fresh optimiser."""
    sgd = optimiser(model.parameters())
    for _ in range(steps.epochs):
        for images, labels in batches(steps, x, y):
            sgd.zero_grad(set_to_none=True)
            F.cross_entropy(model(images), labels).backward()
            sgd.step()


@dataclass(frozen=True, eq=False)
class Task:
    """A workload as a suite gets it, all samples resident. Clients are in order of size, the largest first."""

    net: str
    epochs: int
    batch: int
    augmented: bool
    drop_last: bool
    start: Tensor
    x: Tensor
    y: Tensor
    ends: list[int]
    x_test: Tensor
    y_test: Tensor

    @property
    def sizes(self) -> list[int]:
        """Samples of each client, which are its weight."""
        return [b - a for a, b in zip(self.ends[:-1], self.ends[1:])]

    @property
    def trained(self) -> int:
        """Samples that a round trains on."""
        return self.epochs * sum(n - n % self.batch if self.drop_last else n for n in self.sizes)

    def client(self, i: int) -> tuple[Tensor, Tensor]:
        """Its samples, as views."""
        mine = slice(self.ends[i], self.ends[i + 1])
        return self.x[mine], self.y[mine]

    def model(self) -> nn.Module:
        """The network with the weights that all start from."""
        model = NETS[self.net]()
        with torch.no_grad():
            for p, v in zip(model.parameters(), self.start.split([p.numel() for p in model.parameters()])):
                p.copy_(v.view_as(p))
        return model

    def accuracy(self, model: nn.Module) -> float:
        """Share of the test samples that a model is right about."""
        with torch.inference_mode():
            right = [(model(x).argmax(1) == y).sum() for x, y in zip(self.x_test.split(500), self.y_test.split(500))]
        return int(sum(right)) / len(self.y_test)


@functools.cache
def load(path: str) -> Task:
    """A task, once per process."""
    with np.load(path) as file:
        told = json.loads(str(file["told"]))
        mean, std = (torch.tensor(told.pop(key)).view(-1, 1, 1) for key in ("mean", "std"))
        scale, sizes = told.pop("scale"), told.pop("sizes")
        x, x_test = (
            (torch.from_numpy(file[key]).permute(0, 3, 1, 2) / scale - mean) / std for key in ("x_train", "x_test")
        )
        start, y, y_test = (torch.from_numpy(file[key]) for key in ("start", "y_train", "y_test"))
    ends = np.cumsum([0, *sizes]).tolist()
    return Task(**told, start=start, x=padded(x, told["augmented"]), y=y, ends=ends, x_test=x_test, y_test=y_test)


def arguments(told: str | None, **more: Any) -> argparse.Namespace:
    """What all scripts of suites take; more: names and choices of what one takes besides."""
    parser = argparse.ArgumentParser(description=told)
    parser.add_argument("task", help="the file that export.py wrote")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds, after one that is not")
    for name, choices in more.items():
        parser.add_argument(f"--{name}", choices=choices, default=choices[0])
    return parser.parse_args()


def tell(package: str, task: Task, seconds: list[float], model: nn.Module) -> None:
    """Print the line that `run.py` reads. seconds: of every round, the first of which starts processes and is left out."""
    version = f"{importlib.metadata.version(package)}, Python {platform.python_version()}"
    line = {"seconds": seconds[1:], "accuracy": task.accuracy(model), "samples": task.trained, "version": version}
    print(json.dumps(line), flush=True)
