"""The library of replacements: smaller parts trained to give what the run's parts give, each on its own.

The run is frozen. Its stream over the training text is held at one layer at a time, and all replacements of that layer
are trained on it before it moves on: one forward pass of the run feeds all of them. Each is a file when it is done,
so that a command that was killed continues behind the last whole one.

Legend: B rows  S positions  D model width.
"""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tilewright.compress.search.library.layer_parts import PartPlace, new_part, own_part, run_part
from tilewright.compress.search.library.replacement_choices import PartChoice
from tilewright.compress.search.library.start_weights import PartData, channel_importance, fit_last, start
from tilewright.core.atomic_io import fsync_path
from tilewright.core.errors import CheckpointError
from tilewright.models.base.eval_mode import evaluation
from tilewright.models.decoder.block import Block
from tilewright.models.decoder.init import name_seed

_RATE, _WARMUP, _LEAST = 3e-4, 0.1, 0.1
"""AdamW's rate, the share of steps in which it rises, and what of it is left at the end of the cosine. Above it, the
first steps undo what the fit of the last layer gave."""
STEP_TOKENS = 1024
"""Of a training step; at least one row. Four times as many steps bring more than steps of four times as many tokens."""
_FITTED = 0.01
"""A replacement that misses less of the run's part than this with its last layer fitted is not trained."""
_HELD = 8
"""One micro-batch of so many tells whether training made a replacement better; at least one."""


@dataclass(frozen=True)
class TrainedPart:
    """The outcome of one replacement.

    Args:
        begun, fitted, error: mean square of the difference to the run's part, as a share of the mean square of what
            that part adds to the stream: of the run's weights, with the last layer fitted, and trained, if the fit
            leaves 1 % or more. On text that it was not trained on where there is more than one micro-batch; what does
            not help there is undone.
        seconds: of all.
    """

    begun: float
    fitted: float
    error: float
    seconds: float

    def to_json(self) -> dict[str, float]:
        """The row of a trained replacement as plain types."""
        return asdict(self)


def key_of(place: PartPlace, choice: PartChoice) -> str:
    """The key of a trained replacement: its name in records and of its file."""
    return f"{place}.{choice.name}"


def train_library(
    model: Any,
    batches: Sequence[Mapping[str, Tensor]],
    choices: Mapping[PartPlace, Sequence[PartChoice]],
    folder: Path,
    *,
    steps: int,
    seed: int,
    done: Callable[[str], bool],
    report: Callable[[str, TrainedPart], None],
) -> None:
    """Train the library of replacements: what is not done yet.

    Args:
        model: the run's decoder, FP32 on the host; left as it was.
        batches: of training text.
        choices: of each place; those without weights of their own are passed over.
        folder: of the files.
        steps: of each replacement, a few rows each.
        seed: of their order.
        done: whether a replacement, by its key, is.
        report: takes one that is done now, its file written.

    Raises:
        CheckpointError: a file cannot be written.
    """
    batches = [few for batch in batches for few in _by_rows(batch, STEP_TOKENS)]
    with evaluation(model), torch.no_grad():
        contexts = [model.context(batch) for batch in batches]
        stream = [model.prologue(batch)[0] for batch in batches]
        for place, found in choices.items():
            own = own_part(model, place)
            behind = [run_part(own, x, context) for x, context in zip(stream, contexts, strict=True)]
            data = PartData(stream, behind, contexts)
            held = max(1, len(data) // _HELD) if len(data) > 1 else 0
            train = data.some(range(len(data) - held))
            tell = data.some(range(len(data) - held, len(data))) if held else train
            importance = cache(partial(channel_importance, own, train))
            for choice in found:
                key = key_of(place, choice)
                if choice.trained and not done(key):
                    assert choice.shape is not None
                    made = new_part(model.config, place.layer, choice.shape, model.kernels)
                    started, number = time.perf_counter(), name_seed(seed, key)
                    start(made, choice, own, importance, number)
                    begun, fitted, error = _train(made, train, tell, steps, number)
                    row = TrainedPart(begun, fitted, error, time.perf_counter() - started)
                    save_part(made, folder, key)
                    report(key, row)
            stream = behind


def _by_rows(batch: Mapping[str, Tensor], tokens: int) -> list[Mapping[str, Tensor]]:
    """Cut a micro-batch into some of so many tokens at most, but one row at least, for steps of training."""
    rows, length = batch["labels"].shape
    few = max(1, tokens // length)
    return [{name: values[row : row + few] for name, values in batch.items()} for row in range(0, rows, few)]


def _train(made: Block, train: PartData, tell: PartData, steps: int, seed: int) -> list[float]:
    """Train a replacement that has its first weights: errors begun, fitted and at last, see `TrainedPart`."""
    errors = [relative_error(made, tell)]
    for improve in (fit_last, partial(_learn, steps=steps, generator=torch.Generator().manual_seed(seed))):
        if len(errors) == 2 and errors[-1] < _FITTED:
            errors.append(errors[-1])
            break
        before = {name: tensor.clone() for name, tensor in made.state_dict().items()}
        improve(made, train)
        error = relative_error(made, tell)
        if not error < errors[-1]:  # NaN too
            made.load_state_dict(before)
            error = errors[-1]
        errors.append(error)
    return errors


@torch.enable_grad()
def _learn(made: Block, data: PartData, steps: int, generator: torch.Generator) -> None:
    weights = [param.requires_grad_(True) for param in made.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    order: list[int] = []
    for step in range(steps):
        order = order or torch.randperm(len(data), generator=generator).tolist()
        one = data.some(range(i := order.pop(), i + 1))
        for group in optimizer.param_groups:
            group["lr"] = _RATE * _schedule(step, steps)
        (difference, scale) = _squares(made, one)
        optimizer.zero_grad(set_to_none=True)
        (difference / scale).backward()
        optimizer.step()
    made.requires_grad_(False)


def _schedule(step: int, steps: int) -> float:
    """The schedule of a replacement's training, as a share of the rate: a short rise, then a cosine.

    Example:
        >>> [round(_schedule(step, 10), 2) for step in (0, 1, 5, 9)]
        [1.0, 0.98, 0.55, 0.12]
    """
    rise = (step + 1) / max(1, round(_WARMUP * steps))
    fall = _LEAST + (1 - _LEAST) * (1 + math.cos(math.pi * step / steps)) / 2
    return min(1.0, rise) * fall


def _squares(part: Block | None, data: PartData) -> tuple[Tensor, Tensor]:
    """Sum the squares of a replacement's difference to the run's part, and of what that part adds to the stream."""
    parts = [
        ((run_part(part, x, context) - out).square().sum(), (out - x).square().sum())
        for x, out, context in zip(data.inputs, data.outputs, data.contexts, strict=True)
    ]
    difference, scale = (torch.stack(sums).sum() for sums in zip(*parts, strict=True))
    return difference, scale.clamp_min(torch.finfo(scale.dtype).tiny)


@torch.no_grad()
def relative_error(part: Block | None, data: PartData) -> float:
    """The relative error of a trained replacement; see `TrainedPart`; of a missing part 1."""
    difference, scale = _squares(part, data)
    return float(difference / scale)


def save_part(part: Block, folder: Path, key: str) -> None:
    """Write the file of a trained replacement, whole or not at all.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    final, partial = folder / f"{key}.safetensors", folder / f"{key}.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in part.state_dict().items()}, partial)
        fsync_path(partial)
        os.replace(partial, final)
    except (OSError, SafetensorError) as error:  # safetensors: of its own writes
        raise CheckpointError(
            "Replacement of a layer cannot be written",
            got=str(error),
            need="a folder in which files can be made",
            try_="free space, or --out FOLDER; replacements that are done are whole",
            where=str(final),
        ) from error


def part_at(model: Any, place: PartPlace, choice: PartChoice, folder: Path) -> Block | None:
    """The trained part of a choice of replacement, with its weights; None where nothing takes its place.

    Args:
        model: the run's decoder.
        place: of the part.
        choice: one of its choices.
        folder: of the files.

    Raises:
        CheckpointError: its file is gone or damaged.
    """
    if choice.shape is None:
        return None
    if not choice.trained:
        return own_part(model, place)
    made = new_part(model.config, place.layer, choice.shape, model.kernels)
    path = folder / f"{key_of(place, choice)}.safetensors"
    try:
        made.load_state_dict(load_file(path))
    except (OSError, SafetensorError, RuntimeError) as error:  # torch: another shape
        raise CheckpointError(
            "Replacement of a layer cannot be read",
            got=" ".join(str(error).split())[:200],
            need="the file as it was written",
            try_=f"rm {path}, and the same command, which makes it again",
            where=str(path),
        ) from error
    return made
