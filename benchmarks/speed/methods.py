"""Each method's round against FedAvg's, evaluation apart. Prints a table.

    python benchmarks/speed/methods.py W1-10 --data-dir DIR --clients 10

All in one process of one thread: a client trains under every method in turn, each time beginning with another, so that the
methods see the same machine; a ratio is the median over clients. The server's part is timed once, after a round of one local
epoch, on which it does not hang.
"""

from __future__ import annotations

import argparse
import platform
import statistics
from typing import Any

import torch
from workloads import WORKLOADS, cells

from protofl import run
from protofl.clients import Clients
from protofl.federation import Federation

PLAIN = "augment=none"
METHODS = (
    ("fedavg",), ("fedprox",), ("scaffold",), ("fednh",), ("fedproc",), ("moon",), ("fedcspc",),
    ("fedcspc", "fedcspc.local_reg=P", "fedcspc.calib_epochs=0"), ("fedavg", PLAIN), ("moon", PLAIN),
)  # fmt: skip


class Subject:
    """A method after its round 0, in which every client has taken part."""

    def __init__(self, workload: str, words: tuple[str, ...], data_dir: str | None) -> None:
        self.name, given = " ".join(words), dict(one.split("=", 1) for one in words[1:])

        def ready(**more: Any) -> Any:
            return run.prepare(cells(WORKLOADS[workload], words[0], data_dir, rounds=100, **given, **more))

        self.after = Federation(ready().method, run.task(ready(local_epochs=1))[0])
        self.after.introduce()
        self.server = self.after.play(0).seconds["aggregate"]
        self.clients = Clients(self.after.method, run.task(ready())[0])
        self.base = f"fedavg {PLAIN}" if PLAIN in words else "fedavg"
        self.worked: list[int] = []
        self.train: list[float] = []
        self.prototype: list[float] = []

    def work(self, client: int) -> None:
        """Round 1 of a client."""
        self.worked.append(client)
        self.clients.engine.reset()
        kept = self.after.memory.get(client)
        self.clients.work(self.clients.method.local, 1, [client], self.after.shared, [kept])
        self.train.append(self.clients.engine.seconds["train"])
        self.prototype.append(self.clients.engine.seconds["prototype"])

    def rounds(self) -> list[float]:
        """Seconds of each client with its share, by samples, of the server's."""
        sizes = self.clients.task.sizes
        shares = [self.server * sizes[i] / sum(sizes) for i in self.worked]
        return [a + b + c for a, b, c in zip(self.train, self.prototype, shares)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=sorted(WORKLOADS))
    parser.add_argument("--clients", type=int, default=10, help="the first so many take a turn")
    parser.add_argument("--data-dir")
    asked = parser.parse_args()
    run.set_up_process()
    tried = [Subject(asked.workload, words, asked.data_dir) for words in METHODS]
    for client in range(asked.clients):
        turn = client % len(tried)
        for subject in tried[turn:] + tried[:turn]:
            subject.work(client)
    print(f"{asked.workload}: {asked.clients} clients in turn; Python {platform.python_version()}, torch {torch.__version__}, "
          f"{torch.backends.cpu.get_cpu_capability()}\n")  # fmt: skip
    print(
        "| method | training, s a client | against FedAvg | prototypes, s a client | server, s a round | round against FedAvg |"
    )
    print("|---|---:|---:|---:|---:|---:|")
    by_name = {subject.name: subject for subject in tried}
    for s in tried:
        base = by_name[s.base]
        step = statistics.median(a / b for a, b in zip(s.train, base.train))
        whole = statistics.median(a / b for a, b in zip(s.rounds(), base.rounds()))
        print(f"| {s.name} | {statistics.mean(s.train):.2f} | {step:.2f} | {statistics.mean(s.prototype):.2f} "
              f"| {s.server:.2f} | {whole:.2f} |")  # fmt: skip


if __name__ == "__main__":
    main()
