"""The latency table of a search: what each distinct shape of a part adds to a layer.

Two parts of one layer take less time than each in a layer of its own: a layer is one call. So attention is timed beside
the FFN of its layer, and counted without it; an FFN is timed alone, and what a call takes without one, `CALL`, is a row
of its own, which a layer without FFN costs. What is left wrong: a layer without both is counted as a call.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tilewright.compress.search.library.layer_parts import PartPlace, alone, joined
from tilewright.compress.search.library.replacement_choices import PartChoice
from tilewright.compress.search.table.choice_costs import CALL, shape_key
from tilewright.compress.search.table.latency import Latency, Timed, part_calls
from tilewright.models.decoder.config import DecoderConfig, LayerShape
from tilewright.ops.kernels import Kernels

Rows = dict[str, dict[str, Any]]


def measure_table(
    config: DecoderConfig,
    kernels: Kernels,
    choices: Mapping[PartPlace, Sequence[PartChoice]],
    rows: Rows,
    *,
    stack_bytes: int,
    context: int,
    timed: Timed,
    is_known: Callable[[Mapping[str, Any] | None], bool],
    report: Callable[[str, Latency], None],
) -> None:
    """Measure the rows of a latency table that are not known yet.

    Args:
        config: of the run.
        kernels: that its parts run with.
        choices: of each place.
        rows: by `shape_key`: latency and bytes of the cache; written.
        stack_bytes, context: see `part_calls`.
        timed: latency of calls.
        is_known: whether a row, None where there is none, stays.
        report: takes the name of a row that was written, and its latency.
    """
    # Rows of this call: a shape that several places have is timed once.
    seen: set[str] = set()

    def of_stack(layer: int, shape: LayerShape) -> tuple[Latency, int]:
        calls = part_calls(config, layer, shape, kernels, stack_bytes=stack_bytes, context=context)
        return timed(calls), calls.cache

    def latency_of(place: PartPlace, shape: LayerShape) -> Latency:
        key = shape_key(config, place, shape)
        if key in seen or is_known(rows.get(key)):
            return Latency.from_json(rows[key])
        ffn = alone(config.shapes[place.layer], "ffn")
        # An FFN is timed alone; attention with its layer's FFN behind it, of which the FFN's time is taken off.
        if place.part == "ffn" or not ffn.ffn_dim:
            found, cache = of_stack(place.layer, shape)
        else:
            beside = latency_of(PartPlace(place.layer, "ffn"), ffn)
            both, cache = of_stack(place.layer, joined(shape, ffn) or shape)
            found = both.less(beside)
        write(key, found, cache)
        return found

    def write(key: str, latency: Latency, cache: int) -> None:
        seen.add(key)
        rows[key] = latency.to_json() | {"cache": cache}
        report(key, latency)

    for place, of_place in choices.items():
        for choice in of_place:
            if choice.shape is not None:
                latency_of(place, choice.shape)
    # What a layer's call takes without an FFN: attention alone, less attention as it was timed above.
    whole = next((layer for layer, shape in enumerate(config.shapes) if shape.num_heads and shape.ffn_dim), None)
    if whole is not None and not is_known(rows.get(CALL)):
        attention = alone(config.shapes[whole], "attention")
        apart, _ = of_stack(whole, attention)
        write(CALL, apart.less(latency_of(PartPlace(whole, "attention"), attention)), 0)
