"""Long trials, apart from the suite: pytest -m soak. For PROTOFL_SOAK seconds (default 3600) processes are killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_cli import PROTOFL, _all_end, runs, spawned

from protofl import registry, suites
from protofl.records import read_rows

pytestmark = pytest.mark.soak

SECONDS = float(os.environ.get("PROTOFL_SOAK", "3600"))
ROUNDS = 6
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


def words(methods: list[str], workers: int, engine: str) -> list[str]:
    """A small bench."""
    out = ["bench", "--methods", ",".join(methods), "--seeds", "0", "--rounds", str(ROUNDS), "--local-epochs", "1", "--no-report",
           "--workers", str(workers), "--set", f"engine={engine}", "--participation", "0.6"]  # fmt: skip
    short = {m: given for m, given in suites.SHORT.items() if m in methods and m != "solo"}
    return out + [w for m, given in short.items() for k, v in given.items() for w in ("--set", f"{m}.{k}={v}")]


def started(command: list[str], cwd: Path) -> subprocess.Popen[str]:
    """The command in a session of its own, SIGINT heard."""
    heard = f"import signal; signal.signal(2, signal.default_int_handler); {PROTOFL[-1]}"
    return subprocess.Popen([sys.executable, "-c", heard, *command], cwd=cwd, start_new_session=True, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip


def children(group: int) -> list[int]:
    """Processes of a session but its leader, the busiest first."""
    told = subprocess.run(["ps", "-o", "pid=,times=", "-s", str(group)], capture_output=True, text=True).stdout
    found = sorted(
        (int(times), int(pid)) for pid, times in (line.split() for line in told.splitlines()) if int(pid) != group
    )
    return [pid for _, pid in reversed(found)]


def damage(results: Path, rs: random.Random) -> str:
    """Harm the newest state of a run, cut its last row, or leave a stray file."""
    folders = sorted(p.parent for p in results.glob("*/*/rounds.jsonl"))
    if not folders:
        return "nothing"
    folder = rs.choice(folders)
    states = sorted(folder.glob("state/*.safetensors"), key=lambda p: p.stat().st_mtime)
    what = rs.choice(["cut", "flip", "stray", "row", "tmp"])
    if what in ("cut", "flip") and states:
        content = bytearray(states[-1].read_bytes())
        if what == "cut":
            content = content[: len(content) // 2]
        elif content:
            content[rs.randrange(len(content))] ^= 1 << rs.randrange(8)
        states[-1].write_bytes(bytes(content))
    elif what == "row":
        with open(folder / "rounds.jsonl", "a", encoding="utf-8") as file:
            file.write('{"round": 99, "gm"')
    else:
        (folder / ("state/round-99999.bak" if what == "stray" else ".rounds.jsonl.tmp")).write_bytes(b"\x00" * 9)
    return what


def prefix(rows: list[dict[str, Any]], whole: list[dict[str, Any]]) -> bool:
    return rows == whole[: len(rows)]


def test_killed_again_and_again(tmp_path: Path) -> None:
    """kill -9 of parent or worker, SIGTERM, SIGINT at random moments, states cut and flipped between: what was finished stays,
    no process stays, and what comes out at last equals a run that nobody disturbed."""
    rs = random.Random(int(time.time()))
    deadline, counts = time.monotonic() + SECONDS, Counter[str]()
    straight: dict[tuple[str, ...], dict[str, Any]] = {}
    while time.monotonic() < deadline:
        methods = sorted(rs.sample(registry.names(), 2))
        engine, workers = rs.choice(["loop", "batched"]), rs.choice([1, 2])
        key = (engine, *methods)
        if key not in straight:
            place = tmp_path / f"straight-{len(straight)}"
            place.mkdir()
            spawned(*words(methods, 1, engine), cwd=place)
            straight[key] = runs(place / "results")
        place = tmp_path / f"killed-{counts['cells']}"
        place.mkdir()
        counts["cells"] += 1
        for _ in range(rs.randint(2, 6)):
            child = started(words(methods, workers, engine), place)
            time.sleep(rs.uniform(0.5, 7))
            number, below = rs.choice(SIGNALS), children(child.pid)
            at_worker = number == signal.SIGKILL and below and rs.random() < 0.4
            try:
                os.kill(rs.choice(below) if at_worker else child.pid, number)
            except ProcessLookupError:
                counts["too late"] += 1
            said = child.communicate(timeout=120)[0]
            counts[f"{number.name} {'worker' if at_worker else 'parent'}"] += 1
            assert _all_end(child.pid), "a process stayed"
            if not at_worker and child.returncode not in (0, -9):  # -15: before there was a handler; 143 to a shell
                assert child.returncode in (-number, 128 + number), (child.returncode, said)
            assert "Traceback" not in said or number == signal.SIGINT, said
            for digest, rows in runs(place / "results").items():
                assert prefix(rows, straight[key][digest]), (digest, said)
            counts[f"damage {damage(place / 'results', rs)}"] += rs.random() < 2
        spawned(*words(methods, workers, engine), cwd=place)
        assert runs(place / "results") == straight[key]
    print(f"\n{sum(n for k, n in counts.items() if k.startswith('SIG'))} kills, nothing lost: {dict(counts)}")
    assert counts["cells"]


# ---- long runs ------------------------------------------------------------------------------------------------------

LONG = [
    ("moon", ["--rounds", "2000", "--local-epochs", "1", "--eval-every", "50"]),
    ("scaffold", ["--rounds", "300", "--local-epochs", "1", "--clients", "200", "--participation", "0.2", "--set",
                  "partition_min_size=1", "--set", "on_min_fail=repair"]),
]  # fmt: skip


@pytest.mark.parametrize(("method", "more"), LONG, ids=lambda v: v if isinstance(v, str) else "")
def test_memory_and_open_files_do_not_grow(method: str, more: list[str], tmp_path: Path) -> None:
    """Over the second half: less than 0.02 MB a round, no file more than before; with at most 256 open files."""
    limited = ["bash", "-c", 'ulimit -n 256; exec "$@"', "-", *PROTOFL]
    command = [*limited, "bench", "--methods", method, "--seeds", "0", "--workers", "1", "--no-report", *more]
    child = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL)
    seen: list[tuple[int, float, int]] = []
    while child.poll() is None:
        rounds = [len(r) for r in runs(tmp_path / "results").values()]
        try:
            status = Path(f"/proc/{child.pid}/status").read_text()
            held = next(float(line.split()[1]) / 1000 for line in status.splitlines() if line.startswith("VmRSS"))
            files = len(os.listdir(f"/proc/{child.pid}/fd"))
            seen.append((sum(rounds), held, files))
        except (OSError, StopIteration):
            break
        time.sleep(1)
    assert child.wait() == 0
    total = int(more[1])
    half = [one for one in seen if one[0] >= total / 2]
    slope = np.polyfit([t for t, _, _ in half], [mb for _, mb, _ in half], 1)[0]
    assert slope < 0.02, f"{slope:.3f} MB a round"
    assert max(files for *_, files in half) <= max(files for t, _, files in seen if t <= total / 2) + 2
    (rows,) = [read_rows(p) for p in (tmp_path / "results").glob("*/*/rounds.jsonl")]
    assert [r["round"] for r in rows if r["round"] >= 0] == list(range(total))
    print(
        f"\n{method}: {total} rounds, {slope:.4f} MB a round, {half[-1][1]:.0f} MB, {half[-1][2]} open files at the end"
    )
