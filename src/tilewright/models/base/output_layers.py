"""Which linear layers make a model's output: its scores of words, classes or values. By structure, for any model.

Not to be confused with `output_head`, the arithmetic of our own heads with their losses.
"""

from collections.abc import Iterable, Iterator
from typing import Any, cast

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from tilewright.models.base.own_weights import held_weight


def find_heads(model: nn.Module) -> list[nn.Linear]:
    """Find the output layers (heads), in the model's order.

    A model that has `output_layers` says so itself, as one of which other ranks hold parts must: the structure of what
    is left would tell something else. In any other these are linear layers that share an embedding's weight. In a
    transformers model, those outside of its base model and its repeated layers that are as wide as its labels or words
    are many, or the last layer if it is so wide. In another one, the last linear layer if it is behind all repeated
    layers and changes the width. In any, the last one if it is as wide as an embedding is long.

    Example:
        >>> blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(10))
        >>> find_heads(nn.ModuleDict({"blocks": blocks, "classes": nn.Linear(8, 10)}))
        [Linear(in_features=8, out_features=10, bias=True)]
        >>> find_heads(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 10)))  # layers by themselves: no model's output
        []
    """
    asked = (getattr(part, "output_layers", None) for part in model.modules())
    if told := [heads for heads in asked if heads is not None]:
        return [head for heads in told for head in heads]
    modules = _layers(model)
    linears = [module for module in modules if isinstance(module, nn.Linear)]
    embeddings = [module for module in modules if isinstance(module, nn.Embedding)]
    tied = {held_weight(embedding) for embedding in embeddings} - {None}
    repeated = {inner for module in modules if _is_stack(module) for inner in module.modules()}
    with_base = [module for module in model.modules() if hasattr(module, "base_model_prefix")]
    found = {linear for linear in linears if held_weight(linear) in tied}
    found |= {head for part in with_base for head in _outside_of_base(part)} - repeated
    if not found and linears:
        last = linears[-1]
        widths = {embedding.num_embeddings for embedding in embeddings}
        if with_base:
            ends = last not in repeated and last.out_features in _output_widths(with_base[0])
        else:
            ends = last.out_features != last.in_features and _is_behind(modules, last, repeated)
        if ends or last.out_features in widths:
            found.add(last)
    return [linear for linear in linears if linear in found]


def _outside_of_base(part: Any) -> Iterator[nn.Linear]:
    """Output layers outside of the base model of a transformers model: linear ones as wide as its labels or words are
    many."""
    base = getattr(part, part.base_model_prefix or "-", None)
    if not isinstance(base, nn.Module) or base is part:
        return
    inside = set(base.modules())
    for module in part.modules():
        if isinstance(module, nn.Linear) and module not in inside and module.out_features in _output_widths(part):
            yield module


def _output_widths(part: Any) -> set[int | None]:
    """The output widths that a transformers model may have: its numbers of labels and words."""
    return {getattr(part.config, "num_labels", None), getattr(part.config, "vocab_size", None)}


def _layers(model: nn.Module) -> list[nn.Module]:
    """The modules of a model among which output layers are sought; those that parametrizations of a weight are made of
    are left out."""
    lists = (module for module in model.modules() if isinstance(module, ParametrizationList))
    parts = {inner for found in lists for inner in found.modules()}
    return [module for module in model.modules() if module not in parts]


def _has_matrix(module: nn.Module) -> bool:
    """True if a layer, perhaps an output one, has a matrix of its own, or computed from others."""
    own = list(module.parameters(recurse=False))
    computed = cast(nn.Module, module.parametrizations).parameters() if is_parametrized(module) else ()
    return any(param.ndim >= 2 for param in (*own, *computed))


def _is_behind(modules: Iterable[nn.Module], last: nn.Linear, repeated: set[nn.Module]) -> bool:
    """True if `last` is an output layer: it comes behind repeated layers, is in none of them, and nothing multiplies
    after it."""
    order = [module for module in modules if _has_matrix(module)]
    return order[-1] is last and last not in repeated and any(module in repeated for module in order)


def _is_stack(module: nn.Module) -> bool:
    """True for a stack of layers, which no output is in: two or more children with like weights, matrices among
    them."""
    if not isinstance(module, nn.ModuleList | nn.Sequential) or len(module) < 2:
        return False
    shapes = {tuple(parameter.shape for parameter in child.parameters()) for child in module}
    return len(shapes) == 1 and any(len(shape) >= 2 for shape in shapes.pop())
