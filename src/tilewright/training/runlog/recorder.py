"""One place that reports: events, progress lines and evaluations, to the run's files, the screen and the sinks.

`record_files` writes the row of every step; `train_progress` and the sinks know how to show one.

Sinks (TensorBoard, trackio, wandb) get scalars and nothing else; metrics.jsonl stays the source of truth. Their
packages are imported when a run starts, so that a missing one stops it at once and not at its first log line.
"""

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from tilewright.core.errors import ConfigError
from tilewright.core.units import format_bits, format_loss, format_perplexity
from tilewright.training.executor.base import StepResult
from tilewright.training.executor.evaluate import DomainLoss, pooled
from tilewright.training.runlog.record_files import Counters, RunLog
from tilewright.training.runlog.sample_texts import TextSample
from tilewright.training.runlog.train_progress import TrainProgress, step_line

_PACKAGES = {"tensorboard": "torch.utils.tensorboard", "trackio": "trackio", "wandb": "wandb"}


class TensorBoardSink:
    """Event files in the run folder, under `tensorboard/`."""

    def __init__(self, module: ModuleType, run_dir: Path) -> None:
        self._writer = module.SummaryWriter(log_dir=str(run_dir / "tensorboard"))

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """wandb, and trackio, whose interface is the same."""

    def __init__(self, module: ModuleType, run_dir: Path, config: Mapping[str, Any]) -> None:
        self._module = module
        module.init(project="tilewright", name=run_dir.name, config=dict(config))

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._module.log(dict(scalars), step=step)

    def close(self) -> None:
        self._module.finish()


Sink = TensorBoardSink | WandbSink
"""Receives the scalars of a metrics row."""


def open_sinks(names: Sequence[str], run_dir: Path, config: Mapping[str, Any]) -> list[Sink]:
    """Sinks beside the recorder that a recipe asks for, ready.

    Raises:
        ConfigError: a package is not installed.
    """
    modules = [(name, _import(name)) for name in names]
    return [
        TensorBoardSink(module, run_dir) if name == "tensorboard" else WandbSink(module, run_dir, config)
        for name, module in modules
    ]


def scalars_of(row: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Finite numbers of a metrics row for the recorder's sinks, nested ones under `outer/inner`; `step` is left out.

    Example:
        >>> scalars_of({"step": 3, "loss": 2.5, "skipped": None, "eval": {"code": {"ppl": 9.0}}})
        {'loss': 2.5, 'eval/code/ppl': 9.0}
    """
    flat: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            flat |= scalars_of(value, f"{prefix}{name}/")
        elif not isinstance(value, (int, float)) or isinstance(value, bool) or f"{prefix}{name}" == "step":
            continue
        elif math.isfinite(value):
            flat[prefix + name] = float(value)
    return flat


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(_PACKAGES[name])
    except ImportError as error:
        raise ConfigError(
            f"Metrics sink {name} is not installed",
            got=str(error),
            need=f"the package {name}",
            try_=f'pip install "tilewright[{"track" if name == "trackio" else name}]"',
            where="log.sinks",
        ) from error


OVERDUE_S = 20.0
"""Seconds after a progress line from which on a step has one, whatever the log interval."""
BITS = "bits per byte"
_PHASES = {
    "start": "start of the run",
    "data": "step {next} of {steps}",
    "evaluate": "evaluation after step {step}",
    "save": "checkpoint of step {step}",
    "samples": "samples after step {step}",
}
"""Events of a run, in words."""


class MetricsLogger:
    """Writes down what happens in a run and shows it.

    Args:
        log: the run's files.
        progress: the screen.
        sinks: optional further homes of the metrics.
        steps: steps of the whole run.
        memory_limit: bytes the run may use, for the progress line.
        scaled: the run has a loss scale.
    """

    def __init__(
        self,
        log: RunLog,
        progress: TrainProgress,
        sinks: Sequence[Sink],
        *,
        steps: int,
        memory_limit: int,
        scaled: bool,
    ) -> None:
        self.log = log
        self._progress = progress
        self._sinks = sinks
        self._steps = steps
        self._memory_limit = memory_limit
        self._scaled = scaled
        self._first = True

    def watch(self, where: Callable[[], tuple[str, int]]) -> None:
        """The recorder says what the run does while nothing else is said.

        Args:
            where: gives one of `_PHASES`, and the steps done.
        """

        def words() -> str:
            phase, step = where()
            return _PHASES[phase].format(step=step, next=step + 1, steps=self._steps)

        self._progress.watch(words)

    def step(self, row: Mapping[str, Any], counters: Counters, result: StepResult, *, shown: bool = True) -> None:
        """The recorder's lines on a step's row (`RunLog.step`): a progress line, and an event where the step was
        skipped or computed again."""
        if result.redone is not None:
            text = f"step {counters.step} computed again in wider formats: {result.redone}"
            self.event(counters.step, "redo", text, grad_norm=result.grad_norm, loss=result.loss)
        if result.skipped is not None:
            self._skipped(counters.step, result)
        if shown:
            self._show(row, counters)

    def evaluation(self, step: int, tables: Mapping[str, Mapping[str, DomainLoss]], seconds: float) -> None:
        """Record an evaluation: a row, an event and a line on the screen.

        Args:
            step: done.
            tables: results by domain: `eval`, `eval_part` of what evaluations on the way take where that is less,
                `eval_other` of text that is not trained on. Empty ones but the first are left out.
            seconds: that it took.
        """
        results, others = tables["eval"], tables["eval_other"]
        shown = {name: table for name, table in tables.items() if table or name == "eval"}
        values = {name: {domain: r.to_json() for domain, r in table.items()} for name, table in shown.items()}
        row = self.log.metrics(step, **values)
        whole = pooled(results)
        text = "no held-out targets" if whole is None else _held_out_words(whole)
        self.log.event(step, "eval", f"held-out {text}", seconds=seconds)
        line = f"eval {step}/{self._steps} | {text} | {_by_domain(results)}"
        if others:
            line += f" | not trained on, {_by_domain(others)}"
        self._progress.note(line)
        for sink in self._sinks:
            sink.log(step, scalars_of(row))

    def sample(self, step: int, sample: TextSample) -> None:
        """Record a sample: a row of samples.jsonl, and the text on the screen."""
        self.log.sample(step, sample.domain, sample.prompt, sample.text, sample.reference)
        self._progress.note(
            f"sample, {sample.domain}, [prompt] and what the model writes:\n[{sample.prompt}]{sample.text}\n"
        )

    def event(self, step: int, kind: str, message: str, *, shown: bool = True, **numbers: Any) -> None:
        """The recorder's report of an event, in the file and, unless `shown` is false, on the screen."""
        self.log.event(step, kind, message, **numbers)
        if shown:
            self._progress.note(f"{kind.replace('_', ' ')}: {message}")

    def close(self) -> None:
        """Close the recorder's files, screen and sinks."""
        self._progress.close()
        for sink in self._sinks:
            sink.close()
        self.log.close()

    def _skipped(self, step: int, result: StepResult) -> None:
        kind = "overflow" if result.skipped == "overflow" else "skip"
        text = f"step {step} skipped: {result.skipped} (gradient norm {result.grad_norm:.3g})"
        self.event(step, kind, text, grad_norm=result.grad_norm, loss_scale=result.loss_scale)

    def _show(self, row: Mapping[str, Any], counters: Counters) -> None:
        """Show a line of the recorder: rates are means since the last line, the rest is this step's."""
        interval, first, self._first = self.log.take_interval(), self._first, False
        shown = {
            **row,
            "tokens_per_s": interval.tokens / interval.seconds,
            "wait_share": interval.wait_s / interval.seconds,
        }
        steps_left = self._steps - counters.step
        # The first step compiles: no estimate from it alone. The last one leaves nothing to estimate.
        estimated = steps_left and (interval.steps > 1 or not first)
        seconds_left = interval.seconds / interval.steps * steps_left if estimated else None
        line = step_line(
            shown,
            steps=self._steps,
            memory_limit=self._memory_limit,
            num_skips=counters.num_skips,
            seconds_left=seconds_left,
            scaled=self._scaled,
        )
        self._progress.line(line)
        for sink in self._sinks:
            sink.log(counters.step, scalars_of(shown))


def _held_out_words(result: DomainLoss) -> str:
    text = f"loss {format_loss(result.loss)}, perplexity {format_perplexity(result.loss)}"
    bits = result.bits_per_byte
    return text if bits is None else f"{text}, {format_bits(bits)} {BITS}"


def _by_domain(results: Mapping[str, DomainLoss]) -> str:
    """The recorder's numbers by domain, each with its unit: bits per byte, or the perplexity of what has no bytes of
    text."""
    units: dict[str, list[str]] = {}
    for domain, result in results.items():
        bits = result.bits_per_byte
        unit, number = ("perplexity", format_perplexity(result.loss)) if bits is None else (BITS, format_bits(bits))
        units.setdefault(unit, []).append(f"{domain} {number}")
    return "; ".join(f"{unit} by domain: {', '.join(numbers)}" for unit, numbers in units.items()) or "no domain"
