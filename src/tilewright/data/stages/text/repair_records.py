"""Second stage: the text of each record as it will be trained on.

Unix line ends, no blank edges, no NUL, one Unicode normal form; on request personal data masked, and lines removed that
occur in many records of a domain.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tilewright.data.common.record_filter import DropReason
from tilewright.data.common.records import BLANK
from tilewright.data.engine.build_stage import BuildStage
from tilewright.data.engine.declared_inputs import Every, Same, per_shard
from tilewright.data.engine.record_tables import RECORDS, REJECTS, TableWriter, rows
from tilewright.data.stages.kept_records import reject_of
from tilewright.data.stages.text.repair_text import repaired, without_lines
from tilewright.data.stages.text.repeated_lines import line_ranges, load_common

STAGE = "repair"
_BLANK = DropReason(BLANK, 0.0, 1.0)


def repair_shard(
    index: int, settings: SimpleNamespace, folder: Path, *, source: Path, common_lines: Sequence[Path]
) -> Mapping[str, Any]:
    """Repair the records of a shard.

    Args:
        index: of the shard.
        settings: repair.
        folder: gets `records.parquet` and `rejects.parquet`.
        source: folder of the records as they were read.
        common_lines: folders of the hashes of the lines that are removed.

    Returns:
        Counts: records, bytes, rejects, and how many records each repair changed.
    """
    repair, common = settings.repair, load_common(common_lines)
    changed: Counter[str] = Counter()
    num_bytes = 0
    with (
        TableWriter(folder / "records.parquet", RECORDS) as records,
        TableWriter(folder / "rejects.parquet", REJECTS) as rejects,
    ):
        for row in rows(source / "records.parquet"):
            text, notes = repaired(row["text"], repair)
            if len(common):
                text, num_lines = without_lines(text, row["domain"], common, repair.repeated_line_chars)
                notes += ["repeated lines removed"] if num_lines else []
            changed.update(notes)
            if text.strip() or (row["modality"] != "text" and not row["text"].strip()):
                records.append(row | {"text": text})
                num_bytes += len(text.encode())
            else:
                rejects.append(reject_of(row, STAGE, _BLANK))
        counts = {"records": records.num_rows, "bytes": num_bytes, "rejects": rejects.num_rows}
    return counts | {"changed": dict(sorted(changed.items()))}


REPAIR = BuildStage(
    *("repair", "repairing text", 2, per_shard, repair_shard, ("repair",)),
    {"source": Same("read"), "common_lines": Every("common_lines", line_ranges)},
)
