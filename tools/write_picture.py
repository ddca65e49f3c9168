"""Writes docs/images/report.png: the top of the report of a run, as a browser shows it.

    python tools/write_picture.py RUN_FOLDER [--browser chromium]

The picture is of the default recipe: `tilewright train`, on a machine with nothing else to do. Part of a release.
"""

import argparse
import subprocess
import tempfile
from pathlib import Path

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "report.png"
WIDTH, HEIGHT = 1200, 960


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run folder with a report.html")
    parser.add_argument("--browser", default="chromium", help="the command of a Chromium")
    args = parser.parse_args()
    report = (args.run / "report.html").resolve(strict=True)
    with tempfile.TemporaryDirectory() as profile:
        flags = ["--headless", "--disable-gpu", "--no-sandbox", "--hide-scrollbars", f"--user-data-dir={profile}"]
        size = f"--window-size={WIDTH},{HEIGHT}"
        subprocess.run([args.browser, *flags, size, f"--screenshot={PICTURE}", report.as_uri()], check=True)


if __name__ == "__main__":
    main()
