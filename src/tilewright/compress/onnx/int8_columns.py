"""Weights of ONNX matmuls in INT8 with a scale per output channel, for any CPU.

onnxruntime multiplies unsigned activations by signed weights. Without VNNI (AVX2, AVX-512 of Skylake) its kernels add
two products in 16 bits and clip: of a small decoder with codes up to 127 the divergence was 0.021 there and 0.005
elsewhere. An artefact goes to other machines, so scales leave room for such a sum everywhere:
`formats.integer.pair_scale`.

On a trained decoder of 7M parameters the divergence is 5.1e-4 with codes up to 127 on a CPU with VNNI, 5.5e-4 with this
room, 6.5e-4 with codes of 7 bits (`reduce_range`), all three equally fast. Unsigned weights need no room (4.9e-4), and
prompts take 1.4 to 1.6 times as long with AVX-512 VNNI, 5 to 8 times with AMX.

See: ONNX Runtime, "Quantize ONNX models", sections on U8S8 and reduce_range.

Legend: K inputs  N outputs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tilewright.formats.integer import IntegerTensor, quantize_pairs


def as_rows(weight: np.ndarray) -> torch.Tensor:
    """INT8 columns as rows: [..., K, N] -> a row per output channel; experts follow each other in it, and no pair lies
    in two of them."""
    inputs = weight.shape[-2]
    padded = np.zeros((*weight.shape[:-2], inputs + inputs % 2, weight.shape[-1]), np.float32)
    padded[..., :inputs, :] = weight
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(padded, -1, 0).reshape(weight.shape[-1], -1)))


def quantize_columns(weight_KN: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """INT8 codes [K, N] and scales FP32 [N] of an ONNX matmul's columns.

    Example:
        >>> codes_KN, scale_N = quantize_columns(np.array([[1.0], [1.0]], np.float32))  # both at 127 would be clipped
        >>> codes_KN.tolist(), bool((codes_KN * scale_N == 1).all())
        ([[64], [64]], False)
    """
    found = quantize_pairs(as_rows(weight_KN))
    return np.ascontiguousarray(found.codes.numpy().T[: len(weight_KN)]), found.scale.numpy()[:, 0]


def quantize_rows(weight_VD: np.ndarray) -> IntegerTensor:
    """INT8 codes and scales of a table that is looked up by rows, which a tied head multiplies with as columns."""
    return quantize_pairs(torch.tensor(weight_VD, dtype=torch.float32))


def with_matmuls(model):
    """The ONNX model with MatMul in place of each Gemm, before its INT8 columns, as onnxruntime's quantiser would make
    it first: its weights then have the names that it will look up."""
    from onnxruntime.quantization.onnx_model import ONNXModel

    wrapped = ONNXModel(model)
    wrapped.replace_gemm_with_matmul()
    return wrapped.model


def scale_overrides(graph, excluded: Sequence[str]) -> Mapping[str, Sequence[Mapping[str, Any]]]:
    """onnxruntime's `TensorQuantOverrides` with our INT8 scales by column for the constant weights of all matmuls but
    `excluded`.

    Args:
        graph: of `with_matmuls`.
        excluded: names of nodes.
    """
    from onnx import numpy_helper

    weights = {tensor.name: tensor for tensor in graph.initializer if len(tensor.dims) > 1}
    found: dict[str, Sequence[Mapping[str, Any]]] = {}
    for node in graph.node:
        name = node.input[1] if node.op_type == "MatMul" and node.name not in excluded else ""
        if name in weights and name not in found:
            scale_N = quantize_pairs(as_rows(numpy_helper.to_array(weights[name]))).scale.numpy()[:, 0]
            axis = len(weights[name].dims) - 1
            found[name] = [{"axis": axis, "scale": scale, "zero_point": np.int8(0)} for scale in scale_N]
    return found
