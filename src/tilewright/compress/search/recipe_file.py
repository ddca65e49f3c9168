"""A shape as a recipe that trains it from scratch, with the run's data, precision and optimizer."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tomlkit

from tilewright.core.config import setting_names
from tilewright.core.config.recipe import Recipe
from tilewright.core.config.toml import NONE, inline
from tilewright.models.decoder.config import DecoderConfig

_LEFT = ("run", "model", "distill", "parallel", "checkpoint", "lora")
"""Sections that are not the run's: its place, its shape, and how it was taught and shared."""


def recipe_text(recipe: Recipe, config: DecoderConfig, intro: Sequence[str]) -> str:
    """The recipe file of a searched shape, as TOML.

    Args:
        recipe: of the run.
        config: the shape.
        intro: lines of its comment.

    Raises:
        ConfigError: no recipe describes the shape.
    """
    lines = [f"# {line}".rstrip() for line in intro]
    values = config.section_values()
    layers = values.pop("layers", [])
    usual = {item.path: item.info.default for item in setting_names.fields()}
    own = {name: value for name, value in values.items() if value != usual[f"model.{name}"]}
    lines += ["", "[model]", *_assigned({"kind": "decoder"} | own)]
    for entry in layers:
        lines += ["", "[[model.layers]]", *_assigned(entry)]
    for section, settings in _kept(recipe, usual).items():
        lines += ["", f"[{section}]", *_assigned(settings)]
    return "\n".join(lines) + "\n"


def _assigned(values: Mapping[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        yield f"{name} = {tomlkit.item(inline(NONE if value is None else value)).as_string()}"


def _kept(recipe: Recipe, usual: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Settings of the run for a recipe file that decide what is computed, and differ from those of no recipe, by
    section."""
    found: dict[str, dict[str, Any]] = {}
    for path, value in setting_names.flat(recipe.model_dump(mode="json")).items():
        section, _, name = path.rpartition(".")
        if section.partition(".")[0] not in _LEFT and setting_names.changes_numbers(path):
            default = usual[path]
            if value != (list(default) if isinstance(default, tuple) else default):
                found.setdefault(section, {})[name] = value
    return found
