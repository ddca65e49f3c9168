"""How long a search takes here, stage by stage, from the seconds of one evaluation of the run."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tilewright.compress.search.library.layer_parts import PartPlace, config_of
from tilewright.compress.search.library.replacement_choices import PartChoice
from tilewright.compress.search.library.train_replacements import STEP_TOKENS
from tilewright.compress.search.search_settings import LayerSearchSettings
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.flops import count_flops

_CALLS = 20
"""Prefills that are timed for a row of the latency table, those of the run among them, or as long in calls."""
_FORWARD_AND_BACKWARD, _TEACHER, _FITTING = 3, 1, 2
"""In forward passes; fitting: of a replacement over all rows, before it is trained."""
WIDE = 2.0
"""Seconds of a forward pass in FP32 over one in 16 bits, where a CPU multiplies 16 bits faster."""
_EVALUATIONS = 2.5
"""Of all held-out rows with each of the best shapes: before and after, and a quarter of them twice in its run."""


@dataclass(frozen=True)
class SearchWork:
    """The amount of data that a search reads.

    Args:
        forward_s: seconds per token of a forward pass of the run, as scores are computed.
        scored: tokens that replacements are scored on.
        held_out: tokens of all held-out rows.
        step: tokens of an optimizer step of the run.
        seq_len: of rows.
        wide: seconds of a pass in FP32, which replacements are trained in, over one of scores.
    """

    forward_s: float
    scored: int
    held_out: int
    step: int
    seq_len: int
    wide: float


def stage_seconds(
    config: DecoderConfig,
    choices: Mapping[PartPlace, Sequence[PartChoice]],
    settings: LayerSearchSettings,
    steps: int,
    work: SearchWork,
) -> dict[str, float]:
    """Estimated seconds of a search by stage.

    Args:
        config: of the run.
        choices: of each place.
        settings: of the search.
        steps: that each of the best shapes is trained on for.
        work: of the run.
    """
    per_flop = work.forward_s / count_flops(config, work.seq_len).forward
    places = len(choices)
    scored = sum(
        (places - number) / places * sum(choice.how != "own" for choice in found)
        for number, found in enumerate(choices.values())
    )
    trained = sum(_flops(config, place, choice, work.seq_len) for place, choice in _trained(choices))
    rows = 1 + len({choice.shape for found in choices.values() for choice in found if choice.shape is not None})
    shapes = settings.candidates + settings.uniform
    read = settings.rows * work.seq_len
    passes = _FORWARD_AND_BACKWARD * (settings.block_steps or 0) * max(STEP_TOKENS, work.seq_len) + _FITTING * read
    taught = steps * work.step
    left = min((share for measure, share in settings.limits.items() if measure != "cache"), default=1.0)
    student = left * (_FORWARD_AND_BACKWARD * taught + _EVALUATIONS * work.held_out)
    return {
        "replacements": work.wide * (per_flop * trained * passes + work.forward_s * read),
        "scores": work.forward_s * work.scored * scored,
        "latency table": work.forward_s * rows * _CALLS * settings.context,
        "best shapes": work.forward_s * (shapes * student + _TEACHER * taught),
    }


def _trained(choices: Mapping[PartPlace, Sequence[PartChoice]]) -> Iterator[tuple[PartPlace, PartChoice]]:
    for place, found in choices.items():
        for choice in found:
            if choice.trained:
                yield place, choice


def _flops(config: DecoderConfig, place: PartPlace, choice: PartChoice, seq_len: int) -> float:
    assert choice.shape is not None
    flops = count_flops(config_of(config, place.layer, choice.shape), seq_len)
    return flops.layers[place.layer] + flops.attention[place.layer]
