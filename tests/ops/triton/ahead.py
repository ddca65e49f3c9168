"""Compile the kernels for GPUs that are not here, down to machine code: ptxas, which triton brings, runs anywhere.

Run as a program (not in the interpreter): compiles all of `launches` for an architecture, or those whose names begin
with one of the words, and prints JSON with registers, stack and shared bytes, and instructions that matter, of each.

python -m tests.ops.triton.ahead 90 [quantize tile_gemm]
"""

import contextlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int16: "*i16", torch.int32: "*i32",
    torch.uint8: "*u8", torch.int8: "*i8", torch.float8_e4m3fn: "*fp8e4nv", torch.float8_e5m2: "*fp8e5",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")
INSTRUCTIONS = ("wgmma", "mma.sync", "cvt.rn.satfinite", "ftz", "fma.rn", "sqrt.rn", "div.rn", "approx")
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Recorder:
    """Stands in for `wrap_triton`: a launch compiles for `arch` and runs nothing."""

    def __init__(self, arch: int):
        self.arch = arch
        self.built: list[tuple[str, Any]] = []

    def __call__(self, kernel: Any) -> "Recorder._Launch":
        return self._Launch(self, kernel)

    class _Launch:
        def __init__(self, recorder: "Recorder", kernel: Any):
            self.recorder, self.kernel = recorder, kernel

        def __getitem__(self, grid: object) -> Callable[..., None]:
            return self.compile

        def compile(self, *args: Any, **kwargs: Any) -> None:
            options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
            kernel = self.kernel
            if isinstance(kernel, triton.runtime.Autotuner):
                for config in kernel.configs:
                    options = {name: getattr(config, name) for name in OPTIONS if hasattr(config, name)}
                    self._build(kernel.fn, args, kwargs | config.kwargs, options)
            else:
                self._build(kernel, args, kwargs, options)

        def _build(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: dict[str, int]) -> None:
            names = [p.name for p in kernel.params]
            given = dict(zip(names, args, strict=False)) | kwargs
            signature, constants, attrs = {}, {}, {}
            for index, param in enumerate(kernel.params):
                value = given[param.name]
                if param.is_constexpr or value is None:
                    signature[param.name] = "constexpr"
                    constants[param.name] = value
                elif isinstance(value, torch.Tensor):
                    signature[param.name] = TYPES[value.dtype]
                    attrs[index,] = [["tt.divisibility", 16]]
                elif isinstance(value, float):
                    signature[param.name] = "fp32"
                elif isinstance(value, int) and value == 1:
                    signature[param.name] = "constexpr"
                    constants[param.name] = 1
                else:
                    signature[param.name] = "i32"
                    if value % 16 == 0:
                        attrs[index,] = [["tt.divisibility", 16]]
            source = ASTSource(kernel, signature, constants, attrs)
            target = GPUTarget("cuda", self.recorder.arch, 32)
            self.recorder.built.append((kernel.fn.__name__, triton.compile(source, target=target, options=options)))


def usage(compiled: Any) -> dict[str, Any]:
    """Registers, stack and shared bytes of a compiled kernel, and how often each kind of instruction occurs."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    ptx = compiled.asm["ptx"]
    return {
        "registers": int(re.search(r"REG:(\d+)", text)[1]),
        "stack": int(re.search(r"STACK:(\d+)", text)[1]),
        "shared": compiled.metadata.shared,
        "ptx": {name: len(re.findall(name, ptx)) for name in INSTRUCTIONS},
    }


def launches() -> Iterator[tuple[str, Callable[[], object]]]:
    """Every operation at the shapes of a layer 4096 wide, by name."""
    from tests.ops.low_bit import KINDS, LowBitCase, hyper
    from tilewright.formats.scaling import BLOCK_TILE, COLUMN_TILE, ROW_TILE, TENSORWISE
    from tilewright.formats.spec import E4M3, E5M2
    from tilewright.formats.tiled import TiledTensor
    from tilewright.ops.backends.triton import follow_writes, fused, gemm
    from tilewright.ops.backends.triton import low_bit_adam as adam
    from tilewright.ops.backends.triton import quantize as q

    x = torch.empty(256, 512, dtype=torch.bfloat16)
    for spec in (E4M3, E5M2):
        for tile in (ROW_TILE, COLUMN_TILE, BLOCK_TILE, TENSORWISE):
            yield f"quantize {spec.name} {tile}", lambda s=spec, t=tile: q.quantize(x, s, t)
        yield f"quantize_both {spec.name}", lambda s=spec: q.quantize_both(x, s)
    for tile in (ROW_TILE, COLUMN_TILE, BLOCK_TILE, TENSORWISE):
        yield f"quantize turned {tile}", lambda t=tile: q.quantize(x.float().T, E4M3, t)
    yield "quantize noise", lambda: q.quantize(x, E4M3, ROW_TILE, noise=torch.empty(256, 512, dtype=torch.int32))
    yield "quantize fp32 scales", lambda: q.quantize(x, E4M3, ROW_TILE, power_of_two=False)
    yield "quantize_both fp32", lambda: q.quantize_both(x.float(), E4M3)
    yield "rms_norm_quantize", lambda: fused.rms_norm_quantize(x, x[0], 1e-5, E4M3)
    yield "swiglu_quantize", lambda: fused.swiglu_quantize(x, x, E4M3)
    qdata = torch.empty(512, 512, dtype=torch.uint8)
    for tile, spec in ((BLOCK_TILE, E4M3), (ROW_TILE, E5M2), (TENSORWISE, E4M3)):
        a_tile = TENSORWISE if tile == TENSORWISE else ROW_TILE
        a = TiledTensor(qdata, torch.empty(a_tile.grid((512, 512))), a_tile, spec)
        b = TiledTensor(qdata, torch.empty(tile.grid((512, 512))), tile, E4M3)
        yield f"tile_gemm {spec.name} {tile}", lambda a=a, b=b: gemm.tile_gemm(a, b, None, torch.bfloat16)
    yield "tile_gemm bias fp32", lambda: gemm.tile_gemm(a, b, torch.empty(512), torch.float32)
    for kind in KINDS:
        tensors = replace(LowBitCase(kind, 2**20).tensors(), grad=torch.empty(2**20))
        yield f"low_bit_adam {kind}", lambda t=tensors: adam.low_bit_adam(t, hyper(7))
    for weight in (x, x.half()):
        yield f"follow_writes {weight.dtype}", lambda w=weight: follow_writes.follow_writes(torch.empty(256, 512), w)


def compile_all(arch: int, only: tuple[str, ...] = ()) -> dict[str, list[dict[str, Any]]]:
    """Compile every launch, or those whose names begin so, for an architecture (80, 89, 90, ...)."""
    from unittest import mock

    from tilewright.ops.backends.triton import follow_writes, fused, gemm, low_bit_adam
    from tilewright.ops.backends.triton import quantize as q

    found = {}
    for name, run in launches():
        if only and not name.startswith(only):
            continue
        recorder = Recorder(arch)
        fast = mock.Mock(return_value=arch >= 89)
        with contextlib.ExitStack() as patches:
            for module in (q, fused, gemm):
                patches.enter_context(mock.patch.multiple(module, wrap_triton=recorder, has_fp8=fast))
            for module, names in ((low_bit_adam, ("_kernel",)), (follow_writes, ("_kernel",))):
                launched = {name: recorder(getattr(module, name)) for name in names}
                patches.enter_context(mock.patch.multiple(module, **launched))
            run()
        found[name] = [{"kernel": kernel, **usage(compiled)} for kernel, compiled in recorder.built]
    return found


if __name__ == "__main__":
    print(json.dumps(compile_all(int(sys.argv[1]), tuple(sys.argv[2:]))))
