"""The measurements behind `planner.machine.ceilings`: a few operations at a few sizes, each timed for hundredths of a
second.

Legend: N tokens, D width, K inputs, M outputs, V vocabulary, B rows, H heads, S positions.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import psutil
import torch
from torch import Tensor

from tilewright.formats.quadratic_map import scale_shape
from tilewright.formats.tiled import FP8_BLOCK, FP8_ROW
from tilewright.ops.backends.ref.adam import AdamHyper
from tilewright.ops.backends.ref.low_bit_adam import LowBitTensors
from tilewright.ops.kernels import Kernels
from tilewright.planner.trace.byte_counter import LiveBytes

WIDTHS = (64, 128, 256, 512, 1024, 2048)
_BUDGET_S = 0.05
_FEWEST, _MOST = 2, 100
WAITED = 1.25
"""Seconds over those in which the calling thread had a processor, from which on others have taken it."""
_FEW, _FEW_TILED = 16, 128
"""Rows; of 8-bit operands a whole tile."""


@dataclass(frozen=True)
class Timed:
    """Three matmuls of a square linear layer, forward and backward: their seconds with few rows and with many."""

    width: int
    few: int
    few_s: float
    many: int
    many_s: float

    @property
    def rate(self) -> float:
        """The part of a microbenchmark's time that grows with the rows, as FLOP/s."""
        flops = 6 * (self.many - self.few) * self.width**2
        return flops / max(self.many_s - self.few_s, 0.1 * self.many_s)  # however badly the two were timed

    @property
    def start(self) -> float:
        """The part of a microbenchmark's time that does not grow with the rows, in seconds."""
        return max(0.0, self.few_s - 6 * self.few * self.width**2 / self.rate)

    @classmethod
    def of_rounds(cls, timings: Sequence["Timed"], pick: Callable[[Iterable[float]], float]) -> "Timed":
        """One microbenchmark of several rounds: `pick` chooses the seconds, such as the middle ones."""
        few_s, many_s = (pick(getattr(one, name) for one in timings) for name in ("few_s", "many_s"))
        return replace(timings[0], few_s=few_s, many_s=many_s)


class Clock:
    """Times calls; remembers how much slower the median was than the fastest.

    On a CPU the calling thread takes part in all of an operation, and has a processor all the time unless others take
    it. Where it was made to wait, the seconds in which it did not are counted, and of several calls the best one's.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.ratios: list[float] = []

    def __call__(self, work: Callable[[], object], budget_s: float = _BUDGET_S) -> float:
        """Time a call of a microbenchmark, in seconds, the middle one: one warm-up, then 2 calls at least and about
        `budget_s` of them."""
        work()
        times: list[float] = []
        processor: list[float] = []  # of this thread
        while len(times) < _FEWEST or (sum(times) < budget_s and len(times) < _MOST):
            self._wait()
            start, used = time.perf_counter(), time.thread_time()
            work()
            self._wait()
            processor.append(time.thread_time() - used)
            times.append(time.perf_counter() - start)
        self.ratios.append(statistics.median(times) / min(times))
        if self.device.type == "cpu" and sum(times) > WAITED * sum(processor) > 0:
            return min(processor)
        return statistics.median(times)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Load:
    """The share of the processors that other programs take from now on."""

    def __init__(self) -> None:
        self._began, self._before = time.perf_counter(), self._others()

    def others(self) -> float:
        """Load of the machine since a microbenchmark began, 0 to 1 of all processors' time: other processes, and a
        hypervisor that gave it away."""
        wall = (time.perf_counter() - self._began) * (psutil.cpu_count() or 1)
        return min(1.0, max(0.0, (self._others() - self._before) / wall))

    @staticmethod
    def _others() -> float:
        system, process = psutil.cpu_times(), psutil.Process()
        waiting = system.idle + getattr(system, "iowait", 0.0)
        counted_twice = getattr(system, "guest", 0.0) + getattr(system, "guest_nice", 0.0)
        family = [process, *process.children(recursive=True)]  # torch compiles in processes that stay
        times = [one.cpu_times() for one in family if one.is_running()]
        ours = sum(t.user + t.system + t.children_user + t.children_system for t in times)
        return sum(system) - waiting - counted_twice - ours


class RateProbe:
    """Measures the rates of one device through `kernels`. Sizes are larger on CUDA, so that launches do not count.

    Args:
        kernels: implementations to measure.
        device: where.
    """

    def __init__(self, kernels: Kernels, device: torch.device) -> None:
        self.kernels = kernels
        self.device = device
        self.clock = Clock(device)
        self._scale = 1 if device.type == "cpu" else 8

    def busy(self) -> float:
        """How busy the machine was during microbenchmarks: the median over all of median time over fastest time."""
        return statistics.median(self.clock.ratios)

    def _random(self, *shape: int, dtype: torch.dtype, grad: bool = False) -> Tensor:
        return (torch.randn(*shape, device=self.device) * 0.1).to(dtype).requires_grad_(grad)

    def matmul(self, dtype: torch.dtype) -> dict[int, Timed]:
        """Time a square linear layer by width: forward, input gradient and weight gradient."""

        return self._by_width(lambda width, rows: self.linear(rows, width, width, dtype), _FEW)

    def matmul_fp8(self) -> dict[int, Timed]:
        """Microbenchmark of the three matmuls of a square linear by width, in seconds, with operands in 8-bit tiles,
        which are made before."""

        return self._by_width(lambda width, rows: self.tiled_linear(rows, width, width), _FEW_TILED)

    def linear(
        self, rows: int, num_in: int, num_out: int, dtype: torch.dtype, *, frozen: bool = False
    ) -> Callable[[], object]:
        """The three matmuls of a linear layer, for a microbenchmark to call; of a frozen one the two without a weight's
        gradient."""
        x_NK = self._random(rows, num_in, dtype=dtype, grad=True)
        weight_MK = self._random(num_out, num_in, dtype=dtype, grad=not frozen)
        upstream_NM = self._random(rows, num_out, dtype=dtype)
        wanted = (x_NK,) if frozen else (x_NK, weight_MK)
        return lambda: torch.autograd.grad(self.kernels.linear(x_NK, weight_MK), wanted, upstream_NM)

    def tiled_linear(self, rows: int, num_in: int, num_out: int, *, frozen: bool = False) -> Callable[[], object]:
        """The three matmuls of a linear layer, for a microbenchmark to call, with operands in 8-bit tiles, which are
        made before."""
        x_NK, upstream_NM = (self._random(rows, width, dtype=torch.bfloat16) for width in (num_in, num_out))
        weight = self.kernels.quantize(self._random(num_out, num_in, dtype=torch.bfloat16), FP8_BLOCK)
        (x, x_turned), (dy, dy_turned) = (self.kernels.quantize_both(t, FP8_ROW) for t in (x_NK, upstream_NM))
        pairs = [(x, weight), (dy, weight.transposed()), (dy_turned, x_turned)][: 2 if frozen else 3]
        return lambda: [self.kernels.tile_gemm(a, b, out_dtype=torch.bfloat16) for a, b in pairs]

    def _by_width(self, prepared: Callable[[int, int], Callable[[], object]], few: int) -> dict[int, Timed]:
        """Microbenchmark seconds of `prepared` for a width and a number of rows, timed with `few` rows and with
        many."""
        found = {}
        for width in WIDTHS:
            rows = (few, self._scale * min(1024, 2**20 // width))
            few_s, many_s = (self.clock(prepared(width, num_tokens), _BUDGET_S / 2) for num_tokens in rows)
            found[width] = Timed(width, rows[0], few_s, rows[1], many_s)
        return found

    def matmul_tf32(self) -> dict[int, Timed]:
        """Microbenchmark of the three matmuls of a square linear by width, in seconds, with TF32 allowed for FP32
        operands (CUDA)."""
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            return self.matmul(torch.float32)
        finally:
            torch.set_float32_matmul_precision(before)

    def attention(self, dtype: torch.dtype) -> float:
        """Microbenchmark of attention, FLOP/s: causal over two documents, 2 S^2 D forward, 2.5 times that backward."""
        shape = num_rows, num_heads, num_positions, head_dim = 4 * self._scale, 4, 512, 64
        q_BHSD, k_BHSD, v_BHSD, upstream_BHSD = (self._random(*shape, dtype=dtype, grad=i < 3) for i in range(4))
        segments_BS = (torch.arange(num_positions, device=self.device) >= num_positions // 2).int().expand(num_rows, -1)

        def work() -> None:
            out_BHSD = self.kernels.attention(q_BHSD, k_BHSD, v_BHSD, segments=segments_BS)
            torch.autograd.grad(out_BHSD, (q_BHSD, k_BHSD, v_BHSD), upstream_BHSD)

        return 3.5 * 2 * num_rows * num_heads * num_positions**2 * head_dim / self.clock(work)

    def loss(self, dtype: torch.dtype, matmul_rate: float) -> float:
        """Microbenchmark of the head's softmax and loss, logits/s: the whole operation's time less that of its three
        matmuls."""
        num_tokens, vocab_size, dim = 512 * self._scale, 8192, 512
        x_ND = self._random(num_tokens, dim, dtype=dtype, grad=True)
        weight_VD = self._random(vocab_size, dim, dtype=torch.float32, grad=True)
        labels_N = torch.arange(num_tokens, device=self.device)

        def work() -> None:
            loss, *_ = self.kernels.linear_cross_entropy(x_ND, weight_VD, labels_N)
            torch.autograd.grad(loss, (x_ND, weight_VD))

        seconds = self.clock(work)
        matmuls = 6 * num_tokens * vocab_size * dim / matmul_rate
        return num_tokens * vocab_size / max(seconds - matmuls, 0.1 * seconds)

    def elementwise(self, dtype: torch.dtype) -> float:
        """Time element-wise work: bytes/s that an eager norm and SwiGLU read and write, forward and backward."""
        num_tokens, dim = 2048 * self._scale, 1024
        gate_ND, up_ND, upstream_ND = (self._random(num_tokens, dim, dtype=dtype, grad=i < 2) for i in range(3))
        weight_D = torch.ones(dim, device=self.device, requires_grad=True)

        def work() -> None:
            out_ND = self.kernels.rms_norm(self.kernels.swiglu(gate_ND, up_ND), weight_D, 1e-5)
            torch.autograd.grad(out_ND, (gate_ND, up_ND, weight_D), upstream_ND)

        counted = LiveBytes()
        with counted:
            work()
        return counted.moved / self.clock(work)

    def adam(self, moments: torch.dtype) -> float:
        """Time AdamW: FP32 parameters/s of one update."""
        num_params = 2**22 * self._scale
        param, grad = (self._random(num_params, dtype=torch.float32) for _ in range(2))
        first, second = (torch.zeros(num_params, dtype=moments, device=self.device) for _ in range(2))
        update = self.kernels.adam(self.device.type, moments)
        hyper = AdamHyper(step=1, lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, seed=0)
        return num_params / self.clock(lambda: update([param], [grad], [first], [second], [0], hyper))

    def low_bit_adam(self) -> float:
        """Time AdamW with 8-bit moments: parameters/s of one update."""
        num_params = 2**22 * self._scale
        target, grad = (self._random(num_params, dtype=torch.float32) for _ in range(2))
        exp_avg, exp_avg_sq = (
            torch.zeros(num_params, dtype=kind, device=self.device) for kind in (torch.int8, torch.uint8)
        )
        scales = [torch.zeros(scale_shape((1, num_params)), device=self.device) for _ in range(2)]
        tensors = LowBitTensors(target, None, grad, exp_avg, scales[0], exp_avg_sq, scales[1], 0)
        hyper = AdamHyper(step=1, lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, seed=0)
        return num_params / self.clock(lambda: self.kernels.low_bit_adam(tensors, hyper))

    def bandwidth(self) -> float:
        """Time memory: bytes/s of a copy between two buffers of 128 MiB, reads and writes counted."""
        source, target = (torch.ones(2**25, device=self.device) for _ in range(2))
        return 2 * source.nbytes / self.clock(lambda: target.copy_(source))

    def exp(self) -> float:
        """Microbenchmark of exponentials/s over 4 MiB, which stay in the cache."""
        x = torch.zeros(2**20, device=self.device)
        return x.numel() / self.clock(lambda: torch.exp(x, out=x), _BUDGET_S / 4)
