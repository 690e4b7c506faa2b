"""Where models look: Grad-CAM of chosen test images (Selvaraju et al., ICCV 2017; FedCSPC figure 9), through captum.

Reads the newest state of stored runs and writes `gradcam.npz` beside it, from which reports draw:

  index, labels, predicted int64 [n]    which test images, their classes, and what the headline says
  images float32 [n, H, W, C]           as in the data, in [0, 1]
  maps float32 [n, h, w]                >= 0, of the last convolution, for the score of the true class
  round int64 []                        the round after which the model was stored
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .errors import UserError
from .method import Model
from .nets import Net
from .records import write_bytes
from .run import reopened


class LastConvolution(TorchFunctionMode):
    """Within it the output of the `wanted`-th convolution passes through `layer`, where captum listens; counts them."""

    def __init__(self, wanted: int = 0, layer: nn.Module | None = None) -> None:
        super().__init__()
        self.wanted, self.layer, self.seen = wanted, layer, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is F.conv2d:
            self.seen += 1
            if self.layer is not None and self.seen == self.wanted:
                return self.layer(out)
        return out


def maps(model: Model, net: Net, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Grad-CAM of x [n, C, H, W] for the classes y [n] -> maps [n, h, w] >= 0, and the classes that are predicted [n].

    Raises UserError for a net without convolutions, and for a model without scores.
    """
    from captum.attr import LayerGradCam

    def scores(images: Tensor) -> Tensor:
        out = model.scores(net.bound("eval"), model.tree, images)
        first = next(iter(out.values())) if isinstance(out, dict) else out
        if first is None:
            raise UserError("the scores of this model are not defined")
        made: Tensor = first
        return made

    with LastConvolution() as counted, torch.no_grad():
        predicted = scores(x).argmax(1)
    if not counted.seen:
        raise UserError(f"net {net.name} has no convolution: Grad-CAM needs one, such as conv_digits or simple_cnn")
    layer = nn.Identity()

    def listened(images: Tensor) -> Tensor:
        with LastConvolution(counted.seen, layer):
            return scores(images)

    made = LayerGradCam(listened, layer).attribute(x, target=y, relu_attributions=True)
    return made.detach()[:, 0], predicted


def store(path: Path, images: Sequence[int], data_dir: str | None) -> str:
    """Write the Grad-CAM of these test images (positions) for the stored run at `path` -> why not; empty if done.

    Raises UserError where captum is missing, the run cannot be opened, or a position is outside the test set.
    """
    try:
        import captum  # noqa: F401
    except ImportError:
        raise UserError("--gradcam needs captum, which is not installed: pip install 'protofl[gradcam]'") from None
    run, done = reopened(path, data_dir)
    data = run.ready.data
    wrong = [i for i in images if not 0 <= i < len(data.y_test)]
    if wrong:
        raise UserError(f"--gradcam {wrong[0]}: {data.name} has test images 0 to {len(data.y_test) - 1}")
    model = run.federation.global_model()
    if model is None:
        return "there is no global model"
    index = np.array(images, dtype=np.int64)
    raw, labels = run.test.x[torch.from_numpy(index)], run.test.y[torch.from_numpy(index)]
    try:
        found, predicted = maps(model, run.ready.net, run.test.pipeline.test(raw), labels)
    except UserError as reason:
        return str(reason)
    file = io.BytesIO()
    np.savez(
        file, index=index, labels=labels.cpu().numpy(), predicted=predicted.cpu().numpy(),
        images=(raw.cpu().numpy() / data.scale).astype(np.float32), maps=found.cpu().numpy().astype(np.float32),
        round=np.int64(done - 1),
    )  # fmt: skip
    write_bytes(path / "gradcam.npz", file.getvalue())
    return ""
