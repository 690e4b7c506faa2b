"""Small nets: convolutions with pooling, then linear layers.

cnn_fednh is the net of FedNH on CIFAR (A.2 and its code's Conv2Cifar), simple_cnn that of MOON (4.1), FedProc
and FedCSPC on CIFAR-10, simple_cnn_plain that of NIID-Bench; mlp and conv_digits are this suite's own, for
8x8 digits.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..tree import Tree
from .base import Entry, Net, Options, affine, declare_conv, declare_linear, too_small


class Conv(NamedTuple):
    """A convolution of stride 1 that is followed by a 2x2 max-pool and a ReLU."""

    channels: int
    kernel: int
    padding: int = 0


class Layers(NamedTuple):
    """An encoder, and what its net has behind it.

    widths: of the linear layers, each followed by a ReLU; the last is d.
    """

    convs: tuple[Conv, ...]
    widths: tuple[int, ...]
    projection: bool = True
    head_bias: bool = True
    optional_relu: bool = False


_SIMPLE = Layers((Conv(6, 5), Conv(16, 5)), (120, 84))
_MLP = Layers((), (128, 64))

LAYERS = {
    "cnn_fednh": Layers((Conv(64, 5), Conv(64, 5)), (384, 192), False, head_bias=False, optional_relu=True),
    "simple_cnn": _SIMPLE,
    "simple_cnn_plain": _SIMPLE._replace(projection=False),
    "mlp": _MLP,
    "mlp_plain": _MLP._replace(projection=False),
    "conv_digits": Layers((Conv(16, 3, 1), Conv(32, 3, 1)), (64,)),
}


class SmallNet(Net):
    """[conv, max-pool, ReLU] for each convolution, flatten, [linear, ReLU] for each width."""

    def __init__(self, name: str, options: Options) -> None:
        self.layers = LAYERS[name]
        if not self.layers.projection:
            options = options._replace(projection_dim=None)
        super().__init__(name, self.layers.widths[-1], options._replace(head_bias=self.layers.head_bias))
        self.optional_relu = self.layers.optional_relu
        self.encoder_end = rf"encoder\.fc{len(self.layers.widths)}\."
        height, width, channels = self.shape
        if self._side(height) < 1 or self._side(width) < 1:
            too_small(name, self.shape, next(s for s in itertools.count(1) if self._side(s) >= 1))
        if self.layers.convs:
            channels = self.layers.convs[-1].channels
        self.flat = self._side(height) * self._side(width) * channels

    def _side(self, side: int) -> int:
        """What the convolutions leave of a side of the image; below 1: nothing."""
        for c in self.layers.convs:
            side = (side + 2 * c.padding - c.kernel + 1) // 2
        return side

    def encoder_table(self) -> list[Entry]:
        out, channels, width = [], self.shape[2], self.flat
        for i, c in enumerate(self.layers.convs, 1):
            out += declare_conv(f"encoder.conv{i}", channels, c.channels, c.kernel)
            channels = c.channels
        for i, wider in enumerate(self.layers.widths, 1):
            out += declare_linear(f"encoder.fc{i}", width, wider)
            width = wider
        return out

    def _encode(self, w: Tree, x: Tensor, relu: bool) -> Tensor:
        for i, c in enumerate(self.layers.convs, 1):
            name = f"encoder.conv{i}"
            x = F.conv2d(x, w[f"{name}.weight"], w[f"{name}.bias"], padding=c.padding)
            x = F.relu(halved(x))  # same values and gradients as ReLU first, on a quarter of them
        x, last = x.flatten(1), len(self.layers.widths)
        for i in range(1, last + 1):
            x = affine(x, w[f"encoder.fc{i}.weight"], w[f"encoder.fc{i}.bias"])
            if relu or i < last:
                x = F.relu(x)
        return x


def halved(x: Tensor) -> Tensor:
    """Max-pool 2x2 of x [n, channels, H, W].

    PyTorch's kernel also notes where each maximum was, one by one where channels are few. Without gradients nobody asks.
    """
    if torch.is_grad_enabled() or x.shape[-2] % 2 or x.shape[-1] % 2:
        return F.max_pool2d(x, 2)
    x = torch.maximum(x[..., 0::2, :], x[..., 1::2, :])
    return torch.maximum(x[..., 0::2], x[..., 1::2])
