"""The cost of each replacement alone: held-out loss with it in place, everything else the run's own.

The run's stream over the held-out rows is held at one part at a time, so only what is behind a replacement runs again.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewright.compress.budget.held_out_rise import Batches, RowLosses, row_losses
from tilewright.compress.search.library.layer_parts import PartPlace, own_part, run_part
from tilewright.compress.search.library.replacement_choices import PartChoice
from tilewright.compress.search.library.train_replacements import key_of, part_at
from tilewright.core.errors import NumericsError
from tilewright.models.base.eval_mode import evaluation
from tilewright.models.base.protocols import LossOutput
from tilewright.models.decoder.block import Block


def first_rows(batches: Batches, most: int) -> Batches:
    """The held-out rows that replacements are scored on: micro-batches from each domain in turn, until one more would
    make more than so many rows; at least one of each domain, so that all domains count.

    Example:
        >>> two = {"input_ids": torch.zeros(2, 8)}
        >>> found = first_rows({"a": [two] * 5, "b": [two], "c": [two] * 3}, 9)
        >>> {domain: len(batches) for domain, batches in found.items()}
        {'a': 2, 'b': 1, 'c': 1}
    """
    found = {domain: list(rows[:1]) for domain, rows in batches.items()}
    used = sum(len(batch["input_ids"]) for rows in found.values() for batch in rows)
    for place in range(1, max(map(len, batches.values()), default=0)):
        for domain, rows in batches.items():
            if place < len(rows):
                used += len(rows[place]["input_ids"])
                if used > most:
                    return found
                found[domain].append(rows[place])
    return found


def score_choices(
    model: Any,
    batches: Batches,
    choices: Mapping[PartPlace, Sequence[PartChoice]],
    folder: Path,
    *,
    done: Callable[[str], bool],
    report: Callable[[str, RowLosses | None], None],
) -> None:
    """Score the replacements that have no score yet: losses of each choice other than the run's own part.

    Args:
        model: the run's decoder, left as it was.
        batches: held-out rows by domain.
        choices: of each place, in the order of a forward pass.
        folder: of `train_library`.
        done: whether a choice, by its key, is.
        report: takes the losses of one; None where one is not finite.
    """
    with evaluation(model), torch.no_grad():
        flat = [(domain, batch) for domain, rows in batches.items() for batch in rows]
        contexts = [model.context(batch) for _, batch in flat]
        stream = [model.prologue(batch)[0] for _, batch in flat]
        parts = [(place, own_part(model, place)) for place in choices]
        for number, (place, own) in enumerate(parts):
            behind = [part for _, part in parts[number + 1 :]]
            for choice in choices[place]:
                key = key_of(place, choice)
                if choice.how != "own" and not done(key):
                    tried = [part_at(model, place, choice, folder), *behind]
                    report(key, _losses(_outs(model, flat, tried, stream, contexts)))
            stream = [run_part(own, x, context) for x, context in zip(stream, contexts, strict=True)]


def _losses(outs: Mapping[str, Iterator[tuple[LossOutput, Mapping[str, Tensor]]]]) -> RowLosses | None:
    try:
        return row_losses(outs)
    except NumericsError:
        return None


def _outs(
    model: Any,
    flat: Sequence[tuple[str, Mapping[str, Tensor]]],
    parts: Sequence[Block | None],
    stream: Sequence[Tensor],
    contexts: Sequence[Mapping[str, Tensor]],
) -> dict[str, Iterator[tuple[LossOutput, Mapping[str, Tensor]]]]:
    """Run the model with some replaced layers: its output for each micro-batch, by domain."""

    def of(domain: str) -> Iterator[tuple[LossOutput, Mapping[str, Tensor]]]:
        for (name, batch), x, context in zip(flat, stream, contexts, strict=True):
            if name == domain:
                for part in parts:
                    x = run_part(part, x, context)
                yield model.epilogue(x, context, batch), batch

    return {domain: of(domain) for domain in dict.fromkeys(name for name, _ in flat)}
