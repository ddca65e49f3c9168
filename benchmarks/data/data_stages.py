"""What benchmarks of data builds share: a data.toml, the command, the stages up to one of them, seconds by stage."""

import json
import sys
from pathlib import Path
from typing import Any

from tilewright.data.engine.build_context import Context
from tilewright.data.engine.build_settings import DataBuild
from tilewright.data.engine.executors.local_processes import LocalExecutor
from tilewright.data.stages.plan import STAGES

QUALITY = {
    "min_words": 50, "max_words": 100_000, "min_mean_word_chars": 3, "max_mean_word_chars": 10, "max_symbol_share": 0.1,
    "max_bullet_lines": 0.9, "max_ellipsis_lines": 0.3, "min_alphabetic_words": 0.8, "min_stop_words": 2,
}  # fmt: skip
"""Gopher's rules of quality."""
REPETITION = {
    "max_duplicate_lines": 0.3, "max_duplicate_line_chars": 0.2, "max_duplicate_paragraphs": 0.3,
    "max_duplicate_paragraph_chars": 0.2, "max_top_2gram_chars": 0.2, "max_top_3gram_chars": 0.18,
    "max_top_4gram_chars": 0.16, "max_duplicate_5gram_chars": 0.15, "max_duplicate_10gram_chars": 0.1,
}  # fmt: skip
"""Gopher's rules of repetition."""


def write_toml(path: Path, **sections: dict[str, Any]) -> None:
    """A data.toml of these sections."""
    lines = []
    for name, values in sections.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    path.write_text("\n".join(lines) + "\n")


def build_command(toml: Path, out: Path, processes: int) -> list[str]:
    """The command of a build."""
    command = [sys.executable, "-m", "tilewright", "data", "build", str(toml), "--out", str(out)]
    return [*command, "--processes", str(processes), "--json"]


def run_until(build: DataBuild, out: Path, processes: int, last: str) -> Context:
    """The stages up to one of them, only what is not finished."""
    context = Context(build, out)
    with LocalExecutor(processes) as executor:
        for stage in STAGES:
            units = [(index, stage.fingerprint(context, index)) for index in range(stage.units(context))]
            todo = [unit for unit in units if not context.units.is_done(stage.name, *unit)]
            for index, _ in todo:
                context.units.forget(stage.name, index)
            executor.run(context, stage, todo, lambda count: None)
            if stage.name == last:
                return context
    raise AssertionError(f"no stage {last}")


def receipts(out: Path, stage: str = "*") -> dict[str, list[dict[str, Any]]]:
    """What the finished units say of themselves, by stage."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(out.glob(f"work/{stage}/*/receipt.json")):
        found.setdefault(path.parent.parent.name, []).append(json.loads(path.read_bytes()))
    return found


def stage_seconds(out: Path) -> dict[str, float]:
    """Seconds of each stage, added up over its units, the longest first."""
    seconds = {name: round(sum(one["seconds"] for one in units), 2) for name, units in receipts(out).items()}
    return dict(sorted(seconds.items(), key=lambda one: -one[1]))


def total(out: Path, stage: str, count: str) -> int:
    """Sum of what a stage's units counted."""
    return sum(one["counts"][count] for one in receipts(out, stage).get(stage, []))
