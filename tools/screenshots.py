"""Writes the pictures of the documentation, as a browser shows them.

    python tools/screenshots.py report RUN_FOLDER    # docs/images/report.png: the top of the report of a run
    python tools/screenshots.py watch                # docs/images/watch.png: two runs, which it trains first (a minute)
    python tools/screenshots.py watch RUN RUN        # the same of these two

The report's picture is of the default recipe: `tilewright train`, on a machine with nothing else to do. Part of a
release. Needs Chromium and the package websocket-client.
"""

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tilewright.report.watch.server import WatchServer
from tools.browser import browser, why_not

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
REPORT_SIZE, WATCH_SIZE = (1200, 960), (1200, 1560)
SHOWN_S = 6.0
"""So long the page of the runs is open: its lines of load grow with time."""
TRAINED = {
    "base": {"optim.lr": "0.001"},
    "lr_high": {"optim.lr": "0.004"},
}
"""Name of a run -> what is different in it."""
COMMON = {
    "model.dim": "80", "model.ffn_dim": "128", "model.num_layers": "2", "data.vocab_size": "512", "data.seq_len": "64",
    "train.steps": "200", "train.global_batch_size": "8", "train.micro_batch_size": "8", "train.compile": "off",
    "train.log_interval": "10", "train.eval_interval": "40", "optim.warmup_steps": "20", "log.report": "false",
}  # fmt: skip


def train(folder: Path) -> list[Path]:
    """Two short runs of a tiny model on the text of the installation."""
    for name, different in TRAINED.items():
        settings = {**COMMON, **different, "run.dir": str(folder), "run.name": name}
        options = [part for key, value in settings.items() for part in (f"--{key}", value)]
        subprocess.run([sys.executable, "-m", "tilewright", "train", "default", *options], check=True)
    return [folder / name for name in TRAINED]


def picture_of_report(run: Path) -> None:
    """The top of a report that is there."""
    report = (run / "report.html").resolve(strict=True)
    with browser() as page:
        page.size(*REPORT_SIZE)
        page.open(report.as_uri())
        page.wait("document.readyState == 'complete' && document.querySelector('svg') !== null")
        page.picture(IMAGES / "report.png")


def picture_of_watch(runs: list[Path]) -> None:
    """The page of runs, with the pointer in the chart of the loss."""
    with WatchServer(runs, 0) as server, browser() as page:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page.size(*WATCH_SIZE)
        page.open(server.url)
        page.wait("document.querySelectorAll('figure[data-metric=loss] path.line').length > 1")
        time.sleep(SHOWN_S)
        chart = "document.querySelector('figure[data-metric=loss] svg').getBoundingClientRect()"
        left, top, width, height = page.run(f"(b => [b.left, b.top, b.width, b.height])({chart})")
        page.mouse("mouseMoved", left + 0.55 * width, top + 0.4 * height)
        page.wait("!document.querySelector('figure[data-metric=loss] .tip-box').hidden")
        page.picture(IMAGES / "watch.png")
        server.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("report", "watch"))
    parser.add_argument("runs", type=Path, nargs="*", help="run folders")
    args = parser.parse_args()
    if reason := why_not():
        parser.exit(1, f"{reason}\n")
    if args.what == "report":
        if len(args.runs) != 1:
            parser.error("report takes one run folder")
        picture_of_report(args.runs[0])
    elif args.runs:
        picture_of_watch(args.runs)
    else:
        with tempfile.TemporaryDirectory() as folder:
            picture_of_watch(train(Path(folder)))


if __name__ == "__main__":
    main()
