"""Gradients of embeddings by the rows that were read: the numbers of autograd, bit for bit, without its whole copies.

Autograd makes the gradient of a table twice as large as the table needs: whole in the table's dtype, then whole in that
of `.grad`, beside what the head has left there where both are tied. A batch reads few rows of a table of 150,000.

Legend: V rows of the table  U different rows that are read  D width.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_OPTIONS = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
_PLAIN = {"padding_idx": (None,), "max_norm": (None,), "scale_grad_by_freq": (False,), "sparse": (False,)}


class RowGradients(TorchFunctionMode):
    """Inside, embeddings read from leaves give gradients by rows; those with other options are autograd's.

    Example:
        >>> table = torch.nn.Parameter(torch.zeros(5, 2))
        >>> with RowGradients():
        ...     out = F.embedding(torch.tensor([1, 3, 1]), table)
        >>> out.sum().backward()
        >>> table.grad[:, 0].tolist()
        [0.0, 2.0, 0.0, 1.0, 0.0]
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func is F.embedding:
            named = dict(zip(("input", "weight", *_OPTIONS), args, strict=False)) | given
            table = named["weight"]
            plain = all(named.get(name, values[0]) in values for name, values in _PLAIN.items())
            if plain and table.is_leaf and table.requires_grad and torch.is_grad_enabled():
                return _Read.apply(named["input"], table)
        return func(*args, **given)


class _Read(torch.autograd.Function):
    """Rows of a table."""

    @staticmethod
    def forward(ctx, ids, table_VD):
        ctx.save_for_backward(ids)
        ctx.table_VD = table_VD  # the leaf itself: what its `.grad` is when backward comes here decides the layout
        return F.embedding(ids, table_VD)

    @staticmethod
    def backward(ctx, dout):
        (ids,) = ctx.saved_tensors
        table_VD, ctx.table_VD = ctx.table_VD, None
        rows_U, places = ids.unique(return_inverse=True)
        # In the table's dtype first, as autograd does: each row's sum is rounded like it.
        sums_UD = torch.ops.aten.embedding_dense_backward(dout, places, len(rows_U), -1, False)
        sums_UD = sums_UD.to(table_VD.grad_dtype or table_VD.dtype)
        if table_VD.grad is not None:  # added to it in place
            return None, torch.sparse_coo_tensor(
                rows_U[None], sums_UD, table_VD.shape, is_coalesced=True, check_invariants=False
            )
        return None, sums_UD.new_zeros(table_VD.shape).index_copy_(0, rows_U, sums_UD)
