"""Numbers from outside, brought to one form: images or features as [n, H, W, C], labels as 0..K-1."""

from __future__ import annotations

import os
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from protofl.data.cache import Content
from protofl.data.images import one_line
from protofl.errors import UserError

Array = npt.NDArray[Any]

PARTS = ("x_train", "y_train", "x_test", "y_test")
LAYOUT = "x_train, y_train, x_test, y_test and optionally classes (names in label order)"


def read_npz(path: Path, *, by_class: bool = False) -> Content:
    """Read an .npz of `x_train, y_train, x_test, y_test` and optionally `classes`; nothing is unpickled.

    Images: uint8 or floats within 0..1 or whole numbers within 0..255, [n, H, W], [n, H, W, C] or
    [n, C, H, W] with C 1 or 3; they become uint8 [n, H, W, C]. Features: [n, d]; they become float32
    [n, 1, 1, d] (uint8 stays uint8). Other floats are kept as float32 with scale 1. Labels: as `map_labels`.
    `by_class`: sort the rows by class (stable) if they are not.

    Raises UserError for anything else, naming the array and, for NaN and infinity, the row.
    """
    arrays = _open(path)
    if {"x", "y"} <= arrays.keys() and not set(PARTS) <= arrays.keys():
        raise UserError(f"{path} holds x and y without a split into training and test; it must hold {LAYOUT}")
    missing = [part for part in PARTS if part not in arrays]
    if missing:
        raise UserError(
            f"{path} lacks {', '.join(missing)} (it holds {', '.join(arrays) or 'nothing'}); it must hold {LAYOUT}"
        )
    for part in ("train", "test"):
        x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
        if x.ndim == 0 or len(x) == 0:
            raise UserError(f"{path}: x_{part} is empty; there must be at least one row")
        if y.ndim == 0 or len(x) != len(y):
            raise UserError(
                f"{path}: x_{part} has {len(x)} rows and y_{part} {y.size if y.ndim == 0 else len(y)}; "
                f"they must be equally many"
            )
    y_train, y_test, classes = map_labels(arrays["y_train"], arrays["y_test"], str(path), arrays.get("classes"))
    x_train, x_test, scale, note = read_values(arrays["x_train"], arrays["x_test"], str(path))
    if by_class and bool((np.diff(y_train) < 0).any() or (np.diff(y_test) < 0).any()):
        train, test = np.argsort(y_train, kind="stable"), np.argsort(y_test, kind="stable")
        x_train, y_train, x_test, y_test = x_train[train], y_train[train], x_test[test], y_test[test]
        note += "; rows sorted by class, within a class in the file's order"
    return Content(x_train, y_train, x_test, y_test, classes, scale, note)


def map_labels(
    train: Array, test: Array, where: str, names: Array | None = None
) -> tuple[Array, Array, tuple[str, ...]]:
    """Labels of any kind to int64 0..K-1, once for both parts, and the names of the classes by id.

    Numbers are ranked in numeric order, strings in ASCII order; the classes are those of the training labels.
    Columns [n, 1] and floats with whole values are accepted. `names`: class names, either one for each number
    from 0 on or one for each label found, in order. Raises UserError for labels seen in testing only, for
    halves, NaN and matrices, and for fewer than two classes.
    """
    a, b = _label_list(train, f"{where}: y_train"), _label_list(test, f"{where}: y_test")
    if (a.dtype.kind == "U") != (b.dtype.kind == "U"):
        raise UserError(f"{where}: y_train and y_test must both be numbers or both be names")
    found, y_train = np.unique(a, return_inverse=True)
    if len(found) < 2:
        raise UserError(f"{where}: all training labels are {found[0]}; there must be at least two classes")
    unseen = np.setdiff1d(b, found)
    if len(unseen):
        raise UserError(
            f"{where}: test labels {_some(unseen)} do not occur in training; remove these rows or add training rows"
        )
    y_test = np.searchsorted(found, b)
    return y_train.reshape(-1).astype(np.int64), y_test.astype(np.int64), _class_names(found, names, where)


def read_values(train: Array, test: Array, where: str) -> tuple[Array, Array, float, str]:
    """Values to uint8 or float32 [n, H, W, C], the number to divide them by, and a note of what was done."""
    for what, x in (("x_train", train), ("x_test", test)):
        if x.dtype.kind not in "buif":
            raise UserError(f"{where}: {what} is of type {x.dtype}; images and features must be numbers")
        if x.dtype.kind == "f":
            _check_finite(x, f"{where}: {what}")
    if ("f" in (train.dtype.kind, test.dtype.kind)) and train.dtype.kind != test.dtype.kind:
        raise UserError(
            f"{where}: x_train is of type {train.dtype} and x_test of type {test.dtype}; both must be floats "
            f"or both whole numbers, in the same units"
        )
    if train.ndim < 2 or train.shape[1:] != test.shape[1:]:
        raise UserError(
            f"{where}: x_train has shape {train.shape} and x_test {test.shape}; both must be [n, H, W], "
            f"[n, H, W, C], [n, C, H, W] or [n, d] with the same sizes after n"
        )
    channels_first, shape_note = _shape(train, where)
    kind, scale, value_note = _value_kind(train, test, where)
    out = [_four_axes(_convert(x, kind), channels_first) for x in (train, test)]
    return out[0], out[1], scale, f"{shape_note}; {value_note}"


def _open(path: Path) -> dict[str, Array]:
    try:
        file = np.load(path, allow_pickle=False)
        if isinstance(file, np.ndarray):
            raise UserError(f"{path} holds a single array; it must be an .npz with {LAYOUT}")
        with file:
            _fits(path, sum(member.file_size for member in file.zip.infolist()))
            return {name: file[name] for name in file.files if name in (*PARTS, "classes", "x", "y")}
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except (zipfile.BadZipFile, zlib.error, EOFError) as fault:
        raise UserError(f"{path} is damaged or no .npz file: {one_line(fault)}") from None
    except ValueError as fault:
        if "pickle" in str(fault):
            raise UserError(
                f"{path} holds pickled objects, which are not loaded; save plain arrays of numbers or strings: {LAYOUT}"
            ) from None
        raise UserError(f"{path} cannot be read as .npz: {one_line(fault)}; it must hold {LAYOUT}") from None
    except (OSError, MemoryError, NotImplementedError, RuntimeError) as fault:
        raise UserError(f"{path} cannot be read: {one_line(fault)}") from None


def _fits(path: Path, size: int) -> None:
    """Refuse what would fill the memory before it is unpacked."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    if pages and size > pages // 2:
        raise UserError(
            f"{path} holds arrays of {size / 1e9:.1f} GB, this machine has {pages / 1e9:.1f} GB of memory, of which a set may "
            "take half: use a smaller set, or a folder of images, which is mapped from disk"
        )


def _some(values: Array, most: int = 5) -> str:
    return ", ".join(map(str, values[:most].tolist())) + (
        f" and {len(values) - most} more" if len(values) > most else ""
    )


def _label_list(labels: Array, where: str) -> Array:
    """[n] of int64 or str."""
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1:
        raise UserError(
            f"{where} has shape {labels.shape}; there must be one label per row (of one-hot rows, take argmax)"
        )
    if labels.dtype.kind == "f":
        odd = ~(np.isfinite(labels) & (labels == np.floor(labels)))
        if odd.any():
            row = int(np.argmax(odd))
            raise UserError(f"{where} holds {labels[row]} in row {row}; labels must be whole numbers or names")
        _refuse_large(labels, 2.0**53, where)
        return labels.astype(np.int64)
    if labels.dtype.kind == "S":
        return np.char.decode(labels, "utf-8", "replace")
    if labels.dtype.kind in "biu":
        if labels.dtype.kind == "u":
            _refuse_large(labels, 2**63 - 1, where)
        return labels.astype(np.int64)
    if labels.dtype.kind != "U":
        raise UserError(f"{where} is of type {labels.dtype}; labels must be whole numbers or names")
    return labels


def _refuse_large(labels: Array, limit: float, where: str) -> None:
    """Numbers that two labels may share once they are 64-bit integers."""
    if len(labels) and bool((np.abs(labels) if labels.dtype.kind == "f" else labels).max() > limit):
        raise UserError(f"{where} holds {labels.max()}; labels that are numbers must not exceed {limit:.0f}")


def _class_names(found: Array, names: Array | None, where: str) -> tuple[str, ...]:
    if names is None:
        return tuple(map(str, found.tolist()))
    given = _label_list(names, f"{where}: classes")
    if found.dtype.kind == "U":
        if sorted(given.tolist()) != found.tolist():
            raise UserError(f"{where}: classes must be the names that y_train holds ({_some(found)}), or be left out")
        return tuple(found.tolist())
    texts = list(map(str, given.tolist()))
    if len(set(texts)) != len(texts):
        raise UserError(f"{where}: classes holds a name twice; names must differ")
    if len(texts) == len(found):
        return tuple(texts)
    if int(found[0]) >= 0 and int(found[-1]) < len(texts):
        return tuple(texts[k] for k in found.tolist())
    raise UserError(
        f"{where}: classes has {len(texts)} names and y_train {len(found)} labels; give one name for each label"
    )


def _check_finite(x: Array, where: str) -> None:
    for at in range(0, len(x), 4096):
        part = x[at : at + 4096]
        bad = ~(np.abs(part) <= np.finfo(np.float32).max).reshape(len(part), -1).all(1)
        if bad.any():
            row = at + int(np.argmax(bad))
            what = "NaN" if np.isnan(x[row]).any() else "infinity or a number beyond single precision"
            raise UserError(f"{where} row {row} holds {what}; all values must be finite")


def _shape(x: Array, where: str) -> tuple[bool, str]:
    """Whether the channels come first, and what is said about it."""
    size = x.shape[1:]
    if 0 in size:
        raise UserError(f"{where}: x has shape {x.shape}; no axis may be empty")
    if x.ndim == 2:
        return False, f"{size[0]} features per row"
    if x.ndim == 3:
        return False, f"grey images of {size[0]}x{size[1]}"
    if x.ndim == 4 and size[:2] == (1, 1):
        return False, f"{size[2]} features per row"
    if x.ndim == 4 and size[2] in (1, 3):
        doubt = " (channels taken as last, they could be first)" if size[0] in (1, 3) else ""
        return False, f"images of {size[0]}x{size[1]}x{size[2]}{doubt}"
    if x.ndim == 4 and size[0] in (1, 3):
        return True, f"images of {size[1]}x{size[2]}x{size[0]}, stored with the channels first"
    raise UserError(
        f"{where}: x has shape {x.shape}; it must be [n, H, W], [n, H, W, C], [n, C, H, W] with C 1 or 3, or [n, d]"
    )


def _four_axes(x: Array, channels_first: bool) -> Array:
    if x.ndim == 2:
        return x[:, None, None, :]
    if x.ndim == 3:
        return x[..., None]
    return np.ascontiguousarray(x.transpose(0, 2, 3, 1)) if channels_first else x


def _value_kind(train: Array, test: Array, where: str) -> tuple[str, float, str]:
    """How to store the values (`keep`, `unit`, `whole`, `float`), what to divide them by, and a note."""
    low = min(train.min(), test.min())
    high = max(train.max(), test.max())
    span = f"{float(low):g} to {float(high):g}"
    if train.dtype == test.dtype == np.uint8:
        return "keep", 255.0, f"8-bit values {span}, divided by 255"
    features = train.ndim == 2 or train.shape[1:3] == (1, 1)
    if not features:
        if train.dtype.kind == test.dtype.kind == "b" or (train.dtype.kind == "f" and 0 <= low <= high <= 1):
            return "unit", 255.0, f"values {span} stored in 8 bits as round(255 x), divided by 255"
        if low >= 0 and high <= 255 and _whole(train) and _whole(test):
            return "whole", 255.0, f"whole values {span} stored in 8 bits, divided by 255"
        if train.dtype.kind in "iu" or test.dtype.kind in "iu":
            raise UserError(
                f"{where}: x holds whole numbers {span}; images must be 0..255, or floats (within 0..1, or as they are to be): "
                "divide them by the largest value that their format has, such as 65535"
            )
    return "float", 1.0, f"numbers {span} kept as they are (float32, not scaled)"


def _whole(x: Array) -> bool:
    return x.dtype.kind in "iu" or all(
        bool((part == np.floor(part)).all()) for part in (x[at : at + 4096] for at in range(0, len(x), 4096))
    )


def _convert(x: Array, kind: str) -> Array:
    if kind == "keep":
        return x
    if kind == "float":
        return x.astype(np.float32)
    out = np.empty(x.shape, dtype=np.uint8)
    for at in range(0, len(x), 4096):
        part = x[at : at + 4096]
        out[at : at + 4096] = np.round(part.astype(np.float64) * 255) if kind == "unit" else part
    return out
