from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the data and cache folders of whoever runs it."""
    monkeypatch.setenv("PROTOFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("PROTOFL_DATA", raising=False)
