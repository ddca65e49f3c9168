"""The recipe of a fine-tune: a shipped one with the user's model and data, and the steps of some passes over the data.

Whatever the user types as `--section.field` comes last. Run folders keep the result as run.toml, so that
`tilewright train RUN/run.toml` does the same.
"""

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tilewright.core.config.change_recipe import changed
from tilewright.core.config.load import CLI, Loaded, load_recipe
from tilewright.core.errors import ConfigError
from tilewright.data.chat.chat_rows import PREFERENCES
from tilewright.data.corpus.chat import first_shape
from tilewright.data.dataset.prepared_text import PreparedData
from tilewright.models.build import kind_of
from tilewright.models.folder.find_model import local_folder, split_name
from tilewright.training.components.model import pinned

HOWS = ("lora", "lora_fp8", "full")
_FEWEST_STEPS = 10
"""Of a pass over the data, where the batch is ours to choose: with fewer, little data would be a step or two."""


def tuned_recipe(
    model: str, data: Sequence[str], how: str, typed: Sequence[str], *, weights: bool = True
) -> tuple[Loaded, list[str]]:
    """The recipe of a fine-tune, its model found and pinned, and the settings that are no default of it, as typed.

    Args:
        model: a folder, or a hub's name.
        data: files or folders of conversations; more than one are domains of a mixture. None: the recipe's.
        how: of `HOWS`.
        typed: settings as on a command line.
        weights: False: the model's configuration is enough.

    Raises:
        CheckpointError: the model cannot be had.
        ConfigError: settings that are not right.
    """
    settings = [f"--model.path={model}", f"--run.name={_run_name(model, how)}", *_sources(data)]
    loaded = load_recipe(f"sft_{how}", [*settings, *typed])
    recipe = pinned(loaded, Path(loaded.recipe.run.dir) / loaded.recipe.run.name, weights=weights).recipe
    settings += [f"--model.path={recipe.model.path}", f"--model.kind={kind_of(local_folder(recipe.model.path))}"]
    return load_recipe(f"sft_{how}", [*settings, *typed]), settings


def check_shapes(model: str, data: Sequence[str], how: str, typed: Sequence[str]) -> None:
    """Check shapes for the recipe of a fine-tune: that data are conversations. Pairs of preferences are learned by
    another recipe, whose command is named.

    Args:
        model, data, how, typed: as in `tuned_recipe`.

    Raises:
        ConfigError: the first row of a file is a pair.
        DataError: a path does not exist.
    """
    pairs = next((path for path in data if first_shape(path) == PREFERENCES), None)
    if pairs is None or any(setting.startswith("--data.format") for setting in typed):
        return
    whole = ["--lora.rank", "0", "--optim.lr", "2e-6"] if how == "full" else []
    named = [part for setting in _sources(data) for part in setting.split("=", 1)]
    command = ["tilewright", "train", "dpo", "--model.path", model, *named, *whole, *typed]
    raise ConfigError(
        "Data are preferences, which fine-tuning on conversations does not learn",
        got=f"rows with chosen and rejected in {pairs}",
        need="conversations; preferences are learned by direct preference optimization",
        try_=shlex.join(command),
        where="DATA",
    )


def with_passes(loaded: Loaded, prepared: PreparedData, passes: float) -> Loaded:
    """The recipe of a fine-tune with the steps of some passes over the data, a batch that leaves room for steps, and a
    warm-up of a tenth of them at most; what the user sets stays, a time instead of steps too."""
    rows = prepared.full_rows
    train, changes = loaded.recipe.train, {}
    batch = train.global_batch_size
    if not _is_set(loaded, "train.global_batch_size"):
        batch = max(1, min(batch, rows // _FEWEST_STEPS))
        changes["train.global_batch_size"] = batch
    if train.micro_batch_size > batch and not _is_set(loaded, "train.micro_batch_size"):
        changes["train.micro_batch_size"] = batch
    if not _is_set(loaded, "train.steps") and not train.minutes:
        changes["train.steps"] = max(1, -(-round(passes * rows) // batch))
        if not _is_set(loaded, "optim.warmup_steps"):
            changes["optim.warmup_steps"] = min(loaded.recipe.optim.warmup_steps, changes["train.steps"] // 10)
    source = f"{passes:g} passes over {rows} rows"
    sources = loaded.sources | dict.fromkeys(changes, source)
    return replace(loaded, recipe=changed(loaded.recipe, changes), sources=sources)


def _is_set(loaded: Loaded, name: str) -> bool:
    return loaded.sources[name].startswith((CLI, "env"))


def _run_name(model: str, how: str) -> str:
    """Make the run's folder name for a fine-tune."""
    stem = Path(split_name(model)[0]).expanduser().resolve().name if model else "model"
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', stem).strip('.-') or 'model'}-{how}"


def _sources(data: Sequence[str]) -> list[str]:
    """Settings that name the data of a fine-tune. Domains are named like their files, and numbered where two files have
    one name."""
    if len(data) < 2:
        return [f"--data.source={path}" for path in data]
    named: dict[str, str] = {}
    for path in data:
        stem = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(path).name.partition(".")[0]) or "data"
        name, number = stem, 1
        while name in named:
            number += 1
            name = f"{stem}-{number}"
        named[name] = path
    return ["--data.sources={" + ", ".join(f"{name} = {json.dumps(path)}" for name, path in named.items()) + "}"]
