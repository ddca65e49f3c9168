"""The ledger: measured bytes by owner, and the peak of every phase of a step.

    ledger = Ledger(device)                       # before the model is built
    with ledger.phase("load"): model = ...
    with ledger.phase("forward"): loss = ...      # any number of times
    row = ledger.snapshot(model, optimizer)       # since the last snapshot

Parameters, optimizer states, gradients and buffers are exact (unique storages). `activations` is what a forward
phase leaves allocated for backward, by the allocator's count of live bytes (glibc and CUDA; elsewhere by the resident
set). `other` is the rest of the peak: interpreter, libraries, compiled code, data, what operations need while they
run, and on the CPU the pages that `malloc` keeps after a `free`. Memory of child processes, of the page cache and of
other processes is not seen. On CUDA the context and cached free blocks are not in the peak; `reserved_bytes` gives
the allocator's whole holding.

A phase costs a few readings (about 0.2 ms); a snapshot walks the modules (a few ms for hundreds of modules), so
take one where metrics are logged, not at every step. Called by `training`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tilewright.memory.owners import owner_bytes
from tilewright.memory.probe import CudaAllocator, make_probe

PHASES = ("load", "forward", "backward", "update")
BETWEEN = "between"
"""Work outside every phase."""
OWNERS = ("parameters", "optimizer", "gradients", "activations", "buffers", "other")


class Ledger:
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
        self._model: nn.Module | None = None
        self._start_window()

    def _start_window(self) -> None:
        self._phase_peak: dict[str, int] = {}
        self._activations = 0
        self._gradients = 0
        self._accumulates = False

    @property
    def method(self) -> str:
        """Name of the probe: vm_hwm, sampler or torch.cuda."""
        return self._probe.name

    def watch(self, model: nn.Module) -> None:
        """Count this model's gradients at the end of backward phases, where they are largest."""
        self._model = model

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Credit the peak inside the block to a phase: load, forward, backward, update, or a name of your own.

        Phases nest: an inner block's peak is the inner phase's alone.
        """
        self._credit()
        self._running.append(name)
        start = self._forward_start() if name == "forward" else 0
        try:
            yield
        finally:
            if name == "forward":
                self._activations = max(self._activations, self._probe.live() - start)
            self._credit()
            self._running.pop()
            if name == "backward" and self._model is not None and self._gradients == 0:
                self._gradients = owner_bytes(self._model, None, self.device.type)["gradients"]

    def _credit(self) -> None:
        """Give the peak since the last boundary to the phase that ran, and start the next stretch."""
        name = self._running[-1]
        self._phase_peak[name] = max(self._phase_peak.get(name, 0), self._probe.peak())
        self._probe.reset_peak()

    def _forward_start(self) -> int:
        """Live bytes; notes whether gradients of an earlier micro-batch are among them."""
        if self._model is not None:
            self._accumulates |= any(p.grad is not None for p in self._model.parameters())
        return self._probe.live()

    def snapshot(self, model: nn.Module | None, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
        """What was measured since the last snapshot; starts the next window.

        Returns:
            `owners`: bytes by owner at the peak (they sum to `peak_bytes`); `phases`: peak bytes by phase, work
            outside any phase as `between`; `peak_phase`; `peak_bytes`; `run_peak_bytes` since construction;
            `baseline_bytes`; `method`; on CUDA also `reserved_bytes`.
        """
        self._credit()
        phases = self._phase_peak
        peak_phase = max(phases, key=lambda name: phases[name])
        self.peak_bytes = max(self.peak_bytes, phases[peak_phase])
        result: dict[str, Any] = {
            "owners": self._split(phases[peak_phase], peak_phase, owner_bytes(model, optimizer, self.device.type)),
            "phases": phases,
            "peak_phase": peak_phase,
            "peak_bytes": phases[peak_phase],
            "run_peak_bytes": self.peak_bytes,
            "baseline_bytes": self.baseline_bytes,
            "method": self.method,
        }
        if isinstance(self._probe, CudaAllocator):
            result["reserved_bytes"] = self._probe.reserved()
        self._start_window()
        return result

    def _split(self, peak: int, peak_phase: str, owned: dict[str, int]) -> dict[str, int]:
        """The peak by owner; nothing negative, and the parts sum to the peak."""
        held = owned["parameters"] + owned["optimizer"] + owned["buffers"]
        gradients = owned["gradients"]
        if peak_phase in ("backward", "update") or (peak_phase == "forward" and self._accumulates):
            gradients = max(gradients, self._gradients)
        gradients = min(gradients, max(0, peak - held))
        free = max(0, peak - held - gradients)
        activations = min(self._activations, free)
        owners = owned | {"gradients": gradients, "activations": activations, "other": free - activations}
        return {name: owners[name] for name in OWNERS}

    def close(self) -> None:
        """End the sampler's thread where there is one."""
        self._probe.close()
