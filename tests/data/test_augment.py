"""Augmentation against the stream's check values, plain loops over pixels, and torchvision."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from protofl import rng
from protofl.data.augment import AUGMENTATIONS, Pipeline
from protofl.errors import UserError

CIFAR = (32, 32, 3)
SETTINGS = [
    (),
    ("hflip",),
    ("rotate15",),
    ("hflip", "rotate15"),
    ("zero_pad4", "crop32"),
    ("zero_pad4", "crop32", "hflip"),
    ("reflect_pad4", "crop32", "hflip"),
    ("zero_pad4", "crop32", "hflip", "rotate15"),
    ("reflect_pad4", "crop32", "rotate15"),
]


def pictures(n: int, shape: tuple[int, int, int] = CIFAR, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.RandomState(seed).randint(1, 256, (n, *shape)).astype(np.uint8))


def plain(augment: tuple[str, ...], **how: object) -> Pipeline:
    return Pipeline(augment, None, None, 1, CIFAR, **how)  # type: ignore[arg-type]


def by_hand(augment: tuple[str, ...], image: np.ndarray, numbers: list[float]) -> np.ndarray:
    """One image, one step after the other, one pixel after the other."""
    height, width, _ = image.shape
    if "zero_pad4" in augment or "reflect_pad4" in augment:
        mode = "constant" if "zero_pad4" in augment else "reflect"
        padded = np.pad(image, ((4, 4), (4, 4), (0, 0)), mode=mode)  # type: ignore[call-overload]
        dy, dx = int(numbers.pop(0)), int(numbers.pop(0))
        image = padded[dy : dy + height, dx : dx + width]
    if "hflip" in augment and numbers.pop(0):
        image = image[:, ::-1]
    if "rotate15" in augment:
        angle = numbers.pop(0) * math.pi / 180
        c, s = math.cos(angle), math.sin(angle)
        out = np.zeros_like(image)
        for i in range(height):
            for j in range(width):
                u, v = j + 0.5 - width / 2, i + 0.5 - height / 2
                y, x = math.floor(s * u + c * v + height / 2), math.floor(c * u - s * v + width / 2)
                if 0 <= y < height and 0 <= x < width:
                    out[i, j] = image[y, x]
        image = out
    return image


def test_stream_check() -> None:
    stream = rng.train(0, 0, 0)
    assert stream.permutation(10)[:5].tolist() == [0, 9, 3, 4, 5]
    drawn = plain(("zero_pad4", "crop32", "hflip", "rotate15")).draw(stream, 10)
    assert drawn is not None and drawn.dtype == torch.float64 and drawn.shape == (10, 4)
    assert drawn[:3, 0].tolist() == [2, 1, 6]
    assert drawn[:3, 1].tolist() == [6, 2, 2]
    assert drawn[:3, 2].tolist() == [1, 0, 0]
    assert round(float(drawn[0, 3]), 6) == 14.590181
    assert stream.permutation(10)[:5].tolist() == [4, 3, 2, 8, 7]


def test_private_stream_check() -> None:
    drawn = plain(("zero_pad4", "crop32", "hflip")).draw(rng.private("fednh", "survey", 0, 0, 0), 10)
    assert drawn is not None
    assert drawn[:5, :2].T.tolist() == [[3, 5, 0, 4, 5], [7, 8, 6, 1, 8]]


@pytest.mark.parametrize("augment", SETTINGS, ids="+".join)
def test_against_pixel_loops(augment: tuple[str, ...]) -> None:
    x = pictures(12)
    pipeline = plain(augment)
    drawn = pipeline.draw(np.random.RandomState(1), 12)
    assert (0 if drawn is None else drawn.shape[1]) == pipeline.width
    numbers = [[]] * 12 if drawn is None else drawn.tolist()
    wanted = np.stack([by_hand(augment, x[k].numpy(), list(numbers[k])) for k in range(12)])
    got = pipeline.train(x, drawn)
    assert got.is_contiguous(memory_format=torch.channels_last) and got.dtype == torch.float32
    assert torch.equal(got, torch.from_numpy(wanted).permute(0, 3, 1, 2).float())


@pytest.mark.parametrize("augment", SETTINGS, ids="+".join)
def test_leading_dimensions_and_cuts_do_not_matter(augment: tuple[str, ...]) -> None:
    x = pictures(12)
    pipeline = Pipeline(augment, (0.4, 0.5, 0.6), (0.2, 0.3, 0.4), 255, CIFAR)
    drawn = pipeline.draw(np.random.RandomState(2), 12)
    whole = pipeline.train(x, drawn)
    folded = pipeline.train(x.view(2, 3, 2, *CIFAR), None if drawn is None else drawn.view(2, 3, 2, -1))
    assert torch.equal(folded.view(whole.shape), whole)
    parts = [pipeline.train(x[k : k + 5], None if drawn is None else drawn[k : k + 5]) for k in (0, 5, 10)]
    assert torch.equal(torch.cat(parts), whole)
    assert pipeline.train(x[:0], None if drawn is None else drawn[:0]).shape == (0, 3, 32, 32)
    assert torch.equal(x, pictures(12))  # the stored images stay as they are


def test_every_offset_of_both_pads() -> None:
    dy, dx = torch.meshgrid(torch.arange(9.0), torch.arange(9.0), indexing="ij")
    for flip in (0.0, 1.0):
        drawn = torch.stack([dy.flatten(), dx.flatten(), torch.full((81,), flip)], 1).double()
        x = pictures(1).expand(81, *CIFAR)
        for pad in ("zero_pad4", "reflect_pad4"):
            augment = (pad, "crop32", "hflip")
            wanted = np.stack([by_hand(augment, x[k].numpy(), drawn[k].tolist()) for k in range(81)])
            got = plain(augment).train(x, drawn)
            assert np.array_equal(got.permute(0, 2, 3, 1).numpy(), wanted)


def test_a_zero_pad_is_black_not_the_mean() -> None:
    pipeline = Pipeline(("zero_pad4", "crop32"), (0.5,), (0.25,), 255, CIFAR)
    out = pipeline.train(pictures(1), torch.zeros(1, 2, dtype=torch.float64))
    assert torch.equal(out[0, :, :4], torch.full((3, 4, 32), -2.0))


def test_rotation_is_counter_clockwise() -> None:
    # a white pixel right of the centre of an 8x8 image climbs by tan(15 degrees) times its distance
    image = torch.zeros(1, 64, 64, 1, dtype=torch.uint8)
    image[0, 30:34, 56:60] = 255
    pipeline = Pipeline(("rotate15",), None, None, 255, (64, 64, 1))
    out = pipeline.train(image, torch.tensor([[15.0]], dtype=torch.float64))
    assert out[0, 0].nonzero().double().mean(0)[0] < 27


def test_rotation_like_torchvision() -> None:
    from torchvision.transforms.functional import rotate

    x = pictures(1)
    for angle in (-15.0, -3.3, 0.0, 8.1, 14.59):
        got = plain(("rotate15",)).train(x, torch.tensor([[angle]], dtype=torch.float64))[0]
        wanted = rotate(x[0].permute(2, 0, 1), angle).float()
        # both take the nearest pixel; they differ where a corner of the grid falls between two
        assert (got == wanted).double().mean() > 0.97


def test_normalising_is_torchvisions() -> None:
    x = pictures(5)
    mean, std = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
    got = Pipeline((), mean, std, 255, CIFAR).test(x)
    columns = [torch.tensor(v)[:, None, None] for v in (mean, std)]
    assert torch.equal(got, (x.permute(0, 3, 1, 2).float() / 255 - columns[0]) / columns[1])


def test_no_mean_and_mean_zero_are_the_same_bits() -> None:
    x = pictures(3, (8, 8, 1)) % 17
    got = Pipeline((), (0.0,), (1.0,), 16, (8, 8, 1), torch.float64).test(x)
    assert got.dtype == torch.float64 and torch.equal(got, x.permute(0, 3, 1, 2).double() / 16)
    assert torch.equal(got, Pipeline((), None, None, 16, (8, 8, 1), torch.float64).test(x))


def test_features_stay_as_they_are() -> None:
    x = torch.randn(4, 1, 1, 7)
    assert torch.equal(Pipeline((), None, None, 1, (1, 1, 7)).train(x, None)[:, :, 0, 0], x[:, 0, 0])


def test_nothing_random_draws_nothing() -> None:
    stream, untouched = np.random.RandomState(0), np.random.RandomState(0)
    pipeline = Pipeline(("resize224",), None, None, 255, (224, 224, 3))
    assert pipeline.width == 0 and pipeline.draw(stream, 10) is None
    assert stream.random_sample() == untouched.random_sample()


def test_without_numbers_as_in_testing() -> None:
    pipeline = plain(("reflect_pad4", "crop32", "hflip"))
    x = pictures(4)
    assert torch.equal(pipeline.train(x, None), pipeline.test(x))


def test_read_only_arrays_are_enough() -> None:
    x = pictures(4).permute(0, 1, 2, 3)[::2]  # strided, as a slice of a larger array may be
    drawn = plain(("zero_pad4", "crop32")).draw(np.random.RandomState(0), 2)
    pipeline = plain(("zero_pad4", "crop32"))
    assert torch.equal(pipeline.train(x, drawn), pipeline.train(x.contiguous(), drawn))


@pytest.mark.parametrize(
    ("augment", "shape", "words"),
    [
        (("hflop",), CIFAR, "did you mean 'hflip'"),
        (("crop32",), CIFAR, "one pad"),
        (("zero_pad4",), CIFAR, "one pad"),
        (("zero_pad4", "reflect_pad4", "crop32"), CIFAR, "one pad"),
        (("hflip", "zero_pad4", "crop32"), CIFAR, "in the order of application"),
        (("hflip", "hflip"), CIFAR, "once"),
        (("zero_pad4", "crop64"), CIFAR, "use crop32"),
        (("zero_pad4", "crop32"), (8, 8, 1), "these are 8x8"),
        (("resize224",), CIFAR, "leave it out"),
    ],
)
def test_augmentations_that_do_not_fit(augment: tuple[str, ...], shape: tuple[int, int, int], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Pipeline(augment, None, None, 255, shape)


def test_normalisation_that_does_not_fit() -> None:
    with pytest.raises(UserError, match="give 1 or 3"):
        Pipeline((), (0.5, 0.5), (0.5,), 255, CIFAR)
    with pytest.raises(UserError, match="std must be above 0"):
        Pipeline((), (0.5,), (0.0,), 255, CIFAR)
    with pytest.raises(UserError, match="finite"):
        Pipeline((), (float("nan"),), (1.0,), 255, CIFAR)


def test_the_names_of_the_settings() -> None:
    assert set(AUGMENTATIONS) == {
        "zero_pad4",
        "reflect_pad4",
        "crop32",
        "crop64",
        "hflip",
        "rotate15",
        "resize224",
    }
