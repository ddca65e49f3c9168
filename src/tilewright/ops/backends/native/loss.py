"""Head and cross-entropy in row chunks: the logits of one chunk are alive at a time.

The gradient is taken in the forward pass, while a chunk's logits are at hand (as Liger's fused linear
cross-entropy does), so the head's GEMM runs three times a step, not four. Its loops are
fused by torch.compile over rows that stay in the cache.

Legend: N tokens, C tokens of a chunk, D width, V vocabulary.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch._C._autograd import _get_current_graph_task_keep_graph as _keeps_graph

from tilewright.core.errors import ConfigError
from tilewright.ops.backends.compiled_rows import in_blocks
from tilewright.ops.backends.native import wide
from tilewright.ops.base.derivatives import without_second
from tilewright.ops.base.labels import IGNORED, ClassSlice, TokenLosses, check_labels, summed_and_each
from tilewright.ops.base.weight_gradient_queue import Waiting, WeightGradientQueue

LOSS_TILE = 64 * 2**20
"""Bytes of logits alive at once where the caller does not say."""
PIECE = 2**21
"""Elements of the weight's gradient that are widened or rounded at a time: their copy is small beside the gradient."""


def row_lse(logits_CV: Tensor) -> Tensor:
    """Log-sum-exp of each row of a loss in FP32: [C, 1]."""
    return torch.logsumexp(logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32)), dim=-1, keepdim=True)


def masked_softmax_(logits_CV: Tensor, lse_C1: Tensor, keep_C1: Tensor) -> None:
    """Masked softmax of a loss's rows from their log-sum-exp, written over the logits; zero where `keep` is False."""
    logits_CV.copy_(torch.where(keep_C1, (logits_CV.to(lse_C1.dtype) - lse_C1).exp(), 0.0))


@dataclass(frozen=True)
class ChunkStep:
    """Loss and gradient of one chunk's logits.

    The two loops are separate functions, because compiled as one they ran three times slower on CPU (inductor
    fuses the passes over a row badly); the targets' elements are patched in afterwards, not compared for in the loop.
    """

    row_lse: Callable[[Tensor], Tensor]
    masked_softmax_: Callable[[Tensor, Tensor, Tensor], None]
    classes: ClassSlice | None = None
    """Whose logits these are, where they are some of all."""

    def __call__(self, logits_CV: Tensor, labels_C: Tensor) -> Tensor:
        """Compute the loss of a chunk: log probability of each target [C] in FP32, 0 where there is none. The gradient
        of minus their sum is written over the logits.

        Args:
            logits_CV: [C, V] contiguous, any float dtype.
            labels_C: [C] int64, `IGNORED` where there is no target.
        """
        keep_C, classes = labels_C != IGNORED, self.classes
        own_C = keep_C if classes is None else classes.owns(labels_C)
        local_C = labels_C.clamp(min=0) if classes is None else (labels_C - classes.first).masked_fill(~own_C, 0)
        flat = torch.arange(len(labels_C), device=labels_C.device) * logits_CV.shape[1] + local_C
        lse_C1 = self.row_lse(logits_CV)
        high = lse_C1.dtype
        target_logit_C = logits_CV.view(-1).index_select(0, flat).to(high)
        if classes is not None:
            lse_C, target_logit_C = classes.join(lse_C1.squeeze(-1), torch.where(own_C, target_logit_C, 0.0))
            lse_C1 = lse_C.unsqueeze(-1)
        log_prob_C = torch.where(keep_C, target_logit_C - lse_C1.squeeze(-1), 0.0)
        self.masked_softmax_(logits_CV, lse_C1, keep_C.unsqueeze(-1))
        at_target_C = (log_prob_C.exp() - 1).to(logits_CV.dtype)  # zero without a target
        if classes is not None:
            at_target_C = torch.where(own_C, at_target_C, logits_CV.view(-1).index_select(0, flat))
        logits_CV.view(-1).index_copy_(0, flat, at_target_C)
        return log_prob_C


class _ChunkedLoss(torch.autograd.Function):
    """Loss sum over chunks; gradients are ready when forward returns and only scaled in backward.

    But the weight's with a queue, which would keep one in FP32 for each micro-batch in flight: the input is kept, and
    the logits are computed again when it is due.
    """

    @staticmethod
    def forward(ctx, x_ND, weight_VD, labels_N, step, tile_bytes, queue):
        high = torch.promote_types(x_ND.dtype, torch.float32)
        dx_ND = torch.empty_like(x_ND)
        each_N = x_ND.new_empty(x_ND.shape[0], dtype=high)
        learns = ctx.needs_input_grad[1]  # not under adapters: then it were the largest tensor of a step, for nothing
        dweight_VD = torch.zeros_like(weight_VD, dtype=high) if learns and queue is None else None
        total = _run_chunks(x_ND, weight_VD, labels_N, step, tile_bytes, each_N, dx_ND, dweight_VD)
        ctx.save_for_backward(total, *[dx_ND] if dweight_VD is None else [dx_ND, dweight_VD])
        ctx.weight_dtype = weight_VD.dtype
        ctx.keeps_wide = weight_VD.is_leaf and weight_VD.grad_dtype == high
        ctx.late = (queue, x_ND.detach(), weight_VD, labels_N, step, tile_bytes) if learns and queue is not None else ()
        ctx.mark_non_differentiable(each_N)
        return total, each_N

    @staticmethod
    def backward(ctx, dloss, _):
        total, dx_ND, *learned = ctx.saved_tensors
        with torch.no_grad():
            # In the wide format: dloss holds the loss scale, and rounding it to 16 bits would bias every gradient.
            dx_ND = (dx_ND.to(dloss.dtype) * dloss).to(dx_ND.dtype)
            dweight_VD = _late_weight_gradient(ctx, dloss) if ctx.late else None
            if learned:
                # In its own memory where no other pass will ask for it.
                again = torch.compiler.is_compiling() or _keeps_graph()
                dweight_VD = learned[0] * dloss if again else learned[0].mul_(dloss)
                dweight_VD = _rounded(dweight_VD, ctx.weight_dtype, keeps_wide=ctx.keeps_wide)
        return *without_second(dx_ND, dweight_VD, of=(total, dloss), error=_no_second), *[None] * 4


def _run_chunks(
    x_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, step: ChunkStep, tile_bytes: int,
    each_N: Tensor | None, dx_ND: Tensor | None, dweight_VD: Tensor | None,
) -> Tensor:  # fmt: skip
    """Run a loss in chunks: the sum; that of each token, and the gradients, where there is room for them."""
    head = _head(weight_VD.to(x_ND.dtype))
    rows = chunk_rows(x_ND.shape[0], weight_VD.shape[0] * x_ND.element_size(), tile_bytes)
    total = torch.zeros((), dtype=torch.promote_types(x_ND.dtype, torch.float32), device=x_ND.device)
    logits_CV = x_ND.new_empty(rows, weight_VD.shape[0])
    for start in range(0, x_ND.shape[0], rows):
        x_CD, labels_C = x_ND[start : start + rows], labels_N[start : start + rows]
        part_CV = head.logits(x_CD, logits_CV[: len(labels_C)])
        log_prob_C = step(part_CV, labels_C)
        total -= log_prob_C.sum()
        if each_N is not None:
            torch.neg(log_prob_C, out=each_N[start : start + rows])
        if dx_ND is not None:
            head.input_gradient(part_CV, dx_ND[start : start + rows])
        if dweight_VD is not None:
            head.add_weight_gradient(dweight_VD, part_CV, x_CD)
    return total


def _late_weight_gradient(ctx, dloss: Tensor) -> Tensor | None:
    """The weight's gradient of a loss, late, from the kept input; None where the queue takes it."""
    queue, x_ND, weight_VD, labels_N, step, tile_bytes = ctx.late
    dtype, keeps_wide = ctx.weight_dtype, ctx.keeps_wide

    def compute() -> Tensor:
        if weight_VD.numel() and not weight_VD.untyped_storage().nbytes():
            raise AssertionError("the head's weight was freed before its gradient was computed")
        dweight_VD = torch.zeros_like(weight_VD, dtype=torch.promote_types(x_ND.dtype, torch.float32))
        _run_chunks(x_ND, weight_VD, labels_N, step, tile_bytes, None, None, dweight_VD)
        return _rounded(dweight_VD.mul_(dloss), dtype, keeps_wide=keeps_wide)

    if not queue.takes(weight_VD):
        return compute()
    queue.add(weight_VD, Waiting(compute, (x_ND, labels_N)))
    return None


def _rounded(dweight_VD: Tensor, dtype: torch.dtype, *, keeps_wide: bool) -> Tensor:
    """The gradient of a loss rounded to the weight's dtype; where the gradient is kept wide, what that dtype holds of
    it."""
    if not keeps_wide:
        return dweight_VD.to(dtype)
    # Autograd would widen the rounded gradient again: a second copy in FP32. The same numbers come in place.
    for part in _in_pieces(dweight_VD):
        part.copy_(part.to(dtype))
    return dweight_VD


def _no_second() -> ConfigError:
    return ConfigError(
        "Loss in chunks of logits has no second derivative",
        got="a gradient of a gradient (create_graph=True, a gradient penalty)",
        need="a loss whose backward is differentiable",
        try_='ops.cross_entropy = "ref", which holds all logits',
        where="ops.cross_entropy",
    )


@dataclass(frozen=True)
class _Head:
    """The three products of the head by torch's GEMM, the weight's gradient on AMX tiles where there are some."""

    weight_VD: Tensor

    def logits(self, x_CD: Tensor, out_CV: Tensor) -> Tensor:
        """Logits of a loss's head, x W^T, written to `out`."""
        return torch.mm(x_CD, self.weight_VD.T, out=out_CV)  # [C, D] @ [D, V]

    def input_gradient(self, dlogits_CV: Tensor, out_CD: Tensor) -> None:
        """Input's gradient of a loss's head, dlogits W, written to `out`."""
        torch.mm(dlogits_CV, self.weight_VD, out=out_CD)

    def add_weight_gradient(self, dweight_VD: Tensor, dlogits_CV: Tensor, x_CD: Tensor) -> None:
        """Weight's gradient of a loss's head, dlogits^T x, added in FP32."""
        _weight_gradient_adder(x_CD.device.type, x_CD.dtype)(dweight_VD, dlogits_CV, x_CD)


def _weight_gradient_adder(device_type: str, dtype: torch.dtype) -> Callable[[Tensor, Tensor, Tensor], object]:
    """A function that adds the weight gradient of a loss's chunk to the whole: (dweight [V, D] FP32, dlogits [C, V], x
    [C, D]).

    On a GPU the GEMM itself adds in FP32: no chunk is rounded to 16 bits, and no product is written beside the sum.
    """
    from tilewright.ops.backends.cpu import wgrad  # it registers a torch operator

    if wgrad.runs(device_type, dtype):
        return wgrad.add_weight_gradient_
    if device_type == "cuda":
        from tilewright.ops.backends import gemm_sums  # it registers a torch operator

        return gemm_sums.add_product_
    return lambda dweight_VD, part_CV, x_CD: _add_(dweight_VD, torch.mm(part_CV.T, x_CD))


def _head(low_weight_VD: Tensor) -> "_Head | wide.WideHead":
    """The matmuls of a loss's head, for a weight in the operands' dtype."""
    widens = wide.widens(low_weight_VD.device.type, low_weight_VD.dtype)
    return wide.WideHead(low_weight_VD) if widens else _Head(low_weight_VD)


def _add_(sum_VD: Tensor, part_VD: Tensor) -> None:
    """Add in place in a loss. On a CPU torch makes an FP32 copy of what is added, so that goes by pieces."""
    for some_sum, some_part in zip(_in_pieces(sum_VD), _in_pieces(part_VD), strict=True):
        some_sum.add_(some_part)


def _in_pieces(x_VD: Tensor) -> tuple[Tensor, ...]:
    """Views of some rows each on a CPU, for a loss; on other devices, whose operations make no such copies, all rows at
    once."""
    rows = max(PIECE // x_VD.shape[1], 1) if x_VD.device.type == "cpu" else x_VD.shape[0]
    return x_VD.split(rows)


def chunk_rows(num_rows: int, row_bytes: int, tile_bytes: int) -> int:
    """Rows of a loss's chunk whose logits fill `tile_bytes`, one at least, evened out over the chunks so that no small
    one is left over.

    Example:
        >>> chunk_rows(100, 10, 400), chunk_rows(100, 10, 5)
        (34, 1)
    """
    num_rows = max(num_rows, 1)
    most = max(tile_bytes // row_bytes, 1)
    chunks = -(-num_rows // most)
    return -(-num_rows // chunks)


@functools.cache
def _compiled_step() -> ChunkStep:
    return ChunkStep(in_blocks(row_lse), in_blocks(masked_softmax_))


def compiled(
    x_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    tile_bytes: int = LOSS_TILE,
    queue: WeightGradientQueue | None = None,
    classes: ClassSlice | None = None,
) -> TokenLosses:
    """The loss compiled; see `ops.loss`; the chunk's loops fused by torch.compile."""
    return _linear_cross_entropy(x_ND, weight_VD, labels_N, tile_bytes, _compiled_step, queue, classes)


def eager(
    x_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    tile_bytes: int = LOSS_TILE,
    queue: WeightGradientQueue | None = None,
    classes: ClassSlice | None = None,
) -> TokenLosses:
    """The loss eager; see `ops.loss`; the chunk's loops as eager torch operations."""
    step = functools.partial(ChunkStep, row_lse, masked_softmax_)
    return _linear_cross_entropy(x_ND, weight_VD, labels_N, tile_bytes, step, queue, classes)


def _linear_cross_entropy(
    x_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    tile_bytes: int,
    make_step: Callable[[], ChunkStep],
    queue: WeightGradientQueue | None,
    classes: ClassSlice | None,
) -> TokenLosses:
    check_labels(labels_N, x_ND.shape[0], weight_VD.shape[0] if classes is None else classes.total)
    count = (labels_N != IGNORED).sum()
    if torch.is_grad_enabled() and (x_ND.requires_grad or weight_VD.requires_grad):
        late = queue if queue is not None and queue.may_take(weight_VD) else None
        step = replace(make_step(), classes=classes)
        total, each_N = _ChunkedLoss.apply(x_ND, weight_VD, labels_N, step, tile_bytes, late)
        return total, count, each_N
    if classes is not None:
        each_N = x_ND.new_empty(x_ND.shape[0], dtype=torch.promote_types(x_ND.dtype, torch.float32))
        step = replace(make_step(), classes=classes)
        return _run_chunks(x_ND, weight_VD, labels_N, step, tile_bytes, each_N, None, None), count, each_N
    head = _head(weight_VD.to(x_ND.dtype))
    rows = chunk_rows(x_ND.shape[0], weight_VD.shape[0] * x_ND.element_size(), tile_bytes)
    pieces = zip(x_ND.split(rows), labels_N.split(rows), strict=True)
    totals, each = [], []
    for x_CD, labels_C in pieces:
        logits_CV = x_CD.new_empty(len(labels_C), weight_VD.shape[0])
        high_CV = head.logits(x_CD, logits_CV).to(torch.promote_types(logits_CV.dtype, torch.float32))
        total, each_C = summed_and_each(high_CV, labels_C)
        totals.append(total)
        each.append(each_C)
    return torch.stack(totals).sum(), count, torch.cat(each)
