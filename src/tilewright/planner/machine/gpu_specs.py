"""Published ceilings of GPUs that are not at hand, and what a step is guessed to reach of them.

Rates are the makers' own, dense (without structured sparsity), and no measurement of ours: a plan made with them says
so. What a program reaches of a published peak is a guess, named here and printed with the plan. Memory is not what is
sold (80 GB) but what CUDA reports as the total to a program, as it is in PyTorch's out-of-memory messages; a driver
may give some hundredths of a GiB more or less. Used for `--on`.
"""

import difflib
from dataclasses import dataclass

from tilewright.core.errors import ConfigError
from tilewright.core.hardware import Machine
from tilewright.planner.machine.ceilings import Ceilings

GIB = 2**30
MATMUL_SHARE, ATTENTION_SHARE, MEMORY_SHARE, LINK_SHARE = 0.7, 0.4, 0.85, 0.8
EAGER_SHARE = 0.4
"""Of the memory bandwidth, what eager element-wise operations reach."""
EXPONENTIALS = 1e12
"""A second."""
HOST_BYTES = 128 * GIB
"""Host memory where none is named."""
GUESSES = (
    f"guessed shares of the published peaks: matmuls {MATMUL_SHARE:.0%}, attention {ATTENTION_SHARE:.0%}, device "
    f"memory {MEMORY_SHARE:.0%} (eager loops {EAGER_SHARE:.0%}), host link {LINK_SHARE:.0%}"
)


@dataclass(frozen=True)
class GpuSpec:
    """One GPU as its maker describes it.

    `bf16`, `fp8`: dense FLOP/s with FP32 accumulation; 0 without such a unit. `fp32`: FLOP/s without matrix units.
    `memory`: bytes that CUDA reports. `bandwidth`: bytes/s of its memory. `link`: bytes/s to the host, one direction.
    `watts`: the most that the board takes. `reported`: what CUDA calls it.
    """

    name: str
    full_name: str
    capability: tuple[int, int]
    bf16: float
    fp8: float
    fp32: float
    memory: float
    bandwidth: float
    link: float
    watts: float
    reported: str
    source: str

    def machine(self, here: Machine, host_bytes: int) -> Machine:
        """A machine with this GPU; versions and compiler are those of the machine at hand."""
        return Machine(
            device="cuda",
            device_name=f"{self.full_name} (published numbers)",
            capability=self.capability,
            device_memory_bytes=int(self.memory),
            host_memory_bytes=host_bytes,
            physical_cores=here.physical_cores,
            cpu_features=here.cpu_features,
            cxx_compiler=here.cxx_compiler,
            versions=here.versions,
        )

    def ceilings(self) -> Ceilings:
        """The ceilings of this GPU: published peaks times guessed shares, see `GUESSES`."""
        memory = MEMORY_SHARE * self.bandwidth
        peaks = {"fp32": self.fp32, "tf32": self.bf16 / 2, "bf16": self.bf16, "fp16": self.bf16}
        peaks |= {"fp8": self.fp8} if self.fp8 else {}
        formats = ("fp32", "tf32", "bf16", "fp16")
        return Ceilings(
            key=f"published {self.name}",
            matmul={fmt: {1024: MATMUL_SHARE * peak} for fmt, peak in peaks.items()},
            start={fmt: {} for fmt in peaks},
            attention={fmt: ATTENTION_SHARE * peaks[fmt] for fmt in formats},
            loss=dict.fromkeys(formats, memory / 24),  # six passes in FP32
            elementwise=dict.fromkeys(formats, EAGER_SHARE * self.bandwidth),
            adam={"fp32": memory / 28, "bf16": memory / 20, "8bit": memory / 16},  # parameter, gradient, moments
            bandwidth=memory,
            exp=EXPONENTIALS,
            threads=0,
            busy=1.0,
            measured_s=0.0,
        )


TABLE = {
    row.name: row
    for row in (
        GpuSpec(
            "h100", "NVIDIA H100 SXM", (9, 0), 989.5e12, 1979e12, 67e12, 79.11 * GIB, 3.35e12, 63e9, 700.0,
            "NVIDIA H100 80GB HBM3",
            "NVIDIA H100 data sheet: 1979 and 3958 TFLOP/s with sparsity, halved; "
            "PCIe 5.0 x16; memory: vllm#27508",
        ),
        GpuSpec(
            "h200", "NVIDIA H200 SXM", (9, 0), 989.5e12, 1979e12, 67e12, 139.7 * GIB, 4.8e12, 63e9, 700.0,
            "NVIDIA H200",
            "NVIDIA H200 data sheet: 1979 and 3958 TFLOP/s with sparsity, halved; "
            "PCIe 5.0 x16; memory: 143771 MiB in nvidia-smi, less what the driver keeps",
        ),
        GpuSpec(
            "a100", "NVIDIA A100 SXM 80 GB", (8, 0), 312e12, 0.0, 19.5e12, 79.25 * GIB, 2.039e12, 31.5e9, 400.0,
            "NVIDIA A100-SXM4-80GB",
            "NVIDIA A100 data sheet: 312 TFLOP/s dense; no 8-bit float unit; "
            "PCIe 4.0 x16; memory: HiDream-ai/VAREdit#6",
        ),
        GpuSpec(
            "4090", "NVIDIA GeForce RTX 4090", (8, 9), 165.2e12, 330.3e12, 82.6e12, 23.64 * GIB, 1.008e12, 31.5e9,
            450.0, "NVIDIA GeForce RTX 4090",
            "NVIDIA Ada architecture white paper, dense with FP32 accumulation; "
            "PCIe 4.0 x16; memory: ali-vilab/VGen#104",
        ),
        GpuSpec(
            "b200", "NVIDIA B200 SXM", (10, 0), 2250e12, 4500e12, 80e12, 178.35 * GIB, 8.0e12, 63e9, 1000.0,
            "NVIDIA B200",
            "NVIDIA DGX B200 data sheet: of 8 GPUs 36 and 72 PFLOP/s with sparsity, halved; 1440 GB; "
            "PCIe 5.0 x16; memory: pytorch/ao#4002",
        ),
    )
}  # fmt: skip


def find_published(name: str) -> GpuSpec:
    """Find the published rates of a GPU by its name.

    Raises:
        ConfigError: not in the table.

    Example:
        >>> find_published("4090").memory / 2**30
        23.64
    """
    if name.lower() not in TABLE:
        near = difflib.get_close_matches(name.lower(), TABLE, n=2)
        raise ConfigError(
            "Unknown machine name",
            got=f"--on {name}",
            need=f"one of {', '.join(TABLE)}",
            try_=" or ".join(f"--on {one}" for one in near) or "tilewright plan without --on, which takes this machine",
            where="--on",
        )
    return TABLE[name.lower()]


def board_watts(machine: Machine) -> float | None:
    """The most watts that one of the machine's GPUs takes, as its maker publishes it; None if the table has none.

    Args:
        machine: at hand, or made by `GpuSpec.machine`.
    """
    named = {
        name: row.watts for row in TABLE.values() for name in (row.reported, f"{row.full_name} (published numbers)")
    }
    return named.get(machine.device_name)
