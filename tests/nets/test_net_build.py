"""What `build` refuses, and how."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from numpy.random import RandomState

from protofl.errors import UserError
from protofl.nets import NETS, build


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("simple_cn", {}, "did you mean 'simple_cnn'"),
        ("simple_cnn", {"shape": (15, 40, 3)}, "simple_cnn: images of 15x40x3 .* at least 16x16"),
        ("cnn_fednh", {"shape": (40, 15, 3)}, "cnn_fednh: images of 40x15x3 .* at least 16x16"),
        ("conv_digits", {"shape": (3, 3, 1)}, "at least 4x4"),
        ("mlp", {"shape": (8, 8)}, "shape must be"),
        ("mlp", {"shape": (8, 0, 1)}, "shape must be"),
        ("mlp", {"classes": 0}, "positive"),
        ("mlp", {"projection_dim": 0}, "projection_dim positive"),
        ("mlp", {"classifier_input": "x"}, "classifier_input must be 'z' or 'r', not 'x'"),
        ("resnet18_bn", {"stem": "k5"}, "stem must be one of cifar, k7s2, imagenet, not 'k5'"),
        ("resnet18_gn2", {"stem": "k7s2"}, "stem is not among its options, leave it at 'cifar'"),
        ("resnet18_gn2", {"resnet_norm": "layer"}, "groupnorm2, none_fednh, batchnorm, not 'layer'"),
        ("resnet50_bn", {"resnet_norm": "none_fednh"}, "leave it at 'groupnorm2'"),
        ("simple_cnn", {"resnet_norm": "batchnorm"}, "leave it at 'groupnorm2'"),
    ],
)
def test_refusals_are_one_line(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as refusal:
        build(name, **{"classes": 10, "shape": (32, 32, 3), **options})
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "side"),
    [("cnn_fednh", 16), ("simple_cnn", 16), ("conv_digits", 4), ("mlp", 1), ("resnet18_bn", 1)],
)
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_the_smallest_image_is_accepted(name: str, side: int, channels: int) -> None:
    net = build(name, classes=3, shape=(side, side + 2, channels))
    w = net.init(RandomState(0))
    assert net(w, torch.rand(2, channels, side, side + 2)).shape == (2, 3)


def test_nets_without_projection_ignore_its_options() -> None:
    for name in ("cnn_fednh", "simple_cnn_plain", "mlp_plain", "resnet18_gn2"):
        net = build(name, classes=3, shape=(16, 16, 3), projection_dim=7, use_projection_head=True)
        assert net.projected is None and net.dim == net.encoded
        assert not any(e.name.startswith("projection") for e in net.table())


def test_only_the_nets_of_fednh_lack_the_bias_of_the_head() -> None:
    without = {n for n in NETS if "head.bias" not in {e.name for e in build(n, classes=2, shape=(16, 16, 3)).table()}}
    assert without == {"cnn_fednh", "resnet18_gn2"}


def test_the_last_relu_can_be_left_out_of_cnn_fednh_alone() -> None:
    x = torch.rand(5, 3, 16, 16)
    net = build("cnn_fednh", classes=3, shape=(16, 16, 3))
    w = net.init(RandomState(0))
    linear = net.encode(w, x, relu=False)
    assert (linear < 0).any()
    assert torch.equal(linear.relu(), net.encode(w, x))
    for name in set(NETS) - {"cnn_fednh", "resnet50_bn", "resnet18_bn"}:
        net = build(name, classes=3, shape=(16, 16, 3))
        with pytest.raises(UserError, match="ReLU"):
            net.encode(net.init(RandomState(0)), x, relu=False)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="'test' is none of train, train_frozen, eval"):
        build("mlp", classes=2, shape=(8, 8, 1)).bound("test")  # type: ignore[arg-type]


def test_nothing_is_allocated_before_the_weights_are_asked_for() -> None:
    assert not any(isinstance(v, torch.Tensor) for v in vars(build("resnet50_bn", classes=2, shape=(8, 8, 3))).values())
