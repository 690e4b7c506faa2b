"""The real command, as a user runs it."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from protofl import cli, options, records, registry
from protofl.errors import UserError
from protofl.records import read_rows

PROTOFL = [sys.executable, "-c", "from protofl.cli import main; main()"]
TIMES = ("seconds", "memory_mb")


def protofl(*words: Any, cwd: Path, code: int = 0) -> str:
    """Run the command's entry point in a folder -> everything it printed. In this process, which saves its start."""
    printed = io.StringIO()
    before, argv = Path.cwd(), sys.argv
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            os.chdir(cwd)
            sys.argv = ["protofl", *map(str, words)]
            cli.main()
            ended: Any = 0
        except SystemExit as e:
            ended = e.code or 0
        finally:
            os.chdir(before)
            sys.argv = argv
    assert ended == code, printed.getvalue()
    return printed.getvalue()


def spawned(*words: Any, cwd: Path, env: dict[str, str] | None = None, before: tuple[str, ...] = ()) -> str:
    """The same in a process of its own."""
    told = subprocess.run(
        [*before, *PROTOFL, *map(str, words)], cwd=cwd, capture_output=True, text=True, timeout=300,
        env={**os.environ, **(env or {})},
    )  # fmt: skip
    assert told.returncode == 0, told.stdout + told.stderr
    return told.stdout + told.stderr


def runs(results: Path) -> dict[str, list[dict[str, Any]]]:
    """Records by digest, times apart."""
    return {
        p.parent.name: [{k: v for k, v in r.items() if k not in TIMES} for r in read_rows(p)]
        for p in results.glob("*/*/rounds.jsonl")
    }


SMALL = ("--rounds", 2, "--local-epochs", 1, "--workers", 1)


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch, sketched: None) -> None:
    monkeypatch.setattr(cli, "out", Console(width=200))


# ---- the main job ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """protofl bench --methods fedproc,moon --beta 0.5, made small."""
    folder = tmp_path_factory.mktemp("table")
    words = ("bench", "--methods", "fedproc,moon", "--beta", 0.5, *SMALL, "--workers", 2, "--seeds", "0,1")
    return folder, spawned(*words, cwd=folder, env={"COLUMNS": "200"})


def test_bench_prints_stores_and_reports(table: tuple[Path, str]) -> None:
    folder, said = table
    assert "fedproc beta 0.5 seed 1: finished" in said and "FedProc" in said and "MOON" in said
    assert len(runs(folder / "results")) == 4
    (page,) = (folder / "reports").glob("*/README.md")
    assert str(page.with_name("index.html").relative_to(folder)) in said and "results" in said
    text = page.read_text()
    assert "sd over 2 seeds" in text and "picked on test" in text and "--methods fedproc,moon" in text
    for row in runs(folder / "results").values():
        assert f"{100 * row[-1]['gm']:.2f}"  # the table is checked against the records by tests/report
    assert list(page.parent.glob("figures/*.png")) and list(page.parent.glob("tables/*.csv"))


def plain(path: Path) -> None:
    """Fails where a file is not what its name says, or holds what only Python reads."""
    text = "" if path.suffix in (".npz", ".safetensors", ".png", ".pdf") else path.read_text("utf-8")
    if path.suffix in (".json", ".jsonl"):
        for document in text.splitlines() if path.suffix == ".jsonl" else [text]:
            json.loads(document, parse_constant=lambda word: pytest.fail(f"{word} in {path}"))
    elif path.suffix == ".csv":
        told = pd.read_csv(path, dtype=str, keep_default_na=False, comment="#")
        lines = [line for line in text.splitlines(keepends=True) if not line.startswith("#")]
        assert [list(told.columns), *told.to_numpy().tolist()] == list(csv.reader(lines)), path
        typed = pd.read_csv(path, comment="#")
        pd.testing.assert_frame_equal(typed, pd.read_csv(io.StringIO(typed.to_csv(index=False))))
    elif path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as arrays:
            assert all(arrays[name].dtype.kind in "biufU" for name in arrays.files)
    elif path.suffix == ".safetensors":
        assert records.unpack(path.read_bytes())[0]
    elif path.name not in ("done", "lock"):
        assert path.suffix in (".md", ".html", ".tex", ".svg", ".png", ".pdf", ".txt"), path


def test_all_that_goes_to_disk_is_plain(table: tuple[Path, str]) -> None:
    """Strict JSON, CSV that pandas reads back equal, npz and safetensors without pickles; no file of another kind."""
    folder, _ = table
    found = [path for path in folder.rglob("*") if path.is_file()]
    assert {".json", ".jsonl", ".csv", ".npz", ".safetensors", ".html"} <= {path.suffix for path in found}
    for path in found:
        plain(path)


def test_again_reuses_everything(table: tuple[Path, str]) -> None:
    folder, _ = table
    before = runs(folder / "results")
    said = protofl("bench", "--methods", "moon,fedproc", "--beta", 0.5, *SMALL, "--seeds", "1,0", cwd=folder)
    assert "4 of 4 runs are in the store already" in said and "started" not in said
    assert runs(folder / "results") == before


def test_report_and_eval_of_stored_runs(table: tuple[Path, str]) -> None:
    folder, _ = table
    protofl("report", "results", "--out", "page", cwd=folder)
    assert (folder / "page/README.md").stat().st_size > 1000
    for wrong in ("gif", "svg,gif", ""):
        said = protofl("report", "results", "--out", "other", "--formats", wrong, cwd=folder, code=2)
        assert "--formats" in said and not (folder / "other").exists()
    protofl("report", "results", "--out", "other", "--formats", "none", cwd=folder)
    assert {path.suffix for path in (folder / "other/figures").iterdir()} == {".png", ".csv"}
    run = next((folder / "results").glob("*/*/protocol.json")).parent
    assert "DIFFERS" not in protofl("eval", run, cwd=folder)


def test_the_numbers_do_not_hang_on_the_machine(table: tuple[Path, str], tmp_path: Path) -> None:
    """Another hash seed, thread count, worker count, core count, order of methods; each method alone."""
    folder, _ = table
    want = runs(folder / "results")
    one_core = ("taskset", "-c", "0") if shutil.which("taskset") else ()
    for name, before, env, words in (
        ("a", (), {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}, ("--methods", "moon,fedproc", "--workers", 1)),
        ("b", one_core, {"PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "2"}, ("--methods", "moon", "--workers", 2)),
    ):
        words = ("bench", *words, *SMALL, "--seeds", "0,1", "--no-report", "--results", tmp_path / name)
        spawned(*words, cwd=tmp_path, env=env, before=before)
        got = runs(tmp_path / name)
        assert got and all(want[digest] == rows for digest, rows in got.items())


@pytest.mark.slow
def test_killed_from_outside_and_run_again(tmp_path: Path) -> None:
    """kill -9 of the whole process group; no orphan stays, the same command finishes."""
    words = ["bench", "--methods", "fedavg,moon,fednh", "--seeds", "0", "--rounds", "10", "--local-epochs", "1",
             "--no-report", "--workers", "2"]  # fmt: skip
    child = subprocess.Popen([*PROTOFL, *words], cwd=tmp_path, start_new_session=True, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while sum(map(len, runs(tmp_path / "results").values())) < 5 and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(child.pid, 9)  # the parent alone: its workers must notice
    child.wait()
    assert _all_end(child.pid)
    assert "were begun and are resumed" in spawned(*words, cwd=tmp_path)
    assert [len(r) for r in runs(tmp_path / "results").values()] == [10, 10, 10]


def _all_end(group: int) -> bool:
    """Whether no process of the session is left, soon."""
    deadline = time.monotonic() + 10
    while _alive(group) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not _alive(group)


def _alive(group: int) -> list[str]:
    told = subprocess.run(["ps", "-o", "pid=,stat=", "-s", str(group)], capture_output=True, text=True).stdout
    return [line for line in told.splitlines() if "Z" not in line]


@pytest.mark.parametrize(("number", "code"), [pytest.param(2, 130, marks=pytest.mark.slow), (15, 143)])
def test_interrupts_have_their_codes(number: int, code: int, tmp_path: Path) -> None:
    words = ["bench", "--methods", "fedavg,moon", "--seeds", "0", "--rounds", "500", "--no-report", "--workers", "2"]
    heard = [  # a shell's background job starts with SIGINT ignored
        sys.executable, "-c", f"import signal; signal.signal(2, signal.default_int_handler); {PROTOFL[-1]}"
    ]  # fmt: skip
    child = subprocess.Popen([*heard, *words], cwd=tmp_path, start_new_session=True, text=True,
                             stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)  # fmt: skip
    deadline = time.monotonic() + 60
    while sum(map(len, runs(tmp_path / "results").values())) < 5 and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(child.pid, number)
    said = child.communicate(timeout=20)[1]
    assert child.returncode == code and "Traceback" not in said, said
    assert _all_end(child.pid)


# ---- what is on offer ------------------------------------------------------------------------------------------------


def test_help_needs_no_torch() -> None:
    code = (
        "import sys, protofl.cli\nsys.argv = ['protofl', 'bench', '--help']\n"
        "try:\n    protofl.cli.main()\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'numpy', 'pandas', 'matplotlib', 'sklearn'} & set(sys.modules), 'heavy import'"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"}
    )
    assert said.returncode == 0, said.stderr
    for option in (
        "methods", "dataset", "data-dir", "beta", "partition", "partition-seed", "partition-file", "clients", "participation",
        "rounds", "local-epochs", "batch-size", "lr", "net", "seeds", "preset", "set", "suite", "eval-every", "device",
        "workers", "results", "report", "no-report", "dry-run",
    ):  # fmt: skip
        assert f"--{option}" in said.stdout, option


def test_methods_and_datasets(tmp_path: Path) -> None:
    said = protofl("methods", cwd=tmp_path)
    assert all(name in said for name in ("fedavg", "fedprox", "moon", "fedproc", "fednh", "fedcspc"))
    one = protofl("methods", "fedproc", cwd=tmp_path)
    assert all(word in one for word in ("proto_weighting", "uniform | count", "alg. 1", "z_normalize", "official_code"))
    listed = protofl("datasets", "--data-dir", tmp_path, cwd=tmp_path)
    assert "digits" in listed and "tiny-imagenet" in listed and str(tmp_path) in listed


def test_partition_is_shown_drawn_saved_and_used(tmp_path: Path) -> None:
    said = protofl("partition", "--partition", "iid", "--figure", "h.png", "--save", "s.npz", cwd=tmp_path)
    assert "d852e0d7720693bb" in said and "b21427499ecc7f90" in said
    assert (tmp_path / "h.png").read_bytes()[:4] == b"\x89PNG"
    assert "b21427499ecc7f90" in protofl("partition", "--partition-file", "s.npz", cwd=tmp_path)
    words = ("bench", "--methods", "fedavg", "--seeds", 0, *SMALL, "--no-report")
    protofl(*words, "--partition-file", "s.npz", "--results", "a", cwd=tmp_path)
    protofl(*words, "--partition", "iid", "--results", "b", cwd=tmp_path)
    (a,), (b,) = runs(tmp_path / "a").values(), runs(tmp_path / "b").values()
    assert a == b


def test_dry_run_runs_nothing(tmp_path: Path) -> None:
    said = protofl("bench", "--dry-run", "--beta", "0.1,0.5", cwd=tmp_path)
    assert said.count("fedcspc beta 0.1 seed") == 3 and "about" in said
    assert not list(tmp_path.iterdir())


def test_a_method_file_beside_the_others(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        '"""Mine: half of everything."""\nfrom dataclasses import dataclass\nfrom protofl.method import number\n'
        "from protofl.methods.fedprox import FedProx\n\n\n@dataclass(frozen=True)\nclass Mine(FedProx):\n"
        '    strength: float = number(1.0, above=0, why="mine", source="me")\n'
    )
    words = ("bench", "--methods", "fedavg,./mine.py", "--seeds", 0, *SMALL, "--set", "mine.strength=2", "--workers", 2)
    assert "Mine" in protofl(*words, cwd=tmp_path)
    assert len(runs(tmp_path / "results")) == 2
    run = next(p.parent for p in (tmp_path / "results").glob("*/*/protocol.json") if "Mine" in p.read_text())
    assert json.loads((run / "protocol.json").read_text())["method"]["options"]["strength"] == 2.0


def test_a_failing_method_does_not_take_the_others_along(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(
        "from dataclasses import dataclass\nfrom protofl.methods.fedavg import FedAvg\n\n\n@dataclass(frozen=True)\n"
        "class Bad(FedAvg):\n    def aggregate(self, server, shared, private, uploads):\n"
        "        if server.round == 1:\n            raise ValueError('on purpose')\n"
        "        return super().aggregate(server, shared, private, uploads)\n"
    )
    said = protofl("bench", "--methods", "./bad.py,fedavg", "--seeds", 0, *SMALL, "--no-report", cwd=tmp_path, code=1)
    assert "fedavg beta 0.5 seed 0: finished" in said
    assert "on purpose" in said.strip().splitlines()[-1] and "round 1" in said.strip().splitlines()[-1]


# ---- bad input: one line, exit code 2, nothing trained ---------------------------------------------------------------

BAD = [
    (["--methods", "fedprocc"], "did you mean 'fedproc'"),
    (["--methods", "./nothere.py"], "does not exist"),
    (["--dataset", "cifar1"], "did you mean 'cifar1"),
    (["--dataset", "cifar10"], "cifar10"),
    (["--dataset", "digits", "--set", "momentumm=1"], "did you mean 'momentum'"),
    (["--set", "moon.temperatur=1"], "did you mean 'temperature'"),
    (["--set", "fedproc.alpha_schedule=linear"], "linear_T"),
    (["--set", "fedproc.alpha_schedule=gpc_only"], "eval_head=prototype"),
    (["--set", "fedproc.preset=official_code"], "--set z_normalize=true"),
    (["--suite", "s.toml"], "did you mean 'rounds'"),
    (["--suite", "nothere.toml"], "cannot be read"),
    (["--suite", "broken.toml"], "TOML"),
    (["--beta", "0"], "> 0"),
    (["--beta", "0.5,-1"], "> 0"),
    (["--participation", "1.5"], "<= 1"),
    (["--participation", "0"], "> 0"),
    (["--clients", "5000"], "1442"),
    (["--clients", "200"], "1442"),
    (["--net", "simplecnn"], "did you mean 'simple_cnn'"),
    (["--net", "simple_cnn"], "16x16"),
    (["--preset", "moon.cifar"], "did you mean"),
    (["--workers", "0"], "auto"),
    (["--device", "cuda"], "GPU"),
    (["--device", "gpu"], "cpu"),
    (["--data-dir", "nowhere", "--dataset", "cifar10"], "nowhere"),
    (["--dataset", "broken.npz"], "broken.npz"),
    (["--dataset", "./empty"], "empty"),
    (["--partition-file", "nothere.npz"], "nothere.npz"),
    (["--results", "file/inside"], "results"),
    (["--set", "pm_clients=all"], "pm_protocol=refresh"),
    (["--rounds", "many"], "whole number"),
]


@pytest.fixture(scope="module")
def trap(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    (folder / "s.toml").write_text("round = 3\n")
    (folder / "broken.toml").write_text("rounds = [\n")
    (folder / "broken.npz").write_bytes(b"PK\x03\x04 not really")
    (folder / "empty").mkdir()
    (folder / "file").write_text("")
    return folder


@pytest.mark.parametrize(("words", "said"), BAD, ids=lambda v: " ".join(v) if isinstance(v, list) else "")
def test_bad_input(
    words: list[str], said: str, trap: Path, capfd: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """Through the same entry point, in this process: one line, exit code 2, nothing trained or written."""
    from protofl import run

    monkeypatch.chdir(trap)
    monkeypatch.setenv("PROTOFL_DATA", str(trap / "empty"))
    monkeypatch.setattr(sys, "argv", ["protofl", "bench", *words])
    monkeypatch.setattr(run, "play", None)
    before = sorted(trap.rglob("*"))
    with pytest.raises(SystemExit) as caught:
        cli.main()
    told = capfd.readouterr()
    assert caught.value.code == 2, told
    assert said in told.err and told.err.startswith("Error: ") and told.err.count("\n") == 1
    assert sorted(trap.rglob("*")) == before


@pytest.mark.parametrize("name", registry.names())
def test_options_read_from_the_source_are_those_of_the_class(name: str) -> None:
    declared = registry._declared(registry._source(name), name)  # type: ignore[arg-type]
    assert sorted(declared or []) == sorted(options.fields(registry.load(name)))


def test_bad_input_ends_quickly(trap: Path) -> None:
    """Names, data and splits are checked before torch is imported, which takes seconds."""
    wrong = (
        "--methods fedprocc", "--clients 5000", "--dataset cifar1", "--dataset cifar10 --data-dir nowhere",
        "--dataset broken.npz", "--beta 0", "--set lrr=1", "--partition-file nothere.npz",
        "--set moon.temperatur=1", "--set fedcspc.kapa=1", "--workers 0",
    )  # fmt: skip
    code = (
        f"import sys\nfrom protofl import cli\nfor words in {wrong!r}:\n"
        "    sys.argv = ['protofl', 'bench', *words.split()]\n"
        "    try:\n        cli.main()\n        raise AssertionError(words)\n"
        "    except SystemExit as e:\n        assert e.code == 2, words\n"
        "    assert 'torch' not in sys.modules, words"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=trap)
    assert said.returncode == 0, said.stderr


def test_wrong_words_of_the_command_line(tmp_path: Path) -> None:
    assert "No such option" in protofl("bench", "--lrr", "1", cwd=tmp_path, code=2)
    assert "No such command" in protofl("benhc", cwd=tmp_path, code=2)


def test_a_traceback_of_bad_input_is_for_who_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTOFL_DEBUG", "0")
    words = ("bench", "--methods", "fedprocc")
    assert "Traceback" not in protofl(*words, cwd=tmp_path, code=2)
    with pytest.raises(UserError, match="did you mean"):
        protofl("--debug", *words, cwd=tmp_path)


def test_a_fault_of_ours_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its traceback, the command, and that it should be reported."""

    def fault(*_: Any) -> None:
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr("protofl.inputs.check", fault)
    said = protofl("bench", "--seeds", 0, cwd=tmp_path, code=1)
    assert "Traceback" in said and "ZeroDivisionError: on purpose" in said
    assert "Please report" in said and "protofl bench --seeds 0" in said
