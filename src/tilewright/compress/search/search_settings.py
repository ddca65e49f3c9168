"""The settings of `search`, checked before a model is loaded."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tilewright.compress.export.targets import chosen
from tilewright.core.errors import ConfigError

Measure = Literal["token", "prefill", "flops", "parameters", "cache"]
MEASURES: tuple[Measure, ...] = ("token", "prefill", "flops", "parameters", "cache")
"""token, prefill: seconds here of a cached token and of the tokens before it. flops: per token of a forward pass.
parameters. cache: bytes of keys and values of the context."""
IN_WORDS: Mapping[str, str] = {
    "token": "cached token",
    "prefill": "prefill",
    "flops": "FLOPs per token",
    "parameters": "parameters",
    "cache": "cache",
}
Kind = Literal["ffn", "heads", "groups", "window", "linear", "none"]
KINDS: tuple[Kind, ...] = ("ffn", "heads", "groups", "window", "linear", "none")
"""ffn: narrower FFNs. heads: fewer key/value heads, each with the query heads that read it. groups: fewer key/value
heads for the same query heads. window: attention to the last positions alone. linear: linear attention with as many
heads. none: no attention, or no FFN; a layer with neither is left out."""


@dataclass(frozen=True)
class LayerSearchSettings:
    """Settings of one `search` command.

    Args:
        limits: by measure the largest share of the run's own, above 0 and at most 1; at least one.
        kinds: of replacement.
        rows: of training text that replacements are trained on, at least.
        block_steps: of training for each replacement; None: a quarter of the run's own, at most 100.
        score_rows: held-out rows that a replacement is scored on, at most, but one of each domain.
        steps: that the best shapes are trained on for, each; 0: a quarter of the run's own.
        candidates: shapes that are trained on.
        context: tokens before the cached one, and of the prefill.
        uniform: train the best shape whose layers are alike on, too, to compare with.
    """

    limits: Mapping[str, float]
    kinds: tuple[Kind, ...] = KINDS
    rows: int = 64
    block_steps: int | None = None
    score_rows: int = 16
    steps: int = 0
    candidates: int = 3
    context: int = 512
    uniform: bool = True

    @classmethod
    def of(cls, limits: str, kinds: str, **others: Any) -> "LayerSearchSettings":
        """Settings of `search` from the words of a command line.

        Raises:
            ConfigError: a limit that is no share of a known measure, or an unknown kind.

        Example:
            >>> LayerSearchSettings.of("token=88%,cache=50%", "none,ffn").limits
            {'token': 0.88, 'cache': 0.5}
        """
        asked = chosen(kinds, KINDS, what="No such kind of replacement", try_="--kinds ffn,heads", where="--kinds")
        return cls(_limits(limits), tuple(kind for kind in KINDS if kind in asked), **others)

    def measured(self) -> dict[str, Any]:
        """The settings of `search` that library, scores and latency table were made with; the rest may change from
        command to command."""
        names = ("rows", "block_steps", "score_rows", "context")
        return {name: getattr(self, name) for name in names}

    def to_json(self) -> dict[str, Any]:
        """The settings of `search` for the record."""
        return asdict(self) | {"limits": dict(self.limits), "kinds": list(self.kinds)}


def _limits(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (piece.strip() for piece in part.partition("="))
        share = _share(value)
        if name not in MEASURES or name in found or not 0 < share <= 1:
            raise _bad_limit(part)
        found[name] = share
    if not found:
        raise _bad_limit(text)
    return found


def _share(text: str) -> float:
    try:
        return float(text.removesuffix("%")) / 100 if text.endswith("%") else math.nan
    except ValueError:
        return math.nan


def _bad_limit(text: str) -> ConfigError:
    return ConfigError(
        "Limit is not a share of one measure of the run",
        got=repr(text),
        need=f"MEASURE=N%, each measure once, N above 0 and at most 100; measures: {', '.join(MEASURES)}",
        try_='--limits "token=85%"',
        where="--limits",
    )
