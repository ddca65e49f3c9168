"""Whether a checkpoint is what was written, all of it and nothing else."""

from collections.abc import Iterator
from pathlib import Path

from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX

from tilewright.core.atomic_io import check_manifest, listed_files
from tilewright.training.checkpoint.index import INDEX, IndexFormatError, parse_index


def why_unsound(folder: Path) -> str | None:
    """What is wrong with a checkpoint first, None where nothing is.

    Every file has the hash that the manifest says; the index names no file that the manifest does not, which a rank
    whose part is missing would leave; and no tensors are there that belong to another save.
    """
    return check_manifest(folder) or next(_misfits(folder), None)


def _misfits(folder: Path) -> Iterator[str]:
    listed = listed_files(folder)
    try:
        index = parse_index((folder / INDEX).read_bytes())
    except FileNotFoundError:
        yield f"{INDEX} is missing"
        return
    except (OSError, IndexFormatError) as error:
        yield str(error)
        return
    named = {place.relative_path for place in index.storage_data.values()}
    for name in sorted(named - listed):
        yield f"{INDEX} needs {name}, which the manifest does not list: a rank's part is missing"
    for path in sorted(folder.glob(f"*{DEFAULT_SUFFIX}")):
        if path.name not in listed:
            yield f"{path.name} belongs to another save: the manifest does not list it"
