"""The report of a run as one HTML file, for download: made by the code of `tilewright report`, and written nowhere.

In a process of its own: a report of a long run takes memory that a watching process need not keep.
"""

import subprocess
import sys
from pathlib import Path

from tilewright.core import env

TIMEOUT_S = 120


class ExportError(RuntimeError):
    """The report could not be made; the text says why."""


def export_report(folder: Path) -> bytes:
    """Render the report of a watched run in a child process: its page, as `report.page.render` makes it.

    Raises:
        ExportError: the folder cannot be read, or the report takes too long.
    """
    command = [sys.executable, "-P", "-m", __name__, str(folder)]
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=TIMEOUT_S, env=env.importing(Path(__file__).parents[3]), check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ExportError(f"not done within {TIMEOUT_S} s") from error
    if done.returncode:
        lines = done.stderr.decode("utf-8", errors="replace").strip().splitlines()
        raise ExportError(lines[-1] if lines else f"exit code {done.returncode}")
    return done.stdout


def main() -> None:
    """Write the page of the folder on the command line to standard output. Called in the child process."""
    from tilewright.report.page import render
    from tilewright.report.run_data.collect_run import collect

    sys.stdout.buffer.write(render(collect(Path(sys.argv[1]))).encode("utf-8"))


if __name__ == "__main__":
    main()
