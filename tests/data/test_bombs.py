"""Files that claim, or hold, more than a machine has: refused in one line, before memory or disk is filled."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_sources import folder, noise, npz, picture, refusal

from protofl.data import images, layouts
from protofl.data.sources import load


def header(shape: tuple[int, ...]) -> bytes:
    """An .npy file without its values."""
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(out, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return out.getvalue()


def test_an_npz_that_claims_more_than_it_holds(tmp_path: Path) -> None:
    path = npz(tmp_path / "a.npz", x_train=None)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("x_train.npy", header((10**9, 1000, 1000)))
    assert str(path) in refusal(path)


def test_arrays_beyond_memory_are_priced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the table of contents; nothing is unpacked."""
    path = npz(tmp_path / "a.npz", x_train=noise(6, 40, 40, 3), x_test=noise(3, 40, 40, 3))
    real = layouts.os.sysconf
    monkeypatch.setattr(layouts.os, "sysconf", lambda name: 6 if name == "SC_PHYS_PAGES" else real(name))
    assert "of which a set may take half" in refusal(path)


def png(width: int, height: int) -> bytes:
    """A grey image that is all zeros, of a few kilobytes whatever its size."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    about = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", about) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def test_huge_images(tmp_path: Path) -> None:
    """Pillow's limit against bombs; its message, with the file."""
    for part in ("train", "test"):
        for name in "ab":
            (tmp_path / part / name).mkdir(parents=True)
            (tmp_path / part / name / "0.png").write_bytes(png(40000, 40000))
    said = refusal(tmp_path)
    assert "0.png cannot be read" in said and "1600000000 pixels" in said


def test_a_set_for_which_there_is_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str, shape: tuple[int, ...]) -> Any:
        raise MemoryError

    root = folder(tmp_path)
    with pytest.raises(Exception, match="4 images of 6x6 take 0.0 GB, for which there is neither disk nor memory"):
        images.read_images({"x_train": sorted(root.glob("train/*/*.png"))}, nothing)


@pytest.mark.parametrize("high", [256, 4095, 65535])
@pytest.mark.parametrize("kind", ["uint16", "int32"])
def test_pixels_of_more_than_eight_bits(high: int, kind: str, tmp_path: Path) -> None:
    """Which range they have cannot be known: 12 bits of 16, say. Features may be of any size."""
    x = np.random.RandomState(0).randint(0, high + 1, (9, 4, 4)).astype(kind)
    x.flat[:2] = 0, high
    said = refusal(npz(tmp_path / "a.npz", x_train=x[:6], x_test=x[6:]))
    assert f"whole numbers 0 to {high:g}" in said and "divide them" in said
    flat = load(str(npz(tmp_path / "b.npz", x_train=x[:6].reshape(6, 16), x_test=x[6:].reshape(3, 16))))
    assert flat.x_train.max() == high and flat.scale == 1


def test_large_members_of_archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that is larger than any batch is not read; a packed file is read up to a limit."""
    monkeypatch.setattr(layouts, "LARGEST", 1000)
    with tarfile.open(tmp_path / "cifar-10-python.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo("cifar-10-batches-py/data_batch_1")
        member.size = 2000
        archive.addfile(member, io.BytesIO(bytes(2000)))
    assert "data_batch_1 is 2000 bytes long" in refusal("cifar10", tmp_path)
    (tmp_path / "mnist").mkdir()
    for name in layouts.IDX_FILES:
        (tmp_path / "mnist" / f"{name}.gz").write_bytes(gzip.compress(bytes(5000)))
    assert "holds more than 1000 bytes" in refusal(tmp_path / "mnist")


def test_names_of_classes_that_are_markup(tmp_path: Path) -> None:
    """They come through as they are; escaping is what shows them does."""
    names = ["<script>alert(1)</script>".replace("/", "|"), r"$\input{x}$", "a:b", "two words", "%s {0}"]
    for part in ("train", "test"):
        for k, name in enumerate(names):
            picture(tmp_path / part / name / "0.png", noise(4, 4, seed=k))
    assert load(str(tmp_path)).classes == tuple(sorted(names))
