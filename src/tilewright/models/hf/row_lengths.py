"""The use that a Hugging Face language model makes of a row of a given length, found from its shapes alone.

The model is built without weights and called once on a short row. Weights stay on the meta device, where nothing is
computed; everything else (position ids, masks, small tables) is real, so it can be seen which table is read at which
index. A table that is read at consecutive places, one for each position, is a position table: its length limits the
rows. What models of any name do to their indices (RoBERTa's and OPT's offsets of 2) is then known without a list.

Legend: B rows  S positions.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from tilewright.models.base.eval_mode import evaluation
from tilewright.models.base.stacks import one_of_each_kind

_SHORT = 6
"""Positions of the short row: fewer than any row of data has."""
_REFUSALS = (ValueError, TypeError, RuntimeError, IndexError)
"""How models refuse, and how meta tensors refuse to give a number. What was seen until then counts."""


@dataclass
class RowUse:
    """The inputs of a row that one forward pass of a Hugging Face language model reads.

    Args:
        limits: for each position table the positions it has room for.
        unused: parameters of the model that no operation touched; None where the pass did not come to its end.
    """

    limits: list[int] = field(default_factory=list)
    unused: list[str] | None = None


@contextmanager
def real_integers() -> Iterator[None]:
    """Build a model inside this context whose floating-point tensors have no memory; integers (position ids) and
    booleans have."""
    with torch.device("meta"), _RealIntegers():
        yield


def position_limit(net: nn.Module, at_least: int) -> int | None:
    """The most positions of a row that a Hugging Face model takes, if they are fewer than `at_least`.

    Args:
        net: a transformers language model that was built under `real_integers`.
        at_least: positions of the rows that it is to learn from.

    Returns:
        The limit; None where rows of `at_least` positions fit, as with rotary and relative positions.
    """
    for limit in sorted(set(_limits(net))):
        if limit >= at_least:
            return None
        # A table that grows with the row, as sinusoidal ones may, is longer now.
        longer = _limits(net, limit + 1)
        if not longer or min(longer) <= limit:
            return limit
    return None


def _limits(net: nn.Module, length: int = _SHORT) -> list[int]:
    """Limits of row lengths as `RowUse.limits`. Layers of one kind read alike: one of each runs, where a model can do
    without the others."""
    with one_of_each_kind(net):
        use = row_use(net, length)
    return row_use(net, length).limits if use.unused is None else use.limits


@torch.no_grad()
def row_use(net: nn.Module, length: int = _SHORT) -> RowUse:
    """Run `net`, built under `real_integers`, on a row of `length` positions: limits of its length, and parameters that
    it left unused."""
    watch = _Watch(length)
    arguments: dict[str, Any] = {"input_ids": torch.full((1, length), _plain_id(net))}
    if "use_cache" in inspect.signature(net.forward).parameters:
        arguments["use_cache"] = False
    try:
        with evaluation(net), watch:
            net(**arguments)
    except _REFUSALS:
        return RowUse(watch.limits)
    return RowUse(watch.limits, [name for name, param in net.named_parameters() if id(param) not in watch.touched])


def _plain_id(net: nn.Module) -> int:
    """A token id for trial rows that is not padding, which some models give no position of its own."""
    config: Any = net.config
    special = getattr(config.get_text_config(), "pad_token_id", None)
    return 0 if special != 0 else 1


class _RealIntegers(TorchFunctionMode):
    """Whole numbers and booleans that are made on the meta device are made on the CPU instead."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        tensors = _tensors(args, given)
        if any(tensor.is_meta for tensor in tensors):
            # As in `_Watch`; not for `to` and `copy_`, which may name a device and write to a tensor that is kept.
            if any(not tensor.is_meta for tensor in tensors) and func not in (Tensor.copy_, Tensor.to):
                args, given = pytree.tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, given))
            return func(*args, **given)
        out = func(*args, **given)
        made = isinstance(out, Tensor) and out.is_meta and not out.is_floating_point()
        if made and not tensors:
            return func(*args, **(given | {"device": "cpu"}))
        return out


class _Watch(TorchFunctionMode):
    """Notes which parameters are touched and which tables are read at consecutive places.

    Operations on tensors with bytes run; where one tensor has none, the result has none.
    """

    def __init__(self, length: int):
        super().__init__()
        self.length = length
        self.limits: list[int] = []
        self.touched: set[int] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        tensors = _tensors(args, given)
        self.touched |= {id(tensor) for tensor in tensors if isinstance(tensor, nn.Parameter)}
        for rows, index in _reads(func, args, given):
            self._note(rows, index)
        if any(tensor.is_meta for tensor in tensors):
            args, given = pytree.tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, given))
            return func(*args, **given)
        out = func(*args, **given)
        if not isinstance(out, Tensor) or not out.is_meta:
            return out
        if not tensors:
            return func(*args, **(given | {"device": "cpu"}))
        return args[0].to(out.dtype) if func is Tensor.to else out

    def _note(self, rows: int, index: Tensor) -> None:
        """Note for row lengths the room of a table that is read at `start`, `start + 1`, ... along one dimension of
        `index`."""
        if index.is_meta or index.is_floating_point() or index.dtype == torch.bool:
            return
        counting_S = torch.arange(self.length)
        for dim, size in enumerate(index.shape):
            if size >= self.length:
                places = index.movedim(dim, -1).reshape(-1, size)[:, : self.length]
                if torch.equal(places - places[:1, :1], counting_S.expand_as(places)):
                    self.limits.append(rows - int(places[0, 0]))
                    return


def _reads(func: Callable[..., Any], args: Sequence[Any], given: Mapping[str, Any]) -> Iterator[tuple[int, Tensor]]:
    """Reads of tables that limit row lengths: (rows of the table, index) of each read by index that the call makes."""
    if func is F.embedding:
        named = {**dict(zip(("input", "weight"), args, strict=False)), **given}
        yield named["weight"].shape[0], named["input"]
    elif func in (torch.gather, Tensor.gather, torch.index_select, Tensor.index_select):
        named = {**dict(zip(("input", "dim", "index"), args, strict=False)), **given}
        yield named["input"].shape[named["dim"]], named["index"]
    elif func is Tensor.__getitem__:
        table, places = args
        for dim, index in enumerate(places if isinstance(places, tuple) else (places,)):
            if isinstance(index, Tensor) and dim < table.dim():
                yield table.shape[dim], index


def _tensors(args: Sequence[Any], given: Mapping[str, Any]) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves((args, given)) if isinstance(leaf, Tensor)]
