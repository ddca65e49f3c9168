"""compress.json (of a search search.json): what was asked, what was measured, what each stage made of the loss, and
the verdict."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import xxhash

from tilewright.compress.export.export_source import ExportSource
from tilewright.core.atomic_io import write_whole
from tilewright.core.errors import CheckpointError, ConfigError
from tilewright.core.json_text import to_json

FILE, FORMAT = "compress.json", 7
STAGES = ("cut", "artefacts")
"""Folders of a compression: what run folders of stages are made of, and what is made of them."""
RUN_FILE = "run.toml"
"""Each run folder has it, from its first moment on."""
_NAME = "run"
"""Of the run, in the record: it may be another one later, for a run is known again by what it holds."""
_PLACES = {
    "run": {"dir", "name"},
    "model": {"path"},
    "data": {"source", "eval_source", "tokenizer", "cache_dir"},
    "memory": {"offload_dir"},
    "distill": {"teacher", "cache"},
}
"""Settings that say where something is. What is there is known by its hash, so that all of it can be moved."""
Record = dict[str, Any]


def read_record(folder: Path, name: str = FILE, stages: Sequence[str] = STAGES) -> Record | None:
    """The record of a compression's folder (compress.json); None where there is none yet.

    Args:
        folder: of stages.
        name: of the record.
        stages: folders of stages, which are written behind the record, as all run folders beside them are.

    Raises:
        ConfigError: it is missing, damaged or of another format beside stages, of which it would say what they are of.
    """
    try:
        found = json.loads((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        found = None
    if isinstance(found, dict) and found.get("format") == FORMAT:
        return found
    runs = sorted(path.parent.name for path in folder.glob(f"*/{RUN_FILE}") if not path.parent.is_symlink())
    left = [stage for stage in stages if (folder / stage).exists()] + runs
    if left:
        raise ConfigError(
            "Folder holds stages without their record",
            got=f"{', '.join(left)} in {folder}, and no {name} of format {FORMAT}",
            need=f"the {name} that was written with them, or a new folder",
            try_=f"--out {folder}-2",
            where="--out",
        )
    return None


def asked_of(source: ExportSource, weights: str) -> Record:
    """The keys by which the record of a compression is known again, beside the run's name: its weights, shape, data and
    recipe. Where they are is none of them.

    Args:
        source: the run or model.
        weights: a hash of the model's.
    """
    return {
        _NAME: source.run.resolve().name,
        "checkpoint": source.checkpoint.name if source.checkpoint != source.run else "",
        "weights": weights,
        "model": _hash(_shape(source.model.config)),
        "data": source.data.fingerprint,
        "recipe": _hash(source.recipe.model_dump(mode="json", exclude=_PLACES)),
    }


def record_of(
    folder: Path, name: str, asked: Record, stages: Sequence[str] = STAGES, *, what: str, need: str
) -> Record | None:
    """The record of a compression's folder, made for the same; None where there is none. The run has the name of now.

    Args:
        folder: of the stages.
        name: of the file.
        asked: entries that have to be the same.
        stages: see `read_record`.
        what: stages the folder has where they are not, in words.
        need: what has to be the same, in words.

    Raises:
        ConfigError: the folder has stages of something else, or without a record.
    """
    before = read_record(folder, name, stages)
    if before is None:
        return None
    differing = [
        _differing(key, before.get(key), value)
        for key, value in asked.items()
        if key != _NAME and before.get(key) != value
    ]
    if differing:
        raise ConfigError(
            f"Folder holds {what}",
            got=f"{folder} with another {' and another '.join(differing)}",
            need=f"{need}, or a new folder",
            try_=f"--out {folder}-2",
            where="--out",
        )
    return before | {_NAME: asked[_NAME]}


def _differing(name: str, before: Any, now: Any) -> str:
    """An entry of the record that differs; of several settings, these."""
    if not isinstance(before, dict) or not isinstance(now, dict):
        return name
    return " and another ".join(key for key in now | before if before.get(key) != now.get(key))


def _shape(config: Any) -> dict[str, Any]:
    """The shape of a model, in plain types: of transformers' without where it is from and who wrote it."""
    if not hasattr(config, "to_dict"):
        return asdict(config)
    values = config.to_dict()
    return {name: value for name, value in values.items() if name[0] != "_" and name != "transformers_version"}


def _hash(values: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(values, sort_keys=True, default=str).encode())


def write_record(folder: Path, record: Record, name: str = FILE) -> None:
    """Write the record of a compression, whole or not at all.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / name, to_json({"format": FORMAT, **record}, indent=1) + "\n")
    except OSError as error:
        raise CheckpointError(
            f"{name} cannot be written",
            got=str(error),
            need="a folder in which files can be made",
            try_="free space, or --out FOLDER; finished stages are whole",
            where=str(folder),
        ) from error
