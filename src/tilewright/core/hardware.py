"""Facts of this machine: device, memory, cores, instruction sets, compiler and versions.

Facts only, read once at the start of a command; which kernel a fact leads to is decided in `ops`. `fp8_choice` sums
up what they mean for 8-bit training.
Limits of containers count: cores follow the affinity mask and the CPU quota, memory the cgroup limit.
A fact that cannot be found is empty or None, never guessed. torch is imported inside.
"""

import functools
import importlib.metadata
import os
import platform
import shutil
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil

from tilewright.core import env
from tilewright.core.errors import HardwareError

if TYPE_CHECKING:
    import torch

_CPU_UNITS = {
    "bfloat16": {"amx_bf16", "avx512_bf16", "bf16"},
    "float16": {"amx_fp16", "avx512_fp16", "asimdhp", "fphp"},
}
"""Instruction sets that multiply 16-bit operands, x86 and ARM, as the kernel names them."""
_FEATURE_PREFIXES = ("avx", "amx", "fma", "f16c", "sse4", "asimd", "sve", "bf16", "i8mm", "fphp")
_MATMUL_PREFIXES = ("avx_vnni", "avx_ne_convert", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_")
"""Instructions that torch multiplies matrices with through oneDNN alone, which has a limit of its own."""
_VNNI2 = ("avx_vnni", "avx_vnni_int8", "avx_vnni_int16", "avx_ne_convert")
_BF16 = ("avx512_vnni", "avx512_bf16")
_FP16 = (*_BF16, "avx_vnni", "avx512_fp16")
_AMX = (*_FP16, "amx_tile", "amx_int8", "amx_bf16")
_MATMUL_LIMITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("sse41", "avx", "avx2", "avx512_core"), ()),
    "avx2_vnni": ("avx_vnni",),
    "avx2_vnni_2": _VNNI2,
    "avx512_core_vnni": ("avx512_vnni",),
    "avx512_core_bf16": _BF16,
    **dict.fromkeys(("avx512_core_fp16", "avx10_1_512"), _FP16),
    **dict.fromkeys(("avx512_core_amx", "avx10_1_512_amx"), _AMX),
    **dict.fromkeys(("avx512_core_amx_fp16", "avx10_1_512_amx_fp16"), (*_AMX, "amx_fp16")),
    **dict.fromkeys(("avx10_2", "avx10_2_512"), (*_FP16, *_VNNI2)),
}
"""Which of them each value of ONEDNN_MAX_CPU_ISA leaves (src/cpu/x64/cpu_isa_traits.hpp of oneDNN 3.12); another
value limits nothing there."""
_VECTOR_LIMITS = {"default": ("avx", "fma", "f16c"), "avx2": ("avx512",), "avx512": ()}
"""Features of the CPU, by prefix, that each value of ATEN_CPU_CAPABILITY hides (ATen/native/DispatchStub.cpp)."""
_PACKAGES = (
    "tilewright",
    "torch",
    "numpy",
    "triton",
    "tokenizers",
    "safetensors",
    "pydantic",
    "transformers",
    "accelerate",
    "datasets",
    "pyarrow",
)


@dataclass(frozen=True)
class Machine:
    """One machine as a run sees it. Sizes in bytes."""

    device: str
    """`"cpu"` or `"cuda"`."""
    device_name: str
    capability: tuple[int, int] | None
    """Compute capability of the GPU; None on a CPU."""
    device_memory_bytes: int
    """Memory of the device: of the GPU, or `host_memory_bytes` on a CPU."""
    host_memory_bytes: int
    physical_cores: int
    """Whole cores this process may use."""
    cpu_features: frozenset[str]
    """Vector instruction sets that torch may use here, as the kernel names them: avx512_bf16, amx_bf16, ..."""
    cxx_compiler: str | None
    versions: dict[str, str]
    core_share: float = 1.0
    """Of a core, what a thread has: less than one where more processes of a run share the machine than it has cores."""
    cpu_limits: tuple[str, ...] = ()
    """Variables by which torch may not use all that the CPU has, as "NAME=value"."""

    def cpu_multiplies(self, dtype: "torch.dtype") -> bool:
        """True if the machine's CPU has matrix or dot-product instructions for operands of this dtype."""
        return cpu_multiplies(dtype, self.cpu_features)

    def shared_by(self, processes: int) -> "Machine":
        """Share of this machine's hardware that each process of one run has: a share of cores and host memory. Of a GPU
        each has its own.

        Example:
            >>> machine = detect_machine("cpu")
            >>> machine.shared_by(1) == machine, machine.shared_by(2).host_memory_bytes * 2 <= machine.host_memory_bytes
            (True, True)
        """
        if processes == 1:
            return self
        host = self.host_memory_bytes // processes
        return replace(
            self,
            physical_cores=max(1, self.physical_cores // processes),
            core_share=min(1.0, self.physical_cores / processes),
            host_memory_bytes=host,
            device_memory_bytes=host if self.device == "cpu" else self.device_memory_bytes,
        )

    def to_json(self) -> dict[str, object]:
        """The machine's hardware as plain types for machine.json."""
        return {**asdict(self), "cpu_features": sorted(self.cpu_features)}


@dataclass(frozen=True)
class Fp8Choice:
    """How a machine runs 8-bit training: by the two names of the articles, and which matmuls a unit runs."""

    mode: Literal["full_fp8", "hybrid_fp16"]
    """full_fp8: linear layers on the FP8 unit. hybrid_fp16: matmuls in 16 bit, on a CPU without instructions for them
    in FP32."""
    native: tuple[str, ...]
    """Modes of `precision.mode` whose matmuls torch runs on the FP8 unit."""
    reason: str


def fp8_choice(machine: Machine) -> Fp8Choice:
    """How 8-bit matmuls run on a machine's hardware. `doctor` prints it; which kernel runs is decided in `ops`.

    Example:
        >>> from dataclasses import replace
        >>> machine = replace(detect_machine("cpu"), device="cuda", capability=(8, 9))
        >>> fp8_choice(machine).mode, fp8_choice(machine).native
        ('hybrid_fp16', ('fp8_tensorwise',))
    """
    if machine.capability is None:
        wide = _multiplied_format(machine)
        reason = f"a CPU has no FP8 unit: 8-bit operands are decoded to {wide}, exactly, before each matmul"
        return Fp8Choice("hybrid_fp16", (), reason)
    capability = f"compute capability {machine.capability[0]}.{machine.capability[1]}"
    if machine.capability == (9, 0):
        reason = f"{capability} multiplies 8-bit tiles with their scales, forward and backward"
        return Fp8Choice("full_fp8", ("fp8_tile", "fp8_hybrid", "fp8_tensorwise"), reason)
    if machine.capability > (9, 0):
        reason = (
            f"{capability} has an FP8 unit; torch's matmul of scaled tiles is for 9.0 alone, so tiles run elsewhere"
        )
        return Fp8Choice("full_fp8", ("fp8_tensorwise",), reason)
    if machine.capability == (8, 9):
        reason = f"{capability} has an FP8 unit, which torch uses for operands with one scale per tensor, not for tiles"
        return Fp8Choice("hybrid_fp16", ("fp8_tensorwise",), reason)
    reason = f"{capability} has no FP8 unit (8.9 is the first): 8-bit operands are decoded to BF16, exactly"
    return Fp8Choice("hybrid_fp16", (), reason)


def _multiplied_format(machine: Machine) -> str:
    """Dtype to which the hardware's CPU decodes 8-bit operands."""
    import torch

    return "BF16" if machine.cpu_multiplies(torch.bfloat16) else "FP32 (the CPU has no BF16 instructions)"


def cpu_class(features: Collection[str]) -> str:
    """Name the hardware's class of CPU by the features that decide the speed of its 8- and 16-bit matmuls, and how
    8-bit ones are summed.

    Args:
        features: as in `Machine.cpu_features`.

    Returns:
        amx, avx512_bf16 (with VNNI), avx512_vnni, avx512, avx_vnni, avx2 (the last two without 16-bit products, avx512
        and avx2 without VNNI), arm, or other.

    Example:
        >>> cpu_class({"avx2", "avx512f", "avx512_vnni"}), cpu_class({"avx2", "fma"}), cpu_class({"asimd"})
        ('avx512_vnni', 'avx2', 'arm')
    """
    kinds = {"amx": "amx_int8", "avx512_bf16": "avx512_bf16", "avx512_vnni": "avx512_vnni", "avx512": "avx512f"}
    kinds |= {"avx_vnni": "avx_vnni", "avx2": "avx2", "arm": "asimd"}
    return next((name for name, feature in kinds.items() if feature in features), "other")


def detect_machine(device: str = "auto") -> Machine:
    """Detect the facts of this machine's hardware.

    Args:
        device: "auto" takes a CUDA GPU where there is one, "cpu" never looks for one, "cuda" insists.

    Raises:
        HardwareError: "cuda" was asked for and is not there; the message says why.
    """
    import torch

    if device not in ("auto", "cpu", "cuda"):
        raise AssertionError(f"device must be auto, cpu or cuda, not {device!r}")
    host_memory = _host_memory_bytes()
    name, capability, device_memory = _cpu_name(), None, host_memory
    use_cuda = device != "cpu" and torch.cuda.is_available()
    if device == "cuda" and not use_cuda:
        raise _no_cuda()
    if use_cuda:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        name, device_memory = properties.name, properties.total_memory
        capability = (properties.major, properties.minor)
    return Machine(
        device="cuda" if use_cuda else "cpu",
        device_name=name,
        capability=capability,
        device_memory_bytes=device_memory,
        host_memory_bytes=host_memory,
        physical_cores=_physical_cores(),
        cpu_features=cpu_features(),
        cxx_compiler=find_cxx_compiler(),
        versions=_versions(torch.version.cuda),
        cpu_limits=cpu_limits(),
    )


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo"), environ: Mapping[str, str] | None = None) -> frozenset[str]:
    """The vector instruction sets of the CPU that torch may use. Empty on systems without /proc/cpuinfo.

    ONEDNN_MAX_CPU_ISA limits those of matmuls, ATEN_CPU_CAPABILITY all others: kernels are chosen, compiled and planned
    as on a CPU that lacks the rest. Values that oneDNN and ATen ignore limit nothing. On ARM neither does.
    """
    features = _cpu_flags(cpuinfo)
    return features - _barred(features, environ)


def cpu_limits(cpuinfo: Path = Path("/proc/cpuinfo"), environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The variables, as "NAME=value", that forbid torch vector instruction sets which the CPU has."""
    features, limits = _cpu_flags(cpuinfo), (env.matmul_limit(environ), env.vector_limit(environ))
    return tuple(f"{name}={value}" for name, value in limits if name and _barred(features, {name: value}))


def _cpu_flags(cpuinfo: Path) -> frozenset[str]:
    for line in _lines(cpuinfo):
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(flag for flag in value.split() if flag.startswith(_FEATURE_PREFIXES))
    return frozenset()


def _barred(features: frozenset[str], environ: Mapping[str, str] | None) -> frozenset[str]:
    """The CPU features, of those given, that the environment forbids torch to use."""
    of_matmuls = frozenset(flag for flag in features if flag.startswith(_MATMUL_PREFIXES))
    left = _MATMUL_LIMITS.get(env.matmul_limit(environ)[1], of_matmuls)
    taken = _VECTOR_LIMITS.get(env.vector_limit(environ)[1], ())
    return of_matmuls.difference(left) | {flag for flag in features - of_matmuls if flag.startswith(taken)}


def cpu_multiplies(dtype: "torch.dtype", features: frozenset[str]) -> bool:
    """True if hardware, a CPU with these features, multiplies operands of this dtype itself. FP32 and FP64: every
    CPU."""
    units = _CPU_UNITS.get(str(dtype).removeprefix("torch."))
    return units is None or bool(units & features)


def find_cxx_compiler() -> str | None:
    """Path of the machine's C++ compiler: `CXX` first (None where that is not there), else g++, clang++, c++."""
    asked = env.compiler()
    if asked:
        return shutil.which(asked.split()[0])
    return next((path for name in ("g++", "clang++", "c++") if (path := shutil.which(name))), None)


def _no_cuda() -> HardwareError:
    import torch

    if torch.version.cuda is None:
        got = f"torch {torch.__version__}, a build without CUDA"
        need = "a torch build with CUDA, and an NVIDIA GPU"
    elif torch.cuda.device_count() == 0:
        got = f"torch {torch.__version__} (CUDA {torch.version.cuda}), which sees no GPU"
        need = "an NVIDIA GPU visible to this process, with a driver for that CUDA version"
    else:
        got = f"torch {torch.__version__} sees a GPU but cannot start CUDA on it"
        need = f"a driver for CUDA {torch.version.cuda}"
    return HardwareError(
        "No CUDA device",
        got=got,
        need=need,
        try_='run.device = "auto", or --run.device cpu;\n`tilewright plan --on h200` plans for a card elsewhere',
    )


def _lines(path: Path) -> list[str]:
    """Lines of a file of the operating system about hardware; empty where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _cpu_name() -> str:
    for line in _lines(Path("/proc/cpuinfo")):
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def _cgroup_dirs() -> list[Path]:
    """Folders of this process's cgroup v2, from its own up to the root; the memory and CPU limits of all of them
    apply."""
    root = Path("/sys/fs/cgroup")
    own = next((line[3:] for line in _lines(Path("/proc/self/cgroup")) if line.startswith("0::")), "/")
    folder = root / own.lstrip("/")
    return [folder, *(parent for parent in folder.parents if parent == root or root in parent.parents)]


def _host_memory_bytes() -> int:
    limits = [psutil.virtual_memory().total]
    files = [folder / "memory.max" for folder in _cgroup_dirs()]
    for path in [*files, Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")]:
        limits += [int(line) for line in _lines(path)[:1] if line.isdigit()]
    return min(limits)


def _physical_cores() -> int:
    """Count the hardware's physical cores in the affinity mask, hyper-threads once, but no more than the CPU quota."""
    if hasattr(os, "sched_getaffinity"):
        mask = os.sched_getaffinity(0)
        topology = Path("/sys/devices/system/cpu")
        cores = {
            tuple(_lines(topology / f"cpu{cpu}/topology/core_cpus_list")) or (f"cpu{cpu}",) for cpu in mask
        }  # fmt: skip
        count = len(cores)
    else:
        count = psutil.cpu_count(logical=False) or 1
    for folder in _cgroup_dirs():
        quota, period = ([*" ".join(_lines(folder / "cpu.max")).split(), "max", "max"])[:2]
        if quota.isdigit() and period.isdigit():
            count = min(count, -(-int(quota) // int(period)))
    return max(1, count)


def _versions(cuda: str | None) -> dict[str, str]:
    """Versions beside the hardware's facts, of what numbers depend on. A package that is not installed is left out;
    none is imported."""
    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.release()}"}
    found |= {name: version for name in _PACKAGES if (version := _version(name)) is not None}
    if cuda is not None:
        found["cuda"] = cuda
    return found


@functools.cache  # a file to search and to read for each package, in each run; a process keeps what it began with
def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
