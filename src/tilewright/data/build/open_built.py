"""A built dataset's folder, found and read: by training, which takes its tokens, and by `tilewright data inspect`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tilewright.core.errors import DataError
from tilewright.data.build.tables import rows

DATASET = "dataset.json"
"""The file that makes a folder a built dataset: written last, removed first."""
FORMAT = 1


def is_built(folder: Path) -> bool:
    """Whether `folder` holds a dataset that `tilewright data build` finished."""
    return (folder / DATASET).is_file()


def read_dataset(folder: Path) -> dict[str, Any]:
    """What `dataset.json` holds: fingerprint, summary, settings and hashes of the stages.

    Raises:
        DataError: there is no finished dataset, or one of another version.
    """
    unfinished = (folder / "work").is_dir()
    try:
        content = json.loads((folder / DATASET).read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(
            "Build of this dataset is not finished" if unfinished else "No built dataset in this folder",
            where=str(folder),
            got=str(error) if not isinstance(error, FileNotFoundError) else f"no {DATASET}",
            need="the folder of a finished `tilewright data build`",
            try_="tilewright data build data.toml --out " + str(folder),
        ) from None
    if content.get("format") != FORMAT:
        raise DataError(
            "Dataset of another version of tilewright",
            where=str(folder / DATASET),
            got=f"format {content.get('format')}",
            need=f"format {FORMAT}",
            try_="tilewright data build data.toml --out " + str(folder),
        )
    return content


def find_records(folder: Path, kind: str, wanted: str, most: int) -> Iterator[dict[str, Any]]:
    """Rows of `records` or `rejects` (`kind`) whose id begins with `wanted`, whose path holds it, or which that rule
    dropped; `most` of them."""
    for file in sorted((folder / kind).glob("*.parquet")):
        for row in rows(file):
            if row["id"].startswith(wanted) or wanted in row["path"] or row.get("rule") == wanted:
                yield row
                most -= 1
                if not most:
                    return
