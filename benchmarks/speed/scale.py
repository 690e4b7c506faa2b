"""What a federation of any size would cost, from rounds that can be run here, with a check at sizes between. Prints Markdown.

    python benchmarks/speed/scale.py --method fedavg

A round with m of N clients takes

    time      d + m s / p         d: what a round costs whatever m is; s: one client; p: processes side by side
    network   m (down + up)       bytes of one client, from the records
    memory    b + m u             of the server, which holds the uploads of a round; b: before the first upload
    disk      N k                 what clients remember between rounds

d, s, b and u are fitted to two small sizes by one process; `--check` sizes are predicted, and then run.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FITTED = ((2000, 50), (2000, 200))
SHARE = 0.1
"""Of the clients that are drawn a round, at the sizes that are predicted."""
CORES, ROUND = 16, 60.0
"""Of a node of the cluster on paper, and seconds that a round may take there."""


def measured(method: str, clients: int, drawn: int, rounds: int) -> dict[str, Any]:
    """Medians of a run here."""
    words = ["growth.py", str(clients), "--drawn", str(drawn), "--method", method, "--rounds", str(rounds)]
    told = subprocess.run(
        [sys.executable, str(HERE / words[0]), *words[1:]], check=True, capture_output=True, text=True
    )
    found: dict[str, Any] = json.loads(told.stdout.splitlines()[-1])
    return found | {"time": statistics.median(found["seconds"])}


@dataclass(frozen=True)
class Model:
    """The costs of one client and of a round, in seconds, bytes and MB."""

    d: float
    s: float
    b: float
    u: float
    traffic: float
    state: float

    def seconds(self, m: int, p: int = 1) -> float:
        return self.d + m * self.s / p

    def memory(self, m: int) -> float:
        return self.b + m * self.u

    def nodes(self, m: int) -> int:
        """Of CORES each, so that a round takes at most ROUND seconds."""
        return max(1, math.ceil(m * self.s / CORES / max(ROUND - self.d, 1e-9)))


def fitted(method: str, rounds: int) -> Model:
    """The straight line through the two sizes of FITTED."""
    (_, m0), (_, m1) = FITTED
    low, high = (measured(method, n, m, rounds) for n, m in FITTED)
    s, u = ((high[k] - low[k]) / (m1 - m0) for k in ("time", "peak_mb"))
    traffic = high["bytes_down"] + high["bytes_up"]
    return Model(low["time"] - m0 * s, s, low["peak_mb"] - m0 * u, u, traffic, high["state_bytes"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--check", default="1000,10000", help="numbers of clients that are run too")
    parser.add_argument("--predict", default="1000000", help="numbers of clients that are not")
    asked = parser.parse_args()
    cost = fitted(asked.method, asked.rounds)
    print(f"{asked.method}: a round takes {cost.d:.3f} s + {1000 * cost.s:.2f} ms a client, {cost.traffic / 1e3:.1f} kB a "
          f"client, {cost.b:.0f} MB + {cost.u:.3f} MB a client, {cost.state / 1e3:.1f} kB kept by each\n")  # fmt: skip
    print(f"| clients | drawn | s, one process | run here | MB | run here | nodes of {CORES} cores for {ROUND:g} s | GB a "
          "round | GB kept |")  # fmt: skip
    print("|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for text in (*asked.check.split(","), *asked.predict.split(",")):
        n = int(text)
        m = int(n * SHARE)
        told = measured(asked.method, n, m, asked.rounds) if text in asked.check.split(",") else None
        there = (f"{told['time']:.2f}", f"{told['peak_mb']:,.0f}") if told else ("-", "-")
        print(f"| {n:,} | {m:,} | {cost.seconds(m):,.2f} | {there[0]} | {cost.memory(m):,.0f} | {there[1]} | {cost.nodes(m):,} | "
              f"{m * cost.traffic / 1e9:,.2f} | {n * cost.state / 1e9:,.2f} |")  # fmt: skip


if __name__ == "__main__":
    main()
