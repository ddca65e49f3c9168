"""Packed rows as arguments of a Hugging Face model's forward: positions, block masks, or documents as rows.

Which of them a model honours is found out by `probe_packing`.

Legend: B rows  S positions  P documents  L tokens of the longest document.
"""

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from tilewright.models.base.output_head import IGNORED_LABEL
from tilewright.models.base.protocols import LossOutput

if TYPE_CHECKING:  # it takes seconds to import
    from transformers.modeling_utils import PreTrainedModel

PACKED, PACKED_SHAPE = "packed", "packed_shape"


def forward_arguments(
    net: "PreTrainedModel",
    documents: Literal["positions", "blocks", "rows"] = "rows",
    causal: bool = True,
    positions_BS: Tensor | None = None,
    segments_BS: Tensor | None = None,
) -> dict[str, Any]:
    """Keyword arguments of a Hugging Face model's forward for packed rows, besides `input_ids`.

    Args:
        documents: see `probe_packing.InputStyle`; with "rows" the rows are documents already.
        positions_BS, segments_BS: of packed rows; None where each row is one document.
    """
    arguments: dict[str, Any] = {}
    if _takes(net, "use_cache"):
        arguments["use_cache"] = False  # with a cache, transformers does not look for restarting positions
    if documents != "rows" and positions_BS is not None:
        arguments["position_ids"] = positions_BS
    if documents == "blocks" and segments_BS is not None:
        additive = None if net.config._attn_implementation == "sdpa" else net.dtype
        arguments["attention_mask"] = block_mask(segments_BS, causal, additive)
    return arguments


def _takes(net: "PreTrainedModel", name: str) -> bool:
    """True if the model's forward takes this argument of packed rows, itself or through a model whose config has
    it (GraniteMoE)."""
    parameters = inspect.signature(net.forward).parameters
    if name in parameters:
        return True
    passes_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return passes_on and hasattr(net.config, name)


def block_mask(segments_BS: Tensor, causal: bool, additive: torch.dtype | None = None) -> Tensor:
    """Make the block mask of packed rows [B, 1, S, S]: query row may look at key column. Boolean, or 0 and lowest
    `additive`.

    Example:
        >>> block_mask(torch.tensor([[0, 0, 1]]), causal=True)[0, 0].int().tolist()
        [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    allowed_BSS = segments_BS[:, :, None] == segments_BS[:, None, :]
    if causal:
        allowed_BSS = allowed_BSS.tril()
    if additive is None:
        return allowed_BSS[:, None]
    floor = torch.finfo(additive).min
    return torch.zeros_like(allowed_BSS, dtype=additive).masked_fill_(~allowed_BSS, floor)[:, None]


def documents_as_rows(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Put each document of packed rows into a row of its own, padded at the end; padding of the packed rows is dropped.

    Args:
        batch: input_ids, labels and segments, each [B, S].

    Returns:
        input_ids (0 where padded), labels (-100 where padded) and attention_mask (int64), each [P, L]; `PACKED`: the
        number of each token's place in the packed rows [P, L], and their shape.

    Example:
        >>> ids = torch.tensor([[5, 6, 7, 0]])
        >>> documents_as_rows({"input_ids": ids, "labels": ids, "segments": torch.tensor([[0, 0, 1, -1]])})["input_ids"]
        tensor([[5, 6],
                [7, 0]])
    """
    segments_BS = batch["segments"]
    starts_BS = torch.ones_like(segments_BS, dtype=torch.bool)
    starts_BS[:, 1:] = segments_BS[:, 1:] != segments_BS[:, :-1]
    kept_N = (segments_BS >= 0).flatten()
    starts_N = starts_BS.flatten() & kept_N
    piece_N = starts_N.long().cumsum(0) - 1
    place_N = torch.arange(len(kept_N), device=kept_N.device)
    offset_N = place_N - place_N[starts_N][piece_N.clamp_min(0)] if starts_N.any() else place_N
    piece, offset = piece_N[kept_N], offset_N[kept_N]
    shape = (int(starts_N.sum()), int(offset.max()) + 1) if len(offset) else (0, 0)

    def lay_out(values_BS: Tensor, fill: int) -> Tensor:
        out_PL = values_BS.new_full(shape, fill)
        out_PL[piece, offset] = values_BS.flatten()[kept_N]
        return out_PL

    return {
        "input_ids": lay_out(batch["input_ids"], 0),
        "labels": lay_out(batch["labels"], IGNORED_LABEL),
        "attention_mask": lay_out(torch.ones_like(batch["input_ids"]), 0),
        PACKED: lay_out(place_N.view_as(segments_BS), segments_BS.numel()),
        PACKED_SHAPE: torch.tensor(segments_BS.shape),
    }


def in_packed_rows(out: LossOutput, batch: Mapping[str, Tensor]) -> LossOutput:
    """Move the loss of each target from rows of documents to where it was in packed rows; other batches return
    `out`."""
    if PACKED not in batch or out.each is None:
        return out
    rows, length = batch[PACKED_SHAPE].tolist()
    each_N = out.each.new_zeros(rows * length + 1)  # one more, which takes the padding's
    each_N[batch[PACKED].flatten()] = out.each.flatten()
    return replace(out, each=each_N[:-1].view(rows, length))
