"""Seconds of the stages of a compression: predicted before anything is trained, and measured as they run.

A stage of training is predicted as its steps at the seconds of a step of the run, times the share of a cut's forward
pass (`CutPlan.speed`), and its evaluations. How many cuts are tried is known, which ones is not: those are the mean
over the plans.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from tilewright.compress.budget.compress_record import RUN_FILE, Record
from tilewright.compress.budget.compress_settings import CompressSettings
from tilewright.compress.budget.cut_candidates import CutPlan
from tilewright.compress.export.export_source import ExportSource
from tilewright.compress.export_run import BASELINES
from tilewright.core.config.load import load_recipe
from tilewright.core.hardware import detect_machine
from tilewright.core.json_text import from_json
from tilewright.core.units import format_seconds
from tilewright.models.base.eval_mode import evaluation
from tilewright.training.runlog.recorded_tables import read

MEASURING = "sensitivities"
"""The stage that a dry run has, too."""
EXPORTS = "exports"
_PACE = ("device_name", "cpu_features", "core_share", "physical_cores")
"""Facts of a machine that its pace follows: the run may have had other instructions or other cores."""
_RECENT = 50
"""Last steps of a run, whose median counts."""
_FORWARD = 1 / 3
"""Share of a step that its forward pass takes: a backward pass is two of them."""
PROOF_S = 8.0
"""Of an artefact or a baseline beside its answers: written, a process that imports its runtime, latencies. The default
run's took 8 each on two cores."""
_EVALUATIONS = 3
"""Of a stage: before its first step, after its last, and row by row when it has ended."""
_REPEATS = 3


@dataclass(frozen=True)
class StepPace:
    """Seconds of a training step.

    Args:
        step_s: of the model that is compressed.
        first_s: of the first one, which may compile.
        how: they were measured, in words.
    """

    step_s: float
    first_s: float
    how: str


def pace_of(source: ExportSource, batch: Mapping[str, Tensor]) -> StepPace:
    """The pace of training, for seconds of stages: as the run recorded it, if it trained on this machine with the
    settings that stages have; else measured here.

    Args:
        source: the run or model.
        batch: a micro-batch of its training data.
    """
    taken = _recorded(source)
    if taken:
        recent = taken[1:][-_RECENT:] or taken
        return StepPace(median(recent), taken[0], f"the last {len(recent)} steps of the run")
    step_s = _measured(source.model, batch) * source.recipe.train.global_batch_size / len(batch["labels"])
    return StepPace(step_s, step_s, "forward and backward passes here, in FP32")


def _recorded(source: ExportSource) -> list[float]:
    """Seconds of the run's steps as recorded, for its stages; none where there is no run, or they say nothing of its
    stages."""
    files = [source.run / name for name in (RUN_FILE, "machine.json", "metrics.jsonl")]
    if not all(path.is_file() for path in files):
        return []
    then = load_recipe(files[0], environ={}).recipe
    same = all(getattr(then, name) == getattr(source.recipe, name) for name in ("train", "data", "precision"))
    machine, here = read(files[1]), detect_machine("cpu").to_json()
    if not same or not isinstance(machine, dict) or any(machine.get(name) != here[name] for name in _PACE):
        return []
    return list(_step_seconds(files[2]))


def _step_seconds(path: Path) -> Iterator[float]:
    """Seconds of the rows of a metrics.jsonl that are steps."""
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = from_json(line)
        except ValueError:  # a kill has cut it short
            continue
        if isinstance(row, dict) and isinstance(row.get("step_s"), float):
            yield row["step_s"]


def _measured(model: Any, batch: Mapping[str, Tensor]) -> float:
    """Measure the least seconds of a forward and a backward pass of a stage; gradients of parameters are left as they
    are."""
    weights, taken = [param for param in model.parameters() if param.requires_grad], []
    with torch.enable_grad(), evaluation(model):
        for _ in range(_REPEATS):
            began = time.perf_counter()
            torch.autograd.grad(model.loss(batch).loss_sum, weights, allow_unused=True)
            taken.append(time.perf_counter() - began)
    return min(taken)


def predicted_seconds(
    plans: Sequence[CutPlan],
    settings: CompressSettings,
    pace: StepPace,
    *,
    cut_s: float,
    held_out_s: float,
    run_steps: int,
    taught: bool,
    reads_kept: bool,
) -> Record:
    """Predicted seconds of each stage of a compression, and of all: at least, and where rounding misses the budget and
    weights are trained for it.

    Args:
        plans: cuts that could be tried.
        settings: of the command.
        pace: of a step of the whole model.
        cut_s: seconds of a cut, its fit and its losses.
        held_out_s: seconds of the held-out rows in the whole model.
        run_steps: of the run; the shape from random weights gets as many more.
        taught: recovery has a teacher.
        reads_kept: what the teacher makes of a row is kept: the first stage computes it.

    Example:
        >>> plan = CutPlan(())
        >>> settings = CompressSettings.of("1%", "hf", "ffn", steps=10, controls="equal")
        >>> of = dict(cut_s=5.0, held_out_s=1.0, run_steps=100, taught=False, reads_kept=True)
        >>> found = predicted_seconds([plan], settings, StepPace(2.0, 4.0, ""), **of)
        >>> found["stages"]
        {'control-teacher': 27.0, 'recovered-': 32.0, 'exports': 36.0}
        >>> found["least"], found["most"]
        (95.0, 95.0)
    """

    def training(steps: int, speed: float, teacher_passes: float = 0.0) -> float:
        one = pace.step_s * (speed + _FORWARD * teacher_passes)
        return pace.first_s + steps * one + _EVALUATIONS * speed * held_out_s

    steps, tried = settings.steps, min(settings.tries, len(plans).bit_length())
    always = float(taught and not reads_kept)
    each = {f"recovered-{plan.name}": cut_s + training(steps, plan.speed, always) for plan in plans}
    speed = fmean(plan.speed for plan in plans)
    once = _FORWARD * pace.step_s * steps if taught and reads_kept else 0.0
    sure: dict[str, float] = {}
    if settings.controls != "none":
        sure["control-teacher"] = training(steps, 1.0)
    if settings.controls == "all":
        sure |= {"control-alone": training(steps, speed)} if taught else {}
        sure["control-scratch"] = training(run_steps + steps, speed)
    proof_s = PROOF_S + speed * held_out_s
    sure[EXPORTS] = (len(settings.targets) + len(BASELINES)) * proof_s
    perhaps: dict[str, float] = {}
    for integers in dict.fromkeys(target.takes for target in settings.targets if target.takes):
        perhaps[f"trained-{integers}"] = training(steps, speed, always)
        perhaps[f"{EXPORTS}-{integers}"] = (1 + len(BASELINES)) * proof_s
    least = sum(sure.values()) + tried * fmean(each.values()) + once
    stages = {name: seconds for name, seconds in sure.items() if name != EXPORTS}
    stages |= each | {EXPORTS: sure[EXPORTS]} | perhaps
    return {"stages": stages, "tried": tried, "least": least, "most": least + sum(perhaps.values())}


def in_hours(times: Record) -> str:
    """Seconds of all stages, and of a step, in words.

    Example:
        >>> step = {"seconds": 0.45, "how": "the last 50 steps of the run"}
        >>> print(in_hours({"step": step, "predicted": {"tried": 3, "least": 840.0, "most": 840.0}}))
        all stages: about 14m00s with 3 recoveries; a step: 450 ms (the last 50 steps of the run)
    """
    found, step = times["predicted"], times["step"]
    recoveries = f"{found['tried']} recover{'y' if found['tried'] == 1 else 'ies'}"
    most = f", {format_seconds(found['most'])} if rounding misses the budget" if found["most"] > found["least"] else ""
    pace = f"a step: {format_seconds(step['seconds'])} ({step['how']})"
    return f"all stages: about {format_seconds(found['least'])} with {recoveries}{most}; {pace}"


@contextmanager
def timed(record: Record, stage: str) -> Iterator[None]:
    """Inside, the seconds of a stage are counted, beside those of earlier commands that were stopped in it.

    Args:
        record: gets them in "time", by stage.
        stage: its name among the predicted ones.

    Example:
        >>> record: Record = {"time": {"measured": {"exports": 100.0}}}
        >>> with timed(record, "exports"):
        ...     pass
        >>> 100.0 < record["time"]["measured"]["exports"] < 101.0
        True
    """
    began = time.perf_counter()
    try:
        yield
    finally:
        measured = record.setdefault("time", {}).setdefault("measured", {})
        measured[stage] = measured.get(stage, 0.0) + time.perf_counter() - began
