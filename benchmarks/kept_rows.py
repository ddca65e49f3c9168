"""What a study that takes longer than one call has found: on the disk as soon as it is known."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Kept = dict[str, Any]


class KeptRows:
    """Rows in a file of results, a JSON object a line; a later call makes only those that are missing.

    Args:
        path: of the file, which need not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def all(self) -> list[Kept]:
        """All rows. A line that a kill has cut short is left out."""
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def of(self, **wanted: Any) -> list[Kept]:
        """Rows that have these values."""
        return [row for row in self.all() if all(name in row and row[name] == wanted[name] for name in wanted)]

    def add(self, row: Kept) -> Kept:
        """Keep a row, and print it."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)
        return row


class KeptCases:
    """What was measured under each name, in one JSON file; a later call measures only what is missing.

    Args:
        path: of the file, which need not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def of(self, name: str, measure: Callable[[], Kept]) -> Kept:
        """What was measured under a name, in this call or one before it."""
        known = json.loads(self.path.read_text(encoding="utf-8")) if self.path.is_file() else {}
        if name not in known:
            known[name] = measure()
            self.path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
            print(self.path.parent.name, name, known[name], flush=True)
        return known[name]
