"""Which shapes may take the place of a part, and why a part has none."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tilewright.compress.search.library.layer_parts import PartPlace, alone
from tilewright.compress.search.search_settings import Kind
from tilewright.models.decoder.config import DecoderConfig, LayerShape

OWN = "own"
"""Name of a part as it is in the run."""
NONE = "none"
"""Name of a part that is left out."""
SHARES = (0.75, 0.5, 0.25)
"""Of units that stay."""
MULTIPLE = 32
"""Widths are multiples of this: rows of the tiles that CPUs and GPUs multiply."""
WINDOWS = (4, 16)
"""Windows of attention are these parts of the run's rows."""
How = Literal["own", "cut", "merge", "copy", "none"]
"""How weights begin. cut: those of the units that matter most. merge: means of key/value heads side by side. copy:
those of the run that there are, others drawn."""


@dataclass(frozen=True)
class PartChoice:
    """A replacement that may be at one place.

    Args:
        name: unique at its place; equal names of two places are equal shapes where the run's are.
        shape: of a layer that has this part alone; None: nothing.
        how: weights begin.
        units: that stay of a cut; key/value heads (of latent attention heads), or FFN channels.
    """

    name: str
    shape: LayerShape | None
    how: How
    units: int = 0

    @property
    def trained(self) -> bool:
        """True if a choice of replacement has weights other than the run's."""
        return self.how in ("cut", "merge", "copy")


def choices_at(config: DecoderConfig, place: PartPlace, kinds: Sequence[Kind], seq_len: int = 512) -> list[PartChoice]:
    """All choices of replacement for a part, the run's own first.

    Args:
        config: of the run.
        place: of the part.
        kinds: of replacement.
        seq_len: of the run's rows, for windows.

    Example:
        >>> config = DecoderConfig.of(vocab_size=100, dim=64, num_heads=4, num_kv_heads=2, ffn_dim=128, num_layers=2)
        >>> [choice.name for choice in choices_at(config, PartPlace(0, "attention"), ("heads", "groups", "none"))]
        ['own', 'heads-2', 'groups-1', 'none']
        >>> [choice.name for choice in choices_at(config, PartPlace(0, "ffn"), ("ffn",))]
        ['own', 'ffn-96', 'ffn-64', 'ffn-32']
    """
    own = alone(config.shapes[place.layer], place.part)
    found = [PartChoice(OWN, own, "own")]
    if place.part == "ffn":
        found += _widths(own) if "ffn" in kinds and not config.is_moe(place.layer) else ()
    else:
        found += _heads(own) if "heads" in kinds else ()
        found += _groups(own) if "groups" in kinds and own.attention == "gqa" else ()
        found += _windows(own, seq_len) if "window" in kinds and own.attention != "linear" else ()
        found += _linear(own) if "linear" in kinds and own.attention == "gqa" else ()
    return [*found, PartChoice(NONE, None, "none")] if "none" in kinds else found


def why_whole(
    config: DecoderConfig, place: PartPlace, kinds: Sequence[Kind], found: Sequence[PartChoice]
) -> str | None:
    """Why among the choices a part has no replacement with weights, in words; None where it has one, or none was asked
    for.

    Args:
        config: of the run.
        place: of the part.
        kinds: of replacement.
        found: its choices.

    Example:
        >>> config = DecoderConfig.of(vocab_size=100, dim=64, num_heads=4, ffn_dim=32, num_layers=2)
        >>> place = PartPlace(0, "ffn")
        >>> why_whole(config, place, ("ffn", "heads"), choices_at(config, place, ("ffn", "heads")))
        'its width is not above 32'
    """
    asked = [kind for kind in kinds if kind != NONE and (kind == "ffn") == (place.part == "ffn")]
    if not asked or any(choice.trained for choice in found):
        return None
    if place.part == "ffn":
        return "experts keep their shape" if config.is_moe(place.layer) else f"its width is not above {MULTIPLE}"
    own = config.shapes[place.layer]
    return f"{', '.join(asked)} make nothing smaller of {own.attention} attention with {own.num_heads} query heads"


def _widths(own: LayerShape) -> Iterator[PartChoice]:
    for width in _numbers(own.ffn_dim, MULTIPLE):
        yield PartChoice(f"ffn-{width}", replace(own, ffn_dim=width), "cut", width)


def _heads(own: LayerShape) -> Iterator[PartChoice]:
    units = own.num_heads if own.attention == "mla" else own.num_kv_heads
    for number in _numbers(units, 1):
        heads = own.num_heads // units * number
        yield PartChoice(f"heads-{heads}", replace(own, num_heads=heads, num_kv_heads=number), "cut", number)


def _windows(own: LayerShape, seq_len: int) -> Iterator[PartChoice]:
    for window in dict.fromkeys(max(1, seq_len // part) for part in WINDOWS):
        if window < (own.sliding_window or seq_len):
            yield PartChoice(f"window-{window}", replace(own, sliding_window=window), "copy")


def _linear(own: LayerShape) -> Iterator[PartChoice]:
    yield PartChoice("linear", replace(own, attention="linear", num_kv_heads=own.num_heads, sliding_window=0), "copy")


def _groups(own: LayerShape) -> Iterator[PartChoice]:
    divisors = [number for number in range(1, own.num_kv_heads) if own.num_kv_heads % number == 0]
    most = [max((d for d in divisors if d <= own.num_kv_heads / parts), default=0) for parts in (2, 4)]
    for number in dict.fromkeys(filter(None, most)):
        yield PartChoice(f"groups-{number}", replace(own, num_kv_heads=number), "merge")


def _numbers(units: int, multiple: int) -> list[int]:
    """Numbers of units that stay among the choices of replacement, the most first: fewer than there are, at least one
    multiple.

    Example:
        >>> _numbers(5, 1), _numbers(96, 32), _numbers(32, 32)
        ([4, 2, 1], [64, 32], [])
    """
    rounded = (max(1, round(share * units / multiple)) * multiple for share in SHARES)
    return [number for number in dict.fromkeys(rounded) if number < units]
