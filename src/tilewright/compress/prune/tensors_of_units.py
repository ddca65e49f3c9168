"""Which tensors of a model follow a number of its shape, and how: found by making the shape with one unit less.

A tensor that is narrower there has its units along that dimension; one that is not there belonged to the last member
of a list of modules, which are the units then. So no architecture is described here: gates joined with their
projections, biases, tied weights, routers and any number of queries per key/value head come out by themselves. How a
dimension of several numbers per unit is laid out (one unit after another, or part by part) is a hypothesis, which
`cut_model.difference` tries with numbers.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tilewright.compress.prune.channels import find_channels
from tilewright.compress.prune.unit_kinds import Count, Kind, Whole, counts
from tilewright.compress.prune.unit_places import ROUTER_BIAS, Place, Share, UnitGroup, place_of, stored
from tilewright.models.build import spec_of


def find_units(model: Any) -> tuple[dict[Kind, tuple[UnitGroup, ...]], dict[Kind, str]]:
    """Find units that can be cut, each with the ways in which its tensors may be laid out, likeliest first; and what
    stays whole.

    Args:
        model: a `models.base.protocols.Model`.

    Returns:
        Units by kind; reasons by kind, in words.
    """
    found: dict[Kind, tuple[UnitGroup, ...]] = {}
    whole: dict[Kind, str] = {}
    for kind, count in counts(model.config).items():
        units = count.reason if isinstance(count, Whole) else _find(model, kind, count)
        if isinstance(units, str):
            whole[kind] = units
        else:
            found[kind] = units
    return found, whole


def parameters_left(model: Any, numbers: Mapping[Kind, int]) -> int:
    """Parameters of a model with fewer units, tied ones once, by the shapes of its tensors alone: no tensor is made.

    Args:
        model: a `models.base.protocols.Model`.
        numbers: of units that stay, by kind that can be cut. Of layers the first ones count: where not all are alike,
            others may have more or fewer.
    """
    shape = model.config
    for kind in sorted(numbers, key=lambda kind: kind == "layers"):
        count = counts(shape)[kind]
        assert isinstance(count, Count)
        shape = count.fewer(range(numbers[kind]))
    meta_model = spec_of(model.architecture).meta_model
    assert meta_model is not None
    return sum(param.numel() for param in meta_model(shape, model.kernels, model.task).parameters())


def _find(model: Any, kind: Kind, count: Count) -> tuple[UnitGroup, ...] | str:
    if count.units <= count.least:
        return f"there are {count.units}, and no model has fewer than {count.least}"
    # 1. The same model with one unit less: its shapes alone.
    smaller = _shapes(model, count)
    if isinstance(smaller, str):
        return smaller
    if kind == "channels":
        return find_channels(model, count, smaller)
    # 2. What it lacks is a list's last member; what is narrower has its units along that dimension.
    own = {name: tuple(tensor.shape) for name, tensor in stored(model).items()}
    missing = own.keys() - smaller.keys()
    if smaller.keys() - own.keys():
        return "a model with fewer of them has other tensors"
    listed = _lists(own, missing, count.units)
    if missing and not listed:
        return "a model with fewer of them lacks tensors that are no list of modules"
    narrower = {name: shape for name, shape in smaller.items() if own[name] != shape}
    if not narrower and not listed:
        return "no tensor follows their number in config.json"
    # 3. Two layouts of such a dimension, which shapes cannot tell apart; `cut_model.difference` decides.
    ways: list[dict[Place, list[Share]]] = [{}, {}]
    for name, shape in narrower.items():
        both = _laid_out(name, own[name], shape, count.units)
        if isinstance(both, str):
            return both
        for way, share in zip(ways, both, strict=True):
            way.setdefault(place_of(name), []).append(share)
    if kind == "experts" and not any(name.endswith(ROUTER_BIAS) for name in narrower):
        return "its router has no bias per expert that could keep tokens from one, so that a cut cannot be tried"
    frozen = [{place: tuple(shares) for place, shares in way.items()} for way in ways]
    if kind == "heads":
        frozen.reverse()
    unique = frozen[:1] if frozen[0] == frozen[1] else frozen
    return tuple(UnitGroup(kind, count, way, listed) for way in unique)


def _shapes(model: Any, count: Count) -> dict[str, tuple[int, ...]] | str:
    """Shapes of the tensors of the model with one unit less."""
    from huggingface_hub.errors import StrictDataclassError

    spec = spec_of(model.architecture)
    if spec.meta_model is None:
        return "its architecture makes no model from a shape alone"
    try:
        made = spec.meta_model(count.fewer(range(count.units - 1)), model.kernels, model.task)
    except (ValueError, RuntimeError, AttributeError, StrictDataclassError) as error:
        return f"a model with one less cannot be built: {' '.join(str(error).split()).rstrip('.')}"
    return {name: tuple(tensor.shape) for name, tensor in stored(made).items()}


def _laid_out(name: str, own: Sequence[int], smaller: Sequence[int], units: int) -> tuple[Share, Share] | str:
    """The dimension of a tensor that is narrower with fewer units: part by part, and one unit after another."""
    dims = [dim for dim, (a, b) in enumerate(zip(own, smaller, strict=True)) if a != b]
    if len(dims) != 1 or own[dims[0]] % units or own[dims[0]] // units * (units - 1) != smaller[dims[0]]:
        return f"{name} does not follow their number ({list(own)}, and {list(smaller)} with one less)"
    per_unit = own[dims[0]] // units
    return Share(name, dims[0], parts=per_unit), Share(name, dims[0], width=per_unit)


def _lists(own: Iterable[str], missing: set[str], units: int) -> dict[Place, str]:
    """Lists of modules whose last member is missing as a whole with one unit less, by the place of the list; the
    outermost ones."""
    partly = {prefix for name in set(own) - missing for prefix in _prefixes(name)}
    found: dict[Place, str] = {}
    for name in missing:
        last = [prefix for prefix in _prefixes(name) if prefix.rpartition(".")[2] == str(units - 1)]
        gone = next((prefix for prefix in last if prefix not in partly), None)
        if gone is None:
            return {}
        listed = gone.rpartition(".")[0]
        found[place_of(listed)] = listed
    return found


def _prefixes(name: str) -> list[str]:
    """Prefixes of names of the modules around a tensor of units, outermost first."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]
