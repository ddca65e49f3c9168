"""Which tensors of a folder that transformers writes are stored in FP8, decided from the model's modules.

transformers renames, splits and merges tensors while it saves a model. Each weight is followed through transformers'
own conversion, as a tensor without bytes that knows the parameters it was made from. A weight is stored in FP8 only if
transformers makes an FP8 module of its owner and finds codes and scales in the shapes that this module has.

Legend: E experts  N output features  K input features.
"""

import copy
import dis
import functools
import inspect
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tilewright.core.errors import CheckpointError
from tilewright.formats.scaling import BLOCK_TILE
from tilewright.models.base.routers import find_routers
from tilewright.models.folder.fp8_weights import has_even_blocks

_LAYER = re.compile(r"\.\d+\.")
_BLOCK = (BLOCK_TILE.rows, BLOCK_TILE.cols)


@dataclass(frozen=True)
class Fp8Plan:
    """The FP8 weights of a folder."""

    coded: frozenset[str]
    """Names of the matrices in the folder that are stored in FP8."""
    high: tuple[str, ...]
    """`modules_to_not_convert`: modules that transformers would otherwise make FP8, by full name."""


def plan_fp8(net: Any) -> Fp8Plan:
    """Choose the weights of a transformers model to store in FP8: the matrices of linear layers and of stacked experts.

    Left out are what has no layer number in its name (embeddings, heads), routers, layers with one output, weights that
    are read otherwise than by calling their layer, matrices whose 128x128 blocks are not all of one size (transformers
    without a GPU misreads them), and what transformers merges with other weights or keeps in three dimensions in the
    folder. Only names, shapes and classes are read.

    Args:
        net: a `PreTrainedModel`, converted by `tilewright.convert` or not.

    Raises:
        CheckpointError: nothing of the model would be stored in FP8, or transformers could not read it again.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.quantizers.quantizers_utils import should_convert_module

    skeleton = _skeleton(net)
    _check_readable(net, skeleton)
    convertible, scales, stored = _convertible(skeleton), _scale_counts(net, skeleton), _stored_pieces(net)
    coded = {module for module, params in scales.items() if all(_fits(stored[p], n) for p, n in params.items())}
    renamings = get_model_conversion_mapping(net)
    while True:
        left = convertible - coded
        high = sorted({name for module in left for name in _skip_names(module, stored[f"{module}.weight"], renamings)})
        loaded = [*(_as_loaded(name, renamings) for name in high), *(net._keep_in_fp32_modules or ())]
        # transformers also skips modules whose name ends like one of the list.
        shadowed = {module for module in coded if not should_convert_module(module, loaded)}
        if not shadowed:
            break
        coded -= shadowed
    if not coded:
        raise _nothing_error(net, skeleton)
    return Fp8Plan(frozenset(name for m in coded for param in scales[m] for name in stored[param]), tuple(high))


def _check_readable(net: Any, skeleton: nn.Module) -> None:
    """Check that an FP8 folder is readable: transformers (seen in 5.23) reads none of a model whose mapping splits a
    stored weight in several.

    Raises:
        CheckpointError: the model is such a one.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
    from transformers.utils.quantization_config import FineGrainedFP8Config

    quantizer = FineGrainedFP8HfQuantizer(FineGrainedFP8Config(dequantize=True), pre_quantized=True)
    try:
        quantizer.update_weight_conversions(get_model_conversion_mapping(net), skeleton)
    except ValueError as error:
        raise CheckpointError(
            "FP8 folder would be unreadable for transformers",
            got=f"{type(net).__name__}: {error}",
            need="a model whose weights transformers stores one by one",
            try_='checkpoint.export_format = "bf16"',
            where="checkpoint.export_format",
        ) from error


def _nothing_error(net: nn.Module, skeleton: nn.Module) -> CheckpointError:
    layers = (module for name, module in skeleton.named_modules() if _LAYER.search(name))
    matrices = [m for m in layers if any(param.ndim > 1 for param in m.parameters(recurse=False))]
    kinds = Counter(type(module).__name__ for module in matrices)
    found = ", ".join(f"{number} {kind}" for kind, number in kinds.items())
    return CheckpointError(
        "No weight of this model can be stored in FP8",
        got=f"{type(net).__name__}, in its layers: {found or 'nothing'}",
        need="Linear layers with at most 128 rows and columns or multiples of 128, or stacked experts of that kind",
        try_='checkpoint.export_format = "bf16"',
        where="checkpoint.export_format",
    )


def _skeleton(net: Any) -> nn.Module:
    """The skeleton of a model whose FP8 names are sought, as its config makes it, on the meta device: with the classes
    that transformers looks at."""
    with torch.device("meta"):
        return type(net)(copy.deepcopy(net.config))


def _convertible(skeleton: nn.Module) -> set[str]:
    """Modules that transformers turns into FP8 modules unless config.json names them."""
    modules = dict(skeleton.named_modules())
    experts = {name for name in modules if _is_experts(name)}
    linears = {name for name, module in modules.items() if type(module) is nn.Linear}
    return experts | {name for name in linears if not _within(name, experts)}


def _is_experts(name: str) -> bool:
    return name.endswith(".experts")


def _scale_counts(net: Any, skeleton: nn.Module) -> dict[str, dict[str, int]]:
    """The modules that may be FP8; for each of their weights, how many scales transformers' FP8 module has for it."""
    own, modules = dict(net.named_modules()), dict(skeleton.named_modules())
    high = {net.get_output_embeddings(), *find_routers(net), *_read_elsewhere(net)}
    counts: dict[str, dict[str, int]] = {}
    for name in _convertible(skeleton):
        module = modules[name]
        if not _LAYER.search(name) or name not in own or own[name] in high:
            continue
        if isinstance(module, nn.Linear):
            shape = (module.out_features, module.in_features)
            counts[name] = {f"{name}.weight": _num_scales(shape)} if module.out_features > 1 else {}
        else:
            counts[name] = _experts_scales(name, module, net.config)
    return {name: params for name, params in counts.items() if params}


def _within(name: str, modules: Iterable[str]) -> bool:
    return any(name.startswith(f"{outer}.") for outer in modules)


def _num_scales(shape: tuple[int, ...]) -> int:
    rows, cols = BLOCK_TILE.grid((shape[0], shape[1]))
    return rows * cols


def _read_elsewhere(net: nn.Module) -> Iterator[nn.Module]:
    """Modules whose weight the code of their parent reads, which FP8 must leave out: Mamba multiplies by
    `dt_proj.weight` itself.

    Nothing would decode such a weight where transformers keeps it in FP8.
    """
    names = functools.cache(_weights_read_by)
    for parent in net.modules():
        children = dict(parent.named_children())
        yield from (children[name] for name in names(type(parent)) & children.keys())


def _weights_read_by(kind: type[nn.Module]) -> frozenset[str]:
    """Weights read by code, whose FP8 names do not hold: each X of an expression self.X.weight in the methods of a
    class; self.X.weight.dtype and the like apart."""
    found = set()
    named = ((name, value) for owner in kind.__mro__ for name, value in vars(owner).items() if name != "__init__")
    for method in (inspect.unwrap(value) for _, value in named if callable(value)):
        if not inspect.isfunction(method):
            continue
        steps = [(step.opname, step.argval) for step in dis.get_instructions(method)]
        for (load, owner), (_, name), (get, weight), (_, after) in zip(
            steps, steps[1:], steps[2:], [*steps[3:], ("", None)], strict=False
        ):
            read = load.startswith("LOAD_FAST") and owner == "self" and get == "LOAD_ATTR" and weight == "weight"
            if read and after not in ("dtype", "device", "shape", "ndim", "size", "numel"):
                found.add(name)
    return frozenset(found)


def _experts_scales(name: str, experts: nn.Module, config: Any) -> dict[str, int]:
    """Names of stacked experts' weights in FP8, [E, N, K] each, and of their scales; empty if transformers has no such
    module."""
    from transformers.integrations.finegrained_fp8 import FP8Experts

    own = {key: tuple(param.shape) for key, param in experts.named_parameters()}
    if getattr(experts, "has_bias", False) or not all(len(shape) == 3 for shape in own.values()):
        return {}
    try:
        with torch.device("meta"):
            config = getattr(experts, "config", config.get_text_config())
            fp8 = FP8Experts(config, block_size=_BLOCK, has_gate=getattr(experts, "has_gate", True))
    except AttributeError:  # the config does not name the sizes as transformers' FP8 experts look for them
        return {}
    theirs = dict(fp8.named_parameters())
    if own != {key: tuple(param.shape) for key, param in theirs.items() if not key.endswith("_scale_inv")}:
        return {}
    return {f"{name}.{key}": theirs[f"{key}_scale_inv"].numel() for key in own}


class _Traced(Tensor):
    """A tensor that knows the parameters it was made from. On the meta device, so that no bytes are moved."""

    sources: frozenset[str] = frozenset()

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> "_Traced":
        """A traced parameter of this FP8 name, in the shape of `tensor`."""
        traced = cls(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
        traced.sources = frozenset((name,))
        return traced

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs or {})
        used = [leaf.sources for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _Traced)]
        for leaf in tree_leaves(out):
            if isinstance(leaf, _Traced):
                leaf.sources = frozenset().union(*used)
        return out


def _stored_pieces(net: Any) -> Mapping[str, dict[str, _Traced]]:
    """The parts of each parameter that an FP8 folder holds, as transformers names them."""
    from transformers.core_model_loading import revert_weight_conversion

    state = {}
    for name, tensor in net.state_dict().items():
        state[name] = _Traced.of(name, tensor)
    pieces: dict[str, dict[str, _Traced]] = defaultdict(dict)
    for name, tensor in revert_weight_conversion(net, state).items():
        piece = cast(_Traced, tensor)
        for source in piece.sources:
            pieces[source][name] = piece
    return pieces


def _fits(pieces: Mapping[str, _Traced], num_scales: int) -> bool:
    """True if a parameter fits FP8 names: it is in the folder in whole matrices of its own, with as many scales as it
    needs."""
    shapes = [tuple(piece.shape) for piece in pieces.values()]
    return (
        bool(pieces)
        and all(len(piece.sources) == 1 and name.endswith(".weight") for name, piece in pieces.items())
        and all(len(shape) == 2 and has_even_blocks((shape[0], shape[1])) for shape in shapes)
        and sum(map(_num_scales, shapes)) == num_scales
    )


def _skip_names(module: str, stored: Iterable[str], renamings: Iterable[Any]) -> set[str]:
    """Names of a module in `modules_to_not_convert`, which transformers converts like those of weights."""
    if _as_loaded(module, renamings) == module:
        return {module}
    owners = {name.rpartition(".")[0] for name in stored}
    return {name for name in owners if _as_loaded(name, renamings) == module} or {module}


def _as_loaded(name: str, renamings: Iterable[Any]) -> str:
    """A name of `modules_to_not_convert` (not FP8) as transformers reads it."""
    name += "."
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name.removesuffix(".")
