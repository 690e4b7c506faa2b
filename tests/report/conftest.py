"""Synthetic run folders: numbers that are easy to recompute, shapes as the runtime writes them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

NAMES = {
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "moon": "MOON",
    "fedproc": "FedProc",
    "fednh": "FedNH",
    "fedcspc": "FedCSPC",
    "fedproto": "FedProto",
}
OPTIONS: dict[str, dict[str, Any]] = {
    "fedprox": {"mu": 0.01},
    "moon": {"mu": 5.0, "tau": 0.5},
    "fednh": {"rho": 0.9},
    "fedproc": {"tau": 0.5, "empty_class": "skip"},
}
CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]

Write = Callable[..., Path]


def accuracies(method: str, seed: int, rounds: int) -> list[float]:
    """A plausible learning curve, rounded as a test set of 10 000 would."""
    top = {"fedavg": 0.655, "fedprox": 0.661, "moon": 0.672, "fedproc": 0.69, "fednh": 0.684}.get(method, 0.7)
    noise = np.random.RandomState(seed + len(method)).normal(0, 0.006, rounds)
    return [round(float(top * (1 - 0.8 * np.exp(-(t + 1) / (rounds / 5))) + noise[t]), 4) for t in range(rounds)]


def row(t: int, gm: float | None, clients: Sequence[int], **more: Any) -> dict[str, Any]:
    """One line of rounds.jsonl."""
    made: dict[str, Any] = {
        "round": t,
        "gm": gm,
        "gm_scores": {"network": gm},
        "loss": None if gm is None else round(2.3 - 2 * gm, 4),
        "gm_correct": None,
        "clients": list(clients),
        "bytes_down": 370_504 * len(clients),
        "bytes_up": 370_504 * len(clients),
        "bytes_once": 0,
        "seconds": {"train": 3.0, "prototype": 0.5, "aggregate": 0.01, "evaluate": 0.7},
        "samples": {"trained": 500 * len(clients), "forward": 50 * len(clients)},
        "state_bytes": 4000 * (t + 1),
        "memory_mb": 812.0 + t,
        "terms": {"loss": round(2.3 * 0.9**t, 4), "ce": round(2.3 * 0.9**t, 4)},
        "lr": 0.01,
    }
    return made | more


def write_run(
    root: Path,
    method: str = "fedavg",
    seed: int = 0,
    gm: Sequence[float | None] = (0.5, 0.6),
    *,
    status: str = "finished",
    done: bool | None = None,
    name: str | None = None,
    options: dict[str, Any] | None = None,
    protocol: dict[str, Any] | None = None,
    document: dict[str, Any] | None = None,
    rows: Sequence[dict[str, Any]] | None = None,
    summary: dict[str, Any] | None = None,
    tail: str = "",
) -> Path:
    """Write one run folder and return it. `tail` is put behind the last line."""
    p: dict[str, Any] = {
        "dataset": "cifar10",
        "partition": "dir_class",
        "beta": 0.5,
        "clients": 10,
        "partition_seed": 0,
        "participation": 1.0,
        "rounds": len(gm),
        "local_epochs": 10,
        "batch_size": 64,
        "client_lr": 0.01,
        "momentum": 0.9,
        "weight_decay": 1e-5,
        "model": "simple_cnn",
        "seed": seed,
        "metrics": ["gm"],
        "pm_clients": "active",
        "pm_protocol": "as_trained",
        "report": "last",
        "std_over": "seeds",
        "std_ddof": 1,
    } | (protocol or {})
    options = OPTIONS.get(method, {}) if options is None else options
    counts = np.random.RandomState(3).dirichlet([0.5] * p["clients"], len(CLASSES)).T * 5000
    made: dict[str, Any] = {
        "method": {"name": method, "options": options},
        "protocol": p,
        "name": name or NAMES.get(method, method),
        "data": {
            "fingerprint": "d41d8cd98f00b204",
            "classes": CLASSES,
            "train": 50000,
            "test": 10000,
            "source": "embedded",
            "note": "",
        },
        "partition": {
            "counts": counts.astype(int).tolist(),
            "index_hash": "5f3a90c1",
            "count_hash": "77aa01be",
            "attempts": 2,
            "note": "",
            "skew": {"entropy": 1.412, "classes_per_client": 8.3, "size_cv": 0.412, "distance": 0.365},
        },
        "network": {
            "name": "simple_cnn",
            "w0": f"w{seed}",
            "engine": "batched",
            "trained": 92626,
            "parameters": {"encoder": 62006, "projection": 28040, "head": 2570, "aux": 0, "total": 92626},
        },
    } | (document or {})
    digest = hashlib.sha256(json.dumps([method, options, p, made["data"], root.name]).encode()).hexdigest()[:16]
    made["digest"] = digest
    folder = root / digest
    folder.mkdir(parents=True)
    (folder / "protocol.json").write_text(json.dumps(made))
    env = {
        "protofl": "0.1.0",
        "python": "3.11.7",
        "torch": "2.6.0",
        "numpy": "2.1.0",
        "machine": "x86_64",
        "cpus": 8,
        "git": "abc1234",
    }
    (folder / "env.json").write_text(json.dumps(env))
    lines = rows if rows is not None else [row(t, v, range(p["clients"])) for t, v in enumerate(gm)]
    (folder / "rounds.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines) + tail)
    said = {"status": status, "rounds": len(lines), "of": p["rounds"]} | (summary or {})
    (folder / "summary.json").write_text(json.dumps(said))
    if status == "finished" if done is None else done:
        (folder / "done").touch()
    return folder


def write_prototypes(
    folder: Path, t: int, classes: int = 10, clients: int = 10, d: int = 32, spread: float = 1.0
) -> None:
    """Global prototypes and the clients' means around them."""
    rs = np.random.RandomState(t + classes)
    values = rs.normal(0, 4, (classes, d))
    has = np.ones(classes, dtype=bool)
    labels = np.concatenate([np.flatnonzero(rs.random_sample(classes) < 0.8) for _ in range(clients)])
    ids = np.sort(rs.randint(0, clients, len(labels)))
    own = values[labels] + rs.normal(0, spread, (len(labels), d))
    (folder / "prototypes").mkdir(exist_ok=True)
    np.savez(
        folder / "prototypes" / f"round-{t:05d}.npz",
        values=values,
        has=has,
        client_values=own,
        client_labels=labels,
        client_ids=ids,
    )


def write_study(root: Path, rounds: int = 40, seeds: Sequence[int] = (0, 1, 2)) -> Path:
    """Six methods with a few seeds, with PM, several readings and an exchange before round 0."""
    for method in ("fedavg", "fedprox", "moon", "fedproc", "fednh", "fedcspc"):
        for seed in seeds:
            curve = accuracies(method, seed, rounds)
            lines = []
            for t, gm in enumerate(curve):
                decay = 0.93**t
                terms = {"loss": 2.2 * decay + 0.8 - gm, "ce": 1.9 * decay + 0.7 - gm}
                if method in ("moon", "fedproc", "fedcspc"):
                    terms["contrast"] = 0.3 * decay + 0.02 * len(method)
                if method == "fedprox":
                    terms["prox"] = 0.01 * (t + 1) * decay
                scores: dict[str, Any] = {"network": gm}
                if method == "fedcspc":
                    scores = {"network": gm - 0.004, "exemplar": gm - 0.011, "fused": gm}
                pm = {
                    "pm_uniform": 0.7 * gm,
                    "pm_v": 1.1 * gm,
                    "pm_l": 1.2 * gm,
                    "pm_v_std": 0.08,
                    "pm_v_worst10": 0.9 * gm,
                    "pm_clients": 10,
                    "pm_skipped": 0,
                }
                lines.append(row(t, gm, range(10), terms=terms, gm_scores=scores, **pm))
            if method == "fedproc":
                once = {"gm_scores": {}, "terms": {}, "bytes_up": 102_480, "bytes_once": 0}
                lines.insert(0, row(-1, None, range(10), **once))
            net: dict[str, Any] = {
                "name": "simple_cnn",
                "w0": f"nh{seed}",
                "engine": "batched",
                "trained": 90056,
            }
            net["parameters"] = {"encoder": 62006, "projection": 28040, "head": 10, "total": 90056}
            own = {"network": net} if method == "fednh" else {}
            folder = write_run(root, method, seed, curve, rows=lines, document=own)
            if method in ("fedproc", "fednh", "fedcspc"):
                write_prototypes(folder, rounds - 1, spread={"fedproc": 1.0, "fednh": 2.0, "fedcspc": 0.6}[method])
    return root


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """`write(method, seed, gm, ...)` makes a run folder below `tmp_path/results/study`."""

    def made(method: str = "fedavg", seed: int = 0, gm: Sequence[float | None] = (0.5, 0.6), **more: Any) -> Path:
        return write_run(tmp_path / "results" / "study", method, seed, gm, **more)

    return made


@pytest.fixture(scope="session")
def writers() -> tuple[Callable[..., Path], Callable[..., Path]]:
    """`write_study` and `write_run`, for what is made once for several tests."""
    return write_study, write_run


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """Six methods x three seeds."""
    return write_study(tmp_path / "results" / "study", rounds=12)


@pytest.fixture
def line() -> Callable[..., dict[str, Any]]:
    """`line(t, gm, clients, ...)` is one row of rounds.jsonl."""
    return row


@pytest.fixture
def prototypes() -> Callable[..., None]:
    """`prototypes(folder, t, ...)` stores prototypes of round t in a run folder."""
    return write_prototypes
