"""Batch normalisation that knows which rows are real."""

from __future__ import annotations

import pytest
import torch
from numpy.random import RandomState
from torch import Tensor, nn

from protofl.nets import Mode, Net, build
from protofl.tree import Tree

N, MEAN, VAR, SEEN = "n", "n.running_mean", "n.running_var", "n.num_batches_tracked"


def layer(channels: int = 3) -> tuple[Net, Tree]:
    """Any net (they share the layer), and the tensors of one layer called n."""
    rs = RandomState(0)
    w = Tree({f"n.{k}": torch.from_numpy(rs.randn(channels)) for k in ("weight", "bias", "running_mean")})
    w[VAR], w[SEEN] = torch.from_numpy(rs.rand(channels) + 0.5), torch.tensor(4)
    return build("mlp", classes=2, shape=(8, 8, 1)), w


def of_torch(w: Tree, dtype: torch.dtype = torch.float64) -> nn.BatchNorm2d:
    module = nn.BatchNorm2d(len(w[MEAN]), dtype=dtype)
    module.load_state_dict({k[2:]: v.clone() for k, v in w.items()})
    return module


def data(rows: int, channels: int = 3, side: int = 5) -> Tensor:
    return torch.from_numpy(RandomState(1).randn(rows, channels, side, side) * 2 + 1)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_without_a_mask_it_is_torchs_layer() -> None:
    (net, w), x = layer(), data(6)
    module = of_torch(w)
    for _ in range(2):  # the second pass goes on from the first
        bound = net.bound("train")
        close(bound.batch_norm(w, N, x), module(x))
        close(bound.updates[MEAN], module.running_mean)  # type: ignore[arg-type]
        close(bound.updates[VAR], module.running_var)  # type: ignore[arg-type]
        assert torch.equal(bound.updates[SEEN], module.num_batches_tracked)  # type: ignore[arg-type]
        w = w | bound.updates
        x = x.flip(0) * 3
    close(net.bound("eval").batch_norm(w, N, x), module.eval()(x))


def test_padded_rows_take_no_part() -> None:
    (net, w), x = layer(), data(7)
    mask = torch.tensor([1.0, 1, 0, 1, 0, 1, 0])
    real = mask.bool()
    x[~real] = 1e3
    padded, alone = net.bound("train", mask), net.bound("train")
    for part in ("weight", "bias"):
        w[f"n.{part}"].requires_grad_()
    x.requires_grad_()
    close(padded.batch_norm(w, N, x)[real], alone.batch_norm(w, N, x[real]))
    assert padded.updates.keys() == alone.updates.keys() == {MEAN, VAR, SEEN}
    for name in padded.updates:
        close(padded.updates[name], alone.updates[name])
    reads = (x, w["n.weight"], w["n.bias"])
    target = torch.from_numpy(RandomState(2).randn(4, 3, 5, 5))
    ours = torch.autograd.grad((net.bound("train", mask).batch_norm(w, N, x)[real] * target).sum(), reads)
    theirs = torch.autograd.grad((net.bound("train").batch_norm(w, N, x[real]) * target).sum(), reads)
    for a, b in zip(ours, theirs, strict=True):
        close(a, b)
    assert not ours[0][~real].any()


@pytest.mark.parametrize("mask", [None, torch.ones(4), torch.ones(4, dtype=torch.bool)])
def test_all_kinds_of_full_masks_agree(mask: Tensor | None) -> None:
    (net, w), x = layer(), data(4)
    bound = net.bound("train", mask)
    close(bound.batch_norm(w, N, x), of_torch(w)(x))
    assert int(bound.updates[SEEN]) == 5


@pytest.mark.parametrize("mode", ["train_frozen", "eval"])
def test_only_training_remembers(mode: Mode) -> None:
    (net, w), x = layer(), data(4)
    bound = net.bound(mode, torch.ones(4))
    out = bound.batch_norm(w, N, x)
    assert not bound.updates
    module = of_torch(w)
    close(out, (module.eval() if mode == "eval" else module)(x))


def test_two_passes_in_one_call() -> None:
    (net, w), x = layer(), data(6)
    module = of_torch(w)
    module(x[:4])
    module(x[4:])
    bound = net.bound("train")
    bound.batch_norm(w, N, x[:4])
    bound.batch_norm(w, N, x[4:])
    close(bound.updates[MEAN], module.running_mean)  # type: ignore[arg-type]
    close(bound.updates[VAR], module.running_var)  # type: ignore[arg-type]
    assert int(bound.updates[SEEN]) == 6


def test_two_models_in_one_tree_fill_one_set_of_updates() -> None:
    (net, w), x = layer(), data(4)
    bound = net.bound("train")
    bound.batch_norm(w, N, x)
    bound.within("own.").within("a.").batch_norm(w, N, x)
    assert set(bound.updates) == {p + k for p in ("", "own.a.") for k in (MEAN, VAR, SEEN)}
    assert bound.within("own.").updates is bound.updates
    assert net.bound("train").updates == {} and not net.updates


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_single_value_per_channel(masked: bool, dtype: torch.dtype) -> None:
    """torch refuses it; here the output is the bias and the variance moves towards 0."""
    net, w = layer()
    w = w.map(lambda v: v.to(dtype) if v.is_floating_point() else v)
    x = data(3, side=1).to(dtype)
    bound = net.bound("train", torch.tensor([1.0, 0, 0])) if masked else net.bound("train")
    out = bound.batch_norm(w, N, x if masked else x[:1])
    torch.testing.assert_close(out[0, :, 0, 0], w["n.bias"])
    torch.testing.assert_close(bound.updates[MEAN], 0.9 * w[MEAN] + 0.1 * x[0, :, 0, 0])
    torch.testing.assert_close(bound.updates[VAR], 0.9 * w[VAR])


@pytest.mark.parametrize("masked", [False, True])
def test_a_constant_channel(masked: bool) -> None:
    net, w = layer()
    x = torch.full((4, 3, 2, 2), 7.0, dtype=torch.float64)
    bound = net.bound("train", torch.ones(4) if masked else None)
    assert torch.isfinite(bound.batch_norm(w, N, x)).all()
    close(bound.updates[VAR], 0.9 * w[VAR])


def test_a_batch_of_padding_alone_leaves_no_trace() -> None:
    (net, w), x = layer(), data(4)
    bound = net.bound("train", torch.zeros(4))
    assert torch.isfinite(bound.batch_norm(w, N, x)).all()
    for name in (MEAN, VAR, SEEN):
        assert torch.equal(bound.updates[name], w[name])


def test_updates_are_detached_and_inputs_untouched() -> None:
    (net, w), x = layer(), data(4)
    before, kept = x.clone(), w.map(lambda v: v.clone())
    x.requires_grad_()
    for mask in (None, torch.ones(4)):
        bound = net.bound("train", mask)
        assert bound.batch_norm(w, N, x).requires_grad
        assert not any(v.requires_grad for v in bound.updates.values())
    assert torch.equal(x, before) and all(torch.equal(w[k], kept[k]) for k in w)


def test_one_sample_trains_a_whole_net() -> None:
    net = build("resnet18_bn", classes=3, shape=(8, 8, 3), projection_dim=16)
    w, x = net.init(RandomState(0)), torch.rand(1, 3, 8, 8)
    for mask in (None, torch.ones(1)):
        bound = net.bound("train", mask)
        assert torch.isfinite(bound(w, x)).all()
        assert all(torch.isfinite(v).all() for v in bound.updates.values())
        assert bound.updates.keys() == w.keys() - net.trainable(w).keys()
