"""Energy of a run: the counters of its machines, read from its start to its end, beside its steps and tokens.

Each process reads its own GPU, the first one of a machine the processors too, so that nothing is counted twice. What
was used before a stop or a crash stays counted (energy.json): steps that are computed again take energy again.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from tilewright.core.config.sections.energy import EnergySection
from tilewright.core.errors import DataError
from tilewright.energy.counter import Counter
from tilewright.energy.energy_record import ENERGY, ESTIMATED, FILE, MEASURED, UNAVAILABLE, in_words
from tilewright.energy.meter import EnergyMeter, EnergyUse, idle_watts
from tilewright.energy.nvml import Nvml
from tilewright.energy.processors import processor_counters
from tilewright.parallel.agree import gather
from tilewright.parallel.launch import on_first
from tilewright.parallel.world import World
from tilewright.planner.advice.energy import flops_per_token, planned_energy
from tilewright.planner.plan import Plan
from tilewright.training.assemble import Components
from tilewright.training.executor.base import StepResult
from tilewright.training.hooks.step_hook import Step, StepHook
from tilewright.training.runlog import recorded_tables
from tilewright.training.runlog.run_folder import RunFolder

PHASES = {"data": "steps", "evaluate": "evaluation", "samples": "evaluation", "save": "checkpoints", "export": "export"}


class RunEnergy:
    """Counters of this process's part of the machine during a run, and what was used before.

    Args:
        section: `[energy]`.
        world: the processes of the run.
        folder: of the run.
        counters: that this process reads.
        reasons: why other parts are not counted.
    """

    def __init__(
        self,
        section: EnergySection,
        world: World,
        folder: RunFolder,
        counters: tuple[Counter, ...],
        reasons: tuple[str, ...],
    ) -> None:
        self.section, self.world, self._folder = section, world, folder
        self._waited_s: Callable[[], float] = lambda: 0.0
        self._idle_w = idle_watts(counters, section.idle_seconds) if counters and section.idle_seconds else None
        self.meter = EnergyMeter(counters, lambda: self._waited_s(), thread=bool(counters))
        self._before, unknown = on_first(world, partial(_used_before, folder.path))
        self._reasons = (*reasons, *unknown)
        self._began, self._first_of_machine = time.monotonic(), world.local_rank == 0
        self._cpu_s, self._busy_s = _own_cpu_s(), _busy_cpu_s()
        self._reads = any(gather(world.everyone.handle, bool(counters)))
        self._plan: tuple[Plan, int] | None = None
        self._counts = self._reads or bool(self._before["parts"])  # what was counted elsewhere stays

    @property
    def state(self) -> str:
        """State of the energy's measurement: `measured`, `estimated` or `unavailable`; the same on all ranks."""
        return MEASURED if self._counts else ESTIMATED if self.section.assume_watts else UNAVAILABLE

    def hook(self, parts: Components) -> "EnergyHook":
        """The hook that reports a run's phases and steps to the energy's counters.

        Args:
            parts: of the run.
        """
        self._waited_s = lambda: parts.stream.waited_s
        self._plan = parts.setup.plan, parts.setup.recipe.train.steps
        return EnergyHook(self, lambda: parts.counters.tokens)

    def table(self, tokens: int = 0, steps: int = 0) -> dict[str, Any]:
        """Energy used by all ranks, and the sources of the numbers; called on all of them.

        Args:
            tokens, steps: that the run has learned.
        """
        mine = self.meter.use()
        of_machine = 1.0 if self._first_of_machine else 0.0
        rank = (
            mine.to_json(), self._reasons, self._idle_w, _own_cpu_s() - self._cpu_s,
            of_machine * (_busy_cpu_s() - self._busy_s), of_machine * (time.monotonic() - self._began),
        )  # fmt: skip
        ranks = gather(self.world.everyone.handle, rank)
        use = EnergyUse.from_json(self._before)
        seconds = self._before.get("machine_s", 0.0) + sum(found[5] for found in ranks)
        for found in ranks:
            use = use.plus(EnergyUse.from_json(found[0]))
        own, busy = sum(found[3] for found in ranks), sum(found[4] for found in ranks)
        idle = [found[2] for found in ranks if found[2] is not None]
        section, watts = self.section, self.section.assume_watts
        return {
            "state": self.state,
            "reasons": sorted({reason for found in ranks for reason in found[1]}),
            **use.to_json(),
            "total_j": use.total_j if self.state == MEASURED else None,
            "machine_s": seconds,
            "estimate": {"watts": watts, "joules": watts * seconds} if watts else None,
            "idle_watts": sum(idle) if idle else None,
            "own_share": min(1.0, own / busy) if busy and self.state == MEASURED else None,
            "intensity": {"g_per_kwh": section.intensity, "source": section.intensity_source}
            if section.intensity
            else None,
            "tokens": tokens,
            "steps": steps,
            **self._of_plan(tokens, sum(found[5] > 0 for found in ranks)),
        }

    def _of_plan(self, tokens: int, machines: int) -> dict[str, Any]:
        """FLOPs of the tokens' matmuls for the energy's table, and energy as planned for all steps; None where they are
        not known."""
        if self._plan is None:
            return {"flops": None, "planned": None}
        plan, steps = self._plan
        each, planned = flops_per_token(plan), planned_energy(plan, steps, machines)
        return {
            "flops": None if each is None else each * tokens,
            "planned": planned and {"joules": planned.joules, "boards": planned.boards, "assumed": planned.assumed},
        }

    def write(self, tokens: int, steps: int) -> dict[str, Any]:
        """Write `energy.json`, by the first rank; called on all of them. Returns what is in it."""
        table = self.table(tokens, steps)
        if self.world.is_first:
            self._folder.write_json(FILE, table)
        return table

    def finish(self, step: int, tokens: int, tell: Callable[[int, str, str], object]) -> None:
        """Finish the energy of a run, or of this part of it; called on all ranks.

        Args:
            step, tokens: that the run has learned.
            tell: records an event: step, kind, text.
        """
        table = self.write(tokens, step)
        if self.state != UNAVAILABLE:
            tell(step, "energy", in_words(table))

    def said(self) -> str:
        """The energy counters in a line, at the start of a run."""
        reasons = "; ".join(self._reasons)
        if self.state == MEASURED:
            parts = ", ".join(f"{part.covers} ({part.how})" for part in self.meter.parts)
            parts = parts or ("on other ranks" if self._reads else "before this process alone")
            return f"measured: {parts}" + (f"; not counted: {reasons}" if reasons else "")
        if self.state == ESTIMATED:
            watts = self.section.assume_watts
            return f"no counter ({reasons}); estimated as {watts:g} W per machine (energy.assume_watts) times seconds"
        return f"unavailable: {reasons}"


class EnergyHook(StepHook):
    """Follows a run's phases, and adds joules to its rows of metrics.

    Args:
        energy: of the run.
        tokens: gives the tokens that it has learned.
    """

    next_step = float("inf")

    def __init__(self, energy: RunEnergy, tokens: Callable[[], int]) -> None:
        self._energy, self._tokens = energy, tokens
        self._last: tuple[int, float] | None = None
        self._of_steps = energy.state != UNAVAILABLE

    def phase(self, name: str) -> None:
        """The energy's hook when the run enters another phase: see `StepHook.phase`."""
        self._energy.meter.at(PHASES[name])

    def numbers(self, step: Step, result: StepResult) -> Mapping[str, float]:
        """Energy in joules up to now, and of a step since the row before, of all ranks; estimated ones say so in their
        name."""
        if not self._of_steps:
            return {}
        table = self._energy.write(self._tokens(), step.number)
        measured = table["state"] == MEASURED
        joules = table["total_j"] if measured else table["estimate"]["joules"]
        before, self._last = self._last, (step.number, joules)
        name = "energy_j" if measured else "estimated_j"
        if before is None or before[0] >= step.number or joules == before[1]:  # no counter is read any more: no zero
            return {name: joules}
        return {name: joules, f"{name}_per_step": (joules - before[1]) / (step.number - before[0])}


@contextmanager
def open_energy(section: EnergySection, world: World, folder: RunFolder, device: str) -> Iterator[RunEnergy | None]:
    """Open the energy of a run while it runs; None where it is not to be measured.

    Args:
        section: `[energy]`.
        world: the processes of the run.
        folder: of the run.
        device: of the recipe.
    """
    if not section.measure:
        yield None
        return
    gpu = device != "cpu" and torch.cuda.is_available()
    counters, reasons = counters_of(processors=world.local_rank == 0, gpu=gpu)
    energy = RunEnergy(section, world, folder, counters, reasons)
    with energy.meter:
        yield energy


def counters_of(*, processors: bool, gpu: bool) -> tuple[tuple[Counter, ...], tuple[str, ...]]:
    """Counters of the energy hook in this process, and why other parts of the machine are not counted.

    Args:
        processors: of the machine, which one process reads.
        gpu: the one that torch has made the current one.
    """
    counters, reasons = [], []
    if processors:
        found = processor_counters()
        counters += found.counters
        reasons += found.reasons
    if gpu:
        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        library = Nvml.open()
        of_gpu = () if library is None else library.counters([uuid])
        counters += of_gpu
        reasons += [] if of_gpu else ["NVML gives neither energy nor power of this GPU"]
    elif not counters:
        reasons.append("no GPU in this run")
    return tuple(counters), tuple(reasons)


def _used_before(folder: Path) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Energy that the run has used before this process, and its unknown parts."""
    try:
        table = recorded_tables.read(folder / FILE)
        if table is not None:
            return recorded_tables.checked(ENERGY, table, folder / FILE), ()
        return EnergyUse().to_json() | {"machine_s": 0.0}, ()
    except DataError as error:
        return EnergyUse().to_json() | {"machine_s": 0.0}, (
            f"what the run used before is not counted: {error.problems[0].got}",
        )


def _own_cpu_s() -> float:
    """Processor seconds of this process and of those that it has started and waited for, to estimate energy by."""
    times = psutil.Process().cpu_times()
    return times.user + times.system + times.children_user + times.children_system


def _busy_cpu_s() -> float:
    """Processor seconds of all programs of this machine, since it was started, to estimate energy by."""
    times = psutil.cpu_times()
    return sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))
