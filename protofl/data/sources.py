"""The data sets: what is known, where they are looked for, and one function that reads any of them.

A data set is named (`digits`, `cifar10`, ...) or given by path (an .npz file, or a folder in one of the known
forms). It is looked for in the data folder that is given, else in `PROTOFL_DATA`, else in ./data and then in
the platform's cache folder. Nothing is fetched unless `fetch` is called.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from protofl.data import layouts
from protofl.data.cache import Content, cache_dir, cached, in_memory, stamp
from protofl.data.images import Allocate, one_line
from protofl.data.layouts import Layout
from protofl.errors import UserError, nearest

Array = npt.NDArray[Any]

ORDERS = ("folder_sorted", "torchvision")
FASHION_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
FASHION_SYSTEM_FOLDER = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package dataset-fashion-mnist puts the set; looked at last, if no data folder is named."""


@dataclass(frozen=True, eq=False)
class Data:
    """A data set, decoded."""

    name: str
    """A name of `known()`, or the stem of the path it was read from."""
    x_train: Array
    """uint8 [M, H, W, C], maybe a read-only map of a file; float32 for numbers that are no images."""
    y_train: Array
    """int64 [M], 0..K-1."""
    x_test: Array
    """As `x_train`."""
    y_test: Array
    """As `y_train`; no class that does not occur there."""
    classes: tuple[str, ...]
    """The original label names, by class id."""
    scale: float
    """What x is to be divided by: 255 for images, 16 for digits, 1 for float features."""
    fingerprint: str
    """First 16 hex digits of a SHA-256 of the content: the same content gives the same, wherever it lies."""
    source: str
    """Where it was read from, for the log."""
    note: str
    """How the values were read, for the log."""


@dataclass(frozen=True)
class Source:
    """What is known about a data set before it is there."""

    name: str
    what: str
    expected: tuple[str, ...]
    """The forms in which it is read, as paths below the data folder."""
    fetchable: bool
    """Whether `fetch` can get it."""
    get: str
    """Where it comes from."""


@dataclass(frozen=True)
class Location:
    """Where a data set was looked for, and where it is, if it is there."""

    name: str
    found: bool
    path: Path | None
    layout: str | None
    looked: tuple[Path, ...]


_SOURCES = (
    Source(
        "digits",
        "1 797 grey images of 8x8, 10 digits",
        ("built in: comes with scikit-learn",),
        False,
        "scikit-learn",
    ),
    Source(
        "fashion-mnist",
        "70 000 grey images of 28x28, 10 kinds of clothing",
        (
            "FashionMNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte[.gz]",
            "fashion-mnist/ with these four files",
            "fashion-mnist.npz",
            "fashion-mnist/{train,test}/<class>/*",
        ),
        True,
        "torchvision, or Debian's package dataset-fashion-mnist",
    ),
    Source(
        "cifar10",
        "60 000 colour images of 32x32, 10 classes",
        ("cifar-10-batches-py/", "cifar-10-python.tar.gz", "cifar10.npz", "cifar10/{train,test}/<class>/*"),
        True,
        "torchvision",
    ),
    Source(
        "cifar100",
        "60 000 colour images of 32x32, 100 classes",
        ("cifar-100-python/", "cifar-100-python.tar.gz", "cifar100.npz", "cifar100/{train,test}/<class>/*"),
        True,
        "torchvision",
    ),
    Source(
        "tiny-imagenet",
        "110 000 colour images of 64x64, 200 classes; the validation images are the test set",
        ("tiny-imagenet-200/ as distributed", "tiny-imagenet.npz"),
        True,
        "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
    ),
    Source(
        "vireo172",
        "VireoFood-172: 110 000 colour photographs, 172 dishes, read as 224x224",
        (
            "vireo172/ready_chinese_food/<1..172>/* with vireo172/SplitAndIngreLabel/{TR,TE}.txt",
            "vireo172/{train,test}/<class>/*",
        ),
        False,
        "its authors, on request: http://vireo.cs.cityu.edu.hk/VireoFood172/",
    ),
)


def known() -> dict[str, Source]:
    """The data sets that have a name."""
    return {source.name: source for source in _SOURCES}


def data_dirs(data_dir: Path | None = None) -> tuple[Path, ...]:
    """The folders looked through: the given one, else `PROTOFL_DATA`, else ./data and the cache's data."""
    if data_dir is not None:
        return (Path(data_dir).expanduser(),)
    if os.environ.get("PROTOFL_DATA"):
        return (Path(os.environ["PROTOFL_DATA"]).expanduser(),)
    return (Path("data"), cache_dir() / "data")


def load(name: str, data_dir: Path | None = None, order: str = "folder_sorted") -> Data:
    """Read a data set by name or path.

    `order`: `folder_sorted` (classes and files by name) or, for CIFAR's official batches only, `torchvision`
    (the order of the batches). Raises UserError, saying what is missing or wrong and where.
    """
    if order not in ORDERS:
        raise UserError(f"unknown data_order {order!r}{nearest(order, ORDERS)}; known: {', '.join(ORDERS)}")
    if order == "torchvision" and name not in layouts.CIFAR:
        raise UserError(f"data_order=torchvision is defined for cifar10 and cifar100 only, not for {name}")
    if name == "digits":
        content = _digits()
        return _data(name, content, content.fingerprint(), "scikit-learn")
    found, looked = _find(name, data_dir, order)
    if found is None:
        raise _missing(name, data_dir, looked, order)
    path, layout = found
    title = name if name in known() else path.stem

    def build(allocate: Allocate) -> Content:
        return layout.read(path, allocate)

    try:
        if layout.large(path):
            facts = (str(path.resolve()), layout.name, name if name in known() else "", order)
            content, fingerprint = cached(title, stamp(layout.files(path), *facts), build)
        else:
            content = build(in_memory)
            fingerprint = content.fingerprint()
    except OSError as fault:
        raise UserError(f"data set {name} at {path} cannot be read: {one_line(fault)}") from None
    return _data(title, content, fingerprint, str(path))


def locate(name: str, data_dir: Path | None = None) -> Location:
    """Where a named data set, or one given by path, was looked for and found; nothing is decoded."""
    if name == "digits":
        return Location(name, True, None, "built in", ())
    found, looked = _find(name, data_dir, "folder_sorted")
    if found is None:
        return Location(name, False, None, None, looked)
    return Location(name, True, found[0], found[1].name, looked)


def fetch(name: str, data_dir: Path | None = None) -> Path:
    """Download a data set into the last of `data_dirs`, checked and unpacked; returns where it lies.

    What is there already is left as it is. Raises UserError for sets that cannot be fetched, saying where to
    get them and how to lay them out, and without a network.
    """
    from protofl.data import download  # only here: it pulls torchvision in

    sources = known()
    if name not in sources:
        raise UserError(f"unknown data set {name!r}{nearest(name, sources)}; known: {', '.join(sources)}")
    source = sources[name]
    there = locate(name, data_dir)
    if there.path is not None:
        return there.path
    target = data_dirs(data_dir)[-1]
    if not source.fetchable:
        if name == "digits":
            raise UserError("digits needs no fetching: it comes with scikit-learn")
        raise UserError(
            f"{name} cannot be fetched; get it from {source.get} and lay it out in {target} as {_either(source)}"
        )
    return download.fetch(name, target, _either(source))


def _data(name: str, content: Content, fingerprint: str, source: str) -> Data:
    for array in (content.x_train, content.x_test):
        array.setflags(write=False)  # alike whether it is a map of the cache or not
    return Data(
        name,
        content.x_train,
        content.y_train,
        content.x_test,
        content.y_test,
        content.classes,
        content.scale,
        fingerprint,
        source,
        content.note,
    )


# --------------------------------------------------------------------------------------------------- finding


def _candidates(name: str, base: Path, order: str) -> list[tuple[Path, Layout]]:
    """Where a named set may lie below a data folder, the best form first."""
    own = base / name
    if name in layouts.CIFAR:
        kind = layouts.CIFAR[name]
        batches, archive = layouts.cifar_batches(name, order), layouts.cifar_archive(name, order)
        official = [(folder / kind.folder, batches) for folder in (base, own)] + [
            (base, batches),
            (own, batches),
        ]
        official += [(folder / kind.archive, archive) for folder in (base, own)]
        if order == "torchvision":
            return official
        return [
            *official,
            (base / f"{name}.npz", layouts.npz(by_class=True)),
            (own, layouts.image_folder(colour=True)),
        ]
    if name == "fashion-mnist":
        idx = layouts.idx(FASHION_CLASSES)
        folders = [base / "FashionMNIST" / "raw", own / "FashionMNIST" / "raw", own / "raw", own, base]
        files = [(folder, idx) for folder in folders]
        return [*files, (base / f"{name}.npz", layouts.npz(by_class=True)), (own, layouts.image_folder())]
    if name == "tiny-imagenet":
        folders = [base / "tiny-imagenet-200", own / "tiny-imagenet-200", own, base]
        forms = [(folder, layouts.tiny_imagenet()) for folder in folders]
        sorted_by_hand = [(folder, layouts.image_folder(colour=True)) for folder in folders[:3]]
        return [*forms, *sorted_by_hand, (base / f"{name}.npz", layouts.npz(by_class=True))]
    folders = [own, base / "VireoFood172", base / "VireoFood-172", base]
    forms = [(folder, layouts.vireo172()) for folder in folders]
    return [*forms, *((folder, layouts.image_folder(resize=224, colour=True)) for folder in folders[:3])]


def _by_path(path: Path) -> tuple[Path, Layout] | None:
    """The form of what lies at a path."""
    if layouts.is_file(path):
        return (path, layouts.npz())
    forms = [
        layouts.tiny_imagenet(),
        layouts.vireo172(),
        layouts.image_folder(),
        layouts.idx(),
        *(layouts.cifar_batches(name, "folder_sorted") for name in layouts.CIFAR),
    ]
    return next(((path, form) for form in forms if form.here(path)), None)


def _find(name: str, data_dir: Path | None, order: str) -> tuple[tuple[Path, Layout] | None, tuple[Path, ...]]:
    """Path and form of a data set, and the places looked at."""
    bases = data_dirs(data_dir)
    if name in known():
        named = data_dir is not None or bool(os.environ.get("PROTOFL_DATA"))
        folders = (*bases, FASHION_SYSTEM_FOLDER) if name == "fashion-mnist" and not named else bases
        for base in folders:
            for path, form in _candidates(name, base, order):
                if form.here(path):
                    return (path, form), folders
        return None, folders
    path = Path(name).expanduser()
    places = (path,) if path.is_absolute() else (path, *(base / path for base in bases))
    if not _is_path(name, places):
        sources = known()
        raise UserError(
            f"unknown data set {name!r}{nearest(name, sources)}; known: {', '.join(sources)}; or give the "
            f"path of an .npz file or of a folder with train/ and test/"
        )
    for place in places:
        found = _by_path(place)
        if found is not None:
            return found, places
    return None, places


def _is_path(name: str, places: tuple[Path, ...]) -> bool:
    looks = "/" in name or os.sep in name or name.startswith((".", "~")) or name.endswith(".npz")
    return bool(name) and (looks or any(layouts.is_dir(place) or layouts.is_file(place) for place in places))


def _either(source: Source) -> str:
    return " or ".join(source.expected)


def _missing(name: str, data_dir: Path | None, looked: tuple[Path, ...], order: str) -> UserError:
    if name not in known():
        return _not_at_path(name, looked)
    source = known()[name]
    places = ", ".join(str(folder) for folder in looked)
    if order == "torchvision" and locate(name, data_dir).found:
        kind = layouts.CIFAR[name]
        return UserError(
            f"data_order=torchvision needs the official batches of {name} ({kind.folder}/ or {kind.archive}) "
            f"in {places}; there is only {locate(name, data_dir).path}, which has lost their order: use "
            f"data_order=folder_sorted"
        )
    packed = next((file for folder in looked if layouts.is_file(file := folder / "tiny-imagenet-200.zip")), None)
    if name == "tiny-imagenet" and packed is not None:
        from protofl.data import download

        download.check_archive(packed)
        return UserError(f"{packed} is there but not unpacked: unpack it, or run 'protofl datasets fetch {name}'")
    how = f"run 'protofl datasets fetch {name}'" if source.fetchable else f"get it from {source.get}"
    return UserError(f"data set {name} not found in {places}: put {_either(source)} there, or {how}")


def _not_at_path(name: str, looked: tuple[Path, ...]) -> UserError:
    there = next((place for place in looked if layouts.is_dir(place)), None)
    if there is None:
        return UserError(f"data set {name}: no such file or folder (looked for {', '.join(map(str, looked))})")
    return UserError(
        f"folder {there} is no data set: it must hold train/<class>/* and test/<class>/* (or val/<class>/*), "
        f"or the four IDX files, or Tiny-ImageNet or VireoFood-172 as distributed"
    )


# ---------------------------------------------------------------------------------------------------- digits


def _digits() -> Content:
    """scikit-learn's digits, sorted by class (stable); in each the first 80 %, rounded up, for training."""
    table = _digits_table()
    images, labels = table[:, :64].reshape(-1, 8, 8, 1).astype(np.uint8), table[:, 64].astype(np.int64)
    in_order = [np.flatnonzero(labels == c) for c in range(10)]
    cuts = [-(-4 * len(rows) // 5) for rows in in_order]
    train = np.concatenate([rows[:cut] for rows, cut in zip(in_order, cuts, strict=True)])
    test = np.concatenate([rows[cut:] for rows, cut in zip(in_order, cuts, strict=True)])
    return Content(
        images[train],
        labels[train],
        images[test],
        labels[test],
        tuple(map(str, range(10))),
        16.0,
        "grey images of whole values 0 to 16, divided by 16; sorted by class, the first 80 % of each class "
        "for training",
    )


def _digits_table() -> np.ndarray:
    """Rows of 64 pixels and a label [1797, 65], from scikit-learn's file: importing the package takes seconds."""
    package = importlib.util.find_spec("sklearn")
    if package is None:
        raise UserError("data set digits comes with scikit-learn, which is not installed: pip install scikit-learn")
    file = Path(package.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")  # type: ignore[index]
    if file.is_file():
        return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits  # a version that keeps it elsewhere

    bunch = load_digits()
    return np.column_stack([bunch.data, bunch.target])
