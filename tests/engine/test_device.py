"""Another device than the CPU: nothing is left behind, no step sends or waits, and the numbers are the same.

A GPU that is not there (elsewhere.py) computes as the CPU does, so that all must be equal. On a real GPU, where there is
one, sums run in another order: 1e-9 in float64, and in float32 as much as three rounds make of a last bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from elsewhere import DEVICE, Away, elsewhere, fetched
from harness import ENGINES
from torch.utils import _pytree as pytree
from toy import build, everything, gap, outputs, toy

from protofl import records, registry, run
from protofl.data.augment import Pipeline
from protofl.engine import graphs
from protofl.experiment import Settings, cells
from protofl.rng import train

QUICK = {"fedcspc": {"calib_epochs": 3}, "solo": {"epochs": 2}, "creff": {"match_epochs": 3, "retrain_epochs": 2}}
LONGER = {
    "fedcspc": {"calib_epochs": 4},
    "creff": {"match_epochs": 4, "retrain_epochs": 3},
    "fedrep": {"head_epochs": 2},
}
"""More steps of a method's own."""
SHORT: dict[str, Any] = {"rounds": 2, "local_epochs": 1, "batch_size": 16}
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
SELDOM = {"loop": pytest.mark.slow, "batched": ()}
engines = pytest.mark.parametrize("engine", [pytest.param(e, marks=SELDOM[e]) for e in ENGINES])


@engines
@pytest.mark.parametrize("name", registry.names())
def test_a_run_elsewhere_equals_one_here(name: str, engine: str) -> None:
    here = toy(build(name, QUICK.get(name)), engine=engine, **SHORT).run()
    with elsewhere():
        there = toy(build(name, QUICK.get(name)), engine=engine, device=DEVICE, **SHORT).run()
        left, told = everything(there), outputs(there)
        tensors = [v for v in pytree.tree_leaves(left) if isinstance(v, torch.Tensor)]
        assert tensors and all(isinstance(v, Away) or not v.dim() for v in tensors)
    assert gap(fetched(left), everything(here)) == 0
    assert gap(fetched(told), outputs(here)) == 0
    assert there.bytes == here.bytes
    assert there.terms == here.terms


def crossings(method: Any, engine: str, **fields: Any) -> Counter[tuple[str, str, str]]:
    with elsewhere() as traffic:
        toy(method, engine=engine, device=DEVICE, **{**SHORT, "rounds": 1, **fields}).run()
    return Counter(traffic.seen)


@engines
@pytest.mark.parametrize("name", registry.names())
def test_no_step_sends_or_waits(name: str, engine: str) -> None:
    few = crossings(build(name, QUICK.get(name)), engine)
    assert few  # what is sent once is seen
    assert crossings(build(name, QUICK.get(name)), engine, local_epochs=2) == few
    if name in LONGER:
        assert crossings(build(name, LONGER[name]), engine) == few


def test_sending_in_a_step_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    few = crossings("fedavg", "batched")
    plain = Pipeline.test

    def fetching(pipeline: Pipeline, x: torch.Tensor) -> torch.Tensor:
        return plain(pipeline, x.cpu().to(x.device))

    monkeypatch.setattr(Pipeline, "test", fetching)
    assert sum(crossings("fedavg", "batched").values()) > sum(few.values())
    assert crossings("fedavg", "batched", local_epochs=2) != crossings("fedavg", "batched")


@pytest.mark.parametrize("augment", [("hflip",), ("rotate15",), ("zero_pad4", "crop32", "hflip"),
                                     ("reflect_pad4", "crop32", "hflip", "rotate15")], ids=str)  # fmt: skip
def test_images_are_augmented_where_they_are(augment: tuple[str, ...]) -> None:
    pipeline = Pipeline(augment, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4), 255, (32, 32, 3))
    x = torch.randint(0, 256, (20, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    drawn = pipeline.draw(train(0, 0, 0), 20)
    assert drawn is not None
    with elsewhere():
        there, far, numbers = pipeline.on(DEVICE), x.to(DEVICE), drawn.to(DEVICE)
        with elsewhere() as traffic:
            out = there.train(far, numbers)
    assert not traffic.seen
    assert fetched(out).equal(pipeline.train(x, drawn))


def test_a_mixture_is_refused() -> None:
    with elsewhere():
        x = torch.ones(3, device=DEVICE)
        assert (x + torch.tensor(1.0)).device.type == DEVICE
        with pytest.raises(RuntimeError, match="two devices"):
            x + torch.ones(3)


@pytest.mark.parametrize("name", ["moon", "fedproc", "fedcspc"])
def test_a_run_elsewhere_is_stored_and_resumed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what is evaluated, stored, and read again."""
    monkeypatch.setattr(run, "_check_device", lambda device, here: None)
    quick = {"fedcspc.calib_epochs": "2"} if name == "fedcspc" else {}

    def ready(device: str) -> run.Prepared:
        s = Settings(methods=[name])
        given = {"seeds": "0", "rounds": "3", "local_epochs": "1", "participation": "0.5", "engine": "batched", **quick}
        for field, value in given.items():
            s.take_text(f"{field}={value}")
        s.take("device", device, "test")
        (asked,) = cells(s)
        return run.prepare(asked)

    def rows(one: run.Prepared, folder: Path) -> list[dict[str, Any]]:
        told = records.read_rows(folder / one.folder / "rounds.jsonl")
        return [{k: v for k, v in row.items() if k not in ("seconds", "memory_mb")} for row in told]

    def stop(event: Any) -> None:
        if event.get("round") == 1:
            raise KeyboardInterrupt

    here, there = ready("cpu"), ready(DEVICE)
    run.play(here, tmp_path / "here", lambda event: None)
    with elsewhere():
        with pytest.raises(KeyboardInterrupt):
            run.play(there, tmp_path / "there", stop)
        assert run.play(there, tmp_path / "there", lambda event: None)["status"] == "finished"
    assert rows(there, tmp_path / "there") == rows(here, tmp_path / "here")


@pytest.fixture
def prepared() -> Iterator[None]:
    """The process as a run has it: deterministic, without short cuts in float32."""
    before = torch.get_deterministic_debug_mode()
    run.set_up_process()
    graphs.recorder.cache_clear()
    yield
    torch.set_deterministic_debug_mode(before)


@gpu
@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize("engine", [*ENGINES, "graphs"])
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("name", registry.names())
def test_a_gpu_agrees(name: str, precision: str, engine: str) -> None:
    alone = engine == "graphs"
    fields = {**SHORT, "precision": precision, **({"local_epochs": 5} if alone else {})}
    ways = (("loop" if alone else engine, "cpu"), (engine, "cuda"))
    runs = [toy(build(name, QUICK.get(name)), engine=e, device=d, **fields).run() for e, d in ways]
    assert not alone or graphs.recorder(torch.device("cuda")).latest is not None
    here, there = ([everything(r), outputs(r)] for r in runs)
    home = pytree.tree_map(lambda v: v.cpu() if isinstance(v, torch.Tensor) else v, there)
    assert gap(home, here) < (1e-9 if precision == "fp64" else 1e-2)
    assert runs[0].bytes == runs[1].bytes
