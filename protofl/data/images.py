"""Image files to uint8 arrays, through Pillow.

Grey, palette, CMYK, 16-bit and transparent images become 8-bit RGB; a set in which every image is grey keeps
one channel. All images of a set must have one size unless they are resized on reading.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from protofl.errors import UserError

Array = npt.NDArray[Any]
Allocate = Callable[[str, tuple[int, ...]], Array]
"""(name, shape) -> uint8 array to fill: in memory or in a file that is mapped."""

SUFFIXES = frozenset(
    (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".pgm", ".pbm", ".pnm", ".tif", ".tiff", ".webp")
)
GREY_MODES = frozenset(("1", "L", "LA", "I", "I;16", "I;16B", "I;16L", "I;16N"))
CHUNK = 256


def is_image(name: str) -> bool:
    """Whether a file name is that of an image to read: not hidden, and with a suffix of `SUFFIXES`."""
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in SUFFIXES


def read_images(
    files: dict[str, Sequence[Path]], allocate: Allocate, *, resize: int | None = None, colour: bool = False
) -> dict[str, Array]:
    """Decode the files of each part to uint8 [n, H, W, C]; C is 1 if all images of all parts are grey, or 3.

    `resize`: bring the short side to this many pixels (bilinear, Pillow's, with antialiasing) and crop the
    centre square; without it all sizes must be equal. `colour`: three channels in any case. Raises UserError
    naming the first file that is no whole image or has another size.
    """
    everything = [file for part in files.values() for file in part]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        seen = [fact for chunk in pool.map(_probe_all, _chunks(everything)) for fact in chunk]
        if resize is None:
            _check_sizes(everything, [size for _, size in seen])
        grey = not colour and all(mode in GREY_MODES for mode, _ in seen)
        width, height = (resize, resize) if resize else seen[0][1]
        out = {}
        for name, part in files.items():
            shape = (len(part), height, width, 1 if grey else 3)
            try:
                array = allocate(name, shape)
            except MemoryError:
                raise UserError(
                    f"{len(part)} images of {width}x{height} take {math.prod(shape) / 1e9:.1f} GB, for which there is neither "
                    "disk nor memory: use smaller images"
                ) from None

            def fill(at: int, part: Sequence[Path] = part, array: Array = array) -> None:
                for k in range(at, min(at + CHUNK, len(part))):
                    array[k] = decode(part[k], grey, resize)

            list(pool.map(fill, range(0, len(part), CHUNK)))
            out[name] = array
    return out


def decode(file: Path, grey: bool, resize: int | None = None) -> Array:
    """One image file as uint8 [H, W, 1 or 3]."""
    try:
        with Image.open(file) as image:
            image.load()
            plain = _eight_bit(image, file)
            plain = plain.convert("L" if grey else "RGB")
            if resize is not None:
                plain = _square(plain, resize)
            return np.asarray(plain, dtype=np.uint8).reshape(plain.height, plain.width, -1)
    except UserError:
        raise
    except Exception as fault:  # Pillow's readers raise whatever their format's parsing stumbles over
        raise _unreadable(file, fault) from None


def one_line(fault: Exception) -> str:
    """What an error says, without line breaks."""
    return " ".join(str(fault).split()) or type(fault).__name__


def _chunks(files: Sequence[Path]) -> Iterator[Sequence[Path]]:
    return (files[k : k + CHUNK] for k in range(0, len(files), CHUNK))


def _probe_all(files: Sequence[Path]) -> list[tuple[str, tuple[int, int]]]:
    return [_probe(file) for file in files]


def _probe(file: Path) -> tuple[str, tuple[int, int]]:
    """Mode and (width, height) from the header."""
    try:
        with Image.open(file) as image:
            return image.mode, image.size
    except Exception as fault:  # as in decode
        raise _unreadable(file, fault) from None


def _unreadable(file: Path, fault: Exception) -> UserError:
    empty = file.is_file() and file.stat().st_size == 0
    why = "the file is empty" if empty else one_line(fault).replace(f" {str(file)!r}", "")
    return UserError(f"image {file} cannot be read: {why}; replace or remove it")


def _check_sizes(files: Sequence[Path], sizes: Sequence[tuple[int, int]]) -> None:
    for file, size in zip(files, sizes, strict=True):
        if size != sizes[0]:
            raise UserError(
                f"image {file} is {size[0]}x{size[1]} and {files[0]} is {sizes[0][0]}x{sizes[0][1]} (width x "
                f"height); all images of a set must have one size"
            )


def _eight_bit(image: Image.Image, file: Path) -> Image.Image:
    """Sixteen-bit grey as eight-bit grey (65535 becomes 255); everything else as it is."""
    if image.mode == "F":
        raise UserError(f"image {file} holds floating-point values; save it with 8 or 16 bits, or use an .npz file")
    if not image.mode.startswith("I"):
        return image
    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() > 65535:
        raise UserError(
            f"image {file} holds values beyond 16 bits ({values.min()} to {values.max()}); save it with 8 or 16"
        )
    return Image.fromarray(((values + 128) // 257).astype(np.uint8))


def _square(image: Image.Image, side: int) -> Image.Image:
    """Short side to `side`, the long one in proportion, rounded down; then the centre square."""
    short = min(image.size)
    width, height = (side * length // short for length in image.size)
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = round((width - side) / 2), round((height - side) / 2)
    return image.crop((left, top, left + side, top + side))
