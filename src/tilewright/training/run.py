"""One run in motion: steps, and what is due between them (evaluation, checkpoints, the end).

`loop` assembles a `Run` and calls `train`. The run decides nothing about numbers: `standard` computes, `state` and
`checkpoint` keep, `files` and `recorder` write down. What is not due in a step is not called in it. Read `Run.train`,
`Run._step` and the executor's `standard`; docs/explanation/how-a-step-runs.md walks through them.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tilewright.core.errors import FitError, NumericsError
from tilewright.data.batches.microbatches import row_length
from tilewright.memory.tracking.byte_tables import is_out_of_memory
from tilewright.parallel.agree import OnAllRanksError, any_of
from tilewright.parallel.launch import on_first
from tilewright.precision.float8 import audit_table
from tilewright.training.assemble import Components, RunContext
from tilewright.training.checkpoint.checkpoint_state import TrainState
from tilewright.training.checkpoint.checkpoint_store import CheckpointStore, SaveRecord
from tilewright.training.components import lifecycle
from tilewright.training.components.export import export
from tilewright.training.components.lifecycle import RunResult, check_files
from tilewright.training.components.recipe_data import data_events, evaluation_line
from tilewright.training.components.run_samples import longest_document, step_line
from tilewright.training.executor.base import StepResult
from tilewright.training.executor.evaluate import DomainLoss, evaluate_texts
from tilewright.training.executor.step_transaction import (
    PartialUpdateError,
    Stateful,
    UnrecoverableStepError,
    run_with_retries,
)
from tilewright.training.hooks.adaptive_replanner import AdaptiveReplanner
from tilewright.training.hooks.rank_agreement import Agreement
from tilewright.training.hooks.replan_setup import cheapest_fixes
from tilewright.training.hooks.step_hook import Step, StepHook, by_name, calls, restart_if_asked
from tilewright.training.planning.oom_report import no_memory
from tilewright.training.planning.pace import told_before
from tilewright.training.runlog.recorder import OVERDUE_S, MetricsLogger
from tilewright.training.runlog.run_folder import RunFolder
from tilewright.training.runlog.sample_texts import run_samples
from tilewright.training.runlog.signals import StopRequest


@dataclass
class Run:
    """One run, assembled and resumed: `train` brings it to its last step or to a stop."""

    setup: RunContext
    parts: Components
    state: TrainState
    store: CheckpointStore
    folder: RunFolder
    recorder: MetricsLogger
    replanner: AdaptiveReplanner
    """Makes room where memory runs out."""
    agreement: Agreement
    """An event that one of several ranks sees is acted on by all."""
    hooks: tuple[StepHook, ...]
    """The hooks around the steps, in order."""
    resumed: bool
    left_out: frozenset[int] = frozenset()
    """Steps, counted from 0, whose batches are drawn and not learned from: their gradients turn bad half-way."""
    evals: Mapping[str, DomainLoss] = field(default_factory=dict)
    last: StepResult | None = None
    _began: float = 0.0
    _ready_s: float = 0.0
    _elapsed_before_s: float = 0.0
    _evaluated_step: int = -1
    _stall_s: float = 0.0
    _told_notes: int = 0
    _before: Sequence[tuple[Stateful, dict[str, Any]]] = ()  # stream and hooks, until a step has changed anything else
    _saved_step: int = -1
    _saved_at: float = 0.0
    _saving: int = 0  # saves whose end has not been reported
    _phase: str = "start"
    _shown_at: float = field(default_factory=time.monotonic)
    _number: int = 0  # of the step that is taken
    _news: bool = True  # of this step: hooks that wait for a later one are called too
    _row_length: int | None = None

    def __post_init__(self) -> None:
        self.recipe = self.setup.recipe
        self._longest = longest_document(self.recipe)
        self._calls_before, self._calls_after = calls(self.hooks, "before_step"), calls(self.hooks, "after_step")
        self._calls_phase, self._calls_numbers = calls(self.hooks, "phase"), calls(self.hooks, "numbers")
        self._stateful = [self.parts.stream, *by_name(self.hooks).values()]

    @property
    def step(self) -> int:
        """Steps that the run has done."""
        return self.parts.counters.step

    def begin(self, began: float) -> None:
        """Begin a run: record the start; `began` is the `perf_counter` at which the work on it began."""
        self._began, self._ready_s = began, time.perf_counter() - began
        self.parts.counters.begin(time.time())
        self._elapsed_before_s = self.recorder.log.elapsed_s
        self._saved_step, self._saved_at = self.step, time.monotonic()  # nothing is to be saved before the first step
        train, setup = self.recipe.train, self.setup
        planned_s = setup.plan.known_step_s
        for kind, text in told_before(self.recipe, self.step, planned_s, setup.site.rates, setup.machine):
            self.recorder.event(self.step, kind, text)
        if not self.resumed:
            how = f"{self.parts.modes.mode} on {setup.world.of(setup.machine.device_name)}"
            length = f"{train.steps} steps of {step_line(self.recipe)}, in {self.folder.path}"
            lifecycle.record_start(self.recorder, self.parts.counted, how, length, data_events(setup.prepared))

    def train(self, stop: StopRequest) -> RunResult:
        """Run to the last step, or until a stop is asked for; the state is saved and recorded either way.

        Raises:
            NumericsError: the loss or its scale is not usable; the last good state was saved.
            FitError: the device's memory ran out; the newest checkpoint stays.
            CheckpointError: the last checkpoint could not be written.
        """
        steps, first = self.recipe.train.steps, self.step
        self.recorder.watch(lambda: (self._phase, self.step))
        if first == 0 and self.recipe.model.weights == "load":  # what it could do before
            line = evaluation_line(self.recipe, self.parts.held_out, self.setup.other_text)
            self.recorder.event(0, "evaluating", line)
            self._evaluate()
            self._write_samples()
        self._agree(stop)
        while self.step < steps and self.asked_to_stop is None:
            try:
                self._step()
            except UnrecoverableStepError as lost:
                lost.step = self.step
                self.recorder.event(self.step + 1, "lost_step", str(lost))
                raise
            except NumericsError as error:
                self._keep_last_good(error)
                raise
            except PartialUpdateError as error:
                self.recorder.event(self.step, "stop", str(error))
                raise
            except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
                if not is_out_of_memory(error) or not (self.agreement.alone or isinstance(error, OnAllRanksError)):
                    raise
                raise self._out_of_memory(error) from error
            if self.step == first + 1:
                self._check_no_fallbacks()
            if self.resumed and self.step == first + 1:
                lifecycle.record_recovery(self.recorder, self.step, self._began, self._ready_s)
            self._between_steps()
        if finished := self.step >= steps:
            self._evaluate()
        if self.recipe.checkpoint.save_last or not finished:
            self._save_at_end()
        else:
            self._write_audit()
            self.recorder.event(self.step, "not_saved", "the last step is not saved: checkpoint.save_last = false")
        if finished:
            self._finish()
        else:
            lifecycle.record_stop(self.recorder, self.step, self.asked_to_stop)
        loss = self.last and self.last.loss
        return RunResult(self.folder.path, self.step, loss, self.evals, None if finished else self.asked_to_stop)

    @property
    def asked_to_stop(self) -> str | None:
        """The reason to stop the run after this step, as all ranks agreed at the last one; None: it continues."""
        return self.agreement.stop.reason

    def try_steps(self, stop: StopRequest, enough: Callable[[Sequence[float]], bool]) -> list[tuple[float, float]]:
        """Try steps of a run to be timed, until their seconds (of several ranks the slowest one's, so that all stop in
        the same step) are `enough`, or a stop is asked for. Returns these of each, and this thread's processor's."""
        found: list[tuple[float, float]] = []
        self._agree(stop)
        while self.asked_to_stop is None and not enough([clock_s for clock_s, _ in found]):
            began, worked = time.perf_counter(), time.thread_time()
            self._step()
            worked_s, took_s = time.thread_time() - worked, time.perf_counter() - began
            found.append((self.agreement.most(took_s), worked_s))
        return found

    def _step(self) -> None:
        """Run one step: batches, learning rate, hooks, the executor's step, its record. Whole or not at all."""
        parts, train, number = self.parts, self.recipe.train, self.step + 1
        self._number = number
        self._at("data")
        self._before = [(part, part.state_dict()) for part in self._stateful]
        microbatches, lr = parts.stream.next_step(), parts.schedule.lr_at(self.step)
        due = number % train.log_interval == 0 or number in (1, train.steps)
        length, wait_s = row_length(microbatches, self._longest), parts.stream.wait_s
        step = self._prepared(Step(number, microbatches, lr, length, wait_s, due, self.recorder, self.folder))
        if self.step in self.left_out:
            result = StepResult.left_out(step.microbatches)
        else:
            result = self._retried(partial(parts.executor.step, step.microbatches, step.lr))
        self._before, self.last = (), result
        parts.counters.add(result)
        step = self._written(step, result)
        self.agreement.save_due = self._minutes_passed()
        messages = parts.executor.transaction.oom_messages
        for hook, after_step in self._calls_after:
            if self._news or messages or number >= hook.next_step:
                self._retried(partial(after_step, step, result)) if hook.repeatable else after_step(step, result)

    def _prepared(self, step: Step) -> Step:
        """The step of a run as hooks want it, those that are due: see `StepHook.next_step`."""
        self._news = False
        for hook, before_step in self._calls_before:
            if step.due or step.row_length != self._row_length or step.number >= hook.next_step:
                step = self._retried(partial(before_step, step)) if hook.repeatable else before_step(step)
        self._news |= step.due or step.row_length != self._row_length
        self._row_length = step.row_length
        return step

    def _retried(self, work: Callable[[], Any]) -> Any:
        """The result of a run's step; called again under a tighter plan where memory runs out and all ranks stopped."""
        return run_with_retries(work, self._make_room, alone=self.agreement.alone)

    def _make_room(self, said: str) -> bool:
        self._news = True
        return self.replanner.reduce_memory(self._number, said)

    def _written(self, step: Step, result: StepResult) -> Step:
        """The step of a run, its row of metrics written; what is due with a line is done, and measured."""
        parts = self.parts
        memory = parts.memory_tracker.snapshot(parts.model, parts.optimizer) if step.due else None
        more = self.setup.world.traffic.numbers() if self.setup.world.everyone.size > 1 else {}
        more |= parts.stream.numbers()
        for _, numbers in self._calls_numbers if step.due else ():
            more |= numbers(step, result)
        row = self.recorder.log.step(parts.counters, result, step.lr, step.wait_s, memory, more)
        if shown := step.due or time.monotonic() - self._shown_at >= OVERDUE_S:
            self._shown_at = time.monotonic()
        if shown or result.skipped is not None or result.redone is not None:
            self.recorder.step(row, parts.counters, result, shown=shown)
        if not step.due:
            return step
        self._check_folder()
        return replace(step, memory=memory)

    def _agree(self, stop: StopRequest) -> None:
        """Agree before the first step of a run if ranks were asked to stop."""
        self.agreement.begin(stop)
        self.agreement.save_due = self._minutes_passed()
        self.agreement.agree()

    def _at(self, phase: str, *, long: bool = False) -> None:
        """Note where the run is, for the user; of several ranks for those that watch this one, too."""
        for _, goes_on in self._calls_phase if phase != self._phase else ():
            goes_on(phase)
        self._phase = phase
        if (heartbeat := self.setup.world.heartbeat) is not None:
            heartbeat.at(self.step + 1, phase, long=long)

    def _minutes_passed(self) -> bool:
        return 0 < 60 * self.recipe.checkpoint.interval_minutes <= time.monotonic() - self._saved_at

    def _between_steps(self) -> None:
        self._tell_notes()
        if self.recipe.train.eval_interval and self.step % self.recipe.train.eval_interval == 0:
            self._evaluate()
        if self._is_save_due() and self.step < self.recipe.train.steps:
            self._check_folder()
            self._stall_s += self._save()
            self._saved_at = time.monotonic()
            restart_if_asked(self.hooks, self.recipe.train.steps, self.step, self._ready_s, self.recorder)
        if self._saving:
            self._tell_saves()

    def _tell_notes(self) -> None:
        """Report notes of the run's model on settings that it could not follow; it finds some with the first batch."""
        for note in self.parts.model.notes[self._told_notes :]:
            self.recorder.event(self.step, "fallback", note)
        self._told_notes = len(self.parts.model.notes)

    # ---- evaluation ----

    def _evaluate(self) -> None:
        if self._evaluated_step == self.step:
            return
        self._at("evaluate")
        started = time.perf_counter()
        data, fp32 = self.setup.world.data.handle, self.recipe.precision.eval_fp32
        how = {"device": self.setup.device, "fp32": fp32, "data": data}
        texts, whole = (*self.parts.held_out_parts, self.setup.other_text), self.step in (0, self.recipe.train.steps)
        self.parts.heap.give_back()  # what steps leave free has not the sizes that an evaluation asks for
        with self.parts.executor.access.forward_passes(self.parts.model):
            tables = evaluate_texts(self.parts.model, *texts, whole=whole, **how)
        self.parts.heap.give_back()
        self.evals, self._evaluated_step = tables["eval"], self.step
        self.recorder.evaluation(self.step, tables, time.perf_counter() - started)

    # ---- checkpoints ----

    def _check_folder(self) -> None:
        """Check that the run's folder still gets what is written, of several ranks on all; see `check_files`."""
        on_first(self.setup.world, partial(check_files, self.folder, self.recorder, self.step))

    def _is_save_due(self) -> bool:
        """True if a save of the run is due, by steps or by minutes."""
        interval = self.recipe.checkpoint.interval
        if interval and self.step % interval == 0:
            return True
        return self.agreement.save_due

    def _check_no_fallbacks(self) -> None:
        """Stop a strict run whose matmuls ran in another way than its recipe says; the record has which.

        Raises:
            HardwareError: some did.
        """
        if self.recipe.precision.strict:
            self._write_audit()
            self.parts.audit.check_no_fallbacks()

    def _save(self, now: bool = False) -> float:
        """Save this step of the run and the audit up to it; returns the seconds that training stood still."""
        self._at("save", long=True)
        self._write_audit()
        self._saved_step = self.step
        self._saving += 1
        # They come with a parameter's first update, and running asks for all: after a stop before the first step too.
        self.parts.optimizer.init_states()
        self.parts.counters.elapsed_s = self.recorder.log.elapsed_s
        meta = self.state.meta() | {"precision": self.parts.modes.mode, "recipe": self.setup.recipe_digest}
        return self.state.save(self.store, self.step, meta, now=now)

    def _write_audit(self) -> None:
        self.folder.write_json(audit_table.FILE, self.parts.audit.to_json(self.step))

    def _save_at_end(self) -> None:
        """Save the run's last step and see it on the disk.

        Raises:
            CheckpointError: it is not there.
        """
        self.parts.counters.paused_unix = time.time()
        self._save(now=True)
        if (failed := self._tell_saves()) is not None and failed.step == self.step:
            raise lifecycle.not_written(failed, self.store.folder)

    def _tell_saves(self) -> SaveRecord | None:
        """Record the run's saves that ended; returns the last one that failed."""
        failed = None
        for save in self.store.finished():
            self._saving -= 1
            lifecycle.record_save(self.recorder, save, self.store.newest_step)
            failed = failed if save.error is None else save
        return failed

    def _keep_last_good(self, error: NumericsError) -> None:
        """Save the last good state after bad numbers, without the bad update, if it is finite, and record why."""
        self.parts.counters.step += 1
        sound = self.parts.executor.access.is_finite(self.parts.model)
        if not any_of(self.parts.setup.world.everyone.handle, not sound):  # ranks may hold other parameters
            self._save(now=True)
            self._tell_saves()
        self.recorder.event(self.step, "stop", str(error), cause="numerics")

    def _out_of_memory(self, error: RuntimeError | MemoryError) -> FitError:
        """The error of a run whose step has no memory under any plan. Nothing changed: the steps before are saved."""
        memory = self.parts.memory_tracker.snapshot(self.parts.model, self.parts.optimizer)
        when, fixes = f"in step {self.step + 1}", cheapest_fixes(self.setup)
        fit = no_memory(error, memory, when, self.recipe, fixes)
        self.recorder.event(self.step, "stop", str(fit), memory_phases=memory["known_phases"])
        if self._before:
            for part, state in self._before:
                part.load_state_dict(state)
            if self.step != self._saved_step:
                self._save_what_was_done()
        return fit

    def _save_what_was_done(self) -> None:
        """Save the run's steps before one that found no memory, if that takes not too much itself."""
        try:
            self._save(now=True)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            text = f"no memory to save step {self.step} either; the newest checkpoint stays"
            self.recorder.event(self.step, "save_failed", text)
        self._tell_saves()

    # ---- the end ----

    def _finish(self) -> None:
        self._write_samples()
        if self.recipe.checkpoint.export_hf:
            self._export()
        lifecycle.record_done(self.recorder, self.parts.counters, self._stall_s, self._elapsed_before_s)

    def _write_samples(self) -> None:
        self._at("samples")
        with self.parts.executor.access.forward_passes(self.parts.model):
            for sample in run_samples(self.recipe, self.parts.model, self.setup.prepared, self.parts.held_out.batches):
                self.recorder.sample(self.step, sample)

    def _export(self) -> None:
        self._at("export")
        text = export(self.recipe, self.parts.model, self.state, self.setup.tokenizer, self.folder.path / "hf")
        self.recorder.event(self.step, "export", text)
