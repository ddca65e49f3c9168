"""Downloads from the Hugging Face Hub: the files that a model needs and no others, and an error for each way to fail.

A thin layer over huggingface_hub, whose cache, tokens, retries and progress bars are used as they are.
"""

import errno
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tilewright.core.errors import CheckpointError, HardwareError
from tilewright.core.log import say
from tilewright.core.units import format_bytes
from tilewright.models.folder.safetensors import INDEX, SINGLE, weight_files

_MAIN = "main"
_TOKENIZER = "tokenizer.json"
_OTHER_TOKENIZERS = ("tokenizer.model", "merges.txt", "vocab.txt", "tekken.json")
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf")
_TEMPLATES = "additional_chat_templates/"


class Hub:
    """One repository of the Hugging Face Hub, and its cache on this machine.

    Args:
        repo: `org/name`.
        endpoint: of the hub; None: that of huggingface_hub.
        cache: folder of downloads; None: that of huggingface_hub.

    Raises:
        HardwareError: huggingface_hub is not installed.
    """

    def __init__(self, repo: str, endpoint: str | None = None, cache: str | None = None):
        self.repo, self.endpoint, self.cache = repo, endpoint, cache
        self._hub = _package(repo)

    def cached(self, revision: str) -> Path | None:
        """The hub's cached folder of a revision ("": main) as it was last seen; None if the cache has no configuration
        of it."""
        file = self._hub.try_to_load_from_cache(
            self.repo, "config.json", cache_dir=self.cache, revision=revision or None
        )
        return Path(file).parent if isinstance(file, str) else None

    def download(self, revision: str, weights: bool) -> Path:
        """Download a revision from the hub into the cache and return its folder, which may lack files. It says so if
        the hub cannot be asked.

        Raises:
            CheckpointError: see `find_model.find_model`.
        """
        from huggingface_hub import errors

        cached = self.cached(revision)
        try:
            api = self._hub.HfApi(endpoint=self.endpoint)
            info = api.model_info(self.repo, revision=revision or None, files_metadata=True)
            return self._fetch(revision or _MAIN, {file.rfilename: file.size or 0 for file in info.siblings}, weights)
        except errors.GatedRepoError as error:
            raise self._gated(error) from error
        except errors.RevisionNotFoundError as error:
            raise self._no_revision(revision) from error
        except errors.RepositoryNotFoundError as error:
            raise self._not_found(error) from error
        except (errors.HTTPError, OSError, RuntimeError) as error:  # of its HTTP library, of the system, of hf_xet
            if _status(error) == 401:  # also the answer to a wrong name
                raise self._not_found(error) from error
            if _disk_is_full(error) or cached is None:
                raise self._failed(error, begun=self.cached(revision) is not None) from error
            say(f"note: the hub cannot be reached ({_reason(error)}); {self.repo} is used as it was last downloaded")
            return cached

    def _fetch(self, revision: str, files: Mapping[str, int], weights: bool) -> Path:
        wanted = _small_files(files)
        if weights and not {SINGLE, INDEX} & set(files):
            raise self._no_safetensors(files)
        folder = self._snapshot(revision, wanted)  # by this name, so that the cache knows it when there is no network
        commit = folder.name
        if weights:
            missing = [name for name in weight_files(folder) if name in files and not (folder / name).is_file()]
            if missing:
                num_bytes = sum(files[name] for name in missing)
                say(f"downloading {self.repo}@{commit}: {format_bytes(num_bytes)} of weights into {folder}")
                self._snapshot(commit, missing)
        return folder

    def _snapshot(self, revision: str, names: list[str]) -> Path:
        found = self._hub.snapshot_download(
            self.repo,
            revision=revision,
            allow_patterns=[_literally(name) for name in names],
            cache_dir=self.cache,
            endpoint=self.endpoint,
        )
        return Path(found)

    # ---- errors ----

    def _not_found(self, error: Exception) -> CheckpointError:
        return CheckpointError(
            "No such model on the hub, or a private one",
            got=f"{self.repo}: {_reason(error)}",
            need="a folder here, or a repository org/name that this user may read",
            try_="the name as its page on the hub shows it; for a private one: hf auth login",
            where=self.repo,
        )

    def _no_revision(self, revision: str) -> CheckpointError:
        return CheckpointError(
            "No such revision of the model",
            got=f"{self.repo}@{revision}",
            need="a branch, a tag or the hash of a commit",
            try_=f"{self.repo} without @{revision}, which means main",
            where=self.repo,
        )

    def _gated(self, error: Exception) -> CheckpointError:
        return CheckpointError(
            "Model is gated: its owners ask for consent before a download",
            got=f"{self.repo}: {_reason(error)}",
            need="an account that was given access, and its token on this machine",
            try_="agree to the terms on the model's page on the hub, then: hf auth login",
            where=self.repo,
        )

    def _failed(self, error: Exception, begun: bool) -> CheckpointError:
        if _disk_is_full(error):
            return CheckpointError(
                "No room on the disk for the model",
                got=f"{self.repo}: {_reason(error)}",
                need="room for its weights in the cache of the hub",
                try_="free space, or HF_HOME = a folder on another disk; the same command continues",
                where=self.repo,
            )
        if begun:
            return CheckpointError(
                "Download of the model stopped",
                got=f"{self.repo}: {_reason(error)}",
                need="every file, once",
                try_="the same command again: it continues with what is missing",
                where=self.repo,
            )
        return CheckpointError(
            "Model cannot be downloaded, and is not in the cache",
            got=f"{self.repo}: {_reason(error)}",
            need="a network, or a download made before",
            try_="a network, or copy the model here and name its folder",
            where=self.repo,
        )

    def _no_safetensors(self, files: Iterable[str]) -> CheckpointError:
        others = sorted(name for name in files if name.endswith(_OTHER_WEIGHTS))
        return CheckpointError(
            "No safetensors weights in the repository",
            got=", ".join(others[:5]) or f"no {SINGLE}",
            need=f"{SINGLE}, or {INDEX}; files in other formats can hold code and are not downloaded",
            try_="another repository of the same model, or one that you converted yourself",
            where=self.repo,
        )


def _package(repo: str) -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise HardwareError(
            "Models of the hub need the package huggingface_hub",
            got=f"{repo}, which is no folder here; {error}",
            need="huggingface_hub, or a folder",
            try_="pip install 'tilewright[hf]'",
            where=repo,
        ) from error
    return huggingface_hub


def _small_files(files: Iterable[str]) -> list[str]:
    """The small files at the top of a hub's repository: configuration, tokenizer and templates; formats without a
    tokenizer.json too."""
    files = list(files)
    wanted = [name for name in files if "/" not in name and name.endswith((".json", ".jinja"))]
    wanted += [name for name in files if name.startswith(_TEMPLATES) and name.endswith(".jinja")]
    if _TOKENIZER not in files:
        wanted += [name for name in files if name in _OTHER_TOKENIZERS or name.endswith(".tiktoken")]
    return wanted


def _literally(name: str) -> str:
    """A hub file's name as a pattern that means it alone."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _disk_is_full(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _status(error: Exception) -> int | None:
    """Status of the hub's answer; None where it gave none."""
    response = getattr(error, "response", None)
    return None if response is None else response.status_code


def _reason(error: Exception) -> str:
    """The reason of a hub's failure: the status of an answer, or the first line of the error."""
    if (status := _status(error)) is not None:
        return f"the hub answers {status}"
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
