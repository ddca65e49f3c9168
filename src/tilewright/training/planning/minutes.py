"""`train.minutes`: how many steps fit. The number is found once, and from then on the run is one of so many steps.

    a fresh run                the first steps are timed and thrown away (`trial_steps`); the number goes into run.toml
    resumed, the same minutes  the number in run.toml, however fast steps are now
    resumed, other minutes     steps are timed from the checkpoint on, for the time that is left

A run of N steps that were found so is, bit by bit, the run of `train.steps = N`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomlkit

from tilewright.core.config import setting_names
from tilewright.core.config.change_recipe import changed
from tilewright.core.config.load import Loaded, load_recipe
from tilewright.core.config.recipe import Recipe, TrainSection
from tilewright.core.errors import ConfigError
from tilewright.core.units import format_seconds, format_share
from tilewright.training.runlog.signals import SettingChange, recipe_changes

FEWEST = 10
"""Steps of a run, however little time it is given."""
LONG = 1_000_000_000
"""Steps of a run whose end is far away, as which the first steps are timed."""
_STEPS = "train.steps"
LONG_S = 900.0
"""Seconds of a run that its user is told of before it starts."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds of the first steps of a run."""

    step_s: float
    """Seconds of a step."""
    timed: int
    """Steps that this is the middle one of."""
    spent_s: float
    """Seconds of all that was done to time them, compilation included."""
    eval_s: float = 0.0
    """Seconds of an evaluation on the way."""
    waited: float = 0.0
    """Share of them in which the thread that computes on a CPU had no processor; 0 where that is usual."""


@dataclass(frozen=True)
class Length:
    """How long a run is, and why."""

    steps: int
    source: str
    """For run.toml."""
    text: str
    numbers: Mapping[str, Any]


def long_run(train: TrainSection, done: int, step_s: float) -> str:
    """Remark on the minutes of a run that will take long, and the way out; empty where it will not.

    Args:
        train: of the recipe, its steps known. A run that was given in minutes takes what was asked for.
        done: steps.
        step_s: planned seconds of a step.
    """
    left = train.steps - done
    if train.minutes or left * step_s <= LONG_S:
        return ""
    return (
        f"{left:,} steps of about {format_seconds(step_s)} take {format_seconds(left * step_s)} as planned. Ctrl-C "
        f"saves and stops, the same command continues from there; --train.minutes {LONG_S / 60:g} trains for so long"
    )


def is_open(recipe: Recipe) -> bool:
    """True where the number of steps for `train.minutes` is still to be found."""
    return recipe.train.steps == 0


def steps_within(recipe: Recipe, times: StepTimes, *, done: int = 0, elapsed_s: float = 0.0) -> Length:
    """The steps that fit into a recipe's minutes.

    Args:
        recipe: reads `[train]`.
        times: of its steps.
        done: steps that the run has done before.
        elapsed_s: seconds that those took.
    """
    train = recipe.train
    left_s = 60 * train.minutes - elapsed_s - times.spent_s
    each_s = times.step_s + (times.eval_s / train.eval_interval if train.eval_interval else 0.0)
    fit = max(0, int(left_s / each_s))
    steps = done + max(FEWEST, fit)
    source = f"fits into {train.minutes:g} minutes at {times.step_s:.3g} s per step"
    text = f"{steps:,} steps fit into {train.minutes:g} minutes: {format_seconds(times.step_s)} per step, timed over "
    text += f"{times.timed} of them"
    if fit < FEWEST:
        whole = format_seconds(elapsed_s + times.spent_s + FEWEST * each_s)
        source = f"the fewest; {max(0, fit)} fit into {train.minutes:g} minutes at {times.step_s:.3g} s per step"
        text = f"{max(0, fit)} more steps of {format_seconds(times.step_s)} fit into {train.minutes:g} minutes: the "
        text += f"fewest of a run, {FEWEST}, are done, in {whole} altogether"
    if times.waited:
        text += (
            f". For {format_share(times.waited)} of that they waited for other programs, a disk or other ranks. Where "
            "these stop, the run ends early: for more steps start a new one (--run.name) on a quiet machine"
        )
    numbers = {"steps": steps, "minutes": train.minutes, "step_s": times.step_s, "eval_s": times.eval_s}
    numbers |= {"waited": times.waited} if times.waited else {}
    return Length(steps, source, text, numbers | {"timed": times.timed, "spent_s": times.spent_s})


def expected_steps(recipe: Recipe, step_s: float) -> int:
    """Predict the steps of a run in its minutes: those of the recipe, or as many as fit at a planned rate.

    Args:
        recipe: reads `[train]`.
        step_s: planned seconds of a step.
    """
    if not is_open(recipe):
        return recipe.train.steps
    return max(FEWEST, int(60 * recipe.train.minutes / step_s))


def length_in_words(recipe: Recipe, step_s: float) -> str:
    """How many minutes a run will take, as planned.

    Args:
        recipe: reads `[train]`.
        step_s: planned seconds of a step.

    Example:
        >>> from tilewright.core.config.recipe import TrainSection
        >>> length_in_words(Recipe(train=TrainSection(steps=600)), 0.75)
        '600 steps of 750 ms take 7m30s'
        >>> length_in_words(Recipe(train=TrainSection(steps=0, minutes=5)), 0.75)
        'about 400 steps of 750 ms fit into 5 minutes'
    """
    steps, each = expected_steps(recipe, step_s), format_seconds(step_s)
    if is_open(recipe):
        return f"about {steps:,} steps of {each} fit into {recipe.train.minutes:g} minutes"
    return f"{steps:,} steps of {each} take {format_seconds(steps * step_s)}"


def lasting(loaded: Loaded, length: Length) -> Loaded:
    """The recipe for some minutes with so many steps."""
    recipe = changed(loaded.recipe, {_STEPS: length.steps})
    return replace(loaded, recipe=recipe, sources=loaded.sources | {_STEPS: length.source})


def with_known_steps(loaded: Loaded, folder: Path, *, resuming: bool) -> Loaded:
    """The recipe with the steps that its run folder has found for the same minutes; as it is where there are none.

    Args:
        loaded: a recipe.
        folder: of its run.
        resuming: there is a checkpoint. Without one a number that was found for other settings, which decide what a
            step takes, is found again.
    """
    before = _before(folder) if is_open(loaded.recipe) else None
    if before is None or before[0].train.minutes != loaded.recipe.train.minutes or is_open(before[0]):
        return loaded
    found = lasting(loaded, Length(before[0].train.steps, before[1], "", {}))
    return found if resuming or not any(change.numerics for change in _changes(before[0], found.recipe)) else loaded


def with_time_left(loaded: Loaded, done: int, elapsed_s: float) -> Loaded:
    """The recipe for some minutes; where they have passed, with as many steps as are done.

    Args:
        loaded: a recipe.
        done: steps of the checkpoint to continue from.
        elapsed_s: seconds that those took.
    """
    minutes = loaded.recipe.train.minutes
    if not is_open(loaded.recipe) or not done or elapsed_s < 60 * minutes:
        return loaded
    return lasting(loaded, Length(done, f"{minutes:g} minutes have passed", "", {}))


def _changes(before: Recipe, now: Recipe) -> list[SettingChange]:
    return recipe_changes(*(setting_names.flat(recipe.model_dump(mode="json")) for recipe in (before, now)))


def _before(folder: Path) -> tuple[Recipe, str] | None:
    """The recipe for some minutes in a run folder, and where its number of steps came from; None where that cannot be
    read."""
    file = folder / "run.toml"
    if not file.is_file():
        return None
    try:
        recipe = load_recipe(file, environ={}).recipe
    except ConfigError:  # `resume.find` says so
        return None
    steps = tomlkit.parse(file.read_text(encoding="utf-8"))["train"]["steps"]
    return recipe, steps.trivia.comment.removeprefix("# ") or "run.toml"
