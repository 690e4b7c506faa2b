"""Many clients in one call (weights stacked, batches padded) against one client after the other."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from numpy.random import RandomState
from torch import Tensor
from torch.func import grad_and_value, vmap

from protofl.nets import Mode, Net, build
from protofl.tree import Tree, stack

SIZES = (4, 2, 1)  # real rows of each client

# Images are large enough for 2x2 pixels to reach the last stage of a ResNet: batch normalisation of one or
# two values per channel has gradients of 1e5, in which any difference in the order of sums can be seen.


class Batch(NamedTuple):
    x: Tensor
    y: Tensor
    mask: Tensor

    def mean(self, values: Tensor) -> Tensor:
        return (values * self.mask).sum() / self.mask.sum()


CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("cnn_fednh", 16, {}),
    ("simple_cnn", 16, {"z_normalize": True, "aux_classifier": True}),
    ("simple_cnn_plain", 16, {}),
    ("mlp", 6, {"projection_dim": 5, "classifier_input": "r"}),
    ("mlp_plain", 6, {}),
    ("conv_digits", 6, {"projection_dim": 5}),
    ("resnet18_gn2", 6, {}),
    ("resnet18_bn", 36, {"projection_dim": 5, "stem": "imagenet"}),
    ("resnet50_bn", 10, {"projection_dim": 5}),
]


def clients(net: Net) -> list[Tree]:
    """Different weights for each, float64; rolled, so that no normalisation undoes the difference."""
    w = net.init(RandomState(0)).map(lambda v: v.double() if v.is_floating_point() else v)
    return [Tree({k: torch.roll(v, i) if v.dim() else v + i for k, v in w.items()}) for i in range(len(SIZES))]


def batches(net: Net) -> list[Batch]:
    height, width, channels = net.shape
    out, rs = [], RandomState(1)
    for n in SIZES:
        x = torch.from_numpy(rs.randn(max(SIZES), channels, height, width))
        y = torch.from_numpy(rs.randint(net.classes, size=max(SIZES)))
        out.append(Batch(x, y, (torch.arange(max(SIZES)) < n).double()))
    return out


def step(net: Net, names: list[str], mode: Mode, w: Tree, batch: Batch, masked: bool) -> tuple[Tree, Tensor, Tree]:
    """Gradients of some tensors, the loss, and what the net remembers."""
    bound = net.bound(mode, batch.mask if masked else None)

    def loss(some: Tree) -> tuple[Tensor, Tree]:
        value = bound.loss(w | some, batch)
        return value, bound.updates

    gradient, (value, updates) = grad_and_value(loss, has_aux=True)(w.like(names))
    return gradient, value, updates


@pytest.mark.parametrize(("name", "side", "options"), CASES, ids=[c[0] for c in CASES])
def test_stacked_and_padded_equals_one_by_one(name: str, side: int, options: dict[str, Any]) -> None:
    net = build(name, classes=3, shape=(side, side, 2), **options)
    ws, bs = clients(net), batches(net)
    first = next(e.name for e in net.table())
    names = [first, "head.weight"] if name.startswith("resnet") else list(ws[0])
    for mode in ("train", "eval") if name == "resnet18_bn" else ("train",):
        gradient, loss, updates = vmap(lambda w, b, m=mode: step(net, names, m, w, b, True))(stack(ws), stack(bs))
        for i, (w, batch, n) in enumerate(zip(ws, bs, SIZES, strict=True)):
            alone = Batch(batch.x[:n], batch.y[:n], batch.mask[:n])
            g, value, u = step(net, names, mode, w, alone, False)
            torch.testing.assert_close(loss[i], value, rtol=1e-10, atol=1e-11)
            for k in names:
                torch.testing.assert_close(gradient[k][i], g[k], rtol=1e-7, atol=1e-9, msg=f"{k} of client {i}")
            assert updates.keys() == u.keys()
            for k in u:
                torch.testing.assert_close(updates[k][i], u[k], rtol=1e-10, atol=1e-11, msg=k)
        assert len({round(float(v), 9) for v in loss}) == len(SIZES)


def test_stacked_without_a_mask() -> None:
    """Batches that happen to be full may come without one."""
    net = build("resnet18_bn", classes=3, shape=(10, 10, 2), projection_dim=5)
    ws, bs = clients(net), [b._replace(mask=torch.ones(4).double()) for b in batches(net)]
    names = ["encoder.conv1.weight", "head.weight"]
    gradient, loss, updates = vmap(lambda w, b: step(net, names, "train", w, b, False))(stack(ws), stack(bs))
    for i, (w, b) in enumerate(zip(ws, bs, strict=True)):
        g, value, u = step(net, names, "train", w, b, True)
        torch.testing.assert_close(loss[i], value, rtol=1e-10, atol=1e-11)
        for k in names:
            torch.testing.assert_close(gradient[k][i], g[k], rtol=1e-7, atol=1e-9)
        for k in u:
            torch.testing.assert_close(updates[k][i], u[k], rtol=1e-10, atol=1e-11)


def test_one_model_for_many_batches() -> None:
    """Weights that are not stacked: a broadcast model on each client's rows."""
    net = build("resnet18_bn", classes=3, shape=(10, 10, 2), projection_dim=5)
    w, bs = clients(net)[0], batches(net)
    for mode in ("train_frozen", "eval"):

        def logits(x: Tensor, mask: Tensor, mode: Mode = mode) -> Tensor:
            return net.bound(mode, mask)(w, x)

        out = vmap(logits)(torch.stack([b.x for b in bs]), torch.stack([b.mask for b in bs]))
        for i, (b, n) in enumerate(zip(bs, SIZES, strict=True)):
            torch.testing.assert_close(out[i, :n], net.bound(mode)(w, b.x[:n]), rtol=1e-9, atol=1e-11)


def test_gradients_of_stacked_linear_layers_are_contiguous() -> None:
    """Fused optimisers on a CPU read memory, not strides."""
    net = build("mlp", classes=3, shape=(6, 6, 2), projection_dim=5)
    ws, bs = stack(clients(net)), stack(batches(net))
    leaves = ws.map(lambda v: v.requires_grad_())
    losses = vmap(lambda w, b: net.bound("train", b.mask).loss(w, b))(leaves, bs)
    gradients = torch.autograd.grad(losses.sum(), list(leaves.values()))
    assert all(g.is_contiguous() for g in gradients)


def test_no_input_is_written_into() -> None:
    for name, side, options in CASES[:7]:
        net = build(name, classes=3, shape=(side, side, 2), **options)
        w, b = clients(net)[1], batches(net)[1]
        kept, x = w.map(lambda v: v.clone()), b.x.clone()
        net.bound("train", b.mask).loss(w, b)
        assert torch.equal(b.x, x) and all(torch.equal(w[k], kept[k]) for k in w)
