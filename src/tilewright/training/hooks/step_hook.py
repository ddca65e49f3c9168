"""Hooks around the steps of a run: one may change a step before it is computed, and hears how it went.

    class Warm(StepHook):  # `train(recipe, hooks=[lambda setup, parts: Warm()])`
        name = "warm"

        def before_step(self, step):
            return replace(step, lr=step.lr * min(1.0, step.number / 100))

Precision, teacher, free memory, ranks, re-planning, pipelines and energy are hooks; `assemble` and `loop` list them in
order.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tilewright.core.errors import ConfigError
from tilewright.data.batches.microbatches import Batch
from tilewright.training.executor.base import StepResult
from tilewright.training.runlog.recorder import MetricsLogger
from tilewright.training.runlog.run_folder import RunFolder


@dataclass(frozen=True)
class Step:
    """A step, before it is computed. A hook gives another one to change it: `dataclasses.replace(step, lr=...)`."""

    number: int
    """Counted from 1."""
    microbatches: Sequence[Batch]
    """Of this rank, on the host."""
    lr: float
    """Learning rate."""
    row_length: int | None
    """Tokens of the longest row, once ranks have agreed of any rank; None of images."""
    wait_s: float
    """Seconds that the run waited for the micro-batches."""
    due: bool
    """A progress line follows it."""
    recorder: MetricsLogger
    """For events, and for rows of metrics."""
    folder: RunFolder
    """For other files; of several ranks the first one writes them."""
    memory: Mapping[str, Any] | None = None
    """After a step with a line: the memory tracker's snapshot."""


class StepHook(Protocol):
    """Methods called around each step. A class has those that it is for, and inherits the rest, which do nothing.

    Of several ranks each has its hook, and all of them are called in the same order: what a hook decides must be the
    same on all, and what it measures be agreed on before (`parallel.agree`).
    """

    name: str = ""
    """Of its state in checkpoints; empty: it has none. Of several ranks the first one's state is saved."""
    next_step: float = 0
    """Step, counted from 1, from which on it is called; until then only where a line is due or rows have another length
    than in the step before."""
    repeatable: bool = False
    """Its calls change nothing where they find no memory, and are made again under a smaller memory plan."""

    def before_step(self, step: Step) -> Step:
        """Choose the step to compute before it begins: the given one or another. The weights are those of the step
        before."""
        return step

    def after_step(self, step: Step, result: StepResult) -> None:
        """Act after a step was computed or skipped (`result.skipped`), counted and recorded.

        Args:
            step: as it was computed.
            result: over all ranks.
        """

    def numbers(self, step: Step, result: StepResult) -> Mapping[str, Any]:
        """Numbers that the hook adds to a step's row of metrics, or mappings of them. Called on all ranks, before the
        row is written."""
        return {}

    def phase(self, name: str) -> None:
        """A hook's call when the run turns to something else: `data` (and the step), `evaluate`, `save`, `samples` or
        `export`."""

    def restart(self, steps_left: int, begin_s: float) -> Mapping[str, Any]:
        """A hook's settings, `section.field`, with which the run is to begin again from the checkpoint that was just
        written; empty: it continues. Called after each save on the way, and the same on all ranks.

        Args:
            steps_left: of the run.
            begin_s: seconds that the run took to begin.
        """
        return {}

    def state_dict(self) -> dict[str, Any]:
        """A hook's state on which the next steps depend, in JSON types: part of each checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a hook's state from `state_dict()`. Where a checkpoint has no part of this name, it is not called."""


class HookPart(Protocol):
    """Anything with numbers and a state, for `AfterStep`."""

    def numbers(self, step: Step, result: StepResult) -> Mapping[str, Any]:
        """A hook's numbers for the row of metrics: see `StepHook.numbers`."""
        ...

    def phase(self, name: str) -> None:
        """A hook's call when the run enters another phase: see `StepHook.phase`."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """A hook's state for a checkpoint: see `StepHook.state_dict`."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a hook's state of a checkpoint: see `StepHook.load_state_dict`."""
        ...


class AfterStep(StepHook):
    """Calls a function after each step, directly: the function's file is all that a step runs of it.

    Args:
        after_step: see `StepHook.after_step`.
        name: of the state in checkpoints.
        part: whose numbers and state they are; None: there are none.
    """

    def __init__(
        self,
        after_step: Callable[[Step, StepResult], None],
        *,
        name: str = "",
        part: HookPart | None = None,
    ) -> None:
        self.after_step = after_step  # type: ignore[method-assign]
        self.name = name
        if part is not None:
            self.numbers = part.numbers  # type: ignore[method-assign]
            self.phase = part.phase  # type: ignore[method-assign]
            self.state_dict = part.state_dict  # type: ignore[method-assign]
            self.load_state_dict = part.load_state_dict  # type: ignore[method-assign]


def by_name(hooks: Iterable[StepHook], taken: Collection[str] = ()) -> dict[str, StepHook]:
    """The hooks that have a state, under their names in checkpoints.

    Args:
        hooks: of a run.
        taken: other names there.

    Raises:
        ConfigError: two of them have one name, or one of those.
    """
    found: dict[str, StepHook] = {}
    for hook in hooks:
        if hook.name in {*taken, *found}:
            raise ConfigError(
                "Two parts of a checkpoint with one name",
                got=f"a hook of class {type(hook).__qualname__} with the name {hook.name!r}",
                need="a name of its own for each hook with a state",
                try_=f'name = "{hook.name}_2" in {type(hook).__qualname__}',
                where="hooks",
            )
        found |= {hook.name: hook} if hook.name else {}
    return found


def calls(hooks: Sequence[StepHook], method: str) -> list[tuple[StepHook, Callable[..., Any]]]:
    """Hooks with their method of this name, where they have one of their own."""
    found = [(hook, getattr(hook, method)) for hook in hooks]
    return [(hook, call) for hook, call in found if getattr(call, "__func__", call) is not getattr(StepHook, method)]


class RestartError(Exception):
    """The run is to begin again from its newest checkpoint, with other settings.

    Args:
        settings: by name, `section.field`.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(", ".join(settings))
        self.settings = settings


def restart_if_asked(hooks: Sequence[StepHook], steps: int, step: int, begin_s: float, recorder: MetricsLogger) -> None:
    """Restart the run if a hook asks for it: save a checkpoint and begin again from it.

    Args:
        hooks: of the run.
        steps: of the whole run.
        step: of the checkpoint.
        begin_s: seconds that the run took to begin.
        recorder: of the run.

    Raises:
        RestartError: a hook does.
    """
    for hook, restart in calls(hooks, "restart"):
        if settings := restart(steps - step, begin_s):
            shown = {name: str(value) if len(str(value)) < 80 else "(see settings)" for name, value in settings.items()}
            text = ", ".join(f"{name} = {value}" for name, value in shown.items())
            recorder.event(
                step, "restart", f"the run begins again from here with {text} ({hook.name})", settings=settings
            )
            raise RestartError(settings)
