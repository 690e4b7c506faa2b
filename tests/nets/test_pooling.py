"""The pooling that is used without gradients says what PyTorch's says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from protofl import nets, rng
from protofl.nets.small import halved

SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(2, 7), st.integers(2, 7))
VALUES = st.sampled_from([-1.0, 0.0, 0.5, 2.0, float("inf"), -float("inf"), float("nan")])


@given(arrays.arrays(np.float32, SHAPES, elements=VALUES), st.booleans())
def test_values_without_gradients(x: np.ndarray, channels_last: bool) -> None:
    images = torch.from_numpy(x).contiguous(
        memory_format=torch.channels_last if channels_last else torch.contiguous_format
    )
    with torch.no_grad():
        np.testing.assert_array_equal(halved(images).numpy(), F.max_pool2d(images, 2).numpy())


@pytest.mark.parametrize("name", ["simple_cnn", "simple_cnn_plain", "cnn_fednh"])
def test_networks_say_the_same_with_and_without_gradients(name: str) -> None:
    net = nets.build(name, classes=10, shape=(32, 32, 3))
    w, x = net.init(rng.init(0)), torch.rand(16, 32, 32, 3).permute(0, 3, 1, 2)
    with torch.no_grad():
        alone = net(w, x)
    assert alone.equal(net(w, x))
