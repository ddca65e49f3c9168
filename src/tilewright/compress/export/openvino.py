"""Target `openvino-int8`: a folder for OpenVINO, INT8 weights, activations quantised by the runtime.

Inputs and outputs are those of `onnx`, whose graph it is made from.

OpenVINO reads DequantizeLinear in front of each matmul as its compressed weights, and quantises activations itself when
it runs.
"""

from pathlib import Path

from tilewright.compress.export.export_source import ExportSource
from tilewright.compress.export.onnx import traced_onnx, why_not
from tilewright.compress.export.target import Consumer, Target, Written
from tilewright.compress.graph.trace import converting
from tilewright.compress.onnx.count_matmuls import count_matmuls
from tilewright.compress.onnx.int8 import initializer, lookup, quantize_table, routers, untie
from tilewright.compress.onnx.int8_columns import quantize_columns, with_matmuls
from tilewright.compress.stored_values import in_int8


def _write(source: ExportSource, path: Path) -> Written:
    import onnx
    import openvino  # pyright: ignore[reportMissingImports]

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
    takes="int8",
)


def quantize_weights(model):
    """Quantise weights for OpenVINO: an FP32 ModelProto to one with INT8 weights. The given one is used up."""
    from onnx import helper, numpy_helper

    table = lookup(model.graph).input[0]
    head = untie(model, table)
    model = with_matmuls(model)
    graph = model.graph
    weights = {tensor.name: tensor for tensor in graph.initializer if len(tensor.dims) == 2}
    kept = set(routers(graph))
    for place, node in reversed(list(enumerate(graph.node))):
        if node.op_type != "MatMul" or node.name in kept or node.input[1] not in weights:
            continue
        name = node.input[1]
        codes_KN, scale_N = quantize_columns(numpy_helper.to_array(weights[name]))
        graph.initializer.append(numpy_helper.from_array(codes_KN, f"{name}_quantized"))
        graph.initializer.append(numpy_helper.from_array(scale_N, f"{name}_scale"))
        node.input[1] = f"{name}_fp32"
        inputs = [f"{name}_quantized", f"{name}_scale"]
        graph.node.insert(place, helper.make_node("DequantizeLinear", inputs, [f"{name}_fp32"], axis=1))
        graph.initializer.remove(initializer(graph, name))
    return quantize_table(model, table, head)
