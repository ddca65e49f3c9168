"""Print the tests that failed in the last run, and exit with 1 where there is none, or more than a race explains.

    python tools/failed_last.py

`make again` runs them alone afterwards.
"""

import json
import sys
from pathlib import Path

MOST = 5
CACHE = Path(".pytest_cache/v/cache/lastfailed")


def failed(cache: Path) -> list[str]:
    """Ids of the tests that failed last, as pytest has written them; files that could not be imported among them."""
    return sorted(json.loads(cache.read_text())) if cache.exists() else []


def verdict(names: list[str]) -> str | None:
    """Why they are not run again; None: they are.

    Example:
        >>> verdict(["tests/a.py::test_b"])
        >>> verdict([])
        'no test failed: the fault is before them'
    """
    if not names:
        return "no test failed: the fault is before them"
    return f"{len(names)} tests failed: not run again" if len(names) > MOST else None


def main() -> int:
    names = failed(CACHE)
    for name in names:
        print(f"failed beside others: {name}")
    said = verdict(names)
    print(said or "they run once more, alone; one that passes now has a race")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
