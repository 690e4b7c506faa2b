"""The command as a user runs it, timed from outside. Prints one JSON line.

python benchmarks/speed/command.py four --workers 2   # four independent runs of digits, whole command but its start
python benchmarks/speed/command.py twelve --engine ray  # twelve, from the start of the first to the end of the last
python benchmarks/speed/command.py start              # from the command to its first round; `protofl --help`
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time

PROTOFL = [sys.executable, "-c", "from protofl.cli import main; main()"]


def lines(words: list[str], folder: str) -> list[tuple[float, str]]:
    """Run the command -> seconds since its start, and what it printed, line by line."""
    began, told = time.perf_counter(), []
    with subprocess.Popen([*PROTOFL, *words], cwd=folder, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            told.append((time.perf_counter() - began, line.rstrip()))
    if child.returncode:
        raise SystemExit(f"protofl {' '.join(words)} ended with {child.returncode}")
    return told


def when(told: list[tuple[float, str]], word: str) -> list[float]:
    """When lines with a word were printed."""
    return [at for at, line in told if word in line]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("four", "twelve", "start", "help"))
    parser.add_argument("--workers", default="1")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--data-dir", help="not used: digits ships with a dependency")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if asked.what == "help":
            began = time.perf_counter()
            subprocess.run([*PROTOFL, "--help"], check=True, capture_output=True)
            seconds = time.perf_counter() - began
        elif asked.what == "start":
            told = lines(["bench", "--methods", "fedavg", "--seeds", "0", "--rounds", "1", "--no-report"], folder)
            seconds = when(told, "started")[0]
        else:
            words = [
                "bench",
                "--methods",
                "fedprox",
                "--seeds",
                ",".join(map(str, range({"four": 4, "twelve": 12}[asked.what]))),
                "--rounds",
                str(asked.rounds),
                "--no-report",
            ]
            told = lines([*words, "--workers", asked.workers, "--engine", asked.engine], folder)
            seconds = when(told, "finished")[-1] - when(told, "started")[0]
    print(json.dumps({"seconds": [seconds], "round": [seconds], "samples": 0}))


if __name__ == "__main__":
    main()
