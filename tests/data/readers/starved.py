"""Reads files, or builds a dataset of a folder, with less and less of what a process may have.

In a process of its own: `python -m tests.data.readers.starved FOLDER RESOURCE [build]`. For each file it prints as JSON
what came out under each limit: "same" as without one, the class of an error, or "other" and what differs.
"""

import json
import os
import resource
import signal
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

from tests.data.build.corpora import build, digest, settings
from tests.data.readers.made import LIMITS, OPTIONS
from tilewright.core.errors import TilewrightError
from tilewright.data.common.records import Rejected
from tilewright.data.readers.parser_process import parser_process
from tilewright.data.readers.read_file import read_file

LIMIT = {"files": resource.RLIMIT_NOFILE, "bytes": resource.RLIMIT_FSIZE, "memory": resource.RLIMIT_AS}


def steps(kind: str) -> list[int]:
    """Limits from the tightest on."""
    if kind == "files":
        used = max(int(name) for name in os.listdir("/proc/self/fd"))
        return list(range(used, used + 10))
    if kind == "bytes":
        return [0, 1, 64, 1000, 20_000, 1_000_000]
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    return [size + extra for extra in (1 << 16, 1 << 20, 1 << 22, 1 << 24, 1 << 26)]


def outcome(path: Path) -> list[str]:
    """What a file gives, in words that do not depend on the process."""
    items = list(read_file(path, path.name, "d", LIMITS, replace(OPTIONS, image_size=8, log_mel=True)))
    return [repr(item) if isinstance(item, Rejected) else repr((item.part, item.text, item.facts)) for item in items]


def limited(kind: str, most: int, work) -> object:
    """What `work` returns under a limit, or the error that it raises."""
    _, hard = resource.getrlimit(LIMIT[kind])
    resource.setrlimit(LIMIT[kind], (most, hard))
    try:
        return work()
    except (TilewrightError, OSError, MemoryError) as error:
        return error
    finally:
        resource.setrlimit(LIMIT[kind], (hard, hard))
        parser_process(os.getpid())._end()  # one that was started under the limit keeps it


def main(folder: Path, kind: str, built: bool) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for path in sorted(folder.iterdir()):
        found = {}
        if built:
            out = Path(tempfile.mkdtemp())
            build(settings(path), out / "whole")
            for most in steps(kind):
                work = partial(build, settings(path), out / f"{most}")
                result = limited(kind, most, work)
                if isinstance(result, Exception):
                    build(settings(path), out / f"{most}")  # what failed is not kept
                    found[most] = type(result).__name__
                if digest(out / f"{most}") != digest(out / "whole"):
                    found[most] = "other"
                else:
                    found.setdefault(most, "same")
        else:
            whole = outcome(path)
            for most in steps(kind):
                result = limited(kind, most, partial(outcome, path))
                if isinstance(result, Exception):
                    found[most] = type(result).__name__
                else:
                    found[most] = "same" if result == whole else f"other: {result} instead of {whole}"
        print(json.dumps([path.name, list(found.values())]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], len(sys.argv) > 3)
