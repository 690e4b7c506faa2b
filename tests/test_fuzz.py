"""Random protocols, method x options x data x engine, run to the end or are refused with a reason, in one line."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from PIL import Image

from protofl import cli, options, registry, run, suites
from protofl.data import load
from protofl.errors import UserError
from protofl.experiment import Settings, cells
from protofl.protocol import Protocol

EXAMPLES = int(os.environ.get("PROTOFL_EXAMPLES", "25"))
"""How many protocols are tried: PROTOFL_EXAMPLES=2000 pytest tests/test_fuzz.py."""

QUIETLY = settings(max_examples=4 * EXAMPLES, deadline=None, derandomize="PROTOFL_EXAMPLES" not in os.environ,
                   suppress_health_check=list(HealthCheck))  # fmt: skip

Arrays = dict[str, np.ndarray]


def rows(classes: list[Any], train: int, test: int, **more: Any) -> Arrays:
    """So many rows of 8x8 of every class, the class shows in them."""
    rs = np.random.RandomState(0)
    made: Arrays = {}
    for name, count in (("train", train), ("test", test)):
        index = np.repeat(np.arange(len(classes)), count)
        made[f"x_{name}"] = rs.randint(0, 60, (len(index), 8, 8)).astype(np.uint8) + (index * 190 // len(classes))[
            :, None, None
        ].astype(np.uint8)
        made[f"y_{name}"] = np.array(classes)[index]
    return made | more


def without(made: Arrays, part: str, label: Any) -> Arrays:
    """A class that one part lacks."""
    keep = made[f"y_{part}"] != label
    return {k: v[keep] if k.endswith(part) else v for k, v in made.items()}


DATA: dict[str, Callable[[], Arrays]] = {
    "plain": lambda: rows([0, 1, 2], 14, 4),
    "tiny12": lambda: rows([0, 1, 2], 4, 2),
    "two_each": lambda: rows([0, 1, 2, 3], 2, 1),
    "one_based": lambda: rows([1, 2, 3], 9, 3),
    "gaps": lambda: rows([3, 7, 11], 9, 3),
    "names": lambda: rows(["<b>", "a/b", r"$x_1$", "two words"], 8, 3),
    "classes62": lambda: rows(list(range(62)), 3, 1),
    "one_class": lambda: rows([5], 20, 5),
    "class_only_in_test": lambda: without(rows([0, 1, 2], 10, 4), "train", 2),
    "class_only_in_train": lambda: without(rows([0, 1, 2], 10, 4), "test", 2),
    "constant": lambda: {k: v * 0 if k[0] == "x" else v for k, v in rows([0, 1, 2], 9, 3).items()},
    "floats": lambda: {k: v / 255.0 if k[0] == "x" else v for k, v in rows([0, 1, 2], 9, 3).items()},
    "colour": lambda: {
        k: np.repeat(v[..., None], 3, -1) if k[0] == "x" else v for k, v in rows([0, 1, 2], 9, 3).items()
    },
}

FIELDS: dict[str, list[Any]] = {
    "beta": [0.05, 0.5, 5.0], "clients": [1, 2, 3, 5], "participation": [0.1, 0.5, 1.0], "rounds": [1, 2],
    "local_epochs": [1, 2], "batch_size": [1, 2, 7, 64], "client_lr": [0.01, 0.1, 10.0, 1e30], "momentum": [0.0, 0.9],
    "weight_decay": [0.0, 1e-2], "drop_last": [True, False], "short_client": ["keep_batch", "skip"],
    "partition": ["dir_class", "dir_class_fednh", "dir_client", "iid"], "partition_min_size": [0, 1, 2],
    "on_min_fail": ["error", "accept_last", "repair"], "max_tries": [3], "partition_seed": [0, "run"],
    "model": ["mlp", "mlp_plain", "conv_digits"], "projection_dim": [2, 8], "engine": ["loop", "batched"],
    "precision": ["fp32", "fp64"], "metrics": [["gm"], ["gm", "pm_v", "pm_l"]], "pm_clients": ["active", "all"],
    "pm_protocol": ["as_trained", "refresh"], "z_normalize": [False, True], "classifier_input": ["z", "r"],
    "aux_classifier": [False, True], "optimizer_reset": ["per_round", "never"], "bn_buffers": ["average", "local"],
    "grad_clip_norm": [0.0, 1.0], "server_lr": [1.0, 0.5], "model_weighting": ["data_size", "uniform"],
    "client_sampling": ["independent", "fednh_compat", "moon_compat"], "client_seed": ["per_client", "shared"],
    "eval_every": [1, 2], "crew": [1, 16], "use_projection_head": [True, False], "lr_decay_per_round": [1.0, 0.5],
    "features": [0, 5],
}  # fmt: skip
METHODS = [*registry.names(), "fedavg+cspc", "moon+cspc", "fedprox+cspc"]


@st.composite
def protocols(draw: st.DrawFn) -> dict[str, Any]:
    """What is asked for: a data set, a method with other readings of some options, other values of some fields."""
    method = draw(st.sampled_from(METHODS))
    known = {n: options.option(f).readings for n, f in options.fields(registry.load(method)).items()}
    known = {n: readings for n, readings in known.items() if len(readings) > 1}
    chosen = draw(st.lists(st.sampled_from(sorted(known)), unique=True, max_size=3)) if known else []
    given = {name: draw(st.sampled_from(known[name])) for name in chosen}
    fields = draw(st.lists(st.sampled_from(sorted(FIELDS)), unique=True, max_size=8))
    return {
        "data": draw(st.sampled_from(sorted(DATA))),
        "method": method,
        "options": {**suites.SHORT.get(method, {}), **given},
        "fields": {
            "clients": 3,
            "partition_min_size": 0,
            **{name: draw(st.sampled_from(FIELDS[name])) for name in fields},
        },
        "seed": draw(st.integers(0, 3)),
    }


def strict(path: Path) -> list[dict[str, Any]]:
    """The rows of a run; NaN and infinity are no JSON."""

    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} in {path}")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text("utf-8").splitlines()]


@settings(max_examples=EXAMPLES, deadline=None, derandomize="PROTOFL_EXAMPLES" not in os.environ,
          suppress_health_check=list(HealthCheck))  # fmt: skip
@given(asked=protocols())
def test_random_protocols_run_or_are_refused(asked: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as place:
        np.savez(Path(place) / "data.npz", **DATA[asked["data"]]())
        wanted = Settings(methods=[asked["method"]], seeds=[asked["seed"]])
        try:
            document = {"preset": "digits.digits", "rounds": 1, "local_epochs": 1, "dataset": f"{place}/data.npz"}
            wanted.take_document({**document, **asked["fields"]}, "fuzz")
            for name, value in asked["options"].items():
                wanted.take_option(asked["method"], name, value)
            (cell,) = cells(wanted)
            ready = run.prepare(cell)
        except UserError as refusal:
            assert str(refusal) and "\n" not in str(refusal)
            note(f"refused: {refusal}")
            return
        summary = run.play(ready, Path(place) / "results", lambda event: None)
        assert summary["status"] in ("finished", "diverged"), summary
        told = strict(Path(place) / "results" / ready.folder / "rounds.jsonl")
        strict_rows = [r for r in told if r["round"] >= 0]
        if summary["status"] == "finished":
            assert [r["round"] for r in strict_rows] == list(range(ready.protocol.rounds))
        for row in strict_rows:
            for name, value in row.items():
                if name in ("gm", "pm_v", "pm_l", "pm_uniform") and value is not None:
                    assert 0 <= value <= 1
                if name.startswith("bytes_"):
                    assert isinstance(value, int) and value >= 0
            assert all(v is None or math.isfinite(v) for v in row.get("terms", {}).values())


def test_what_is_varied_is_of_the_protocol() -> None:
    assert set(FIELDS) <= set(options.fields(Protocol))


# ---- suite files ----------------------------------------------------------------------------------------------------

KEYS = ["title", "about", "methods", "preset", "seeds", "beta", "rounds", "lr", "net", "over", "method", "part", "paper",
        "laptop", "smoke", "unknown", "ablate", "choices", "pairs", "cut", "skip", "metrics", "clients", "nosuch"]  # fmt: skip
scalars = st.one_of(st.booleans(), st.integers(-3, 10**9), st.floats(allow_nan=True), st.text("ab<$\n\"'é", max_size=5),
                    st.sampled_from(["fedavg", "moon", "all", "digits.digits", "mlp"]))  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*KEYS, "fedavg", "mu"]), inner, max_size=3)
    ),
    max_leaves=6,
)


def toml(value: Any) -> str:
    """A value as TOML, tables inline."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {toml(v)}" for k, v in value.items()) + "}"
    return str(value)


@QUIETLY
@given(
    document=st.dictionaries(st.sampled_from(KEYS), values, max_size=6), scale=st.sampled_from([None, *suites.SCALES])
)
def test_random_suite_files_are_read_or_refused(document: dict[str, Any], scale: str | None) -> None:
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "s.toml"
        path.write_text("".join(f"{k} = {toml(v)}\n" for k, v in document.items()), "utf-8")
        try:
            for part in suites.read(str(path), scale).parts:
                cells(part)
        except UserError as refusal:
            assert str(refusal)


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b"\x00" * 50, b"rounds = 1\nrounds = 2", b"[part]\n[[part]]", b"a" * 10000]
)
def test_files_that_are_no_suite(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_bytes(content)
    try:
        cells(suites.read(str(tmp_path / "s.toml")).parts[0])
        assert content == b""
    except UserError as refusal:
        assert "\n" not in str(refusal)


# ---- data -----------------------------------------------------------------------------------------------------------

KINDS = ["uint8", "int64", "uint16", "float32", "float64", "float16", "bool", "<U3", "S2", "complex64", "datetime64[s]"]


@st.composite
def arrays(draw: st.DrawFn) -> Arrays:
    """Four arrays of any type and shape, most of them nearly right; some rows are not finite, some names wrong."""
    kind, size = (
        draw(st.sampled_from(KINDS)),
        draw(st.sampled_from([(), (6,), (4, 4), (4, 4, 3), (3, 4, 4), (0,), (2, 2, 2, 2)])),
    )
    high, rs = draw(st.sampled_from([1, 4, 255, 60000])), np.random.RandomState(draw(st.integers(0, 99)))
    made: Arrays = {}
    for part in ("train", "test"):
        n = draw(st.sampled_from([0, 1, 6, 9]))
        x = rs.randint(0, high + 1, (n, *size))
        made[f"x_{part}"] = x.astype(kind) if kind[0] != "d" else x.astype("int64").astype(kind)
        labels = draw(st.sampled_from(["int64", "float64", "<U2", "S1", "bool"]))
        made[f"y_{part}"] = rs.randint(0, draw(st.sampled_from([1, 2, 3])), n).astype(labels)
    if made["x_train"].dtype.kind == "f" and made["x_train"].size and draw(st.booleans()):
        made["x_train"].flat[0] = draw(st.sampled_from([np.nan, np.inf, -1.0]))
    for name in draw(st.lists(st.sampled_from(sorted(made)), max_size=1)):
        made["X" if draw(st.booleans()) else "classes"] = made.pop(name)
    return made


def read_or_refused(path: Path, place: str) -> None:
    """A set that is read can be split; one that cannot be read is refused in one line that says where."""
    try:
        data = load(str(path))
    except UserError as refusal:
        assert "\n" not in str(refusal) and place in str(refusal), refusal
        note(f"refused: {refusal}")
        return
    assert data.x_train.ndim == data.x_test.ndim == 4 and data.x_train.dtype in (np.uint8, np.float32)
    assert len(data.x_train) == len(data.y_train) and np.isfinite(data.x_train).all()
    assert set(np.unique(data.y_train)) == set(range(len(data.classes))) and set(data.y_test) <= set(data.y_train)


@QUIETLY
@given(made=arrays(), data=st.data())
def test_random_arrays_are_read_or_refused(made: Arrays, data: st.DataObject) -> None:
    """Also where the file is cut, or bytes of it are changed."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "data.npz"
        np.savez(path, **made)  # type: ignore[arg-type]
        harm(path, data)
        read_or_refused(path, place)


def harm(path: Path, data: st.DataObject) -> None:
    """Cut the file, change a few of its bytes, or leave it."""
    content = bytearray(path.read_bytes())
    what = data.draw(st.sampled_from(["whole", "whole", "cut", "bytes", "empty"]))
    if what == "cut":
        content = content[: data.draw(st.integers(0, len(content)))]
    elif what == "empty":
        content.clear()
    elif what == "bytes":
        for at, value in data.draw(
            st.lists(st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255)), max_size=4)
        ):
            content[at] = value
    path.write_bytes(bytes(content))


FORMATS = {
    "RGB": ["png", "jpg", "bmp", "gif"], "L": ["png", "jpg", "bmp"], "P": ["png", "bmp", "gif"], "1": ["png", "bmp"],
    "CMYK": ["jpg", "tif"], "RGBA": ["png", "webp"], "LA": ["png"], "I;16": ["png", "tif"], "I": ["tif"], "F": ["tif"],
}  # fmt: skip
CLASSES = ["a", "b", "<i>", "two words", "ü", "$x$", ".hidden", "-"]


@st.composite
def pictures(draw: st.DrawFn) -> tuple[Image.Image, str]:
    """An image of any mode, few of them of another size, and the suffix of a format that has this mode."""
    mode = draw(st.sampled_from(sorted(FORMATS)))
    plain = Image.new("L", draw(st.sampled_from([(5, 4)] * 9 + [(3, 3)])), draw(st.integers(0, 255)))
    return (plain.convert("I") if mode == "I;16" else plain).convert(mode), draw(st.sampled_from(FORMATS[mode]))


@QUIETLY
@given(data=st.data(), names=st.lists(st.sampled_from(CLASSES), min_size=1, max_size=3, unique=True))
def test_random_folders_of_images_are_read_or_refused(names: list[str], data: st.DataObject) -> None:
    """Some damaged or wrongly named, in classes with odd names."""
    with tempfile.TemporaryDirectory() as place:
        for part in ("train", data.draw(st.sampled_from(["test", "test", "val", "tset"]))):
            for name in names:
                folder = Path(place) / part / name
                folder.mkdir(parents=True)
                for k in range(data.draw(st.integers(0, 2))):
                    image, suffix = data.draw(pictures())
                    path = folder / f"{k}.{suffix}"
                    image.save(path)
                    if data.draw(st.integers(0, 5)) == 0:
                        harm(path, data)
                    if data.draw(st.integers(0, 9)) == 0:
                        path.rename(path.with_suffix(data.draw(st.sampled_from([".png", ".txt", "", ".JPG"]))))
        read_or_refused(Path(place), place)


# ---- the command line ------------------------------------------------------------------------------------------------

OPTIONS = {
    "--methods": ["fedavg", "moon,fedproc", "all", "moom", "./x.py", "fedavg,fedavg", "fedavg+cspc", ",", "<b>"],
    "--dataset": ["digits", "cifar10", "nosuch", "./nosuch.npz", "/"], "--beta": ["0.5", "0.1,1", "0", "-1", "nan", "x", "1e400"],
    "--partition": ["iid", "dir_client", "dirichlet", "file", "dir"], "--partition-seed": ["0", "run", "-1", "1.5"],
    "--clients": ["3", "0", "-2", "9999", "2.5", "١"], "--participation": ["0.5", "1", "0", "1.1", "inf"],
    "--rounds": ["1", "0", "x", "1e3"], "--local-epochs": ["1", "-1"],
    "--batch-size": ["8", "0"], "--lr": ["0.1", "0", "nan", "-1"],
    "--net": ["mlp", "simple_cnn", "resnet18_gn2", "nosuch"], "--seeds": ["0", "0,1", "0,0", "-1", "4294967296", "a"],
    "--preset": ["digits.digits", "moon.cifar10", "nosuch", ""], "--suite": ["smoke", "nosuch", "/dev/null"],
    "--scale": ["paper", "smoke", "big"], "--device": ["cpu", "cuda", "tpu"], "--workers": ["1", "auto", "0", "x"],
    "--set": ["momentum=0.5", "moon.mu=1", "moon.mu=x", "nosuch=1", "=", "precision=fp16",
              "fedproc.preset=official_code", "a.b.c=1"],
}  # fmt: skip


@st.composite
def words(draw: st.DrawFn) -> list[str]:
    """Options that exist with values good and bad, now and then one that does not exist."""
    names = draw(st.lists(st.sampled_from(sorted(OPTIONS)), unique=True, max_size=4))
    out = [
        w for name in names for w in (name, draw(st.sampled_from(OPTIONS[name]) | st.text("a0,=.-\n\x00é", max_size=4)))
    ]
    return out + draw(st.sampled_from([[]] * 6 + [["--nosuch"], ["stray"], ["--beta"]]))


@QUIETLY
@given(
    asked=words(),
    command=st.sampled_from([["bench"], ["bench"], ["sweep", "--over", "rounds=1,2"], ["ablate", "fedavg"]]),
)
def test_random_commands_are_priced_or_refused(asked: list[str], command: list[str]) -> None:
    """Exit code 0 or 2, never a traceback; what is refused is refused in one line, or by the usage of the command."""
    with tempfile.TemporaryDirectory() as place:
        printed, before, argv, code = io.StringIO(), Path.cwd(), sys.argv, 0
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            try:
                os.chdir(place)
                sys.argv = ["protofl", *command, *asked, "--dry-run"]
                cli.main()
            except SystemExit as end:
                code = int(end.code or 0)
            finally:
                os.chdir(before)
                sys.argv = argv
        said = printed.getvalue()
        assert code in (0, 2) and "Traceback" not in said, said
        assert not list(Path(place).iterdir())
        if code == 2:
            assert (said.startswith("Error: ") and said.count("\n") == 1) or "Usage: " in said, said
