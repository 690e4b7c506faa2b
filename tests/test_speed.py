"""The speed harness: other suites get the clients, samples, steps and start that protofl has, and a missing one is said."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from protofl import nets, run

SPEED = Path(__file__).parent.parent / "benchmarks" / "speed"


def speed(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SPEED / words[0]), *words[1:]], capture_output=True, text=True)


@pytest.fixture(scope="module")
def common() -> Iterator[Any]:
    """What the suites' scripts share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SPEED / "suites"))
        yield importlib.import_module("task")


@pytest.fixture(scope="module")
def digits(common: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """W3, exported and read."""
    path = tmp_path_factory.mktemp("speed") / "W3.npz"
    done = speed("export.py", "W3", str(path))
    assert done.returncode == 0, done.stderr
    return common.load(str(path))


def test_a_task_is_the_cell(common: Any, digits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SPEED))
    workloads = importlib.import_module("workloads")
    ready = run.prepare(workloads.cells(workloads.WORKLOADS["W3"], "fedavg", None))
    ours, test = run.task(ready)
    place = {v.numpy().tobytes(): i for i, v in enumerate(test.pipeline.test(torch.from_numpy(ready.data.x_train)))}
    assert len(place) == len(ours.y)  # a sample is known by its content
    clients = {tuple(sorted(rows.tolist())) for rows in ready.split.indices}
    for i in range(len(digits.sizes)):
        x, y = digits.client(i)
        rows = [place[v.numpy().tobytes()] for v in x]
        assert tuple(sorted(rows)) in clients
        assert ours.y[rows].equal(y)
    assert digits.sizes == sorted(ours.sizes, reverse=True)
    assert digits.trained == 5 * len(ours.y)
    model, logits = digits.model(), ready.net(ours.initial, test.pipeline.test(test.x))
    assert torch.allclose(model(digits.x_test), logits, atol=1e-6)
    assert digits.accuracy(model) == pytest.approx((logits.argmax(1) == test.y).double().mean().item())
    common.train(digits, model, *digits.client(0))
    assert all(p.equal(w) for p, w in zip(digits.model().parameters(), ours.initial.values()))  # training has a copy


@pytest.mark.parametrize("name", ["simple_cnn", "cnn_fednh", "mlp_plain"])
def test_the_bare_networks_are_ours(common: Any, name: str) -> None:
    shape = (8, 8, 1) if name == "mlp_plain" else (32, 32, 3)
    net, model = nets.build(name, classes=10, shape=shape), common.NETS[name]()
    weights = net.init(np.random.RandomState(0))
    model.load_state_dict(dict(zip(model.state_dict(), weights.values(), strict=True)))
    x = torch.rand(3, shape[2], *shape[:2])
    assert torch.allclose(model(x), net(weights, x), atol=1e-5)


def test_batches(common: Any) -> None:
    x, y = torch.arange(5.0 * 32 * 32).view(5, 1, 32, 32).expand(5, 3, 32, 32), torch.arange(5)
    steps = SimpleNamespace(epochs=1, batch=2, augmented=True, drop_last=True)
    seen = list(common.batches(steps, common.padded(x, True), y))
    assert [len(labels) for _, labels in seen] == [2, 2]
    windows = F.pad(x, (4, 4, 4, 4), mode="reflect").unfold(2, 32, 1).unfold(3, 32, 1)[:, 0].flatten(1, 2)
    for images, labels in seen:
        for image, label in zip(images, labels):
            assert any(view.eq(windows[label]).all((1, 2)).any() for view in (image[0], image[0].flip(1)))
            assert image[0].equal(image[2])
    steps.augmented = steps.drop_last = False
    seen = list(common.batches(steps, common.padded(x, False), y))
    assert torch.cat([labels for _, labels in seen]).sort().values.equal(y)
    assert all(images.equal(x[labels]) for images, labels in seen)


def test_every_optimisation_can_be_taken_out() -> None:
    """Each of its places is in the source; a process of its own, since it is left without them."""
    told = "from without import PARTS, take_out\nfor name in PARTS:\n    take_out(name)\nprint(len(PARTS))"
    done = subprocess.run([sys.executable, "-c", told], cwd=SPEED, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0


@pytest.mark.parametrize(
    ("env", "why"),
    [
        ("pfl=/no/python", "no interpreter is there"),
        ("pfl", "no interpreter"),
        ("ray=python", "NAME is one of flower,"),
    ],
)
def test_an_interpreter_is_looked_for(env: str, why: str) -> None:
    done = speed("run.py", "suites", "W3", "--env", env)
    assert done.returncode == 2
    assert why in done.stderr


def test_suites_without_an_interpreter_are_named() -> None:
    done = speed("run.py", "suites", "W3", "--repeat", "1", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    bare, ours = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith(("| bare", "| protofl"))]
    assert bare[-1] == "- |"
    assert ours[-1].endswith("% |")
    assert done.stdout.endswith("Left out, for want of an --env: flower, blazefl, pfl, fedlab.\n")
