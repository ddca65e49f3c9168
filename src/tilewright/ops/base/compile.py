"""Options of torch.compile for this machine's C++ compiler, without which its CPU code is wrong.

GCC that finds AVX-512 on a processor it has no tuning for (a newer one, or one whose features a virtual machine masks)
compiles with `-mtune=generic`. GCC 12 then vectorises torch's transposition of BF16 blocks wrongly: NaN and stale
values in gradients, no warning (docs/log.md, 2026-11-21). Named an architecture, it tunes for that and is right.
Where ATEN_CPU_CAPABILITY keeps torch to AVX2 on a CPU with AVX-512, its code is for AVX2 and `-march=native` is not:
GCC 12 then gives garbage for a chain of BF16 operations (docs/log.md, 2026-11-25).
Called wherever something is compiled.
"""

import functools
import inspect
import subprocess
from pathlib import Path
from typing import Any

import torch

from tilewright.core.errors import HardwareError
from tilewright.core.hardware import Machine, cpu_features, find_cxx_compiler

MARCH, NARROW_MARCH = "skylake-avx512", "haswell"
"""The oldest architectures with all the parts that torch's generated code uses: of AVX-512, and of AVX2 alone."""
_PARTS = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"}


def compile_options() -> dict[str, Any]:
    """Compile options for `torch.compile` on this machine; empty where it needs none."""
    march = _march()
    return {"cpp.march": march} if march and _takes_march() else {}


def layer_options() -> dict[str, Any]:
    """Options for compiling layers: `compile_options`, and values are rounded wherever the code says so.

    Fused loops would keep 16-bit values in FP32 between two operations, and what is fused with what depends on what is
    kept for backward. So the same layer would have other last bits where its activations are kept and where they are
    recomputed. Rounded, it has those of eager mode in both. CPU code needs a torch that heeds the option there:
    `rounds_as_eager`.
    """
    rounds = "emulate_precision_casts"
    return compile_options() | ({rounds: True} if rounds in torch._inductor.list_options() else {})


@functools.cache
def rounds_as_eager() -> bool:
    """True if torch.compile rounds as eager: it heeds `layer_options` in CPU code: 2.13 does, 2.11 has the option for
    GPUs only.

    Read in its file, as to compile something takes seconds; a test compares this with what compiled code computes.
    """
    return "emulate_precision_casts" in _inductor_file("codegen/cpp.py")


def graph_limit() -> dict[str, Any]:
    """More arguments of `torch.compile` for layers: how many graphs there may be of one piece of code.

    Each way of keeping activations has its own, with gradients and without, in each dtype and for lengths that vary.
    Beyond the limit torch continues without a compiler; its own, 8, is within reach. Empty for a torch that takes none.
    """
    return {"recompile_limit": 64} if "recompile_limit" in inspect.signature(torch.compile).parameters else {}


def why_no_compile(machine: Machine) -> str | None:
    """Why torch.compile cannot be trusted, or used, for CPU code here; None where it can."""
    if machine.cxx_compiler is None:
        return "torch.compile needs a C++ compiler on CPU, and none was found (set CXX, or install g++)"
    if _march() is None or _takes_march():
        return None
    return (
        f"{machine.cxx_compiler} has no tuning for this processor and would miscompile BF16 code, and torch "
        f"{torch.__version__} cannot be told an architecture (2.13 can; or set CXX=clang++)"
    )


def compiles_layers(wanted: str, machine: Machine, *, by_default: bool) -> bool:
    """True if a run compiles its layers.

    Args:
        wanted: `train.compile`: on, off or auto.
        machine: where it runs.
        by_default: whether `auto` compiles this kind of model.

    Raises:
        HardwareError: `on`, and there is no compiler that can be used.
    """
    fault = None if machine.device == "cuda" else why_no_compile(machine)
    if wanted == "on" and fault:
        raise HardwareError(
            "Layers cannot be compiled on this machine",
            got=fault,
            need="a C++ compiler that is right for this processor: g++, clang++, or CXX set to one",
            try_='train.compile = "auto"',
            where="train.compile",
        )
    return wanted == "on" or (wanted == "auto" and not fault and by_default)


def _march() -> str | None:
    """The architecture (`-march`) for torch.compile's C++ compiler; None where `-march=native` is right."""
    if "avx512f" in cpu_features(environ={}) - cpu_features():
        return NARROW_MARCH
    return MARCH if miscompiles() else None


@functools.cache
def miscompiles() -> bool:
    """True if torch.compile's C++ compiler miscompiles: it is a GCC that tunes AVX-512 code for no processor in
    particular."""
    compiler = find_cxx_compiler()
    return compiler is not None and cpu_features() >= _PARTS and tuning_of(compiler) == "generic"


def tuning_of(compiler: str) -> str | None:
    """Tuning of torch.compile's C++: the processor that a GCC tunes for under `-march=native`; None where it does not
    say, as clang does not."""
    command = [compiler, "-march=native", "-Q", "--help=target"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = (line.split() for line in done.stdout.splitlines())
    return next((words[1] for words in lines if len(words) == 2 and words[0] == "-mtune="), None)


@functools.cache
def _takes_march() -> bool:
    """True if torch's compiler has an option for the architecture."""
    return "TORCHINDUCTOR_CPP_MARCH" in _inductor_file("config.py")


def _inductor_file(name: str) -> str:
    """The source of a file of torch's compiler, whose import takes seconds. Empty if torch was installed without
    sources."""
    file = Path(torch.__file__).parent / "_inductor" / name
    return file.read_text(encoding="utf-8") if file.is_file() else ""
