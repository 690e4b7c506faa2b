"""A device that is not there: tensors that say they are elsewhere, whose numbers are worked out here.

As on a GPU, tensors of two devices do not mix, numbers from elsewhere are fetched before they are read, and every time
that something is sent or waited for is written down. What is computed is what the CPU computes, bit by bit, so that a run
can be compared with the same one here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

DEVICE = "meta"
"""The one device beside the CPU that every PyTorch can name and differentiate on."""

aten = torch.ops.aten
COPY = aten.copy_.default
SENT = (aten._to_copy.default, COPY)
PICKED = tuple(getattr(aten, name) for name in ("index", "index_put", "index_put_", "_index_put_impl_"))
"""Takes positions from another device too; a mask makes it wait."""
AWAITED = tuple(
    getattr(aten, name)
    for name in (
        "_local_scalar_dense", "nonzero", "masked_select", "bincount", "equal", "_unique2", "unique_dim",
        "unique_consecutive", "repeat_interleave",
    )
)  # fmt: skip
"""What Python goes on with hangs on the numbers."""


class Away(Tensor):
    """A tensor elsewhere. here: its numbers."""

    here: Tensor

    @staticmethod
    def __new__(cls, here: Tensor) -> Away:
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            here.shape,
            strides=here.stride(),
            storage_offset=here.storage_offset(),
            dtype=here.dtype,
            device=DEVICE,
        )
        made.here = here
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func}: a tensor elsewhere, and nobody watches")


def fetched(tree: Any) -> Any:
    """The same with all tensors here."""
    return pytree.tree_map(lambda v: v.here if isinstance(v, Away) else v, tree)


class Traffic(TorchDispatchMode):
    """seen: what was sent there ("in"), fetched or waited for ("out"), and from which line."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        given = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, Tensor)]
        away = [isinstance(v, Away) for v in given]
        goes = any(away)
        if kwargs.get("device") is not None:
            goes = torch.device(kwargs.pop("device")).type == DEVICE
            kwargs["device"] = torch.device("cpu")
        if func in SENT:
            goes = away[0] if func is COPY else goes
            if away and goes != away[-1]:  # a Python number can be cast too
                self.note("in" if goes else "out", func)
        elif any(away):
            self.check(func, given, away)
        out = func(*fetched(args), **fetched(kwargs))
        if func is COPY:
            return args[0]
        if not goes:
            return out
        out = pytree.tree_map(lambda v: Away(v) if isinstance(v, Tensor) else v, out)
        return return_and_correct_aliasing(func, args, kwargs, out) if any(away) else out

    def check(self, func: Any, given: list[Tensor], away: list[bool]) -> None:
        """Devices do not mix, but for single numbers and positions."""
        here = [v for v, gone in zip(given, away) if not gone and v.dim()]
        packet = func.overloadpacket
        if here and not (packet in PICKED and away[0]):
            raise RuntimeError(f"{func}: tensors on two devices, here {[list(v.shape) for v in here]}")
        if here:
            self.note("in", func)
        masked = packet in PICKED and any(v.dtype == torch.bool for v in given[1:])
        if masked or packet in AWAITED:
            self.note("out", func)

    def note(self, way: str, func: Any) -> None:
        frame: Any = sys._getframe()
        while frame and not any(part in frame.f_code.co_filename for part in ("/protofl/", "/methods/")):
            frame = frame.f_back
        where = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "a test"
        self.seen.append((way, str(func), where))


class Made(TorchFunctionMode):
    """Tensors made of Python's numbers are made here and sent: PyTorch makes none for the device of this name."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            return func(*args, **{**kwargs, "device": None}).to(kwargs["device"])
        if func is Tensor.new_tensor and args[0].device.type == DEVICE:
            return torch.tensor(*args[1:], **{"dtype": args[0].dtype, **kwargs}).to(DEVICE)
        return func(*args, **kwargs)


@contextmanager
def elsewhere() -> Iterator[Traffic]:
    """Tensors may be made on `DEVICE`."""
    with Traffic() as traffic, Made():
        yield traffic
