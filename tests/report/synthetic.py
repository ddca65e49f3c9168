"""Run folders made of the numbers that a test gives, as training writes them: for rules, and for bad values."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tilewright.core.json_text import to_json
from tilewright.report.run_data.collect_run import RunData, collect

Column = Sequence[Any] | Callable[[int], Any]
"""A value for each step, or a function of the step's number from 1."""

STEADY: Mapping[str, Any] = {
    "grad_norm": 0.5,
    "lr": 1e-3,
    "loss_scale": 1.0,
    "skipped": None,
    "tokens_per_s": 1000.0,
    "step_s": 1.0,
    "wait_s": 0.001,
    "wait_share": 0.001,
    "memory_bytes": 2**30,
}
"""What a step's row holds in addition to its loss where a test says nothing else."""

RECIPE = "[optim]\nclip_norm = 1.0 # default\nwarmup_steps = 0 # default\n\n[train]\nsteps = 400 # default\n"
PLAN = {"peak_bytes": 2**30, "step_phase": "backward", "phases": {"backward": {"activations": 2**30}}, "step_s": 1.0}


def step_rows(losses: Sequence[Any], **columns: Column) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl: a row per loss, numbered from 1, other values steady where `columns` has none."""

    def value(column: Column, step: int) -> Any:
        return column(step) if callable(column) else column[step - 1]

    return [
        {"step": step, "time_s": float(step), "loss": loss, **STEADY, "tokens": 100 * step}
        | {name: value(column, step) for name, column in columns.items()}
        for step, loss in enumerate(losses, 1)
    ]


def eval_rows(losses: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of evaluation from {step: {domain: loss}}."""
    return [
        {
            "step": step,
            "time_s": float(step),
            "eval": {name: {"loss": loss, "tokens": 100} for name, loss in row.items()},
        }
        for step, row in losses.items()
    ]


def write(
    folder: Path,
    rows: Sequence[Mapping[str, Any]],
    *,
    events: Sequence[Mapping[str, Any]] = (),
    recipe: str = RECIPE,
    plan: Mapping[str, Any] | None = PLAN,
    strict: bool = True,
) -> Path:
    """The files of a run folder; with `strict` off numbers that are not finite are written as NaN and Infinity."""
    text = to_json if strict else json.dumps
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(text(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "events.jsonl").write_text("".join(text(row) + "\n" for row in events), encoding="utf-8")
    (folder / "run.toml").write_text(recipe, encoding="utf-8")
    if plan is not None:
        (folder / "plan.json").write_text(text(plan), encoding="utf-8")
    return folder


def read(folder: Path, rows: Sequence[Mapping[str, Any]], **files: Any) -> RunData:
    """`write`, and read back as the report does."""
    return collect(write(folder, rows, **files))
