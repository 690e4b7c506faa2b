"""Time, bytes and peak memory per round at a number of drawn clients, whatever the number of clients. Prints one JSON line.

python benchmarks/speed/growth.py 10000 --drawn 10 --method moon --rounds 20
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

SAMPLES = 100
"""What each client has."""


def data(clients: int, path: Path) -> None:
    """Made-up images of the digits' shape, SAMPLES for each client."""
    stream = np.random.RandomState(0)
    y = np.arange(clients * SAMPLES) % 10
    x = stream.randint(0, 17, (len(y), 8, 8, 1), dtype=np.uint8)
    np.savez(path, x_train=x, y_train=y, x_test=x[:500], y_test=y[:500])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clients", type=int)
    parser.add_argument("--drawn", type=int, default=10, help="clients in a round")
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--data-dir", help="not used: the data are made up")
    asked = parser.parse_args()

    from protofl import run
    from protofl.experiment import Settings, cells

    ended: list[float] = []

    def tell(event: Mapping[str, Any]) -> None:
        ended.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        data(asked.clients, Path(folder) / "many.npz")
        settings = Settings(methods=[asked.method])
        wanted = dict(
            dataset=f"{folder}/many.npz", net="mlp", partition="iid", clients=asked.clients,
            participation=asked.drawn / asked.clients, rounds=asked.rounds + 2, eval_every=asked.rounds + 2, seeds=0,
            local_epochs=5, batch_size=20, prototype_rounds=1,
        )  # fmt: skip
        for name, value in wanted.items():
            settings.take(name, value, "growth")
        (cell,) = cells(settings)
        ready = run.prepare(cell)
        run.play(ready, Path(folder), tell)
        rows = [json.loads(line) for line in (Path(folder) / ready.folder / "rounds.jsonl").read_text().splitlines()]
    whole = [b - a for a, b in zip(ended[1:-2], ended[2:-1])]  # without the first round and the evaluated last one
    peak = max(r["memory_mb"] for r in rows if r["round"] >= 0)
    samples = rows[-1]["samples"]["trained"]
    one = {k: rows[-1][k] / asked.drawn for k in ("bytes_down", "bytes_up")} | {"state_bytes": rows[-1]["state_bytes"]}
    print(json.dumps({"seconds": whole, "round": whole, "samples": samples, "peak_mb": peak, **one}))


if __name__ == "__main__":
    main()
