"""The matmuls of an ONNX graph, counted: operators on integers, and matmuls of weights that stay in FP32."""

from collections import Counter

_SAME_VALUES = ("Transpose", "Cast", "Identity", "Gather", "Reshape")
_INTEGER = ("MatMulInteger", "QLinearMatMul", "MatMulNBits", "DynamicQuantizeMatMul", "MatMulIntegerToFloat")


def count_matmuls(model) -> dict[str, int]:
    """Count the matmuls of an ONNX graph: operators by name; those of weights in FP32 under "fp32". Matmuls of two
    activations (attention) are left out."""
    weights = {tensor.name for tensor in model.graph.initializer if len(tensor.dims) > 1}
    made: dict[str, str] = {}
    for node in model.graph.node:
        made |= dict.fromkeys(node.output, node.op_type)
        if node.op_type in _SAME_VALUES and node.input[0] in weights:  # Gather: the matrices of chosen experts
            weights |= set(node.output)
    found: Counter[str] = Counter()
    for node in model.graph.node:
        if node.op_type in _INTEGER:
            found[node.op_type] += 1
        elif node.op_type in ("MatMul", "Gemm", "FusedMatMul"):
            if any(made.get(name) == "DequantizeLinear" for name in node.input):
                found["QDQ"] += 1
            elif node.input[1] in weights or node.input[0] in weights:
                found["fp32"] += 1
    return dict(found)
