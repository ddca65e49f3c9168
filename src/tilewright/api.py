"""The two calls of a Python user that are more than a name of another module: `tilewright.convert` and `.train`."""

from collections.abc import Mapping
from pathlib import Path

from torch import nn

from tilewright.core.load import load_recipe
from tilewright.precision import convert as conversion
from tilewright.precision.policy import Policy
from tilewright.training.loop import RunResult
from tilewright.training.loop import train as run_training


def convert(model: nn.Module, policy: Policy | str = "bf16_mixed") -> nn.Module:
    """Makes a model compute as a policy says, in place, and returns it.

    Parameters, names and state_dict stay what they were, so optimizers and checkpoints keep working. What was
    changed, what was not and why is in `model.precision_report`.

    Args:
        model: any module.
        policy: a policy or the name of a mode: fp32, tf32, bf16_mixed, hybrid, pure_fp16.

    Raises:
        ConfigError: a policy that cannot be.

    Example:
        >>> model = convert(nn.Linear(4, 8), "bf16_mixed")
        >>> model.precision_report.rows[0].compute
        'bf16'
    """
    conversion.convert(model, policy)
    return model


def train(recipe: str | Path = "default", settings: Mapping[str, str] | None = None) -> RunResult:
    """Trains as `tilewright train RECIPE --section.field value` does.

    Args:
        recipe: a TOML file or the name of a shipped recipe.
        settings: `{"train.steps": "10"}`.

    Raises:
        TilewrightError: what a user can mend; see its subclasses.
    """
    return run_training(load_recipe(recipe, settings or {}))
