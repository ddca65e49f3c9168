"""`tilewright.train`: a run by one call from Python."""

from collections.abc import Mapping
from pathlib import Path

from tilewright.core.load import load_recipe
from tilewright.training.loop import RunResult
from tilewright.training.loop import train as run_training


def train(recipe: str | Path = "default", settings: Mapping[str, str] | None = None) -> RunResult:
    """Trains as `tilewright train RECIPE --section.field value` does.

    Args:
        recipe: a TOML file or the name of a shipped recipe.
        settings: `{"train.steps": "10"}`.

    Raises:
        TilewrightError: what a user can mend; see its subclasses.
    """
    return run_training(load_recipe(recipe, settings or {}))
