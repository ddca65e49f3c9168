"""Micro-batches of a step: their targets and tokens, counted on the host, and means that are weighed by targets."""

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from tilewright.models.base.output_head import IGNORED_LABEL
from tilewright.models.base.preference import is_pairs
from tilewright.ops.base.documents import STARTS, document_starts
from tilewright.parallel.agree import reduced_on, sum_over

Batch = Mapping[str, Tensor]


def to_device(batch: Batch, device: torch.device) -> Batch:
    """A micro-batch where the model computes. For a GPU, where documents begin is found before, and stays here: nothing
    of it is waited for."""
    if device.type == "cpu":
        return {name: tensor.to(device) for name, tensor in batch.items()}
    pinned = {name: tensor.pin_memory() if tensor.device.type == "cpu" else tensor for name, tensor in batch.items()}
    there = {name: tensor.to(device, non_blocking=True) for name, tensor in pinned.items()}
    if "segments" in batch and batch["segments"].dim() == 2:
        there[STARTS] = document_starts(batch["segments"])
    return there


def count_targets(microbatches: Sequence[Batch]) -> int:
    """Number of targets (labels that are not -100, or pairs of answers) over all micro-batches of a step.

    Example:
        >>> count_targets([{"labels": torch.tensor([[5, -100]])}, {"labels": torch.tensor([[7, 8]])}])
        3
    """
    return sum(_targets_in(batch) for batch in microbatches)


def _targets_in(batch: Batch) -> int:
    return int(_are_targets(batch).sum())


def _are_targets(batch: Batch) -> Tensor:
    """True where a micro-batch has targets: boolean, in the shape of `LossOutput.each`: [B, S], [B] of images, [B] of
    pairs."""
    return batch["rows"] >= 0 if is_pairs(batch) else batch["labels"] != IGNORED_LABEL


def sums_by_row(each: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Sum the losses of the targets [B] FP32 of each row of a micro-batch, and count them [B] int64. A pair of answers
    counts as one row, and so does each of several whole documents in one row.

    Args:
        each: `LossOutput.each`.
        batch: that it is the loss of.

    Example:
        >>> losses, labels = torch.tensor([[1.0, 2.0], [0.0, 5.0]]), torch.tensor([[7, 8], [-100, 9]])
        >>> [sums.tolist() for sums in sums_by_row(losses, {"labels": labels})]
        [[3.0, 5.0], [2, 1]]
    """
    targets = _are_targets(batch)
    if STARTS in batch and len(targets) == 1:
        return _sums_of_documents(each, targets, batch)
    return each.view(len(each), -1).sum(1), targets.view(len(targets), -1).sum(1)


def _sums_of_documents(each_1T: Tensor, targets_1T: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    lengths_N = batch[STARTS].cpu().diff().long()  # the padding's, too, behind the documents'
    lengths_N = lengths_N[: int(batch["segments"].max()) + 1]
    each_T, targets_T = each_1T.detach().flatten(), targets_1T.flatten()
    if not len(lengths_N):
        return each_T.new_zeros(0, dtype=torch.float32), lengths_N
    used = int(lengths_N.sum())
    lengths = lengths_N.to(each_T.device)
    sums_N = torch.segment_reduce(each_T[:used].float(), "sum", lengths=lengths)
    counts_N = torch.segment_reduce(targets_T[:used].double(), "sum", lengths=lengths_N.to(targets_T.device))
    return sums_N, counts_N.long()


def sums_of_rows(told: Iterable[tuple[Tensor | None, Batch]]) -> tuple[Tensor, Tensor] | None:
    """`sums_by_row` of several micro-batches, one after the other; None of none, or where a model did not tell."""
    parts = [None if each is None else sums_by_row(each, batch) for each, batch in told]
    found = [part for part in parts if part is not None]
    if not found or len(found) < len(parts):
        return None
    return torch.cat([sums for sums, _ in found]), torch.cat([counts for _, counts in found])


def sums_by_document(each_BS: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Sum the losses of the targets of each document of packed rows, and count them: [B, P] each, P documents in the
    row that has most; 0 where a row has fewer. Without `segments` a row is one document. Padding counts for none."""
    segments_BS = batch.get("segments")
    if segments_BS is None:
        segments_BS = torch.zeros_like(batch["labels"])
    place_BS = segments_BS.long() + 1  # column 0 takes the padding
    shape = len(each_BS), int(place_BS.max()) + 1
    sums_BP = each_BS.new_zeros(shape).scatter_add_(1, place_BS, each_BS)
    counts_BP = place_BS.new_zeros(shape).scatter_add_(1, place_BS, _are_targets(batch).long())
    return sums_BP[:, 1:], counts_BP[:, 1:]


def count_tokens(microbatches: Sequence[Batch]) -> int:
    """Tokens of a step's micro-batches that are not padding; of image batches the rows."""
    return sum(_tokens_in(batch) for batch in microbatches)


def _tokens_in(batch: Batch) -> int:
    if "segments" in batch:
        return int((batch["segments"] >= 0).sum())
    return batch["input_ids"].numel() if "input_ids" in batch else batch["labels"].numel()


def count_over(group: dist.ProcessGroup | None, microbatches: Sequence[Batch], device: torch.device) -> tuple[int, int]:
    """Count over ranks: sums of targets and tokens of a step's micro-batches, over all of a group."""
    counts = count_targets(microbatches), count_tokens(microbatches)
    if group is None:
        return counts  # known on the host: nothing waits for a device
    totals = torch.tensor(counts, device=reduced_on(group, device))
    sum_over(group, [totals])
    num_targets, num_tokens = totals.tolist()
    return num_targets, num_tokens


def first_rows(batch: Batch, number: int | None) -> Batch:
    """The first rows of a micro-batch; None gives all.

    Example:
        >>> batch = {"labels": torch.zeros(3, 4), STARTS: torch.tensor([0, 3, 4, 8, 12])}
        >>> first_rows(batch, 1)[STARTS].tolist()
        [0, 3, 4]
    """
    kept = {name: tensor if name == STARTS else tensor[:number] for name, tensor in batch.items()}
    if STARTS in kept:
        kept[STARTS] = kept[STARTS][kept[STARTS] <= kept["labels"].numel()]
    return kept


def row_length(microbatches: Sequence[Batch], longest: int | None = None) -> int | None:
    """Tokens of the longest row of a step's micro-batches, for which memory is planned; None of images.

    Args:
        microbatches: of a step.
        longest: documents stand behind each other, and none has more tokens. A row of them is planned as rows of so
            many, however many there are this time.
    """
    if longest is not None:
        return longest
    return max((batch["input_ids"].shape[-1] for batch in microbatches if "input_ids" in batch), default=None)


def add_weighed(sums: dict[str, Tensor], values: Mapping[str, Tensor], targets: int) -> None:
    """Add what a model reported of one micro-batch, times its targets. What it tells of none is not looked at: 0 /
    0."""
    for name, value in values.items():
        wide = value.new_zeros((), dtype=sum_dtype(value.device))
        sums[name] = sums.get(name, wide) + (value.to(wide.dtype) * targets if targets else wide)


def add_each_weighed(sums: dict[str, Tensor], values: Sequence[Mapping[str, Tensor]], targets: Sequence[int]) -> None:
    """Add what a model reported of the first micro-batches, all of them unless a step ended early."""
    for told, number in zip(values, targets, strict=False):
        add_weighed(sums, told, number)


def sum_dtype(device: torch.device) -> torch.dtype:
    """The dtype in which losses are added up over micro-batches."""
    return torch.float64 if device.type == "cpu" else torch.float32


def mean_over(
    group: dist.ProcessGroup | None,
    sums: Mapping[str, float | Tensor],
    weight: float,
    device: torch.device | str = "cpu",
) -> dict[str, float]:
    """Means of micro-batches over the group of ranks, weighed by targets; nothing where all weights are zero.

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
