"""A dataset of the Hugging Face Hub by its name, `hf://org/name` or `hf://org/name@revision`: its files of rows.

Downloaded by huggingface_hub into its own cache, which is used where the hub cannot be reached. Nothing in a
repository is executed: its data files are read as those of a folder. Where some are named after a split, those of
`train` are taken.
"""

from collections.abc import Sequence
from pathlib import Path

from tilewright.core.errors import DataError, HardwareError

PREFIX = "hf://"
_SUFFIXES = (".parquet", ".jsonl", ".json", ".csv", ".tsv", ".arrow")
_COMPRESSED = (".gz", ".zst", ".xz", ".bz2")
_SETTINGS = ("dataset_infos.json", "dataset_info.json", "state.json", "config.json")


def rows_files(names: Sequence[str]) -> list[str]:
    """Files with rows of a hub dataset's repository, to train on.

    Example:
        >>> rows_files(["README.md", "data/train-0.parquet", "data/test-0.parquet", "dataset_infos.json"])
        ['data/train-0.parquet']
        >>> rows_files(["a.jsonl.gz", "b.csv"])
        ['a.jsonl.gz', 'b.csv']
    """

    def holds_rows(name: str) -> bool:
        for suffix in _COMPRESSED:
            name = name.removesuffix(suffix)
        return name.endswith(_SUFFIXES) and name.rpartition("/")[2] not in _SETTINGS

    found = [name for name in names if holds_rows(name)]
    return [name for name in found if "train" in name.lower()] or found


def hub_dataset(source: str, endpoint: str | None = None, cache: str | None = None) -> str:
    """The folder of a dataset of the Hugging Face Hub, downloaded where it is not there yet.

    Args:
        source: `hf://org/name`, with @revision if not main.
        endpoint, cache: of the hub and of downloads; None: those of huggingface_hub.

    Raises:
        DataError: no such dataset, no right to read it, no file of rows in it, or no network and nothing cached.
        HardwareError: huggingface_hub is not installed.
    """
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError as error:
        raise HardwareError(
            "Datasets of the hub need huggingface_hub",
            got=f"{source}, and no package huggingface_hub",
            need="the extra hf",
            try_="pip install 'tilewright[hf]'",
            where="data.source",
        ) from error
    repo, _, revision = source.removeprefix(PREFIX).partition("@")
    where = {"repo_type": "dataset", "revision": revision or None}
    try:
        names = rows_files(huggingface_hub.HfApi(endpoint=endpoint).list_repo_files(repo, **where))
        if names:
            folder = huggingface_hub.snapshot_download(
                repo, allow_patterns=names, endpoint=endpoint, cache_dir=cache, **where
            )
            return str(Path(folder))
    except errors.HFValidationError as error:
        raise _refused("Not the name of a dataset", source, str(error)) from error
    except errors.GatedRepoError as error:
        raise _refused("Dataset is gated: its owners ask for consent before a download", source, str(error)) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise _refused("No such dataset on the hub, or a private one", source, str(error)) from error
    except (errors.HTTPError, OSError, RuntimeError) as error:  # of its HTTP library, of the system, of hf_xet
        try:
            return str(huggingface_hub.snapshot_download(repo, local_files_only=True, cache_dir=cache, **where))
        except (errors.LocalEntryNotFoundError, OSError):
            raise _refused("Dataset cannot be downloaded, and none of it is cached", source, str(error)) from error
    raise _refused("No file of rows in the dataset", source, "none of " + ", ".join(_SUFFIXES))


def _refused(what: str, source: str, got: str) -> DataError:
    lines = [line for line in got.splitlines() if line.strip()] or [""]
    return DataError(
        what,
        where="data.source",
        got=f"{source}: {lines[0][:200]}",
        need="a dataset hf://org/name that this user may read, and the network for the first time",
        try_="the name as its page on the hub shows it, hf auth login, or a file or folder on this machine",
    )
