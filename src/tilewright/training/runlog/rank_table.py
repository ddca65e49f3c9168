"""Costs of each rank of a run, as `ranks.json`: seconds of its steps, of waiting, and memory beside the plan."""

import platform
import time
from typing import Any

import torch
import torch.distributed as dist

from tilewright.parallel.agree import gather
from tilewright.training.runlog.run_folder import RunFolder

FILE = "ranks.json"


class RankTable:
    """Counts the steps of this rank; the first one writes the table of all.

    Args:
        group: all ranks.
        folder: of the run.
        device: where this rank computes.
        planned_bytes: of a step on that device, 0 where that is not known.
    """

    def __init__(self, group: dist.ProcessGroup, folder: RunFolder, device: torch.device, planned_bytes: int) -> None:
        self._group, self._folder, self._device, self._planned = group, folder, device, planned_bytes
        self._steps, self._step_s, self._wait_s, self._data_s = 0, 0.0, 0.0, 0.0
        self._peak = 0
        self._begun: tuple[float, float] | None = None

    def begin_step(self, data_s: float) -> None:
        """Begin a step in the table of ranks: the executor is called next.

        Args:
            data_s: seconds of waiting for its batches.
        """
        self._data_s += data_s
        self._begun = time.perf_counter(), time.thread_time()

    def end_step(self) -> None:
        """End a step in the table of ranks: count it, if one was begun. On a CPU this thread computes or waits: for
        other ranks, or for a processor that others have."""
        if self._begun is None:
            return
        step_s, cpu_s = time.perf_counter() - self._begun[0], time.thread_time() - self._begun[1]
        self._begun = None
        self._steps += 1
        if self._steps == 1:  # it compiles
            return
        self._step_s += step_s
        self._wait_s += max(0.0, step_s - cpu_s)

    def rows(self, peak_bytes: int) -> list[dict[str, Any]]:
        """Rows of the table of ranks, one each; all ranks call it.

        Args:
            peak_bytes: measured on this rank since it was asked last.
        """
        self._peak = max(self._peak, peak_bytes)
        return gather(self._group, self._row())

    def write(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Write the table of ranks of a step; the first rank does."""
        self._folder.write_json(FILE, {"step": step, "ranks": rows})

    def _row(self) -> dict[str, Any]:
        steps = max(1, self._steps - 1)
        gpu = f", GPU {torch.cuda.current_device()}" if self._device.type == "cuda" else ""
        return {
            "rank": dist.get_rank(),
            "machine": platform.node() + gpu,
            "steps": self._steps,
            "step_s": self._step_s / steps or None,
            "wait_s": self._wait_s / steps if self._device.type == "cpu" else None,
            "data_s": self._data_s / steps,
            "planned_bytes": self._planned or None,
            "peak_bytes": self._peak,
        }
