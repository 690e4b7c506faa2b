"""What protofl's rounds cost against bare PyTorch, by engine and against other suites: ratios of medians, runs interleaved.

    python benchmarks/speed/run.py floor W1 --data-dir DIR     # local training against the bare loop
    python benchmarks/speed/run.py engines --data-dir DIR      # loop, batched, two processes, over nets and clients
    python benchmarks/speed/run.py floor W1 --device cuda --data-dir DIR   # these two on a GPU, with graphs, in one process
    python benchmarks/speed/run.py parts --data-dir DIR        # with and without each optimisation
    python benchmarks/speed/run.py growth                      # 10 to 10,000 clients, 10 of them drawn a round
    python benchmarks/speed/run.py command                     # four runs on one and two workers; start-up
    python benchmarks/speed/run.py ray                         # twelve runs through Ray against two workers
    python benchmarks/speed/run.py suites W1 --data-dir DIR --env pfl=ENV/bin/python  # other suites on the same work

Every variant is a process of its own; all variants run once, then all again, `--repeat` times. The table goes to standard
output as Markdown, with the hardware and the versions. Close other programs before you run it.

`suites` times a round of FedAvg, local training and average, as each suite runs it (protofl's with all that it stores); accuracy
is of the model after the last round. Each suite has an environment of its own, made with `suites/requirements-NAME.txt`;
`--env NAME=PYTHON` names its interpreter, and a suite without one is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from without import PARTS

HERE = Path(__file__).parent
WHAT = {
    "floor": "local training, a round",
    "engines": "local training, a round; the ratio is to the loop in one process",
    "parts": "local training, a round, one process; the ratio is to the run without",
    "growth": "whole round with all that is stored, evaluation apart; 10 clients of 100 samples, 5 epochs, mlp",
    "command": "the command from outside, digits",
    "ray": "from the start of the first run to the end of the last, digits",
    "suites": "a round of FedAvg, evaluation apart",
}
ROUNDS = {"floor": 2, "engines": 2, "parts": 2, "growth": 20, "command": 10, "ray": 12, "suites": 3}
ENGINES = {
    "mlp_plain, 50 clients": ["W3"],
    "mlp_plain, 10 clients": ["W3", "clients=10"],
    "mlp, 50 clients": ["W3", "model=mlp"],
    "mlp, 10 clients": ["W3", "model=mlp", "clients=10"],
    "cnn_fednh, 10 of 100 clients, 1 epoch": ["W2", "local_epochs=1"],
    "simple_cnn, 10 clients": ["W1"],
}
"""What the engines are compared on: a workload, and what is changed of it. Where data are missing it is left out."""

ON_GPU = ("loop", "batched", "graphs")
GROWING = ("fedavg", "fedproc", "moon", "scaffold")
CLIENTS = (100, 10, 1000, 10000)
SUITES = {
    "flower": {"Flower's simulation, two Ray actors": ["with_flower.py"]},
    "blazefl": {
        "BlazeFL, two threads": ["with_blazefl.py", "--workers", "threads"],
        "BlazeFL, two processes": ["with_blazefl.py", "--workers", "processes"],
    },
    "pfl": {"pfl-research, two processes": ["with_pfl.py"]},
    "fedlab": {
        "FedLab, two client processes": ["with_fedlab.py"],
        "FedLab, one process": ["with_fedlab.py", "--processes", "1"],
    },
}
"""What a suite is timed with, by its name in `--env`: where it hangs on the work which of two ways is its best, both."""


@dataclass(frozen=True)
class Variant:
    """What is run, and the variant that it is compared with. python: another suite's interpreter."""

    words: list[str]
    base: str
    python: str | None = None


def on_gpu(kind: str, workload: str, data_dir: str | None, device: str) -> dict[str, Variant]:
    """The bare loop and the engines on a GPU, by name: one process, since there is one GPU."""
    place, found = ["--device", device, "--processes", "1"], {}
    if kind == "floor":
        base = "bare PyTorch"
        found[base] = Variant(["floor.py", workload, *place], base)
        for engine in ON_GPU:
            found[f"protofl, {engine}"] = Variant(["ours.py", workload, *place, "--engine", engine], base)
        return found
    for work, (of, *changes) in ENGINES.items():
        if data_dir or of == "W3":
            for engine in ON_GPU:
                words = ["ours.py", of, *place, "--engine", engine, "--set", *changes]
                found[f"{work}: {engine}"] = Variant(words, f"{work}: loop")
    return found


def variants(kind: str, workload: str, data_dir: str | None) -> dict[str, Variant]:
    """What is run, by name."""
    if kind == "floor":
        base = "bare PyTorch, two processes of one thread"
        made = {
            base: ["floor.py", workload, "--processes", "2", "--threads", "1"],
            "bare PyTorch, one process of two threads": ["floor.py", workload, "--processes", "1", "--threads", "2"],
            "protofl, two processes": ["ours.py", workload, "--processes", "2"],
            "protofl, one process": ["ours.py", workload, "--processes", "1"],
        }
    elif kind == "engines":
        found = {}
        for work, (of, *changes) in ENGINES.items():
            if data_dir or of == "W3":
                for n, engine in product("12", ("loop", "batched")):
                    words = ["ours.py", of, "--engine", engine, "--processes", n, "--set", *changes]
                    found[f"{work}: {engine}, processes: {n}"] = Variant(words, f"{work}: loop, processes: 1")
        return found
    elif kind == "parts":
        found = {}
        for name, part in PARTS.items():
            words, work = [part.workload, "--processes", "1", *part.words], " ".join([part.workload, *part.words])
            base = f"{work} without: {name}"
            found[base] = Variant(["ours.py", *words, "--without", name], base)
            found[f"{work} with: {name}"] = Variant(["ours.py", *words], base)
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


def others(workload: str, task: str, envs: Mapping[str, str]) -> dict[str, Variant]:
    """The suites that have an interpreter, against the bare loop and protofl."""
    base = "bare PyTorch, two processes of one thread"
    made = {
        base: Variant(["floor.py", workload], base),
        "protofl, two processes": Variant(["ours.py", workload, "--processes", "2"], base),
    }
    for suite, python in envs.items():
        for name, (script, *words) in SUITES[suite].items():
            made[name] = Variant([f"suites/{script}", task, *words], base, python)
    return made


def interpreter(text: str) -> tuple[str, str]:
    """NAME=PYTHON, checked."""
    name, _, python = text.partition("=")
    if name not in SUITES:
        raise argparse.ArgumentTypeError(f"{text}: NAME is one of {', '.join(SUITES)}")
    if shutil.which(python) is None:
        raise argparse.ArgumentTypeError(f"{text}: no interpreter is there")
    return name, python


def once(variant: Variant, rounds: int, data_dir: str | None) -> Mapping[str, Any]:
    """One run of a variant -> what it prints."""
    words = [*variant.words[1:], "--rounds", str(rounds)]
    environ = dict(os.environ)
    if variant.python:
        environ.pop("PYTHONPATH", None)  # is this environment's
    elif data_dir:
        words += ["--data-dir", data_dir]
    command = [variant.python or sys.executable, str(HERE / variant.words[0]), *words]
    told = subprocess.run(command, capture_output=True, text=True, env=environ)
    if told.returncode:
        raise SystemExit(f"{told.stderr}\n{' '.join(command)} ended with {told.returncode}")
    found: Mapping[str, Any] = json.loads(told.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=sorted(WHAT))
    parser.add_argument("workload", nargs="?", default="W3", help="W1, W2, W3; for floor and suites")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--data-dir")
    parser.add_argument("--device", default="cpu", help="for floor and engines: cuda, cuda:N")
    parser.add_argument(
        "--env", type=interpreter, action="append", default=[], metavar="NAME=PYTHON", help="for suites"
    )
    asked = parser.parse_args()
    if asked.device != "cpu" and asked.kind not in ("floor", "engines"):
        parser.error(f"--device is for floor and engines, not for {asked.kind}")
    if asked.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device {asked.device}: torch finds no GPU on this machine")
    suites, envs = asked.kind == "suites", dict(asked.env)
    rounds = asked.rounds or ROUNDS[asked.kind]
    with tempfile.TemporaryDirectory() as folder:
        if suites:
            task = f"{folder}/task.npz"
            words = [asked.workload, task, *(["--data-dir", asked.data_dir] if asked.data_dir else [])]
            subprocess.run([sys.executable, str(HERE / "export.py"), *words], check=True)
            asked_for = others(asked.workload, task, envs)
        elif asked.device != "cpu":
            asked_for = on_gpu(asked.kind, asked.workload, asked.data_dir, asked.device)
        else:
            asked_for = variants(asked.kind, asked.workload, asked.data_dir)
        told: dict[str, list[Mapping[str, Any]]] = {name: [] for name in asked_for}
        for _ in range(asked.repeat):
            for name, variant in asked_for.items():
                told[name].append(once(variant, rounds, asked.data_dir))
    key = "wall" if suites else "seconds"
    seconds = {name: [v for one in many for v in one.get(key, one["seconds"])] for name, many in told.items()}
    on = f"{asked.workload}, " if asked.kind in ("floor", "suites") else ""
    where = (
        torch.backends.cpu.get_cpu_capability() if asked.device == "cpu" else torch.cuda.get_device_name(asked.device)
    )
    print(f"{on}{WHAT[asked.kind]}: medians over {asked.repeat} runs of {rounds} rounds; Python "
          f"{platform.python_version()}, torch {torch.__version__}, {where}\n")  # fmt: skip
    print(f"| variant | seconds | lowest | highest | samples/s | peak MB | ratio |{' accuracy |' if suites else ''}")
    print(f"|---|---:|---:|---:|---:|---:|---:|{'---:|' if suites else ''}")
    for name, values in seconds.items():
        median, base, first = statistics.median(values), statistics.median(seconds[asked_for[name].base]), told[name][0]
        speed = first["samples"] / median
        peak = max((one["peak_mb"] for one in told[name] if "peak_mb" in one), default=None)
        cells = [f"{median:.3f}", f"{min(values):.3f}", f"{max(values):.3f}", f"{speed:,.0f}" if speed else "-"]
        cells += ["-" if peak is None else f"{peak:,.0f}", f"{median / base:.2f}"]
        if suites:
            right = [one["accuracy"] for one in told[name] if "accuracy" in one]
            cells.append(f"{statistics.mean(right):.1%}" if right else "-")
        version = f" ({first['version']})" if "version" in first else ""
        print(f"| {name}{version} | {' | '.join(cells)} |")
    if suites and (missing := [name for name in SUITES if name not in envs]):
        print(f"\nLeft out, for want of an --env: {', '.join(missing)}.")


if __name__ == "__main__":
    main()
