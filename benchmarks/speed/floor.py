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
from suites.task import MLP, NETS, padded, train
from torch import Tensor
from workloads import WORKLOADS, Workload, data_and_sizes


def prepare(work: Workload, data_dir: str | None) -> tuple[Tensor, Tensor, list[int]]:
    """Resident floats (padded where crops are taken), labels, and the sizes of the clients of a round."""
    images, labels, sizes = data_and_sizes(work, data_dir)
    x = torch.from_numpy(images.astype(np.float32) / images.max()).permute(0, 3, 1, 2)
    return padded(x, work.augmented), torch.from_numpy(labels), sizes


def rounds(
    work: Workload, threads: int, device: str, data_dir: str | None, share: int, of: int, count: int, pipe: Any
) -> None:  # fmt: skip
    """A process: its share of the clients of every round, on its threads."""
    torch.set_num_threads(threads)
    images, labels, sizes = prepare(work, data_dir)
    x, y = images.to(device), labels.to(device)
    mine = sorted(range(len(sizes)), key=lambda i: -sizes[i])[share::of]
    model = NETS[work.net]().to(device)
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
        if device != "cpu":
            torch.cuda.synchronize(device)
        pipe.send(None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=sorted(WORKLOADS))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--data-dir")
    asked = parser.parse_args()
    work, context = WORKLOADS[asked.workload], mp.get_context("spawn")
    pipes, processes = [], []
    for share in range(asked.processes):
        mine, theirs = context.Pipe()
        given = (work, asked.threads, asked.device, asked.data_dir, share, asked.processes, asked.rounds, theirs)
        processes.append(context.Process(target=rounds, args=given))
        processes[-1].start()
        theirs.close()  # else a process that has failed is waited for
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
