"""One thread per test process, as in a run: tests are spread over processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from threadpoolctl import threadpool_limits

torch.set_num_threads(1)
threadpool_limits(1)


@pytest.fixture
def sketched(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what a report says: its pictures are made, but not rendered, which takes most of its time."""

    def save(figure: Any, *paths: Path) -> None:
        for path in paths:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes({".png": b"\x89PNG", ".svg": b"<svg></svg>", ".pdf": b"%PDF"}[path.suffix])

    monkeypatch.setattr("protofl.report.figures.save", save)
