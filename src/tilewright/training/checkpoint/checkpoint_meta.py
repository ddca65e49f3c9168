"""The checkpoints of a folder, and `meta.json`: the part of one that is not tensors. Reading these needs no torch, so
they are read at once."""

import json
from pathlib import Path
from typing import Any

from tilewright.core.errors import CheckpointError

META = "meta.json"
_PREFIX = "step_"


def name_of(step: int) -> str:
    """The name of a checkpoint's folder, by its step."""
    return f"{_PREFIX}{step:08d}"


def step_of(checkpoint: Path) -> int | None:
    """The step in the name of a checkpoint's folder; None where it is no finished one's.

    Example:
        >>> step_of(Path("run/checkpoints/step_00000020")), step_of(Path("step_00000020.rejected"))
        (20, None)
    """
    number = checkpoint.name.removeprefix(_PREFIX)
    return int(number) if checkpoint.name.startswith(_PREFIX) and number.isdecimal() else None


def checkpoints_in(folder: Path) -> list[Path]:
    """Finished checkpoints of a folder by meta.json, unverified, by their steps; none where it is not there."""
    try:  # asked first, the folder could go away before it is listed
        found = [(step_of(path), path) for path in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [path for _, path in sorted((step, path) for step, path in found if step is not None)]


def read_meta(path: Path) -> dict[str, Any]:
    """Read meta.json: the part of a checkpoint that is not tensors.

    Raises:
        CheckpointError: there is no readable meta.json.
    """
    try:
        meta = json.loads((path / META).read_text(encoding="utf-8"))
        if not isinstance(meta, dict):
            raise ValueError(f"{type(meta).__name__} instead of a JSON object")
        return meta
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not a checkpoint that can be read",
            got=f"{META}: {error}",
            need=f"a folder written by tilewright, with {META}, manifest.json and index.json",
            try_="name a folder checkpoints/step_... of a run",
        ) from error
