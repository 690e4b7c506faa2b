"""protofl on a workload: seconds of local training per round, as its records have them. Prints one JSON line.

python benchmarks/speed/ours.py W1 --method fedavg --processes 2 --rounds 3 --data-dir DIR
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from without import PARTS, take_out
from workloads import WORKLOADS, cells

from protofl import records, run
from protofl.engine import workers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=sorted(WORKLOADS))
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--data-dir")
    parser.add_argument("--set", nargs="*", default=[], help="field=value or method.option=value")
    parser.add_argument("--without", choices=PARTS)
    asked = parser.parse_args()
    if asked.without:
        take_out(asked.without)
    if asked.processes > 1:
        workers.warm(["protofl.bench"])
    cell = cells(
        WORKLOADS[asked.workload], asked.method, asked.data_dir,
        rounds=asked.rounds + 1, eval_every=asked.rounds + 1, engine=asked.engine, device=asked.device,
        **dict(one.split("=", 1) for one in asked.set),
    )  # fmt: skip
    at = []
    with tempfile.TemporaryDirectory() as folder:
        ready = run.prepare(cell)
        run.play(ready, Path(folder), lambda event: at.append(time.perf_counter()), asked.processes)
        rows = records.read_rows(Path(folder) / ready.folder / "rounds.jsonl")
    played = [r for r in rows if r["round"] > 0]  # round 0 starts the processes
    parts = ("train", "prototype", "aggregate")
    seconds = {part: [r["seconds"][part] for r in played] for part in parts}
    whole = [sum(r["seconds"][part] for part in parts) for r in played]
    wall = [b - a - r["seconds"]["evaluate"] for a, b, r in zip(at[1:], at[2:], played)]  # with all that is stored
    print(json.dumps({"seconds": seconds["train"], "round": whole, "wall": wall, "accuracy": rows[-1].get("gm"),
                      "samples": rows[-1]["samples"]["trained"], "peak_mb": max(r["memory_mb"] for r in played)}))  # fmt: skip


if __name__ == "__main__":
    main()
