"""A model by its name: a local folder, or a repository of the Hugging Face Hub, `org/name` or `org/name@revision`.

A name that is a folder here means that folder, whatever the hub has. A repository becomes a folder in the hub's own
cache; in a run stands its name with the hash of the revision, so that the run means the same weights for good. What is
asked over the network is in `hub`.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from tilewright.core.errors import CheckpointError, ConfigError
from tilewright.models.folder.safetensors import weight_files

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9_]|[.-](?=[A-Za-z0-9_]))*"
_ID = re.compile(rf"{_PART}/{_PART}(@[\w./-]+)?")
_HASH = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class FoundModel:
    """A model's folder on this machine, and the name that means the same model for good."""

    folder: Path
    name: str


def is_hub_name(name: str) -> bool:
    """True if a name to resolve that is no folder here is of the form of a hub's repository.

    Example:
        >>> is_hub_name("Qwen/Qwen3-0.6B"), is_hub_name("Qwen/Qwen3-0.6B@main"), is_hub_name("/models/qwen")
        (True, True, False)
    """
    return _ID.fullmatch(name) is not None and not Path(name).expanduser().exists()


def split_name(name: str) -> tuple[str, str]:
    """Split a name of the hub into repository and revision; no revision: "".

    Example:
        >>> split_name("Qwen/Qwen3-0.6B@main")
        ('Qwen/Qwen3-0.6B', 'main')
    """
    repo, _, revision = name.partition("@")
    return repo, revision


def is_pinned(name: str) -> bool:
    """True if a hub's name has the hash of a revision, which never means other files."""
    return _HASH.fullmatch(split_name(name)[1]) is not None


def find_model(name: str, *, weights: bool = True, endpoint: str | None = None, cache: str | None = None) -> FoundModel:
    """Resolve the folder of a model, downloaded first where the cache has not all of it.

    Of a repository come its configuration, tokenizer and chat templates, and weights in safetensors. Files in formats
    that can hold code are never downloaded. Where the hub cannot be reached the cache is used, and that is said.

    Args:
        name: a folder, or `org/name[@revision]`.
        weights: False: configuration and tokenizer are enough.
        endpoint: of the hub; None: the one of the Hugging Face libraries (`HF_ENDPOINT`).
        cache: folder of downloads; None: the one of the Hugging Face libraries (`HF_HOME`).

    Raises:
        CheckpointError: no such repository or revision, no right to read it, no network and nothing cached, a download
            that is not complete, or a repository without safetensors.
        HardwareError: a repository is named, and huggingface_hub is not installed.

    Example:
        >>> find_model("/models/mine").folder
        PosixPath('/models/mine')
    """
    if not is_hub_name(name):
        return FoundModel(Path(name).expanduser(), name)
    from tilewright.models.folder.hub import Hub  # huggingface_hub, for names of repositories alone

    repo, revision = split_name(name)
    hub = Hub(repo, endpoint, cache)
    folder = hub.cached(revision)
    if folder is None or not is_pinned(name) or missing_files(folder, weights):
        folder = hub.download(revision, weights)
    if missing := missing_files(folder, weights):
        raise _incomplete(name, folder, missing)
    return FoundModel(folder, f"{repo}@{folder.name}")


def local_folder(name: str) -> str:
    """Resolve the model that a recipe names to the folder where the run has found it before. It makes no network
    request.

    Args:
        name: a folder, or a hub's name; "" stays "".
    """
    if not name or not is_hub_name(name):
        return name
    from tilewright.models.folder.hub import Hub

    repo, revision = split_name(name)
    folder = Hub(repo).cached(revision)
    return str(folder if folder is not None else find_model(name, weights=False).folder)


def teacher_at(name: str) -> Path:
    """Resolve the folder of a teacher: of a run, or of a Hugging Face model.

    Args:
        name: a run folder or its name below `runs`, or a folder with a config.json.

    Raises:
        ConfigError: there is none.
    """
    path = Path(name).expanduser()
    for place in (path, Path("runs") / name):
        if (place / "run.toml").is_file():
            return place
    if (path / "config.json").is_file():
        return path
    raise ConfigError(
        "No such teacher",
        got=name,
        need="a run folder or its name below runs, or a folder with a config.json",
        try_='distill.teacher = "runs/latest"',
        where="distill.teacher",
    )


def missing_files(folder: Path, weights: bool) -> list[str]:
    """Names of files that the resolved folder of a model lacks."""
    if not (folder / "config.json").is_file():
        return ["config.json"]
    names = weight_files(folder) if weights else []
    return [name for name in names if not (folder / name).is_file()]


def _incomplete(name: str, folder: Path, missing: list[str]) -> CheckpointError:
    shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
    return CheckpointError(
        "Download of the model is not complete",
        got=f"no {shown}",
        need="every file, once",
        try_="the same command with a network: it downloads what is missing",
        where=f"{name} in {folder}",
    )
