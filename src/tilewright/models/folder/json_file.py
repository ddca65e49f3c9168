"""JSON files of a model folder: read with errors that name the folder, written whole or not at all."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilewright.core.errors import CheckpointError


def read_json(folder: Path | str, name: str = "config.json") -> dict[str, Any]:
    """Read a JSON object (file) from a model folder.

    Raises:
        CheckpointError: no such folder or file, or the file is not a JSON object.
    """
    path = Path(folder) / name
    need = f"a folder with a {name}, as `save_pretrained` writes it"
    if not path.parent.is_dir():
        raise CheckpointError(
            "Model folder does not exist",
            got=str(folder),
            need=f"{need} or a model of the hub, org/name",
            try_="model.path = the folder",
            where=str(folder),
        )
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        # What is there instead may show which folder was meant.
        found = ", ".join(sorted(p.name for p in path.parent.iterdir())[:8]) or "an empty folder"
        raise CheckpointError(
            f"No {name} in the model folder",
            got=found,
            need=need,
            try_="model.path = the folder that holds it",
            where=str(folder),
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(
            f"{name} is not valid JSON", got=str(error), need=need, try_="copy the file again", where=str(path)
        ) from error
    # A list or a number is valid JSON, too.
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{name} is not a JSON object",
            got=type(value).__name__,
            need=need,
            try_="copy the file again",
            where=str(path),
        )
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object (file), whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    partial.replace(path)
