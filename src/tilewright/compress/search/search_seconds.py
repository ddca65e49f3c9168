"""How long a search takes here, stage by stage, from the seconds of one evaluation of the run."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tilewright.compress.search.library.layer_parts import PartPlace, config_of
from tilewright.compress.search.library.replacement_choices import PartChoice
from tilewright.compress.search.search_settings import LayerSearchSettings
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.flops import count_flops

_CALLS = 20
"""Of each kind that are timed for a row of the latency table."""
_FORWARD_AND_BACKWARD, _TEACHER = 3, 1
"""In forward passes."""


@dataclass(frozen=True)
class SearchWork:
    """The amount of data that a search reads.

    Args:
        forward_s: seconds per token of a forward pass of the run.
        held_out: tokens that are scored.
        micro_batch: tokens of a training micro-batch.
        step: tokens of an optimizer step of the run.
        seq_len: of rows.
    """

    forward_s: float
    held_out: int
    micro_batch: int
    step: int
    seq_len: int


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
    passes = _FORWARD_AND_BACKWARD * (settings.block_steps or 0) * work.micro_batch
    return {
        "replacements": per_flop * trained * passes + work.forward_s * settings.rows * work.seq_len,
        "scores": work.forward_s * work.held_out * scored,
        "latency table": work.forward_s * rows * _CALLS * settings.context,
        "best shapes": work.forward_s * shapes * steps * work.step * (_FORWARD_AND_BACKWARD + _TEACHER),
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
