"""The memory tracker: measured bytes by owner, at the peak of every phase of a step.

    memory_tracker = MemoryTracker(device)  # before the model is built
    with memory_tracker.phase("load"): model = ...
    memory_tracker.watch(model)
    with memory_tracker.phase("forward"): loss = ...  # any number of times
    row = memory_tracker.snapshot(model, optimizer)  # since the last snapshot

Parameters, optimizer states, gradients and buffers are exact (unique storages); what is not on the device, or is not to
be found in model and optimizer, its keeper tells (`register_owner`). Of a sharded model they are this rank's parts, and
what is put together of all ranks' at the time (`watch`). `activations` is what a forward phase leaves allocated for
backward, by the allocator's count of live bytes (glibc and CUDA; elsewhere by the resident set). `allocator` is what
`malloc` held without use both before and after the stretch in which the peak was (glibc). `other` is the rest of the
peak: interpreter, libraries, compiled code, data, what operations need while they run. Memory of child processes, of
the page cache and of other processes is not seen. On CUDA the context and cached free blocks are not in the peak;
`reserved_bytes` gives the allocator's whole holding.

A phase costs a few readings (about 0.2 ms); a snapshot walks the modules (a few ms for hundreds of modules), so
take one where metrics are logged, not at every step.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tilewright.core.config.recipe import Tier
from tilewright.core.memory_plan import STEP_PHASES
from tilewright.memory.tracking.malloc import trim_malloc
from tilewright.memory.tracking.process_memory import CudaAllocator, make_probe
from tilewright.memory.tracking.tensor_bytes import owner_bytes, storage_bytes

PATIENCE = 10
"""Steps until free pages are returned again after it did not help."""
BETWEEN = "between"
"""Work outside every phase."""
OWNERS = ("parameters", "optimizer", "gradients", "activations", "buffers", "allocator", "other")


@dataclass(frozen=True)
class _Moment:
    """Bytes at a boundary between phases."""

    live: int
    kept: int
    gradients: int
    reported: Mapping[str, int]
    whole: Mapping[str, int]
    """Bytes that a sharded model has gathered, and those counted beside the owners' bytes."""

    def own(self, owner: str, owned: int) -> int:
        """Bytes that the tracker counts for an owner where no keeper reports them: gradients come and go."""
        return self.gradients if owner == "gradients" else owned


@dataclass(frozen=True)
class _Stretch:
    """Time between two boundaries, and its peak."""

    peak: int
    before: _Moment
    after: _Moment

    def most(self, owner: str, owned: int) -> int:
        """The larger of an owner's bytes before and after this stretch, with what is gathered of it then. Bytes that
        its keepers report replace `owned`."""
        told = owner in self.before.reported or owner in self.after.reported
        moments = (self.before, self.after)
        return max((m.reported.get(owner, 0) if told else m.own(owner, owned)) + m.whole.get(owner, 0) for m in moments)


@dataclass
class _Window:
    """Measurements since a snapshot."""

    phases: dict[str, _Stretch] = field(default_factory=dict)
    """The stretch with the highest peak of each phase."""
    activations: int = 0
    elsewhere: dict[Tier, dict[str, int]] = field(default_factory=dict)
    """Most bytes that keepers reported of other tiers."""


def step_peak(phases: Mapping[str, int]) -> int:
    """The highest tracked peak of the phases of a training step."""
    return max((phases[name] for name in STEP_PHASES if name in phases), default=0)


class MemoryTracker:
    """Measures one device from construction on.

    Args:
        device: where the model trains. On `cpu` the process' resident set is measured.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._probe = make_probe(self.device)
        self.baseline_bytes = self._probe.current()
        self.peak_bytes = self.baseline_bytes
        self._running = [BETWEEN]
        self._params: list[nn.Parameter] = []
        self._gradient_bytes: dict[nn.Parameter, int] = {}
        """Of each parameter that had a gradient: always as many."""
        self._whole: Callable[[], Mapping[str, int]] = dict
        self._beside: list[Callable[[], Mapping[str, int]]] = []
        self._keepers: list[tuple[str, Callable[[], Mapping[Tier, int]]]] = []
        self._known: dict[str, dict[str, int]] = {}
        self._window = _Window()
        self._recent: dict[str, int] = {}
        self._step_peak = 0
        self.on_phase: Callable[[str], None] | None = None
        """Told the phase that begins."""
        self._last = self._moment()

    @property
    def method(self) -> str:
        """The name of the memory tracker's probe: vm_hwm, sampler or torch.cuda."""
        return self._probe.name

    def watch(self, model: nn.Module, whole: Callable[[], Mapping[str, int]] = dict) -> None:
        """Watch a model by the memory tracker: count its gradients at the boundaries of phases, as they may be gone
        when a snapshot is taken.

        Args:
            model: of the run.
            whole: of a sharded model: bytes on the device, by owner, of what is put together now from the parts of all
                ranks, beyond those parts (`parallel.shard.WholeBytes`). They are no activations.
        """
        self._params, self._gradient_bytes, self._whole = list(model.parameters()), {}, whole

    def register_owner(self, owner: str, num_bytes: Callable[[], Mapping[Tier, int]]) -> None:
        """Register a keeper that the memory tracker asks for an owner's bytes by tier, instead of looking into model
        and optimizer.

        It is asked at every boundary, so it must be quick. Several keepers of one owner add up. On the CPU, device and
        host are the same memory. What is in other tiers is in the snapshot's `tiers`; where a keeper tells nothing
        of the device, the memory tracker's own count stands for that.

        Args:
            owner: one of OWNERS but `allocator` and `other`.
            num_bytes: bytes by tier, now.
        """
        if owner not in OWNERS[:-2]:
            raise ValueError(f"owner is one of {', '.join(OWNERS[:-2])}, not {owner!r}")
        self._keepers.append((owner, num_bytes))

    def count_beside(self, num_bytes: Callable[[], Mapping[str, int]]) -> None:
        """Count beside the memory tracker's owners what none sees on top of each owner's bytes: weight gradients that
        wait (`ops.base.weight_gradient_queue`).

        Args:
            num_bytes: bytes on the device by owner, now. Asked at every boundary, so it must be quick.
        """
        self._beside.append(num_bytes)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Credit the memory peak inside the block to a phase: load, forward, backward, update, or a name of your own.

        Phases nest: an inner block's peak is the inner phase's alone.
        """
        self._credit()
        self._running.append(name)
        if self.on_phase is not None:
            self.on_phase(name)
        start = self._last
        try:
            yield
        finally:
            self._credit()
            self._running.pop()
            if name == "forward":
                put_together = sum(self._last.whole.values()) - sum(start.whole.values())
                kept = self._last.live - start.live - put_together
                self._window.activations = max(self._window.activations, kept)

    def _credit(self) -> None:
        """Credit the tracked memory peak since the last boundary to the phase that ran, and start the next stretch."""
        name, peak, now = self._running[-1], self._probe.peak(), self._moment()
        known = self._window.phases.get(name)
        if known is None or peak > known.peak:
            self._window.phases[name] = _Stretch(peak, self._last, now)
        self._recent[name] = max(peak, self._recent.get(name, 0))
        self._step_peak = max(peak, self._step_peak) if name in STEP_PHASES else self._step_peak
        self._last = now
        self._probe.reset_peak()

    def take_peaks(self) -> dict[str, int]:
        """The memory tracker's peak bytes by phase since the last call, for who looks at every step; the snapshot's
        window continues."""
        self._credit()
        peaks, self._recent = self._recent, {}
        return peaks

    def take_step_peak(self) -> int:
        """The memory tracker's highest peak in bytes of a step's phases since the last call."""
        self._credit()
        peak, self._step_peak = self._step_peak, 0
        return peak

    def _moment(self) -> _Moment:
        reported: dict[str, int] = {}
        for owner, num_bytes in self._keepers:
            for tier, size in num_bytes().items():
                if tier == "device" or (tier == "host" and self.device.type == "cpu"):
                    reported[owner] = reported.get(owner, 0) + size
                elif size:
                    most = self._window.elsewhere.setdefault(tier, {})
                    most[owner] = max(most.get(owner, 0), size)
        return _Moment(*self._probe.live_and_kept(), self._gradients(), reported, self._on_top())

    def _on_top(self) -> Mapping[str, int]:
        """Bytes that are counted besides an owner's own: gathered parts of a sharded model, and what others counted for
        it."""
        total = Counter(self._whole())
        for num_bytes in self._beside:
            total.update(num_bytes())
        return total

    def _gradients(self) -> int:
        """The memory tracker's bytes of the gradients that are there now."""
        known, total = self._gradient_bytes, 0
        for param in self._params:
            if param.grad is not None:
                if param not in known:  # a storage may be that of several gradients, or hold other things too
                    grad = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
                    known[param] = min(storage_bytes([grad], self.device.type), grad.nbytes)
                total += known[param]
        return total

    def snapshot(self, model: nn.Module | None, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
        """Return the memory tracker's measurements since the last snapshot, and start the next window.

        Returns:
            `owners`: bytes by owner at the peak (they sum to `peak_bytes`).
            `phases`: peak bytes by phase, work outside any phase as `between`; `peak_phase`; `peak_bytes`.
            `phase_owners`: bytes by owner at the peak of each phase; `known_phases`: the same of the latest window in
            which there was such a phase.
            `tiers`: most bytes by owner in tiers off the device.
            `run_peak_bytes` since construction; `baseline_bytes`; `method`; on CUDA also `reserved_bytes`.
        """
        self._credit()
        window, self._window = self._window, _Window()
        owned = owner_bytes(model, optimizer, self.device.type)
        phases = {name: stretch.peak for name, stretch in window.phases.items()}
        peak_phase = max(phases, key=lambda name: phases[name])
        self.peak_bytes = max(self.peak_bytes, phases[peak_phase])
        split = {name: _split(name, stretch, owned, window) for name, stretch in window.phases.items()}
        self._known |= split
        result: dict[str, Any] = {
            "owners": split[peak_phase],
            "phases": phases,
            "phase_owners": split,
            "known_phases": dict(self._known),
            "peak_phase": peak_phase,
            "peak_bytes": phases[peak_phase],
            "run_peak_bytes": self.peak_bytes,
            "baseline_bytes": self.baseline_bytes,
            "method": self.method,
            "tiers": window.elsewhere,
        }
        if isinstance(self._probe, CudaAllocator):
            result["reserved_bytes"] = self._probe.reserved()
        return result

    def close(self) -> None:
        """Close the memory tracker: end the sampler's thread where there is one."""
        self._probe.close()


def _split(phase: str, stretch: _Stretch, owned: Mapping[str, int], window: _Window) -> dict[str, int]:
    """Split the tracker's peak of a phase by owner; nothing negative, and the parts sum to the peak."""
    wanted = dict(owned)
    if phase == "load":  # states are made by the first update
        wanted["optimizer"] = 0
    wanted["gradients"] = 0  # counted at both ends
    wanted["activations"] = window.activations if phase in ("forward", "backward") else 0
    wanted = {owner: stretch.most(owner, size) for owner, size in wanted.items()}
    wanted["allocator"] = min(stretch.before.kept, stretch.after.kept)
    result, left = dict.fromkeys(OWNERS, 0), stretch.peak
    for owner in ("parameters", "optimizer", "buffers", "gradients", "activations", "allocator"):
        result[owner] = min(max(0, wanted[owner]), left)
        left -= result[owner]
    return result | {"other": left}


class DueStep(Protocol):
    """A step, as far as it matters for free pages."""

    @property
    def due(self) -> bool: ...


class FreeHeap:
    """Keeps what malloc holds free of a training process within its plan. Does nothing on a GPU: no such pages there.

    Steps free and allocate the same sizes, and yet glibc's heap grows from step to step: an aligned block does not fit
    into the hole that one like it has left, and each thread that ranks gather and reduce in has a heap of its own. On
    four ranks a step of 1.05 GiB took 1.35 GiB ten steps later (docs/log.md). Returning free pages takes tens of
    milliseconds, so it is done where a step would take more than was planned, and only as long as that helps.

    Args:
        memory_tracker: of the run.
        planned_bytes: peak of a step; 0 where that is not known.
        trim: returns the pages.
    """

    def __init__(
        self, memory_tracker: MemoryTracker, planned_bytes: float, trim: Callable[[], None] = trim_malloc
    ) -> None:
        self._trim = trim
        self._memory_tracker = memory_tracker
        self._on_cpu = memory_tracker.device.type == "cpu"
        self._planned = planned_bytes
        self._peak = 0
        """Of the step before; 0 where free pages were returned since."""
        self._wait = 0
        """Steps for which nothing is returned: that did not help."""

    def after_step(self, step: DueStep, *_: object) -> None:
        """Return free pages after a step if a line follows it (else they pile up over hundreds of steps), or if the
        next step would take more than planned, growing as this one has. A step that takes more right after pages were
        returned needs them: nothing is then returned for `PATIENCE` steps.

        Args:
            step: says whether a line is due.
        """
        self._look()
        if step.due:
            self.give_back()

    def _look(self) -> None:
        if not self._on_cpu or not self._planned:
            return
        before, self._peak = self._peak, self._memory_tracker.take_step_peak()
        grown = max(0, self._peak - before) if before else 0
        self._wait = max(0, self._wait - 1)
        if self._peak + grown <= self._planned or self._wait:
            return
        if before:
            self.give_back()
        else:
            self._wait = PATIENCE

    def give_back(self) -> None:
        """Return free pages now, beside the memory tracker."""
        if self._on_cpu:
            self._trim()
            self._peak = 0
