"""From a run folder to a run that continues: which checkpoint, what changed in the recipe, what it took.

`open_folder` and `find` look before any model is built; `restore` loads, and says everything that was found.
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path

from tilewright.core.config import setting_names
from tilewright.core.config.load import load_recipe
from tilewright.core.config.recipe import Recipe
from tilewright.core.errors import CheckpointError, ConfigError
from tilewright.core.units import format_seconds
from tilewright.parallel.launch import on_first
from tilewright.parallel.liveness.heartbeat import RankRecord
from tilewright.parallel.world import World
from tilewright.training.assemble import Components
from tilewright.training.checkpoint.checkpoint_meta import read_meta
from tilewright.training.checkpoint.checkpoint_store import CheckpointStore, Rejection
from tilewright.training.runlog.recorder import MetricsLogger
from tilewright.training.runlog.run_folder import RunFolder, move_away
from tilewright.training.runlog.signals import SettingChange, recipe_changes


@dataclass(frozen=True)
class ResumePoint:
    """Contents of a run folder: the checkpoint to continue from, and remarks on it."""

    checkpoint: Path | None
    step: int
    elapsed_s: float
    """Seconds that the run had been going when the checkpoint was taken."""
    rejected: tuple[Rejection, ...]
    unfinished: tuple[Path, ...]
    changes: tuple[SettingChange, ...]
    verify_s: float
    """Seconds that finding and hashing took."""
    had_run: bool
    """A run has written here before."""
    lost: tuple[RankRecord, ...] = ()
    """Ranks that exited without an error record the last time."""

    def at_length(self, recipe: Recipe, spent_s: float) -> "ResumePoint":
        """The point to resume from, once the number of steps is known, after seconds that count as the run's."""
        steps = recipe.train.steps
        changes = (
            change if change.field != "train.steps" else replace(change, now=steps)
            for change in self.changes
            if change.field != "train.steps" or change.before != steps
        )
        return replace(self, changes=tuple(changes), elapsed_s=self.elapsed_s + spent_s)


def open_folder(
    recipe: Recipe,
    name: str,
    world: World = World.alone(),  # noqa: B008 (frozen)
) -> tuple[RunFolder, Path | None]:
    """Open the folder of a run, locked; returns also where `checkpoint.resume = "never"` has moved the run that was in
    it.

    Args:
        recipe: `[run]` says where; `[checkpoint]` whether to continue.
        name: of the folder where the recipe names none.
        world: whose first rank opens it; the others follow.

    Raises:
        ConfigError: the folder cannot be written, or another process trains in it.
    """
    mine: list[RunFolder] = []

    def opened() -> tuple[Path, Path | None]:
        folder, moved_to = _open(recipe, name)
        mine.append(folder)
        return folder.path, moved_to

    path, moved_to = on_first(world, opened, named="the run folder")
    return mine[0] if mine else RunFolder(path, follows=True), moved_to


def _open(recipe: Recipe, name: str) -> tuple[RunFolder, Path | None]:
    path = Path(recipe.run.dir) / (recipe.run.name or name)
    folder = RunFolder(path)
    if recipe.checkpoint.resume != "never" or not folder.has_run():
        return folder, None
    folder.close()
    moved_to = move_away(folder.path)
    return RunFolder(path), moved_to


def find(folder: RunFolder, store: CheckpointStore, recipe: Recipe) -> ResumePoint:
    """Find the newest valid checkpoint of the folder to resume from. Bad newer ones are set aside, unfinished ones
    removed.

    Raises:
        CheckpointError: there are checkpoints and none is sound, or there is none where the recipe requires one.
    """
    started = time.perf_counter()
    unfinished = store.remove_unfinished()
    checkpoint, rejected = store.newest_sound()
    if checkpoint is None and (rejected or recipe.checkpoint.resume == "required"):
        raise _nothing_to_resume(store.folder, rejected)
    for rejection in rejected:
        store.set_aside(rejection)
    step, elapsed_s = _counters(checkpoint) if checkpoint is not None else (0, 0.0)
    return ResumePoint(
        checkpoint,
        step,
        elapsed_s,
        tuple(rejected),
        tuple(unfinished),
        tuple(_changes(folder, recipe) if checkpoint is not None else ()),
        time.perf_counter() - started,
        folder.has_run(),
    )


def restore(found: ResumePoint, parts: Components, recorder: MetricsLogger, log: Path | None = None) -> None:
    """Load the checkpoint to resume from into the parts of a run, and record what was found in its folder.

    Args:
        found: in the folder.
        parts: of the run.
        recorder: of the run.
        log: file that keeps the moves of the stream from now on; None: none does.

    Raises:
        CheckpointError: the checkpoint is of another model, optimizer or data.
    """
    for record in found.lost:
        text = f"rank {record.rank} exited without an error record, in {record.where} ({record.process})"
        recorder.event(found.step, "rank_lost", text, rank=record.rank, lost_step=record.step, phase=record.phase)
    for path in found.unfinished:
        text = f"{path.name} was never finished and is removed"
        recorder.event(found.step, "checkpoint_rejected", text)
    for rejection in found.rejected:
        text = f"{rejection.path.name} cannot be used: {rejection.reason}; set aside, the one before is used"
        recorder.event(found.step, "checkpoint_rejected", text)
    if found.checkpoint is None:
        _keep_log(found.step, parts, recorder, log)
        if found.had_run:
            recorder.event(0, "restart", "no checkpoint: starting at step 1")
        return
    for change in found.changes:
        recorder.event(found.step, "recipe_change", str(change))
    started = time.perf_counter()
    parts.optimizer.init_states()
    state = parts.state()
    kept = state.restore(found.checkpoint)["parts"]
    parts.modes.enter(found.step - 1)
    parts.modes.refresh()  # weights were read in place, which no version counter shows
    load_s = time.perf_counter() - started
    for name in sorted(kept.keys() - state.parts.keys()):
        text = f"the checkpoint's state of `{name}` is not used: this run has none"
        recorder.event(found.step, "recipe_change", text)
    for name in sorted(state.parts.keys() - kept.keys()):
        recorder.event(found.step, "recipe_change", f"`{name}` starts afresh: the checkpoint has no state of it")
    _keep_log(found.step, parts, recorder, log)
    # The checkpoint says what is mixed, not run.toml: a run that was killed before its next checkpoint has written the
    # new weights there.
    if (first := parts.stream.mix_with(parts.setup.recipe.data.weights)) is not None:
        recorder.event(found.step, "recipe_change", f"the new data.weights hold from sample {first} on")
    if any(change.field == "run.seed" for change in found.changes):
        recorder.event(found.step, "recipe_change", "the order of the data stays that of the checkpoint's seed")
    text = (
        f"from step {found.step} ({found.checkpoint.name}); checked in {format_seconds(found.verify_s)}, "
        f"loaded in {format_seconds(load_s)}"
    )
    recorder.event(found.step, "resume", text, verify_s=found.verify_s, load_s=load_s)


def _keep_log(step: int, parts: Components, recorder: MetricsLogger, log: Path | None) -> None:
    """Keep the log of a resumed run's stream in its file, on the first rank; what a user has asked to skip is skipped
    on all."""
    if log is None:
        return
    kept = on_first(parts.setup.world, lambda: parts.stream.keep_log(log), named="the log of the mixture")
    if kept.lost is not None:
        recorder.event(step, "mixture_log", kept.lost)
    for first, stop, why in kept.skips:
        if (left := parts.stream.leave_out(first, stop, why)) is not None:
            text = f"samples {left[0]:,} to {left[1] - 1:,} are left out ({why})"
            recorder.event(step, "skip_samples", text, first=left[0], stop=left[1])


def _counters(checkpoint: Path) -> tuple[int, float]:
    """Steps and seconds of the checkpoint that a run resumes from.

    Raises:
        CheckpointError: it does not say them.
    """
    parts = read_meta(checkpoint).get("parts")
    counters = parts.get("counters") if isinstance(parts, dict) else None
    step, elapsed_s = (counters.get("step"), counters.get("elapsed_s")) if isinstance(counters, dict) else (None, None)
    if type(step) is not int or not isinstance(elapsed_s, (int, float)):
        raise CheckpointError(
            "Checkpoint without the counters of a run",
            got="no steps and seconds in meta.json",
            need="a checkpoint that train wrote",
            try_="remove the folder to use the checkpoint before it",
            where=str(checkpoint),
        )
    return step, elapsed_s


def _changes(folder: RunFolder, recipe: Recipe) -> list[SettingChange]:
    """Changes of a resumed run's recipe from the one that the folder was written with; none where that cannot be read
    any more."""
    try:
        before = load_recipe(folder.recipe, environ={}).recipe
    except ConfigError as error:
        return [SettingChange("run.toml", "a recipe that this version cannot read", str(error).splitlines()[0], True)]
    return recipe_changes(*(setting_names.flat(one.model_dump(mode="json")) for one in (before, recipe)))


def _nothing_to_resume(folder: Path, rejected: list[Rejection]) -> CheckpointError:
    got = "\n".join(f"{rejection.path.name}: {rejection.reason}" for rejection in rejected)
    return CheckpointError(
        "No valid checkpoint to resume from",
        got=got or "no checkpoint",
        need="a checkpoint whose files are what was written",
        try_="--checkpoint.resume never, which starts again and keeps this folder under another name",
        where=str(folder),
    )
