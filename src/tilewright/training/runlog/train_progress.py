"""Output while training: a live line on a terminal, else one plain line of fixed columns a log interval,
and in each half minute at least.

    step 120/2000 | loss 3.4102 | gnorm 0.81 | lr 2.9e-04 | scale 65536 (0 skips) | mem 11.2/24.0 GiB (optimizer 4.1,
    activations 3.2) | 8,412 tok/s | wait 1.2 % | eta 12m00s

Everything shown is in metrics.jsonl too.
"""

import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

from tilewright.core import env
from tilewright.core.log import ROOT, Pulse, get_logger, say, wrap_text
from tilewright.core.units import format_joules, format_loss, format_seconds, format_share

_GIB = 2**30


class TrainProgress:
    """Lines that replace each other, and notes that stay; here nothing is shown: of steps that are thrown away."""

    def watch(self, what: Callable[[], str]) -> None:
        """Watch the progress of training: asked what the run does while it says nothing."""

    def line(self, text: str) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


class PlainProgress(TrainProgress):
    """Progress as lines that all stay on the screen: for files, pipes and grep.

    Args:
        pulse: told what goes on, and that something was said.
    """

    def __init__(self, pulse: Pulse) -> None:
        self._pulse = pulse

    def watch(self, what: Callable[[], str]) -> None:
        self._pulse.at(what)

    def line(self, text: str) -> None:
        self._pulse.said()
        say(text)

    def note(self, text: str) -> None:
        self.line(text)


class LiveProgress(TrainProgress):
    """One line that is rewritten, notes above it."""

    def __init__(self) -> None:
        from rich.live import Live
        from rich.text import Text

        self._text = Text
        self._live = Live(Text(""), auto_refresh=False, transient=False)
        self._live.start()

    def line(self, text: str) -> None:
        self._live.update(self._text(wrap_text(text, env.columns())), refresh=True)

    def note(self, text: str) -> None:
        self._live.console.print(self._text(wrap_text(text, env.columns())))

    def close(self) -> None:
        self._live.stop()


def open_pulse() -> Pulse:
    """Open a pulse of progress: the function that says that a run works, where no live line does; silent like `say`."""
    return Pulse(on=not _is_live())


def open_progress(pulse: Pulse, *, follows: bool = False) -> TrainProgress:
    """Open the progress of training: the live line where standard output is a terminal and not quiet, else plain lines.
    Of a rank that `follows` the first one nothing is shown, since `say` is silent there."""
    return LiveProgress() if _is_live() and not follows else PlainProgress(pulse)


def _is_live() -> bool:
    return sys.stdout.isatty() and get_logger(ROOT).level < logging.ERROR


def step_line(
    row: Mapping[str, Any], *, steps: int, memory_limit: int, num_skips: int, seconds_left: float | None, scaled: bool
) -> str:
    """Write one metrics row as a line of progress.

    Args:
        row: a training row of metrics.jsonl, before it was written (numbers may be NaN).
        steps: steps of the whole run.
        memory_limit: bytes the run may use.
        num_skips: skipped steps so far.
        seconds_left: estimate for the rest of the run, None while unknown.
        scaled: the run has a loss scale.
    """
    parts = [
        f"step {row['step']}/{steps}",
        f"loss {format_loss(row['loss'])}",
        f"gnorm {row['grad_norm']:.3g}",
        f"lr {row['lr']:.1e}",
        f"scale {row['loss_scale']:g} ({num_skips} skips)" if scaled else f"{num_skips} skips",
        *_memory(row, memory_limit),
        f"{row['tokens_per_s']:,.0f} tok/s",
        f"wait {format_share(row['wait_share'])}",
        *_energy(row),
    ]
    if seconds_left is not None:
        parts.append(f"eta {format_seconds(seconds_left)}")
    return " | ".join(parts)


def _memory(row: Mapping[str, Any], memory_limit: int) -> list[str]:
    """The peak of memory in a progress line, where the row has it."""
    if "memory_bytes" not in row:
        return []
    return [f"mem {row['memory_bytes'] / _GIB:.1f}/{memory_limit / _GIB:.1f} GiB ({_largest(row['memory'])})"]


def _energy(row: Mapping[str, Any]) -> list[str]:
    """Joules in a progress line, of a step since the line before, where they are counted or estimated."""
    if "energy_j_per_step" in row:
        return [f"{format_joules(row['energy_j_per_step'])}/step"]
    return [f"{format_joules(row['estimated_j_per_step'])}/step (estimated)"] if "estimated_j_per_step" in row else []


def _largest(owners: Mapping[str, int]) -> str:
    """The two largest owners of memory in a progress line, at the peak, in GiB."""
    first = sorted(owners, key=lambda owner: -owners[owner])[:2]
    return ", ".join(f"{owner} {owners[owner] / _GIB:.1f}" for owner in first)
