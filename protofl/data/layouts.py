"""The forms in which data sets lie on disk, one reader for each.

A reader takes the path of one form and returns a `Content` in `folder_sorted` order: classes by name in ASCII
order, the rows of a class by file name, bytewise. It never runs anything that a file holds.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import math
import os
import pickle
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from protofl.data.arrays import map_labels, read_npz
from protofl.data.cache import Content
from protofl.data.images import Allocate, is_image, one_line, read_images
from protofl.errors import UserError

Array = npt.NDArray[Any]
TEST_FOLDERS = ("test", "val")


@dataclass(frozen=True)
class Layout:
    """One form: how it is recognised, which files it is made of (for the cache's key) and how it is read."""

    name: str
    here: Callable[[Path], bool]
    files: Callable[[Path], list[Path]]
    read: Callable[[Path, Allocate], Content]
    large: Callable[[Path], bool]
    """Whether decoding is worth keeping."""


def _always(path: Path) -> bool:
    return True


def _itself(path: Path) -> list[Path]:
    return [path]


def _tree(path: Path) -> list[Path]:
    """All files below a folder, in a fixed order, hidden ones apart."""
    found: list[Path] = []
    visited: set[str] = set()
    for folder, folders, names in os.walk(path, followlinks=True):
        visited.add(os.path.realpath(folder))
        kept = sorted(name for name in folders if not name.startswith("."))
        folders[:] = [name for name in kept if os.path.realpath(os.path.join(folder, name)) not in visited]
        found += [Path(folder, name) for name in sorted(names) if not name.startswith(".")]
    return found


def is_dir(path: Path) -> bool:
    """Whether there is a folder that may be looked at."""
    try:
        return path.is_dir()
    except OSError:
        return False


def is_file(path: Path) -> bool:
    """Whether there is a file that may be looked at."""
    try:
        return path.is_file()
    except OSError:
        return False


# ------------------------------------------------------------------------------------------------------- npz


def npz(*, by_class: bool = False) -> Layout:
    """An .npz file of arrays; `by_class`: its rows are brought into the order of their classes."""

    def read(path: Path, allocate: Allocate) -> Content:
        return read_npz(path, by_class=by_class)

    return Layout("npz", is_file, _itself, read, lambda path: path.stat().st_size > 2**25)


# ----------------------------------------------------------------------------------------------------- CIFAR


@dataclass(frozen=True)
class _Cifar:
    folder: str
    archive: str
    md5: str
    train: tuple[str, ...]
    test: str
    meta: str
    names: str
    labels: str


CIFAR = {
    "cifar10": _Cifar(
        "cifar-10-batches-py",
        "cifar-10-python.tar.gz",
        "c58f30108f718f92721af3b95e74349a",
        tuple(f"data_batch_{k}" for k in range(1, 6)),
        "test_batch",
        "batches.meta",
        "label_names",
        "labels",
    ),
    "cifar100": _Cifar(
        "cifar-100-python",
        "cifar-100-python.tar.gz",
        "eb9058c3a382ffc7106e4002c42a8d85",
        ("train",),
        "test",
        "meta",
        "fine_label_names",
        "fine_labels",
    ),
}


def cifar_batches(name: str, order: str) -> Layout:
    """The folder of the official python batches."""
    kind = CIFAR[name]

    def here(path: Path) -> bool:
        return all(is_file(path / member) for member in (*kind.train, kind.test, kind.meta))

    def files(path: Path) -> list[Path]:
        return [path / member for member in (*kind.train, kind.test, kind.meta)]

    def read(path: Path, allocate: Allocate) -> Content:
        return _cifar(kind, lambda member: (path / member).read_bytes(), str(path), order)

    return Layout("cifar batches", here, files, read, _always)


def cifar_archive(name: str, order: str) -> Layout:
    """The official .tar.gz with the python batches, read without unpacking it to disk."""
    kind = CIFAR[name]

    def read(path: Path, allocate: Allocate) -> Content:
        members = _tar_members(path, kind)
        return _cifar(kind, lambda member: members[member], str(path), order)

    return Layout("cifar archive", is_file, _itself, read, _always)


LARGEST = 2**28
"""Bytes of the largest file that is read whole from an archive; the largest batch has 154 million."""


def _tar_members(path: Path, kind: _Cifar) -> dict[str, bytes]:
    wanted = (*kind.train, kind.test, kind.meta)
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r:*") as archive:
            for member in archive:
                check_member(path, member.name, member.isreg() or member.isdir())
                name = PurePosixPath(member.name).name
                if member.isreg() and name in wanted:
                    if member.size > LARGEST:
                        raise tarfile.TarError(f"{name} is {member.size} bytes long, more than any batch")
                    body = archive.extractfile(member)
                    assert body is not None  # a regular file has a body
                    found[name] = body.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error) as fault:
        raise damaged(path, kind.md5, one_line(fault)) from None
    missing = [name for name in wanted if name not in found]
    if missing:
        raise damaged(path, kind.md5, f"{missing[0]} is not in it")
    return found


def check_member(archive: Path, name: str, plain: bool) -> None:
    """Raise UserError for a member of an archive that is a link or would be unpacked outside its folder."""
    pure = PurePosixPath(name)
    if not plain or pure.is_absolute() or ".." in pure.parts or "\\" in name or name[1:2] == ":":
        raise UserError(
            f"archive {archive} holds {name!r}, which leads out of its folder or is a link; it is not unpacked"
        )


def damaged(path: Path, md5: str, why: str) -> UserError:
    """The error for an archive that cannot be read, with its check sum and the official one."""
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return UserError(
        f"archive {path} is damaged or incomplete ({why}): its md5 checksum is {digest.hexdigest()}, the "
        f"official file's is {md5}; delete it and fetch it again"
    )


def _latin(text: object, encoding: object = "latin1") -> bytes:
    """How Python 3 pickles bytes with an old protocol; the one encoding it uses for that."""
    if not isinstance(text, str) or encoding != "latin1":
        raise pickle.UnpicklingError("an encoding that arrays do not need")
    return text.encode("latin1")


class _ArraysOnly(pickle.Unpickler):
    """Rebuilds numbers, texts, lists, dictionaries and plain numpy arrays; refuses all else."""

    def find_class(self, module: str, name: str) -> Any:
        """The few builders that an array's pickle needs."""
        if (module, name) == ("_codecs", "encode"):
            return _latin
        if (module, name) == ("numpy", "ndarray"):
            return np.ndarray
        if (module, name) == ("numpy", "dtype"):
            return np.dtype
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return _reconstruct
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no array needs")


def _reconstruct(kind: object, shape: object, code: object) -> Array:
    """The empty array that an array's pickle is poured into."""
    if kind is not np.ndarray:
        raise pickle.UnpicklingError("an array of an unknown kind")
    return np.ndarray((0,), dtype=np.uint8)


def unpickle_arrays(data: bytes, where: str) -> dict[str, Any]:
    """A pickled dictionary of arrays, texts and lists; UserError if it holds or asks for anything else."""
    try:
        found = _ArraysOnly(io.BytesIO(data), encoding="latin1").load()
    except Exception as fault:  # a made-up pickle can raise anything while it is being rebuilt
        raise UserError(f"{where} is no CIFAR batch: {one_line(fault)}; fetch the set again") from None
    if not isinstance(found, dict):
        raise UserError(f"{where} is no CIFAR batch: it holds no dictionary; fetch the set again")
    return {key.decode("latin1") if isinstance(key, bytes) else str(key): value for key, value in found.items()}


def _cifar(kind: _Cifar, body: Callable[[str], bytes], where: str, order: str) -> Content:
    def batch(member: str) -> dict[str, Any]:
        return unpickle_arrays(body(member), f"{where}/{member}")

    names = batch(kind.meta).get(kind.names)
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise UserError(f"{where}/{kind.meta} holds no list {kind.names}; fetch the set again")
    rank = np.argsort(np.argsort(np.array([os.fsencode(name) for name in names])))
    train = [_cifar_rows(batch(member), kind.labels, len(names), f"{where}/{member}") for member in kind.train]
    test = [_cifar_rows(batch(kind.test), kind.labels, len(names), f"{where}/{kind.test}")]
    (x_train, y_train), (x_test, y_test) = (_cifar_part(rows, rank, order, where) for rows in (train, test))
    note = "8-bit colour images, divided by 255; " + (
        "order of the official batches" if order == "torchvision" else "sorted by class and file name"
    )
    return Content(x_train, y_train, x_test, y_test, tuple(sorted(names, key=os.fsencode)), 255.0, note)


def _cifar_rows(batch: dict[str, Any], key: str, classes: int, where: str) -> tuple[Array, Array, list[bytes] | None]:
    """Images uint8 [n, 32, 32, 3], labels int64 [n] and, if they are there, file names."""
    data, labels, names = batch.get("data"), batch.get(key), batch.get("filenames")
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3072:
        raise UserError(f"{where}: data must be a uint8 array [n, 3072]; fetch the set again")
    if not isinstance(labels, list) or len(labels) != len(data) or not all(type(c) is int for c in labels):
        raise UserError(f"{where}: {key} must be a list of {len(data)} whole numbers; fetch the set again")
    y = np.array(labels, dtype=np.int64)
    if len(y) and (y.min() < 0 or y.max() >= classes):
        raise UserError(f"{where}: {key} must lie in 0..{classes - 1}; fetch the set again")
    files = None
    if isinstance(names, list) and len(names) == len(data):
        files = [name if isinstance(name, bytes) else str(name).encode("latin1", "replace") for name in names]
    return data.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), y, files


def _cifar_part(
    batches: list[tuple[Array, Array, list[bytes] | None]], rank: Array, order: str, where: str
) -> tuple[Array, Array]:
    x = np.concatenate([images for images, _, _ in batches])
    y = rank[np.concatenate([labels for _, labels, _ in batches])].astype(np.int64)
    if order == "torchvision":
        return np.ascontiguousarray(x), y
    files: list[bytes] = []
    for _, _, names in batches:
        if names is None:
            raise UserError(
                f"{where}: the batches lack their filenames, by which order folder_sorted sorts; fetch the set again"
            )
        files += names
    by_name = sorted(range(len(y)), key=lambda k: (int(y[k]), files[k]))
    return np.ascontiguousarray(x[by_name]), y[by_name]


# ------------------------------------------------------------------------------------------------------- IDX

IDX_FILES = tuple(f"{part}-{what}-ubyte" for part in ("train", "t10k") for what in ("images-idx3", "labels-idx1"))


def idx(names: tuple[str, ...] | None = None) -> Layout:
    """A folder with the four files of MNIST and its kin, packed (.gz) or not; class ids are the files'."""

    def here(path: Path) -> bool:
        return all(_idx_file(path, name) is not None for name in IDX_FILES)

    def files(path: Path) -> list[Path]:
        return [file for name in IDX_FILES if (file := _idx_file(path, name)) is not None]

    def read(path: Path, allocate: Allocate) -> Content:
        x_train, y_train, x_test, y_test = (_idx_read(file) for file in files(path))
        for part, x, y in (("train", x_train, y_train), ("t10k", x_test, y_test)):
            if x.ndim != 3 or y.ndim != 1 or len(x) != len(y) or len(x) == 0:
                raise UserError(
                    f"{path}: the {part} files have shapes {x.shape} and {y.shape}; they must be [n, H, W] and [n]"
                )
        if x_train.shape[1:] != x_test.shape[1:]:
            raise UserError(f"{path}: training images are {x_train.shape[1:]} and test images {x_test.shape[1:]}")
        y_train, y_test, classes = map_labels(y_train, y_test, str(path), None if names is None else np.array(names))
        train, test = np.argsort(y_train, kind="stable"), np.argsort(y_test, kind="stable")
        note = "8-bit grey images, divided by 255; sorted by class, within a class in the files' order"
        return Content(
            x_train[train][..., None],
            y_train[train],
            x_test[test][..., None],
            y_test[test],
            classes,
            255.0,
            note,
        )

    return Layout("idx", here, files, read, _always)


def _idx_file(folder: Path, name: str) -> Path | None:
    candidates = (folder / (stem + end) for stem in (name, name.replace("-idx", ".idx")) for end in ("", ".gz"))
    return next((file for file in candidates if is_file(file)), None)


def _idx_read(file: Path) -> Array:
    """uint8 array of an IDX file: two zero bytes, type 8, number of axes, sizes (big-endian), values."""
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as content:
            data = content.read(LARGEST + 1)
    except (OSError, EOFError, zlib.error) as fault:
        raise UserError(f"{file} is damaged or incomplete: {one_line(fault)}; delete it and fetch it again") from None
    if len(data) > LARGEST:
        raise UserError(f"{file} holds more than {LARGEST} bytes; it is read whole: use a folder of images")
    if len(data) < 4 or data[:3] != b"\0\0\x08":
        raise UserError(f"{file} is no IDX file of bytes; delete it and fetch it again")
    axes = data[3]
    start = 4 + 4 * axes
    shape = struct.unpack(f">{axes}I", data[4:start]) if len(data) >= start else ()
    if not shape or math.prod(shape) != len(data) - start:
        raise UserError(
            f"{file} is incomplete: {len(data) - start} bytes for shape {shape}; delete it and fetch it again"
        )
    return np.frombuffer(data, dtype=np.uint8, offset=start).reshape(shape)


# --------------------------------------------------------------------------------------------- image folders


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """What a folder holds, hidden entries apart, bytewise by name."""
    try:
        with os.scandir(folder) as found:
            kept = [entry for entry in found if not entry.name.startswith(".")]
    except OSError as fault:
        raise UserError(f"folder {folder} cannot be read: {fault.strerror}") from None
    return sorted(kept, key=lambda entry: os.fsencode(entry.name))


def _images_in(folder: Path) -> list[Path]:
    return [Path(entry.path) for entry in _entries(folder) if is_image(entry.name) and entry.is_file()]


def _class_folders(part: Path) -> dict[str, list[Path]]:
    """Images by class for <part>/<class>/* or <part>/<class>/images/*."""
    found: dict[str, list[Path]] = {}
    for entry in _entries(part):
        if entry.is_dir():
            folder = Path(entry.path)
            found[entry.name] = _images_in(folder) or (
                _images_in(folder / "images") if is_dir(folder / "images") else []
            )
    return found


def _content(
    train: list[tuple[str, Path]], test: list[tuple[str, Path]], where: str, allocate: Allocate, **how: Any
) -> Content:
    """Decode (class, file) pairs; both lists are brought into the order of class, then file name."""
    train, test = (
        sorted(rows, key=lambda row: (os.fsencode(row[0]), os.fsencode(row[1].name))) for rows in (train, test)
    )
    classes = sorted({name for name, _ in train}, key=os.fsencode)
    if len(classes) < 2:
        raise UserError(f"{where}: the training images are of {len(classes)} class; there must be at least two")
    rank = {name: k for k, name in enumerate(classes)}
    x = read_images({"x_train": [file for _, file in train], "x_test": [file for _, file in test]}, allocate, **how)
    y_train, y_test = (np.array([rank[name] for name, _ in rows], dtype=np.int64) for rows in (train, test))
    kind = "grey" if x["x_train"].shape[-1] == 1 else "colour"
    note = f"8-bit {kind} images, divided by 255; sorted by class and file name"
    if how.get("resize"):
        note += f"; short side resized to {how['resize']} (bilinear), centre cropped"
    return Content(x["x_train"], y_train, x["x_test"], y_test, tuple(classes), 255.0, note)


def image_folder(*, resize: int | None = None, colour: bool = False) -> Layout:
    """<path>/train/<class>/* with <path>/test/<class>/* or, if there is no test, <path>/val/<class>/*."""

    def here(path: Path) -> bool:
        return is_dir(path / "train") and any(is_dir(path / part) for part in TEST_FOLDERS)

    def read(path: Path, allocate: Allocate) -> Content:
        part = next(part for part in TEST_FOLDERS if is_dir(path / part))
        train, test = _class_folders(path / "train"), _class_folders(path / part)
        _check_class_folders(path, part, train, test)
        rows = [[(name, file) for name, files in found.items() for file in files] for found in (train, test)]
        content = _content(rows[0], rows[1], str(path), allocate, resize=resize, colour=colour)
        beside = "; val/ is not used" if part == "test" and is_dir(path / "val") else ""
        return _with_note(content, f"test set from {part}/{beside}")

    return Layout("image folder", here, _tree, read, _always)


def _with_note(content: Content, more: str) -> Content:
    return Content(
        content.x_train,
        content.y_train,
        content.x_test,
        content.y_test,
        content.classes,
        content.scale,
        f"{content.note}; {more}",
    )


def _check_class_folders(path: Path, part: str, train: dict[str, list[Path]], test: dict[str, list[Path]]) -> None:
    empty = [name for name, files in train.items() if not files]
    if empty:
        raise UserError(f"class folder {path / 'train' / empty[0]} holds no images; remove it or add some")
    if not train:
        raise UserError(f"{path / 'train'} holds no class folders; images must lie in train/<class>/")
    extra = sorted(name for name, files in test.items() if files and name not in train)
    if extra:
        raise UserError(
            f"{path / part} holds classes that train/ lacks: {_few(extra)}; both must have the same class folders"
        )
    lacking = sorted(name for name in train if not test.get(name))
    if not any(test.values()) or (part == "val" and lacking):
        raise UserError(
            f"{path / part} lacks images of {_few(lacking)}; its images must lie in {part}/<class>/ with the "
            f"classes of train/"
        )


def _few(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def tiny_imagenet() -> Layout:
    """Tiny-ImageNet as distributed: train/<wnid>/images/*, val/images/* and val/val_annotations.txt."""

    def here(path: Path) -> bool:
        return is_dir(path / "train") and is_file(path / "val" / "val_annotations.txt")

    def read(path: Path, allocate: Allocate) -> Content:
        train = _class_folders(path / "train")
        annotations = path / "val" / "val_annotations.txt"
        test = list(_annotated(annotations, train))
        present = {file.name for file in _images_in(path / "val" / "images")}
        listed = {file.name for _, file in test}
        if present - listed:
            raise UserError(
                f"{annotations} does not list {min(present - listed)}; every image of val/images needs a line"
            )
        if listed - present:
            raise UserError(f"{annotations} lists {min(listed - present)}, which is not in {path / 'val' / 'images'}")
        if not test:
            raise UserError(
                f"{annotations} is empty; it must hold a line with file name and class for every test image"
            )
        _check_class_folders(path, "val", train, {name: [path] for name in train})
        rows = [(name, file) for name, files in train.items() for file in files]
        return _with_note(_content(rows, test, str(path), allocate, colour=True), "test set from val/")

    return Layout("tiny-imagenet", here, _tree, read, _always)


def _annotated(annotations: Path, train: dict[str, list[Path]]) -> Iterator[tuple[str, Path]]:
    names: set[str] = set()
    for number, line in enumerate(_lines(annotations), 1):
        parts = line.split("\t") if "\t" in line else line.split()
        if len(parts) < 2 or parts[0] in names or "/" in parts[0]:
            raise UserError(f"{annotations} line {number}: {line!r} must hold a file name, named once, and its class")
        names.add(parts[0])
        if parts[1] not in train:
            raise UserError(f"{annotations} line {number}: class {parts[1]!r} has no folder in train/")
        yield parts[1], annotations.parent / "images" / parts[0]


def _lines(file: Path) -> list[str]:
    try:
        return [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as fault:
        raise UserError(f"{file} cannot be read: {one_line(fault)}") from None


def vireo172() -> Layout:
    """VireoFood-172 as distributed: ready_chinese_food/<1..172>/* and SplitAndIngreLabel/{TR,VAL,TE}.txt.

    Lines of the lists are /<class>/<file>. TR is the training set, TE the test set, VAL is not used. Images
    are resized to 224 (short side, bilinear) and cropped to the centre square.
    """
    images, lists = "ready_chinese_food", "SplitAndIngreLabel"

    def here(path: Path) -> bool:
        return is_dir(path / images) and all(is_file(path / lists / f"{part}.txt") for part in ("TR", "TE"))

    def read(path: Path, allocate: Allocate) -> Content:
        train, test = (_listed(path / images, path / lists / f"{part}.txt") for part in ("TR", "TE"))
        unseen = sorted({name for name, _ in test} - {name for name, _ in train})
        if unseen:
            raise UserError(f"{path / lists / 'TE.txt'} holds classes that TR.txt lacks: {_few(unseen)}")
        content = _content(train, test, str(path), allocate, resize=224, colour=True)
        return _with_note(content, "training set from TR.txt, test set from TE.txt, VAL.txt not used")

    def files(path: Path) -> list[Path]:
        return [*_tree(path / images), path / lists / "TR.txt", path / lists / "TE.txt"]

    return Layout("vireo172", here, files, read, _always)


def _listed(root: Path, listing: Path) -> list[tuple[str, Path]]:
    rows = []
    for number, line in enumerate(_lines(listing), 1):
        parts = line.strip().strip("/").split("/")
        if len(parts) != 2 or ".." in parts:
            raise UserError(f"{listing} line {number}: {line!r} must be /<class>/<file>")
        file = root / parts[0] / parts[1]
        if not is_file(file):
            raise UserError(f"{listing} line {number} lists {file}, which does not exist")
        rows.append((parts[0], file))
    if not rows:
        raise UserError(f"{listing} is empty; it must list images as /<class>/<file>")
    return rows
