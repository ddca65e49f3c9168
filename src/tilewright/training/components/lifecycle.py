"""How a run began and ended, that it recovered, what was saved, and what its time went into.

How a GPU's 16-bit GEMMs add partial sums is set and recorded. By default cuBLAS may cut the summed dimension into
pieces whose sums are rounded to 16 bits before they are added; that is what happens to weight gradients.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from tilewright.core.errors import CheckpointError
from tilewright.core.units import format_bytes, format_count, format_seconds, format_share
from tilewright.ops.base.code_modules import named_codes
from tilewright.training.checkpoint.checkpoint_store import SaveRecord
from tilewright.training.executor.evaluate import DomainLoss
from tilewright.training.runlog.record_files import Counters
from tilewright.training.runlog.recorder import MetricsLogger
from tilewright.training.runlog.run_folder import RunFolder


@dataclass(frozen=True)
class RunResult:
    """How a run ended."""

    run_dir: Path | None
    """None after a dry run, which keeps nothing."""
    step: int
    loss: float | None = None
    """Loss of the last step, None where no step was run."""
    evals: Mapping[str, DomainLoss] = field(default_factory=dict)
    """Last evaluation by domain, empty where none was run."""
    stopped: str | None = None
    """Why the run ended before its last step (the name of a signal), None where it did not."""


def record_start(
    recorder: MetricsLogger,
    counted: tuple[int, int],
    how: str,
    length: str,
    data: Iterable[tuple[str, str, Mapping[str, Any]]],
) -> None:
    """Record how a run began: the first events: model, machine, data and length.

    Args:
        recorder: of the run.
        counted: parameters of the model, those that are trained and all; see `num_parameters`.
        how: the mode, the machine.
        length: steps, and where they are written.
        data: events of the data, as kind, text and numbers.
    """
    trained, total = counted
    text = f"{_in_words(trained, total)} in {how}, {length}"
    recorder.event(0, "start", text, parameters=total, trained=trained)
    for kind, line, numbers in data:
        recorder.event(0, kind, line, **numbers)


def record_stop(recorder: MetricsLogger, step: int, reason: str | None) -> None:
    """Record how a run ended that was asked to stop, and saved."""
    recorder.event(step, "stop", f"{reason} after step {step}; saved, the same command continues from there")


def record_recovery(recorder: MetricsLogger, step: int, began: float, ready_s: float) -> None:
    """Record that a run recovered: how long it took from its start to the end of its first step.

    Args:
        recorder: of the run.
        step: the first one after the resume.
        began: `perf_counter` at which the work on the run began.
        ready_s: seconds from there to the first step.
    """
    recovery_s = time.perf_counter() - began
    process_s = time.time() - psutil.Process().create_time()
    text = (
        f"ready {format_seconds(ready_s)} after the run was started again, step {step} done after "
        f"{format_seconds(recovery_s)} ({format_seconds(process_s)} after its process)"
    )
    recorder.event(step, "recovered", text, ready_s=ready_s, recovery_s=recovery_s, process_s=process_s)


def record_done(recorder: MetricsLogger, counters: Counters, stall_s: float, elapsed_before_s: float) -> None:
    """Record how a run ended after its last step: time, tokens, what checkpoints took, and the share of all time that
    steps were worth.

    Args:
        recorder: of the run.
        counters: of the run.
        stall_s: seconds in which training stood still for checkpoints, since this process began.
        elapsed_before_s: seconds of training before this process.
    """
    elapsed_s = recorder.log.elapsed_s
    share, goodput = stall_s / (elapsed_s - elapsed_before_s), counters.goodput(time.time())
    text = f"{counters.step} steps, {counters.tokens:,} tokens in {format_seconds(elapsed_s)}; checkpoints "
    text += f"held training up for {format_seconds(stall_s)} ({format_share(share)})"
    text += f"; {format_share(goodput)} of all time since the run began went into steps that count"
    recorder.event(counters.step, "done", text, stall_s=stall_s, stall_share=share, goodput=goodput)


def record_save(recorder: MetricsLogger, save: SaveRecord, newest: int | None) -> None:
    """Record in a run's life a save that ended, well or not.

    Args:
        recorder: of the run.
        save: what it took, and what was wrong.
        newest: step of the newest checkpoint there is; None without any.
    """
    for name in save.dropped:
        text = f"{name} was deleted: the disk is full, and a newer checkpoint is valid"
        recorder.event(save.step, "checkpoint_dropped", text)
    numbers = {"stall_s": save.stall_s, "write_s": save.write_s, "bytes": save.bytes}
    if save.error is not None:
        text = f"the checkpoint of step {save.step} could not be written: {save.error}; "
        text += f"the newest one is of step {newest}" if newest is not None else "there is none yet"
        recorder.event(save.step, "save_failed", text, **numbers)
        return
    text = f"step {save.step}: {format_bytes(save.bytes)} written in {format_seconds(save.write_s)}"
    if save.background:
        text += f" in the background, training stood still for {format_seconds(save.stall_s)}"
    recorder.event(save.step, "save", text, background=save.background, **numbers)


def not_written(save: SaveRecord, folder: Path) -> CheckpointError:
    """The error at the end of a run of a last checkpoint that failed.

    Args:
        save: the failed one.
        folder: of the checkpoints.
    """
    return CheckpointError(
        f"Checkpoint of step {save.step} could not be written",
        got=save.error or "",
        need="room and the right to write there; the checkpoints before it are untouched",
        try_="free disk space and run the same command: it continues from the newest checkpoint",
        where=str(folder),
    )


def check_files(folder: RunFolder, recorder: MetricsLogger, step: int) -> None:
    """Through the life of a run, see that what is written still goes into the run's folder. A file of it that was
    deleted begins again.

    Raises:
        ConfigError: the folder was deleted or moved.
    """
    folder.check()
    for name in recorder.log.reopen_deleted():
        text = f"{name} was deleted while the run was under way; its next row is that of step {step + 1}"
        recorder.event(step, "file_deleted", text)


def num_parameters(model: nn.Module) -> tuple[int, int]:
    """Numbers of parameters of a run's model, trained and in total; a matrix that two modules share counts once. Frozen
    weights kept as FP8 codes count too.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> _ = model.weight.requires_grad_(False)
        >>> num_parameters(model)
        (2, 8)
    """
    sizes = [(param.numel(), param.requires_grad) for param in model.parameters()]
    codes = sum(codes.numel() for name, codes in named_codes(model) if name.rpartition(".")[2] == "weight")
    return sum(size for size, trained in sizes if trained), sum(size for size, _ in sizes) + codes


def _in_words(trained: int, total: int) -> str:
    """Both numbers of parameters for a run's first event, where they differ.

    Example:
        >>> _in_words(5_870_000, 5_870_000), _in_words(45_000, 5_870_000)
        ('5.87M parameters', '45k of 5.87M parameters trained')
    """
    if trained == total:
        return f"{format_count(total)} parameters"
    return f"{format_count(trained)} of {format_count(total)} parameters trained"


_SWITCHES = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")


def add_in_fp32(device: str) -> None:
    """Add partial sums of GEMMs in FP32 on this device, for the life of a run. Nothing to do on a CPU.

    Args:
        device: "cpu" or "cuda".
    """
    if device == "cuda":
        for name in _SWITCHES:
            setattr(torch.backends.cuda.matmul, name, False)


def switches() -> dict[str, bool]:
    """Switches of torch at the start of a run, by torch's names."""
    return {name: getattr(torch.backends.cuda.matmul, name) for name in _SWITCHES}
