"""The model of a recipe that names one of the hub: downloaded, and named by its revision from then on."""

from dataclasses import replace
from pathlib import Path

from tilewright.core.config.edit import changed
from tilewright.core.config.load import Loaded, load_recipe
from tilewright.core.errors import ConfigError
from tilewright.models.folder.resolve import find_model, is_hub_name, is_pinned, split_name


def pinned(loaded: Loaded, run: Path | None = None, *, weights: bool = True) -> Loaded:
    """A recipe whose model is on this machine, with the hash of its revision in `model.path`.

    Args:
        loaded: a recipe; one that names a folder, or nothing, is returned as it is.
        run: folder of a run. It keeps the revision that it began with, whatever the hub's main branch is now.
        weights: False: the configuration is enough, whatever the recipe does with the weights.

    Raises:
        CheckpointError, HardwareError: see `models.folder.resolve.find_model`.
    """
    section = loaded.recipe.model
    if not is_hub_name(section.path):
        return loaded
    name = _begun_with(run, section.path) if run is not None else section.path
    found = find_model(name, weights=weights and section.weights == "load")
    return replace(loaded, recipe=changed(loaded.recipe, {"model.path": found.name}))


def _begun_with(run: Path, name: str) -> str:
    """The revision of a repository that a run folder names; the name itself where it does not, or names another."""
    file = run / "run.toml"
    if split_name(name)[1] or not file.is_file():
        return name
    try:
        before = load_recipe(file, environ={}).recipe.model.path
    except ConfigError:  # `resume.find` says so
        return name
    return before if is_pinned(before) and split_name(before)[0] == name else name
