"""Embedding and head that are cut by vocabulary: each rank has some of the rows.

A token's row is on one rank, and the others add zeros. The loss takes this rank's logits tile by tile, and two small
reductions over the ranks join each row's log-sum-exp: of its maximum, then of the sums, beside which the label's logit
travels from the rank that has it. So no rank holds the logits of all classes. Where logits themselves are asked for
(samples), they are gathered; where a teacher's distributions are compared, the rows of the head are.

Legend: B rows  S positions  C tokens of a tile  N tokens  D width.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.memory.offload.lazy_params import is_placeholder
from tilewright.models.base.output_head import head_operands
from tilewright.ops.base.labels import ClassSlice, TokenLosses
from tilewright.ops.base.weight_gradient_queue import queue_now
from tilewright.ops.kernels import Kernels
from tilewright.parallel.inside.tensor.collectives import TensorRanks


def cut_embedding(table: nn.Embedding, ranks: TensorRanks) -> None:
    """Make an embedding whose rows are cut by vocabulary return the rows of all tokens. If its weight stands in for one
    that is elsewhere, nothing is exchanged: each rank reads the output at a time of its own."""
    rows = table.num_embeddings // ranks.size
    foreign: list[Tensor | None] = []
    """Where the tokens of the call that runs are other ranks'."""

    def before(_: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        if is_placeholder(table.weight):
            foreign.append(None)
            return args
        ids = args[0] - ranks.rank * rows
        others = (ids < 0) | (ids >= rows)
        foreign.append(others)
        return (ids.masked_fill(others, 0),)

    def after(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        others = foreign.pop()
        return out if others is None else ranks.joined(out.masked_fill(others.unsqueeze(-1), 0.0))

    table.register_forward_pre_hook(before)
    table.register_forward_hook(after)


@dataclass(frozen=True)
class HeadPart:
    """This rank's rows of a head cut by vocabulary; what `head_loss` calls in the place of its own."""

    head: nn.Linear
    ranks: TensorRanks
    on_part: Callable[[nn.Module], AbstractContextManager[None]]
    """Inside, the head's weight is the part that is here."""

    @staticmethod
    def of(head: nn.Linear, ranks: TensorRanks, on_part: Callable[[nn.Module], AbstractContextManager[None]]) -> None:
        """Make a head whose rows are cut by vocabulary return the logits and the loss of all classes."""
        head.__dict__["part"] = HeadPart(head, ranks, on_part)  # no child of the module
        head.register_forward_pre_hook(lambda _, args: (ranks.spread(args[0]), *args[1:]))

        def gathered(_: nn.Module, __: Any, out: Tensor) -> Tensor:
            return ranks.gathered(out)

        head.register_forward_hook(gathered)

    def loss(self, kernels: Kernels, x_ND: Tensor, labels_N: Tensor) -> TokenLosses:
        """The loss of a head that is cut by vocabulary, from this rank's rows: see `models.base.output_head.head_loss`.
        The same on all ranks."""
        with self.on_part(self.head):
            x_ND, weight_VD = head_operands(self.head, self.ranks.spread(x_ND))
            own = weight_VD.shape[0]
            join = functools.partial(_join, ranks=self.ranks)
            classes = ClassSlice(self.ranks.rank * own, own, own * self.ranks.size, join)
            return kernels.linear_cross_entropy(x_ND, weight_VD, labels_N, queue_now(self.head), classes=classes)

    def whole_operands(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Return the whole operands of a head that is cut by vocabulary: see `models.base.output_head.whole_operands`.
        All ranks compute with them, and have the same gradients."""
        with self.on_part(self.head):
            x_ND, weight_VD = head_operands(self.head, x_ND)
            return x_ND, self.ranks.all_rows(weight_VD, weight_VD.shape[0] * self.ranks.size)


def _join(lse_C: Tensor, logit_C: Tensor, ranks: TensorRanks) -> tuple[Tensor, Tensor]:
    """Join the ranks' parts of a vocabulary: log-sum-exp [C] over all classes, and the label's logit [C], which is zero
    where another rank has it."""
    most_C = ranks.most(lse_C)
    finite_C = torch.where(most_C.isfinite(), most_C, 0.0)  # infinities and NaN come through as they would alone
    both_2C = ranks.total(torch.stack([(lse_C - finite_C).exp(), logit_C]))
    return both_2C[0].log() + finite_C, both_2C[1]
