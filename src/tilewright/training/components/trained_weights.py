"""The weights of a run's newest valid checkpoint, into a plain model."""

from pathlib import Path

import torch

from tilewright.core.errors import CheckpointError
from tilewright.core.log import say
from tilewright.models.base.protocols import Model
from tilewright.training.checkpoint.state import raise_on_difference
from tilewright.training.checkpoint.store import CheckpointStore, read_tensors, stored_tensors

_MODEL = "model."


def load_newest(run: Path, model: Model) -> Path:
    """The weights of a run's newest valid checkpoint into a model, in place; the checkpoint's path.

    Raises:
        CheckpointError: there is none, or it is of another model.
    """
    checkpoint = _newest(run)
    _load(model, checkpoint)
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


def _load(model: Model, checkpoint: Path) -> None:
    """Weights into the model in place; tied ones are stored once, under their first name."""
    targets, seen = {}, set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        key = (tensor.data_ptr(), tensor.shape) if tensor.numel() else name
        if key not in seen:
            seen.add(key)
            targets[_MODEL + name] = tensor.detach()
    there = {name: shape for name, (_, shape) in stored_tensors(checkpoint).items() if name.startswith(_MODEL)}
    here = {name: tuple(tensor.shape) for name, tensor in targets.items()}
    raise_on_difference(f"{checkpoint} is a checkpoint of another model.", _MODEL, here, there)
    with torch.no_grad():
        read_tensors(checkpoint, targets)
