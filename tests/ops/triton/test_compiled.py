"""The kernels compile to machine code for GPUs that are not here, and torch.compile traces them."""

import json
import os
import subprocess
import sys

import pytest

RUN = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
LEAST_SHARED = 99 * 1024
"""Bytes of shared memory that a program may have on any card from 8.0 on (8.6, 8.9, 12.0 have least)."""
FEW = ("quantize e4m3 1x128", "quantize turned 128x128", "quantize_both e4m3", "swiglu")


def program(*args: str) -> dict:
    done = subprocess.run([sys.executable, "-m", *args], capture_output=True, text=True, env=RUN, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("arch", "only"),
    [
        pytest.param(80, FEW, marks=pytest.mark.slow),
        (90, (*FEW, "tile_gemm e4m3 tensorwise", "low_bit_adam split24", "follow")),
        pytest.param(89, ("tile_gemm e4m3 128x128", "quantize_both e4m3"), marks=pytest.mark.slow),
        pytest.param(120, ("tile_gemm e4m3 128x128", "quantize_both e4m3"), marks=pytest.mark.slow),
        pytest.param(80, (), marks=pytest.mark.slow),
        pytest.param(90, (), marks=pytest.mark.slow),
    ],
)
def test_compiles(arch, only):
    """Quantisation keeps its values in registers, and the GPU's own instructions are used where it has them."""
    found = program("tests.ops.triton.ahead", str(arch), *only)
    for name, kernels in found.items():
        assert min(kernel["shared"] for kernel in kernels) <= LEAST_SHARED, f"{name}: cards without room for any"
        for kernel in kernels:
            ptx = kernel["ptx"]
            assert ptx["ftz"] == 0, f"{name}: subnormals would be lost"
            if "gemm" in name:
                assert ptx["wgmma" if arch == 90 else "mma.sync"] > 0, name
                if arch == 90 and "1x128" not in name:
                    assert kernel["stack"] == 0, f"{name}: scales are few numbers, and nothing is spilt: {kernel}"
                continue
            if "adam" in name:
                assert ptx["fma.rn"] == ptx["approx"] == 0, f"{name}: other bits than the law's"
                assert min(ptx["sqrt.rn"], ptx["div.rn"]) > 0, name
            assert kernel["stack"] == 0, f"{name}: {kernel}"
            assert kernel["registers"] <= 128, f"{name}: {kernel}"
            converts = arch >= 89 and not any(word in name for word in ("noise", "adam", "follow"))
            assert (ptx["cvt.rn.satfinite"] > 0) == converts, name
    for name in ("quantize_both e4m3", "swiglu_quantize") if arch in (80, 90) else ():
        assert found[name][0]["registers"] <= 64, f"{name}: no room for four programs on a multiprocessor"


@pytest.mark.slow
def test_traced():
    """One launch an operation in the graph of torch.compile(fullgraph=True)."""
    found = program("tests.ops.triton.traced")
    assert found == {"rows": 1, "columns": 1, "blocks": 1, "both": 1, "norm": 1, "swiglu": 1, "gemm": 2}
