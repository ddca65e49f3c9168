"""Rows of a Hugging Face model that were begun at different times and run one token together.

The model's own code runs once for all rows: its matmuls read the weights once. Each row keeps the cache that it has
alone. Where a layer hands its new keys and values to the cache, it gets those of each row, as a list, and the attention
that the layer then calls goes through that list. For that the model is told another name of its attention for the
length of a pass, by transformers' own `AttentionInterface`. Models that call no such interface, or that touch what
the cache returns, cannot run so: `cache.why_not_joined` tries.

Legend: B rows  H heads  S new positions (1)  T positions so far  D width of a head.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

if TYPE_CHECKING:  # it takes seconds to import
    from transformers.modeling_utils import PreTrainedModel

ROWS = "tilewright_rows"
"""The name of the attention that goes row by row, in transformers' table."""


class JoinedHFCache:
    """Caches of one row each, for passes of one token of each row. Implements `protocols.KeyValueCache`.

    Args:
        caches: `cache.HFCache` of the rows, in the order of the ids.
        width: see `protocols.KeyValueCache.joined`.
    """

    takes_pieces = False
    """See `protocols.KeyValueCache`."""

    def __init__(self, caches: Sequence[Any], width: int):
        self._caches, self._width = caches, max(width, len(caches))
        self.past = _Pasts([cache.past for cache in caches])

    @property
    def length(self) -> int:
        """Positions of the longest of the joined rows."""
        return max(cache.length for cache in self._caches)

    @property
    def num_bytes(self) -> int:
        """Bytes of the caches of all joined rows."""
        return sum(cache.num_bytes for cache in self._caches)

    def positions(self, device: torch.device) -> Tensor:
        """Positions [B, 1] int64 of the next token of each joined row."""
        lengths = [cache.length for cache in self._caches]
        lengths += lengths[:1] * (self._width - len(lengths))
        return torch.tensor(lengths, device=device)[:, None]

    def advance(self) -> None:
        """Count the token that all layers have written to joined rows."""
        for cache in self._caches:
            cache.length += 1


class _Pasts:
    """The cache of joined rows that a model's pass reads: that of the first row, except for what is written."""

    def __init__(self, pasts: Sequence[Any]):
        self._pasts = pasts

    def update(
        self, key_BHSD: Tensor, value_BHSD: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Write new keys and values of all joined rows, and return those of all positions, row by row."""
        pairs = [
            past.update(key_BHSD[i : i + 1], value_BHSD[i : i + 1], layer_idx, *args, **kwargs)
            for i, past in enumerate(self._pasts)
        ]
        return [key for key, _ in pairs], [value for _, value in pairs]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pasts[0], name)


def why_no_rows(net: "PreTrainedModel") -> str | None:
    """Explain why rows cannot be joined: the model's attention cannot be called row by row; None if it can."""
    name = type(net).__name__
    if "position_ids" not in inspect.signature(net.forward).parameters:
        return f"{name} takes no positions"
    if not getattr(net, "_supports_attention_backend", False):
        return f"{name} has an attention of its own"
    if "chunked_attention" in (getattr(net.config.get_text_config(), "layer_types", None) or ()):
        # Its cache returns more than a chunk: without a mask, beyond the probe's few tokens, a row would see it.
        return f"{name} attends within chunks of a row"
    return None


@contextmanager
def row_attention(net: "PreTrainedModel") -> Iterator[None]:
    """Inside, the layers of a model with joined rows call the attention that goes row by row."""
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(ROWS, _attention)
    configs = {
        id(config): config for module in net.modules() if (config := getattr(module, "config", None)) is not None
    }
    before = [(config, getattr(config, "_attn_implementation", None)) for config in configs.values()]
    changed = [(config, kind) for config, kind in before if isinstance(kind, str)]
    try:
        for config, kind in changed:
            config._tilewright_attention = kind
            config._attn_implementation = ROWS
        yield
    finally:
        for config, kind in changed:
            config._attn_implementation = kind
            del config._tilewright_attention


def _attention(
    module: nn.Module, query_BHSD: Tensor, key: list[Tensor], value: list[Tensor], attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """The layer's usual attention over joined rows, row by row; a row sees all that its cache returns (a window is cut
    there), so no mask is needed."""
    usual = _usual(module)
    rows = [usual(module, query_BHSD[i : i + 1], key[i], value[i], None, **kwargs)[0] for i in range(len(key))]
    return torch.cat([*rows, *rows[:1] * (len(query_BHSD) - len(rows))]), None


def _usual(module: nn.Module) -> Any:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    kind = cast(Any, module.config)._tilewright_attention
    if kind in ALL_ATTENTION_FUNCTIONS:
        return ALL_ATTENTION_FUNCTIONS[kind]
    own = getattr(inspect.getmodule(type(module)), "eager_attention_forward", None)
    if own is None:
        raise ValueError(f"attention {kind} is not known")
    return own
