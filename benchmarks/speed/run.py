"""What protofl's rounds cost against bare PyTorch, against FedAvg's, and by engine: ratios of medians, runs interleaved.

    python benchmarks/speed/run.py floor W1 --data-dir DIR     # local training against the bare loop
    python benchmarks/speed/run.py methods W1-10 --data-dir DIR  # each method's round against FedAvg's
    python benchmarks/speed/run.py engines W3                  # loop against batched

Every variant is a process of its own; all variants run once, then all again, `--repeat` times. The table goes to standard
output as Markdown, with the hardware and the versions. Close other programs before you run it.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
METHODS = ("fedavg", "fedprox", "scaffold", "fednh", "fedproc", "fedcspc", "moon")


def variants(kind: str, workload: str) -> dict[str, list[str]]:
    """What is run, by name; the first is what the others are compared with."""
    if kind == "floor":
        return {
            "bare PyTorch, two processes of one thread": ["floor.py", workload, "--processes", "2", "--threads", "1"],
            "bare PyTorch, one process of two threads": ["floor.py", workload, "--processes", "1", "--threads", "2"],
            "protofl, two processes": ["ours.py", workload, "--processes", "2"],
            "protofl, one process": ["ours.py", workload, "--processes", "1"],
        }
    if kind == "methods":
        return {name: ["ours.py", workload, "--method", name] for name in METHODS}
    return {name: ["ours.py", workload, "--engine", name, "--processes", "1"] for name in ("loop", "batched")}


def once(words: Sequence[str], rounds: int, data_dir: str | None) -> Mapping[str, Any]:
    """One run of a variant -> what it prints."""
    more = ["--rounds", str(rounds), *(["--data-dir", data_dir] if data_dir else [])]
    told = subprocess.run(
        [sys.executable, str(HERE / words[0]), *words[1:], *more], check=True, capture_output=True, text=True
    )
    found: Mapping[str, Any] = json.loads(told.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("floor", "methods", "engines"))
    parser.add_argument("workload")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--data-dir")
    asked = parser.parse_args()
    asked_for = variants(asked.kind, asked.workload)
    seconds: dict[str, list[float]] = {name: [] for name in asked_for}
    samples: dict[str, float] = {}
    for _ in range(asked.repeat):
        for name, words in asked_for.items():
            told = once(words, asked.rounds, asked.data_dir)
            seconds[name] += told["round" if asked.kind == "methods" else "seconds"]
            samples[name] = told["samples"]
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    base = medians[next(iter(medians))]
    import torch

    what = {"floor": "local training", "methods": "whole round, evaluation apart", "engines": "local training"}[
        asked.kind
    ]
    print(f"{asked.workload}, {what}: medians over {asked.repeat} runs of {asked.rounds} rounds; Python "
          f"{platform.python_version()}, torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}\n")  # fmt: skip
    print("| variant | seconds a round | lowest | highest | samples/s | ratio |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, median in medians.items():
        values = seconds[name]
        row = f"| {name} | {median:.3f} | {min(values):.3f} | {max(values):.3f} "
        print(f"{row}| {samples[name] / median:,.0f} | {median / base:.2f} |")


if __name__ == "__main__":
    main()
