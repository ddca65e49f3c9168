"""An ONNX graph whose weights are INT8 and whose sums are as before: DequantizeLinear in front of each matmul.

OpenVINO reads it as its compressed weights, and quantises activations itself when it runs. Symmetric, with a scale per
output channel that is `columns`' own; the table of the ids has one per row and is stored once where the head is tied to
it.

Legend: V vocabulary  D model width  K inputs  N outputs.
"""

from tilewright.compress.onnx.columns import quantize_columns, with_matmuls
from tilewright.compress.onnx.int8 import initializer, lookup, quantize_table, routers, untie


def quantize_weights(model):
    """An FP32 ModelProto -> one with INT8 weights. The given one is used up."""
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
