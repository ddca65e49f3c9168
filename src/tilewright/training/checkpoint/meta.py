"""`meta.json`: the part of a checkpoint that is not tensors. Reading it needs no torch, so it is read at once."""

import json
from pathlib import Path
from typing import Any

from tilewright.core.errors import CheckpointError

META = "meta.json"


def read_meta(path: Path) -> dict[str, Any]:
    """The part of a checkpoint that is not tensors.

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
