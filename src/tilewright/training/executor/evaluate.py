"""Loss, perplexity and bits per byte of held-out text, by domain and of all; computed in FP32 where asked.

The model is left as it was found: mode, precision, gradients and generators.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tilewright.core.units import bits_per_byte, perplexity
from tilewright.data.batches.microbatches import Batch, count_targets, to_device
from tilewright.models.base.eval_mode import evaluation
from tilewright.models.base.protocols import TrainableModel
from tilewright.parallel.agree import gather
from tilewright.parallel.shard import reshard
from tilewright.precision.convert import evaluating


@dataclass(frozen=True)
class HeldOut:
    """Data to evaluate, by domain: batches, and the UTF-8 bytes of text that their targets stand for (None where they
    are not text)."""

    batches: dict[str, list[dict[str, torch.Tensor]]]
    num_bytes: dict[str, int | None]

    def after(self, part: "HeldOut") -> "HeldOut":
        """The rest of held-out batches to evaluate, behind the first ones."""
        return HeldOut(
            {domain: rows[len(part.batches[domain]) :] for domain, rows in self.batches.items()},
            {domain: size and size - (part.num_bytes[domain] or 0) for domain, size in self.num_bytes.items()},
        )


@dataclass(frozen=True)
class DomainLoss:
    """Held-out result of one domain: mean loss in nats per target, its exponential (infinite from a loss of
    709.8), the targets it is the mean of, and the UTF-8 bytes of text they stand for (None: they are not text)."""

    loss: float
    ppl: float
    tokens: int
    bytes: int | None = None

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of an evaluated domain: independent of the tokenizer, so comparable between runs and with
        compressors; None without bytes."""
        return bits_per_byte(self.loss * self.tokens, self.bytes) if self.bytes else None

    def to_json(self) -> dict[str, float]:
        """An evaluated loss by domain in the form of metrics.jsonl."""
        row: dict[str, float] = {"loss": self.loss, "ppl": self.ppl, "tokens": self.tokens}
        bits = self.bits_per_byte
        return row if self.bytes is None or bits is None else row | {"bytes": self.bytes, "bits_per_byte": bits}


@torch.no_grad()
def evaluate(
    model: TrainableModel,
    batches: Mapping[str, Sequence[Batch]],
    *,
    num_bytes: Mapping[str, int | None] | None = None,
    device: torch.device | str = "cpu",
    fp32: bool = True,
    data: dist.ProcessGroup | None = None,
) -> dict[str, DomainLoss]:
    """Evaluate a model on the batches of each domain; of ranks that read different rows each takes its share.

    Args:
        model: in any mode; it is in evaluation mode inside and comes back as it was.
        batches: by domain; a domain without targets is left out of the result.
        num_bytes: UTF-8 bytes of text that the targets of each domain stand for, for bits per byte.
        device: where batches are moved.
        fp32: compute in FP32 whatever the model's precision (a converted model only).
        data: ranks that read different rows, and have the same batches here: each computes some of them, and all have
            the result, which is that of one rank to the last bit. Ranks with other parts of the model, and so with the
            same place in this group of theirs, compute the same ones.
    """
    if not batches:
        return {}
    with evaluating(model) if fp32 else evaluation(model):
        sizes = num_bytes or {}
        results: Mapping[str, DomainLoss | None]
        if data is not None:
            results = _shared(model, batches, torch.device(device), sizes, data)
        else:
            where = torch.device(device)
            results = {domain: _domain(model, rows, where, sizes.get(domain)) for domain, rows in batches.items()}
    reshard(model)
    return {domain: result for domain, result in results.items() if result is not None}


def evaluate_texts(
    model: TrainableModel, part: HeldOut, rest: HeldOut, other: HeldOut, *, whole: bool, **how: Any
) -> dict[str, dict[str, DomainLoss]]:
    """Evaluate texts: the tables `eval`, `eval_part` where that is less than all, and `eval_other`.

    Args:
        model: see `evaluate`.
        part: held-out rows that each evaluation takes.
        rest: those that the whole ones take too; may be empty.
        other: text that is not trained on.
        whole: whether this one takes all, as the first and the last of a run do.
        how: for `evaluate`.
    """
    nothing = HeldOut({}, {})
    of_part, of_rest, of_other = (
        evaluate(model, text.batches, num_bytes=text.num_bytes, **how)
        for text in (part, rest if whole else nothing, other)
    )
    return {"eval": joined(of_part, of_rest), "eval_part": of_part if of_rest else {}, "eval_other": of_other}


def pooled(results: Mapping[str, DomainLoss]) -> DomainLoss | None:
    """Pool the evaluated domains into one: loss weighted by targets, bits per byte by bytes; None without targets.

    Example:
        >>> pooled({"a": DomainLoss(1.0, 2.718, 1), "b": DomainLoss(4.0, 54.6, 2)}).loss
        3.0
    """
    tokens = sum(result.tokens for result in results.values())
    if tokens == 0:
        return None
    sizes = [result.bytes for result in results.values() if result.bytes is not None]
    whole = sum(sizes) if len(sizes) == len(results) else None
    return _result(sum(result.loss * result.tokens for result in results.values()), tokens, whole)


def joined(*parts: Mapping[str, DomainLoss]) -> dict[str, DomainLoss]:
    """Evaluations of parts of a text joined as one of all of it.

    Example:
        >>> joined({"a": DomainLoss(1.0, 2.718, 1, 4)}, {"a": DomainLoss(4.0, 54.6, 2, 8)})["a"].loss
        3.0
    """
    found: dict[str, DomainLoss] = {}
    for domain in dict.fromkeys(domain for part in parts for domain in part):
        results = [part[domain] for part in parts if domain in part]
        whole = results[0] if len(results) == 1 else pooled({str(i): result for i, result in enumerate(results)})
        if whole is not None:
            found[domain] = whole
    return found


def _domain(
    model: TrainableModel,
    batches: Sequence[Batch],
    device: torch.device,
    num_bytes: int | None,
) -> DomainLoss | None:
    tokens = count_targets(batches)
    if tokens == 0:
        return None
    total = torch.zeros((), dtype=torch.float32 if device.type != "cpu" else torch.float64, device=device)
    for batch in batches:
        total += model.loss(to_device(batch, device)).loss_sum
    return _result(float(total), tokens, num_bytes)


def _shared(
    model: TrainableModel,
    batches: Mapping[str, Sequence[Batch]],
    device: torch.device,
    num_bytes: Mapping[str, int | None],
    data: dist.ProcessGroup,
) -> dict[str, DomainLoss]:
    """Evaluate a part of the batches on each rank, and add up the sums of all ranks in the order in which one rank
    would.

    Each rank computes as many batches as every other, the last one again where there is none left for it: a forward
    pass of a sharded model is one of all ranks.
    """
    counts = {domain: count for domain, rows in batches.items() if (count := count_targets(rows))}
    rows = [(domain, batch) for domain in counts for batch in batches[domain]]
    rank, size = dist.get_rank(data), dist.get_world_size(data)
    mine: dict[int, float] = {}
    for number in range(rank, -(-len(rows) // size) * size, size):
        _, batch = rows[min(number, len(rows) - 1)]
        mine[number] = float(model.loss(to_device(batch, device)).loss_sum)
    sums = {number: value for of_rank in gather(data, mine) for number, value in of_rank.items()}
    totals = dict.fromkeys(counts, 0.0)
    for number, (domain, _) in enumerate(rows):
        totals[domain] += sums[number]
    return {domain: _result(totals[domain], count, num_bytes.get(domain)) for domain, count in counts.items()}


def _result(loss_sum: float, tokens: int, num_bytes: int | None) -> DomainLoss:
    loss = loss_sum / tokens
    return DomainLoss(loss, perplexity(loss), tokens, num_bytes)
