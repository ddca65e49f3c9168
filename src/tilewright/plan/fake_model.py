"""A Hugging Face model on fake tensors, and the batches that a trace gives it.

Fake tensors have shapes and dtypes but no data, so a model of any size runs in about a second with no weights.
"""

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor

from tilewright.models.hf import HFModel
from tilewright.models.hf_packing import forward_arguments
from tilewright.models.hf_probe import Documents, has_window

KERNELS = {"linear": "native", "quantize": "ref", "tile_gemm": "dequant"}
"""What runs 8-bit products in a trace: operations that need no unit and no library, whatever the machine has."""


@contextmanager
def quiet() -> Iterator[None]:
    """What fake tensors cannot do is an exception; torch would print a traceback besides."""
    logger = logging.getLogger(fake_tensor.__name__)
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


def to_fake(model: nn.Module, device: torch.device) -> None:
    """Replace meta parameters and buffers by fake ones on `device`, ties kept."""
    made: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Any:
        if id(tensor) not in made:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            trained = tensor.requires_grad
            made[id(tensor)] = nn.Parameter(empty, trained) if isinstance(tensor, nn.Parameter) else empty
        return made[id(tensor)]

    for module in model.modules():
        groups: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for group in groups:
            for name, tensor in group.items():
                if tensor is not None:
                    group[name] = fake(tensor)


def document_styles(model: HFModel) -> tuple[Documents, ...]:
    """How the run may keep documents apart, as `hf_probe` tries it, the first one that the model takes."""
    if "position_ids" not in inspect.signature(model.net.forward).parameters:
        return ("rows",)
    return ("positions", "rows") if has_window(model.net) else ("positions", "blocks", "rows")


def text_inputs(
    model: HFModel, rows: int, seq_len: int, device: torch.device, documents: Documents
) -> tuple[Tensor, dict[str, Any]]:
    """Packed rows, or with documents as rows one document in each."""
    ids = torch.zeros(rows, seq_len, dtype=torch.int64, device=device)
    causal = model.task == "causal_lm"
    return ids, forward_arguments(model.net, documents, causal, ids, torch.zeros_like(ids))
