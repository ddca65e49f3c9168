"""Distillation of hidden values: layers of a student learn what layers of its teacher give out, or their attention.

Each pair of layers adds weight / M * sum over targets of |P x - t|^2 / |t|^2 to the loss: x is the residual stream
behind the student's layer, t that behind the teacher's, P a matrix that is learned with the run (Romero et al.,
"FitNets: Hints for Thin Deep Nets", 2015, section 2.2), or none where both are equally wide. Or x and t are what the
attention of the two layers gives out, before it is added to the stream. t travels with the batch. Where t is zero, as
that of an attention that gives out nothing, no distance is relative to it: it adds nothing.

A pair's loss is computed where its layer has run, and its gradient joins that of the stream there, as losses of routers
do in Megatron-LM (`MoEAuxLossAutoScaler`). So a layer that runs alone, is recomputed or is compiled needs none of the
others. What all gradients of a step are multiplied by is known where backward begins, and is noted there.

Legend: B rows  S positions  M pairs, or those of one target  D student's width  E teacher's width.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from tilewright.core.config.sections.distill import DistillSection
from tilewright.core.errors import ConfigError
from tilewright.models.base.output_head import IGNORED_LABEL
from tilewright.models.base.protocols import ALL_WHOLE, InitialValues, LayerContext, LossOutput
from tilewright.ops.linear import machines_linear

VALUES = "teacher_values"
"""Of a batch: what the teacher's layers give out, in the order of the pairs, [B, S, M, E]."""
NAME = "hidden_loss"
"""Of the `HiddenLoss` in a model. Its parameters are in checkpoints, and in no exported folder."""
TARGETS, LOSSES, SCALE = "hidden_targets", "hidden_losses", "hidden_scale"
"""Of a context: bool [B, S]; what each pair's loss was, FP32 [M, B, S]; the factor of all gradients, a scalar."""
Target = Literal["hidden", "attention"]
"""The residual stream behind a layer, or what its attention gives out. Settings of `[distill]` have these names, and
metrics."""
TARGET_NAMES: tuple[Target, ...] = ("hidden", "attention")
K = TypeVar("K", bound=Hashable)


class Pair(NamedTuple):
    """A layer of the student, and the one of the teacher that it learns from, both counted from 0."""

    target: Target
    ours: int
    theirs: int


def pairs_of(section: DistillSection) -> tuple[Pair, ...]:
    """All pairs of hidden layers of a recipe, those of one target behind each other.

    Example:
        >>> pairs_of(DistillSection(hidden={"1": 3}, attention={"0": 2}))
        (Pair(target='hidden', ours=1, theirs=3), Pair(target='attention', ours=0, theirs=2))
    """
    maps = {"hidden": section.hidden, "attention": section.attention}
    return tuple(Pair(name, int(ours), theirs) for name in TARGET_NAMES for ours, theirs in maps[name].items())


class HiddenLoss(nn.Module):
    """Losses of pairs of layers, and their projections.

    Args:
        pairs: see `pairs_of`.
        widths: of the student's stream and of the teacher's.
        weights: of the mean of all pairs of a target.
        learned: whether projections are learned; without them both widths must be the same.
        device: of the projections, which have no values yet: `with_projections` makes them.

    Example:
        >>> found = HiddenLoss([Pair("hidden", 1, 3)], (8, 16), {"hidden": 0.5}, learned=True)
        >>> [tuple(matrix.shape) for matrix in found.parameters()]
        [(16, 8)]
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        widths: tuple[int, int],
        weights: Mapping[Target, float],
        *,
        learned: bool,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self._width, theirs = widths
        self.alike = self._width == theirs
        self._places = {(pair.target, pair.ours): place for place, pair in enumerate(pairs)}
        counts: dict[Target, int] = {name: sum(pair.target == name for pair in pairs) for name in TARGET_NAMES}
        self._shares: dict[Target, float] = {name: weights[name] / count for name, count in counts.items() if count}
        first = counts["hidden"]
        self._rows: dict[Target, slice] = {"hidden": slice(0, first), "attention": slice(first, len(pairs))}
        """Of a target, in the order of the pairs."""
        self.projections = nn.ParameterList(
            nn.Parameter(torch.empty(theirs, self._width, device=device)) for _ in (pairs if learned else ())
        )

    def reads_attention(self, layer: int) -> bool:
        """True if hidden values that attention of a layer gives out are learned."""
        return ("attention", layer) in self._places

    def forward(self, layer: int, x_BSD: Tensor, given_BSD: Tensor | None, context: LayerContext) -> Tensor:
        """Return the stream as it is; backward adds the gradient of the losses on a layer's hidden values to its
        gradient.

        Args:
            layer: of the student, just run.
            x_BSD: what it gave.
            given_BSD: what its attention gave out, where that is learned.
            context: with what `of_batch` made of a batch with a teacher; of another one nothing happens.

        Raises:
            ConfigError: one gave no stream of positions.
        """
        if VALUES not in context:
            return x_BSD
        for target, values in zip(TARGET_NAMES, (x_BSD, given_BSD), strict=True):
            place = self._places.get((target, layer))
            if place is None:
                continue
            check_stream(values, context[TARGETS], self._width, target, f"layer {layer} of the student")
            assert values is not None, "`check_stream` has looked"
            each_BS = self._each(place, values, context[VALUES][:, :, place], context[TARGETS])
            context[LOSSES][place].copy_(each_BS.detach())
            x_BSD = _Joined.apply(x_BSD, self._shares[target] * each_BS.sum(), context[SCALE])  # type: ignore[assignment]
        return x_BSD

    def _each(self, place: int, x_BSD: Tensor, theirs_BSE: Tensor, targets_BS: Tensor) -> Tensor:
        dtype = torch.promote_types(x_BSD.dtype, torch.float32)
        if len(self.projections):
            x_BSD = machines_linear(x_BSD, self.projections[place].to(x_BSD.dtype))
        theirs_BSE = theirs_BSE.to(dtype).masked_fill(~targets_BS[..., None], 0.0)
        size_BS, limits = theirs_BSE.square().sum(-1), torch.finfo(dtype)
        says_BS = ~(size_BS <= limits.tiny / limits.eps)  # NaN does: it is no zero
        apart_BSE = (x_BSD.to(dtype) - theirs_BSE).masked_fill(~(targets_BS & says_BS)[..., None], 0.0)
        return apart_BSE.square().sum(-1) / size_BS.masked_fill(~says_BS, 1.0)

    def added(self, out: LossOutput, context: LayerContext) -> LossOutput:
        """The loss of a batch with that of all pairs of hidden layers, after all layers have run.

        Args:
            out: loss of the student's head.
            context: as its layers took it.
        """
        if VALUES not in context:
            return out
        each, aux, loss_sum = out.each, out.aux, out.loss_sum
        for target, share in self._shares.items():
            losses_MBS = context[LOSSES][self._rows[target]]
            each_BS = share * losses_MBS.sum(0)
            loss_sum = loss_sum + each_BS.sum()
            aux = aux | {target: losses_MBS.mean(0).sum() / out.count.clamp_min(1)}
            each = None if each is None else each + each_BS
        return replace(out, loss_sum=_Noted.apply(loss_sum, context[SCALE]), aux=aux, each=each)


def of_batch(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The entries of a context for `HiddenLoss` from a batch; none if the batch has no hidden values of a teacher."""
    if VALUES not in batch:
        return {}
    values, labels = batch[VALUES], batch["labels"]
    dtype = torch.promote_types(values.dtype, torch.float32)
    losses = torch.zeros(values.shape[2], *labels.shape, dtype=dtype, device=values.device)
    scale = torch.ones((), dtype=dtype, device=values.device)
    return {VALUES: values, TARGETS: labels != IGNORED_LABEL, LOSSES: losses, SCALE: scale}


def check_stream(x: Any, like_BS: Tensor, width: int, target: Target, whose: str) -> None:
    """Check the stream whose hidden values are learned: raise where what a layer gives out has not one vector per
    position, as where a model has several streams.

    Args:
        x: what it gave.
        like_BS: of the positions.
        width: of the vectors.
        target: of the pair.
        whose: the layer, in words.

    Raises:
        ConfigError: no tensor, or other dimensions.
    """
    if isinstance(x, Tensor) and x.shape == (*like_BS.shape, width):
        return
    part = "Layer" if target == "hidden" else "Attention of a layer"
    raise ConfigError(
        f"{part} gives no stream of positions",
        got=f"{list(x.shape) if isinstance(x, Tensor) else 'nothing'} from {whose}",
        need=f"one vector per position: {[*like_BS.shape, width]}",
        try_=f"distill.{target} = {{}}, which leaves these values out",
        where=f"distill.{target}",
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
def captured(modules: Mapping[K, nn.Module]) -> Iterator[dict[K, Tensor]]:
    """Capture the outputs of some modules inside the context; of several results the first.

    Args:
        modules: by the names that they have in what is returned.

    Example:
        >>> first, second = nn.Linear(4, 4), nn.Linear(4, 2)
        >>> with captured({"second": second}) as found:
        ...     _ = second(first(torch.zeros(1, 4)))
        >>> {name: tuple(values.shape) for name, values in found.items()}
        {'second': (1, 2)}
    """
    found: dict[K, Tensor] = {}

    def keep(name: K, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        found[name] = out[0] if isinstance(out, tuple) else out

    handles = [module.register_forward_hook(partial(keep, name)) for name, module in modules.items()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def with_projections(values: InitialValues, seed: int, *, alike: bool) -> InitialValues:
    """Initial values of a model with the projections of its hidden values.

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
