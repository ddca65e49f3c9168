"""Trace every Triton operation for a CUDA device that is not here: fake tensors, not the interpreter. Run as a program;
prints, as JSON, how many kernel launches are in the graph of each."""

import json

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode

from tilewright.formats.scaling import BLOCK_TILE, COLUMN_TILE, ROW_TILE
from tilewright.formats.spec import E4M3
from tilewright.formats.tiled import TiledTensor


def launches(run, *inputs) -> int:
    """Kernel launches in the graph that torch.compile(fullgraph=True) hands to its backend."""
    counts = []

    def look(graph, args):
        counts.append(sum("triton_kernel_wrapper" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    try:
        torch.compile(run, fullgraph=True, backend=aot_autograd(fw_compiler=look))(*inputs)
    except RuntimeError as error:
        if not counts or "cuda" not in str(error):  # running it is what cannot work here
            raise
    return sum(counts)


def main() -> None:
    """Trace all."""
    from tilewright.ops.backends.triton import fused, gemm, quantize

    def flat(tiled):
        return tiled.qdata, tiled.scale_inv

    found = {}
    with FakeTensorMode():
        x = torch.empty(256, 384, dtype=torch.bfloat16, device="cuda")
        weight = torch.empty(384, device="cuda")
        qdata = torch.empty(384, 384, dtype=torch.uint8, device="cuda")
        scales = torch.empty(3, 3, device="cuda")
        runs = {
            "rows": (lambda x: flat(quantize.quantize(x, E4M3, ROW_TILE)), x),
            "columns": (lambda x: flat(quantize.quantize(x, E4M3, COLUMN_TILE)), x),
            "blocks": (lambda x: flat(quantize.quantize(x, E4M3, BLOCK_TILE)), x),
            "both": (lambda x: [flat(t) for t in quantize.quantize_both(x, E4M3)], x),
            "norm": (lambda x, weight: fused.rms_norm_quantize(x, weight, 1e-5, E4M3)[0], x, weight),
            "swiglu": (lambda x: fused.swiglu_quantize(x, x, E4M3)[0], x),
            "gemm": (
                lambda x, qdata, scales: gemm.tile_gemm(
                    quantize.quantize(x, E4M3, ROW_TILE), TiledTensor(qdata, scales, BLOCK_TILE, E4M3), None, x.dtype
                ), x, qdata, scales,
            ),
        }  # fmt: skip
        for name, (run, *inputs) in runs.items():
            found[name] = launches(run, *inputs)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
