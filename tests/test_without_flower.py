"""Flower is an extra: without it everything else works, and asking for it says what to install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from protofl import cli
from protofl.errors import UserError


def test_without_flower_the_line_says_what_to_install(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr("protofl.flower.find_spec", lambda name: None)
    told = CliRunner().invoke(cli.app, ["flower", "export", "fedavg", "--out", str(tmp_path / "app")])
    assert isinstance(told.exception, UserError) and "pip install 'protofl[flower]'" in str(told.exception)
    assert not (tmp_path / "app").exists()


def test_the_package_needs_no_flower() -> None:
    code = "import sys; sys.modules['flwr'] = None; import protofl.cli, protofl.flower.export, protofl.flower.data"
    subprocess.run([sys.executable, "-c", code], check=True)
