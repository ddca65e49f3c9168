"""Explicit quantisation for TensorRT: the graph of a model passes the check, and each kind of damage is named."""

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from tests.compress.models import decoder, our_tokenizer, source
from tilewright.compress.export.onnx import traced_onnx
from tilewright.compress.graph.trace import graph_of, input_names
from tilewright.compress.onnx.qdq import quantize_qdq, violations


def calibrated(folder):
    run = source(decoder(), our_tokenizer(), folder / "run")
    graph = graph_of(run.model)
    names = zip(input_names(graph)[1:], graph.kept, strict=True)
    kept = [(name, (heads, width)) for name, (_, (heads, _, width)) in names]
    rows = np.random.default_rng(0).integers(0, 400, (4, 24))
    return quantize_qdq(traced_onnx(run)[0], rows, kept)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return calibrated(tmp_path_factory.mktemp("qdq"))


@pytest.fixture
def damaged(model):
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


def first(model, kind):
    return next(node for node in model.graph.node if node.op_type == kind)


def set_value(model, name, array):
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == name)
    tensor.CopyFrom(numpy_helper.from_array(array, name))


def test_a_decoder_has_no_violation(model):
    assert violations(model) == []
    weights = [node for node in model.graph.node if node.op_type == "DequantizeLinear"]
    assert len(weights) > 10


def test_sums_of_two_products_fit_16_bits(model):
    """onnxruntime runs it on CPUs that clip them, too."""
    weights = [numpy_helper.to_array(tensor) for tensor in model.graph.initializer]
    weights = [value for value in weights if value.dtype == np.int8 and value.ndim == 2]
    assert len(weights) > 5
    for codes_KN in weights:
        codes = np.pad(codes_KN.astype(int), ((0, len(codes_KN) % 2), (0, 0)))
        for side in (np.maximum(codes, 0), np.minimum(codes, 0)):
            assert np.abs(side[::2] + side[1::2]).max() <= 128


def test_zero_points_and_axes_are_named(damaged):
    node = first(damaged, "QuantizeLinear")
    set_value(damaged, node.input[2], np.array(3, np.int8))
    assert violations(damaged)[0] == f"{node.name}: zero point 3, not 0"
    set_value(damaged, node.input[2], np.array(0, np.uint8))
    assert "uint8, not int8" in violations(damaged)[0]


def test_a_weight_with_one_scale_is_named(damaged):
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in damaged.graph.initializer}
    weights = [n for n in damaged.graph.node if n.op_type == "DequantizeLinear" and n.input[0] in values]
    node = next(node for node in weights if values[node.input[0]].ndim == 2)
    set_value(damaged, node.input[1], values[node.input[1]][:1])
    assert any(f"{node.name}: 1 scales for" in text for text in violations(damaged))


def test_leftovers_and_operators_of_runtimes_are_named(damaged):
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in damaged.graph.initializer}
    made = {name: node for node in damaged.graph.node for name in node.output}
    node = next(n for n in damaged.graph.node if n.op_type == "MatMul" and made[n.input[1]].input[0] in values)
    source_name = made[node.input[1]].input[0]
    damaged.graph.initializer.append(numpy_helper.from_array(values[source_name].astype(np.float32), "wide"))
    node.input[1] = "wide"
    assert f"{node.name}: weight wide is multiplied in FP32" in violations(damaged)
    damaged.graph.node.append(helper.make_node("MatMulInteger", ["a", "b"], ["c"], name="left"))
    assert "left: MatMulInteger in place of QuantizeLinear and DequantizeLinear" in violations(damaged)
    damaged.graph.node.append(helper.make_node("FusedMatMul", ["a", "b"], ["d"], name="own", domain="com.microsoft"))
    assert "own: FusedMatMul of com.microsoft is no operator of ONNX" in violations(damaged)
