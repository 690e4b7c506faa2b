"""Suites: every file that is shipped is valid, priced and runs; scales, parts and what is unknown are said."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from test_cli import protofl, runs

from protofl import cli, options, suites
from protofl.errors import UserError
from protofl.experiment import cells
from protofl.protocol import Protocol


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch, sketched: None) -> None:
    monkeypatch.setattr(cli, "out", Console(width=200))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One store for all suites: what two of them share is run once."""
    return tmp_path_factory.mktemp("suites")


WANTED = {
    "moon-table1", "moon-table3", "moon-table4", "fedproc-table2", "fedproc-table3", "fedproc-table4", "fedproc-table5",
    "fedproc-table6", "fedproc-figure4", "fedproc-figure5", "fednh-table1", "fednh-table3", "fednh-rho", "fedcspc-table1",
    "fedcspc-figure5", "fedcspc-figure6", "heterogeneity", "scalability", "pitfalls-fedproc", "pitfalls-fednh",
    "pitfalls-fedcspc", "pitfalls-moon", "pitfalls-fedproto", "pitfalls-scaffold", "smoke", "digits", "cifar10",
    "cifar10-personal", "pitfalls-fedproc-cifar10",
}  # fmt: skip


def test_all_are_there() -> None:
    assert set(suites.shipped()) >= WANTED


@pytest.mark.parametrize("name", sorted(suites.shipped()))
def test_every_file_says_what_it_is(name: str) -> None:
    """Command, cost and what was seen; a title; at the scale of the paper nothing is cut, at laptop it is said what."""
    text = suites.shipped()[name].read_text("utf-8")
    first, cost, seen = text.splitlines()[:3]
    assert (
        first.startswith(f"# protofl suite run {name}") and cost.startswith("# Cost: ") and seen.startswith("# Seen: ")
    )
    small = suites.read(name)
    assert small.title != name and all(cells(part) for part in small.parts)
    if small.scale == "laptop":
        paper = suites.read(name, "paper")
        assert not any("Cut:" in note for note in paper.notes) and any("Cut:" in note for note in small.notes)
        assert len([c for p in paper.parts for c in cells(p)]) >= len([c for p in small.parts for c in cells(p)])


QUICK = {"moon-table3", "fednh-rho", "fedcspc-figure6", "scalability", "pitfalls-scaffold", "smoke"}
"""One of every kind; the others are slow tests."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in sorted(suites.shipped())]
)
def test_every_suite_runs_at_smoke(name: str, store: Path) -> None:
    said = protofl("suite", "run", name, "--scale", "smoke", "--workers", 1, "--no-report", cwd=store)
    assert "A smoke run" in said and "failed" not in said
    (table,) = (store / "results/tables").glob(f"{name}-smoke-*.json")
    document = json.loads(table.read_text())
    suite = suites.read(name, "smoke")
    assert document["title"] == suite.title and document["notes"] == list(suite.notes)
    assert all((store / "results" / folder / "done").exists() for folder in document["runs"])
    if suite.ablate is None:
        assert len(document["runs"]) == len({c.label for p in suite.parts for c in cells(p)}) or len(suite.parts) > 1
    else:
        assert document["ablation"]["rows"]


def test_a_suite_is_priced_and_resumed(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        'title = "Mine"\nmethods = ["fedavg"]\nseeds = [0]\nrounds = 2\nlocal_epochs = 1\n'
    )
    words = ("suite", "run", "./mine.toml", "--workers", 1)
    said = protofl(*words, "--dry-run", cwd=tmp_path)
    assert "Nothing runs" in said and "about" in said and not (tmp_path / "results").exists()
    protofl(*words, cwd=tmp_path)
    before = runs(tmp_path / "results")
    said = protofl(*words, "--seeds", "0,1", cwd=tmp_path)
    assert "1 of 2 runs are in the store already" in said
    assert before.items() < runs(tmp_path / "results").items()
    pages = [p.read_text() for p in (tmp_path / "reports").glob("mine-*/README.md")]
    assert len(pages) == 2 and all(page.startswith("# Mine") for page in pages)


def test_parts_and_scales(tmp_path: Path) -> None:
    """Shared < part < scale < scale of the part; a part may be left out; notes say what was cut and what is unknown."""
    path = tmp_path / "s.toml"
    path.write_text(
        'title = "T"\nmethods = ["fedavg"]\nseeds = [0]\nrounds = 9\n[unknown]\nclient_lr = "the code\'s"\n'
        "[[part]]\nlocal_epochs = 3\nbatch_size = 8\n[[part]]\nrounds = 8\n[part.laptop]\nrounds = 1\nmomentum = 0.5\n"
        "[[part]]\nclients = 5\n[part.laptop]\nskip = true\n"
        '[paper]\n[laptop]\ncut = "much"\nrounds = 2\nbatch_size = 16\n'
    )
    made = [[c.protocol for c in cells(p)] for p in suites.read(str(path)).parts]
    assert [[(p.rounds, p.local_epochs, p.batch_size, p.momentum) for p in part] for part in made] == [
        [(2, 3, 16, 0.9)], [(1, 5, 16, 0.5)],
    ]  # fmt: skip
    paper = [c.protocol.rounds for p in suites.read(str(path), "paper").parts for c in cells(p)]
    assert paper == [9, 8, 9]
    notes = " ".join(suites.read(str(path)).notes)
    assert "Cut: much" in notes and "client_lr: the code's" in notes


def test_smoke_keeps_methods_options_and_grid() -> None:
    for name in ("moon-table3", "fedcspc-figure6", "scalability"):
        laptop, smoke = suites.read(name), suites.read(name, "smoke")
        for a, b in zip(laptop.parts, smoke.parts):
            assert a.methods == b.methods and set(a.options) <= set(b.options)
            assert {k for k, v in a.over.items() if len(v) > 1} <= set(b.over)
            assert all(c.protocol.dataset == "digits" for c in cells(b))


@pytest.mark.parametrize(
    ("text", "scale", "said"),
    [
        ("laptop = 3", None, "must be a table"),
        ("[laptop]\nroundss = 3", None, "did you mean 'rounds'"),
        ("part = 3", None, "[[part]]"),
        ("part = []", None, "[[part]]"),
        ("[[part]]\nlaptop = 3\n[laptop]", None, "must be a table"),
        ('[unknown]\nroundss = "x"', None, "did you mean 'rounds'"),
        ("unknown = 3", None, "must be a table"),
        ("[laptop]", "paper", "has no table [paper]"),
        ("rounds = 3", "papr", "not one of paper, laptop, smoke"),
        ("[paper", None, "not valid TOML"),
    ],
)
def test_wrong_files_are_refused(text: str, scale: str | None, said: str, tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(text)
    with pytest.raises(UserError) as caught:
        suites.read(str(tmp_path / "s.toml"), scale)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_wrong_words_are_refused(tmp_path: Path) -> None:
    assert "did you mean 'moon-table1'" in protofl("suite", "run", "moon-tabel1", cwd=tmp_path, code=2)
    assert "cannot be read" in protofl("suite", "run", "./none.toml", cwd=tmp_path, code=2)
    assert "--scale" in protofl("bench", "--scale", "laptop", cwd=tmp_path, code=2)
    assert "of moon alone" in protofl("suite", "run", "pitfalls-moon", "--methods", "fednh", cwd=tmp_path, code=2)
    assert "named first" in protofl("suite", "run", "smoke", "--suite", "digits", cwd=tmp_path, code=2)


def test_the_list_needs_no_torch() -> None:
    code = (
        "import sys\nfrom protofl import cli\nsys.argv = ['protofl', 'suite', 'list']\n"
        "try:\n    cli.main()\nexcept SystemExit as e:\n    assert not e.code\nassert 'torch' not in sys.modules"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert said.returncode == 0 and "moon-table1" in said.stdout, said.stderr


def test_what_smoke_sets_is_of_the_protocol() -> None:
    assert set(suites.SMOKE) <= {*options.fields(Protocol), "seeds"} and set(suites.SMALL) <= set(
        options.fields(Protocol)
    )
