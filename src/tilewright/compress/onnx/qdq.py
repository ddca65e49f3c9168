"""An ONNX graph with explicit quantisation, as TensorRT takes it, and the check that it is one.

Weights are INT8 with a scale per output channel, inputs of their matmuls INT8 with one fixed scale, all zero points 0;
what is computed between a DequantizeLinear and a QuantizeLinear is the engine's to fuse. The ids' table and routers
stay FP32. No TensorRT is run here: `violations` reads the graph.

See: NVIDIA's TensorRT documentation, "Working with Quantized Types", explicit quantisation.
"""

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from tilewright.compress.onnx.int8 import lookup, routers, untie
from tilewright.compress.onnx.int8_columns import scale_overrides, with_matmuls

_RUNTIME_OPS = ("DynamicQuantizeLinear", "MatMulInteger", "QLinearMatMul", "ConvInteger", "QLinearConv")
"""Operators of runtimes that quantise in another way."""


def quantize_qdq(model, rows: Iterable[np.ndarray], kept: Sequence[tuple[str, tuple[int, int]]]):
    """Quantise an ONNX graph with QDQ: an FP32 ModelProto -> one with pairs of QuantizeLinear and DequantizeLinear. The
    given one is used up.

    Args:
        model: of `export.onnx.to_onnx`.
        rows: ids [S] to calibrate on.
        kept: name, heads and width of each input that holds earlier tokens.
    """
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Rows(CalibrationDataReader):
        def __init__(self) -> None:
            empty = {name: np.zeros((1, heads, 0, width), np.float32) for name, (heads, width) in kept}
            self._left = iter([{lookup_ids: row[None].astype(np.int64), **empty} for row in rows])

        def get_next(self):
            return next(self._left, None)

    table = lookup(model.graph)
    lookup_ids = table.input[1]
    untie(model, table.input[0])
    model = with_matmuls(model)
    onnx.helper.set_model_props(model, {"onnx.quant.pre_process": "onnxruntime.quant"})
    del model.graph.value_info[:]
    fp32 = routers(model.graph)
    options = {
        "ActivationSymmetric": True, "WeightSymmetric": True, "MatMulConstBOnly": True,
        "TensorQuantOverrides": scale_overrides(model.graph, fp32),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        source, path = Path(folder) / "fp32.onnx", Path(folder) / "qdq.onnx"
        onnx.save(model, str(source))
        quantize_static(
            source, path, Rows(), quant_format=QuantFormat.QDQ, op_types_to_quantize=["MatMul"], per_channel=True,
            weight_type=QuantType.QInt8, activation_type=QuantType.QInt8, nodes_to_exclude=fp32,
            extra_options=options,
        )  # fmt: skip
        return onnx.load(path)


def violations(model, fp32: Sequence[str] = ()) -> list[str]:
    """List violations of explicit quantisation (QDQ) in an ONNX graph, with the node's name: what TensorRT would refuse
    or not compute in INT8.

    Args:
        model: ModelProto.
        fp32: names of matmuls that stay FP32 on purpose.
    """
    from onnx import helper, numpy_helper

    graph = model.graph
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    made = {name: node for node in graph.node for name in node.output}
    found = []
    for node in graph.node:
        attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        if node.domain not in ("", "ai.onnx"):
            found.append(f"{node.name}: {node.op_type} of {node.domain} is no operator of ONNX")
        elif node.op_type in _RUNTIME_OPS:
            found.append(f"{node.name}: {node.op_type} in place of QuantizeLinear and DequantizeLinear")
        elif node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            found += _pair(node, attributes, values)
        elif node.op_type in ("MatMul", "Gemm") and node.name not in fp32:
            found += _matmul(node, values, made)
    return found


def _pair(node, attributes, values) -> Iterator[str]:
    point = values.get(node.input[2]) if len(node.input) > 2 else None
    if point is not None and point.dtype != np.int8:
        yield f"{node.name}: zero point of {point.dtype}, not int8"
    if point is not None and np.any(point):
        yield f"{node.name}: zero point {int(np.abs(point).max())}, not 0"
    weight, scale = values.get(node.input[0]), values.get(node.input[1])
    if scale is None:
        yield f"{node.name}: scale is computed, not a constant"
    elif node.op_type == "DequantizeLinear" and weight is not None and weight.ndim > 1:
        axis = attributes.get("axis", 1)
        if scale.size != weight.shape[axis]:
            yield f"{node.name}: {scale.size} scales for {weight.shape[axis]} channels of axis {axis}"


def _matmul(node, values, made) -> Iterator[str]:
    weights = [name for name in node.input[:2] if name in values and values[name].ndim > 1]
    if weights:
        yield f"{node.name}: weight {weights[0]} is multiplied in FP32"
        return
    sources = [made.get(name) for name in node.input[:2]]
    quantized = [source is not None and source.op_type == "DequantizeLinear" for source in sources]
    constant = [q and source.input[0] in values for q, source in zip(quantized, sources, strict=True)]
    if any(constant) and not all(quantized):
        yield f"{node.name}: weight is INT8 and its input is not, so it is multiplied in FP32"
