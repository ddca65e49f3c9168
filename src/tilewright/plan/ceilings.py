"""What this machine reaches: measured once in a few seconds, cached, the ceilings of every plan's roofline.

Every rate is measured through `ops`, forward and backward together, at a few sizes, and is that of the fastest of
several timings: other programs only make it slower. Nothing is compiled for it, because compiling takes longer than
all of this: what compiled loops reach is bounded by `bandwidth` and `exp`. The cache file is keyed by machine, torch,
kernels and thread count; pass `refresh` to measure again. `busy` tells how far the medians were from the fastest: on a
busy machine even the fastest is slow. Called by the command line (`plan`, `bench`), `training` and `benchmarks/`.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import platformdirs
import torch

from tilewright import __version__
from tilewright.core.hardware import Machine
from tilewright.core.log import get_logger
from tilewright.ops.kernels import Kernels
from tilewright.plan.probe import Probe

_FORMAT = 8
"""Raise when the meaning of a field changes, so that old cache files are not read."""
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_BUSY = 1.3
"""Above this, timings tell more of other programs than of the machine."""
_log = get_logger(__name__)


@dataclass(frozen=True)
class Ceilings:
    """Measured rates. Matmul formats: fp32, bf16, fp16, on CUDA also tf32, and fp8 where a unit multiplies it.

    `matmul`: FLOP/s of the three GEMMs of a linear layer by format and width (features in = out).
    `attention`: FLOP/s of causal attention by format, forward and backward, the masked half not counted.
    `bandwidth`: bytes/s of a copy, read and write counted. `elementwise`: bytes/s read and written by the operations
    of a norm and a SwiGLU in eager form, as `live_bytes` counts them. `loss`: logits/s through the loss of the head by
    format, its GEMMs not counted. `adam`: parameters/s by storage of the moments. `exp`: exponentials/s in FP32.
    `busy`: median over the rates of how much longer the median timing took than the fastest, 1.0 on a quiet machine.
    """

    key: str
    matmul: Mapping[str, Mapping[int, float]]
    attention: Mapping[str, float]
    loss: Mapping[str, float]
    elementwise: Mapping[str, float]
    adam: Mapping[str, float]
    bandwidth: float
    exp: float
    threads: int
    busy: float
    measured_s: float

    def matmul_rate(self, fmt: str, width: float) -> float:
        """FLOP/s at `width` features, between measured widths by straight line, flat beyond them."""
        points = sorted((float(w), rate) for w, rate in self.matmul[fmt].items())
        for (low, low_rate), (high, high_rate) in pairwise(points):
            if low <= width <= high:
                return low_rate + (high_rate - low_rate) * (width - low) / (high - low)
        return points[0][1] if width < points[0][0] else points[-1][1]

    def to_json(self) -> dict[str, object]:
        """Plain types for the cache file and the run folder."""
        return {"format": _FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, row: Mapping[str, object]) -> "Ceilings":
        """What `to_json` gave.

        Raises:
            ValueError: written by another version of this file.
        """
        fields = dict(row)
        if fields.pop("format", None) != _FORMAT:
            raise ValueError(f"ceilings of another format than {_FORMAT}")
        matmul = fields.pop("matmul")
        assert isinstance(matmul, Mapping)
        by_width = {fmt: {int(w): rate for w, rate in rates.items()} for fmt, rates in matmul.items()}
        return cls(matmul=by_width, **fields)  # type: ignore[arg-type]


def measure(
    machine: Machine,
    cache_dir: str | Path | None = None,
    *,
    refresh: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Ceilings:
    """The ceilings of this machine, from the cache where it has them.

    Args:
        machine: facts about this machine; its device is the one measured.
        cache_dir: folder of the cache; the user's cache folder by default.
        refresh: measure again.
        progress: called with a line of text before each measurement.

    A cache folder that cannot be written is told by a warning, and the measurement is used all the same.
    """
    key = _key(machine)
    folder = Path(cache_dir) if cache_dir else Path(platformdirs.user_cache_dir("tilewright"))
    path = folder / "ceilings" / f"{key}.json"
    if not refresh and (cached := _read(path)) is not None:
        return cached
    ceilings = _measure_all(machine, key, progress or (lambda line: None))
    _write(path, ceilings)
    return ceilings


def known(machine: Machine, cache_dir: str | Path | None = None) -> Ceilings | None:
    """What was measured before; None where nothing was. Measures nothing."""
    folder = Path(cache_dir) if cache_dir else Path(platformdirs.user_cache_dir("tilewright"))
    return _read(folder / "ceilings" / f"{_key(machine)}.json")


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
        return Ceilings.from_json(json.loads(path.read_text(encoding="utf-8")))
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


def _measure_all(machine: Machine, key: str, progress: Callable[[str], None]) -> Ceilings:
    probe = Probe(_kernels(machine), torch.device(machine.device))
    start = time.perf_counter()
    progress(f"measuring this machine once: {machine.device_name}")
    matmul = {fmt: probe.matmul(dtype) for fmt, dtype in _DTYPES.items()}
    matmul["tf32"] = probe.matmul_tf32() if machine.device == "cuda" else matmul["fp32"]
    if machine.capability is not None and machine.capability >= (8, 9):
        matmul["fp8"] = probe.matmul_fp8()
    progress("  attention, loss, element-wise work, optimizer, memory")
    attention = {fmt: probe.attention(dtype) for fmt, dtype in _DTYPES.items()}
    loss = {fmt: probe.loss(dtype, matmul[fmt][512]) for fmt, dtype in _DTYPES.items()}
    elementwise = {fmt: probe.elementwise(dtype) for fmt, dtype in _DTYPES.items()}
    ceilings = Ceilings(
        key=key,
        matmul=matmul,
        attention=attention | {"tf32": attention["fp32"]},
        loss=loss | {"tf32": loss["fp32"]},
        elementwise=elementwise | {"tf32": elementwise["fp32"]},
        adam={**{fmt: probe.adam(_DTYPES[fmt]) for fmt in ("fp32", "bf16")}, "8bit": probe.low_bit_adam()},
        bandwidth=probe.bandwidth(),
        exp=probe.exp(),
        threads=torch.get_num_threads(),
        busy=round(probe.busy(), 2),
        measured_s=round(time.perf_counter() - start, 2),
    )
    if ceilings.busy > _BUSY:
        progress(
            f"  other programs are running (timings vary {ceilings.busy:.1f}x); predicted seconds will be too long"
        )
    return ceilings
