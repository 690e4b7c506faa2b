"""Getting data sets from their official places: checked, unpacked with care, and whole or not there."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import shutil
import socket
import stat
import tarfile
import tempfile
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from protofl.data.images import one_line
from protofl.data.layouts import CIFAR, check_member, damaged
from protofl.errors import UserError

TINY_URL = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
TINY_MD5 = "90528d7ca1a48142e341f4ef8d21d0de"
TIMEOUT = 20.0
"""Seconds without an answer after which a download is given up."""


def fetch(name: str, target: Path, expected: str) -> Path:
    """Download `name` into the folder `target`, which may hold what `expected` says; returns its folder.

    Files are written to a temporary folder inside `target` and moved when they are whole. Raises UserError.
    """
    try:
        target.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=target))
    except OSError as fault:
        raise UserError(
            f"data folder {target} cannot be written ({fault.strerror}); give another with --data-dir"
        ) from None
    try:
        with _patience():
            made = _get(name, work, target)
        final = target / made.name
        os.rename(made, final)
        return final / "raw" if name == "fashion-mnist" else final
    except UserError:
        raise
    except (OSError, RuntimeError, ValueError, EOFError, http.client.HTTPException) as fault:
        raise UserError(
            f"{name} could not be fetched ({one_line(fault)}); without a network, put {expected} into {target} yourself"
        ) from None
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _get(name: str, work: Path, there: Path) -> Path:
    """Bring a set into the folder `work`, from an archive in `there` if that is whole; returns the folder."""
    if name == "fashion-mnist":
        return _fashion(work)
    if name == "tiny-imagenet":
        return _tiny(work, there)
    return _cifar(name, work, there)


def unpack(archive: Path, target: Path, md5: str) -> None:
    """Unpack a .zip or tar archive; UserError if it is damaged or a member is a link or leads out."""
    try:
        if archive.suffix == ".zip":
            with zipfile.ZipFile(archive) as packed:
                for info in packed.infolist():
                    check_member(archive, info.filename, not stat.S_ISLNK(info.external_attr >> 16))
                packed.extractall(target)
        else:
            with tarfile.open(archive, "r:*") as bundle:
                for member in bundle.getmembers():
                    check_member(archive, member.name, member.isreg() or member.isdir())
                bundle.extractall(target, filter="data")
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, zlib.error) as fault:
        raise damaged(archive, md5, one_line(fault)) from None


def check_archive(archive: Path) -> None:
    """UserError with both check sums if a Tiny-ImageNet archive is not whole."""
    if not zipfile.is_zipfile(archive):
        raise damaged(archive, TINY_MD5, "it is no whole .zip file")


@contextlib.contextmanager
def _patience() -> Iterator[None]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def _md5(file: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with file.open("rb") as data:
        while block := data.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def _archive(there: Path, work: Path, name: str, md5: str, get: Callable[[], None]) -> Path:
    """An archive that lies in the data folder already if its check sum is right, else a downloaded one."""
    if (there / name).is_file() and _md5(there / name) == md5:
        return there / name
    get()
    if _md5(work / name) != md5:
        raise damaged(work / name, md5, "the download is not the official file")
    return work / name


def _cifar(name: str, work: Path, there: Path) -> Path:
    from torchvision import datasets
    from torchvision.datasets.utils import download_url

    kind = CIFAR[name]
    url = (datasets.CIFAR10 if name == "cifar10" else datasets.CIFAR100).url
    packed = _archive(there, work, kind.archive, kind.md5, lambda: download_url(url, str(work), kind.archive, kind.md5))
    unpack(packed, work, kind.md5)
    return work / kind.folder


def _fashion(work: Path) -> Path:
    from torchvision.datasets import FashionMNIST

    FashionMNIST(str(work), download=True)
    return work / "FashionMNIST"


def _tiny(work: Path, there: Path) -> Path:
    name = "tiny-imagenet-200.zip"

    def get() -> None:
        with urllib.request.urlopen(TINY_URL, timeout=TIMEOUT) as answer, (work / name).open("wb") as out:
            shutil.copyfileobj(answer, out, 2**20)

    unpack(_archive(there, work, name, TINY_MD5, get), work, TINY_MD5)
    return work / "tiny-imagenet-200"
