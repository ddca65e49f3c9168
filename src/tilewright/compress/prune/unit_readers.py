"""The layers that read units as channels of their input, and a model run while hooks see what they read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tilewright.compress.prune.cut_model import short_batch
from tilewright.compress.prune.unit_places import Place, Share, UnitGroup
from tilewright.models.base.eval_mode import evaluation

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class ChannelReader:
    """A linear layer or a convolution.

    Args:
        place: of the units.
        share: of its weight, along the input.
        module: the layer.
    """

    place: Place
    share: Share
    module: nn.Module


def find_readers(model: nn.Module, units: UnitGroup) -> list[ChannelReader]:
    """Find all readers of a kind of unit."""
    return [
        ChannelReader(place, share, module)
        for place, shares in units.shares.items()
        for share in shares
        if (module := _reader(model, share)) is not None
    ]


def _reader(model: nn.Module, share: Share) -> nn.Module | None:
    """Find the layer whose input channels are this share of units; None if something else reads them."""
    owner, _, name = share.tensor.rpartition(".")
    module = model.get_submodule(owner)
    if isinstance(module, nn.Conv2d):
        return module if name == "weight" and share.dim == 1 else None
    if name != "weight" or getattr(module, name).dim() != 2:
        return None
    transposed = is_transposed(module)
    is_linear = isinstance(module, nn.Linear) or transposed
    return module if is_linear and share.dim == (0 if transposed else 1) else None


def is_transposed(module: nn.Module) -> bool:
    """True if a reader of units keeps its weight as [in, out], as transformers' Conv1D does."""
    return hasattr(module, "nf")


@torch.no_grad()
def run_through(model: Any, batches: Sequence[Batch], hook: Callable[[], Sequence[RemovableHandle]]) -> None:
    """Run all batches through the model while hooks see what readers read, and nothing else: models of transformers try
    their inputs out in the first loss.

    Args:
        model: any.
        batches: text or images.
        hook: registers the hooks, which are gone afterwards.
    """
    with evaluation(model):
        model.loss(short_batch(model))
        handles = hook()
        try:
            for batch in batches:
                model.loss(batch)
        finally:
            for handle in handles:
                handle.remove()
