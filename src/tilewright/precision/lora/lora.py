"""LoRA: fine-tuning by small adapters on frozen linear layers, whose weights stay in FP8 where that is asked for.

y = W x + s B (A x), with s = alpha / rank, or alpha / sqrt(rank) (rsLoRA). `add_lora` changes layers in place:
parameters `lora_A` [R, K] and `lora_B` [M, R] in FP32 beside a frozen weight, added by a forward hook, so a model may
be converted before or after. Layers are nn.Linear and Conv1D of GPT-2; other modules may train as a whole beside them.
Adapters are saved in the layout of the package peft. Read `add_lora` first.

See: Hu et al., "LoRA", 2021; Kalajdzievski, "A rank stabilization scaling factor for fine-tuning with LoRA", 2023.

Legend: K input features  M output features  R rank.
"""

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tilewright.core.errors import ConfigError
from tilewright.formats.fp8_layout import from_stored
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.models.decoder.hf_weights import load_weights, read_config
from tilewright.models.decoder.init import name_seed
from tilewright.models.decoder.moe import MoE
from tilewright.models.folder.fp8_weights import copy_weight, find_weights
from tilewright.models.folder.safetensors import scan_folder
from tilewright.ops.base.tensor_parts import cut_like, local, sharded_like
from tilewright.ops.kernels import Kernels
from tilewright.precision.assign.module_kinds import find_sites
from tilewright.precision.convert import set_mode
from tilewright.precision.float8.frozen_linear import FrozenFloat8Linear, freeze_in_fp8, thaw
from tilewright.precision.float8.share_inputs import share_inputs
from tilewright.precision.lora.adapter import Adapted, attach, is_transposed
from tilewright.precision.lora.match_targets import matching
from tilewright.precision.lora.modules_to_save import (
    find_saved,
    forget_saved,
    freeze,
    listed,
    owns_its_weight,
    shared_weights,
    train_saved,
    unfreeze,
)
from tilewright.precision.lora.uncalled_layers import never_called
from tilewright.precision.policy.precision_report import ConversionReport

_log = logging.getLogger(__name__)


def add_lora(
    model: nn.Module,
    rank: int = 16,
    alpha: float = 32.0,
    targets: Sequence[str] = ("*",),
    base: Literal["fp8", "keep"] = "fp8",
    *,
    dropout: float = 0.0,
    rslora: bool = False,
    modules_to_save: Sequence[str] = (),
    kernels: Kernels | None = None,
    seed: int = 0,
) -> list[str]:
    """Add LoRA: freeze a model and put adapters on its linear layers, in place. The first output is that of the base
    alone.

    A layer whose weight the module around it takes without calling it, as attention of WavLM does, gets none, and a
    warning names it: its adapter would never run.

    Args:
        model: any model; heads, routers and embeddings get no adapter, nor do layers whose weight is computed in each
            forward (weight norm, parametrizations).
        rank: width of the adapters.
        alpha: adapters count alpha / rank.
        targets: globs on the names of linear layers.
        base: "fp8" keeps the layers' weights as FP8 codes with a scale for each 128x128 block and multiplies in FP8,
            forward and backward; "keep" leaves weights and formats as they are. Layers that share a weight share its
            codes; what has no adapter keeps the weight.
        dropout: share of an adapter's inputs that are zero in training; the others count more.
        rslora: adapters count alpha / sqrt(rank).
        modules_to_save: names of modules, their last parts or globs on them, that train as a whole and have no adapter.
        kernels: implementations; None picks the best for this machine.
        seed: of the initial values of A. B begins at zero.

    Returns:
        Names of the layers that have adapters now. Their `lora_A` and `lora_B`, and the modules to save, are all that
        is left to train.

    Raises:
        ConfigError: a glob that matches no linear layer, a name that no module has or one that shares its weight, a
            rank below 1, FP8 for a Conv1D, or adapters are there already.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        >>> add_lora(model, rank=2, targets=["0"])
        ['0']
        >>> [name for name, p in model.named_parameters() if p.requires_grad], model[0].weight.dtype
        (['0.lora_A', '0.lora_B'], torch.float8_e4m3fn)
    """
    # 1. Which layers: linear ones that are called, are not saved whole, and match a target. All refusals come first.
    _check(model, rank, alpha, base, dropout)
    saved, apart = find_saved(model, modules_to_save), never_called(model)
    sites = [site for site in find_sites(model) if site.kind == "linear"]
    linears = {
        site.fqn: site.module
        for site in sites
        if site.fqn not in apart
        and not any(site.fqn == name or site.fqn.startswith(f"{name}.") for name in saved)
        and (isinstance(site.module, FrozenFloat8Linear) or _takes_adapter(site.module))
    }
    names = matching(list(linears), targets)
    for kind in dict.fromkeys(apart[site.fqn] for site in sites if site.fqn in apart):
        layers = listed([site.fqn for site in sites if apart.get(site.fqn) == kind])
        _log.warning("lora: no adapters on %s: %s takes their weights without calling them", layers, kind)
    if base == "fp8":
        _check_fp8({name: linears[name] for name in names})
    # 2. The model, frozen: in FP8 where that is asked for.
    kernels = kernels or Kernels.default()
    freeze(model)
    train_saved(model, saved)
    if base == "fp8":
        _freeze_in_fp8(model, {name: cast(nn.Linear, linears[name]) for name in names}, kernels)
    # 3. Adapters, and what conversion has wired around the layers, again. First values last: they are seeded by name.
    for name in names:
        attach(linears[name], rank, scaling_of(rank, alpha, rslora), rslora, dropout)
    _mark_draws(model)
    share_inputs(model)
    _convert_again(model)
    init_lora(model, seed)
    return names


def _freeze_in_fp8(model: nn.Module, layers: Mapping[str, nn.Linear], kernels: Kernels) -> None:
    shared = shared_weights(model)
    coded: dict[Tensor, tuple[Tensor, Tensor]] = {}
    for name, module in layers.items():
        if isinstance(module, FrozenFloat8Linear):
            continue
        weight = module.weight
        freeze_in_fp8(module, kernels, coded.get(weight))
        frozen = cast(FrozenFloat8Linear, module)
        coded[weight] = (frozen.weight, frozen.weight_scale_inv)
        others = [other for other in shared.get(weight, ()) if other not in layers]
        if others:
            _log.warning("lora: %s has FP8 codes of the weight that %s still uses as it is", name, listed(others))


@torch.no_grad()
def init_lora(model: nn.Module, seed: int) -> None:
    """Initialise LoRA: A uniform as in peft, each layer from a generator seeded by its name; B zero."""
    for name, module in adapted_layers(model).items():
        if module.lora_A.device.type != "meta":
            generator = torch.Generator().manual_seed(name_seed(seed, name))
            bound = 1 / math.sqrt(module.lora_A.shape[1])
            module.lora_A.copy_(torch.empty(module.lora_A.shape).uniform_(-bound, bound, generator=generator))
            module.lora_B.zero_()


def adapted_layers(model: nn.Module) -> dict[str, Adapted]:
    """Layers with LoRA adapters, by name."""
    return {name: cast(Adapted, module) for name, module in model.named_modules() if hasattr(module, "lora_A")}


@torch.no_grad()
def merge_lora(model: nn.Module) -> list[str]:
    """Merge LoRA: add the adapters to the weights and take them off: layers as before `add_lora`, FP8 ones in FP32.

    What was frozen before `add_lora` is frozen again, all else trains. A layer that shared its weight has one of its
    own afterwards, as its adapters were its own; a warning names it.

    The sum is made in FP32. To keep a merged model in FP8, save it with `save_hf(dtype=torch.float8_e4m3fn)`, which
    rounds the sum: small adapters may vanish in it.

    Of matrices that are cut over ranks (`parallel.tp`) all of these call it, and each adds to its part what one process
    would add.

    Returns:
        Names of the merged layers.

    Raises:
        ConfigError: a model in shards (FSDP2).
    """
    layers, shared = adapted_layers(model), shared_weights(model)
    _check_whole(model, layers)
    for name, module in layers.items():
        delta_MK = (_whole(module.lora_B) @ _whole(module.lora_A)) * module.lora_scaling  # [M, r] @ [r, K]
        delta = delta_MK.T if is_transposed(module) else delta_MK
        others = [other for other in shared.get(module.weight, ()) if other != name]
        if others:
            _log.warning("lora: %s has a weight of its own after merging, no longer that of %s", name, listed(others))
        if isinstance(module, FrozenFloat8Linear):
            codes, scales = module.weight, module.weight_scale_inv
            decoded = from_stored(local(codes), local(scales)).dequantize()
            thaw(module, _as_part(decoded + cut_like(delta_MK, codes), codes))
        else:
            weight, held = module.weight, local(module.weight)
            merged = held.float() + cut_like(delta, weight)
            if others:
                kept = _as_part(merged.to(weight.dtype), weight)
                module.weight = nn.Parameter(kept, requires_grad=weight.requires_grad)
            else:
                held.copy_(merged)
        module.lora_hook.remove()
        del module.lora_A, module.lora_B, module.lora_hook
        del module.lora_scaling, module.lora_rslora, module.lora_dropout
    _mark_draws(model)
    forget_saved(model)
    unfreeze(model)
    _convert_again(model)
    return list(layers)


def _mark_draws(model: nn.Module) -> None:
    """Mark the mixtures of experts whose adapters use dropout, and so draw random numbers."""
    for module in model.modules():
        if isinstance(module, MoE):
            module.draws = any(vars(part).get("lora_dropout", 0.0) for part in module.experts.modules())


def _check_whole(model: nn.Module, layers: Collection[str]) -> None:
    if layers and any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ConfigError(
            "Adapters of a model in shards cannot be merged",
            got=f"{len(layers)} layers with adapters, under torch's fully_shard",
            need="a model without shards: those gather weights into copies that a sum would be lost in, and put the "
            "adapters' parameters back",
            try_="save_adapter(model, folder) here, then load_adapter and merge_lora in one process; of a run: "
            "tilewright merge RUN --out FOLDER",
        )


def _whole(param: Tensor) -> Tensor:
    """All values of a LoRA parameter, FP32: one that ranks hold parts of is put together."""
    return (param.full_tensor() if isinstance(param, DTensor) else param).float()


def _as_part(part: Tensor, like: Tensor) -> Tensor:
    """Shard of a tensor of LoRA that this rank holds, where `like` is sharded; the tensor itself where it is whole."""
    return sharded_like(part, like.shape, like) if isinstance(like, DTensor) else part


def _convert_again(model: nn.Module) -> None:
    """Convert a model again after LoRA: parts that fuse layers with their neighbours must know their policies."""
    for module in model.modules():
        if "precision_report" in vars(module):
            set_mode(module, cast(ConversionReport, module.precision_report).policy)


def load_lora_decoder(
    folder: Path | str,
    rank: int = 16,
    alpha: float = 32.0,
    targets: Sequence[str] = ("*",),
    base: Literal["fp8", "keep"] = "fp8",
    *,
    dropout: float = 0.0,
    rslora: bool = False,
    modules_to_save: Sequence[str] = (),
    kernels: Kernels | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
    read: Callable[[Path | str], DecoderConfig] = read_config,
) -> Decoder:
    """Load a decoder with LoRA adapters from a folder of Llama, Mistral or DeepSeek-V3 layout, or of what `read` reads;
    arguments as in `add_lora`.

    FP8 weights of the folder become the layers' codes and scales as they are, without being decoded, so the model never
    takes more than about a byte per weight. Weights in another format are encoded one by one.

    Raises:
        CheckpointError: the folder cannot be read; see `hf_weights.load_weights`.
        ConfigError: see `add_lora`.
    """
    with torch.device("meta"):
        model = Decoder(read(folder), kernels)
        more = {"dropout": dropout, "rslora": rslora, "modules_to_save": modules_to_save}
        names = add_lora(model, rank, alpha, targets, base, **more, kernels=kernels, seed=seed)
    model.to_empty(device=device)
    model.tie_weights()
    init_lora(model, seed)
    load_weights(model, folder, absent={f"{name}.{part}" for name in names for part in ("lora_A", "lora_B")})
    return model


@torch.no_grad()
def load_fp8_weights(model: nn.Module, folder: Path | str) -> list[str]:
    """Load FP8 weights under LoRA: give layers the codes and scales of a folder as they are, for models that were
    loaded decoded.

    Without it the weights were rounded twice where the folder's scales are no powers of two.

    Args:
        model: with layers in FP8; names as in the folder, as Hugging Face models have them (without a `net.` before).
        folder: in the layout of DeepSeek-V3.

    Returns:
        The layers that were given their codes. Experts that a model holds in one tensor are none.

    Raises:
        CheckpointError: the folder's FP8 weights are broken.
    """
    coded = find_weights(folder, scan_folder(folder))
    found = []
    for name, module in model.named_modules():
        if isinstance(module, FrozenFloat8Linear) and f"{name}.weight" in coded:
            copy_weight(coded[f"{name}.weight"], module.weight, module.weight_scale_inv)
            found.append(name)
    return found


def scaling_of(rank: int, alpha: float, rslora: bool) -> float:
    """The factor by which a LoRA adapter's output is scaled.

    Example:
        >>> scaling_of(16, 32.0, False), scaling_of(16, 32.0, True)
        (2.0, 8.0)
    """
    return alpha / math.sqrt(rank) if rslora else alpha / rank


def _takes_adapter(module: nn.Module) -> bool:
    return owns_its_weight(module) if isinstance(module, nn.Linear) else is_transposed(module)


def _check_fp8(layers: Mapping[str, nn.Module]) -> None:
    other = [name for name, module in layers.items() if not isinstance(module, nn.Linear)]
    if other:
        raise ConfigError(
            "Layer cannot be stored in FP8 under adapters",
            got=f"{listed(other)}: Conv1D, whose weight is stored with its input features first",
            need="nn.Linear, or weights that stay as they are",
            try_='base = "keep"   (lora.base = "keep"; tilewright finetune --how lora)',
            where="lora.base",
        )


def _check(model: nn.Module, rank: int, alpha: float, base: str, dropout: float) -> None:
    # Settings by themselves. Names of layers are matched later, when the layers are known.
    if not 0 <= dropout < 1:
        raise ConfigError(
            "Invalid adapter settings",
            got=f"dropout {dropout}",
            need="a share of at least 0 and below 1",
            try_="dropout = 0.05",
            where="dropout",
        )
    if rank < 1 or alpha <= 0:
        raise ConfigError(
            "Invalid adapter settings",
            got=f"rank {rank}, alpha {alpha}",
            need="a rank of at least 1 and an alpha above 0",
            try_="rank = 16, alpha = 32",
            where="rank" if rank < 1 else "alpha",
        )
    if base not in ("fp8", "keep"):
        raise ConfigError(
            "Unknown storage of the frozen weights",
            got=repr(base),
            need='"fp8" or "keep"',
            try_='base = "fp8"',
            where="base",
        )
    if adapted_layers(model):
        raise ConfigError(
            "Model already has adapters",
            got=f"{len(adapted_layers(model))} layers with adapters",
            need="a model without",
            try_="merge_lora(model) first",
        )
