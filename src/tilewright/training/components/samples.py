"""What a step of a run was trained on, from the step's number alone: samples, documents, files, bytes and text.

No log of samples is read: which rows a step takes is a function of the seed, the data, the weights of the mixture and
the size of a step; of the last two the newest checkpoint has a log.
"""

from pathlib import Path
from typing import Any

from tilewright.core.config.load import load_recipe
from tilewright.core.config.recipe import Recipe
from tilewright.core.errors import ConfigError
from tilewright.data.batches.stream import Rows, Stream
from tilewright.data.build.finished.open_built import built_at
from tilewright.data.prepare import prepare
from tilewright.training.checkpoint.meta import read_meta


def samples_of_step(run: Path, step: int) -> list[dict[str, Any]]:
    """The samples of a step, counted from 1; see `Stream.explain`.

    Raises:
        CheckpointError: the data is not the one that the run was trained on.
        ConfigError: the run's data has no samples of text, or the run has fewer steps.
    """
    recipe = load_recipe(run / "run.toml", environ={}).recipe
    if step > recipe.train.steps:
        raise ConfigError(
            "Step beyond the run's last", got=f"--step {step}", need=f"1 to {recipe.train.steps}", where=str(run)
        )
    rows = 2 if recipe.data.format == "preferences" else 1  # of one sample
    size = recipe.train.global_batch_size // rows
    prepared = _prepared(recipe)
    with Stream(
        prepared, seed=recipe.run.seed, weights=recipe.data.weights, batch_size=size, micro_batch_size=size, prefetch=0
    ) as stream:
        checkpoints = sorted((run / "checkpoints").glob("step_*/meta.json"))
        if checkpoints:
            stream.load_state_dict(read_meta(checkpoints[-1].parent)["parts"]["stream"])
        return [stream.explain(sample) for sample in stream.samples_of(step - 1)]


def _prepared(recipe: Recipe) -> Rows:
    """The run's data. A built dataset is opened without the model, whose libraries take seconds to load."""
    data = recipe.data
    if not data.sources and built_at(data.source) is not None:
        wanted = {"task": recipe.model.task, "domains": data.domains, "seq_len": data.seq_len}
        wanted["image_size"] = data.image_size
        return prepare(data.source, **wanted, cache_dir=data.cache_dir, own_process=True)
    from tilewright.training.components.dataset import prepare_data

    return prepare_data(recipe)
