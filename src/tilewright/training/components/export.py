"""The Hugging Face folder that a run leaves at its end: the model and its tokenizer, or adapters alone.

A Hugging Face model keeps its own config.json. tilewright's own decoder has no such file, so the run fills in what
belongs to the data: length of rows and ids of the tokenizer."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tilewright.core.config.recipe import Recipe
from tilewright.core.errors import CheckpointError, DataError, Problem
from tilewright.core.units import format_bytes, format_share
from tilewright.data.common.tokenizer import Tokenizer
from tilewright.data.common.tokenizer_folder import GENERATION, write_stops
from tilewright.formats.fp8_layout import CODE_DTYPE
from tilewright.models.base.protocols import Model
from tilewright.models.folder.find_model import local_folder
from tilewright.models.folder.fp8_weights import fp8_bytes
from tilewright.models.folder.json_file import read_json
from tilewright.parallel.agree import from_first
from tilewright.parallel.communicate.whole_tensors import WholeTensors
from tilewright.parallel.shard import in_parts
from tilewright.precision.lora.peft_io import save_adapter
from tilewright.training.checkpoint.checkpoint_state import TrainState
from tilewright.training.components.model import meta_like
from tilewright.training.components.tokenizer_files import TextRules, write_tokenizer
from tilewright.training.executor.summon_tensors import Live

EXPORT_DTYPES: Mapping[str, torch.dtype | None] = {"keep": None, "bf16": torch.bfloat16, "fp8": CODE_DTYPE}
"""`checkpoint.export_format` -> what the weights are cast to."""


def check_export(recipe: Recipe, model: Model) -> None:
    """Check before training that the export at the end would not be refused.

    Args:
        recipe: of the run.
        model: may be on the meta device.

    Raises:
        CheckpointError: no layout of a folder holds the model, nothing of it can be stored in FP8, or transformers
            could not read the folder again.
    """
    if recipe.checkpoint.export_hf and not recipe.lora.rank:
        model.check_save_hf(EXPORT_DTYPES[recipe.checkpoint.export_format] or torch.bfloat16)


def export(recipe: Recipe, model: Model, state: TrainState, tokenizer: Tokenizer | None, target: Path) -> str:
    """Export the model's folder, in that of the run; what was written, in words. On several ranks all call this, and
    the first one writes: a tensor in shards is whole when it is its turn, and one that only other ranks have is sent by
    them.

    Raises:
        CheckpointError: the folder cannot be written; on all ranks.
        DataError: on one process, files beside the loaded weights that cannot be read; on several a CheckpointError.
    """
    group = state.world.everyone.handle
    whole = WholeTensors(group, model.state_dict(keep_vars=True))
    written: tuple[str, tuple[Problem, ...]] = "", ()
    with whole.serving():
        if state.world.is_first:
            try:
                rules = None if tokenizer is None else TextRules.of(recipe, target.parent, tokenizer)
                written = _write(recipe, model, state, whole, (tokenizer, rules), target), ()
                if rules is not None:
                    write_beside(recipe, target.parent, model, rules, target)
            except (CheckpointError, DataError) as error:
                if group is None:
                    raise
                written = "", error.problems
    text, problems = from_first(group, written)
    if problems:
        raise CheckpointError.from_problems(problems)
    return text


def _write(
    recipe: Recipe,
    model: Model,
    state: TrainState,
    whole: WholeTensors,
    words: tuple[Tokenizer | None, TextRules | None],
    target: Path,
) -> str:
    if whole.elsewhere:
        model = _with_all_layers(recipe, model, whole)
    in_shards = bool(whole.elsewhere) or in_parts(model)
    live: Live | None = (lambda name, _: whole.tensor(name)) if in_shards else None
    if recipe.lora.rank:
        save_adapter(model, target, base_model=recipe.model.path, live=live)
        return f"adapter in {target}"
    dtype = EXPORT_DTYPES[recipe.checkpoint.export_format]
    with state.access.summon(model) as summoned:
        if (of_model := summoned.live) is not None:
            live = lambda name, tensor: of_model(f"model.{name}", tensor)  # noqa: E731
        model.save_hf(target, dtype=dtype, extra=config_keys(recipe, *words), live=live)
    text = f"Hugging Face folder in {target}"
    if dtype == CODE_DTYPE:
        in_fp8, total = fp8_bytes(target)
        text += f", {format_bytes(in_fp8)} of {format_bytes(total)} in FP8 ({format_share(in_fp8 / total)})"
    return text


def _with_all_layers(recipe: Recipe, model: Model, whole: WholeTensors) -> Model:
    """The model to export with all layers, as one process would have it, without memory; this rank has some of its
    layers.

    Raises:
        CheckpointError: it cannot be made from its configuration alone.
    """
    held = {**whole.elsewhere, **model.state_dict(keep_vars=True)}
    made = meta_like(recipe, model)
    if made is None or made.state_dict().keys() != held.keys():
        raise CheckpointError(
            "Export of a model whose ranks hold different layers",
            got=f"{type(model).__name__}, {len(whole.elsewhere)} of {len(held)} tensors on other ranks alone",
            need="a model that its configuration makes, or a first rank that has a part of each tensor",
            try_="checkpoint.export_hf = false here, and the export by one process that resumes from the checkpoint",
        )
    for name, param in made.named_parameters():
        param.data = param.data.to(held[name].dtype)
    return made


def write_beside(recipe: Recipe, run: Path, model: Model, rules: TextRules, target: Path) -> None:
    """Write tokenizer and chat template into a run's model folder, and the settings to generate with: the loaded
    model's own, and what ends an answer.

    Raises:
        OSError: a file cannot be written.
        DataError: files beside the loaded weights that cannot be read.
    """
    base = Path(local_folder(recipe.model.path)) if recipe.model.weights == "load" else None
    if base is not None and (base / GENERATION).is_file() and not (target / GENERATION).exists():
        shutil.copyfile(base / GENERATION, target / GENERATION)
    if recipe.model.task == "causal_lm":
        write_stops(target, rules.stops, {"bos_token_id": rules.begin[0]} if rules.begin else {})
    write_tokenizer(recipe, run, rules, max_positions(recipe, model), target)


def max_positions(recipe: Recipe, model: Model) -> int:
    """The most tokens of a text that an exported model is for, by its folder's config.json."""
    return model.max_positions or max(recipe.data.seq_len, _loaded_positions(recipe))


def _loaded_positions(recipe: Recipe) -> int:
    if recipe.model.weights != "load":
        return 0
    return read_json(local_folder(recipe.model.path)).get("max_position_embeddings") or 0


def config_keys(recipe: Recipe, tokenizer: Tokenizer | None, rules: TextRules | None) -> dict[str, Any]:
    """Entries that the run adds to config.json of its export. Loaded weights keep the ids of their folder, and at least
    its length; what the run taught to end an answer takes the place of another end."""
    taught = {} if rules is None or rules.taught is None else {"eos_token_id": rules.taught}
    if recipe.model.kind == "hf" or tokenizer is None:
        return taught
    keys = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    if recipe.model.weights == "load":
        before = read_json(local_folder(recipe.model.path))
        keys |= {key: before[key] for key in keys if key in before}
    return keys | taught | {"max_position_embeddings": max(recipe.data.seq_len, _loaded_positions(recipe))}
