"""Distillation of hidden values: layers of a student learn what layers of its teacher give out.

Each pair of layers adds weight / M * sum over targets of |P x - t|^2 / |t|^2 to the loss: x is the residual stream
behind the student's layer, t that behind the teacher's, P a matrix that is learned with the run (Romero et al.,
"FitNets: Hints for Thin Deep Nets", 2015, section 2.2), or none where both are equally wide. t travels with the batch.

A pair's loss is computed where its layer has run, and its gradient joins that of the stream there, as losses of routers
do in Megatron-LM (`MoEAuxLossAutoScaler`). So a layer that runs alone, is recomputed or is compiled needs none of the
others. What all gradients of a step are multiplied by is known where backward begins, and is noted there.

Legend: B rows  S positions  M pairs  D student's width  E teacher's width.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.core.errors import ConfigError
from tilewright.models.base.head import IGNORED_LABEL
from tilewright.models.base.protocols import ALL_WHOLE, InitialValues, LayerContext, LossOutput
from tilewright.ops.linear import machines_linear

VALUES = "teacher_values"
"""Of a batch: what the teacher's layers give out, in the order of the pairs, [B, S, M, E]."""
NAME = "hidden_loss"
"""Of the `HiddenLoss` in a model. Its parameters are in checkpoints, and in no exported folder."""
TARGETS, LOSSES, SCALE = "hidden_targets", "hidden_losses", "hidden_scale"
"""Of a context: bool [B, S]; what each pair's loss was, FP32 [M, B, S]; the factor of all gradients, a scalar."""


class HiddenLoss(nn.Module):
    """Losses of pairs of layers, and their projections.

    Args:
        pairs: the teacher's layer by the student's, both counted from 0.
        widths: of the student's stream and of the teacher's.
        weight: of the mean of all pairs.
        learned: whether projections are learned; without them both widths must be the same.
        device: of the projections, which have no values yet: `with_projections` makes them.

    Example:
        >>> found = HiddenLoss({1: 3}, (8, 16), 0.5, learned=True)
        >>> [tuple(matrix.shape) for matrix in found.parameters()]
        [(16, 8)]
    """

    def __init__(
        self,
        pairs: Mapping[int, int],
        widths: tuple[int, int],
        weight: float,
        *,
        learned: bool,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        ours, theirs = widths
        self.alike = ours == theirs
        self._places = {layer: place for place, layer in enumerate(pairs)}
        self._share = weight / len(pairs)
        self.projections = nn.ParameterList(
            nn.Parameter(torch.empty(theirs, ours, device=device)) for _ in (pairs if learned else ())
        )

    def forward(self, layer: int, x_BSD: Tensor, context: LayerContext) -> Tensor:
        """The stream as it is; backward adds the gradient of the pair's loss to its gradient.

        Args:
            layer: of the student, just run.
            x_BSD: what it gave.
            context: with what `of_batch` made of a batch with a teacher; of another one nothing happens.

        Raises:
            ConfigError: it gave no stream of positions.
        """
        place = self._places.get(layer)
        if place is None or VALUES not in context:
            return x_BSD
        check_stream(x_BSD, context[TARGETS], f"layer {layer} of the student")
        each_BS = self._each(place, x_BSD, context[VALUES][:, :, place], context[TARGETS])
        context[LOSSES][place].copy_(each_BS.detach())
        return _Joined.apply(x_BSD, self._share * each_BS.sum(), context[SCALE])  # type: ignore[return-value]

    def _each(self, place: int, x_BSD: Tensor, theirs_BSE: Tensor, targets_BS: Tensor) -> Tensor:
        dtype = torch.promote_types(x_BSD.dtype, torch.float32)
        if len(self.projections):
            x_BSD = machines_linear(x_BSD, self.projections[place].to(x_BSD.dtype))
        theirs_BSE = theirs_BSE.to(dtype).masked_fill(~targets_BS[..., None], 0.0)
        size_BS = theirs_BSE.square().sum(-1).clamp_min(torch.finfo(dtype).tiny)
        apart_BSE = (x_BSD.to(dtype) - theirs_BSE).masked_fill(~targets_BS[..., None], 0.0)
        return apart_BSE.square().sum(-1) / size_BS

    def added(self, out: LossOutput, context: LayerContext) -> LossOutput:
        """The loss of a batch with that of all pairs, after all layers have run.

        Args:
            out: loss of the student's head.
            context: as its layers took it.
        """
        if VALUES not in context:
            return out
        losses_MBS = context[LOSSES]
        each_BS = self._share * losses_MBS.sum(0)
        loss_sum = _Noted.apply(out.loss_sum + each_BS.sum(), context[SCALE])
        told = losses_MBS.mean(0).sum() / out.count.clamp_min(1)
        each = None if out.each is None else out.each + each_BS
        return replace(out, loss_sum=loss_sum, aux=out.aux | {"hidden": told}, each=each)


def of_batch(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The entries of a context for `HiddenLoss`; none of a batch without a teacher's hidden values."""
    if VALUES not in batch:
        return {}
    values, labels = batch[VALUES], batch["labels"]
    dtype = torch.promote_types(values.dtype, torch.float32)
    losses = torch.zeros(values.shape[2], *labels.shape, dtype=dtype, device=values.device)
    scale = torch.ones((), dtype=dtype, device=values.device)
    return {VALUES: values, TARGETS: labels != IGNORED_LABEL, LOSSES: losses, SCALE: scale}


def check_stream(x: Tensor, like_BS: Tensor, whose: str) -> None:
    """Raise where what a layer gives out has not one vector per position, as where a model has several streams.

    Args:
        x: what it gave.
        like_BS: of the positions.
        whose: the layer, in words.

    Raises:
        ConfigError: other dimensions.
    """
    if x.ndim == 3 and x.shape[:2] == like_BS.shape:
        return
    raise ConfigError(
        "Layer gives no stream of positions",
        got=f"{list(x.shape)} from {whose}",
        need=f"one vector per position: {[*like_BS.shape, 'width']}",
        try_="distill.hidden = {}, which learns the teacher's distributions alone",
        where="distill.hidden",
    )


class _Joined(torch.autograd.Function):
    """Gives the first argument. Backward: its gradient as it is, and for the second, a loss, what the batch's own loss
    has as its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        ctx.scale, ctx.dtype = scale, loss.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], ctx.scale.to(ctx.dtype), None


class _Noted(torch.autograd.Function):
    """Gives the first argument. Backward writes its gradient into the second, before any layer's backward runs."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, scale: Tensor) -> Tensor:
        ctx.scale = scale
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.scale.copy_(grads[0])
        return grads[0], None


@contextmanager
def captured(layers: Sequence[nn.Module], numbers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Inside, what some layers give out when they run, by their numbers.

    Args:
        layers: of a model.
        numbers: of those that are wanted.

    Example:
        >>> layers = [nn.Linear(4, 4), nn.Linear(4, 2)]
        >>> with captured(layers, [1]) as found:
        ...     _ = layers[1](layers[0](torch.zeros(1, 4)))
        >>> {number: tuple(values.shape) for number, values in found.items()}
        {1: (1, 2)}
    """
    found: dict[int, Tensor] = {}

    def keep(number: int, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        found[number] = out[0] if isinstance(out, tuple) else out

    handles = [layers[number].register_forward_hook(partial(keep, number)) for number in dict.fromkeys(numbers)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def with_projections(values: InitialValues, seed: int, *, alike: bool) -> InitialValues:
    """Initial values of a model, and of its projections.

    Args:
        values: of everything else.
        seed: of the run.
        alike: both widths are one: projections begin as the identity; else with normal numbers.
    """
    return partial(_fill, values, seed, alike)


@torch.no_grad()
def _fill(
    values: InitialValues,
    seed: int,
    alike: bool,
    tensors: Mapping[str, Tensor],
    first_rows: Mapping[str, int] = ALL_WHOLE,
) -> None:
    own = {name: tensor for name, tensor in tensors.items() if name.startswith(f"{NAME}.")}
    rest = {name: tensor for name, tensor in tensors.items() if name not in own}
    if rest:
        values(rest, {name: row for name, row in first_rows.items() if name in rest})
    for name, tensor in own.items():
        first, width = first_rows.get(name, 0), tensor.shape[1]
        generator = torch.Generator().manual_seed(seed + int(name.rpartition(".")[2]))
        for row in range(first + len(tensor)):  # from the start: a row is the same on whichever rank it is
            drawn = (
                nn.functional.one_hot(torch.tensor(row), width)
                if alike
                else torch.randn(width, generator=generator) / width**0.5
            )
            if row >= first:
                tensor[row - first].copy_(drawn.flatten())
