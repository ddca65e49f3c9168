"""The weights that a smaller part begins with: the run's, and a fit of its last layer to what the run's part gives.

The fit is a regression on calibration text: of all weights W of the last layer, those whose output is nearest to the
run's part y on what it reads f, kept near the ones there are where the data say little:

    W = (Y^T F + c W0) (F^T F + c)^-1

Legend: B rows  S positions  D model width  M tokens  K what the last layer reads  U units.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tilewright.compress.prune.unit_places import Share
from tilewright.compress.search.library.layer_parts import run_part
from tilewright.compress.search.library.replacement_choices import PartChoice
from tilewright.models.decoder.block import Block
from tilewright.models.decoder.init import name_seed

_NEAR = 1e-3
"""Of the mean of the diagonal of F^T F: c."""
_DRAWN = 0.02
"""Deviation of weights that the run's part has none for."""


@dataclass(frozen=True)
class PartData:
    """Inputs and outputs of the run's part, by micro-batch.

    Args:
        inputs, outputs: streams [B, S, D] before and behind it.
        contexts: what layers read too.
    """

    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    contexts: Sequence[Mapping[str, Tensor]]

    def __len__(self) -> int:
        return len(self.inputs)

    def some(self, numbers: range) -> "PartData":
        """Some of the micro-batches that a part starts from."""
        inputs, outputs = [self.inputs[i] for i in numbers], [self.outputs[i] for i in numbers]
        return PartData(inputs, outputs, [self.contexts[i] for i in numbers])


@torch.no_grad()
def start(made: Block, choice: PartChoice, own: Block, importance: Callable[[], Tensor], seed: int) -> None:
    """Give a smaller part its weights to start with, in place.

    Args:
        made: of the choice's shape.
        choice: with weights of its own.
        own: the run's part.
        importance: of its channels, see `channel_importance`; called for cuts alone.
        seed: of weights that the run's part has none for.
    """
    if choice.how == "cut":
        _cut(made, choice.units, own, importance())
    else:
        _copy(made, own, seed)


def _copy(made: Block, own: Block, seed: int) -> None:
    """Copy start weights from the run's part, keys and values excepted: fewer heads are means of neighbours (Ainslie et
    al., "GQA", 2023, section 2.1), and more heads are copies."""
    before = own.state_dict()
    for name, target in made.state_dict().items():
        if name in before:
            target.copy_(_heads(before[name], len(target), made))
        elif target.dim() == 1:
            target.fill_(1.0)  # a norm
        else:
            generator = torch.Generator().manual_seed(name_seed(seed, name))
            target.normal_(0.0, _DRAWN, generator=generator)


def _heads(weight: Tensor, rows: int, made: Block) -> Tensor:
    if len(weight) == rows:
        return weight
    heads = weight.unflatten(0, (-1, made.self_attn.head_dim))
    number = rows // heads.shape[1]
    if number < len(heads):
        return heads.unflatten(0, (number, -1)).mean(1).flatten(0, 1)
    return heads.repeat_interleave(number // len(heads), 0).flatten(0, 1)


def _cut(made: Block, number: int, own: Block, importance_K: Tensor) -> None:
    """Make the start weights of a cut part: keep the units whose values, times the weights that read them, are
    largest."""
    units = _units(made, own, number)
    kept_U = importance_K.view(units, -1).sum(1).argsort(descending=True, stable=True)[:number].sort().values
    before = own.state_dict()
    for name, target in made.state_dict().items():
        source = before[name]
        for dim, (size, left) in enumerate(zip(source.shape, target.shape, strict=True)):
            if size != left:
                source = source.index_select(dim, Share(name, dim, width=size // units).index(kept_U, units))
        target.copy_(source)


def _units(made: Block, own: Block, number: int) -> int:
    """How many units are in the run's part, of which `number` stay at the start."""
    return number * last_layer(own).in_features // last_layer(made).in_features


@torch.no_grad()
def channel_importance(own: Block, data: PartData) -> Tensor:
    """Importance of the channels that the last layer of a run's part reads, FP64 [K]: cuts begin with what matters
    most."""
    last, means = last_layer(own), []
    for read_MK, _ in _seen(own, data):
        means.append(read_MK.double().abs().mean(0))
    return torch.stack(means).mean(0) * last.weight.double().abs().sum(0)


@torch.no_grad()
def fit_last(made: Block, data: PartData) -> None:
    """Fit the last layer of a part for its start weights, in place."""
    last = last_layer(made)
    gram_KK = torch.zeros(last.in_features, last.in_features, dtype=torch.float64)
    cross_KD = torch.zeros(last.in_features, last.out_features, dtype=torch.float64)
    for read_MK, wanted_MD in _seen(made, data):
        wide_MK = read_MK.double()
        gram_KK.addmm_(wide_MK.T, wide_MK)
        cross_KD.addmm_(wide_MK.T, wanted_MD.double())
    near = _NEAR * float(gram_KK.diagonal().mean())
    if near == 0:
        return
    gram_KK.diagonal().add_(near)
    cross_KD.add_(last.weight.double().T, alpha=near)
    last.weight.copy_(torch.cholesky_solve(cross_KD, torch.linalg.cholesky(gram_KK)).T)


def last_layer(part: Block) -> nn.Linear:
    """The last layer of a part, which adds to the stream."""
    return part.self_attn.o_proj if part.has_attention else part.mlp.down_proj  # type: ignore[return-value]


def _seen(part: Block, data: PartData) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield, for each micro-batch, the input [M, K] of a part's last layer, and what the run's part adds [M, D]."""
    with _reading(last_layer(part)) as read:
        for x_BSD, out_BSD, context in zip(data.inputs, data.outputs, data.contexts, strict=True):
            run_part(part, x_BSD, context)
            yield read.pop().flatten(0, 1), (out_BSD - x_BSD).flatten(0, 1)


@contextmanager
def _reading(layer: nn.Module) -> Iterator[list[Tensor]]:
    found: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda module, args: found.append(args[0]))
    try:
        yield found
    finally:
        handle.remove()
