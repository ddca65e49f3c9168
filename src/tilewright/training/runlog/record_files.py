"""Counters of a run, and its record in append-only files: metrics.jsonl, events.jsonl, samples.jsonl and, where
precision is controlled, precision.jsonl.

One JSON object a line, written at once, so a killed process loses at most the line it was writing. On resume that
corrupt line is cut, and so are rows past the step resumed from, which will be written again, all of them where a run
begins again: curves never double.
Events of the process (start, stop, a rejected checkpoint) stay. Numbers that are not finite are null.
"""

import json
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tilewright.core.atomic_io import write_whole
from tilewright.core.json_text import to_json
from tilewright.training.executor.base import StepResult
from tilewright.training.runlog.run_folder import cannot_write

# Events that a resumed run brings about again; the others tell of the process and stay.
REPLAYED_EVENTS = frozenset({
    "overflow", "skip", "eval", "precision_switch", "precision_move", "precision_budget", "redo", "save", "done",
    "report", "mix", "mix_eval", "mix_refused",
})  # fmt: skip

Row = dict[str, Any]
_FILES = ("metrics", "events", "samples", "precision")


@dataclass
class Counters:
    """Totals of a run up to and including `step`; skipped steps count as steps. Part of every checkpoint."""

    step: int = 0
    tokens: int = 0
    targets: int = 0
    num_skips: int = 0
    elapsed_s: float = 0.0
    """Seconds of training, those before a resume included; set when a checkpoint is taken."""
    step_s: float = 0.0
    """Seconds of the steps that count: of one that was lost with a process and computed again, the last time's."""
    began_unix: float = 0.0
    """When the run began, by the clock; later by as much as it paused. 0 before the first step."""
    paused_unix: float = 0.0
    """When the run was stopped in good order; 0 in checkpoints of a run that went on."""

    def begin(self, now: float) -> None:
        """Counters of a run when it begins or continues. The time since a stop in good order is not lost, that since a
        crash is.

        Args:
            now: Unix time.
        """
        if self.paused_unix:
            self.began_unix += now - self.paused_unix
        elif not self.began_unix:  # of a new run, and of checkpoints that do not say it
            self.began_unix, self.step_s = now - self.elapsed_s, self.elapsed_s
        self.paused_unix = 0.0

    def goodput(self, now: float) -> float:
        """The run's goodput: the share of the time since it began that went into steps that count.

        Args:
            now: Unix time.
        """
        return min(1.0, self.step_s / max(now - self.began_unix, 1e-9))

    def add(self, result: StepResult) -> None:
        """Count a step in the run's counters."""
        self.step += 1
        self.step_s += result.seconds
        self.tokens += result.num_tokens
        self.targets += result.num_targets
        self.num_skips += result.skipped is not None

    def state_dict(self) -> dict[str, Any]:
        """The run's counters as state, in JSON types."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the run's counters from `state_dict`."""
        for name, value in state.items():
            setattr(self, name, value)


@dataclass
class Interval:
    """Sums over the steps since the last progress line."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    wait_s: float = 0.0


class JsonLines:
    """One append-only file of JSON rows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open()

    def _open(self) -> None:
        # Without a buffer: what a full disk refuses is not tried again by `close`, whose error would hide the first.
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 (held until close)

    def append(self, row: Mapping[str, Any]) -> None:
        """Append a row to a record's file; it is with the operating system when this returns."""
        try:
            text = json.dumps(row, default=float, allow_nan=False)
        except ValueError:  # a number that is not finite, which is rare
            text = to_json(row, default=float)
        left = memoryview(f"{text}\n".encode())
        try:
            while left:  # a disk that fills takes part of a row
                left = left[self._file.write(left) :]
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def reopen_deleted(self) -> bool:
        """Begin a record's file again where it is not at its path any more; if that was so."""
        try:
            there, held = os.stat(self.path), os.fstat(self._file.fileno())
            if (there.st_dev, there.st_ino) == (held.st_dev, held.st_ino):
                return False
        except FileNotFoundError:
            pass
        self._file.close()
        self._open()
        return True

    def close(self) -> None:
        """Close a record's file."""
        self._file.close()


def repair(path: Path, keep: Callable[[Row], bool]) -> None:
    """Repair a record's file: cut lines that are not whole JSON objects and rows that `keep` refuses; the file is
    replaced whole."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    kept = [line for line in lines if (row := _parse(line)) is not None and keep(row)]
    if len(kept) < len(lines):
        write_whole(path, b"".join(kept).decode("utf-8"))


class RunLog:
    """Writes metrics, events and samples of one run, with the run's own clock.

    Args:
        folder: the run folder.
        resumed_step: rows after this step are cut; all rows where no step was kept (None), of step 0 too.
        elapsed_s: seconds the run had been training at that step; `time_s` continues from there.
        follows: another process writes the files, and this one nothing.
    """

    def __init__(
        self, folder: Path, *, resumed_step: int | None = None, elapsed_s: float = 0.0, follows: bool = False
    ) -> None:
        kept = -1 if resumed_step is None else resumed_step
        if not follows:
            for name in ("metrics.jsonl", "samples.jsonl", "precision.jsonl"):
                repair(folder / name, lambda row: row["step"] <= kept)
            repair(folder / "events.jsonl", lambda row: row["step"] <= kept or row["kind"] not in REPLAYED_EVENTS)
        self._started = time.perf_counter() - elapsed_s
        paths = [Path(os.devnull) if follows else folder / f"{name}.jsonl" for name in _FILES]
        self._metrics, self._events, self._samples = map(JsonLines, paths[:3])
        self._precision_path = paths[3]
        self._precision: JsonLines | None = None
        self._interval = Interval()
        self.recent: deque[tuple[int, float, float]] = deque(maxlen=8)
        """Of the last steps that were not skipped: number, seconds, and `StepResult.processor_s`."""
        self.step_done = resumed_step or 0
        """Last step that was counted."""

    @property
    def elapsed_s(self) -> float:
        """Seconds that the recorded run has been going, those before the resume included."""
        return time.perf_counter() - self._started

    def step(
        self,
        counters: Counters,
        result: StepResult,
        lr: float,
        wait_s: float,
        memory: Mapping[str, Any] | None = None,
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> Row:
        """Record a step: append the row of metrics of one that was just counted to metrics.jsonl, and return it.

        Args:
            counters: with this step.
            result: of the step.
            lr: learning rate that it used.
            wait_s: seconds that it waited for data.
            memory: a memory tracker's snapshot, at steps that have one.
            more: numbers of the data alone, and of hooks.
        """
        seconds, self.step_done = result.seconds + wait_s, counters.step
        row = {
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": lr,
            "loss_scale": result.loss_scale,
            "skipped": result.skipped,
            "tokens": counters.tokens,
            "tokens_per_s": result.num_tokens / seconds,
            "step_s": result.seconds,
            "wait_s": wait_s,
            "wait_share": wait_s / seconds,
            **more,
            **result.aux,
        }
        if result.redone is not None:
            row["redone"] = result.redone
        if memory is not None:
            row |= {"memory_bytes": memory["peak_bytes"], "memory": memory["owners"]}
            row |= {"memory_phases": memory["phase_owners"], "memory_tiers": memory["tiers"]}
        # Skipped steps are left out of the recent times: nothing was updated in them.
        if result.skipped is None:
            self.recent.append((counters.step, result.seconds, result.processor_s))
        # Sums since the last printed line.
        self._interval.steps += 1
        self._interval.tokens += result.num_tokens
        self._interval.seconds += seconds
        self._interval.wait_s += wait_s
        return self.metrics(counters.step, **row)

    def take_interval(self) -> Interval:
        """The sums in the run's record since the last call."""
        taken, self._interval = self._interval, Interval()
        return taken

    def metrics(self, step: int, **values: Any) -> Row:
        """Append a row to metrics.jsonl and return it."""
        row = {"step": step, "time_s": round(self.elapsed_s, 4), **values}
        self._metrics.append(row)
        return row

    def event(self, step: int, kind: str, message: str, **numbers: Any) -> None:
        """Append an event to events.jsonl: one automatic decision or happening, with the numbers behind it."""
        self._events.append(
            {"step": step, "time_s": round(self.elapsed_s, 4), "kind": kind, "message": message, **numbers}
        )

    def sample(self, step: int, domain: str, prompt: str, text: str, reference: str = "") -> None:
        """Append a sample to samples.jsonl: a text that the model wrote, and what stands there in the data where the
        prompt is a question."""
        row = {"step": step, "time_s": round(self.elapsed_s, 4), "domain": domain, "prompt": prompt, "text": text}
        self._samples.append(row | ({"reference": reference} if reference else {}))

    def precision(self, *, step: int, **values: Any) -> None:
        """Append to precision.jsonl a sample, a move or a refused move of the precision controller
        (`precision.controller.controller_log` reads them)."""
        self._precision = self._precision or JsonLines(self._precision_path)
        self._precision.append({"step": step, **values})

    def reopen_deleted(self) -> list[str]:
        """Begin record files again that were deleted under the run; their names."""
        files = (self._metrics, self._events, self._samples, self._precision)
        return [file.path.name for file in files if file is not None and file.reopen_deleted()]

    def close(self) -> None:
        """Close the record's files."""
        for file in (self._metrics, self._events, self._samples, self._precision):
            if file is not None:
                file.close()


def _parse(line: bytes) -> Row | None:
    """The row in a line of a record's file, None where it is corrupt."""
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and "step" in row else None
