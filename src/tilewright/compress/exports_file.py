"""exports.json of a run folder: one row per target, with the state of its proof, and the baselines beside them.

    {"format": 1, "machine": {...}, "question": {...}, "baselines": [row, ...], "artefacts": [row, ...]}

States: "ran", the consumer answered within the limits of `prove.tolerance`; "lint only", it cannot run here;
"unavailable", a package is missing or the format cannot hold the model; "failed", the consumer died, hung, answered
nonsense or what is beyond a limit; "not proven", no consumer was asked.
An artefact in the run folder is named from there, so that a run can be moved.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilewright.compress.export.publish import artefact_bytes, artefact_hash
from tilewright.core.atomic_io import write_whole
from tilewright.core.json_text import to_json

FILE = "exports.json"
FORMAT = 1
Row = dict[str, Any]


def read_exports(run: Path) -> Row | None:
    """Read exports.json of a run; None where nothing was exported, or the file is of another format or corrupt."""
    try:
        found = json.loads((run / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    well_made = isinstance(found, dict) and found.get("format") == FORMAT
    return found if well_made and all(isinstance(row, dict) for row in found.get("artefacts", ())) else None


def write_exports(run: Path, record: Mapping[str, Any]) -> None:
    """Write exports.json of a run.

    Raises:
        OSError: it cannot be written.
    """
    write_whole(run / FILE, to_json({"format": FORMAT, **record}, indent=1) + "\n")


def change_since(row: Mapping[str, Any], run: Path) -> str | None:
    """The change of an artefact after its row in exports.json was written, in words; None where it is the proven
    one."""
    if not row.get("path") or not row.get("hash"):
        return None
    path = run / str(row["path"])
    if not path.exists():
        return "the artefact is gone"
    if artefact_bytes(path) != row.get("bytes") or artefact_hash(path) != row["hash"]:
        return "the artefact was changed after its proof"
    return None
