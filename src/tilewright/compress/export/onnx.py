"""Targets `onnx`, `onnx-int8`: one file for onnxruntime that serves a prompt and each token after it; and `onnx-qdq`,
with explicit quantisation for TensorRT, checked against its rules and run in onnxruntime.

Inputs are ids [1, S] int64 and, of each layer, what is kept of earlier tokens (of length 0 at first); outputs are
logits [1, S, V] and what is kept now. Of `onnx` with a model that reads images: pixels [B, 3, H, W] in, logits [B, C]
out.
"""

import contextlib
import functools
import io
from pathlib import Path

from torch.export import ExportedProgram

from tilewright.compress.export.export_source import ExportSource
from tilewright.compress.export.stored_codes import calibration
from tilewright.compress.export.target import Consumer, Target, Written
from tilewright.compress.graph.trace import converting, graph_of, input_names, output_names, trace, why_no_graph
from tilewright.compress.onnx.check_matrices import differing_matrices
from tilewright.compress.onnx.count_matmuls import count_matmuls
from tilewright.compress.onnx.int8 import quantize_int8, routers
from tilewright.compress.onnx.qdq import quantize_qdq, violations
from tilewright.compress.stored_values import in_int8
from tilewright.core.errors import CheckpointError
from tilewright.core.units import format_bytes

_ONNXRUNTIME = Consumer(
    "onnxruntime", "tilewright.compress.prove.graphs.onnx_runtime", packages=("onnxruntime", "onnx"), extra="onnx"
)


def why_not(source: ExportSource) -> str | None:
    """Why the model cannot be exported as an ONNX file."""
    size = sum(parameter.numel() for parameter in source.model.parameters()) * 4
    if size > MAX_BYTES:
        return f"{format_bytes(size)} in FP32; an ONNX file holds less than {format_bytes(MAX_BYTES)}"
    return why_no_graph(source.model)


def traced_onnx(source: ExportSource):
    """Export a model as an ONNX ModelProto in FP32, with notes."""
    graph = graph_of(source.model, source.recipe.data.image_size if source.reads_images else 0)
    notes = () if graph.kept or source.reads_images else ("whole rows only: the model keeps no keys and values",)
    return to_onnx(trace(graph), input_names(graph), output_names(graph)), notes


def _write(int8: bool, source: ExportSource, path: Path) -> Written:
    import onnx

    model, notes = traced_onnx(source)
    if int8:
        with converting("ONNX graph cannot be quantised", need="one table for the ids, and matmuls with constants"):
            model = quantize_int8(model)
    onnx.save(model, str(path))
    found = count_matmuls(model)
    if int8 and found.get("fp32"):
        notes = (*notes, f"{found['fp32']} matmuls stay in FP32")
    return Written(
        notes=notes,
        quantized=found if int8 else {},
        stored=lambda: in_int8(source.model) if int8 else source.model,
        trained=int8 and source.trained_in_int8,
    )


def _write_qdq(source: ExportSource, path: Path) -> Written:
    import onnx

    graph = graph_of(source.model)
    batches = calibration(source.recipe, source.data)
    rows = [row.numpy() for batch in batches for row in batch["input_ids"]][:_CALIBRATION_ROWS]
    kept = [
        (name, (heads, width)) for name, (_, (heads, _, width)) in zip(input_names(graph)[1:], graph.kept, strict=True)
    ]
    model, notes = traced_onnx(source)
    fp32 = routers(model.graph)
    with converting("ONNX graph cannot be quantised", need="one table for the ids, and matmuls with constants"):
        model = quantize_qdq(model, rows, kept)
    onnx.save(model, str(path))
    wrong = violations(model, fp32)
    lint = f"{len(wrong)} violations" if wrong else "no violation"
    notes = (*notes, f"explicit quantisation of TensorRT: {lint}; engine not built here", *wrong[:_SHOWN])
    found = count_matmuls(model)
    return Written(
        notes=notes,
        quantized=found,
        stored=lambda: in_int8(source.model),
        differing=functools.partial(differing_matrices, graph=graph),
    )


_CALIBRATION_ROWS = 16
_SHOWN = 5

ONNX = Target(
    name="onnx",
    use="serving",
    file="{run}.onnx",
    write=functools.partial(_write, False),
    why_not=why_not,
    consumer=_ONNXRUNTIME,
    packages=("onnx", "onnxscript"),
    extra="onnx",
    images=True,
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
    takes="int8",
)
ONNX_QDQ = Target(
    name="onnx-qdq",
    use="serving",
    file="{run}-qdq.onnx",
    write=_write_qdq,
    why_not=why_not,
    consumer=_ONNXRUNTIME,
    packages=("onnx", "onnxscript", "onnxruntime"),
    extra="onnx",
)


OPSET = 20
"""The newest that onnxruntime 1.22 and OpenVINO 2026.1 both compute without conversion."""
MAX_BYTES = 2**31 - 1
"""Of one file: protobuf takes no more."""


def to_onnx(program: ExportedProgram, inputs: list[str], outputs: list[str]):
    """Export a traced graph as an ONNX ModelProto, in FP32.

    Args:
        program: of `graph.trace.trace`.
        inputs: names, in order.
        outputs: names, in order.

    Raises:
        CheckpointError: the exporter does not know an operation of the model.
    """
    import torch

    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints each of its stages
            found = torch.onnx.export(
                program, dynamo=True, input_names=inputs, output_names=outputs, opset_version=OPSET, verbose=False
            )
    except torch.onnx.OnnxExporterError as error:
        raise CheckpointError(
            "Model cannot be written as ONNX",
            got=str(error).strip().splitlines()[0][:300],
            need="operations that torch's ONNX exporter knows",
            try_="--to gguf-q8_0, or --to aoti",
        ) from error
    assert found is not None, "with `dynamo` it returns what it made"
    model = found.model_proto
    for node in model.graph.node:  # stack traces, of half a megabyte
        node.ClearField("metadata_props")
        node.ClearField("doc_string")
    return model
