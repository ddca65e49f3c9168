"""The weights of a run's newest valid checkpoint, into a plain model."""

from pathlib import Path

from tilewright.core.errors import CheckpointError
from tilewright.core.log import say
from tilewright.models.base.protocols import Model
from tilewright.training.checkpoint.state import load_model
from tilewright.training.checkpoint.store import CheckpointStore


def load_newest(run: Path, model: Model) -> Path:
    """The weights of a run's newest valid checkpoint into a model, in place; the checkpoint's path.

    Raises:
        CheckpointError: there is none, or it is of another model.
    """
    checkpoint = _newest(run)
    load_model(checkpoint, model)
    return checkpoint


def _newest(run: Path) -> Path:
    store = CheckpointStore(run / "checkpoints")
    try:
        path, rejected = store.newest_sound()
    finally:
        store.close()
    for rejection in rejected:
        say(f"note: {rejection.path.name} is not used: {rejection.reason}", error=True)
    if path is None:
        raise CheckpointError(
            "No valid checkpoint in the run folder",
            got=f"{len(rejected)} that are truncated or corrupt" if rejected else "none",
            need="one written by train",
            try_=f"tilewright train {run / 'run.toml'}",
            where=str(run / "checkpoints"),
        )
    return path
