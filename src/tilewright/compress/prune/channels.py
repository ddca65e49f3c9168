"""Which tensors share the channels of a convolution: found by sending numbers of channels through the model.

Each convolution in turn gives out its channels' numbers, all others nothing, and batch norms what they are given. What
then arrives at a convolution, a batch norm or a linear layer says whether it reads these channels, and in which order.
Convolutions whose channels meet in one reader, as the branches of a residual sum do, are one group: the same channels
go in all of them. Only functions that keep positive numbers as they are may lie between, which ReLU and pooling do.

Legend: B rows  C channels  H W positions.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.compress.prune.unit_kinds import Count
from tilewright.compress.prune.unit_places import Place, Share, UnitGroup, stored
from tilewright.models.base.eval_mode import evaluation

_Reader = nn.Conv2d | nn.BatchNorm2d | nn.Linear
_OF_NORM = ("weight", "bias", "running_mean", "running_var")


def find_channels(model: Any, count: Count, smaller: Mapping[str, Sequence[int]]) -> tuple[UnitGroup, ...] | str:
    """Channels of convolutions, by the groups that are cut alike, or why they stay whole, in words.

    Args:
        model: that reads images, on the host.
        count: equal parts of all widths.
        smaller: shapes of all tensors with one part less, which each is to have where its groups are so much narrower.
    """
    found = _tensors_by_group(model, model.short_batch())
    if isinstance(found, str):
        return found
    own = {name: list(tensor.shape) for name, tensor in stored(model).items()}
    parts = {place: own[shares[0].tensor][0] // count.units for place, shares in found.items()}
    for place, shares in found.items():
        for share in shares:
            own[share.tensor][share.dim] -= parts[place] * share.width
    other = next((name for name, shape in own.items() if shape != list(smaller.get(name, ()))), None)
    if other is not None:
        return f"{other} does not follow their number"
    return (UnitGroup("channels", count, found, {}, parts),)


@torch.no_grad()
def _tensors_by_group(model: Any, batch: Mapping[str, Tensor]) -> dict[Place, tuple[Share, ...]] | str:
    modules = {name: module for name, module in model.named_modules() if isinstance(module, _Reader)}
    sources = {name: module for name, module in modules.items() if isinstance(module, nn.Conv2d)}
    grouped = next((name for name, module in sources.items() if module.groups > 1), None)
    if grouped is not None:
        return f"{grouped} is a convolution in groups"
    group_of: dict[str, int] = {name: group for group, name in enumerate(sources)}
    readers: dict[str, tuple[str, int]] = {}  # the first source of each, and numbers of one channel
    image = _seen(model, batch, modules, None)
    for source in sources:
        for name, seen in _seen(model, batch, modules, source).items():
            if torch.equal(seen, image[name]):
                continue
            width = _width(seen, sources[source].out_channels)
            if width is None:
                return f"{name} reads channels of {source} in an order of its own"
            first, _ = readers.setdefault(name, (source, width))
            _join(group_of, source, first)
    return _by_group(group_of, readers, modules)


def _join(group_of: dict[str, int], one: str, other: str) -> None:
    """Make the groups of two sources of channels one."""
    gone, stays = group_of[one], group_of[other]
    for name, group in group_of.items():
        group_of[name] = stays if group == gone else group


def _width(seen_C: Tensor, channels: int) -> int | None:
    """Count the consecutive numbers that belong to one channel; None if numbers are ordered otherwise."""
    width, rest = divmod(len(seen_C), channels)
    expected_C = torch.arange(1, channels + 1, dtype=torch.float64).repeat_interleave(width)
    return None if rest or not torch.allclose(seen_C, expected_C) else width


def _by_group(
    group_of: Mapping[str, int], readers: Mapping[str, tuple[str, int]], modules: Mapping[str, _Reader]
) -> dict[Place, tuple[Share, ...]] | str:
    read = {group_of[source] for source, _ in readers.values()}
    shares: dict[int, list[Share]] = {group: [] for group in dict.fromkeys(group_of.values()) if group in read}
    for source, group in group_of.items():
        if group in shares:
            shares[group] += (Share(name, 0) for name in _names(source, modules[source], ("weight", "bias")))
    for name, (source, width) in readers.items():
        if isinstance(modules[name], nn.BatchNorm2d):
            shares[group_of[source]] += (Share(one, 0) for one in _names(name, modules[name], _OF_NORM))
        else:
            shares[group_of[source]].append(Share(f"{name}.weight", 1, width=width))
    if not shares:
        return "no layer reads channels of a convolution as they are"
    return {(place,): tuple(found) for place, found in enumerate(shares.values())}


def _names(name: str, module: nn.Module, tensors: tuple[str, ...]) -> list[str]:
    return [f"{name}.{tensor}" for tensor in tensors if getattr(module, tensor, None) is not None]


def _seen(
    model: Any, batch: Mapping[str, Tensor], modules: Mapping[str, _Reader], source: str | None
) -> dict[str, Tensor]:
    """Numbers of channels that arrive at each module, of a source and of the images, FP64."""
    seen: dict[str, Tensor] = {}
    with evaluation(model), _numbered(modules, source, seen):
        model.loss(batch)
    return seen


@contextmanager
def _numbered(modules: Mapping[str, _Reader], source: str | None, seen: dict[str, Tensor]) -> Iterator[None]:
    def watch(name: str, module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        given = args[0]
        seen[name] = (given[0] if isinstance(module, nn.Linear) else given[0, :, 0, 0]).double().flatten()
        if isinstance(module, nn.BatchNorm2d):
            return given.clone()
        if name == source:
            numbers = torch.arange(1, out.shape[1] + 1, dtype=out.dtype, device=out.device)
            return numbers[:, None, None].expand(out.shape).clone()
        return torch.zeros_like(out)

    with ExitStack() as stack:
        for name, module in modules.items():
            hook = lambda module, args, out, name=name: watch(name, module, args, out)  # noqa: E731
            stack.callback(module.register_forward_hook(hook).remove)
        yield
