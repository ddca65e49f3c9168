"""The cost of each replacement alone: held-out loss with it in place, everything else the run's own.

The run's stream over the held-out rows is held at one part at a time, so only what is behind a replacement runs again.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewright.compress.budget.held_out_rise import Batches, RowLosses, row_losses
from tilewright.compress.search.library.layer_parts import PartPlace, own_part, places, run_part
from tilewright.compress.search.library.replacement_choices import PartChoice
from tilewright.compress.search.library.train_replacements import key_of, part_at
from tilewright.core.config.recipe import Recipe
from tilewright.core.errors import NumericsError
from tilewright.data.batches.microbatches import first_rows
from tilewright.models.base.eval_mode import evaluation
from tilewright.models.base.protocols import LossOutput
from tilewright.models.decoder.block import Block
from tilewright.precision.convert import convert
from tilewright.precision.policy.policy import Policy


def scored_rows(batches: Batches, most: int) -> Batches:
    """The held-out rows that replacements are scored on: the first of each domain, of all domains as many; at least
    one, so that all domains count.

    Example:
        >>> three = {"labels": torch.zeros(3, 8)}
        >>> found = scored_rows({"a": [three] * 5, "b": [three]}, 9)
        >>> {domain: [len(batch["labels"]) for batch in batches] for domain, batches in found.items()}
        {'a': [3, 1], 'b': [3]}
    """
    found: dict[str, list[Mapping[str, Tensor]]] = {}
    for domain, rows in batches.items():
        left, found[domain] = max(1, most // len(batches)), []
        for batch in rows:
            if left > 0:
                found[domain].append(first_rows(batch, left))
                left -= len(batch["labels"])
    return found


def score_choices(
    model: Any,
    batches: Batches,
    choices: Mapping[PartPlace, Sequence[PartChoice]],
    folder: Path,
    *,
    mode: str = "fp32",
    done: Callable[[str], bool],
    report: Callable[[str, RowLosses | None], None],
) -> None:
    """Score the replacements that have no score yet: losses of each choice other than the run's own part.

    Args:
        model: the run's decoder, left as it was.
        batches: held-out rows by domain.
        choices: of each place, in the order of a forward pass.
        folder: of `train_library`.
        mode: of precision, that all is computed in.
        done: whether a choice, by its key, is.
        report: takes the losses of one; None where one is not finite.
    """
    model = as_computed(model, mode)
    with evaluation(model), torch.no_grad():
        flat, stream, contexts = _begun(model, batches)
        parts = [(place, _computed(own_part(model, place), mode)) for place in choices]
        for number, (place, own) in enumerate(parts):
            behind = [part for _, part in parts[number + 1 :]]
            for choice in choices[place]:
                key = key_of(place, choice)
                if choice.how != "own" and not done(key):
                    tried = [_computed(part_at(model, place, choice, folder), mode), *behind]
                    report(key, _losses(_outs(model, flat, tried, stream, contexts)))
            stream = [run_part(own, x, context) for x, context in zip(stream, contexts, strict=True)]


def own_losses(model: Any, batches: Batches, mode: str) -> RowLosses:
    """Losses of the run itself, part by part as its replacements are scored: in 16 bits the stream between parts is not
    rounded, that inside of a layer is."""
    model = as_computed(model, mode)
    with evaluation(model), torch.no_grad():
        flat, stream, contexts = _begun(model, batches)
        parts = [_computed(own_part(model, place), mode) for place in places(model.config)]
        return row_losses(_outs(model, flat, parts, stream, contexts))


def _begun(
    model: Any, batches: Batches
) -> tuple[list[tuple[str, Mapping[str, Tensor]]], list[Tensor], list[Mapping[str, Tensor]]]:
    """Micro-batches with their domains, the stream before the first part, and contexts."""
    flat = [(domain, batch) for domain, rows in batches.items() for batch in rows]
    return flat, [model.prologue(batch)[0] for _, batch in flat], [model.context(batch) for _, batch in flat]


def _computed(part: Block | None, mode: str) -> Block | None:
    return None if part is None else convert(part, mode, kernels=part.kernels)


def as_computed(model: Any, mode: str) -> Any:
    """A decoder that computes its scores in a mode of precision: a copy that shares all tensors with the one given,
    which stays as it is."""
    if mode == "fp32":
        return model
    tensors = {id(each): each for each in (*model.parameters(), *model.buffers())}
    return convert(copy.deepcopy(model, tensors), mode, kernels=model.kernels)


def mode_of(recipe: Recipe) -> str:
    """The mode of precision that scores of a run's replacements are computed in: 16 bits where the run itself computes
    in so few, which takes half the time, else FP32."""
    policy = Policy.from_section(recipe.precision, "cpu")
    return "fp32" if policy.mode in ("fp32", "tf32") or policy.rounds_to_integers else "bf16_mixed"


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
