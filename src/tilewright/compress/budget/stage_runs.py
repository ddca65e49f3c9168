"""The run folders of a compression: recipes made from the run's own, trained and resumed by `training.session`."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tilewright.compress.budget.compress_record import RUN_FILE, STAGES, Record
from tilewright.compress.budget.compress_settings import DEFAULTS
from tilewright.compress.budget.not_finite import stage_named
from tilewright.compress.export.export_source import ExportSource
from tilewright.compress.export.publish import publish
from tilewright.compress.exports_file import read_exports, write_exports
from tilewright.compress.prune.unit_kinds import Kind
from tilewright.core.config import setting_names
from tilewright.core.config.change_recipe import changed
from tilewright.core.config.conflicts import conflicts
from tilewright.core.config.load import Loaded, load_recipe, write_run_toml
from tilewright.core.config.recipe import Recipe
from tilewright.core.config.sections.distill import DistillSection
from tilewright.core.config.sections.parallel import ParallelSection
from tilewright.core.config.sections.precision import PrecisionRule
from tilewright.core.errors import CheckpointError, ConfigError, Problem
from tilewright.models.base.protocols import Model
from tilewright.models.build import kind_of
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.distill.hidden import TARGET_NAMES, pairs_of
from tilewright.training.checkpoint.checkpoint_meta import read_meta
from tilewright.training.checkpoint.checkpoint_store import CheckpointStore
from tilewright.training.components.export import write_beside
from tilewright.training.session import train

_WARMUP = 0.1
"""Share of a stage's steps in which its rate rises: weights that were trained are not to be shaken."""
ROWS = "teacher"
"""Folder of what the teacher makes of rows of data (`distill.cache`): stages read the same rows, it makes them once."""


class OpenRun(Protocol):
    """Opens a run folder as it is exported."""

    def __call__(self, run: Path, /) -> ExportSource: ...


def check_source(source: ExportSource, kinds: Sequence[Kind]) -> None:
    """Check that a run can be compressed in stages, before anything is measured.

    Args:
        source: the run or model.
        kinds: of unit that may be cut.

    Raises:
        ConfigError: it is of a kind that is not compressed, or its settings do not go with such cuts.
    """
    recipe, config = source.recipe, source.model.config
    # 1. The shape. A cut takes as much of each layer, so that layers must be alike.
    if isinstance(config, DecoderConfig) and config.layers:
        raise ConfigError(
            "Layers of their own shapes are not cut",
            got=f"{len(config.layers)} layers of {len(set(config.layers))} shapes (model.layers)",
            need="a decoder whose layers are alike, or a Hugging Face model: a cut takes as much of each layer",
            try_="tilewright search, which finds a smaller shape for each layer",
            where=str(source.run),
        )
    # 2. The teacher. Distillation by layers pairs layers of both models by their numbers.
    taught = [name for name in TARGET_NAMES if getattr(recipe.distill, name)]
    if taught and "layers" in kinds:
        raise ConfigError(
            "Recovery cannot learn by layers where layers are cut",
            got=f"{' and '.join(f'distill.{name}' for name in taught)}, and layers among the units of --cut",
            need="pairs of layers that are there whatever is cut: of fewer layers none keeps its number",
            try_=f"--cut ffn,heads, or {' '.join(f'--distill.{name}={{}}' for name in taught)}",
            where="--cut",
        )
    # 3. The kind of run: stages recover the loss of these tasks only, with whole weights.
    if recipe.model.task in DEFAULTS and not recipe.lora.rank and recipe.data.format != "preferences":
        return
    raise ConfigError(
        "Runs of this kind are not compressed",
        got=f'model.task = "{recipe.model.task}", lora.rank = {recipe.lora.rank}, data.format = "{recipe.data.format}"',
        need="a causal language model without adapters, on text or conversations, or an image classifier",
        try_=f"with adapters: tilewright merge {source.run} --out FOLDER, then tilewright compress FOLDER "
        f"--data.source {recipe.data.source} --data.format {recipe.data.format}",
        where=str(source.run),
    )


def write_model(source: ExportSource, model: Model, folder: Path, save: Callable[[Path], None] | None = None) -> None:
    """Write the folder of a stage's model in the Hugging Face layout, whole or not there: with the run's tokenizer,
    chat template and what ends an answer, which conversations of the stage are made with.

    Args:
        source: the run or model that is compressed.
        model: what became of it.
        folder: of both.
        save: writes weights and shape; None: as the model does.

    Raises:
        CheckpointError: no layout holds the model, or the folder cannot be written.
        DataError: files beside the loaded weights of the run that cannot be read.
    """
    if (folder / "config.json").is_file():
        return

    def write(partial: Path) -> None:
        model.save_hf(partial, extra=source.config_keys) if save is None else save(partial)
        if not source.reads_images:
            write_beside(source.recipe, source.run, model, source.text_rules, partial)

    publish(folder, write)


def stage_recipe(
    source: ExportSource, name: str, out: Path, *, folder: Path, taught: bool, steps: int, integers: str = ""
) -> Recipe:
    """Make the recipe of a stage: the run's own data, precision and optimizer, from the weights of a folder.

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
    # 1. What makes the run a stage: another model and length; the compression reports, not the stage.
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
        values["data.tokenizer"] = _tokenizer_of(source)
    if integers:
        rule = PrecisionRule.model_validate({"compute": integers})
        values["precision.rules"] = (*source.recipe.precision.rules, rule)
    recipe = changed(source.recipe, values)
    # 2. The teacher: the source. Its answers are kept where all stages read the same rows.
    cache = str(out.resolve() / ROWS) if rows_are_kept(source.recipe) else ""
    teacher = {"teacher": str(source.run.resolve()), "cache": cache}
    section = source.recipe.distill.model_copy(update=teacher) if taught else DistillSection()
    # 3. One process, however many trained the source; what the source's settings then contradict is the stage's
    # error.
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
    """Make the recipe of a control that trains the same shape from random weights for some steps, without a teacher."""
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
    folder = Path(recipe.run.dir) / recipe.run.name
    with stage_named(recipe.run.name):
        result = train(_loaded(recipe, source))
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
    try:
        paths = store.paths()
        newest = paths[-1] if paths and paths[-1].name == source.checkpoint.name else store.newest_sound()[0]
    finally:
        store.close()
    if newest is None or newest.name != source.checkpoint.name:
        raise CheckpointError(
            "Run was trained further while it was compressed",
            got=f"{newest.name if newest else 'no checkpoint'}; compressed is {source.checkpoint.name}",
            need="one teacher for all stages: the newest checkpoint of the run",
            try_="tilewright compress of a copy of the run folder, or once the run has ended, with a new --out",
            where=str(source.run),
        )


def _loaded(recipe: Recipe, source: ExportSource) -> Loaded:
    sources = dict.fromkeys((item.path for item in setting_names.fields()), f"compress of {source.run.name}")
    return Loaded(recipe, sources, recipe.run.name)


def follow_moves(source: ExportSource, out: Path, record: Record) -> None:
    """Follow moves of a run, its data or its stages: settings of each stage and paths of artefacts that name an old
    place are changed. A copy of a folder of stages is independent of the first.

    Args:
        source: the run or model.
        out: folder of the stages.
        record: of the stages.

    Raises:
        CheckpointError: a file of a stage cannot be written.
    """
    home = out.resolve()
    for row in record.get("artefacts", ()):
        if row["path"]:
            row["path"] = str(home / STAGES[1] / Path(row["path"]).name)
    for file in sorted(out.glob(f"*/{RUN_FILE}")):
        try:
            recipe = load_recipe(file, environ={}).recipe
        except ConfigError:  # cut short by a kill, in an earlier version: training writes it again
            continue
        if file.parent.is_symlink():
            continue
        old, exports = Path(recipe.run.dir), read_exports(file.parent)
        now = changed(recipe, _places(recipe, source, old, home))
        if now == recipe:
            continue
        try:
            if exports is not None:
                for row in exports["artefacts"]:
                    row["path"] = row["path"] and _moved(row["path"], old, home)
                write_exports(file.parent, exports)
            write_run_toml(_loaded(now, source), file)
        except OSError as error:
            raise CheckpointError(
                "Stage that was moved cannot be continued",
                got=str(error),
                need="room on the disk, and the right to write in its folder: it names where it was before",
                try_="free space, and the same command again",
                where=str(file.parent),
            ) from error


def _places(recipe: Recipe, source: ExportSource, old: Path, new: Path) -> dict[str, Any]:
    """Settings of a stage that name places, as they are now."""
    values: dict[str, Any] = {
        "run.dir": str(new),
        "model.path": _moved(recipe.model.path, old, new),
        "data.source": source.recipe.data.source,
        "data.eval_source": source.recipe.data.eval_source,
        "data.cache_dir": source.recipe.data.cache_dir,
    }
    if recipe.distill.teacher:
        values |= {
            "distill.teacher": str(source.run.resolve()),
            "distill.cache": _moved(recipe.distill.cache, old, new),
        }
    return values | ({} if source.reads_images else {"data.tokenizer": _tokenizer_of(source)})


def _tokenizer_of(source: ExportSource) -> str:
    return str((source.run / "tokenizer.json").resolve())


def _moved(path: str, old: Path, new: Path) -> str:
    return str(new / Path(path).relative_to(old)) if path and Path(path).is_relative_to(old) else path
