"""Grids of cells: from the command line, from a suite file, by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from test_cli import protofl, runs

from protofl import cli, suites
from protofl.errors import UserError
from protofl.experiment import Settings, cells
from protofl.sweeps import SWEEPS


def grid(methods: str, **over: str) -> list[tuple[str, ...]]:
    """The labels of a grid's cells, split into words; `__` stands for the dot of METHOD.OPTION."""
    settings = Settings()
    settings.take("methods", methods, "test")
    settings.take("seeds", "0", "test")
    for name, values in over.items():
        settings.take_over(name.replace("__", "."), values, "test")
    return [tuple(c.label.split()) for c in cells(settings)]


def test_every_combination_is_a_cell() -> None:
    made = grid("fedavg,moon", local_epochs="1,2", participation="0.5,1")
    assert len(made) == len(set(made)) == 8
    assert ("moon", "beta", "0.5", "local_epochs", "2", "participation", "0.5", "seed", "0") in made


def test_an_option_is_varied_for_its_method_alone() -> None:
    made = grid("fedavg,moon", moon__mu="1,5,10", beta="0.1,1")
    assert [m for m in made if m[0] == "fedavg"] == [
        ("fedavg", "beta", "0.1", "seed", "0"),
        ("fedavg", "beta", "1", "seed", "0"),
    ]
    assert len([m for m in made if m[0] == "moon"]) == 6


def test_equal_values_are_one() -> None:
    assert len(grid("fedavg", local_epochs="1,1,2")) == 2


def test_a_list_of_betas_is_a_grid() -> None:
    settings = Settings(methods=["fedavg"], seeds=[0, 1])
    settings.take("beta", "0.1,0.5", "test")
    assert [(c.protocol.beta, c.protocol.seed) for c in cells(settings)] == [(0.1, 0), (0.1, 1), (0.5, 0), (0.5, 1)]


def test_a_suite_file_has_a_grid(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(
        'methods = ["fedavg"]\nseeds = [0]\n[over]\nlocal_epochs = [1, 2]\nlr = [0.1, 0.2]\n'
    )
    settings = suites.read(str(tmp_path / "s.toml")).parts[0]
    assert {(c.protocol.local_epochs, c.protocol.client_lr) for c in cells(settings)} == {
        (1, 0.1), (1, 0.2), (2, 0.1), (2, 0.2)
    }  # fmt: skip


@pytest.mark.parametrize("name", SWEEPS)
def test_named_sweeps_are_of_their_methods(name: str) -> None:
    sweep, settings = SWEEPS[name], Settings()
    if sweep.methods:
        settings.take("methods", sweep.methods, "test")
    for key, values in sweep.over.items():
        settings.take_over(key, values, "test")
    asked = cells(settings)
    assert len(asked) > 1
    for cell in asked:
        cell.method.build(cell.protocol)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "heterogeneity"),
        (["heterogenity"], "did you mean 'heterogeneity'"),
        (["--over", "betaa=1"], "did you mean 'beta'"),
        (["--over", "moon.muu=1"], "did you mean 'mu'"),
        (["--over", "mooon.mu=1"], "did you mean 'moon'"),
        (["--over", "rounds"], "key=a,b"),
        (["--over", "rounds="], "list of values"),
        (["--over", "rounds=1,x"], "whole number"),
        (["--over", "seeds=1,2"], "--seeds"),
        (["--over", "rounds=1", "--over", "rounds=2"], "twice"),
        (["--over", "rounds=1,2", "--rounds", "3"], "varied and set"),
        (["--over", "moon.mu=1,2", "--set", "moon.mu=3"], "varied and set"),
        (["--over", "moon.mu=1,2", "--methods", "fedavg"], "add it to --methods"),
        (["heterogeneity", "--partition", "iid"], "beta means nothing"),
        (["--over", "lr=1,2", "--over", "client_lr=3"], "twice"),
        (["--over", "beta=0.1,1", "--beta", "5"], "varied and set"),
        (["local-epochs", "--local-epochs", "1"], "varied and set"),
        (["rho", "--set", "fednh.rho=0.3"], "varied and set"),
        (["rho", "--methods", "fedavg"], "add it to --methods"),
        (["--over", "report=last,best"], "moves no number"),
        (["--suite", "grid.toml"], "table of lists"),
        (["--suite", "both.toml", "--over", "beta=1,2"], "varied and set"),
    ],
    ids=str,
)
def test_bad_grids(words: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "grid.toml").write_text("over = 3\n")
    (tmp_path / "both.toml").write_text("rounds = 3\n[over]\nrounds = [1, 2]\n")
    told = protofl("sweep", *words, cwd=tmp_path, code=2)
    assert said in told and told.startswith("Error: ") and told.count("\n") == 1
    assert {p.name for p in tmp_path.iterdir()} == {"grid.toml", "both.toml"}


def test_a_sweep_runs_and_is_reported(tmp_path: Path, sketched: None) -> None:
    words = (
        "sweep",
        "heterogeneity",
        "--over",
        "beta=0.1,5",
        "--methods",
        "fedavg,fednh",
        "--rounds",
        1,
        "--clients",
        4,
    )
    said = protofl(*words, "--local-epochs", 1, "--seeds", 0, "--workers", 1, cwd=tmp_path)
    assert "beta 0.1" in said and len(runs(tmp_path / "results")) == 4
    (page,) = (tmp_path / "reports").glob("*/README.md")
    assert "GM over beta" in page.read_text() and (page.parent / "figures" / "sweep-beta.png").is_file()


def test_unknown_methods_in_a_grid() -> None:
    with pytest.raises(UserError, match="nosuch"):
        grid("fedavg", nosuch__mu="1")


def test_the_command_line_wins_over_the_suite(tmp_path: Path) -> None:
    """A suite sets one field and varies another; the command line varies the first and sets the second."""
    (tmp_path / "s.toml").write_text(
        'methods = ["moon"]\nseeds = [0]\nrounds = 3\nbeta = 0.5\n[method.moon]\nmu = 2\n[over]\nlocal_epochs = [1, 2]\n'
    )
    settings = suites.read(str(tmp_path / "s.toml")).parts[0]
    settings.take("local_epochs", "7", "test")
    settings.take_grid(["rounds=4,5", "moon.mu=1,5"], {"beta": "0.1,1"})
    made = cells(settings)
    assert {(c.protocol.rounds, c.protocol.beta, dict(c.method.given)["mu"]) for c in made} == {
        (rounds, beta, mu) for rounds in (4, 5) for beta in (0.1, 1.0) for mu in ("1", "5")
    }
    assert {c.protocol.local_epochs for c in made} == {7}


def test_values_of_the_command_line_replace_those_of_a_named_sweep() -> None:
    for over, beta in (["beta=0.2,0.4"], None), ([], "0.2,0.4"):
        settings = Settings(methods=["fedavg"], seeds=[0])
        if beta:
            settings.take("beta", beta, "--beta")
        settings.take_grid(over, SWEEPS["heterogeneity"].over)
        assert [c.protocol.beta for c in cells(settings)] == [0.2, 0.4]


def test_nested_options_and_lists_in_a_suite(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(
        'methods = ["moon"]\nseeds = [0]\n[over]\nmetrics = [["gm"], ["gm", "pm_v"]]\n[over.moon]\nmu = [1, 5]\n'
    )
    settings = suites.read(str(tmp_path / "s.toml")).parts[0]
    assert [(c.protocol.metrics, dict(c.method.given)["mu"]) for c in cells(settings)] == [
        (("gm",), 1), (("gm",), 5), (("gm", "pm_v"), 1), (("gm", "pm_v"), 5)
    ]  # fmt: skip


def test_bench_runs_the_grid_of_a_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "out", Console(width=200))
    (tmp_path / "s.toml").write_text('methods = ["fedavg"]\nseeds = [0]\n[over]\nlocal_epochs = [1, 2]\n')
    said = protofl("bench", "--suite", "s.toml", "--dry-run", cwd=tmp_path)
    assert "local_epochs 1 seed 0" in said and "local_epochs 2 seed 0" in said


def test_wrong_grids_end_before_torch_and_help_is_light(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom protofl import cli\n"
        "for words in (['heterogenity'], ['--over', 'betaa=1'], ['--over', 'moon.muu=1'], ['--help']):\n"
        "    sys.argv = ['protofl', 'sweep', *words]\n"
        "    try:\n        cli.main()\n"
        "    except SystemExit as e:\n        assert e.code == (0 if words == ['--help'] else 2)\n"
        "assert not {'torch', 'pandas', 'matplotlib'} & set(sys.modules), 'heavy import'"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    assert all(name in said.stdout for name in SWEEPS) and "--workers" in said.stdout
