"""A traced graph as an ONNX model, by torch's exporter."""

import contextlib
import io

from torch.export import ExportedProgram

from tilewright.core.errors import CheckpointError

OPSET = 20
"""The newest that onnxruntime 1.22 and OpenVINO 2026.1 both compute without conversion."""
MAX_BYTES = 2**31 - 1
"""Of one file: protobuf takes no more."""


def to_onnx(program: ExportedProgram, inputs: list[str], outputs: list[str]):
    """The ModelProto of a traced graph, in FP32.

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
    model = found.model_proto
    for node in model.graph.node:  # stack traces, of half a megabyte
        node.ClearField("metadata_props")
        node.ClearField("doc_string")
    return model
