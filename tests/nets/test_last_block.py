"""What stands before the output layer of every net, which FedPer may keep private beside it."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from toy import ToyBN

from protofl.nets import build

DIGITS = {"projection_dim": 32}
BARE = {"use_projection_head": False}

# name, classes, shape, options; parameters of the last block; where they begin
BLOCKS: list[tuple[str, int, tuple[int, int, int], dict[str, Any], int, str]] = [
    ("cnn_fednh", 10, (32, 32, 3), {}, 73_920, "encoder.fc2."),
    ("simple_cnn_plain", 10, (32, 32, 3), {}, 10_164, "encoder.fc2."),
    ("mlp_plain", 10, (8, 8, 1), {}, 8_256, "encoder.fc2."),
    ("mlp", 10, (8, 8, 1), BARE, 8_256, "encoder.fc2."),
    ("conv_digits", 10, (8, 8, 1), BARE, 8_256, "encoder.fc1."),
    ("simple_cnn", 10, (32, 32, 3), {}, 28_900, "projection."),
    ("simple_cnn", 10, (32, 32, 3), {"aux_classifier": True}, 28_900, "projection."),
    ("mlp", 10, (8, 8, 1), DIGITS, 6_240, "projection."),
    ("conv_digits", 10, (8, 8, 1), DIGITS, 6_240, "projection."),
    ("resnet18_bn", 100, (32, 32, 3), {}, 393_984, "projection."),
    ("resnet50_bn", 100, (32, 32, 3), {}, 4_720_896, "projection."),
    ("resnet18_gn2", 200, (64, 64, 3), {}, 4_720_640, "encoder.stage4.1."),
    ("resnet18_gn2", 200, (64, 64, 3), {"resnet_norm": "none_fednh"}, 4_718_592, "encoder.stage4.1."),
    ("resnet18_gn2", 200, (64, 64, 3), {"resnet_norm": "batchnorm"}, 4_720_640, "encoder.stage4.1."),
    ("resnet50_bn", 100, (32, 32, 3), BARE, 4_462_592, "encoder.stage4.2."),
]


@pytest.mark.parametrize(("name", "classes", "shape", "options", "parameters", "begins"), BLOCKS)
def test_last_block(
    name: str, classes: int, shape: tuple[int, int, int], options: dict[str, Any], parameters: int, begins: str
) -> None:
    net = build(name, classes=classes, shape=shape, **options)
    assert net.last_block is not None
    mine = [e for e in net.table() if re.match(net.last_block, e.name)]
    assert sum(math.prod(e.shape) for e in mine if not re.match(net.buffers, e.name)) == parameters
    assert all(e.name.startswith(begins) for e in mine)
    assert [e.name for e in mine] == [e.name for e in net.table() if e.name.startswith(begins)]


def test_a_projection_that_is_not_read_is_not_the_last_block() -> None:
    net = build("simple_cnn", classes=10, shape=(32, 32, 3), classifier_input="r")
    assert net.projected and net.last_block == r"encoder\.fc2\."


def test_a_net_that_does_not_say() -> None:
    assert ToyBN(projection=None).last_block is None
    assert ToyBN().last_block == ToyBN.projection
