"""An ONNX graph in INT8: matmuls on integers with ranges of activations found at run time, one INT8 table for the ids.

onnxruntime's own quantiser does the matmuls: weights symmetric with a scale per output channel, which is ours
(`int8_columns`), activations affine per tensor. The embedding it would leave in FP32, and a head that shares the
embedding's matrix it would compute in FP32 from dequantised values (1.9x over FP32 eager in place of 4.2x). So the head
is given a matrix of its own first. Then the table of the ids becomes INT8 with a scale per row; where the head is tied,
ids are looked up in its columns, so that the matrix is stored once.

Legend: V vocabulary  D model width.
"""

import tempfile
from pathlib import Path

import numpy as np

from tilewright.compress.graph.trace import IDS
from tilewright.compress.onnx.int8_columns import quantize_rows, scale_overrides, with_matmuls


def quantize_int8(model):
    """Quantise an ONNX graph to INT8: an FP32 ModelProto -> one in INT8. The given one is used up.

    Args:
        model: of `export.onnx.to_onnx`.

    Returns:
        The new ModelProto.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    table = lookup(model.graph).input[0]
    head = untie(model, table)
    model = with_matmuls(model)
    onnx.helper.set_model_props(model, {"onnx.quant.pre_process": "onnxruntime.quant"})  # or it advises to do so
    del model.graph.value_info[:]  # of the exporter; the quantiser's shape inference contradicts them
    fp32 = routers(model.graph)
    options = {"MatMulConstBOnly": True, "TensorQuantOverrides": scale_overrides(model.graph, fp32)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "int8.onnx"
        quantize_dynamic(
            model, path, op_types_to_quantize=["MatMul"], per_channel=True, weight_type=QuantType.QInt8,
            nodes_to_exclude=fp32, extra_options=options,
        )  # fmt: skip
        model = onnx.load(path)
    return quantize_table(model, table, head)


def routers(graph) -> list[str]:
    """Names of the router matmuls of an ONNX graph, which INT8 leaves out: those that a TopK reads with no other matmul
    between. A rounded router chooses other experts."""
    makers = {name: node for node in graph.node for name in node.output}
    found, seen, waiting = [], set(), [name for node in graph.node if node.op_type == "TopK" for name in node.input]
    while waiting:
        node = makers.get(waiting.pop())
        if node is None or node.name in seen:
            continue
        seen.add(node.name)
        if node.op_type in ("MatMul", "Gemm"):
            found.append(node.name)
        else:
            waiting += node.input
    return found


def lookup(graph):
    """The node of an ONNX graph that looks the ids up in the embedding, which INT8 changes."""
    (node,) = [node for node in graph.node if node.op_type == "Gather" and node.input[1] == IDS]
    return node


def untie(model, table: str) -> str | None:
    """Untie a head that reads the embedding through a Transpose: give it a matrix [D, V] of its own, and return its
    name."""
    from onnx import numpy_helper

    graph = model.graph
    weight_VD = numpy_helper.to_array(initializer(graph, table))
    for node in graph.node:
        if node.op_type == "Transpose" and list(node.input) == [table]:
            name = f"{table}.head"
            graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(weight_VD.T), name))
            for reader in graph.node:
                reader.input[:] = [name if given == node.output[0] else given for given in reader.input]
            graph.node.remove(node)
            return name
    return None


def quantize_table(model, table: str, head: str | None):
    """Quantise the ids' table of an ONNX graph to INT8: in the columns of the head's matrix where there is one, else in
    rows with a scale each."""
    from onnx import TensorProto, helper, numpy_helper

    graph = model.graph
    weight_VD = numpy_helper.to_array(initializer(graph, table))
    node = lookup(graph)
    ids, out = node.input[1], node.output[0]
    rows, scales, fp32 = f"{table}.rows", f"{table}.rows_scale", f"{table}.rows_fp32"
    # 1. Codes and scales: rows of their own, or the columns of the head's matrix, so that a tied matrix is stored
    # once.
    if head is None:
        found = quantize_rows(weight_VD)
        codes, scale = f"{table}.codes", f"{table}.scale"
        graph.initializer.append(numpy_helper.from_array(found.codes.numpy(), codes))
        graph.initializer.append(numpy_helper.from_array(found.scale.numpy()[:, 0], scale))
        # Ids [B, S] look up rows [B, S, D].
        nodes = [helper.make_node("Gather", [codes, ids], [rows], axis=0)]
    else:
        codes, scale = f"{head}_quantized", f"{head}_scale"
        columns = f"{table}.columns"
        nodes = [
            helper.make_node("Gather", [codes, ids], [columns], axis=1),  # [B, S] in [D, V] -> [D, B, S]
            helper.make_node("Transpose", [columns], [rows], perm=[1, 2, 0]),  # -> [B, S, D]
        ]
    last = f"{table}.last"
    graph.initializer.append(numpy_helper.from_array(np.array([-1], np.int64), last))
    # 2. Only what was looked up becomes FP32: [B, S, D] * [B, S, 1].
    nodes += [
        helper.make_node("Gather", [scale, ids], [scales], axis=0),
        helper.make_node("Unsqueeze", [scales, last], [f"{scales}.column"]),
        helper.make_node("Cast", [rows], [fp32], to=TensorProto.FLOAT),
        helper.make_node("Mul", [fp32, f"{scales}.column"], [out]),
    ]
    # 3. In the place of the old lookup: nodes are in the order in which they run.
    place = list(graph.node).index(node)
    graph.node.remove(node)
    graph.initializer.remove(initializer(graph, table))
    for new in reversed(nodes):
        graph.node.insert(place, new)
    return model


def initializer(graph, name: str):
    return next(tensor for tensor in graph.initializer if tensor.name == name)
