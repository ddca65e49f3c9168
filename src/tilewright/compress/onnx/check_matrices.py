"""Checks that an ONNX file holds the matrices of the graph that it was made of, in FP32 or in INT8.

Limits of divergence let damage pass that changes little of the answers: a matrix of zeros in a file whose activations
are rounded with fixed scales. Here the file is read as it lies and dequantised, and each row of each of the graph's
matrices is looked for in it, as a row or a column, by value: exporters give constants other names, transpose them and
join them. And the other way round. A row is there where no element is further away than a step of its INT8 codes.

Legend: R rows  C candidates  K elements of a row.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

STEP = 1 / 127
"""Of INT8 codes that leave room for pairs (`int8_columns`), of the row's largest element: twice what rounding loses."""
_DIRECTIONS = 8
"""Rows are compared along so many drawn directions first; at the nearest one element by element."""
_ROWS = 512
_SHOWN = 5


def differing_matrices(path: Path, graph: nn.Module) -> str:
    """Check the matrices of an ONNX file: which of a graph's it does not hold, and which of its own are none of the
    graph's, in words; "" for none. The second finds damage to one of two copies: a table of ids that is the head too is
    stored twice.

    Args:
        path: of an ONNX file.
        graph: in FP32, of `compress.graph`; its parameters with two dims or more are looked for.
    """
    held = dict(_matrices(path))
    wanted = {name: param.detach().float() for name, param in graph.named_parameters() if param.ndim >= 2}
    lost = [(name, _unlike(one, held.values()), len(_rows(one))) for name, one in wanted.items()]
    lost += [
        (f"{name} of the file", *min((_unlike(way, wanted.values()), len(_rows(way))) for way in (one, one.mT)))
        for name, one in held.items()
    ]
    found = [f"{name} ({number} of {rows} rows)" for name, number, rows in lost if number]
    if not found:
        return ""
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return f"weights that are not those of the model: {', '.join(found[:_SHOWN])}{more}"


def _rows(matrix: Tensor) -> Tensor:
    return matrix.reshape(-1, matrix.shape[-1])


def _unlike(matrix: Tensor, others: Iterable[Tensor]) -> int:
    """Check a matrix of an ONNX file: how many of its rows are neither rows nor columns of others, or are there more
    often than in these."""
    rows_RK = _rows(matrix)
    width = rows_RK.shape[1]
    ways = [way for one in others for way in (one, one.mT) if way.shape[-1] == width]
    if not ways:
        return len(rows_RK)
    all_CK = torch.cat([_rows(way) for way in ways])
    directions_KD = torch.randn(width, _DIRECTIONS, generator=torch.Generator().manual_seed(0))
    sketch_CD = all_CK @ directions_KD
    nearest_R = torch.cat([torch.cdist(some @ directions_KD, sketch_CD).argmin(1) for some in rows_RK.split(_ROWS)])
    lost = int(_far(rows_RK, all_CK[nearest_R]).sum())
    places, times = nearest_R.unique(return_counts=True)
    for place, number in zip(places[times > 1].tolist(), times[times > 1].tolist(), strict=True):
        lost += max(0, number - int((~_far(all_CK[place].expand_as(all_CK), all_CK)).sum()))
    return lost


def _far(rows_RK: Tensor, others_RK: Tensor) -> Tensor:
    """Rows of a checked matrix that differ from others by more than a step of codes."""
    largest_R = torch.maximum(rows_RK.abs().amax(1), others_RK.abs().amax(1))
    return (rows_RK - others_RK).abs().amax(1) > STEP * largest_R


def _matrices(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Read the matrices of an ONNX file that are checked: constants with two dims or more, by name, in FP32."""
    import onnx
    from onnx import helper, numpy_helper

    graph = onnx.load(str(path)).graph
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] in values and node.input[1] in values:
            codes, scale = values.pop(node.input[0]), values[node.input[1]]
            attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
            shape = np.ones(codes.ndim, int)
            if scale.ndim:
                shape[attributes.get("axis", 1)] = scale.size
            values[node.input[0]] = codes.astype(np.float32) * scale.reshape(shape if codes.ndim else ())
    for name, value in values.items():
        if value.ndim >= 2 and value.dtype.kind == "f":
            yield name, torch.tensor(value, dtype=torch.float32)
