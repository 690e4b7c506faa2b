"""Writes a workload as one file that needs no protofl to read: the same clients, samples, steps and start for every suite.

python benchmarks/speed/export.py W1 W1.npz --data-dir DIR
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from workloads import WORKLOADS, Workload, cells


def write(work: Workload, data_dir: str | None, path: Path) -> None:
    """Images and labels, client after client, the largest first, so that whoever takes them in turn ends evenly."""
    from protofl import run
    from protofl.handles import initial_weights

    ready = run.prepare(cells(work, "fedavg", data_dir))
    protocol, data, split = ready.protocol, ready.data, ready.split
    start = [v.numpy().ravel() for v in initial_weights(ready.net, protocol).values()]
    order = sorted(range(work.clients), key=lambda i: -split.sizes[i])
    rows = np.concatenate([split.indices[i] for i in order])
    told = {
        "net": work.net, "epochs": work.epochs, "batch": work.batch, "augmented": work.augmented,
        "drop_last": work.drop_last, "sizes": [int(split.sizes[i]) for i in order],
        "scale": data.scale, "mean": protocol.mean, "std": protocol.std,
    }  # fmt: skip
    np.savez(
        path, told=json.dumps(told), start=np.concatenate(start), x_train=data.x_train[rows], x_test=data.x_test,
        y_train=data.y_train[rows].astype(np.int64), y_test=data.y_test.astype(np.int64),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    everyone = sorted(name for name, work in WORKLOADS.items() if work.drawn == work.clients)
    parser.add_argument("workload", choices=everyone, help="those in which all clients take part")
    parser.add_argument("file", type=Path)
    parser.add_argument("--data-dir")
    asked = parser.parse_args()
    write(WORKLOADS[asked.workload], asked.data_dir, asked.file)


if __name__ == "__main__":
    main()
