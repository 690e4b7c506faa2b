"""ResNets (He et al. 2016) as federated learning uses them: post-activation blocks, a stem for small images.

resnet18_gn2 is the net of FedNH on Tiny-ImageNet (A.2): every normalisation is a GroupNorm of two groups.
resnet50_bn is that of MOON (4.1) and FedProc on CIFAR-100 and Tiny-ImageNet, resnet18_bn that of FedCSPC.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple, get_args

import torch.nn.functional as F
from torch import Tensor

from ..tree import Tree
from .base import EPS, Entry, Kind, Net, Options, declare_conv, declare_norm

Stem = Literal["cifar", "k7s2", "imagenet"]
Norm = Literal["groupnorm2", "none_fednh", "batchnorm"]

STEMS: tuple[Stem, ...] = get_args(Stem)
NORMS: tuple[Norm, ...] = get_args(Norm)


class Layers(NamedTuple):
    """blocks per stage; bottleneck: 1x1, 3x3, 1x1 blocks of four times the width; plain: FedNH's variant.

    plain nets have no projection, an output layer without bias and PyTorch's default initialisation; the
    others initialise their convolutions by He's rule and normalise by batch.
    """

    blocks: tuple[int, int, int, int]
    bottleneck: bool = False
    plain: bool = False


class Conv(NamedTuple):
    """A convolution without bias, padded so that stride 1 keeps the size."""

    n_in: int
    n_out: int
    kernel: int
    stride: int = 1


class Block(NamedTuple):
    """convs: the main path, each followed by a normalisation; shortcut: where the shape changes."""

    name: str
    convs: tuple[Conv, ...]
    shortcut: Conv | None


LAYERS = {
    "resnet18_gn2": Layers((2, 2, 2, 2), plain=True),
    "resnet18_bn": Layers((2, 2, 2, 2)),
    "resnet50_bn": Layers((3, 4, 6, 3), bottleneck=True),
}


class ResNet(Net):
    """Stem, four stages of widths 64, 128, 256, 512 and strides 1, 2, 2, 2, global average pool.

    stem: "cifar" 3x3; "k7s2" 7x7 of stride 2; "imagenet" that and a 3x3 max-pool of stride 2.
    norm: "groupnorm2"; "none_fednh" as the former, but with none in the main paths of blocks (FedNH's code
    runs FedNH itself so on Tiny-ImageNet); "batchnorm".
    """

    default_scale = 20.0
    pools = True

    def __init__(self, name: str, options: Options, stem: Stem, norm: Norm) -> None:
        self.layers, self.stem, self.norm = LAYERS[name], stem, norm
        if self.layers.plain:
            options = options._replace(projection_dim=None, head_bias=False)
        super().__init__(name, 2048 if self.layers.bottleneck else 512, options)
        self.first = Conv(self.shape[2], 64, *((3, 1) if stem == "cifar" else (7, 2)))
        self.blocks = _blocks(self.layers)
        self.encoder_end = re.escape(f"{self.blocks[-1].name}.")

    def encoder_table(self) -> list[Entry]:
        out = self._conv_table("encoder.conv1", self.first)
        out += self._norm_table("encoder.norm1", self.first.n_out)
        for block in self.blocks:
            for i, c in enumerate(block.convs, 1):
                out += self._conv_table(f"{block.name}.conv{i}", c)
                if self.norm != "none_fednh":
                    out += self._norm_table(f"{block.name}.norm{i}", c.n_out)
            if block.shortcut:
                out += self._conv_table(f"{block.name}.shortcut.conv", block.shortcut)
                out += self._norm_table(f"{block.name}.shortcut.norm", block.shortcut.n_out)
        return out

    def _conv_table(self, name: str, c: Conv) -> list[Entry]:
        kind: Kind = "weight" if self.layers.plain else "kaiming"
        return declare_conv(name, c.n_in, c.n_out, c.kernel, bias=False, kind=kind)

    def _norm_table(self, name: str, channels: int) -> list[Entry]:
        return declare_norm(name, channels, running=self.norm == "batchnorm")

    def _encode(self, w: Tree, x: Tensor, relu: bool) -> Tensor:
        return self.pool(self._feature_map(w, x))

    def _feature_map(self, w: Tree, x: Tensor) -> Tensor:
        x = self._normalised(w, "encoder.norm1", convolve(x, w["encoder.conv1.weight"], self.first))
        x = F.relu(x)
        if self.stem == "imagenet":
            x = F.max_pool2d(x, 3, stride=2, padding=1)
        for block in self.blocks:
            x = self._block(w, block, x)
        return x

    def _block(self, w: Tree, block: Block, x: Tensor) -> Tensor:
        """x [rows, channels in, H, W] -> [rows, channels out, H / stride, W / stride]."""
        y = x
        for i, c in enumerate(block.convs, 1):
            y = convolve(y, w[f"{block.name}.conv{i}.weight"], c)
            if self.norm != "none_fednh":
                y = self._normalised(w, f"{block.name}.norm{i}", y)
            if i < len(block.convs):
                y = F.relu(y)
        if block.shortcut:
            x = convolve(x, w[f"{block.name}.shortcut.conv.weight"], block.shortcut)
            x = self._normalised(w, f"{block.name}.shortcut.norm", x)
        return F.relu(y + x)

    def _normalised(self, w: Tree, name: str, x: Tensor) -> Tensor:
        if self.norm == "batchnorm":
            return self.batch_norm(w, name, x)
        return F.group_norm(x, 2, w[f"{name}.weight"], w[f"{name}.bias"], EPS)


def convolve(x: Tensor, weight: Tensor, c: Conv) -> Tensor:
    """The convolution `c` of x [rows, channels, H, W]."""
    return F.conv2d(x, weight, stride=c.stride, padding=c.kernel // 2)


def _blocks(layers: Layers) -> list[Block]:
    """All residual blocks in order; a stage's first block may halve the size, a bottleneck on its 3x3."""
    out, n_in = [], 64
    for stage, (count, width) in enumerate(zip(layers.blocks, (64, 128, 256, 512), strict=True), 1):
        n_out = 4 * width if layers.bottleneck else width
        for i in range(count):
            stride = 2 if i == 0 and stage > 1 else 1
            convs: tuple[Conv, ...]
            if layers.bottleneck:
                convs = (Conv(n_in, width, 1), Conv(width, width, 3, stride), Conv(width, n_out, 1))
            else:
                convs = (Conv(n_in, width, 3, stride), Conv(width, width, 3))
            changes = stride > 1 or n_in != n_out
            shortcut = Conv(n_in, n_out, 1, stride) if changes else None
            out.append(Block(f"encoder.stage{stage}.{i}", convs, shortcut))
            n_in = n_out
    return out
