"""Target `openvino-int8`: a folder for OpenVINO, INT8 weights, activations quantised by the runtime.

Inputs and outputs are those of `onnx`, whose graph it is made from.
"""

from pathlib import Path

from tilewright.compress.export.onnx import traced_onnx, why_not
from tilewright.compress.export.source import ExportSource
from tilewright.compress.export.target import Consumer, Target, Written
from tilewright.compress.graph.trace import converting
from tilewright.compress.onnx.count import count_matmuls
from tilewright.compress.onnx.weight_only import quantize_weights
from tilewright.compress.stored import in_int8


def _write(source: ExportSource, path: Path) -> Written:
    import onnx
    import openvino

    model, notes = traced_onnx(source)
    with converting("Weights of the ONNX graph cannot be quantised", need="one table for the ids"):
        model = quantize_weights(model)
    path.mkdir()
    between = path / "weights.onnx"
    onnx.save(model, str(between))
    with converting("Model cannot be converted for OpenVINO", need="operations that OpenVINO reads from ONNX"):
        openvino.save_model(openvino.convert_model(between), path / "model.xml", compress_to_fp16=False)
    between.unlink()
    return Written(
        notes=notes,
        quantized=count_matmuls(model),
        stored=lambda: in_int8(source.model),
        trained=source.trained_in_int8,
    )


_OPENVINO = Consumer(
    "OpenVINO",
    "tilewright.compress.prove.graphs.openvino_model",
    packages=("openvino",),
    extra="openvino",
)
OPENVINO = Target(
    name="openvino-int8",
    use="serving",
    file="{run}-openvino-int8",
    write=_write,
    why_not=why_not,
    consumer=_OPENVINO,
    packages=("openvino", "onnx", "onnxscript", "onnxruntime"),
    extra="openvino,onnx",
)
