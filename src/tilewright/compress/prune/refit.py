"""The layers behind a cut fitted to what they gave out before: block by block, without training.

A layer that read all channels x of its input reads the kept ones x_S now. Of all weights W' the best on calibration
data are those of a linear regression, which need the sums of x x^T alone:

    W' = (W G[:, S] + c W_S) (G[S, S] + c)^-1        G = sum of x x^T

c keeps them near the old columns W_S where data say little, so that channels that give out nothing change no weight.
(Such fits after a cut: He et al., "Channel Pruning for Accelerating Very Deep Neural Networks", 2017, section 3.1.)

Legend: M tokens or pixels  K what one output reads  S kept of K  O outputs.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tilewright.compress.prune.cut_model import Kept
from tilewright.compress.prune.unit_places import Share, UnitGroup, stored
from tilewright.compress.prune.unit_readers import Batch, ChannelReader, find_readers, is_transposed, run_through
from tilewright.core.errors import NumericsError

_NEAR = 1e-3
"""Of the mean of G's diagonal: c."""
_AT_ONCE = 2**30
"""Bytes of sums that are collected in one run through the data."""


def can_fit(units: UnitGroup) -> bool:
    """True where layers that read these units can be refitted: as channels, not of lists of modules, nor of experts."""
    return not units.listed and units.kind != "experts"


@torch.no_grad()
def refit(model: Any, units: UnitGroup, kept: Kept, made: Any, batches: Sequence[Batch]) -> None:
    """Refit, in place, the linear layers and convolutions of a cut model that read what was cut.

    Args:
        model: before the cut, left as it was.
        units: that were cut; of lists of modules and of experts no layer is fitted.
        kept: which stay.
        made: of `cut`.
        batches: text or images, at least one.

    Raises:
        NumericsError: what a layer reads is not finite.
    """
    if not can_fit(units):
        return
    targets = stored(made)
    for readers in _runs(find_readers(model, units)):
        for reader, gram_KK in zip(readers, _grams(model, readers, batches), strict=True):
            weight, target = cast(Tensor, reader.module.weight), targets[reader.share.tensor]
            index_S = _inputs(reader).index(kept[reader.place], units.size(reader.place))
            rows = [
                (share.dim, share.index(kept[place], units.size(place)))
                for place, shares in units.shares.items()
                for share in shares
                if share.tensor == reader.share.tensor and share.dim != reader.share.dim
            ]
            for dim, index in rows:
                weight = weight.index_select(dim, index)
            found = _fitted(_flat(reader, weight).double(), gram_KK, index_S)
            shaped = found.T if is_transposed(reader.module) else found
            target.data.copy_(shaped.reshape(target.shape))


def _fitted(weight_OK: Tensor, gram_KK: Tensor, index_S: Tensor) -> Tensor:
    """Refitted weights [O, S], FP64. Without data those that are there."""
    old_OS = weight_OK[:, index_S]
    near = _NEAR * float(gram_KK.diagonal().mean())
    if near == 0:
        return old_OS
    if not torch.isfinite(gram_KK).all():
        raise NumericsError(
            "Sums of a layer's inputs are not finite",
            got="NaN or infinite values in front of a layer that is fitted",
            need="finite activations on training text",
            try_="--no-refit, or an earlier checkpoint of the run",
        )
    inner_SS = gram_KK[index_S][:, index_S]
    inner_SS.diagonal().add_(near)
    given_OS = weight_OK @ gram_KK[:, index_S] + near * old_OS
    return torch.cholesky_solve(given_OS.T, torch.linalg.cholesky(inner_SS)).T


def _grams(model: Any, readers: Sequence[ChannelReader], batches: Sequence[Batch]) -> list[Tensor]:
    """Sums of x x^T of each reader that is refitted, FP64 on the host; zeros where nothing came by."""
    sums = [torch.zeros(_inner(reader), _inner(reader), dtype=torch.float64) for reader in readers]

    def add(place: int, module: nn.Module, args: tuple[Any, ...]) -> None:
        x_MK = _rows(module, args[0].detach()).double().cpu()
        sums[place].addmm_(x_MK.T, x_MK)

    modules = [reader.module for reader in readers]
    hook = lambda: [m.register_forward_pre_hook(partial(add, place)) for place, m in enumerate(modules)]  # noqa: E731
    run_through(model, batches, hook)
    return sums


def _rows(module: nn.Module, x: Tensor) -> Tensor:
    """The inputs of each output of a refitted layer, [M, K]: of a convolution its window, channel by channel."""
    if not isinstance(module, nn.Conv2d):
        return x.reshape(-1, x.shape[-1])
    assert not isinstance(module.padding, str)
    windows = F.unfold(x, module.kernel_size, module.dilation, module.padding, module.stride)  # type: ignore[arg-type]
    return windows.movedim(1, -1).flatten(0, 1)


def _flat(reader: ChannelReader, weight: Tensor) -> Tensor:
    """A refitted layer's weight as [O, K]."""
    return weight.T if is_transposed(reader.module) else weight.flatten(1)


def _inputs(reader: ChannelReader) -> Share:
    """The share along K of a refitted layer's inputs."""
    if not isinstance(reader.module, nn.Conv2d):
        return reader.share
    window = reader.module.kernel_size[0] * reader.module.kernel_size[1]
    return Share(reader.share.tensor, 1, width=reader.share.width * window)


def _inner(reader: ChannelReader) -> int:
    """K, the number of a refitted layer's inputs."""
    return _flat(reader, reader.module.weight).shape[1]  # type: ignore[arg-type]


def _runs(readers: Sequence[ChannelReader]) -> Iterator[list[ChannelReader]]:
    """Divide the readers to refit into runs whose sums fit into memory together, at least one reader each."""
    found: list[ChannelReader] = []
    for reader in readers:
        if found and 8 * sum(_inner(one) ** 2 for one in (*found, reader)) > _AT_ONCE:
            yield found
            found = []
        found.append(reader)
    if found:
        yield found
