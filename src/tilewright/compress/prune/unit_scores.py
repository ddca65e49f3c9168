"""How much each unit of a model matters, before anything is trained again.

    l1          sum of the magnitudes of its weights (Li et al., "Pruning Filters for Efficient ConvNets", 2017)
    activation  mean magnitude of what it gives out, times the weights that read it (Sun et al., "Wanda", 2023, for
                units); of a layer 1 - cosine of the stream before and behind it (Men et al., "ShortGPT", 2024)
    taylor      |sum of weight x gradient|, the change of the loss to first order (Molchanov et al., 2019)
    random      a control: what says no more than this says nothing

Ranks hold before recovery; after it they may not.

Legend: U units  M tokens  K in features.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tilewright.compress.prune.cut_model import LayoutError
from tilewright.compress.prune.unit_places import Place, Share, UnitGroup, stored
from tilewright.compress.prune.unit_readers import Batch, find_readers, run_through
from tilewright.core.errors import NumericsError
from tilewright.models.base.eval_mode import evaluation
from tilewright.models.decoder.init import name_seed

Method = Literal["l1", "activation", "taylor", "random"]
METHODS: tuple[Method, ...] = ("l1", "activation", "taylor", "random")
Scores = dict[Place, Tensor]
"""FP64 [U] of each place."""


def score(model: Any, units: UnitGroup, method: Method, batches: Sequence[Batch] = (), seed: int = 0) -> Scores:
    """Scores of all units of a kind; the model is left as it was, its gradients too.

    Args:
        model: a `models.base.protocols.Model`.
        units: of `find_units`.
        method: see above.
        batches: text (or images), for activation and taylor.
        seed: for random.

    Raises:
        LayoutError: nothing reads these units through a linear layer, so that activation says nothing of them.
        NumericsError: a score is not finite.
    """
    if method in ("activation", "taylor") and not batches:
        raise AssertionError(f"{method} needs batches")
    if method == "random":
        found = {place: _drawn(units, place, seed) for place in units.places}
    elif method == "l1":
        found = _reduced(model, units, lambda tensor: tensor.detach().double().abs())
    elif method == "taylor":
        found = _taylor(model, units, batches)
    else:
        found = _changes(model, units, batches) if units.kind == "layers" else _read(model, units, batches)
    bad = [place for place, score_U in found.items() if not torch.isfinite(score_U).all()]
    if bad:
        raise NumericsError(
            f"Scores of {units.kind} are not finite",
            got=f"NaN or infinite values by {method} in {len(bad)} of {len(found)} places, first {list(bad[0])}",
            need="finite weights and losses",
            try_="an earlier checkpoint of the run",
        )
    return found


def _drawn(units: UnitGroup, place: Place, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(name_seed(seed, f"{units.kind} {place}"))
    return torch.rand(units.size(place), generator=generator, dtype=torch.float64)


def _reduced(model: Any, units: UnitGroup, of: Callable[[Tensor], Tensor]) -> Scores:
    """Reduce scores of weights to scores of units: sums over all weights of a unit."""
    own = stored(model)
    found = _zeros(units)
    for place, shares in units.shares.items():
        for share in shares:
            found[place] += per_unit(of(own[share.tensor]), share, units.size(place))
    for place, listed in units.listed.items():
        for unit in range(units.count.units):
            within = (tensor for name, tensor in own.items() if name.startswith(f"{listed}.{unit}."))
            found[place][unit] += sum(float(of(tensor).sum()) for tensor in within if tensor.is_floating_point())
    return found


def _zeros(units: UnitGroup) -> Scores:
    return {place: torch.zeros(units.size(place), dtype=torch.float64) for place in units.places}


def per_unit(values: Tensor, share: Share, count: int) -> Tensor:
    """Sum values in the shape of a share's tensor per unit: [U] FP64.

    Example:
        >>> per_unit(torch.tensor([1.0, 2.0, 10.0, 20.0]), Share("w", 0, parts=2), 2)
        tensor([11., 22.], dtype=torch.float64)
    """
    along = values.double().movedim(share.dim, 0).flatten(1) if values.dim() > 1 else values.double()[:, None]
    return along.sum(1).view(share.parts, count, share.width).sum((0, 2))


def _taylor(model: Any, units: UnitGroup, batches: Sequence[Batch]) -> Scores:
    found = _zeros(units)
    with evaluation(model), _own_gradients(model):
        for batch in batches:
            model.zero_grad(set_to_none=True)
            out = model.loss(batch)
            (out.loss_sum / out.count.clamp_min(1)).backward()
            once = _reduced(model, units, _times_gradient)
            for place, score_U in once.items():
                found[place] += score_U.abs() / len(batches)
    return found


def _times_gradient(tensor: Tensor) -> Tensor:
    if tensor.grad is None:  # a buffer, or an expert without tokens
        return torch.zeros_like(tensor, dtype=torch.float64)
    return tensor.detach().double() * tensor.grad.double()


@contextmanager
def _own_gradients(model: nn.Module) -> Iterator[None]:
    """Let all parameters require gradients while units are scored; their gradients and flags are restored
    afterwards."""
    before = [(param, param.grad, param.requires_grad) for param in model.parameters()]
    for param, _, _ in before:
        param.requires_grad_(True)
    try:
        yield
    finally:
        for param, grad, asks in before:
            param.requires_grad_(asks)
            param.grad = grad


def _read(model: Any, units: UnitGroup, batches: Sequence[Batch]) -> Scores:
    """Score units by what is read of them: mean magnitude of the inputs of linear layers times the magnitude of the
    weights that read them."""
    own = stored(model)
    readers = find_readers(model, units)
    if not readers or units.listed:
        raise LayoutError(
            f"Importance by activation is not known of {units.kind}",
            got="no linear layer reads one unit of them as a channel of its input; --importance l1 needs none",
            need="l1, taylor or random for this kind",
            try_="importance l1 (--importance l1)",
        )
    means = _input_means(model, [reader.module for reader in readers], batches)
    found = _zeros(units)
    for reader, mean_K in zip(readers, means, strict=True):
        share = reader.share
        weight = own[share.tensor].detach().double().abs()
        read_K = weight.movedim(share.dim, 0).flatten(1).sum(1)
        flat = Share(share.tensor, 0, share.parts, share.width)
        found[reader.place] += per_unit(mean_K * read_K, flat, units.size(reader.place))
    return found


def _input_means(model: Any, modules: Sequence[nn.Module], batches: Sequence[Batch]) -> list[Tensor]:
    """Mean magnitude of each input channel of some layers, FP64, for scores of units; over tokens or pixels; zeros
    where none came by."""
    sums: list[Any] = [0.0] * len(modules)
    tokens = [0] * len(modules)

    def add(place: int, module: nn.Module, args: tuple[Any, ...]) -> None:
        given = args[0].detach()
        given = given.movedim(1, -1) if isinstance(module, nn.Conv2d) else given
        x_MK = given.reshape(-1, given.shape[-1])
        sums[place] = sums[place] + x_MK.double().abs().sum(0)
        tokens[place] += x_MK.shape[0]

    hook = lambda: [m.register_forward_pre_hook(partial(add, place)) for place, m in enumerate(modules)]  # noqa: E731
    run_through(model, batches, hook)
    return [torch.as_tensor(total).cpu() / max(1, number) for total, number in zip(sums, tokens, strict=True)]


def _changes(model: Any, units: UnitGroup, batches: Sequence[Batch]) -> Scores:
    """Score layers as units: 1 - cosine of the stream before and after each layer, mean over tokens."""
    (listed,) = units.listed.values()
    layers = [model.get_submodule(f"{listed}.{unit}") for unit in range(units.count.units)]
    found = torch.zeros(len(layers), dtype=torch.float64)

    def see(place: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        before = args[0] if args else kwargs["hidden_states"]
        behind = out[0] if isinstance(out, tuple) else out
        cosine = torch.cosine_similarity(before.double(), behind.double(), dim=-1)
        found[place] += (1 - cosine).mean().cpu() / len(batches)

    hook = lambda: [  # noqa: E731
        layer.register_forward_hook(partial(see, place), with_kwargs=True) for place, layer in enumerate(layers)
    ]
    run_through(model, batches, hook)
    return {(): found}
