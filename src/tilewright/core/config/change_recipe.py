"""A loaded recipe with other settings: values by name, checked again, each with its source; defaults of a machine."""

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ValidationError

from tilewright.core.config import setting_names
from tilewright.core.config.conflicts import conflicts
from tilewright.core.config.load import DEFAULT, Loaded
from tilewright.core.config.recipe import Recipe
from tilewright.core.errors import ConfigError, Problem
from tilewright.core.hardware import Machine

RUN_FILE = "run.toml"
"""Of a run's folder: its resolved recipe."""
CPU_LOSS_CHUNK, GPU_LOSS_CHUNK = 64 * 2**20, 2**30
GPU_SHARE = 64
"""A GPU's loss chunk is at most this part of its memory."""


def loss_chunk_bytes(machine: Machine) -> int:
    """The default bytes of logits that are alive at once, for an edited recipe. 64 MiB: chunks stay in a CPU's caches.
    A GPU has none of that size, and each chunk reads and writes the whole gradient of the head's weight, so chunks are
    few there."""
    return CPU_LOSS_CHUNK if machine.device == "cpu" else min(GPU_LOSS_CHUNK, machine.device_memory_bytes // GPU_SHARE)


def on_machine(loaded: Loaded, machine: Machine) -> Loaded:
    """Fill a recipe with the machine's defaults where it does not set them."""
    name = "memory.loss_chunk_bytes"
    if loaded.sources.get(name, DEFAULT) != DEFAULT:
        return loaded
    return replace(loaded, recipe=changed(loaded.recipe, {name: loss_chunk_bytes(machine)}))


def in_own_folder(loaded: Loaded) -> Loaded:
    """Edit the recipe that is the run.toml of a run's folder to mean that folder, wherever it was moved to and wherever
    the command runs; as it is where a user names another one."""
    file = loaded.path.resolve() if loaded.path is not None else None
    if file is None or file.name != RUN_FILE or not (file.parent / "machine.json").is_file():
        return loaded
    own = {"run.dir": str(file.parent.parent), "run.name": file.parent.name}
    left = {name: value for name, value in own.items() if loaded.sources[name] == f"file {RUN_FILE}"}
    return replace(loaded, recipe=changed(loaded.recipe, left))


def with_settings(loaded: Loaded, settings: Mapping[str, Any], source: str) -> Loaded:
    """Edit a recipe to a plan's settings.

    Args:
        loaded: the recipe.
        settings: values by name, `section.field`.
        source: the plan's name, for `loaded.sources` and for errors.

    Raises:
        ConfigError: they are not allowed together.
    """
    try:
        recipe = Recipe.model_validate(_with_values(loaded.recipe, settings))
    except ValidationError as error:
        raise ConfigError(
            "Plan settings that no recipe has",
            got="; ".join(f"{'.'.join(map(str, row['loc']))}: {row['msg']}" for row in error.errors()),
            need="settings as `tilewright plan --out` writes them",
            try_="tilewright plan RECIPE --out FILE, which makes a plan",
            where=source,
        ) from error
    problems = [Problem(one.what, one.got, one.need, one.try_, source) for one in conflicts(recipe)]
    if problems:
        raise ConfigError.from_problems(problems)
    sources = loaded.sources | {
        name: f"plan {source}" for name, value in settings.items() if value_of(loaded.recipe, name) != value
    }
    return replace(loaded, recipe=recipe, sources=sources)


def changed(recipe: Recipe, settings: Mapping[str, Any]) -> Recipe:
    """Edit settings of a recipe by `section.field`; the caller knows them to be allowed."""
    return _changed(recipe, setting_names.nested(settings))


def _changed(section: Any, values: Mapping[str, Any]) -> Any:
    """Change values of a recipe's section; a mapping is for a section inside it."""
    update = {}
    for name, value in values.items():
        inner = getattr(section, name)
        update[name] = _changed(inner, value) if isinstance(inner, BaseModel) else value
    return section.model_copy(update=update)


def accepted(recipe: Recipe, settings: Mapping[str, Any]) -> Recipe | None:
    """Edit settings of a recipe; None if they are not allowed, alone or together."""
    try:
        found = Recipe.model_validate(_with_values(recipe, settings))
    except ValidationError:
        return None
    return None if conflicts(found) else found


def _with_values(recipe: Recipe, settings: Mapping[str, Any]) -> dict[str, Any]:
    """All values of a recipe to edit, by section, as they are: a dump would take an architecture of the caller's own to
    pieces."""
    known = {item.path: functools.reduce(getattr, item.path.split("."), recipe) for item in setting_names.fields()}
    return setting_names.nested(known | dict(settings))


def value_of(recipe: Recipe, name: str) -> Any:
    """Value of a recipe's setting with this name, `section.field`, to edit."""
    return setting_names.value_at(recipe.model_dump(), name)
