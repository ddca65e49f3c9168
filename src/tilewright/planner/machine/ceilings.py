"""The rates of this machine: measured once in a few seconds, cached, the ceilings of every plan's roofline.

Every rate is measured through `ops`, forward and backward together, at a few sizes, in three rounds some seconds apart:
the middle timing of a round, because a step of a second meets the machine's slow moments as well as its fast ones
(steps were planned 10 % too short by the fastest), and of the rounds the middle one, because a shared machine has slow
seconds, and some in which it runs faster than it can keep up. On a CPU whose processors others took meanwhile, seconds
are those of the processor that a call had (`microbench.Clock`), and of the rounds the best one's, as others share
caches and memory too: by the clock a plan was 13 times too long. `remeasure` corrects them beside the steps of a run.
Of what runs compiled only the optimizer is compiled for it, which takes some seconds and is cached by torch for the
run: its eager form is up to 25 times slower. What other compiled loops reach is bounded by `bandwidth` and `exp`. The
cache file is keyed by machine, torch, kernels and thread count; pass `refresh` to measure again. Where others took the
processors meanwhile (not `quiet`), plans say so, and it is measured again after an hour.
"""

import functools
import hashlib
import json
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import platformdirs
import torch

from tilewright import __version__
from tilewright.core.hardware import Machine, detect_machine
from tilewright.core.log import get_logger
from tilewright.core.subprocess_call import answer, call_module
from tilewright.ops.kernels import Kernels
from tilewright.planner.machine.microbench import Load, RateProbe, Timed

_FORMAT = 11
"""Raise when the meaning of a field changes, so that old cache files are not read."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_ROUNDS = 3
_BUSY, _OTHERS = 1.3, 0.15
"""Scatter of the timings, and share of the processors' time that others took: above them, rates are those of a busy
machine. Steady load scatters nothing and shows in the second one only."""
BUSY_FOR_S = 3600.0
"""How long rates of a busy machine are used."""
_log = get_logger(__name__)


@dataclass(frozen=True)
class Ceilings:
    """Measured rates of a machine. Matmul formats: fp32, bf16, fp16, on CUDA also tf32, and fp8 where a unit has it.

    `matmul`: FLOP/s of the three GEMMs of a linear layer by format and width (features in = out), what they take before
    the first row left out. `start`: that, in seconds of the three: calls, and work on the weight alone.
    `attention`: FLOP/s of causal attention by format, forward and backward, the masked half not counted.
    `bandwidth`: bytes/s of a copy, read and write counted. `elementwise`: bytes/s read and written by the operations
    of a norm and a SwiGLU in eager form, as `live_bytes` counts them. `loss`: logits/s through the loss of the head by
    format, its GEMMs not counted. `adam`: parameters/s by storage of the moments. `exp`: exponentials/s in FP32.
    `busy`: median over the rates of how much longer the median timing took than the fastest, 1.0 on a quiet machine.
    `others`: share of this machine's processor time that other processes, and hypervisors, took meanwhile.
    """

    key: str
    matmul: Mapping[str, Mapping[int, float]]
    start: Mapping[str, Mapping[int, float]]
    attention: Mapping[str, float]
    loss: Mapping[str, float]
    elementwise: Mapping[str, float]
    adam: Mapping[str, float]
    bandwidth: float
    exp: float
    threads: int
    busy: float
    measured_s: float
    others: float = 0.0

    @property
    def quiet(self) -> bool:
        """True if these ceilings are rates of the machine rather than of what others left of it."""
        return self.busy <= _BUSY and self.others <= _OTHERS

    @property
    def load_note(self) -> str:
        """A note on seconds that rest on ceilings of a busy machine; "" on a quiet one."""
        if self.quiet:
            return ""
        return (
            f"other programs took {self.others:.0%} of the processors while this machine was measured, and timings "
            f"varied {self.busy:.1f}x: planned seconds may be far off; they are measured again after an hour"
        )

    def matmul_rate(self, fmt: str, width: float) -> float:
        """The machine's ceiling of matmuls in FLOP/s at `width` features: linear between measured widths, constant
        beyond them."""
        points = sorted((float(w), rate) for w, rate in self.matmul[fmt].items())
        for (low, low_rate), (high, high_rate) in pairwise(points):
            if low <= width <= high:
                return low_rate + (high_rate - low_rate) * (width - low) / (high - low)
        return points[0][1] if width < points[0][0] else points[-1][1]

    def matmul_s(self, fmt: str, width: float, flops: float, *, compiled: bool = False) -> float:
        """Seconds of one of the three GEMMs of a linear layer at the machine's measured rate.

        Args:
            fmt: format of its operands.
            width: features, in and out alike.
            flops: 2 for each row and weight.
            compiled: inside a compiled graph, where a call costs next to nothing.
        """
        return flops / self.matmul_rate(fmt, width) + self._start_s(fmt, width, compiled) / 3

    def call_s(self, fmt: str = "fp32") -> float:
        """The seconds to call the three GEMMs of a linear layer on this machine, measured on almost no elements."""
        starts = self.start.get(fmt, {})
        return starts[min(starts)] if starts else 0.0

    def _start_s(self, fmt: str, width: float, compiled: bool) -> float:
        """The seconds to start a GEMM on this machine: linear in the number of weights between measured widths, in
        proportion to it beyond them."""
        points = sorted((float(w), seconds) for w, seconds in self.start.get(fmt, {}).items())
        if not points:
            return 0.0
        called, found = points[0][1], points[0][1]
        if width > points[-1][0]:
            found += max(0.0, points[-1][1] - called) * (width / points[-1][0]) ** 2
        for (low, low_s), (high, high_s) in pairwise(points):
            if low < width <= high:
                found = low_s + (high_s - low_s) * (width**2 - low**2) / (high**2 - low**2)
        return max(0.0, found - called) if compiled else found

    def slowed(self, share: float) -> "Ceilings":
        """The machine's ceilings where each thread has only so much of a core."""
        if share == 1:
            return self
        rates = ("attention", "loss", "elementwise", "adam")
        scaled = {name: {key: rate * share for key, rate in getattr(self, name).items()} for name in rates}
        matmul = {fmt: {width: rate * share for width, rate in row.items()} for fmt, row in self.matmul.items()}
        start = {fmt: {width: seconds / share for width, seconds in row.items()} for fmt, row in self.start.items()}
        return replace(
            self, matmul=matmul, start=start, **scaled, bandwidth=self.bandwidth * share, exp=self.exp * share
        )

    def to_json(self) -> dict[str, object]:
        """The machine's ceilings as plain types for the cache file and the run folder."""
        return {"format": _FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, row: Mapping[str, object]) -> "Ceilings":
        """The machine's ceilings from the result of `to_json`.

        Raises:
            ValueError: written by another version of this file.
        """
        fields = dict(row)
        if fields.pop("format", None) != _FORMAT:
            raise ValueError(f"ceilings of another format than {_FORMAT}")
        by_width = {}
        for name in ("matmul", "start"):
            table = fields.pop(name)
            assert isinstance(table, Mapping)
            by_width[name] = {fmt: {int(w): value for w, value in row.items()} for fmt, row in table.items()}
        return cls(**by_width, **fields)  # type: ignore[arg-type]


def measure(
    machine: Machine,
    cache_dir: str | Path | None = None,
    *,
    refresh: bool = False,
    progress: Callable[[str], None] | None = None,
    own_process: bool = False,
) -> Ceilings:
    """The ceilings of this machine, from the cache where it has them.

    Args:
        machine: facts about this machine; its device is the one measured. Rates are those of one process alone, times
            the share of a core that each of several has.
        cache_dir: folder of the cache; the user's cache folder by default.
        refresh: measure again.
        progress: called with a line of text before each measurement.
        own_process: measure in a process of its own, so that pages which this leaves are not in the one that continues.

    Raises:
        HardwareError: the process of its own was killed.

    A cache folder that cannot be written is reported by a warning, and the measurement is used all the same.
    """
    key = _key(machine)
    folder = Path(cache_dir) if cache_dir else Path(platformdirs.user_cache_dir("tilewright"))
    path = folder / "ceilings" / f"{key}.json"
    if not refresh and (cached := _read(path)) is not None:
        return cached.slowed(machine.core_share)
    progress, threads = progress or _in_silence, torch.get_num_threads()
    if own_process:
        ceilings = Ceilings.from_json(call_module(__name__, progress, device=machine.device, key=key, threads=threads))
    else:
        ceilings = _measure_all(machine, key, threads, progress)
    _write(path, ceilings)
    return ceilings.slowed(machine.core_share)


def known(machine: Machine, cache_dir: str | Path | None = None) -> Ceilings | None:
    """The ceilings of this machine from an earlier measurement; None where there is none. Measures nothing."""
    folder = Path(cache_dir) if cache_dir else Path(platformdirs.user_cache_dir("tilewright"))
    found = _read(folder / "ceilings" / f"{_key(machine)}.json")
    return None if found is None else found.slowed(machine.core_share)


def keep(machine: Machine, ceilings: Ceilings, cache_dir: str | Path | None = None) -> None:
    """Keep other ceilings of a machine in the place of those that were measured before.

    Args:
        machine: whose they are.
        ceilings: of one process alone.
        cache_dir: see `measure`.
    """
    folder = Path(cache_dir) if cache_dir else Path(platformdirs.user_cache_dir("tilewright"))
    _write(folder / "ceilings" / f"{_key(machine)}.json", ceilings)


def one_round(machine: Machine, formats: Collection[str], progress: Callable[[str], None]) -> Ceilings:
    """One round of measuring the machine's ceilings, in a process of its own: seconds, not a quarter of a minute.

    Args:
        machine: facts about this machine.
        formats: of `DTYPES`; the others are not measured.
        progress: called with a line of text before each measurement.

    Raises:
        HardwareError: the process was killed.
    """
    arguments = {"device": machine.device, "key": _key(machine), "threads": torch.get_num_threads()}
    return Ceilings.from_json(call_module(__name__, progress, **arguments, rounds=1, formats=sorted(formats)))


def _kernels(machine: Machine) -> Kernels:
    return Kernels(machine, compile=False)


def _key(machine: Machine) -> str:
    facts = {
        "device": [machine.device, machine.device_name, machine.capability, sorted(machine.cpu_features)],
        "versions": [torch.__version__, __version__],
        "threads": torch.get_num_threads(),
        "kernels": sorted(f"{key} {choice.candidate.name}" for key, choice in _kernels(machine).choices.items()),
        "format": _FORMAT,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _read(path: Path) -> Ceilings | None:
    try:
        found = Ceilings.from_json(json.loads(path.read_text(encoding="utf-8")))
        return found if found.quiet or time.time() - path.stat().st_mtime < BUSY_FOR_S else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        _log.warning("ceilings: %s cannot be used (%s); measuring again", path, error)
        return None


def _write(path: Path, ceilings: Ceilings) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".partial")
        part.write_text(json.dumps(ceilings.to_json(), indent=1), encoding="utf-8")
        part.replace(path)
    except OSError as error:
        _log.warning("ceilings: not cached, %s cannot be written (%s)", path, error.strerror)


def _in_silence(line: str) -> None:
    """Measure the machine's ceilings without showing progress, which was not asked for."""


def _measure_all(
    machine: Machine,
    key: str,
    threads: int,
    progress: Callable[[str], None],
    rounds: int = _ROUNDS,
    formats: Collection[str] = tuple(DTYPES),
) -> Ceilings:
    torch.set_num_threads(threads)
    device = torch.device(machine.device)
    probe, in_runs = RateProbe(_kernels(machine), device), RateProbe(Kernels(machine), device)
    began, load = time.perf_counter(), Load()
    progress(f"measuring this machine{' once' if rounds > 1 else ''}: {machine.device_name}")
    measured = [_matmuls(probe, machine, formats) for _ in range(rounds)]
    matmuls = _timings(measured, best=load.others() > _OTHERS)
    matmul = {fmt: {width: timed.rate for width, timed in row.items()} for fmt, row in matmuls.items()}
    progress("  attention, loss, element-wise work, optimizer (compiled once), memory")
    rates = [_rest(probe, in_runs, matmul, formats) for _ in range(rounds)]
    rest = _of_rounds(rates, max if load.others() > _OTHERS else statistics.median)
    ceilings = Ceilings(
        key=key,
        matmul=matmul,
        start={fmt: {width: timed.start for width, timed in row.items()} for fmt, row in matmuls.items()},
        **rest,
        threads=torch.get_num_threads(),
        busy=round(probe.busy(), 2),
        measured_s=round(time.perf_counter() - began, 2),
        others=round(load.others(), 3),
    )
    if not ceilings.quiet:
        progress(f"  {ceilings.load_note}")
    return ceilings


def middle(several: Sequence[Ceilings]) -> Ceilings:
    """The median of each rate over several measurements of one machine's ceilings."""
    same = {"format": _FORMAT, "key": several[0].key, "threads": several[0].threads}
    facts = [{name: value for name, value in one.to_json().items() if name not in same} for one in several]
    return Ceilings.from_json(same | _of_rounds(facts, statistics.median))


def _of_rounds(rounds: Sequence[Any], pick: Callable[[Sequence[float]], float]) -> Any:
    """Choose each ceiling among its values of several rounds by `pick`."""
    if not isinstance(rounds[0], Mapping):
        return pick(rounds)
    return {name: _of_rounds([found[name] for found in rounds], pick) for name in rounds[0]}


def _timings(rounds: Sequence[Mapping[str, Mapping[int, Timed]]], *, best: bool) -> dict[str, dict[int, Timed]]:
    """Matmul ceilings from several rounds: of each format and width the median seconds, or the fewest."""
    pick = min if best else statistics.median
    return {
        fmt: {width: Timed.of_rounds([found[fmt][width] for found in rounds], pick) for width in row}
        for fmt, row in rounds[0].items()
    }


def _matmuls(probe: RateProbe, machine: Machine, formats: Collection[str]) -> dict[str, dict[int, Timed]]:
    """Measured matmul ceilings by format and width."""
    found = {fmt: probe.matmul(DTYPES[fmt]) for fmt in formats}
    if "fp32" in found:
        found["tf32"] = probe.matmul_tf32() if machine.device == "cuda" else found["fp32"]
    if machine.capability is not None and machine.capability >= (8, 9):
        found["fp8"] = probe.matmul_fp8()
    return found


def _rest(
    probe: RateProbe, in_runs: RateProbe, matmul: Mapping[str, Mapping[int, float]], formats: Collection[str]
) -> dict[str, Any]:
    """All ceilings other than matmuls, by the names of their fields; the optimizer's with the kernels of a run,
    compiled ones too."""
    dtypes = {fmt: DTYPES[fmt] for fmt in formats}
    by_format = {
        "attention": {fmt: probe.attention(dtype) for fmt, dtype in dtypes.items()},
        "loss": {fmt: probe.loss(dtype, matmul[fmt][512]) for fmt, dtype in dtypes.items()},
        "elementwise": {fmt: probe.elementwise(dtype) for fmt, dtype in dtypes.items()},
    }
    alike = {"tf32": "fp32"} if "fp32" in dtypes else {}
    adam = {fmt: in_runs.adam(DTYPES[fmt]) for fmt in ("fp32", "bf16")} | {"8bit": in_runs.low_bit_adam()}
    return {
        **{name: rates | {a: rates[b] for a, b in alike.items()} for name, rates in by_format.items()},
        "adam": adam,
        "bandwidth": probe.bandwidth(),
        "exp": probe.exp(),
    }


def _measure_here(
    device: str, key: str, threads: int, rounds: int = _ROUNDS, formats: Sequence[str] = tuple(DTYPES)
) -> dict[str, object]:
    """Measure this machine's ceilings in a process of its own."""
    told = functools.partial(print, flush=True)
    return _measure_all(detect_machine(device), key, threads, told, rounds, formats).to_json()


if __name__ == "__main__":
    answer(_measure_here)
