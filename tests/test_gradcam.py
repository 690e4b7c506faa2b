"""Grad-CAM equals its definition, and is drawn from what a run has stored."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.random import RandomState
from test_run import cell
from toy import toy

from protofl import nets
from protofl.errors import UserError
from protofl.method import Model
from protofl.nets.base import affine
from protofl.report import groups, looks, runs
from protofl.report.content import Report
from protofl.run import play, prepare
from protofl.tree import Tree

pytest.importorskip("captum", reason="Grad-CAM needs captum: pip install 'protofl[gradcam]'")
from protofl import gradcam


def by_definition(net: nets.Net, w: Tree, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Selvaraju et al., equations 1 and 2: ReLU of the channels' sum, weighted by their mean gradients."""
    a = F.relu(F.max_pool2d(F.conv2d(x, w["encoder.conv1.weight"], w["encoder.conv1.bias"], padding=1), 2))
    a = F.conv2d(a, w["encoder.conv2.weight"], w["encoder.conv2.bias"], padding=1).detach().requires_grad_()
    h = F.relu(F.max_pool2d(a, 2)).flatten(1)
    r = F.relu(affine(h, w["encoder.fc1.weight"], w["encoder.fc1.bias"]))
    net.classify(w, r, net.project(w, r)).gather(1, y[:, None]).sum().backward()
    assert a.grad is not None
    return F.relu((a.grad.mean((2, 3), keepdim=True) * a).sum(1)).detach()


def test_it_is_what_its_paper_defines() -> None:
    net = nets.build("conv_digits", classes=10, shape=(8, 8, 1))
    w = net.init(RandomState(0))
    x, y = torch.from_numpy(RandomState(1).normal(size=(5, 1, 8, 8)).astype("float32")), torch.tensor([3, 1, 4, 1, 5])
    model = Model(w, lambda net, w, x: net(w, x))
    found, predicted = gradcam.maps(model, net, x, y)
    want = by_definition(net, w, x, y)
    assert found.shape == (5, 4, 4) and found.max() > 0
    assert torch.allclose(found, want, atol=1e-6) and (predicted == net(w, x).argmax(1)).all()


def test_a_net_without_convolutions_is_refused() -> None:
    net = nets.build("mlp", classes=10, shape=(8, 8, 1))
    model = Model(net.init(RandomState(0)), lambda net, w, x: net(w, x))
    with pytest.raises(UserError, match="mlp has no convolution"):
        gradcam.maps(model, net, torch.zeros(1, 1, 8, 8), torch.tensor([0]))


def test_in_double_precision_with_normalisation() -> None:
    fed = toy("fedavg", rounds=1).run()
    model, x = fed.global_model(), fed.task.pipeline.test(fed.task.x[:6])
    assert model is not None
    found, _ = gradcam.maps(model, fed.task.net, x, torch.zeros(6, dtype=torch.long))
    assert len(found) == 6 and torch.isfinite(found).all() and (found >= 0).all()


def test_stored_and_drawn(tmp_path: Path) -> None:
    for name in ("fedavg", "fedcspc"):
        ready = prepare(cell(name, model="conv_digits", rounds=2, local_epochs=1))
        play(ready, tmp_path, lambda event: None)
        folder = tmp_path / ready.folder
        before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        assert gradcam.store(folder, [0, 100, 354], None) == ""
        assert {p: p.read_bytes() for p in before} == before
        with pytest.raises(UserError, match="test images 0 to 354"):
            gradcam.store(folder, [355], None)
        with np.load(folder / "gradcam.npz") as file:
            assert file["labels"].tolist() == [0, 2, 9] and file["images"].shape == (3, 8, 8, 1)
            assert file["maps"].min() >= 0 and file["images"].max() == 1 and file["round"] == 1
    out = tmp_path / "out"
    out.mkdir()
    (setting,) = groups.settings(runs([tmp_path]))
    blocks = looks.gradcam(Report(setting.runs, out), setting)
    assert len(blocks) == 2 and (out / "figures" / "gradcam.png").stat().st_size > 10_000
    (folder / "gradcam.npz").write_bytes(b"PK not really")
    assert looks.read(runs([folder])[0]) is None
