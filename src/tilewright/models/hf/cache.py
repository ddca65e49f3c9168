"""The key/value cache of a Hugging Face model: the one that the model itself makes (transformers' `DynamicCache`).

Whether a model's cache gives what whole rows give is tried, not looked up: on six tokens its logits must be those of
the whole row, measured against what leaving the earlier tokens out would change.

Legend: B rows  S positions  V vocabulary.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tilewright.models.base.eval_mode import evaluation
from tilewright.models.hf.joined_rows import JoinedHFCache, row_attention, why_no_rows

if TYPE_CHECKING:  # it takes seconds to import
    from transformers.modeling_utils import PreTrainedModel

_REFUSALS = (ValueError, TypeError, RuntimeError, IndexError, AttributeError, NotImplementedError)
"""How models of many authors say that they cannot."""
_TOLERANCE = 0.1
"""Of the change that forgetting makes. Rounding stays far below it, also in 8 bits; a cache that is ignored or a
position that is off by one is at about 1."""
_ROUNDINGS, _SMALL = 4, 1e-3
"""Of what tokens one by one are off, and of the change that forgetting makes: a state that is lost may show little in a
few tokens, and be all that is known of a long row."""


class HFCache:
    """The cache of a transformers model. Implements `protocols.KeyValueCache`.

    Args:
        joins: whether rows of the model can run together, asked when the first of them do.
        pieces: whether several tokens may follow in one pass, asked when they would.
    """

    def __init__(self, joins: Callable[[], bool] = lambda: False, pieces: Callable[[], bool] = lambda: True) -> None:
        self.length = 0
        self.past: Any = None
        self._joins, self._pieces = joins, pieces

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors of a Hugging Face key/value cache."""
        return sum(map(_held_bytes, self._layers))

    def growth(self, chunk: int) -> list[tuple[int, float]]:
        """The most bytes of each layer of a Hugging Face cache: see `protocols.KeyValueCache.growth`. A layer with a
        window keeps a view of a pass and of what was before; of a prompt that runs in one pass it keeps all."""
        return [(_held_bytes(layer), self._most(layer, chunk)) for layer in self._layers]

    def _most(self, layer: Any, chunk: int) -> float:
        has_end = getattr(layer, "is_sliding", False) and self.takes_pieces
        return layer.sliding_window - 1 + chunk if has_end else math.inf

    @property
    def _layers(self) -> Sequence[Any]:
        return getattr(self.past, "layers", ())

    @property
    def takes_pieces(self) -> bool:
        """True if several tokens may follow those in the Hugging Face cache in one pass: see
        `protocols.KeyValueCache`."""
        return self._pieces()

    def joined(self, rest: Sequence["HFCache"], width: int) -> JoinedHFCache | None:
        """One Hugging Face cache of several, each of one row; see `protocols.KeyValueCache`."""
        return JoinedHFCache((self, *rest), width) if self._joins() else None


def _held_bytes(layer: Any) -> int:
    """The bytes of memory behind the tensors of a Hugging Face cache's layer: some may be views of a part, and states
    are kept by number."""
    held = [*vars(layer).values()]
    held += [state for states in held if isinstance(states, dict) for state in states.values()]
    return sum(t.untyped_storage().nbytes() for t in held if isinstance(t, Tensor))


def cache_name(net: "PreTrainedModel") -> str | None:
    """The name of a Hugging Face model's cache, as an argument and in its output; None where it takes none.

    `cache` from transformers 5.24 on, `past_key_values` before.
    """
    takes = inspect.signature(net.forward).parameters
    return next((name for name in ("past_key_values", "cache") if name in takes and "use_cache" in takes), None)


def next_logits(net: "PreTrainedModel", input_ids_BS: Tensor, cache: HFCache | JoinedHFCache | None) -> Tensor:
    """Compute FP32 logits [B, V] of the token after each row with a Hugging Face cache; see
    `protocols.Model.next_token_logits`."""
    takes = inspect.signature(net.forward).parameters
    last = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}  # all logits of a prompt may be gigabytes
    if cache is None:
        return net(input_ids=input_ids_BS, use_cache=False, **last).logits[:, -1].float()
    name = cache_name(net)
    assert name is not None, "asked for by `why_no_cache`"
    if isinstance(cache, JoinedHFCache):
        positions = {"position_ids": cache.positions(input_ids_BS.device)}
        with torch.no_grad(), row_attention(net):
            out = net(input_ids=input_ids_BS, use_cache=True, **{name: cache.past}, **positions, **last)
        cache.advance()
        return out.logits[:, -1].float()
    with torch.no_grad():
        out = net(input_ids=input_ids_BS, use_cache=True, **{name: cache.past}, **last)
    cache.past = getattr(out, name)
    cache.length += input_ids_BS.shape[1]
    return out.logits[:, -1].float()


@torch.no_grad()
def why_no_cache(net: "PreTrainedModel", vocab_size: int) -> str | None:
    """Why a Hugging Face model's key/value cache cannot be used, or None where it gives what whole rows give."""
    name = type(net).__name__
    if cache_name(net) is None:
        return f"{name} takes none"
    ids_BS = torch.arange(2, 8, device=net.device)[None] * 7 % vocab_size
    with evaluation(net):
        try:
            whole_V, alone_V = (next_logits(net, ids, None)[0] for ids in (ids_BS, ids_BS[:, -1:]))
            cache = HFCache()
            next_logits(net, ids_BS[:, :4], cache)
            if cache.past is None:
                return f"{name} returns none"
            next_logits(net, ids_BS[:, 4:5], cache)
            cached_V = next_logits(net, ids_BS[:, 5:], cache)[0]
        except _REFUSALS as error:
            return (
                f"{name} refuses one ({type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''})"
            )
    error, effect = (cached_V - whole_V).norm(), (alone_V - whole_V).norm()
    if not bool(error <= _TOLERANCE * effect):
        return f"with that of {name} logits are {float(error):.3g} from those of the whole row"
    return None


@torch.no_grad()
def why_no_pieces(net: "PreTrainedModel", vocab_size: int) -> str | None:
    """Why with a Hugging Face cache a row cannot be run in pieces of several tokens, or None where these give what the
    whole row gives: many layers that keep a state begin with an empty one in each pass of more than one token."""
    name = type(net).__name__
    ids_BS = torch.arange(2, 18, device=net.device)[None] * 7 % vocab_size
    with evaluation(net):
        try:
            whole_V, alone_V = (next_logits(net, ids, None)[0] for ids in (ids_BS, ids_BS[:, -8:]))
            singly_V, pieces_V = (_continued(net, ids_BS, sizes) for sizes in ((14, 1, 1), (8, 8)))
        except _REFUSALS as error:
            said = str(error).splitlines()[0][:120] if str(error) else ""
            return f"{name} refuses pieces of them ({type(error).__name__}: {said})"
    rounding, error, effect = ((x - whole_V).norm() for x in (singly_V, pieces_V, alone_V))
    if not bool(error <= _ROUNDINGS * rounding + _SMALL * effect):
        return f"in pieces their logits are {float(error):.3g} from those of the whole row with {name}"
    return None


def _continued(net: "PreTrainedModel", ids_BS: Tensor, sizes: Sequence[int]) -> Tensor:
    """Logits [V] with a Hugging Face cache after a row that is handed over in pieces."""
    cache, end = HFCache(), 0
    for size in sizes:
        logits_BV = next_logits(net, ids_BS[:, end : end + size], cache)
        end += size
    return logits_BV[0]


@torch.no_grad()
def why_not_joined(net: "PreTrainedModel", vocab_size: int) -> str | None:
    """Why Hugging Face caches of rows of different lengths cannot run one token together, or None where each gives what
    it gives alone."""
    reason = why_no_rows(net)
    if reason is not None:
        return reason
    name = type(net).__name__
    ids_BS = torch.arange(2, 14, device=net.device).view(2, 6) * 7 % vocab_size
    rows = (ids_BS[0, :4], ids_BS[1, :2])
    with evaluation(net):
        try:
            alone, caches = [], []
            for row, ids_S in enumerate(rows):
                caches.append((HFCache(), HFCache()))
                for cache in caches[-1]:
                    next_logits(net, ids_S[None], cache)
                alone.append(next_logits(net, ids_BS[row : row + 1, 5:], caches[-1][0]))
            joined = JoinedHFCache([cache for _, cache in caches], width=3)
            found_BV = next_logits(net, ids_BS[[0, 1, 0], 5:], joined)
            forgotten_BV = next_logits(net, ids_BS[:, 5:], None)
        except _REFUSALS as error:
            said = str(error).splitlines()[0][:120] if str(error) else ""
            return f"{name} refuses it ({type(error).__name__}: {said})"
    alone_BV = torch.cat(alone)
    error, effect = (found_BV[:2] - alone_BV).norm(), (forgotten_BV - alone_BV).norm()
    if not bool(error <= _TOLERANCE * effect):
        return f"with {name} logits are then {float(error):.3g} from those of each row alone"
    return None
