"""Targets `onnx`, `onnx-int8`: one file for onnxruntime that serves a prompt and each token after it.

Inputs are ids [1, S] int64 and, of each layer, what is kept of earlier tokens (of length 0 at first); outputs are
logits [1, S, V] and what is kept now.
"""

import functools
from pathlib import Path

from tilewright.compress.export.source import ExportSource
from tilewright.compress.export.target import Consumer, Target, Written
from tilewright.compress.graph.trace import graph_of, input_names, output_names, trace, why_no_graph
from tilewright.compress.onnx.count import count_matmuls
from tilewright.compress.onnx.file import MAX_BYTES, to_onnx
from tilewright.compress.onnx.int8 import quantize_int8
from tilewright.core.units import format_bytes

_ONNXRUNTIME = Consumer(
    "onnxruntime", "tilewright.compress.prove.graphs.onnx_runtime", packages=("onnxruntime", "onnx"), extra="onnx"
)


def why_not(source: ExportSource) -> str | None:
    """Why the model is not an ONNX file."""
    size = sum(parameter.numel() for parameter in source.model.parameters()) * 4
    if size > MAX_BYTES:
        return f"{format_bytes(size)} in FP32; an ONNX file holds less than {format_bytes(MAX_BYTES)}"
    return why_no_graph(source.model, source.task)


def traced_onnx(source: ExportSource):
    """The model as an ONNX ModelProto in FP32, and notes."""
    graph = graph_of(source.model)
    notes = () if graph.kept else ("whole rows only: the model keeps no keys and values",)
    return to_onnx(trace(graph), input_names(graph), output_names(graph)), notes


def _write(int8: bool, source: ExportSource, path: Path) -> Written:
    import onnx

    model, notes = traced_onnx(source)
    if int8:
        model = quantize_int8(model)
    onnx.save(model, str(path))
    found = count_matmuls(model)
    if int8 and found.get("fp32"):
        notes = (*notes, f"{found['fp32']} matmuls stay in FP32")
    return Written(notes=notes, quantized=found if int8 else {})


ONNX = Target(
    name="onnx",
    use="serving",
    file="{run}.onnx",
    write=functools.partial(_write, False),
    why_not=why_not,
    consumer=_ONNXRUNTIME,
    packages=("onnx", "onnxscript"),
    extra="onnx",
)
ONNX_INT8 = Target(
    name="onnx-int8",
    use="serving",
    file="{run}-int8.onnx",
    write=functools.partial(_write, True),
    why_not=why_not,
    consumer=_ONNXRUNTIME,
    packages=("onnx", "onnxscript", "onnxruntime"),
    extra="onnx",
)
