"""Distillation: the loss of a student that also learns from the distributions of a teacher.

loss = (1 - weight) * cross-entropy + weight * T^2 * divergence(teacher, student), both at temperature T (Hinton et al.,
"Distilling the Knowledge in a Neural Network", 2015, section 2), summed over targets; see `divergences`. Logits are
made and freed by chunks of rows, forward and backward, for teacher and student alike. Where tokens of the
teacher were kept (`kept_tokens`), the batch has these, no logits of the teacher are made, and the student's once:
gradients are made with the loss (`chunked_loss`). Like pairs of preferences, what the loss needs travels with the
batch, so each executor computes it.

Legend: B rows  S positions  N tokens  C tokens of a chunk  D student's width  E teacher's width  V vocabulary
K tokens that are kept  G = K + 1 logarithms.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tilewright.models.base.output_head import IGNORED_LABEL, head_loss, whole_operands
from tilewright.models.base.protocols import LossOutput
from tilewright.models.distill.chunked_loss import rows_at_once, summed_in_chunks
from tilewright.models.distill.divergences import DIVERGENCES, Teaching, divergences
from tilewright.models.distill.kept_loss import kept_loss
from tilewright.ops.base.labels import check_labels, summed_and_each
from tilewright.ops.kernels import Kernels
from tilewright.ops.linear import machines_linear

HIDDEN, HEAD, HOW = "teacher_hidden", "teacher_head", "teacher_how"
"""Of a batch: the teacher's last hidden values [B, S, E], the weight of its head [V, E], and FP32 [temperature,
weight, place in `DIVERGENCES`]."""
TOKENS, LOGS = "teacher_tokens", "teacher_logs"
"""Instead of the first two: tokens of the teacher int64 [B, S, K], and what was kept of them at its temperature, FP32
[B, S, G]."""

MADE = frozenset((HIDDEN, HEAD, HOW, TOKENS, LOGS))
"""What a teacher adds to a batch: of ranks that hold stages of one model the one with the loss alone has it."""
TOLD = ("cross_entropy", "distillation")
"""What the loss tells beside itself."""


def how(temperature: float, weight: float, divergence: str) -> Tensor:
    """The settings of a batch's distillation loss as its entry `HOW`."""
    return torch.tensor([temperature, weight, DIVERGENCES.index(divergence)], dtype=torch.float32)


def is_taught(batch: Mapping[str, Tensor]) -> bool:
    """True if a batch carries a teacher's values for a distillation loss."""
    return HOW in batch


def batch_loss(kernels: Kernels, head: nn.Linear, x_ND: Tensor, batch: Mapping[str, Tensor]) -> LossOutput:
    """Loss of a batch, with distillation perhaps, by a head that is one matmul: cross-entropy, or the mixture where the
    batch carries a teacher.

    Args:
        kernels: of the model.
        head: of the student, without bias.
        x_ND: its input at all positions, N = B S.
        batch: labels [B, S], and of a teacher the three entries above.

    Returns:
        Sum over targets, their number, the loss of each, and with a teacher both parts as means.
    """
    labels_N = batch["labels"].flatten()
    if not is_taught(batch):
        loss_sum, count, each_N = head_loss(kernels, head, x_ND, labels_N)
        return LossOutput(loss_sum, count, each=each_N.view_as(batch["labels"]))
    x_ND, weight_VD = whole_operands(head, x_ND)
    check_labels(labels_N, x_ND.shape[0], weight_VD.shape[0])
    temperature, weight, place = batch[HOW].tolist()
    how = Teaching(temperature, weight, DIVERGENCES[int(place)])
    if TOKENS in batch:
        return _from_tokens(x_ND, weight_VD, labels_N, batch, how, kernels.loss_chunk_bytes)
    rows = max(1, kernels.loss_chunk_bytes // (4 * weight_VD.shape[0]))
    hidden_NE = batch[HIDDEN].flatten(0, 1)
    parts = [
        checkpoint(_chunk, x_CD, weight_VD, labels_C, hidden_CE, batch[HEAD], how, use_reentrant=False)
        for x_CD, labels_C, hidden_CE in zip(x_ND.split(rows), labels_N.split(rows), hidden_NE.split(rows), strict=True)
    ]
    entropy, divergence = sums_2 = torch.stack([sums for sums, _ in parts]).sum(0)
    loss_sum = (1 - weight) * entropy + weight * divergence
    return _output(loss_sum, sums_2.detach(), [each_C2 for _, each_C2 in parts], batch, weight)


def _output(
    loss_sum: Tensor, sums_2: Tensor, each: Sequence[Tensor], batch: Mapping[str, Tensor], weight: float
) -> LossOutput:
    """Output of a distillation loss with the sums of cross-entropy and divergence, and both of each row in chunks [C,
    2]."""
    count = (batch["labels"] != IGNORED_LABEL).sum()
    entropy, divergence = sums_2 / count.clamp_min(1)
    each_N2 = torch.cat(tuple(each))
    each_BS = (each_N2 @ each_N2.new_tensor([1 - weight, weight])).view_as(batch["labels"])
    return LossOutput(loss_sum, count, {"cross_entropy": entropy, "distillation": divergence}, each_BS)


def _from_tokens(
    x_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    batch: Mapping[str, Tensor],
    how: Teaching,
    chunk_bytes: int,
) -> LossOutput:
    """Distillation loss from tokens of the teacher that were kept."""
    of_rows = labels_N, batch[TOKENS].flatten(0, 1), batch[LOGS].flatten(0, 1)
    rows = rows_at_once(weight_VD.shape[0], weight_VD.shape[1], chunk_bytes, on_cpu=x_ND.is_cpu)
    loss_sum, each_N2 = summed_in_chunks(partial(_token_chunk, how=how), x_ND, weight_VD, of_rows, rows)
    return _output(loss_sum, each_N2.sum(0), [each_N2], batch, how.weight)


def _token_chunk(
    x_CD: Tensor, weight_VD: Tensor, labels_C: Tensor, ids_CK: Tensor, theirs_CG: Tensor, how: Teaching
) -> tuple[Tensor, Tensor]:
    ignored_C1 = (labels_C == IGNORED_LABEL)[:, None]  # whose logits may overflow
    logits_CV = machines_linear(x_CD, weight_VD).float().masked_fill_(ignored_C1, 0.0)
    return kept_loss(logits_CV, labels_C, ids_CK, theirs_CG, how)


def _chunk(
    x_CD: Tensor,
    weight_VD: Tensor,
    labels_C: Tensor,
    hidden_CE: Tensor,
    head_VE: Tensor,
    how: Teaching,
) -> tuple[Tensor, Tensor]:
    """Distillation loss of a chunk: [cross-entropy, T^2 divergence] of some rows, each summed over targets, FP32; and
    of each row [C, 2] without a gradient."""
    ignored_C1 = (labels_C == IGNORED_LABEL)[:, None]  # whose logits may overflow
    logits_CV = machines_linear(x_CD, weight_VD).float().masked_fill(ignored_C1, 0.0)
    entropy, entropy_C = summed_and_each(logits_CV, labels_C)
    with torch.no_grad():
        theirs_CV = machines_linear(hidden_CE, head_VE).float().masked_fill(ignored_C1, 0.0)
        theirs_CV = (theirs_CV / how.temperature).log_softmax(-1)
    ours_CV = (logits_CV / how.temperature).log_softmax(-1)
    each_C1 = divergences(theirs_CV, ours_CV, how.divergence).masked_fill(ignored_C1, 0.0)
    each_C2 = torch.stack((entropy_C, each_C1.detach().squeeze(-1) * how.temperature**2), -1)
    return torch.stack((entropy, each_C1.sum() * how.temperature**2)), each_C2
