"""Target `executorch-8da4w`: a program for phones and small computers, 4-bit weights on XNNPACK.

Weights are INT4 in groups of 32, activations INT8 per token at run time, the embedding INT8 per row. Inputs and outputs
are those of `onnx`; at most `LONGEST` new and kept tokens.
"""

import functools
from pathlib import Path

from torch import Tensor, nn

from tilewright.compress.export.export_source import ExportSource
from tilewright.compress.export.stored_codes import Coded, through
from tilewright.compress.export.target import Consumer, Target, Written
from tilewright.compress.graph.quantized import Int8Embedding, quantize_8da4w, why_not_8da4w
from tilewright.compress.graph.trace import converting, graph_of, trace, why_no_graph
from tilewright.compress.stored_values import with_stored

LONGEST = 1024
"""Tokens that the program plans its memory for."""


def _why_not(source: ExportSource) -> str | None:
    return why_no_graph(source.model) or why_not_8da4w(source.model)


def _write(source: ExportSource, path: Path) -> Written:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner  # pyright: ignore[reportMissingImports]
    from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge_transform_and_lower  # pyright: ignore[reportMissingImports]
    from executorch.exir.error import ExportError, InternalError  # pyright: ignore[reportMissingImports]

    # 1. Weights in 4 bits. Known codes go through the same graph as the weights, since it may join layers.
    coded = source.four_bits
    graph = graph_of(coded.model)
    codes = through(coded.model, coded.codes, graph_of) if coded.codes else {}
    quantized, formats = quantize_8da4w(graph, codes)
    # 2. The traced graph, lowered for XNNPACK.
    traced = trace(quantized, longest=LONGEST)
    need = "operations that ExecuTorch and XNNPACK know"
    with converting("Model cannot be lowered for ExecuTorch", need=need, errors=(ExportError, InternalError)):
        lowered = to_edge_transform_and_lower(
            traced,
            partitioner=[XnnpackPartitioner()],
            compile_config=EdgeCompileConfig(_check_ir_validity=False),
        )
        program = lowered.to_executorch(ExecutorchBackendConfig(extract_delegate_segments=True))
    with path.open("wb") as file:
        program.write_to_file(file)
    # 3. What a caller has to know: shapes of the keys and values that it passes from call to call.
    notes = (coded.how,) if coded.how else ()
    notes += () if graph.kept else ("whole rows only: the model keeps no keys and values",)
    kept = [[heads, width] for _, (heads, _, width) in graph.kept]
    return Written(
        notes=notes,
        quantized=formats,
        options={"kept": kept, "longest": LONGEST},
        stored=lambda: with_stored(coded.model, functools.partial(_stored, coded)),
        trained=coded.trained,
    )


def _stored(coded: Coded, name: str, module: nn.Module, values: Tensor) -> Tensor:
    if isinstance(module, nn.Embedding):
        table = Int8Embedding(values)
        return table.codes.float() * table.scale
    return coded.codes[name].dequantize() if isinstance(module, nn.Linear) and name in coded.codes else values


_EXECUTORCH = Consumer(
    "ExecuTorch",
    "tilewright.compress.prove.graphs.executorch_program",
    packages=("executorch",),
    extra="executorch",
)
EXECUTORCH = Target(
    name="executorch-8da4w",
    use="edge",
    file="{run}-8da4w.pte",
    write=_write,
    why_not=_why_not,
    consumer=_EXECUTORCH,
    packages=("executorch", "torchao"),
    extra="executorch",
    takes="int4_a8",
)
