"""Reading data sets: every layout on small made-up sets, hostile files, the cache, and the real sets where
they are."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import pickle
import struct
import tarfile
import urllib.error
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from protofl.data import cache, download, layouts
from protofl.data.sources import Data, fetch, known, load, locate
from protofl.errors import UserError

REAL = Path(os.environ.get("PROTOFL_DATA", "/nonexistent"))


def sha(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.RandomState(seed).randint(0, 256, shape).astype(np.uint8)


def picture(file: Path, pixels: np.ndarray | Image.Image) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    image.save(file)


def folder(root: Path, test: str = "test", size: int = 6, grey: bool = False) -> Path:
    """Classes a and b, two training images and one test image each."""
    for part, n in (("train", 2), (test, 1)):
        for c, name in enumerate("ab"):
            for k in range(n):
                shape = (size, size) if grey else (size, size, 3)
                picture(root / part / name / f"{k}.png", noise(*shape, seed=10 * c + k))
    return root


def npz(file: Path, **change: Any) -> Path:
    parts: dict[str, Any] = {
        "x_train": noise(6, 4, 4, 3),
        "y_train": np.array([0, 1, 2, 0, 1, 2]),
        "x_test": noise(3, 4, 4, 3, seed=1),
        "y_test": np.array([2, 1, 0]),
    }
    parts |= change
    np.savez(file, **{key: value for key, value in parts.items() if value is not None})
    return file


def refusal(name: str | Path, data_dir: Path | None = None, order: str = "folder_sorted") -> str:
    with pytest.raises(UserError) as fault:
        load(str(name), data_dir, order)
    text = str(fault.value)
    assert "\n" not in text
    return text


# ---------------------------------------------------------------------------------------------------- digits


def test_digits() -> None:
    data = load("digits")
    assert data.x_train.shape == (1442, 8, 8, 1) and data.x_test.shape == (355, 8, 8, 1)
    assert data.x_train.dtype == np.uint8 and data.scale == 16 and data.source == "scikit-learn"
    assert (sha(data.x_train), sha(data.x_test)) == ("07a6f63a15c2f2a6", "50129fd8f6aebdff")
    assert (np.diff(data.y_train) >= 0).all() and data.y_train.dtype == np.int64
    assert data.classes == tuple("0123456789")
    assert load("digits").fingerprint == data.fingerprint


# ---------------------------------------------------------------------------------------------- .npz by path


def test_npz(tmp_path: Path) -> None:
    data = load(str(npz(tmp_path / "mine.npz")))
    assert data.name == "mine" and data.scale == 255 and data.classes == ("0", "1", "2")
    assert np.array_equal(data.x_train, noise(6, 4, 4, 3)) and data.y_test.tolist() == [2, 1, 0]
    assert not data.x_train.flags.writeable


def test_relative_paths_are_looked_for_here_and_in_the_data_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    npz(tmp_path / "mine.npz")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load("mine.npz").name == load("./mine.npz").name == "mine"
    monkeypatch.chdir(tmp_path / "empty")
    assert load("mine.npz", tmp_path).name == "mine"
    assert "no such file" in refusal("mine.npz")


@pytest.mark.parametrize(
    ("train", "test", "classes"),
    [
        ([1, 2, 3, 1, 2, 3], [3, 2, 1], ("1", "2", "3")),
        ([3, 7, 11, 3, 7, 11], [11, 7, 3], ("3", "7", "11")),
        ([1.0, 2.0, 10.0, 1.0, 2.0, 10.0], [10.0, 2.0, 1.0], ("1", "2", "10")),
        ([[0], [1], [2], [0], [1], [2]], [[2], [1], [0]], ("0", "1", "2")),
        ([-1, 0, 1, -1, 0, 1], [1, 0, -1], ("-1", "0", "1")),
        (["Z", "a", "b", "Z", "a", "b"], ["b", "a", "Z"], ("Z", "a", "b")),
        ([b"10", b"2", b"b", b"10", b"2", b"b"], [b"b", b"2", b"10"], ("10", "2", "b")),
    ],
    ids=["one_based", "gaps", "floats", "column", "negative", "strings", "bytes"],
)
def test_labels_of_any_kind(tmp_path: Path, train: list[Any], test: list[Any], classes: tuple[str, ...]) -> None:
    data = load(str(npz(tmp_path / "m.npz", y_train=np.array(train), y_test=np.array(test))))
    assert data.classes == classes
    assert data.y_train.tolist() == [0, 1, 2, 0, 1, 2] and data.y_test.tolist() == [2, 1, 0]


def test_names_of_classes(tmp_path: Path) -> None:
    names = np.array(["cat", "dog", "owl"])
    assert load(str(npz(tmp_path / "m.npz", classes=names))).classes == ("cat", "dog", "owl")
    four = np.array(["none", "cat", "dog", "owl"])
    shifted = {"y_train": np.array([1, 2, 3, 1, 2, 3]), "y_test": np.array([3, 2, 1])}
    assert load(str(npz(tmp_path / "m.npz", classes=four, **shifted))).classes == ("cat", "dog", "owl")
    assert load(str(npz(tmp_path / "m.npz", classes=names, **shifted))).classes == ("cat", "dog", "owl")
    assert "2 names" in refusal(npz(tmp_path / "m.npz", classes=names[:2]))
    assert "twice" in refusal(npz(tmp_path / "m.npz", classes=np.array(["a", "a", "b"])))


def test_the_same_pictures_in_any_units(tmp_path: Path) -> None:
    train, test = noise(6, 4, 4, 3), noise(3, 4, 4, 3, seed=1)
    whole = load(str(npz(tmp_path / "a.npz")))
    for kind in (
        lambda x: (x / 255).astype(np.float32),
        lambda x: x / 255,
        lambda x: x.astype(np.float32),
        lambda x: x.astype(np.int64),
        lambda x: np.ascontiguousarray(x.transpose(0, 3, 1, 2)),
    ):
        other = load(str(npz(tmp_path / "b.npz", x_train=kind(train), x_test=kind(test))))
        assert other.fingerprint == whole.fingerprint and other.scale == 255
    assert "channels first" in other.note


def test_shapes(tmp_path: Path) -> None:
    grey = load(str(npz(tmp_path / "g.npz", x_train=noise(6, 5, 4), x_test=noise(3, 5, 4))))
    assert grey.x_train.shape == (6, 5, 4, 1)
    first = load(str(npz(tmp_path / "f.npz", x_train=noise(6, 1, 5, 4), x_test=noise(3, 1, 5, 4))))
    assert first.x_train.shape == (6, 5, 4, 1) and first.fingerprint == grey.fingerprint
    numbers = np.random.RandomState(0).standard_normal((9, 7))
    table = load(str(npz(tmp_path / "t.npz", x_train=numbers[:6], x_test=numbers[6:])))
    assert table.x_train.shape == (6, 1, 1, 7) and table.x_train.dtype == np.float32 and table.scale == 1
    assert np.array_equal(table.x_train[:, 0, 0], numbers[:6].astype(np.float32))
    maps = load(str(npz(tmp_path / "n.npz", x_train=noise(6, 4, 4, 3) - 7.5, x_test=noise(3, 4, 4, 3) - 7.5)))
    assert maps.x_train.dtype == np.float32 and maps.scale == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x_train": None, "y_train": None}, "lacks x_train, y_train"),
        ({"x_train": noise(5, 4, 4, 3)}, "5 rows and y_train 6"),
        ({"x_test": noise(3, 4, 5, 3)}, "same sizes"),
        ({"x_train": noise(6, 4, 4, 5), "x_test": noise(3, 4, 4, 5)}, "C 1 or 3"),
        ({"x_train": noise(0, 4, 4, 3), "y_train": np.zeros(0)}, "empty"),
        ({"x_train": np.full((6, 4, 4), "a")}, "must be numbers"),
        ({"x_train": noise(6, 4, 4, 3) / 255}, "both must be floats"),
        ({"y_test": np.array([0, 1, 9])}, "test labels 9"),
        ({"y_train": np.zeros(6), "y_test": np.zeros(3)}, "two classes"),
        ({"y_train": np.eye(3)[[0, 1, 2, 0, 1, 2]]}, "argmax"),
        ({"y_train": np.array([0, 1, 2, 0, 1.5, 2])}, "1.5 in row 4"),
        ({"y_train": np.array([0, 1, 2, 0, np.nan, 2])}, "nan in row 4"),
        ({"y_train": np.array(list("abcabc"))}, "both be names"),
        ({"y_train": np.arange(6) * 1j}, "whole numbers or names"),
    ],
)
def test_npz_that_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    assert words in refusal(npz(tmp_path / "m.npz", **change))


@pytest.mark.parametrize(("value", "word"), [(np.nan, "NaN"), (np.inf, "infinity"), (1e300, "single precision")])
def test_rows_that_are_not_finite_are_named(tmp_path: Path, value: float, word: str) -> None:
    x = np.ones((6, 7))
    x[4, 2] = value
    text = refusal(npz(tmp_path / "m.npz", x_train=x, x_test=np.ones((3, 7))))
    assert "x_train row 4" in text and word in text


def test_files_that_are_no_npz(tmp_path: Path) -> None:
    file = tmp_path / "m.npz"
    np.savez(file, x=noise(3, 4, 4), y=np.arange(3))
    assert "without a split" in refusal(file)
    npz(file, y_train=np.array([0, 1, None], dtype=object))
    assert "pickled objects" in refusal(file)
    file.write_bytes(pickle.dumps({"x_train": 1}))
    assert "pickled" in refusal(file)
    npz(file)
    file.write_bytes(file.read_bytes()[:-200])
    assert "damaged" in refusal(file)
    for junk in (b"", b"hello", b"PK\3\4junk"):
        file.write_bytes(junk)
        assert "m.npz" in refusal(file)
    with file.open("wb") as out:
        np.save(out, noise(3))
    assert "single array" in refusal(file)


def test_names_that_are_not_known(tmp_path: Path) -> None:
    assert "did you mean 'cifar10'" in refusal("cifar-10")
    assert "did you mean 'digits'" in refusal("digts")
    assert "did you mean 'folder_sorted'" in refusal("digits", order="folder_sort")
    assert "cifar10 and cifar100 only" in refusal("digits", order="torchvision")
    (tmp_path / "odd").mkdir()
    assert "train/<class>" in refusal(tmp_path / "odd")
    assert "unknown data set ''" in refusal("")


# --------------------------------------------------------------------------------------------- image folders


def test_image_folder(tmp_path: Path) -> None:
    root = folder(tmp_path / "pics")
    picture(root / "train" / "B" / "10.png", noise(6, 6, 3, seed=5))
    picture(root / "train" / "B" / "9.png", noise(6, 6, 3, seed=6))
    (root / "train" / "B" / ".hidden.png").write_bytes(b"junk")
    (root / "train" / "B" / "notes.txt").write_text("no image")
    (root / "train" / ".cache").mkdir()
    data = load(str(root))
    assert data.name == "pics" and data.classes == ("B", "a", "b") and data.y_train.tolist() == [0, 0, 1, 1, 2, 2]
    assert data.y_test.tolist() == [1, 2] and data.x_train.shape == (6, 6, 6, 3)
    assert np.array_equal(data.x_train[0], noise(6, 6, 3, seed=5))  # "10.png" before "9.png"
    assert isinstance(data.x_train, np.memmap) and not data.x_train.flags.writeable


def test_val_stands_in_for_test_only_with_the_same_classes(tmp_path: Path) -> None:
    assert "test set from val/" in load(str(folder(tmp_path / "a", test="val"))).note
    flat = folder(tmp_path / "b", test="val")
    for name in "ab":
        (flat / "val" / name / "0.png").rename(flat / "val" / f"{name}.png")
        (flat / "val" / name).rmdir()
    assert "val lacks images of a, b" in refusal(flat)
    other = folder(tmp_path / "c", test="val")
    (other / "val" / "b").rename(other / "val" / "c")
    assert "classes that train/ lacks: c" in refusal(other)


def test_grey_sets_keep_one_channel(tmp_path: Path) -> None:
    root = folder(tmp_path / "pics", grey=True)
    grey = load(str(root))
    assert grey.x_train.shape == (4, 6, 6, 1) and np.array_equal(grey.x_train[0, ..., 0], noise(6, 6))
    picture(root / "train" / "a" / "z.png", noise(6, 6, 3))
    colour = load(str(root))
    assert colour.x_train.shape == (5, 6, 6, 3) and np.array_equal(colour.x_train[0, ..., 2], noise(6, 6))


def test_kinds_of_images(tmp_path: Path) -> None:
    root = folder(tmp_path / "pics")
    rgb = Image.fromarray(noise(6, 6, 3, seed=7))
    kinds = {
        "palette.png": rgb.quantize(16),
        "cmyk.jpg": rgb.convert("CMYK"),
        "alpha.png": rgb.convert("RGBA"),
        "greyalpha.png": Image.fromarray(noise(6, 6)).convert("LA"),
        "bits.png": Image.fromarray(noise(6, 6) > 127),
        "deep.png": Image.fromarray(noise(6, 6).astype(np.uint16) * 257),
        "deep.tif": Image.fromarray(noise(6, 6).astype(np.int32) * 257),
        "small.webp": rgb,
        "UPPER.PNG": rgb,
    }
    for name, image in kinds.items():
        picture(root / "train" / "k" / name, image)
    picture(root / "test" / "k" / "0.png", rgb)
    data = load(str(root))
    of = dict(zip(sorted(kinds), data.x_train[data.y_train == 2], strict=True))
    assert np.array_equal(of["UPPER.PNG"], noise(6, 6, 3, seed=7)) and np.array_equal(of["alpha.png"], of["UPPER.PNG"])
    assert np.array_equal(of["deep.png"][..., 0], noise(6, 6)) and np.array_equal(of["deep.tif"], of["deep.png"])
    assert np.array_equal(of["greyalpha.png"], of["deep.png"]) and set(np.unique(of["bits.png"])) <= {0, 255}
    assert np.array_equal(of["palette.png"], np.asarray(kinds["palette.png"].convert("RGB")))


def test_odd_sizes_are_named(tmp_path: Path) -> None:
    root = folder(tmp_path / "pics")
    picture(root / "train" / "b" / "odd.png", noise(6, 7, 3))
    text = refusal(root)
    assert "odd.png is 7x6" in text and "0.png is 6x6" in text


@pytest.mark.parametrize("damage", ["empty", "junk", "truncated"])
def test_images_that_are_none(tmp_path: Path, damage: str) -> None:
    root = folder(tmp_path / "pics", size=40)
    bad = root / "train" / "b" / "bad.png"
    picture(bad, noise(40, 40, 3))
    bad.write_bytes({"empty": b"", "junk": b"not an image", "truncated": bad.read_bytes()[:3000]}[damage])
    text = refusal(root)
    assert "bad.png cannot be read" in text and ("empty" in text) == (damage == "empty")
    assert not list((tmp_path / "cache" / "decoded").iterdir())


def test_folders_that_are_refused(tmp_path: Path) -> None:
    root = folder(tmp_path / "pics")
    (root / "train" / "c").mkdir()
    assert "train/c holds no images" in refusal(root)
    one = folder(tmp_path / "one")
    for part in ("train", "test"):
        for file in (one / part / "b").iterdir():
            file.unlink()
        (one / part / "b").rmdir()
    assert "at least two" in refusal(one)
    (tmp_path / "none" / "train").mkdir(parents=True)
    (tmp_path / "none" / "test").mkdir()
    assert "no class folders" in refusal(tmp_path / "none")


# ----------------------------------------------------------------------------------------------------- cache


def test_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = folder(tmp_path / "pics")
    first = load(str(root))
    with monkeypatch.context() as patch:
        patch.setattr("protofl.data.images.decode", None)
        again = load(str(root))
    assert again.fingerprint == first.fingerprint and np.array_equal(again.x_test, first.x_test)
    assert again.classes == first.classes and again.note == first.note
    picture(root / "train" / "a" / "0.png", noise(6, 6, 3, seed=99))
    changed = load(str(root))
    assert changed.fingerprint != first.fingerprint and np.array_equal(changed.x_train[0], noise(6, 6, 3, seed=99))


def test_the_same_content_elsewhere_has_the_same_fingerprint(tmp_path: Path) -> None:
    a, b = load(str(folder(tmp_path / "a"))), load(str(folder(tmp_path / "else" / "b")))
    assert a.fingerprint == b.fingerprint and len(a.fingerprint) == 16
    assert npz_of(tmp_path / "c.npz", a).fingerprint == a.fingerprint


def npz_of(file: Path, data: Data) -> Data:
    parts = {key: getattr(data, key) for key in ("x_train", "y_train", "x_test", "y_test")}
    np.savez(file, classes=np.array(data.classes), **parts)
    return load(str(file))


@pytest.mark.parametrize("damage", ["cut", "gone", "meta"])
def test_a_damaged_entry_is_made_again(tmp_path: Path, damage: str) -> None:
    root = folder(tmp_path / "pics")
    first = load(str(root))
    entry = next((tmp_path / "cache" / "decoded").iterdir())
    if damage == "cut":
        (entry / "x_train.npy").write_bytes((entry / "x_train.npy").read_bytes()[:200])
    elif damage == "gone":
        (entry / "y_test.npy").unlink()
    else:
        (entry / "meta.json").write_text("{")
    again = load(str(root))
    assert again.fingerprint == first.fingerprint and isinstance(again.x_train, np.memmap)


def test_without_a_place_for_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = folder(tmp_path / "pics")
    first = load(str(root))
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("PROTOFL_CACHE", str(tmp_path / "file"))
    again = load(str(root))
    assert again.fingerprint == first.fingerprint and not isinstance(again.x_train, np.memmap)


def test_a_full_disk_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    root = folder(tmp_path / "pics")
    monkeypatch.setattr(np.lib.format, "open_memmap", full)
    monkeypatch.setattr(np, "save", full)
    assert not isinstance(load(str(root)).x_train, np.memmap)
    assert not list((tmp_path / "cache" / "decoded").iterdir())


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    left, fresh = (tmp_path / "cache" / "decoded" / name for name in (".old-1", ".new-1"))
    for place in (left, fresh):
        place.mkdir(parents=True)
    os.utime(left, (0, 0))
    load(str(folder(tmp_path / "pics")))
    assert not left.exists() and fresh.exists()


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROTOFL_CACHE")
    assert cache.cache_dir().name == "protofl"


# ----------------------------------------------------------------------------------------------------- CIFAR


def batches(root: Path, name: str = "cifar10", rows: int = 6) -> tuple[Path, np.ndarray, list[str], list[int]]:
    """Official batches of noise; returns the folder and, in the order of the batches, images, names and
    labels."""
    kind = layouts.CIFAR[name]
    k = 10 if name == "cifar10" else 100
    place = root / kind.folder
    place.mkdir(parents=True)
    rs = np.random.RandomState(0)
    images, names, labels = [], [], []
    for at, member in enumerate((*kind.train, kind.test)):
        data = rs.randint(0, 256, (rows * k // 10, 3072)).astype(np.uint8)
        y = (rs.permutation(rows * k // 10) % k).tolist()
        files = [f"s_{v:06d}.png" for v in rs.permutation(10**5)[: len(y)]]
        batch = {"data": data, kind.labels: y, "filenames": files, "coarse_labels": [0] * len(y)}
        (place / member).write_bytes(pickle.dumps(batch, protocol=2))
        if at < len(kind.train):
            images.append(data.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
            names += files
            labels += y
    (place / kind.meta).write_bytes(pickle.dumps({kind.names: [f"class_{c:02d}" for c in range(k)]}, protocol=2))
    return place, np.concatenate(images), names, labels


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
@pytest.mark.parametrize("packed", [False, True])
def test_cifar_batches(tmp_path: Path, name: str, packed: bool) -> None:
    place, images, names, labels = batches(tmp_path, name, rows=20)
    if packed:
        archive = tmp_path / layouts.CIFAR[name].archive
        with tarfile.open(archive, "w:gz") as out:
            out.add(place, place.name)
        place.rename(tmp_path / "away")
    data = load(name, tmp_path)
    wanted = sorted(range(len(labels)), key=lambda k: (labels[k], names[k].encode()))
    assert np.array_equal(data.x_train, images[wanted]) and data.y_train.tolist() == sorted(labels)
    assert data.classes[1] == "class_01" and len(data.classes) == len(set(labels))
    stored = load(name, tmp_path, "torchvision")
    assert np.array_equal(stored.x_train, images) and stored.y_train.tolist() == labels
    assert locate(name, tmp_path).layout == ("cifar archive" if packed else "cifar batches")


def test_cifar_classes_are_ranked_by_name(tmp_path: Path) -> None:
    place, _, _, labels = batches(tmp_path, rows=20)
    backwards = [f"class_{9 - c}" for c in range(10)]
    (place / "batches.meta").write_bytes(pickle.dumps({"label_names": backwards}, protocol=2))
    data = load("cifar10", tmp_path, "torchvision")
    assert data.classes == tuple(sorted(backwards)) and data.y_train.tolist() == [9 - y for y in labels]


class Hostile:
    def __init__(self, call: Any, *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> Any:
        return self.call, self.arguments


@pytest.mark.parametrize("call", ["system", "eval", "getattr"])
def test_a_hostile_batch_is_refused(tmp_path: Path, call: str) -> None:
    place, *_ = batches(tmp_path)
    mark = tmp_path / "mark"
    calls = {
        "system": Hostile(os.system, f"touch {mark}"),
        "eval": Hostile(eval, f"open({str(mark)!r}, 'w')"),
        "getattr": Hostile(getattr, "x", "y"),
    }
    (place / "data_batch_3").write_bytes(pickle.dumps({"data": calls[call]}, protocol=2))
    text = refusal("cifar10", tmp_path)
    assert "data_batch_3 is no CIFAR batch" in text and not mark.exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data": np.zeros((6, 3072))}, "uint8 array"),
        ({"data": [1]}, "uint8 array"),
        ({"labels": [0, 1]}, "list of 6"),
        ({"labels": [0, 1, 2, 3, 4, 10]}, "0..9"),
        ({"filenames": None}, "filenames"),
    ],
)
def test_odd_batches_are_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    place, *_ = batches(tmp_path)
    batch = pickle.loads((place / "data_batch_2").read_bytes())
    (place / "data_batch_2").write_bytes(pickle.dumps(batch | change, protocol=2))
    assert words in refusal("cifar10", tmp_path)
    (place / "data_batch_2").write_bytes(b"\x80\x02}junk")
    assert "data_batch_2 is no CIFAR batch" in refusal("cifar10", tmp_path)


def test_cifar_as_npz_or_folder_has_no_torchvision_order(tmp_path: Path) -> None:
    y = np.arange(10)
    npz(
        tmp_path / "cifar10.npz",
        x_train=noise(10, 32, 32, 3),
        y_train=y[::-1],
        x_test=noise(10, 32, 32, 3),
        y_test=y,
    )
    data = load("cifar10", tmp_path)
    assert data.y_train.tolist() == y.tolist() and "rows sorted by class" in data.note
    assert np.array_equal(data.x_train, noise(10, 32, 32, 3)[::-1])
    text = refusal("cifar10", tmp_path, "torchvision")
    assert "cifar-10-batches-py" in text and "folder_sorted" in text
    assert load("cifar10", folder(tmp_path / "d" / "cifar10").parent).classes == ("a", "b")


def test_a_cut_archive_shows_its_checksum(tmp_path: Path) -> None:
    place, *_ = batches(tmp_path)
    archive = tmp_path / "cifar-10-python.tar.gz"
    with tarfile.open(archive, "w:gz") as out:
        out.add(place, place.name)
    place.rename(tmp_path / "away")
    archive.write_bytes(archive.read_bytes()[:5000])
    text = refusal("cifar10", tmp_path)
    assert "checksum" in text and layouts.CIFAR["cifar10"].md5 in text and str(archive) in text


def test_a_climbing_archive_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "cifar-10-python.tar.gz", "w:gz") as out:
        out.addfile(tarfile.TarInfo("../data_batch_1"), io.BytesIO())
    assert "leads out" in refusal("cifar10", tmp_path)


# ------------------------------------------------------------------------------------------------------- IDX


def idx_files(root: Path, packed: bool = True) -> tuple[np.ndarray, np.ndarray]:
    root.mkdir(parents=True, exist_ok=True)
    x, y = noise(20, 28, 28), np.random.RandomState(0).permutation(20) % 10
    for part in ("train", "t10k"):
        for what, array in (("images-idx3", x), ("labels-idx1", y.astype(np.uint8))):
            body = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()
            file = root / f"{part}-{what}-ubyte{'.gz' if packed else ''}"
            file.write_bytes(gzip.compress(body) if packed else body)
    return x, y


@pytest.mark.parametrize("place", ["FashionMNIST/raw", "fashion-mnist", "."])
@pytest.mark.parametrize("packed", [True, False])
def test_fashion_mnist(tmp_path: Path, place: str, packed: bool) -> None:
    x, y = idx_files(tmp_path / place, packed)
    data = load("fashion-mnist", tmp_path)
    assert (
        data.classes[0] == "T-shirt/top" and data.classes[9] == "Ankle boot" and data.x_train.shape == (20, 28, 28, 1)
    )
    assert data.y_train.tolist() == sorted(y.tolist())
    assert np.array_equal(data.x_train[..., 0], x[np.argsort(y, kind="stable")])


def test_any_folder_of_idx_files(tmp_path: Path) -> None:
    idx_files(tmp_path / "mnist")
    assert load(str(tmp_path / "mnist")).classes == tuple("0123456789")


@pytest.mark.parametrize("damage", ["cut", "unpacked", "magic"])
def test_damaged_idx_files(tmp_path: Path, damage: str) -> None:
    idx_files(tmp_path, packed=damage == "cut")
    file = tmp_path / f"train-images-idx3-ubyte{'.gz' if damage == 'cut' else ''}"
    body = file.read_bytes()
    file.write_bytes(b"junk" + body[4:] if damage == "magic" else body[: len(body) // 2])
    assert "train-images-idx3-ubyte" in refusal("fashion-mnist", tmp_path)


# --------------------------------------------------------------------------------------------- tiny-imagenet


def tiny(root: Path) -> Path:
    """Two classes; the flat validation images list b first."""
    for c, name in enumerate(("n01", "n02")):
        for k in (2, 10):
            picture(root / "train" / name / "images" / f"{name}_{k}.JPEG", noise(64, 64, seed=c))
        (root / "train" / name / f"{name}_boxes.txt").write_text("boxes")
    lines = []
    for k, name in ((0, "n02"), (1, "n01"), (2, "n02")):
        picture(root / "val" / "images" / f"val_{k}.JPEG", noise(64, 64, 3, seed=k))
        lines.append(f"val_{k}.JPEG\t{name}\t0\t0\t1\t1")
    (root / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    return root


@pytest.mark.parametrize("by_name", [True, False])
def test_tiny_imagenet(tmp_path: Path, by_name: bool) -> None:
    root = tiny(tmp_path / "tiny-imagenet-200")
    data = load("tiny-imagenet", tmp_path) if by_name else load(str(root))
    assert data.classes == ("n01", "n02") and data.y_train.tolist() == [0, 0, 1, 1]
    assert data.y_test.tolist() == [0, 1, 1] and data.x_train.shape == (4, 64, 64, 3)
    shown = [np.asarray(Image.open(root / "val" / "images" / f"val_{k}.JPEG")) for k in (1, 0, 2)]
    assert np.array_equal(data.x_test, np.stack(shown))
    assert (data.x_train[..., 0] == data.x_train[..., 2]).all()  # grey images repeated to colour


def test_tiny_imagenet_with_all_images_grey_has_three_channels(tmp_path: Path) -> None:
    root = tiny(tmp_path / "tiny-imagenet-200")
    for file in (root / "val" / "images").iterdir():
        picture(file, noise(64, 64))
    assert load("tiny-imagenet", tmp_path).x_test.shape == (3, 64, 64, 3)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("val_0.JPEG\tn02\nval_1.JPEG\tn01\n", "does not list val_2.JPEG"),
        ("val_0.JPEG\tn02\nval_1.JPEG\tn01\nval_2.JPEG\tn03", "line 3: class 'n03'"),
        ("val_0.JPEG\tn02\nval_1.JPEG\tn01\nval_2.JPEG\tn02\nval_9.JPEG\tn02", "lists val_9.JPEG"),
        ("val_0.JPEG\tn02\nval_0.JPEG\tn01\n", "line 2"),
        ("../val_0.JPEG\tn02\n", "line 1"),
        ("val_0.JPEG\n", "line 1"),
    ],
)
def test_annotations_that_do_not_fit(tmp_path: Path, lines: str, words: str) -> None:
    root = tiny(tmp_path / "tiny-imagenet-200")
    (root / "val" / "val_annotations.txt").write_text(lines)
    assert words in refusal("tiny-imagenet", tmp_path)


def test_tiny_imagenet_sorted_by_hand(tmp_path: Path) -> None:
    root = tiny(tmp_path / "tiny-imagenet-200")
    for k, name in ((0, "n02"), (1, "n01"), (2, "n02")):
        (root / "val" / name / "images").mkdir(parents=True, exist_ok=True)
        (root / "val" / "images" / f"val_{k}.JPEG").rename(root / "val" / name / "images" / f"val_{k}.JPEG")
    (root / "val" / "images").rmdir()
    (root / "val" / "val_annotations.txt").unlink()
    assert load("tiny-imagenet", tmp_path).y_test.tolist() == [0, 1, 1]


def test_tiny_imagenet_not_unpacked(tmp_path: Path) -> None:
    archive = tmp_path / "tiny-imagenet-200.zip"
    with zipfile.ZipFile(archive, "w") as out:
        out.writestr("tiny-imagenet-200/wnids.txt", "n01")
    assert "not unpacked" in refusal("tiny-imagenet", tmp_path)
    archive.write_bytes(archive.read_bytes()[:20])
    assert "checksum" in refusal("tiny-imagenet", tmp_path)


# -------------------------------------------------------------------------------------------------- vireo172


def vireo(root: Path) -> Path:
    for c in (1, 2, 10):
        for k in range(3):
            picture(root / "ready_chinese_food" / str(c) / f"{k}.jpg", noise(230, 300, 3, seed=c))
    (root / "SplitAndIngreLabel").mkdir()
    for part, k in (("TR", 0), ("VAL", 1), ("TE", 2)):
        text = "".join(f"/{c}/{k}.jpg\n" for c in (10, 1, 2))
        (root / "SplitAndIngreLabel" / f"{part}.txt").write_text(text)
    return root


def test_vireo(tmp_path: Path) -> None:
    root = vireo(tmp_path / "vireo172")
    data = load("vireo172", tmp_path)
    assert data.x_train.shape == data.x_test.shape == (3, 224, 224, 3)
    assert data.classes == ("1", "10", "2") and data.y_train.tolist() == [0, 1, 2]
    assert "TR.txt" in data.note and "224" in data.note
    image = Image.open(root / "ready_chinese_food" / "1" / "0.jpg")
    resized = image.resize((300 * 224 // 230, 224), Image.Resampling.BILINEAR)
    assert np.array_equal(data.x_train[0], np.asarray(resized.crop((34, 0, 258, 224))))


def test_vireo_resizes_as_torchvision_does(tmp_path: Path) -> None:
    from torchvision.transforms import CenterCrop, Resize

    from protofl.data.images import decode

    for k, (height, width) in enumerate(((230, 301), (100, 77), (224, 224), (225, 500))):
        picture(tmp_path / f"{k}.png", noise(height, width, 3))
        wanted = CenterCrop(224)(Resize(224)(Image.open(tmp_path / f"{k}.png")))
        assert np.array_equal(decode(tmp_path / f"{k}.png", False, 224), np.asarray(wanted))


@pytest.mark.parametrize(
    ("part", "lines", "words"),
    [
        ("TR", "/1/0.jpg\n/1/77.jpg\n", "line 2"),
        ("TR", "/1/0.jpg\n/2/../1/0.jpg\n", "line 2"),
        ("TR", "", "empty"),
        ("TR", "/1/0.jpg\n/2/0.jpg\n", "classes that TR.txt lacks: 10"),
    ],
)
def test_vireo_lists_that_do_not_fit(tmp_path: Path, part: str, lines: str, words: str) -> None:
    root = vireo(tmp_path / "vireo172")
    (root / "SplitAndIngreLabel" / f"{part}.txt").write_text(lines)
    assert words in refusal("vireo172", tmp_path)


# -------------------------------------------------------------------------------------- finding and fetching


def test_the_table_of_known_sets(tmp_path: Path) -> None:
    assert set(known()) == {"digits", "fashion-mnist", "cifar10", "cifar100", "tiny-imagenet", "vireo172"}
    for name, source in known().items():
        place = locate(name, tmp_path)
        assert source.name == name and source.what and source.expected and source.get
        assert place.found == (name == "digits") and (place.found or place.looked == (tmp_path,))


def test_where_sets_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert locate("cifar10").looked == (Path("data"), tmp_path / "cache" / "data")
    monkeypatch.setenv("PROTOFL_DATA", str(tmp_path / "mine"))
    assert locate("cifar10").looked == (tmp_path / "mine",)
    assert locate("cifar10", tmp_path / "given").looked == (tmp_path / "given",)


def test_a_set_that_is_not_there_names_files_and_folder(tmp_path: Path) -> None:
    text = refusal("cifar10", tmp_path)
    for word in (str(tmp_path), "cifar-10-batches-py/", "cifar-10-python.tar.gz", "cifar10.npz", "fetch"):
        assert word in text
    assert "on request" in refusal("vireo172", tmp_path)


def test_fetching_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(url: str, root: str, filename: str, md5: str) -> None:
        (Path(root) / filename).write_bytes(b"half")
        raise urllib.error.URLError("Network is unreachable")

    monkeypatch.setattr("torchvision.datasets.utils.download_url", cut)
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: cut("", str(tmp_path / "w"), "f", ""))
    (tmp_path / "w").mkdir()
    for name, word in (("cifar10", "cifar-10-batches-py/"), ("tiny-imagenet", "tiny-imagenet-200/")):
        with pytest.raises(UserError) as fault:
            fetch(name, tmp_path / "data")
        text = str(fault.value)
        assert "unreachable" in text and word in text and str(tmp_path / "data") in text and "\n" not in text
        assert not list((tmp_path / "data").iterdir())


def test_fetching_from_an_archive_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tiny(tmp_path / "made" / "tiny-imagenet-200")
    archive = tmp_path / "tiny-imagenet-200.zip"
    with zipfile.ZipFile(archive, "w") as out:
        for file in sorted(root.rglob("*.*")):
            out.write(file, file.relative_to(root.parent))
    monkeypatch.setattr(download, "TINY_MD5", hashlib.md5(archive.read_bytes()).hexdigest())
    assert fetch("tiny-imagenet", tmp_path) == tmp_path / "tiny-imagenet-200"
    assert load("tiny-imagenet", tmp_path).x_test.shape == (3, 64, 64, 3)
    assert fetch("tiny-imagenet", tmp_path) == tmp_path / "tiny-imagenet-200"


def test_sets_that_cannot_be_fetched(tmp_path: Path) -> None:
    for name, word in (
        ("vireo172", "SplitAndIngreLabel"),
        ("digits", "scikit-learn"),
        ("cifar", "did you mean"),
    ):
        with pytest.raises(UserError, match=word):
            fetch(name, tmp_path)


@pytest.mark.parametrize("member", ["../out.txt", "/tmp/out.txt", "a/../../out.txt", "..\\out.txt", "C:/out.txt"])
def test_climbing_zip_files_are_not_unpacked(tmp_path: Path, member: str) -> None:
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as out:
        out.writestr(member, "x")
    with pytest.raises(UserError, match="leads out"):
        download.unpack(tmp_path / "z.zip", tmp_path / "in", "")
    assert not (tmp_path / "in").exists() and not (tmp_path / "out.txt").exists()


def test_links_are_not_unpacked(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as out:
        link = zipfile.ZipInfo("link")
        link.external_attr = 0o120777 << 16
        out.writestr(link, "/etc")
    with tarfile.open(tmp_path / "t.tar.gz", "w:gz") as bundle:
        info = tarfile.TarInfo("link")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc"
        bundle.addfile(info)
    for name in ("z.zip", "t.tar.gz"):
        with pytest.raises(UserError, match="is a link"):
            download.unpack(tmp_path / name, tmp_path / "in", "")
    (tmp_path / "bad.zip").write_bytes(b"PK junk")
    with pytest.raises(UserError, match="checksum"):
        download.unpack(tmp_path / "bad.zip", tmp_path / "in", "official")


def test_reading_warns_of_nothing(tmp_path: Path) -> None:
    root = folder(tmp_path / "pics")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(str(root))
        load(str(npz(tmp_path / "m.npz")))


# --------------------------------------------------------------------------------------------- the real sets


@pytest.mark.data
@pytest.mark.skipif(not (REAL / "cifar10.npz").is_file(), reason="PROTOFL_DATA names no folder with cifar10.npz")
@pytest.mark.parametrize(
    ("name", "train", "test"),
    [
        ("cifar10", "61bea91e73ac2b02", "52a9dc125982c044"),
        ("cifar100", "2aa2e92a742ec0fb", "2716d826d85ee9ca"),
    ],
)
def test_the_real_cifar(name: str, train: str, test: str) -> None:
    if not (REAL / f"{name}.npz").is_file():
        pytest.skip(f"PROTOFL_DATA has no {name}.npz")
    data = load(name, REAL)
    assert (sha(data.x_train), sha(data.x_test)) == (train, test)
    per_class = 50000 // len(data.classes)
    assert np.array_equal(data.y_train, np.repeat(np.arange(len(data.classes)), per_class))
    assert list(data.classes) == sorted(data.classes)


@pytest.mark.data
@pytest.mark.skipif(
    not (REAL / "tiny-imagenet-200").is_dir(), reason="PROTOFL_DATA names no folder with tiny-imagenet-200"
)
def test_the_real_tiny_imagenet() -> None:
    data = load("tiny-imagenet", REAL)
    assert data.x_train.shape[1:] == (64, 64, 3) and len(data.classes) == 200
    assert len(set(np.bincount(data.y_train))) == 1 and len(set(np.bincount(data.y_test))) == 1
