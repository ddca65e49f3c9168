"""Making `model.HFModel`s: from a local config.json with random weights, or with the folder's weights.

Nothing is ever downloaded, no code of a folder is run, and weights are read from safetensors only: transformers is
told each time, since some of its defaults ask at the terminal or look elsewhere. transformers is imported inside the
functions, so a run without such a model does not need it. Every way in which a folder can be wrong is an error in four
parts.
"""

import copy
import importlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from safetensors import SafetensorError
from torch import nn

from tilewright.core.errors import CheckpointError, ConfigError, HardwareError
from tilewright.models.decoder.init import name_seed
from tilewright.models.folder.fp8_weights import LazyWeight, StoredWeight, find_weights
from tilewright.models.folder.json_file import read_json
from tilewright.models.folder.safetensors import INDEX, SINGLE, StoredTensor, mismatch_error, open_file, scan_folder
from tilewright.models.hf.model import HFModel, Task
from tilewright.models.hf.row_lengths import real_integers
from tilewright.ops.kernels import Kernels

if TYPE_CHECKING:  # it takes seconds to import
    from transformers.modeling_utils import PreTrainedModel

_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.msgpack", "*.h5", "*.gguf")
_NO_CODE = {"trust_remote_code": False}
_LOCAL = {"local_files_only": True, **_NO_CODE}

AUTO_CLASSES = {
    "causal_lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
    "image_classification": "AutoModelForImageClassification",
}
"""By task, what of transformers builds and loads a model."""
_OF_SHAPES = (RuntimeError,)
"""Errors of torch on sizes below zero. Only where no memory is asked for, whose lack is one, too."""


def load_hf(
    path: Path | str | Any,
    task: Task,
    weights: Literal["random", "load"] = "random",
    *,
    kernels: Kernels | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> HFModel:
    """Load a Hugging Face model from a local folder, or from a transformers config object.

    Args:
        path: folder with a config.json, and safetensors weights where they are loaded; or a `PreTrainedConfig`.
        task: what is learned.
        weights: "random" draws them as transformers does (seed: `build.init_weights`); "load" reads the folder's.
        device: "meta" gives shapes only.
        dtype: of loaded weights; training keeps FP32. Random ones are FP32.

    Raises:
        CheckpointError: no such folder, a broken config.json, or weights that are not those of the model.
        ConfigError: the architecture does not do the task.
        HardwareError: transformers is not installed.
    """
    auto, config = _task_class(path, task)
    if weights == "load":
        with _of_config(path, config.model_type):
            net = _load_weights(auto, path, config, dtype)
        return HFModel(cast(Any, net).to(device), task, kernels)
    shapes = torch.device(device).type == "meta"
    more = _OF_SHAPES if shapes else ()
    with torch.device("meta" if shapes else "cpu"), _of_config(path, config.model_type, *more):
        net = auto.from_config(config, dtype=torch.float32, **_NO_CODE)
    return HFModel(net.to(device), task, kernels)


def hf_shapes(path: Path | str, task: Task) -> "PreTrainedModel":
    """Load shapes: the Hugging Face model of a folder without weights, for `row_lengths` and `trained_parts`.

    Raises:
        As `load_hf`.
    """
    auto, config = _task_class(path, task)
    with real_integers(), _of_config(path, config.model_type, *_OF_SHAPES):
        return auto.from_config(config, dtype=torch.float32, **_NO_CODE)


def whole_architecture(path: Path | str, task: Task) -> nn.Module | None:
    """Load without weights the Hugging Face architecture of a folder without a task, where transformers has it, for
    `trained_parts`.

    Raises:
        As `load_hf`.
    """
    AutoModel = _transformers().AutoModel
    _, config = _task_class(path, task)
    # Some architectures have several models without a task, and transformers cannot always tell which is meant.
    if type(config) not in AutoModel._model_mapping or not isinstance(AutoModel._model_mapping[type(config)], type):
        return None
    with real_integers(), _of_config(path, config.model_type, *_OF_SHAPES):
        return AutoModel.from_config(config, dtype=torch.float32, **_NO_CODE)


def _task_class(path: Path | str | Any, task: Task) -> tuple[Any, Any]:
    """transformers' Auto class to load a task with, and the config of a folder."""
    transformers = _transformers()
    config = _read_hf_config(transformers, path) if isinstance(path, (str, Path)) else path
    auto = getattr(transformers, AUTO_CLASSES[task])
    if type(config) not in auto._model_mapping:
        raise ConfigError(
            f"Task {task} is not supported by this architecture",
            got=f"model_type {config.model_type!r}",
            need=f"one that transformers' {AUTO_CLASSES[task]} knows",
            try_="another model.task or model.path",
            where="model.task",
        )
    return auto, config


@torch.no_grad()
def init_hf(model: HFModel, seed: int) -> None:
    """Load a Hugging Face model with drawn weights as transformers would, each module from a generator seeded by its
    name.

    It happens on the CPU, so that every device gets the same numbers; the model visits it for that.
    """
    net, device = model.net, model.net.device
    owners = weight_owners(net)
    net.cpu()
    with torch.random.fork_rng(devices=[]):
        # Children first: some architectures correct a child's weight in the parent's turn.
        for name, module in reversed(list(net.named_modules())):
            draw_module(owners[name], name, module, seed)
    cast(nn.Module, net).to(device)


def weight_owners(net: nn.Module) -> dict[str, Any]:
    """Find the module that draws the initial weights of each module of a Hugging Face model: the innermost one around
    it that can."""
    from transformers.modeling_utils import PreTrainedModel

    owners: dict[str, Any] = {}
    for name, module in net.named_modules():
        parent = owners.get(name.rpartition(".")[0], net)
        owners[name] = module if isinstance(module, PreTrainedModel) else parent
    return owners


def draw_module(owner: Any, name: str, module: nn.Module, seed: int) -> None:
    """Draw the weights of one module of a loaded Hugging Face model from the process' CPU generator, seeded by the
    module's name."""
    torch.default_generator.manual_seed(name_seed(seed, name))
    owner._init_weights(module)


def _transformers() -> Any:
    try:
        transformers = importlib.import_module("transformers")
        with _errors_only("torchao", "torch.utils._pytree"):
            # Imports torchao where it is installed, which says which of its kernels are for other machines.
            importlib.import_module("transformers.quantizers")
    except ImportError as error:
        raise HardwareError(
            'model.kind = "hf" needs the package transformers',
            got=str(error),
            need="transformers 5.0 or newer",
            try_="pip install 'tilewright[hf]'",
            where="model.kind",
        ) from error
    return transformers


@contextmanager
def _errors_only(*names: str) -> Iterator[None]:
    """Loggers without their warnings, while a Hugging Face model is loaded."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _read_hf_config(transformers: Any, path: Path | str) -> Any:
    values = read_json(path)
    model_type = values.get("model_type")
    _check_no_kernels(values, Path(path) / "config.json")
    from huggingface_hub.errors import StrictDataclassError

    with _of_config(path, model_type, OSError, StrictDataclassError):
        config = transformers.AutoConfig.from_pretrained(str(path), **_LOCAL)
        layers = getattr(config.get_text_config(), "num_hidden_layers", None)
        if isinstance(layers, int) and layers < 1:
            raise ValueError(f"num_hidden_layers = {layers}, where there is at least one")
        return config


@contextmanager
def _of_config(path: Path | str | Any, model_type: Any, *more: type[Exception]) -> Iterator[None]:
    """While a Hugging Face model is loaded, turns errors of architectures on values that they do not take into an error
    of the folder.

    Args:
        path: of the folder; else nothing is changed.
        model_type: as its config.json says.
        more: errors beside those.

    Raises:
        CheckpointError: one was raised.
    """
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, AssertionError, *more) as error:
        if not isinstance(path, (str, Path)):
            raise
        said = " ".join(str(error).split())[:300]
        raise CheckpointError(
            "Transformers cannot build a model from this config.json",
            got=f"model_type {model_type!r}: {type(error).__name__}: {said}",
            need="a model_type and values that the installed transformers knows; code of a model folder is never run",
            try_="correct config.json, or a newer transformers",
            where=str(Path(path) / "config.json"),
        ) from error


def _load_weights(auto: Any, path: Path | str | Any, config: Any, dtype: torch.dtype) -> "PreTrainedModel":
    if not isinstance(path, (str, Path)):
        raise TypeError('weights = "load" needs a folder, not a config object')
    options = {"dtype": dtype, "output_loading_info": True}
    options["ignore_mismatched_sizes"] = True  # only to list them all below
    _check_safetensors(Path(path))
    try:
        stored, coded = _fp8_weights(path, config)
        if coded:
            net, info = _load_fp8(auto, config, stored, coded, options)
        else:
            net, info = auto.from_pretrained(str(path), config=config, use_safetensors=True, **_LOCAL, **options)
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            "Weights in the folder cannot be loaded",
            got=str(error).strip().splitlines()[0],
            need="whole safetensors files that match config.json",
            try_='copy the folder again, or model.weights = "random"',
            where=str(path),
        ) from error
    if info["missing_keys"] or info["mismatched_keys"]:
        wrong = {
            str(key[0]): f"{list(key[1])} in the folder, {list(key[2])} in the model" for key in info["mismatched_keys"]
        }
        raise mismatch_error(path, info["missing_keys"], [], wrong)
    return cast("PreTrainedModel", net)


def _check_safetensors(path: Path) -> None:
    """Check a folder before loading it: raise where its weights are in another format than safetensors, most of which
    are pickles: reading one runs it.

    Raises:
        CheckpointError: there is no safetensors file.
    """
    if any((path / name).is_file() for name in (SINGLE, INDEX)):
        return
    others = sorted({file.name for pattern in _OTHER_WEIGHTS for file in path.glob(pattern)})
    load = f"AutoModel.from_pretrained('{path}').save_pretrained('{path}')"
    raise CheckpointError(
        "No safetensors weights in the model folder",
        got=", ".join(others) if others else f"no {SINGLE}",
        need=f"{SINGLE}, or {INDEX}; files in other formats can hold code and are not read",
        try_=f'where you trust them, python -c "from transformers import AutoModel; {load}"'
        if others
        else 'copy the folder again, or model.weights = "random"',
        where=str(path),
    )


def _check_no_kernels(values: Any, file: Path) -> None:
    """Check a folder before loading it: raise where a config.json names kernels of the Hugging Face Hub, which
    transformers would download and run.

    Raises:
        CheckpointError: it does.
    """
    left = [values]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        if not isinstance(value, dict):
            continue
        left += value.values()
        for key, inner in value.items():
            names = inner.values() if isinstance(inner, dict) else [inner]
            if "_implementation" in key and any(isinstance(name, str) and "/" in name for name in names):
                raise CheckpointError(
                    "Kernels from elsewhere in config.json",
                    got=f"{key} = {inner!r}",
                    need="an implementation that is part of transformers; code of a model folder is never run",
                    try_=f"delete {key} from config.json",
                    where=str(file),
                )


def _fp8_weights(path: Path | str, config: Any) -> tuple[dict[str, StoredTensor], dict[str, StoredWeight]]:
    """Find the stored tensors of a folder and its FP8 weights; nothing if transformers loads the folder by another
    method.

    Looked at also where config.json names no method: transformers would take the codes for weights.
    """
    settings = getattr(config, "quantization_config", None)
    other = isinstance(settings, dict) and settings.get("quant_method") != "fp8"
    if other or not any((Path(path) / name).is_file() for name in (SINGLE, INDEX)):
        return {}, {}
    stored = scan_folder(path)
    return stored, find_weights(path, stored)


def _load_fp8(
    auto: Any,
    config: Any,
    stored: Mapping[str, StoredTensor],
    coded: Mapping[str, StoredWeight],
    options: dict[str, Any],
) -> tuple[nn.Module, dict[str, Any]]:
    """Load FP8 weights of a Hugging Face model decoded by ourselves, one at a time while transformers puts them where
    they belong.

    transformers decodes ragged blocks wrongly where there is no GPU, and leaves weights in FP8 where there is one.
    """
    faults: list[CheckpointError] = []
    config = copy.deepcopy(config)
    del config.quantization_config
    with torch.device("meta"):
        model_class = type(auto.from_config(config, **_NO_CODE))
    scales = {weight.scale_name for weight in coded.values()}
    state: dict[str, Any] = {name: LazyWeight(weight, faults) for name, weight in coded.items()}
    state |= {name: _LazyTensor(name, t) for name, t in stored.items() if name not in coded and name not in scales}
    try:
        net, info = model_class.from_pretrained(None, config=config, state_dict=state, **options)
    except (OSError, RuntimeError, ValueError, CheckpointError):
        if faults:
            raise faults[0] from None
        raise
    if faults:
        raise faults[0]
    return net, info


class _LazyTensor:
    """A stored tensor that is read when it is indexed, so that a file is open only while it is read."""

    def __init__(self, name: str, stored: StoredTensor):
        self.name, self.stored = name, stored

    def get_shape(self) -> list[int]:
        return list(self.stored.shape)

    def get_dtype(self) -> str:
        return self.stored.dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        with open_file(self.stored.file) as reader:
            return reader.get_tensor(self.name)[index]
