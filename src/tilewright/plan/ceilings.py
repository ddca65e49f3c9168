"""What this machine reaches: measured once in a few seconds, cached, the ceilings of every plan's roofline.

Every rate is measured through `ops`, forward and backward together, at a few sizes, and is the median of several
timings. Nothing is compiled for it, because compiling takes longer than all of this: what compiled loops reach is
bounded by `bandwidth` and `exp`. The cache file is keyed by machine, torch and thread count; pass `refresh` to measure
again. Rates of a busy machine are low: measure on a quiet one. Called by the command line (`plan`, `bench`), `training`
and `benchmarks/`.
"""

import hashlib
import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import platformdirs
import torch
from torch import Tensor

from tilewright.core.hardware import Machine
from tilewright.core.log import get_logger
from tilewright.ops.kernels import Kernels
from tilewright.ops.ref.adam import AdamHyper

_FORMAT = 4
"""Raise when the meaning of a field changes, so that old cache files are not read."""
_WIDTHS = (256, 512, 1024, 2048)
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SECONDS_EACH = 0.12
"""Time given to one rate, the two warm-up calls not counted."""
_log = get_logger(__name__)


@dataclass(frozen=True)
class Ceilings:
    """Measured rates. Matmul formats: fp32, bf16, fp16, on CUDA also tf32.

    `matmul`: FLOP/s of the three GEMMs of a linear layer by format and width (features in = out).
    `attention`: FLOP/s of causal attention by format, forward and backward, the masked half not counted.
    `bandwidth`: bytes/s of a copy, read and write counted. `elementwise`: bytes/s read and written by a norm and a
    SwiGLU in eager form. `loss`: logits/s through the loss of the head by format, its GEMMs not counted.
    `adam`: parameters/s by storage of the moments. `exp`: exponentials/s in FP32.
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


def _key(machine: Machine) -> str:
    facts = {
        "device": [machine.device, machine.device_name, machine.capability, sorted(machine.cpu_features)],
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
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
    device, kernels = torch.device(machine.device), Kernels(machine, compile=False)
    start = time.perf_counter()
    progress(f"measuring this machine once: {machine.device_name}")
    matmul = {fmt: _matmul_rates(kernels, dtype, device) for fmt, dtype in _DTYPES.items()}
    if machine.device == "cuda":
        matmul["tf32"] = _tf32_rates(kernels, device)
    else:
        matmul["tf32"] = matmul["fp32"]
    progress("  attention, loss, element-wise work, optimizer, memory")
    attention = {fmt: _attention_rate(kernels, dtype, device) for fmt, dtype in _DTYPES.items()}
    loss = {fmt: _loss_rate(kernels, dtype, device, matmul[fmt][512]) for fmt, dtype in _DTYPES.items()}
    elementwise = {fmt: _elementwise_rate(kernels, dtype, device) for fmt, dtype in _DTYPES.items()}
    adam = {fmt: _adam_rate(kernels, _DTYPES[fmt], device) for fmt in ("fp32", "bf16")}
    return Ceilings(
        key=key,
        matmul=matmul,
        attention=attention | {"tf32": attention["fp32"]},
        loss=loss | {"tf32": loss["fp32"]},
        elementwise=elementwise | {"tf32": elementwise["fp32"]},
        adam=adam,
        bandwidth=_bandwidth(device),
        exp=_exp_rate(device),
        threads=torch.get_num_threads(),
        measured_s=round(time.perf_counter() - start, 2),
    )


def median_seconds(work: Callable[[], object], device: torch.device, budget_s: float = _SECONDS_EACH) -> float:
    """Median seconds of one call, after two warm-up calls, from at least 3 calls and about `budget_s` of them."""
    for _ in range(2):
        work()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < budget_s and len(times) < 50):
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _random(*shape: int, dtype: torch.dtype, device: torch.device, grad: bool = False) -> Tensor:
    return (torch.randn(*shape, device=device) * 0.1).to(dtype).requires_grad_(grad)


def _matmul_rates(kernels: Kernels, dtype: torch.dtype, device: torch.device) -> dict[int, float]:
    """FLOP/s of forward, input gradient and weight gradient of a square linear, by width."""
    rates = {}
    for width in _WIDTHS:
        num_tokens = min(1024, 2**20 // width) if device.type == "cpu" else 8192
        x = _random(num_tokens, width, dtype=dtype, device=device, grad=True)
        weight = _random(width, width, dtype=dtype, device=device, grad=True)
        upstream = _random(num_tokens, width, dtype=dtype, device=device)

        def work(x: Tensor = x, weight: Tensor = weight, upstream: Tensor = upstream) -> None:
            torch.autograd.grad(kernels.linear(x, weight), (x, weight), upstream)

        rates[width] = 6 * num_tokens * width * width / median_seconds(work, device, _SECONDS_EACH / 2)
    return rates


def _tf32_rates(kernels: Kernels, device: torch.device) -> dict[int, float]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        return _matmul_rates(kernels, torch.float32, device)
    finally:
        torch.set_float32_matmul_precision(before)


def _attention_rate(kernels: Kernels, dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of causal attention with documents: 4 S^2/2 D forward, 2.5 times that backward (5 GEMMs for 2)."""
    num_rows, num_heads, num_positions, head_dim = (4 if device.type == "cpu" else 32), 4, 512, 64
    shape = (num_rows, num_heads, num_positions, head_dim)
    q, k, v = (_random(*shape, dtype=dtype, device=device, grad=True) for _ in range(3))
    segments = (torch.arange(num_positions, device=device) >= num_positions // 2).int().expand(num_rows, -1)
    upstream = _random(*shape, dtype=dtype, device=device)

    def work() -> None:
        torch.autograd.grad(kernels.attention(q, k, v, segments=segments), (q, k, v), upstream)

    flop = 3.5 * 2 * num_rows * num_heads * num_positions**2 * head_dim
    return flop / median_seconds(work, device)


def _loss_rate(kernels: Kernels, dtype: torch.dtype, device: torch.device, matmul_rate: float) -> float:
    """Logits/s of the head's softmax and loss: the whole operation's time less that of its three GEMMs."""
    num_tokens, vocab_size, dim = (512 if device.type == "cpu" else 4096), 8192, 512
    x = _random(num_tokens, dim, dtype=dtype, device=device, grad=True)
    weight = _random(vocab_size, dim, dtype=torch.float32, device=device, grad=True)
    labels = torch.arange(num_tokens, device=device)

    def work() -> None:
        loss, _ = kernels.linear_cross_entropy(x, weight, labels)
        torch.autograd.grad(loss, (x, weight))

    seconds = median_seconds(work, device)
    gemm_seconds = 6 * num_tokens * vocab_size * dim / matmul_rate
    return num_tokens * vocab_size / max(seconds - gemm_seconds, 0.1 * seconds)


def _elementwise_rate(kernels: Kernels, dtype: torch.dtype, device: torch.device) -> float:
    """Bytes/s of tensors read and written by a norm and a SwiGLU, forward and backward (14 passes)."""
    num_tokens, dim = 2048, 1024
    gate = _random(num_tokens, dim, dtype=dtype, device=device, grad=True)
    up = _random(num_tokens, dim, dtype=dtype, device=device, grad=True)
    weight = torch.ones(dim, device=device, requires_grad=True)
    upstream = _random(num_tokens, dim, dtype=dtype, device=device)

    def work() -> None:
        out = kernels.rms_norm(kernels.swiglu(gate, up), weight, 1e-5)
        torch.autograd.grad(out, (gate, up, weight), upstream)

    return 14 * num_tokens * dim * gate.element_size() / median_seconds(work, device)


def _adam_rate(kernels: Kernels, moments: torch.dtype, device: torch.device) -> float:
    """Parameters/s of one AdamW update of FP32 parameters."""
    num_params = 2**23 if device.type == "cpu" else 2**27
    param, grad = (_random(num_params, dtype=torch.float32, device=device) for _ in range(2))
    first, second = (torch.zeros(num_params, dtype=moments, device=device) for _ in range(2))
    update = kernels.adam(device.type, moments)
    hyper = AdamHyper(step=1, lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, seed=0)
    return num_params / median_seconds(lambda: update([param], [grad], [first], [second], hyper), device)


def _bandwidth(device: torch.device) -> float:
    """Bytes/s of a copy between two buffers of 128 MiB, reads and writes counted."""
    source, target = (torch.ones(2**25, device=device) for _ in range(2))
    return 2 * source.nbytes / median_seconds(lambda: target.copy_(source), device)


def _exp_rate(device: torch.device) -> float:
    """Exponentials/s over 4 MiB, which stay in the cache."""
    x = torch.zeros(2**20, device=device)
    return x.numel() / median_seconds(lambda: torch.exp(x, out=x), device, _SECONDS_EACH / 4)
