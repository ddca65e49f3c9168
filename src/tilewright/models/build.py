"""From a recipe's `[model]` section to a model, on any device, with weights or without.

The one place that knows which architectures there are: `ARCHITECTURES`. What is asked of one is `spec.ModelSpec`.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tilewright.core.config.load import Loaded
from tilewright.core.config.sections.model import ModelSection
from tilewright.core.errors import CheckpointError, ConfigError
from tilewright.core.units import format_share
from tilewright.models.base.protocols import InitialValues, Model
from tilewright.models.decoder.block import Block
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.models.decoder.hf_config import read_config, to_hf_config
from tilewright.models.decoder.hf_weights import decoder_weights, load_weights
from tilewright.models.decoder.init import decoder_values, init_decoder
from tilewright.models.folder.find_model import local_folder
from tilewright.models.folder.json_file import read_json
from tilewright.models.hf.load import hf_shapes, init_hf, load_hf, whole_architecture
from tilewright.models.hf.model import HFModel, Task
from tilewright.models.hf.row_lengths import position_limit
from tilewright.models.hf.trained_parts import untrained_parts
from tilewright.models.layerwise.hf_view import layered_hf
from tilewright.models.layerwise.layer_view import LayerwiseModel
from tilewright.models.layerwise.lazy_init import random_hf, stored_hf
from tilewright.models.spec import ModelSpec
from tilewright.ops.kernels import Kernels


def build_model(
    section: ModelSection,
    vocab_size: int,
    kernels: Kernels | None = None,
    device: torch.device | str = "meta",
) -> Model:
    """Build the model that the section asks for.

    Args:
        section: the recipe's `[model]`.
        vocab_size: of the tokenizer; classes for image classification.
        kernels: implementations of the operations; None picks the best for this machine.
        device: "meta" gives shapes only. On a real device `weights = "load"` loads the weights, and
            `weights = "random"` leaves them for `init_weights`.

    Raises:
        ConfigError: the section's values do not fit together, or the folder's model does not fit the data.
        CheckpointError: the folder cannot be read, or is none of this architecture.
    """
    kernels = kernels or Kernels.default()
    spec = spec_of(section.kind)
    return spec.build(spec, in_folder(section), vocab_size, kernels, device)


def _build_decoder(
    spec: ModelSpec, section: ModelSection, vocab_size: int, kernels: Kernels, device: torch.device | str
) -> Decoder:
    if section.task != "causal_lm":
        raise ConfigError(
            "Decoder supports task causal_lm only",
            got=f'model.task = "{section.task}"',
            need='model.kind = "hf" for other tasks',
            try_='model.kind = "hf" and model.path = a folder with a config.json',
            where="model.task",
        )
    _require_path(section)
    config = decoder_config(section, vocab_size)
    model = decoder_shapes(config, kernels)
    if torch.device(device).type != "meta":
        materialize(model, device)
        if section.weights == "load":
            load_weights(model, section.path)
    return model


def decoder_shapes(
    config: DecoderConfig, kernels: Kernels, task: str = "causal_lm", numbers: Sequence[int] | None = None
) -> Decoder:
    """Build a decoder's shapes, without memory, on the meta device; `numbers` as `Decoder` takes them."""
    with shapes_only():
        return Decoder(config, kernels, numbers)


def decoder_config(section: ModelSection, vocab_size: int) -> DecoderConfig:
    """The shape of a decoder: from the folder at `section.path` if it is set, else from the section.

    Raises:
        ConfigError: the folder's vocabulary is smaller than the tokenizer's, or values do not fit together.
    """
    if not section.path:
        spec = spec_of(section.kind)
        own = spec.name if spec in ARCHITECTURES else spec
        return DecoderConfig.from_section(section.model_copy(update={"kind": own}), vocab_size)
    folder = local_folder(section.path)
    config = spec_of(section.kind).read_folder(folder)
    check_vocab(config.vocab_size, vocab_size, folder)
    return config


def in_folder(section: ModelSection) -> ModelSection:
    """The section of a model to build with the folder that it names by its repository."""
    folder = local_folder(section.path)
    return section if folder == section.path else section.model_copy(update={"path": folder})


def kind_of(folder: str) -> str:
    """The kind of model to build: `decoder` where the folder has a layout that tilewright's decoder reads, which trains
    faster; else `hf`.

    Raises:
        CheckpointError: no folder, or no config.json in it.
    """
    read_json(Path(folder).expanduser(), "config.json")
    try:
        read_config(folder)
    except (CheckpointError, ConfigError):
        return "hf"
    return "decoder"


def check_vocab(model_vocab: int, tokenizer_vocab: int, path: str) -> None:
    """Check the vocabulary of a model to build: raise ConfigError where the tokenizer makes ids that it has no
    embedding for."""
    if tokenizer_vocab > model_vocab:
        raise ConfigError(
            "Tokenizer has more tokens than the model",
            got=f"{tokenizer_vocab} tokens, {model_vocab} embeddings",
            need="at most as many tokens as embeddings",
            try_=f"data.tokenizer = the model's own folder, or data.vocab_size = {model_vocab}",
            where=path,
        )


def check_data(section: ModelSection, seq_len: int, vocab_size: int | None) -> None:
    """Check data before a model is built: raise ConfigError where rows would not fit the folder's model; nothing of its
    weights is read.

    Args:
        section: the recipe's `[model]`.
        seq_len: positions in a row.
        vocab_size: of the tokenizer; None where it is not known yet.
    """
    section = in_folder(section)
    if section.kind != "hf":
        if section.path and vocab_size is not None:
            check_vocab(spec_of(section.kind).read_folder(section.path).vocab_size, vocab_size, section.path)
        return
    _require_path(section)
    net = hf_shapes(section.path, section.task)
    if section.task == "image_classification":
        return
    if vocab_size is not None:
        check_vocab(cast(nn.Embedding, net.get_input_embeddings()).weight.shape[0], vocab_size, section.path)
    limit = position_limit(net, seq_len)
    if limit is not None:
        raise ConfigError(
            "Rows are longer than the model's table of positions",
            got=f"data.seq_len = {seq_len}, a table for {limit} positions",
            need=f"data.seq_len at most {limit}",
            try_=f"data.seq_len = {limit}, or a model with rotary or relative positions",
            where="data.seq_len",
        )


def longest_text(section: ModelSection, at_least: int) -> int | None:
    """The longest text that the model of a folder can take; None where its position table has at least `at_least`
    entries.

    Args:
        section: the recipe's `[model]`.
        at_least: positions that are wanted.
    """
    section = in_folder(section)
    return None if section.kind != "hf" else position_limit(hf_shapes(section.path, section.task), at_least)


def materialize(model: Any, device: torch.device | str) -> None:
    """Give a meta decoder real, uninitialised memory on `device`, in place."""
    model.to_empty(device=device)
    model.tie_weights()


def init_weights(model: Model, seed: int) -> None:
    """Random initial weights of a built model, a pure function of seed and parameter names. Overwrites what is
    there."""
    spec_of(model.architecture).init(model, seed)


def random_values(model: Model, seed: int) -> InitialValues:
    """Random initial weights of a built model as `init_weights` gives them, in pieces. It may be on the meta device."""
    return spec_of(model.architecture).random_values(model, seed)


def stored_values(model: Model, folder: Path | str) -> InitialValues:
    """The weights of a Hugging Face folder for a built model, in pieces. It may be on the meta device.

    Raises:
        CheckpointError: the folder is not whole, or not of this model.
    """
    return spec_of(model.architecture).stored_values(model, folder)


def layered(model: Model) -> LayerwiseModel:
    """Build a model as a row of layers; kept whole, and said so in its notes, where it cannot be cut."""
    return spec_of(model.architecture).layered(model)


def _build_hf(
    spec: ModelSpec, section: ModelSection, vocab_size: int, kernels: Kernels, device: torch.device | str
) -> HFModel:
    _require_path(section)
    weights = "random" if torch.device(device).type == "meta" else section.weights
    model = load_hf(section.path, section.task, weights, kernels=kernels, device=device)
    if section.task != "image_classification":
        check_vocab(model.vocab_size, vocab_size, section.path)
    if torch.device(device).type != "meta":
        model.notes += untrained_notes(section)
    return model


def untrained_notes(section: ModelSection) -> list[str]:
    """Describe the parts of a folder's architecture that the task does not train, in words; empty if it trains all."""
    text = section.task != "image_classification"
    net, whole = hf_shapes(section.path, section.task), whole_architecture(section.path, section.task)
    parts, share = untrained_parts(net, whole, text=text)
    if not parts:
        return []
    named = ", ".join(parts)
    return [
        f"{section.task} trains {format_share(1 - share)} of the parameters of {section.path}; not trained: {named}"
    ]


def _require_path(section: ModelSection) -> None:
    if not section.path and (section.kind == "hf" or section.weights == "load"):
        setting = 'model.kind = "hf"' if section.kind == "hf" else 'model.weights = "load"'
        raise ConfigError(
            f"{setting} needs model.path",
            got='model.path = ""',
            need="a folder with a config.json" + (" and weights" if section.weights == "load" else ""),
            try_="model.path = the folder",
            where="model.path",
        )


def _row(model: Any) -> LayerwiseModel:
    return model


def _hf_shapes(config: Any, kernels: Kernels, task: Task) -> HFModel:
    return load_hf(config, task, kernels=kernels, device="meta")


def _hf_config(config: Any, dtype_name: str) -> dict[str, Any]:
    return config.to_dict()


def decoder_like(name: str, block: Callable[..., nn.Module], **answers: Any) -> ModelSpec:
    """Build an architecture of tilewright's decoder with another layer. It has no folder and no exported graph of its
    own unless `answers` give them; formulas are those of `Block` unless they do.

    Args:
        name: that no architecture has.
        block: makes a layer from (shape, number, kernels); a `block.Block`, or what has its attributes.
        answers: further fields of `ModelSpec`.

    Example:
        >>> decoder_like("mine", Block).write_config is None
        True
    """
    return ModelSpec(
        name=name,
        block=block,
        **{
            "build": _build_decoder,
            "init": init_decoder,
            "random_values": decoder_values,
            "stored_values": decoder_weights,
            "layered": _row,
            "meta_model": decoder_shapes,
        }
        | answers,
    )


DECODER = decoder_like("decoder", Block, read_config=read_config, write_config=to_hf_config)
HF = ModelSpec(
    name="hf",
    build=_build_hf,
    init=init_hf,
    random_values=random_hf,
    stored_values=stored_hf,
    layered=layered_hf,
    meta_model=_hf_shapes,
    formulas=None,
    write_config=_hf_config,
)
ARCHITECTURES = (DECODER, HF)
"""All that `model.kind` names."""


def spec_of(architecture: str | ModelSpec) -> ModelSpec:
    """Find the spec of an architecture by `model.kind` or `Model.architecture`. One that is named by its path,
    package.module:NAME, is imported.

    Raises:
        ConfigError: nothing is there, or something else.
    """
    if not isinstance(architecture, str):
        return architecture
    if ":" in architecture:
        return _imported(architecture)
    return next(spec for spec in ARCHITECTURES if spec.name == architecture)


def _imported(path: str) -> ModelSpec:
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise _no_architecture(path, str(error)) from error
    if not isinstance(found, ModelSpec):
        raise _no_architecture(path, f"{name} is {type(found).__name__}")
    if any(found.name == spec.name for spec in ARCHITECTURES):
        raise _no_architecture(path, f"it has the name of tilewright's own, {found.name}")
    return found


def _no_architecture(path: str, reason: str) -> ConfigError:
    return ConfigError(
        "Architecture cannot be imported",
        got=f"{path}: {reason}",
        need="package.module:NAME of a ModelSpec, in a module that Python finds from any folder",
        try_="pip install its package, or PYTHONPATH=its folder",
        where="model.kind",
    )


def with_architecture(loaded: Loaded, spec: ModelSpec) -> Loaded:
    """Change a recipe so that it trains an architecture of the caller's own, for `training.session.train` and the
    planner. Its run.toml has the name, which no other process knows; `model.kind` may be its import path instead."""
    recipe = loaded.recipe
    return replace(loaded, recipe=recipe.model_copy(update={"model": recipe.model.model_copy(update={"kind": spec})}))


_INITIALISERS = {value for name, value in vars(nn.init).items() if name.endswith("_") and callable(value)}


class _NoInit(TorchFunctionMode):
    """Leaves the functions of `torch.nn.init` out."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _INITIALISERS:
            given = dict(kwargs or {})
            return given["tensor"] if "tensor" in given else args[0]
        return func(*args, **(kwargs or {}))


@contextmanager
def shapes_only() -> Iterator[None]:
    """Make new tensors inside the context with a shape and a dtype, and no memory."""
    with torch.device("meta"), _NoInit():
        yield
