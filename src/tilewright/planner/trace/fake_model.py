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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tilewright.models.hf.model import HFModel
from tilewright.models.hf.packing import forward_arguments
from tilewright.models.hf.probe_packing import REFUSALS, Documents, has_window
from tilewright.ops.base.code_modules import codes_of

KERNELS = {"linear": "native", "quantize": "ref", "tile_gemm": "dequant"}
"""What runs 8-bit matmuls in a trace: operations that need no unit and no library, whatever the machine has."""
OF_A_GPU = KERNELS | {"attention": "native"}
"""The same where the run is on a GPU: the trace, on a CPU, calls torch's attention as well."""


@contextmanager
def quiet() -> Iterator[None]:
    """Silence torch while a fake model runs: it prints a traceback besides the exception where fake tensors cannot do
    something."""
    logger = logging.getLogger(fake_tensor.__name__)
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


def to_fake(model: nn.Module, device: torch.device) -> None:
    """Make a fake model: replace meta parameters, buffers and codes by fake ones on `device`, ties kept."""
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
        for name, codes in codes_of(module).items():
            setattr(module, name, fake(codes))


def document_styles(model: HFModel) -> tuple[Documents, ...]:
    """How the run of a fake model may keep documents apart, as `probe` tries it, the first one that the model takes.

    The run compares outputs, which fake tensors do not have: here the operations are looked at.

    Args:
        model: on fake tensors, under their mode.
    """
    net = model.net
    if "position_ids" not in inspect.signature(net.forward).parameters or _mixes_tokens(net) or _counts_from_pad(net):
        return ("rows",)
    styles: list[Documents] = ["positions"] if masks_from_positions(model) else []
    return (*styles, "rows") if has_window(net) else (*styles, "blocks", "rows")


def _mixes_tokens(net: Any) -> bool:
    """True if something in a model besides attention mixes the tokens of a row (convolutions, recurrences): no mask
    stops it."""
    kinds = getattr(net.config.get_text_config(), "layer_types", None) or ()
    convolves = any(isinstance(module, nn.Conv1d) for module in net.modules())
    return convolves or any(not kind.endswith("attention") or kind.startswith("linear") for kind in kinds)


def _counts_from_pad(net: Any) -> bool:
    """True if a model's positions count from behind a padding index, so that they differ from those of our rows
    (RoBERTa)."""
    words = net.get_input_embeddings()
    tables = [module for module in net.modules() if isinstance(module, nn.Embedding) and module is not words]
    return any(table.padding_idx is not None for table in tables)


def masks_from_positions(model: HFModel) -> bool:
    """True if the model makes an attention mask of a batch from `position_ids`: where not, restarting positions
    separate nothing.

    The run compares outputs (`probe`), which fake tensors do not have.
    """
    device = next(model.net.parameters()).device
    positions = torch.zeros(2, _SIDE, dtype=torch.int64, device=device)
    ids, arguments = text_inputs(model, 2, _SIDE, device, "positions")
    try:
        with torch.no_grad(), _MasksFrom(positions) as seen:
            model.net(input_ids=ids, **arguments | {"position_ids": positions})
    except REFUSALS:
        return False
    return seen.found


_SIDE = 24
"""Tokens of a row in which masks are looked for."""


class _MasksFrom(TorchDispatchMode):
    """Finds out if a boolean [..., S, S] is made from `positions` [B, S], by operations on integers and booleans
    alone."""

    def __init__(self, positions: Tensor):
        super().__init__()
        self.side = positions.shape[-1]
        self.made = {id(positions): positions}  # held, so that no other tensor gets the same id
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(id(value) in self.made for value in tree_leaves((args, kwargs))):
            for value in tree_leaves(out):
                if isinstance(value, Tensor) and not value.is_floating_point():
                    self.made[id(value)] = value
                    self.found |= value.dtype == torch.bool and value.shape[-2:] == (self.side, self.side)
        return out


def text_inputs(
    model: HFModel, rows: int, seq_len: int, device: torch.device, documents: Documents
) -> tuple[Tensor, dict[str, Any]]:
    """Make batches of text for a fake model: packed rows, or with documents as rows one document in each."""
    ids = torch.zeros(rows, seq_len, dtype=torch.int64, device=device)
    causal = model.task == "causal_lm"
    return ids, forward_arguments(model.net, documents, causal, ids, torch.zeros_like(ids))
