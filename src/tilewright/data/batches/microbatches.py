"""Micro-batches of a step: their targets and tokens, counted on the host, and means that are weighed by targets."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from tilewright.models.base.head import IGNORED_LABEL
from tilewright.models.base.preference import is_pairs
from tilewright.ops.base.documents import STARTS, document_starts
from tilewright.parallel.agree import reduced_on, sum_over

Batch = Mapping[str, Tensor]


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch where the model computes. For a GPU, where documents begin is found before, and stays here: nothing of
    it is waited for."""
    if device.type == "cpu":
        return {name: tensor.to(device) for name, tensor in batch.items()}
    pinned = {name: tensor.pin_memory() if tensor.device.type == "cpu" else tensor for name, tensor in batch.items()}
    there = {name: tensor.to(device, non_blocking=True) for name, tensor in pinned.items()}
    if "segments" in batch and batch["segments"].dim() == 2:
        there[STARTS] = document_starts(batch["segments"])
    return there


def count_targets(microbatches: Sequence[Batch]) -> int:
    """Labels that are not -100, or pairs of answers, over all micro-batches.

    Example:
        >>> count_targets([{"labels": torch.tensor([[5, -100]])}, {"labels": torch.tensor([[7, 8]])}])
        3
    """
    return sum(_targets_in(batch) for batch in microbatches)


def _targets_in(batch: Batch) -> int:
    if is_pairs(batch):
        return int((batch["rows"] >= 0).sum())
    return int((batch["labels"] != IGNORED_LABEL).sum())


def count_tokens(microbatches: Sequence[Batch]) -> int:
    """Tokens that are not padding; of image batches the rows."""
    return sum(_tokens_in(batch) for batch in microbatches)


def _tokens_in(batch: Batch) -> int:
    if "segments" in batch:
        return int((batch["segments"] >= 0).sum())
    return batch["input_ids"].numel() if "input_ids" in batch else batch["labels"].numel()


def count_over(group: dist.ProcessGroup | None, microbatches: Sequence[Batch], device: torch.device) -> tuple[int, int]:
    """Targets and tokens of all ranks of a group."""
    counts = count_targets(microbatches), count_tokens(microbatches)
    if group is None:
        return counts  # known on the host: nothing waits for a device
    totals = torch.tensor(counts, device=reduced_on(group, device))
    sum_over(group, [totals])
    num_targets, num_tokens = totals.tolist()
    return num_targets, num_tokens


def row_length(microbatches: Sequence[Batch]) -> int | None:
    """Tokens of the longest row; None of images."""
    return max((batch["input_ids"].shape[-1] for batch in microbatches if "input_ids" in batch), default=None)


def add_weighed(sums: dict[str, Tensor], values: Mapping[str, Tensor], targets: int) -> None:
    """Add what a model told of one micro-batch, times its targets. What it tells of none is not looked at: 0 / 0."""
    for name, value in values.items():
        wide = value.new_zeros((), dtype=sum_dtype(value.device))
        sums[name] = sums.get(name, wide) + (value.to(wide.dtype) * targets if targets else wide)


def sum_dtype(device: torch.device) -> torch.dtype:
    """What losses are added up in."""
    return torch.float64 if device.type == "cpu" else torch.float32


def mean_over(
    group: dist.ProcessGroup | None,
    sums: Mapping[str, float | Tensor],
    weight: float,
    device: torch.device | str = "cpu",
) -> dict[str, float]:
    """Weighed means of numbers over the group; nothing where all weights are zero.

    Args:
        group: None gives the means of this process.
        sums: this rank's values times their weights, added up; by names that are the same on all ranks.
        weight: the sum of this rank's weights.
        device: of the group's backend.

    Example:
        >>> mean_over(None, {"margin": 6.0}, 4), mean_over(None, {"margin": 0.0}, 0)
        ({'margin': 1.5}, {})
    """
    if not sums:
        return {}
    names = sorted(sums)
    totals = torch.stack([torch.as_tensor(sums[name], dtype=torch.float64, device=device) for name in names])
    totals = torch.cat([totals.new_tensor([weight]), totals])
    if group is not None:
        dist.all_reduce(totals, group=group)
    total, *rest = totals.tolist()  # one wait for the device, not one per number
    return {name: value / total for name, value in zip(names, rest, strict=True)} if total else {}
