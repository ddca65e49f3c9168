"""The run folders of a compression: recipes made from the run's own, trained and resumed by `training.session`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from tilewright.compress.budget.not_finite import stage_named
from tilewright.compress.export.export_source import ExportSource
from tilewright.core.config import setting_names
from tilewright.core.config.conflicts import conflicts
from tilewright.core.config.edit import changed
from tilewright.core.config.load import Loaded
from tilewright.core.config.recipe import Recipe
from tilewright.core.config.sections.distill import DistillSection
from tilewright.core.config.sections.parallel import ParallelSection
from tilewright.core.config.sections.precision import PrecisionRule
from tilewright.core.errors import CheckpointError, ConfigError, Problem
from tilewright.models.base.protocols import Model
from tilewright.models.build import kind_of
from tilewright.models.distill.hidden import pairs_of
from tilewright.training.checkpoint.checkpoint_store import CheckpointStore
from tilewright.training.checkpoint.meta import read_meta
from tilewright.training.session import train

_WARMUP = 0.1
"""Share of a stage's steps in which its rate rises: weights that were trained are not to be shaken."""
ROWS = "teacher"
"""Folder of what the teacher makes of rows of data (`distill.cache`): stages read the same rows, it makes them once."""


class OpenRun(Protocol):
    """Opens a run folder as it is exported."""

    def __call__(self, run: Path, /) -> ExportSource: ...


def write_model(source: ExportSource, model: Model, folder: Path) -> None:
    """Write the folder of a stage's model in the Hugging Face layout, whole or not there.

    Raises:
        CheckpointError: no layout holds the model, or the folder cannot be written.
    """
    if (folder / "config.json").is_file():
        return
    model.save_hf(folder, extra=source.config_keys)


def stage_recipe(
    source: ExportSource, name: str, out: Path, *, folder: Path, taught: bool, steps: int, integers: str = ""
) -> Recipe:
    """The recipe of a stage: the run's own data, precision and optimizer, from the weights of a folder.

    Args:
        source: the run that is compressed.
        name: of the stage.
        out: where run folders of stages are.
        folder: of the model that training begins with.
        taught: learns from the run too, tokens of which are kept in a folder of `out`.
        steps: of training.
        integers: format that weights are rounded to meanwhile, as in precision rules; "": none but the run's own.

    Raises:
        ConfigError: settings of the run do not go with a stage.
    """
    values: dict[str, Any] = {
        "run.name": name,
        "run.dir": str(out.resolve()),
        "model.kind": kind_of(str(folder)),
        "model.path": str(folder.resolve()),
        "model.weights": "load",
        "train.steps": steps,
        "train.minutes": 0.0,
        "train.eval_interval": 0,
        "train.sample_tokens": 0,
        "optim.warmup_steps": max(1, round(_WARMUP * steps)),
        "memory.plan": "auto",
        "log.report": False,
        "log.sinks": (),
        "checkpoint.export_hf": False,
        "checkpoint.resume": "auto",
        "checkpoint.save_last": True,
    }
    if not source.reads_images:
        values["data.tokenizer"] = str((source.run / "tokenizer.json").resolve())
    if integers:
        rule = PrecisionRule.model_validate({"compute": integers})
        values["precision.rules"] = (*source.recipe.precision.rules, rule)
    recipe = changed(source.recipe, values)
    cache = str(out.resolve() / ROWS) if rows_are_kept(source.recipe) else ""
    teacher = {"teacher": str(source.run.resolve()), "cache": cache}
    section = source.recipe.distill.model_copy(update=teacher) if taught else DistillSection()
    recipe = recipe.model_copy(update={"distill": section, "parallel": ParallelSection()})
    problems = [Problem(one.what, one.got, one.need, one.try_, f"stage {name}") for one in conflicts(recipe)]
    if problems:
        raise ConfigError.from_problems(problems)
    return recipe


def rows_are_kept(recipe: Recipe) -> bool:
    """True if what the teacher of a stage's run makes of rows is kept: neither hidden values nor rows that do not come
    again are."""
    return not pairs_of(recipe.distill) and recipe.data.rows == "packed"


def trained_steps(source: ExportSource) -> int:
    """Steps that a stage's run has been trained for, which may be fewer than were asked for; of a model's folder, which
    does not say, those of its recipe."""
    if source.checkpoint == source.run:
        return source.recipe.train.steps
    return read_meta(source.checkpoint)["parts"]["counters"]["step"]


def from_scratch(recipe: Recipe, name: str, steps: int) -> Recipe:
    """The recipe of a stage from scratch: the same shape with random weights, for a number of steps, without a
    teacher."""
    values: Mapping[str, Any] = {"run.name": name, "model.weights": "random", "train.steps": steps}
    return changed(recipe, values).model_copy(update={"distill": DistillSection()})


def run_stage(recipe: Recipe, source: ExportSource) -> Path:
    """Run a stage: train it, or continue it; its folder.

    Raises:
        CheckpointError: it was asked to stop before its last step; the same command continues from there. Or its
            teacher is not what it was.
        NumericsError: its gradients are not finite; the stage is named.
    """
    if recipe.distill.teacher:
        _check_teacher(source)
    sources = dict.fromkeys((item.path for item in setting_names.fields()), f"compress of {source.run.name}")
    folder = Path(recipe.run.dir) / recipe.run.name
    with stage_named(recipe.run.name):
        result = train(Loaded(recipe, sources, recipe.run.name))
    if result.step < recipe.train.steps:
        raise CheckpointError(
            "Stage was stopped before its end",
            got=f"step {result.step} of {recipe.train.steps}",
            need="all steps, so that stages are compared at equal ones",
            try_="the same command, which continues this stage",
            where=str(folder),
        )
    return folder


def _check_teacher(source: ExportSource) -> None:
    """Raise where the run that teaches a stage has a newer checkpoint than when it was opened."""
    if source.checkpoint == source.run:
        return
    store = CheckpointStore(source.run / "checkpoints")
    paths = store.paths()
    newest = paths[-1] if paths and paths[-1].name == source.checkpoint.name else store.newest_sound()[0]
    store.close()
    if newest is None or newest.name != source.checkpoint.name:
        raise CheckpointError(
            "Run was trained further while it was compressed",
            got=f"{newest.name if newest else 'no checkpoint'}; compressed is {source.checkpoint.name}",
            need="one teacher for all stages: the newest checkpoint of the run",
            try_="tilewright compress of a copy of the run folder, or once the run has ended, with a new --out",
            where=str(source.run),
        )
