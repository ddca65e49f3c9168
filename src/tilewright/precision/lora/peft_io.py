"""Adapters in files: the layout of the package peft (adapter_config.json, adapter_model.safetensors).

Names are those of the base model's layers, without our wrapper around Hugging Face models. What peft can say and
`lora` cannot do (another rank for some layers, DoRA, trained biases, a base model that the adapter's beginning changed)
is an error. peft itself is not needed.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from tilewright.core.errors import CheckpointError
from tilewright.models.folder.find_model import is_hub_name, split_name
from tilewright.models.folder.json_file import read_json, write_json
from tilewright.models.folder.safetensors import mismatch_error, open_file
from tilewright.precision.lora.adapter import is_transposed
from tilewright.precision.lora.lora import adapted_layers, add_lora, scaling_of
from tilewright.precision.lora.modules_to_save import saved_modules

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_LARGEST = torch.finfo(torch.float32).max
_ONLY: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layers_to_transform": (None,),
    "target_parameters": (None, []),
}
_UNWRITTEN: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("lora_bias", "use_qalora", "use_bdlora"), (False, None)),
    **dict.fromkeys(("layer_replication", "trainable_token_indices"), (None, [], {})),
    **dict.fromkeys(("alora_invocation_tokens", "arrow_config", "kasa_config"), (None,)),
}
"""The same of keys that older versions of peft do not know."""
_CHANGES_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")
"""How `init_lora_weights` begins where peft has taken the adapter's first values from the base model's weights: on the
weights as they were such an adapter is another model."""


def save_adapter(
    model: nn.Module,
    folder: Path | str,
    *,
    base_model: str = "",
    live: Callable[[str, Tensor], Tensor] | None = None,
) -> None:
    """Save a model's adapter as peft does, in FP32.

    Args:
        model: with adapters.
        folder: made where it does not exist.
        base_model: where the base model lies, for readers that load it by themselves: a folder, or a hub's name.
        live: gives a tensor of the model's state_dict, from its name and itself, with all its values: where the model
            is in shards.

    Raises:
        CheckpointError: no adapters, or the folder cannot be written.
    """
    layers = adapted_layers(_root(model))
    if not layers:
        raise CheckpointError(
            "No adapter to save",
            got="a model without adapters",
            need="a model after add_lora and before merge_lora",
            try_="save_hf for a whole model",
            where=str(folder),
        )
    first = next(iter(layers.values()))
    repo, revision = split_name(base_model) if is_hub_name(base_model) else (base_model, "")
    rank = first.lora_A.shape[0]
    names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
    own = _stored(_root(model))
    saved = saved_modules(_root(model))
    whole = {key: param if live is None else live(names[param], param) for key, param in own.items()}
    tensors = {key: tensor.detach().float().cpu().clone().contiguous() for key, tensor in whole.items()}  # none shared
    config = {key: allowed[0] for key, allowed in _ONLY.items()} | {
        "r": rank,
        "lora_alpha": first.lora_scaling * (math.sqrt(rank) if first.lora_rslora else rank),
        "use_rslora": first.lora_rslora,
        "lora_dropout": first.lora_dropout,
        "fan_in_fan_out": is_transposed(first),
        "modules_to_save": sorted(saved) or None,
        "target_modules": sorted(layers),
        "base_model_name_or_path": repo or None,
        "revision": revision or None,
        "inference_mode": True,
        "init_lora_weights": True,
        "task_type": "CAUSAL_LM",
    }
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / (WEIGHTS + ".partial")
        save_file(tensors, partial, metadata={"format": "pt"})
        partial.replace(folder / WEIGHTS)
        write_json(folder / CONFIG, config)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            "Adapter cannot be written",
            got=str(error),
            need="space in a writable folder",
            try_="free space or choose another folder",
            where=str(folder),
        ) from error


@torch.no_grad()
def load_adapter(model: nn.Module, folder: Path | str, base: Literal["fp8", "keep"] = "fp8") -> list[str]:
    """Load an adapter saved by peft into a model; where it has some already, on the same layers and of the same rank.

    Args:
        model: the base model, with or without adapters.
        folder: as `save_adapter` or peft wrote it.
        base: see `lora.add_lora`, which is called for a model without adapters.

    Returns:
        Names of the layers with adapters.

    Raises:
        CheckpointError: the folder is incomplete, asks for what `lora` cannot do, or is of another model.
    """
    # 1. The folder: kinds of adapter that this one can be, and one rank in all layers.
    folder, root = Path(folder), _root(model)
    config = read_json(folder, CONFIG)
    _check_kinds(config, folder)
    with open_file(folder / WEIGHTS) as reader:
        stored = {key: reader.get_tensor(key) for key in reader.keys()}  # noqa: SIM118 - not a mapping
    suffix = ".lora_A.weight"
    names = [key.removeprefix(_PREFIX).removesuffix(suffix) for key in stored if key.endswith(suffix)]
    _check_rank(config["r"], {name: stored[f"{_PREFIX}{name}{suffix}"] for name in names}, folder)
    rslora = bool(config.get("use_rslora"))
    # 2. A model without adapters gets them on the folder's layers.
    if not adapted_layers(root):
        known = {
            name for name, module in root.named_modules() if isinstance(module, nn.Linear) or is_transposed(module)
        }
        if not set(names) <= known:
            raise mismatch_error(folder, [], [name for name in names if name not in known], {})
        more = {"dropout": config.get("lora_dropout") or 0.0, "rslora": rslora}
        whole = config.get("modules_to_save") or ()
        add_lora(root, config["r"], config["lora_alpha"], names, base, **more, modules_to_save=whole)
    # 3. All names and shapes are compared before the first value is copied.
    layers, own = adapted_layers(root), _stored(root)
    wrong = {
        key: f"{list(stored[key].shape)} in the folder, {list(tensor.shape)} in the model"
        for key, tensor in own.items()
        if key in stored and stored[key].shape != tensor.shape
    }
    if own.keys() != stored.keys() or wrong:
        raise mismatch_error(folder, own.keys() - stored.keys(), stored.keys() - own.keys(), wrong)
    _check_shared(own, stored, folder)
    for key, tensor in own.items():
        tensor.copy_(stored[key])
    for module in layers.values():
        module.lora_scaling = scaling_of(config["r"], config["lora_alpha"], rslora)
        module.lora_rslora = rslora
    return list(layers)


def _stored(root: nn.Module) -> dict[str, Tensor]:
    """Tensors stored in a peft adapter file, by its names: adapters, and modules that trained as a whole."""
    layers = adapted_layers(root).items()
    found: dict[str, Tensor] = {}
    for name, layer in layers:
        found |= {f"{_PREFIX}{name}.lora_A.weight": layer.lora_A, f"{_PREFIX}{name}.lora_B.weight": layer.lora_B}
    for name, module in saved_modules(root).items():
        found |= {f"{_PREFIX}{name}.{inner}": param for inner, param in module.named_parameters()}
    return found


def _check_shared(own: dict[str, Tensor], stored: dict[str, Tensor], folder: Path) -> None:
    """Check shared weights in a peft file: what a model holds once is there with one value: peft trains copies of a
    shared weight apart."""
    first: dict[int, str] = {}
    for key, tensor in own.items():
        other = first.setdefault(id(tensor), key)
        if not torch.equal(stored[other], stored[key]):
            raise CheckpointError(
                "Adapter has two values for a weight that the model shares",
                got=f"{other.removeprefix(_PREFIX)} and {key.removeprefix(_PREFIX)} differ",
                need="a base model whose weights are not tied, as the adapter's training made them",
                try_="with peft: model.merge_and_unload().save_pretrained(FOLDER); then model.path = FOLDER",
                where=str(folder / WEIGHTS),
            )


def _check_kinds(config: dict[str, Any], folder: Path) -> None:
    only = _ONLY | _UNWRITTEN
    wrong = [
        f"{key} = {config[key]!r}" for key, allowed in only.items() if key in config and config[key] not in allowed
    ]
    first = config.get("init_lora_weights")
    wrong += [f"init_lora_weights = {first!r}"] if str(first).lower().startswith(_CHANGES_BASE) else []
    rank, alpha = config.get("r"), config.get("lora_alpha")
    wrong += [f"r = {rank!r}"] if type(rank) is not int or rank < 1 else []
    wrong += [f"lora_alpha = {alpha!r}"] if not _is_positive(alpha) else []
    dropout, saved = config.get("lora_dropout"), config.get("modules_to_save")
    share = isinstance(dropout, (int, float)) and not isinstance(dropout, bool) and 0 <= dropout < 1
    wrong += [f"lora_dropout = {dropout!r}"] if dropout is not None and not share else []
    is_list = isinstance(saved, list) and all(isinstance(name, str) for name in saved)
    wrong += [f"modules_to_save = {saved!r}"] if saved is not None and not is_list else []
    if wrong:
        raise CheckpointError(
            "Unsupported kind of adapter",
            got=", ".join(wrong),
            need="LoRA of one rank and alpha on the base model's own weights, without trained biases",
            try_="with peft: model.merge_and_unload().save_pretrained(FOLDER); then model.path = FOLDER",
            where=str(folder / CONFIG),
        )


def _check_rank(rank: int, down_RK: dict[str, Tensor], folder: Path) -> None:
    """Check the rank of a peft file: it has the one that its config says, before a model gets adapters of it.

    Args:
        rank: by the config.
        down_RK: the first matrix of each adapter, in the file.
    """
    if not down_RK:
        raise mismatch_error(folder, ["lora_A.weight of any layer"], [], {})
    odd = {name: list(down.shape) for name, down in down_RK.items() if down.dim() != 2 or down.shape[0] != rank}
    if odd:
        name, shape = next(iter(odd.items()))
        raise CheckpointError(
            "Adapter of another rank than its config says",
            got=f"r = {rank}, and lora_A of {name} is {shape} ({len(odd)} of {len(down_RK)} layers differ)",
            need="r rows in each lora_A",
            try_="copy both files again",
            where=str(folder),
        )


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= _LARGEST


def _root(model: nn.Module) -> nn.Module:
    """The module that names in peft files are relative to; for one that is no `protocols.Model`, itself."""
    return cast(nn.Module, model.net) if hasattr(model, "architecture") else model
