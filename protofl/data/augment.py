"""From stored uint8 images to the floats a network reads: pad, crop, flip, rotate, scale, normalise.

Everything works on whole batches by index arithmetic, on the device of the images. The random numbers are
drawn apart from their use: `Pipeline.draw` gives one row of numbers per sample, so that the same sample looks
the same whichever engine, worker or batch it is handled in.

Conventions: a zero pad is black (it is applied before normalising); a reflect pad does not repeat the edge
pixel; the crop of an image padded by 4 starts at row dy and column dx, each 0 to 8; rotation is
counter-clockwise about the centre, nearest pixel, black outside.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.random import RandomState
from torch import Tensor

from protofl.errors import UserError, nearest

AUGMENTATIONS = ("zero_pad4", "reflect_pad4", "crop32", "crop64", "hflip", "rotate15", "resize224")
"""All names, in the order in which they are applied; `resize224` happens when the set is read."""

PAD = 4
CROPS = {"crop32": 32, "crop64": 64}


class Pipeline:
    """The transform of one setting, for images of one shape.

    `augment`: names of `AUGMENTATIONS` in the order of application; a pad goes with a crop and a crop with a
    pad. `mean`, `std`: one number or one per channel, in units of x/scale; None or empty: not normalised.
    `scale`: what the stored values are divided by (255 for images). `shape`: (H, W, C) of the stored images.
    `dtype`: of the result.

    Raises UserError for unknown or contradictory names and for sizes that do not fit.
    """

    def __init__(
        self,
        augment: Sequence[str],
        mean: Sequence[float] | None,
        std: Sequence[float] | None,
        scale: float,
        shape: tuple[int, int, int],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        names = tuple(augment)
        _check_names(names, shape)
        self.augment = names
        self.shape = shape
        self.scale = float(scale)
        self.dtype = dtype
        self.mean = _per_channel("mean", mean, shape[2], dtype)
        self.std = _per_channel("std", std, shape[2], dtype)
        if self.std is not None and not bool((self.std > 0).all()):
            raise UserError(f"std must be above 0 for every channel, not {list(std or ())}")
        self.mean_image, self.std_image = (_over_image(v, shape) for v in (self.mean, self.std))
        self.reflect = "reflect_pad4" in names
        self.crop = any(name in CROPS for name in names)
        self.flip = "hflip" in names
        self.rotate = "rotate15" in names
        self.width = 2 * self.crop + self.flip + self.rotate
        """How many random numbers a sample takes; 0 when nothing is random."""

    def on(self, device: torch.device | str) -> Pipeline:
        """The same for images on a device; as made, it is for the CPU."""
        there = copy.copy(self)
        for name in ("mean", "std", "mean_image", "std_image"):
            value = getattr(self, name)
            setattr(there, name, None if value is None else value.to(device))
        return there

    def draw(self, stream: RandomState, n: int) -> Tensor | None:
        """The random numbers of one epoch over n samples: float64 [n, width], by place in the shuffled order.

        Columns, as far as the setting uses them and in the order in which they are drawn: dy, dx (0 to 8),
        flip (0 or 1), angle (degrees, -15 to 15). None, and nothing drawn, when the setting has nothing
        random.
        """
        columns: list[np.ndarray] = []
        if self.crop:
            columns.extend(stream.randint(0, 2 * PAD + 1, (2, n)))
        if self.flip:
            columns.append(stream.random_sample(n) < 0.5)
        if self.rotate:
            columns.append(30 * stream.random_sample(n) - 15)
        if not columns:
            return None
        return torch.from_numpy(np.stack([column.astype(np.float64) for column in columns], axis=1))

    def train(self, x: Tensor, drawn: Tensor | None) -> Tensor:
        """Augment x [..., rows, H, W, C] by drawn [..., rows, width] and normalise, to [..., rows, C, H, W].

        Without `drawn` the images are left as they are, as in `test`.
        """
        if drawn is None or self.width == 0:
            return self.test(x)
        images = x.reshape(-1, *self.shape)
        numbers = list(drawn.reshape(-1, self.width).unbind(1))
        offset = torch.stack([numbers.pop(0), numbers.pop(0)]).long() if self.crop else None
        flip = numbers.pop(0) > 0.5 if self.flip else None
        if self.rotate:
            images = self._pick(images, offset, flip, numbers.pop(0))
        elif self.crop:
            images = self._windows(images, offset, flip)
        else:
            images = self._pick(images, None, flip, None)
        return self.test(images.reshape(x.shape))

    def test(self, x: Tensor) -> Tensor:
        """Normalise: x [..., rows, H, W, C] to float [..., rows, C, H, W]. Nothing is random.

        In memory the channels of a plain batch stay last, which makes convolutions a third faster on a CPU; with
        more leading axes the result is contiguous, as stacked convolutions want it.
        """
        last = x.dim() == 4
        given = x if last else x.movedim(-1, -3)
        out = torch.empty(given.shape, dtype=self.dtype, device=x.device).copy_(given)
        mean, std = (self.mean_image, self.std_image) if last else (self.mean, self.std)
        if self.scale != 1:
            out.div_(self.scale)
        if mean is not None:
            out.sub_(mean)
        if std is not None:
            out.div_(std)
        return out.movedim(-1, -3) if last else out

    def _windows(self, images: Tensor, offset: Tensor | None, flip: Tensor | None) -> Tensor:
        """Crop and flip by copying whole image rows, several times faster on a CPU than picking pixels.

        The images, widened left and right, and their mirror images lie behind one another in one buffer,
        followed by a row of zeros; a row of the result is a window of the buffer, and rows above and below an
        image are found by index.
        """
        assert offset is not None
        (count, (height, width, channels)) = (len(images), self.shape)
        wide = width + 2 * PAD
        line = wide * channels
        copies = 1 if flip is None else 2
        size = copies * count * height * line
        buffer = images.new_empty(size + width * channels)
        buffer[size:] = 0
        padded = buffer[:size].view(copies, count, height, wide, channels)
        self._widen(images, padded[0])
        if copies == 2:
            padded[1] = padded[0].flip(2)
        dy, dx = offset
        base = torch.arange(count, device=images.device) * height
        if flip is not None:
            dx = torch.where(flip, 2 * PAD - dx, dx)
            base = base + flip * (count * height)
        row, inside = self._unpad(torch.arange(height, device=images.device) + dy[:, None], height)
        start = (base[:, None] + row) * line + (dx * channels)[:, None]
        if inside is not None:
            start = torch.where(inside, start, size)
        windows = buffer.as_strided((size + 1, width * channels), (1, 1))
        return windows.index_select(0, start.flatten()).view(count, height, width, channels)

    def _widen(self, images: Tensor, out: Tensor) -> None:
        """Pad left and right: images [n, H, W, C] into out [n, H, W + 8, C]."""
        width = self.shape[1]
        out[:, :, PAD : PAD + width] = images
        if self.reflect:
            out[:, :, :PAD] = images[:, :, 1 : PAD + 1].flip(2)
            out[:, :, PAD + width :] = images[:, :, -PAD - 1 : -1].flip(2)
        else:
            out[:, :, :PAD] = 0
            out[:, :, PAD + width :] = 0

    def _unpad(self, at: Tensor, length: int) -> tuple[Tensor, Tensor | None]:
        """Padded positions (0 to length + 7) as positions in the image, and which lie in it (None: all)."""
        at = at - PAD
        if self.reflect:
            return (length - 1) - ((length - 1) - at.abs()).abs(), None
        return at.clamp(0, length - 1), (at >= 0) & (at < length)

    def _pick(self, images: Tensor, offset: Tensor | None, flip: Tensor | None, angle: Tensor | None) -> Tensor:
        """Any of the transforms, by working out which pixel of the image each pixel of the result shows."""
        count, (height, width, channels) = len(images), self.shape
        device = images.device
        i, j = torch.arange(height, device=device)[:, None], torch.arange(width, device=device)[None, :]
        inside: Tensor | None = None
        if angle is not None:
            i, j = _rotated(angle, height, width)
            inside = (i >= 0) & (i < height) & (j >= 0) & (j < width)
        if flip is not None:
            j = torch.where(flip[:, None, None], width - 1 - j, j)
        if offset is not None:
            dy, dx = offset[:, :, None, None]
            i, in_rows = self._unpad(i + dy, height)
            j, in_columns = self._unpad(j + dx, width)
            if in_rows is not None and in_columns is not None:
                within = in_rows & in_columns
                inside = within if inside is None else inside & within
        i, j = i.clamp(0, height - 1), j.clamp(0, width - 1)
        flat = (torch.arange(count, device=device)[:, None, None] * height + i) * width + j
        picked = images.reshape(-1, channels).index_select(0, flat.flatten()).view(images.shape)
        return picked if inside is None else picked * inside[..., None]


def _rotated(angle: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Row and column, int64 [n, H, W], where the pixels come from after a turn by angle [n], in degrees."""
    radians = angle[:, None, None] * (math.pi / 180)
    c, s = torch.cos(radians), torch.sin(radians)
    u = torch.arange(width, dtype=angle.dtype, device=angle.device) + 0.5 - width / 2
    v = (torch.arange(height, dtype=angle.dtype, device=angle.device) + 0.5 - height / 2)[:, None]
    return (s * u + c * v + height / 2).floor().long(), (c * u - s * v + width / 2).floor().long()


def _check_names(names: tuple[str, ...], shape: tuple[int, int, int]) -> None:
    for name in names:
        if name not in AUGMENTATIONS:
            close = nearest(name, AUGMENTATIONS)
            raise UserError(f"unknown augmentation {name!r}{close}; known: {', '.join(AUGMENTATIONS)}")
    # resizing belongs to reading, before everything else that happens to an image
    ranks = [-1 if name == "resize224" else AUGMENTATIONS.index(name) for name in names]
    if any(a >= b for a, b in pairwise(ranks)):
        right = sorted(set(names), key=lambda name: (name != "resize224", AUGMENTATIONS.index(name)))
        raise UserError(f"augment {list(names)} must name each step once, in the order of application: {right}")
    pads = [name for name in names if name.endswith("_pad4")]
    crops = [name for name in names if name in CROPS]
    if len(pads) > 1 or len(crops) > 1 or len(pads) != len(crops):
        raise UserError(f"augment {list(names)}: one pad (zero_pad4, reflect_pad4) goes with one crop (crop32, crop64)")
    height, width, _ = shape
    for crop in crops:
        if (height, width) != (CROPS[crop], CROPS[crop]):
            fitting = next((name for name, size in CROPS.items() if (size, size) == (height, width)), "no pad and crop")
            raise UserError(
                f"augment {crop} is for images of {CROPS[crop]}x{CROPS[crop]}; these are {height}x{width}: "
                f"use {fitting}"
            )
    if "resize224" in names and (height, width) != (224, 224):
        raise UserError(
            f"augment resize224 is done when images are read, to 224x224; these are {height}x{width}: leave it out"
        )


def _per_channel(what: str, values: Sequence[float] | None, channels: int, dtype: torch.dtype) -> Tensor | None:
    """[C or 1, 1, 1], or None for no values."""
    if values is None or len(values) == 0:
        return None
    if len(values) not in (1, channels):
        raise UserError(
            f"{what} has {len(values)} numbers and the images have {channels} channels; give 1 or {channels}"
        )
    if not all(math.isfinite(value) for value in values):
        raise UserError(f"{what} must be finite numbers, not {list(values)}")
    return torch.tensor(list(values), dtype=dtype)[:, None, None]


def _over_image(v: Tensor | None, shape: tuple[int, int, int]) -> Tensor | None:
    """[H, W, C]: a number for every pixel, since loops over two or three channels are slow."""
    return None if v is None else v.permute(1, 2, 0).expand(shape).contiguous()
