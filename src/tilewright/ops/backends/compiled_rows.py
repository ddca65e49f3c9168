"""Loops over rows, compiled for blocks of few sizes, so that they take any number of rows.

Code for any number of rows cannot be used: what torch 2.13 makes of these loops for a CPU then writes outside of its
memory (docs/log.md, 2026-11-26). Code for each number cannot either: beyond eight, torch runs the function uncompiled.
A row's result does not depend on the rows beside it, so blocks give the same bits.

Legend: C rows  V values of a row.
"""

import functools
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.ops.base.compile import compile_options

BLOCKS = (512, 64, 8)
"""Rows that code is compiled for. The smallest one is filled up where fewer rows are left."""
KEPT = 96
"""Compiled loops that are kept, each for a loop, a block, a width and dtypes; the one not called for longest goes."""


def in_blocks(loop: Callable[..., Tensor | None]) -> Callable[..., Any]:
    """A loop over rows, compiled, in blocks.

    Args:
        loop: of tensors [C, ...], the first of which is [C, V]; each row for itself. It returns a tensor [C, ...], or
            writes over its first argument and returns None. It closes over nothing.

    Example:
        >>> list(blocks_of(1100))
        [(0, 512), (512, 1024), (1024, 1088), (1088, 1096), (1096, 1100)]
    """

    @functools.wraps(loop)
    def run(*tensors: Tensor) -> Tensor | None:
        if torch.compiler.is_compiling():  # fused with what is around it
            return loop(*tensors)
        made = [_of_block(loop, [x[start:end] for x in tensors]) for start, end in blocks_of(len(tensors[0]))]
        found = [one for one in made if one is not None]
        return torch.cat(found) if found else None

    return run


def blocks_of(num_rows: int) -> Iterator[tuple[int, int]]:
    """Yield blocks of rows for a compiled loop: first row and end of each. Only the last one may have a size outside of
    `BLOCKS`, and is smaller."""
    start = 0
    for size in BLOCKS:
        while num_rows - start >= size:
            yield start, start + size
            start += size
    if start < num_rows:
        yield start, num_rows


def _of_block(loop: Callable[..., Tensor | None], block: list[Tensor]) -> Tensor | None:
    rows = len(block[0])
    missing = max(0, BLOCKS[-1] - rows)
    full = [F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) for x in block] if missing else block
    made = _compiled(loop, tuple((x.shape, x.dtype, x.device) for x in full))(*full)
    if not missing:
        return made
    if made is None:
        block[0].copy_(full[0][:rows])
        return None
    return made[:rows]


@functools.lru_cache(maxsize=KEPT)
def _compiled(loop: FunctionType, tensors: tuple[Any, ...]) -> Callable[..., Tensor | None]:
    """The loop over rows compiled for tensors of these shapes, dtypes and devices.

    torch counts compilations by code object, for all that share one: so each has its own. `fullgraph` makes an error of
    what would run uncompiled.
    """
    own = FunctionType(loop.__code__.replace(), loop.__globals__, loop.__name__)
    return torch.compile(own, fullgraph=True, dynamic=False, options=compile_options())
