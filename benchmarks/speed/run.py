"""What protofl's rounds cost against bare PyTorch, against FedAvg's, and by engine: ratios of medians, runs interleaved.

    python benchmarks/speed/run.py floor W1 --data-dir DIR     # local training against the bare loop
    python benchmarks/speed/run.py methods W1-10 --data-dir DIR  # each method's round against FedAvg's
    python benchmarks/speed/run.py engines W3                  # loop against batched
    python benchmarks/speed/run.py parts --data-dir DIR        # with and without each optimisation
    python benchmarks/speed/run.py growth                      # 10 to 10,000 clients, 10 of them drawn a round
    python benchmarks/speed/run.py command                     # four runs on one and two workers; start-up
    python benchmarks/speed/run.py ray                         # twelve runs through Ray against two workers

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from without import PARTS

HERE = Path(__file__).parent
WHAT = {
    "floor": "local training, a round",
    "methods": "whole round, evaluation apart",
    "engines": "local training, a round",
    "parts": "local training, a round, one process; the ratio is to the run without",
    "growth": "whole round with all that is stored, evaluation apart; 10 clients of 100 samples, 5 epochs, mlp",
    "command": "the command from outside, digits",
    "ray": "from the start of the first run to the end of the last, digits",
}
ROUNDS = {"floor": 2, "methods": 2, "engines": 2, "parts": 2, "growth": 20, "command": 10, "ray": 12}
PLAIN = "augment=none"
METHODS = (
    ["fedavg"], ["fedprox"], ["scaffold"], ["fednh"], ["fedproc"], ["moon"], ["fedavg", PLAIN], ["moon", PLAIN],
    ["fedcspc"], ["fedcspc", "fedcspc.local_reg=P", "fedcspc.calib_epochs=0"],
)  # fmt: skip
"""Compared with FedAvg of the same augmentation."""

GROWING = ("fedavg", "fedproc", "moon", "scaffold")
CLIENTS = (100, 10, 1000, 10000)


@dataclass(frozen=True)
class Variant:
    """What is run, and the variant that it is compared with."""

    words: list[str]
    base: str


def variants(kind: str, workload: str) -> dict[str, Variant]:
    """What is run, by name."""
    if kind == "floor":
        base = "bare PyTorch, two processes of one thread"
        made = {
            base: ["floor.py", workload, "--processes", "2", "--threads", "1"],
            "bare PyTorch, one process of two threads": ["floor.py", workload, "--processes", "1", "--threads", "2"],
            "protofl, two processes": ["ours.py", workload, "--processes", "2"],
            "protofl, one process": ["ours.py", workload, "--processes", "1"],
        }
    elif kind == "methods":
        made = {" ".join(words): ["ours.py", workload, "--method", words[0], "--set", *words[1:]] for words in METHODS}
        return {name: Variant(words, "fedavg " + PLAIN if PLAIN in name else "fedavg") for name, words in made.items()}
    elif kind == "engines":
        base = "loop"
        made = {name: ["ours.py", workload, "--engine", name, "--processes", "1"] for name in ("loop", "batched")}
    elif kind == "parts":
        found = {}
        for name, part in PARTS.items():
            words = ["ours.py", part.workload, "--processes", "1", *part.words]
            base = f"{' '.join([part.workload, *part.words])} without: {name}"
            found[base] = Variant([*words, "--without", name], base)
            found[f"{part.workload} with: {name}"] = Variant(words, base)
        return found
    elif kind == "growth":
        return {
            f"{m}, {n:,} clients": Variant(["growth.py", str(n), "--method", m], f"{m}, {CLIENTS[0]:,} clients")
            for m in GROWING
            for n in CLIENTS
        }
    elif kind == "ray":
        base = "twelve runs, --workers 2"
        words = ["command.py", "twelve", "--workers", "2"]
        made = {base: words, "twelve runs, --workers 2 --engine ray": [*words, "--engine", "ray"]}
    else:
        four = {f"four runs, --workers {n}": ["command.py", "four", "--workers", str(n)] for n in (1, 2)}
        return {
            **{name: Variant(words, "four runs, --workers 1") for name, words in four.items()},
            "to the first round": Variant(["command.py", "start"], "to the first round"),
            "protofl --help": Variant(["command.py", "help"], "protofl --help"),
        }
    return {name: Variant(words, base) for name, words in made.items()}


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
    parser.add_argument("kind", choices=sorted(WHAT))
    parser.add_argument("workload", nargs="?", default="W3", help="W1, W1-10, W2, W3; for floor, methods, engines")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--data-dir")
    asked = parser.parse_args()
    asked_for = variants(asked.kind, asked.workload)
    rounds = asked.rounds or ROUNDS[asked.kind]
    told: dict[str, list[Mapping[str, Any]]] = {name: [] for name in asked_for}
    for _ in range(asked.repeat):
        for name, variant in asked_for.items():
            told[name].append(once(variant.words, rounds, asked.data_dir))
    key = "round" if asked.kind == "methods" else "seconds"
    seconds = {name: [v for one in many for v in one[key]] for name, many in told.items()}
    import torch

    on = f"{asked.workload}, " if asked.kind in ("floor", "methods", "engines") else ""
    print(f"{on}{WHAT[asked.kind]}: medians over {asked.repeat} runs of {rounds} rounds; Python "
          f"{platform.python_version()}, torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}\n")  # fmt: skip
    print("| variant | seconds | lowest | highest | samples/s | peak MB | ratio |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, values in seconds.items():
        median, base = statistics.median(values), statistics.median(seconds[asked_for[name].base])
        speed = told[name][0]["samples"] / median
        peak = max((one["peak_mb"] for one in told[name] if "peak_mb" in one), default=None)
        cells = [f"{median:.3f}", f"{min(values):.3f}", f"{max(values):.3f}", f"{speed:,.0f}" if speed else "-"]
        print(f"| {name} | {' | '.join(cells)} | {'-' if peak is None else f'{peak:,.0f}'} | {median / base:.2f} |")


if __name__ == "__main__":
    main()
