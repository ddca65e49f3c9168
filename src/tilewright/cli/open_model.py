"""A model to be used: a run, or a Hugging Face folder, an adapter's folder or a model of the hub, with its tokenizer.

The dtype of the weights is a choice between memory and exactness. "auto" keeps what the folder is: BF16 where its
weights are BF16 or FP8 and the device multiplies BF16 itself (half the memory of FP32, prompts two to three times as
fast on a CPU with AVX-512 BF16), else FP32. A run is opened as it was trained: FP32, or its FP8 base.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from tilewright.cli.common import find_run, is_run
from tilewright.cli.error_text import told_without_settings
from tilewright.cli.load_run import check_named, reopen
from tilewright.core.config.recipe import Recipe
from tilewright.core.config.sections.model import ModelSection
from tilewright.core.errors import CheckpointError, ConfigError
from tilewright.core.hardware import Machine, detect_machine
from tilewright.data.chat.load import folder_templates
from tilewright.data.chat.template import ChatTemplate
from tilewright.data.common.tokenizer import Tokenizer, load_tokenizer
from tilewright.data.common.tokenizer_folder import folder_tokenizer
from tilewright.models.base.protocols import Model
from tilewright.models.build import check_vocab, decoder_shapes, kind_of, materialize
from tilewright.models.decoder.hf_config import read_config
from tilewright.models.decoder.hf_weights import load_weights
from tilewright.models.folder.find_model import find_model, is_hub_name, local_folder, split_name
from tilewright.models.folder.json_file import read_json
from tilewright.models.folder.safetensors import scan_folder
from tilewright.models.hf.load import load_hf
from tilewright.ops.kernels import Kernels
from tilewright.precision.lora.peft_io import CONFIG as ADAPTER
from tilewright.precision.lora.peft_io import load_adapter
from tilewright.precision.mixed import few_row_layers
from tilewright.training.components.tokenizer_files import template_folder

Dtype = Literal["auto", "bf16", "fp32"]
_SHORT_CODES = ("BF16", "F8_E4M3")
"""Names of dtypes in safetensors that BF16 holds (FP8 decoded; its scales round unless they are powers of two)."""


@dataclass(frozen=True)
class OpenModel:
    """A model in evaluation mode and what is needed to talk to it.

    Args:
        name: of the run, or of the folder; a hub's name with its revision.
        chat: the template; None where neither the model nor the caller has one.
        max_positions: tokens of prompt and answer that the model knows; None where nothing says so.
        recipe: of a run; None for a folder.
        checkpoint: of a run; None for a folder.
        files: the folder with the files of the tokenizer that the weights came with; None of a run whose weights were
            random at first.
    """

    name: str
    model: Model
    tokenizer: Tokenizer
    chat: ChatTemplate | None
    device: torch.device
    max_positions: int | None
    recipe: Recipe | None = None
    checkpoint: Path | None = None
    files: Path | None = None


def open_model(
    name: str, *, device: str = "auto", dtype: Dtype = "auto", chat_template: str = "", threads: int | None = None
) -> OpenModel:
    """Open the model that a command names: RUN or MODEL.

    Args:
        name: a run folder or its name below `runs`, a Hugging Face folder, the folder of an adapter, or
            `org/name[@revision]`. A run is looked for first.
        device: auto, cpu or cuda.
        dtype: of the weights; see the top of this file.
        chat_template: as `data.chat_template`: "" takes the model's own, if it has one.
        threads: of the CPU, for torch; None: those of the run, else one per physical core.

    Raises:
        ConfigError: nothing of this name, no causal language model, or a template that is not there.
        CheckpointError: weights that cannot be read, or a model of the hub that cannot be had.
        DataError: a tokenizer or a template that cannot be read.
    """
    opened = _opened(name, device, dtype, chat_template, threads)
    few_row_layers.attach(opened.model, detect_machine(device))  # type: ignore[arg-type]
    return opened


def _opened(name: str, device: str, dtype: Dtype, chat_template: str, threads: int | None) -> OpenModel:
    path = Path(name).expanduser()
    if is_run(name):
        return _open_run(find_run(name), device, dtype, chat_template, threads)
    check_named(name, "config.json", ADAPTER)
    with told_without_settings("another run or model, or copy the folder again", name):
        if (path / ADAPTER).is_file():
            return _open_adapter(path, device, dtype, chat_template, threads)
        found = find_model(name)
        shown = found.name if is_hub_name(name) else found.folder.resolve().name
        return _open_folder(found.folder, shown, device, dtype, chat_template, threads)


def _open_run(run: Path, device: str, dtype: Dtype, template: str, threads: int | None) -> OpenModel:
    opened = reopen(run, device, threads=threads)
    section = opened.recipe.model
    if section.task != "causal_lm":
        raise _not_causal(section, run)
    if dtype == "bf16":
        _cast_params(opened.model, torch.bfloat16)
    limit = opened.recipe.data.seq_len
    files = Path(local_folder(section.path)).expanduser() if section.weights == "load" else None
    if files is not None:
        limit = max(limit, _max_positions(files) or 0)
    chat = _chat(template_folder(opened.recipe, run) or run, opened.tokenizer, template)
    name = run.resolve().name
    return OpenModel(
        name, opened.model, opened.tokenizer, chat, opened.device, limit, opened.recipe, opened.checkpoint, files
    )


def _open_folder(folder: Path, name: str, device: str, dtype: Dtype, template: str, threads: int | None) -> OpenModel:
    machine = detect_machine(device)
    torch.set_num_threads(threads or machine.physical_cores)
    tokenizer = load_tokenizer(folder_tokenizer(str(folder)))
    chosen = _dtype(folder, machine, dtype)
    model: Model
    if kind_of(str(folder)) == "decoder":
        config = read_config(folder)
        check_vocab(config.vocab_size, tokenizer.vocab_size, str(folder))
        decoder = decoder_shapes(config, Kernels.default())
        _cast_params(decoder, chosen)
        materialize(decoder, machine.device)
        load_weights(decoder, folder)
        model = decoder
    else:
        model = load_hf(folder, "causal_lm", "load", device=machine.device, dtype=chosen)
        check_vocab(model.vocab_size, tokenizer.vocab_size, str(folder))
    chat = _chat(folder, tokenizer, template)
    limit = _max_positions(folder)
    return OpenModel(name, model.eval(), tokenizer, chat, torch.device(machine.device), limit, files=folder)


def _open_adapter(folder: Path, device: str, dtype: Dtype, template: str, threads: int | None) -> OpenModel:
    """Open an adapter: the base that it names, with the adapter on it; tokenizer and template are those beside the
    adapter."""
    config = read_json(folder, ADAPTER)
    base, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not isinstance(base, str) or not base:
        raise CheckpointError(
            "Adapter does not name its base model",
            got=f"base_model_name_or_path = {base!r}",
            need="a folder or a model of the hub",
            try_="base_model_name_or_path in adapter_config.json, or the folder of the merged model",
            where=str(folder / ADAPTER),
        )
    if (Path(base).expanduser() / ADAPTER).is_file():  # perhaps of itself
        raise CheckpointError(
            "Adapter on an adapter",
            got=f"base_model_name_or_path = {base!r}, which is the folder of an adapter",
            need="the folder of a whole model, or a model of the hub",
            try_="tilewright merge for the inner adapter, and the merged folder as base",
            where=str(folder / ADAPTER),
        )
    pinned = f"{base}@{revision}" if revision and is_hub_name(base) and not split_name(base)[1] else base
    opened = _opened(pinned, device, dtype, "", threads)
    load_adapter(opened.model, folder, "keep")
    own = (folder / "tokenizer.json").is_file()
    tokenizer = load_tokenizer(folder).stopping_at(opened.tokenizer.stop_ids) if own else opened.tokenizer
    chat = _chat(folder, tokenizer, template) or opened.chat
    name = folder.resolve().name
    files = folder if own else opened.files
    return OpenModel(name, opened.model.eval(), tokenizer, chat, opened.device, opened.max_positions, files=files)


def _chat(folder: Path, tokenizer: Tokenizer, chosen: str) -> ChatTemplate | None:
    with told_without_settings("--chat-template chatml, or --chat-template FILE.jinja", "--chat-template"):
        if not chosen and not folder_templates(folder):
            return None
        return ChatTemplate.load(str(folder), tokenizer, chosen)


def _cast_params(model: Model, dtype: torch.dtype) -> None:
    """Cast the parameters of an opened model: buffers (rotary tables, a router's biases, an FP8 base) stay as they are,
    as transformers keeps them."""
    for param in model.parameters():
        param.data = param.data.to(dtype)


def _dtype(folder: Path, machine: Machine, asked: Dtype) -> torch.dtype:
    if asked != "auto":
        return {"bf16": torch.bfloat16, "fp32": torch.float32}[asked]
    sizes = Counter(tensor.dtype for tensor in scan_folder(folder).values() if len(tensor.shape) > 1)
    short = bool(sizes) and sizes.most_common(1)[0][0] in _SHORT_CODES
    fast = machine.device != "cpu" or machine.cpu_multiplies(torch.bfloat16)
    return torch.bfloat16 if short and fast else torch.float32


def _max_positions(folder: Path) -> int | None:
    values = read_json(folder)
    inner = values.get("text_config")
    for config in (values, inner if isinstance(inner, dict) else {}):
        for key in ("max_position_embeddings", "n_positions"):
            if isinstance(config.get(key), int) and config[key] > 0:
                return config[key]
    return None


def _not_causal(section: ModelSection, run: Path) -> ConfigError:
    return ConfigError(
        "Text generation needs a causal language model",
        got=f'model.task = "{section.task}"',
        need='model.task = "causal_lm"',
        try_="tilewright eval, for its loss",
        where=str(run / "run.toml"),
    )
