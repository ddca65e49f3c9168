"""Run folders for these tests, and a server of some of them."""

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.report import synthetic
from tilewright.report.watch.server import WatchServer

RECIPE = "[run]\nname = {name!r} # cli\n\n[optim]\nlr = {lr} # file a.toml\n\n[train]\nsteps = 200 # default\n"


def make(folder: Path, losses: list[Any], lr: float = 0.001, ended: bool = True, **columns: Any) -> Path:
    """A run of these losses; unless `ended` nothing says how it ended."""
    events = [{"step": 0, "time_s": 0.0, "kind": "start", "message": "a model"}]
    if ended:
        events.append({"step": len(losses), "time_s": 9.0, "kind": "done", "message": f"{len(losses)} steps"})
    rows = synthetic.step_rows(losses, **columns)
    recipe = RECIPE.format(name=folder.name, lr=lr).replace("'", '"')
    synthetic.write(folder, rows, events=events, recipe=recipe, strict=False)
    (folder / "samples.jsonl").write_text(json.dumps({"step": 1, "prompt": "<b>", "text": "</script>"}) + "\n")
    return folder


def append(folder: Path, **row: Any) -> None:
    """A line more in metrics.jsonl."""
    with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps({**synthetic.STEADY, **row}) + "\n")


@contextlib.contextmanager
def serving(*folders: Path, port: int = 0) -> Iterator[WatchServer]:
    """A server of these runs in a thread."""
    with WatchServer(folders, port) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
