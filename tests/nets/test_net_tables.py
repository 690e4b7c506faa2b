"""Names, numbers and initial values of the tensors of every net."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from numpy.random import RandomState

from protofl.nets import NETS, build, weights_hash

DIGITS = {"projection_dim": 32}

# name, classes, shape, options; parameters; hash of the weights drawn from seed 0
NUMBERS: list[tuple[str, int, tuple[int, int, int], dict[str, Any], int, str]] = [
    ("cnn_fednh", 10, (32, 32, 3), {}, 797_952, "f57f0f90271a74a0"),
    ("cnn_fednh", 100, (32, 32, 3), {}, 815_232, "33f54f9d84cb29dd"),
    ("simple_cnn", 10, (32, 32, 3), {}, 92_626, "07b900a09a7e67e4"),
    ("simple_cnn", 10, (32, 32, 3), {"aux_classifier": True}, 93_476, "b5747a229bf102c7"),
    ("simple_cnn", 100, (32, 32, 3), {}, 115_756, "81d75314ebbf5269"),
    ("simple_cnn_plain", 10, (32, 32, 3), {}, 62_006, "9ceb7b91e223daf2"),
    ("resnet18_gn2", 200, (64, 64, 3), {}, 11_271_232, "e5a2a4df7df6d81a"),
    ("resnet18_gn2", 200, (64, 64, 3), {"resnet_norm": "none_fednh"}, 11_263_552, "b9406239f4fe1215"),
    ("resnet50_bn", 100, (32, 32, 3), {}, 28_246_948, "33a32da79eebdc4f"),
    ("resnet50_bn", 200, (64, 64, 3), {}, 28_272_648, "9dda6498ef7624c8"),
    ("resnet18_bn", 100, (32, 32, 3), {}, 11_588_516, "7adda4fa72cfcacd"),
    ("resnet18_bn", 200, (64, 64, 3), {}, 11_614_216, "73b3d9038cc8afb3"),
    ("resnet18_bn", 172, (224, 224, 3), {"stem": "k7s2"}, 11_614_700, "3d19d7b16500c609"),
    ("mlp", 10, (8, 8, 1), DIGITS, 23_146, "dde420edae6c80fb"),
    ("mlp_plain", 10, (8, 8, 1), DIGITS, 17_226, "3c4fb36bb899afe4"),
    ("conv_digits", 10, (8, 8, 1), DIGITS, 19_626, "58e77f6a3771cb0a"),
]


@pytest.mark.parametrize(("name", "classes", "shape", "options", "parameters", "digest"), NUMBERS)
def test_parameters_and_initial_weights(
    name: str,
    classes: int,
    shape: tuple[int, int, int],
    options: dict[str, Any],
    parameters: int,
    digest: str,
) -> None:
    net = build(name, classes=classes, shape=shape, **options)
    w = net.init(RandomState(0))
    assert [(k, tuple(v.shape)) for k, v in w.items()] == [(k, s) for k, s, _ in net.table()]
    assert net.count()["total"] == sum(v.numel() for v in net.trainable(w).values()) == parameters
    assert {v.dtype for v in net.trainable(w).values()} == {torch.float32}
    assert weights_hash(net, w) == digest


PARTS: list[tuple[str, int, dict[str, Any], dict[str, int]]] = [
    ("cnn_fednh", 10, {}, {"encoder": 796_032, "projection": 0, "head": 1_920}),
    ("simple_cnn", 10, {}, {"encoder": 61_156, "projection": 28_900, "head": 2_570}),
    ("simple_cnn", 10, {"aux_classifier": True}, {"aux": 850, "head": 2_570}),
    ("simple_cnn", 10, {"use_projection_head": False}, {"projection": 0, "total": 62_006}),
    ("simple_cnn", 10, {"classifier_input": "r"}, {"projection": 28_900, "head": 850}),
    ("simple_cnn", 10, {"projection_dim": 84}, {"projection": 14_280, "head": 850}),
    ("mlp", 10, DIGITS, {"encoder": 16_576, "projection": 6_240, "head": 330}),
    ("resnet18_gn2", 200, {}, {"encoder": 11_168_832, "head": 102_400, "buffers": 0, "counters": 0}),
    ("resnet18_gn2", 200, {"resnet_norm": "batchnorm"}, {"encoder": 11_168_832, "buffers": 9_600}),
    ("resnet18_bn", 172, {"stem": "imagenet"}, {"total": 11_614_700}),
    ("resnet18_bn", 172, {}, {"total": 11_607_020}),
    ("resnet18_bn", 100, {}, {"projection": 393_984, "head": 25_700, "buffers": 9_600, "counters": 20}),
    ("resnet50_bn", 100, {}, {"encoder": 23_500_352, "projection": 4_720_896, "head": 25_700}),
    ("resnet50_bn", 100, {}, {"buffers": 53_120, "counters": 53}),
]


@pytest.mark.parametrize(("name", "classes", "options", "parts"), PARTS)
def test_counts_by_part(name: str, classes: int, options: dict[str, Any], parts: dict[str, int]) -> None:
    shape = (8, 8, 1) if name == "mlp" else (32, 32, 3)
    count = build(name, classes=classes, shape=shape, **options).count()
    assert {k: count[k] for k in parts} == parts


@pytest.mark.parametrize(
    ("name", "side", "options", "macs"),
    [
        ("cnn_fednh", 32, {}, "14.69e6"),
        ("simple_cnn", 32, {}, "0.682e6"),
        ("mlp", 8, DIGITS, "22848"),
        ("mlp_plain", 8, DIGITS, "17024"),
        ("resnet18_bn", 32, {}, "555.8e6"),
        ("resnet18_bn", 64, {}, "2.222e9"),
        ("resnet50_bn", 32, {}, "1.303e9"),
        ("resnet50_bn", 64, {}, "5.196e9"),
    ],
)
def test_multiply_adds(name: str, side: int, options: dict[str, Any], macs: str) -> None:
    """The numbers are rounded to the digits shown."""
    classes = 100 if name.startswith("resnet") else 10
    net = build(name, classes=classes, shape=(side, side, 1 if side == 8 else 3), **options)
    digits, _, exponent = macs.partition("e")
    unit = 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))
    assert abs(net.macs - float(macs)) <= unit / 2


def test_multiply_adds_of_the_encoder_alone() -> None:
    net = build("resnet18_bn", classes=1, shape=(32, 32, 3), use_projection_head=False)
    assert round((net.macs - net.dim) / 1e6, 1) == 555.4


@pytest.mark.parametrize("name", NETS)
def test_every_tensor_belongs_to_one_part(name: str) -> None:
    net = build(name, classes=3, shape=(32, 32, 3), aux_classifier=True)
    parts = (net.encoder, net.projection, net.head, net.aux)
    for tensor, _, kind in net.table():
        assert sum(bool(re.match(part, tensor)) for part in parts) == 1
        assert bool(re.match(net.buffers, tensor)) == bool(re.search(r"running|tracked", tensor) or kind == "counter")
        assert bool(re.match(net.buffers, "personal." + tensor)) == bool(re.match(net.buffers, tensor))


def test_buffers_start_as_in_torch_and_are_not_trained() -> None:
    net = build("resnet18_bn", classes=4, shape=(8, 8, 3))
    w = net.init(RandomState(3))
    buffers = {k: v for k, v in w.items() if k not in net.trainable(w)}
    assert len(buffers) == 60
    for name, value in buffers.items():
        assert torch.equal(value, torch.ones_like(value) if "running_var" in name else torch.zeros_like(value))
        assert value.dtype == (torch.int64 if "tracked" in name else torch.float32)


def test_bounds_of_the_two_kinds_of_convolution() -> None:
    plain = build("resnet18_gn2", classes=2, shape=(8, 8, 3)).init(RandomState(1))
    v = plain["encoder.stage1.0.conv1.weight"]
    assert 0.99 < float(v.abs().max()) * math.sqrt(64 * 9) <= 1
    he = build("resnet18_bn", classes=2, shape=(8, 8, 3)).init(RandomState(1))
    v = he["encoder.stage2.0.conv1.weight"]  # 64 -> 128, fan_out 128 * 9
    assert abs(float(v.std()) / math.sqrt(2 / (128 * 9)) - 1) < 0.02


def test_hash_reads_float32_in_table_order_without_buffers() -> None:
    net = build("resnet18_bn", classes=2, shape=(8, 8, 1))
    w = net.init(RandomState(0))
    digest = weights_hash(net, w)
    moved = w | {"encoder.norm1.running_mean": torch.full((64,), 7.0)}
    backwards = type(w)(reversed(moved.items()))
    assert weights_hash(net, backwards) == digest
    assert weights_hash(net, w.map(lambda v: v.double())) == digest
    assert weights_hash(net, w | {"head.bias": w["head.bias"] + 1}) != digest


@pytest.mark.parametrize(
    ("name", "scale", "relu"),
    [
        ("cnn_fednh", 1.0, True),
        ("simple_cnn", 1.0, False),
        ("mlp", 1.0, False),
        ("resnet18_gn2", 20.0, False),
    ],
)
def test_what_fednh_asks_of_a_net(name: str, scale: float, relu: bool) -> None:
    net = build(name, classes=2, shape=(16, 16, 3))
    assert (net.default_scale, net.optional_relu) == (scale, relu)


@pytest.mark.parametrize(
    ("options", "encoded", "projected", "dim"),
    [
        ({}, 84, 256, 256),
        ({"projection_dim": 32}, 84, 32, 32),
        ({"classifier_input": "r"}, 84, 256, 84),
        ({"use_projection_head": False}, 84, None, 84),
    ],
)
def test_widths(options: dict[str, Any], encoded: int, projected: int | None, dim: int) -> None:
    net = build("simple_cnn", classes=5, shape=(28, 28, 1), **options)
    assert (net.encoded, net.projected, net.dim) == (encoded, projected, dim)
    w, x = net.init(RandomState(0)), torch.rand(2, 1, 28, 28)
    assert w["encoder.fc1.weight"].shape == (120, 256)  # 28 -> 12 -> 4 a side, 16 channels
    assert net.encode(w, x).shape == (2, encoded)
    assert net.embed(w, x).shape == (2, dim)
    assert net(w, x).shape == (2, 5)
