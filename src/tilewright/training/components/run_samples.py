"""The stream of a run, and what a step of it was trained on, from the step's number alone: samples, documents, files,
bytes and text.

No log of samples is read: which rows a step takes is a function of the seed, the data, the weights of the mixture and
the size of a step; of the last two the run folder has a log (`data.batches.state.move_log`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tilewright.core.config.load import load_recipe
from tilewright.core.config.recipe import Recipe
from tilewright.core.errors import CheckpointError, ConfigError
from tilewright.data.batches.state.move_log import FILE as LOG
from tilewright.data.batches.state.move_log import MoveLog
from tilewright.data.batches.state.stream_state import asked_skips
from tilewright.data.batches.step_samples import Rows
from tilewright.data.batches.stream import Stream
from tilewright.data.dataset.open_built import built_at
from tilewright.data.prepare import prepare
from tilewright.parallel.pipeline.assignment import any_count
from tilewright.parallel.pipeline.stage_split import Pipeline
from tilewright.training.checkpoint.checkpoint_meta import META, checkpoints_in, read_meta, step_of
from tilewright.training.runlog.run_folder import RunFolder


def stream_of(recipe: Recipe, prepared: Rows, *, rank: int, world: int, prefetch: int | None = None) -> Stream:
    """The stream of a run's samples as batches, of several ranks this one's part of them.

    Args:
        recipe: reads `[data]`, `[train]` and `[parallel]`.
        prepared: the data.
        rank, world: of those that read different rows.
        prefetch: steps made ahead; None: the recipe's number.
    """
    batch, micro_batch = step_size(recipe)
    return Stream(
        prepared,
        seed=recipe.run.seed,
        weights=recipe.data.weights,
        batch_size=batch,
        micro_batch_size=micro_batch,
        prefetch=recipe.data.prefetch if prefetch is None else prefetch,
        rank=rank,
        world=world,
        documents=recipe.data.rows == "documents",
        takes=Pipeline.of(recipe.parallel).takes if recipe.parallel.pp > 1 else any_count,
    )


def step_size(recipe: Recipe) -> tuple[int, int]:
    """Count the samples of a step and of a micro-batch: rows, pairs of rows, or tokens of documents.

    Example:
        >>> from tilewright.core.config.recipe import DataSection, TrainSection
        >>> train = TrainSection(global_batch_size=16, micro_batch_size=4)
        >>> step_size(Recipe(train=train, data=DataSection(rows="documents", seq_len=100)))
        (1600, 400)
    """
    train, data = recipe.train, recipe.data
    if data.rows == "documents":
        return train.global_batch_size * data.seq_len, train.micro_batch_size * data.seq_len
    rows = 2 if data.format == "preferences" else 1  # of one sample
    return train.global_batch_size // rows, max(1, train.micro_batch_size // rows)


def longest_document(recipe: Recipe) -> int | None:
    """Tokens of the longest document among a run's samples, where micro-batches are of documents behind each other,
    else None."""
    return recipe.data.seq_len if recipe.data.rows == "documents" else None


def step_line(recipe: Recipe) -> str:
    """A step's samples in words.

    Example:
        >>> step_line(Recipe())
        '16 rows'
    """
    if recipe.data.rows == "documents":
        return f"at most {step_size(recipe)[0]:,} tokens of whole documents"
    return f"{recipe.train.global_batch_size} rows"


def samples_of_step(run: Path, step: int) -> list[dict[str, Any]]:
    """The samples of a run's step, counted from 1; see `Stream.explain`.

    Raises:
        CheckpointError: the data is not the one that the run was trained on.
        ConfigError: the run's data has no samples of text, or the run has fewer steps.
    """
    recipe = load_recipe(run / "run.toml", environ={}).recipe
    if step > recipe.train.steps:
        raise ConfigError(
            "Step beyond the run's last", got=f"--step {step}", need=f"1 to {recipe.train.steps}", where=str(run)
        )
    with _reading(run, recipe) as (stream, _):
        return [stream.explain(sample) for sample in stream.samples_of(step - 1)]


def left_out(run: Path) -> list[tuple[int, int, str]]:
    """Samples of a run that its log leaves out, or is asked to: first, one behind the last, and why."""
    return sorted(set(asked_skips(MoveLog().read_in(run / LOG, None)))) if (run / LOG).exists() else []


def skip_steps(run: Path, first: int, last: int) -> tuple[int, int]:
    """Skip the samples of some steps of a run, from its newest checkpoint on; first and one behind the last.

    Args:
        run: a folder in which no run is under way.
        first, last: steps, counted from 1, as the run took them.

    Raises:
        CheckpointError: the newest checkpoint was written behind the first of these steps.
        ConfigError: no such steps, or a run is under way.
        DataError: the log is not the run's, or cannot be written.
    """
    recipe = load_recipe(run / "run.toml", environ={}).recipe
    if not 1 <= first <= last <= recipe.train.steps:
        raise ConfigError(
            "Steps to skip are not steps of the run",
            got=f"--steps {first}:{last}",
            need=f"first:last, both from 1 to {recipe.train.steps}",
            where=str(run),
        )
    with RunFolder(run), _reading(run, recipe) as (stream, done):
        if done >= first:
            behind = [path for path in checkpoints_in(run / "checkpoints") if (step_of(path) or 0) >= first]
            raise CheckpointError(
                "Steps to skip are behind the newest checkpoint",
                got=f"a checkpoint of step {done}, which was trained on step {first}",
                need=f"a newest checkpoint of a step before {first}",
                try_=f"rm -r {' '.join(str(path) for path in behind)}   (the run resumes from the one before)",
                where=str(run),
            )
        start, stop = stream.samples_of(first - 1)[0], stream.samples_of(last - 1)[-1] + 1
        why = f"steps {first} to {last}, by data skip"
        MoveLog.ask(run / LOG, {"kind": "skip", "samples": [start, stop], "step": done, "why": why})
    return start, stop


@contextmanager
def _reading(run: Path, recipe: Recipe) -> Iterator[tuple[Stream, int]]:
    """The run's stream of samples with its log, and the steps of its newest checkpoint."""
    with stream_of(recipe, _prepared(recipe), rank=0, world=1, prefetch=0) as stream:
        checkpoints = [path for path in checkpoints_in(run / "checkpoints") if (path / META).exists()]
        state = read_meta(checkpoints[-1])["parts"]["stream"] if checkpoints else None
        if state is not None:
            stream.load_state_dict(state)
        if (run / LOG).exists():
            stream.read_log(run / LOG, None if state is None or "log" not in state else tuple(state["log"]))
        yield stream, 0 if state is None else stream.state_dict()["step"]


def _prepared(recipe: Recipe) -> Rows:
    """The run's data, to tell its samples. A built dataset is opened without the model, whose libraries take seconds to
    load."""
    data = recipe.data
    if not data.sources and built_at(data.source) is not None:
        wanted = {"task": recipe.model.task, "domains": data.domains, "seq_len": data.seq_len, "rows": data.rows}
        wanted |= {"image_size": data.image_size, "format": data.format}
        return prepare(data.source, **wanted, cache_dir=data.cache_dir, own_process=True)
    from tilewright.training.components.recipe_data import prepare_data

    return prepare_data(recipe)
