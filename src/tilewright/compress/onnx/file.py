"""A traced graph as an ONNX model, by torch's exporter."""

import contextlib
import io

from torch.export import ExportedProgram

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
    """
    import torch

    with contextlib.redirect_stdout(io.StringIO()):  # it prints each of its stages
        found = torch.onnx.export(
            program, dynamo=True, input_names=inputs, output_names=outputs, opset_version=OPSET, verbose=False
        )
    model = found.model_proto
    for node in model.graph.node:  # stack traces, of half a megabyte
        node.ClearField("metadata_props")
        node.ClearField("doc_string")
    return model
