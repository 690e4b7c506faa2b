"""Memory with many clients: what idle clients keep rests on disk (`pytest -m slow`, some minutes)."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from protofl import registry
from protofl.records import read_rows

CLIENTS, LIMIT_MB = 500, 2000

SCRIPT = """
import sys
from protofl.cli import main
sys.argv = ["protofl", *sys.argv[1:]]
main()
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made-up images of CIFAR's shape, 12 for each of 500 clients."""
    rs = np.random.RandomState(0)
    path = tmp_path_factory.mktemp("data") / "many.npz"
    y = np.arange(12 * CLIENTS) % 10
    x = rs.randint(0, 256, (len(y), 32, 32, 3), dtype=np.uint8)
    np.savez(path, x_train=x, y_train=y, x_test=x[:100], y_test=y[:100])
    return path


@pytest.mark.slow
@pytest.mark.parametrize("method", [*registry.names(), "moon+cspc"])
def test_peak_memory_with_500_clients(method: str, data: Path, tmp_path: Path) -> None:
    words = ["bench", "--methods", method, "--dataset", data, "--net", "cnn_fednh", "--clients", CLIENTS,
             "--participation", 0.02, "--partition", "iid", "--rounds", 3, "--local-epochs", 1, "--seeds", 0,
             "--set", "metrics=gm,pm_v,pm_l", "--workers", 1, "--no-report", "--results", tmp_path]  # fmt: skip
    words += ["--set", "solo.epochs=T*E"] if method == "solo" else []  # MOON's 300 would take a quarter of an hour
    subprocess.run([sys.executable, "-c", SCRIPT, *map(str, words)], check=True, cwd=tmp_path, capture_output=True)
    (log,) = tmp_path.rglob("rounds.jsonl")
    peaks = [r["memory_mb"] for r in read_rows(log) if "memory_mb" in r]
    assert peaks and max(peaks) < LIMIT_MB
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3 < LIMIT_MB
