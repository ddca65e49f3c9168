"""Parts of a matrix by rows and columns: what AdamW makes of them is, bit for bit, what it makes of the whole."""

import dataclasses
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.draws import examples
from tests.ops.low_bit import HALF, KINDS
from tilewright.core.hardware import detect_machine
from tilewright.formats.quadratic_map import BLOCK, scale_shape
from tilewright.ops.adam import ADAM, LOW_BIT_ADAM, MASTER_ADAM
from tilewright.ops.backends.ref.adam import AdamHyper
from tilewright.ops.backends.ref.low_bit_adam import LowBitTensors
from tilewright.ops.backends.triton import launch
from tilewright.ops.base.dispatch import Case
from tilewright.ops.base.tensor_parts import TensorPart

MACHINE = detect_machine("cpu")
NAMES = ("target", "low", "grad", "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale", "weight")


def here(op, dtype):
    """Candidates that run on this CPU; Triton's by the interpreter, and not what takes seconds to compile."""
    found = [c for c in op.candidates if c.why_not(MACHINE, Case("cpu", dtype)) is None and c.name != "compiled"]
    return found + [c for c in op.candidates if c.name == "triton" and launch.INTERPRETED]


def cuts(size, unit, draw):
    """Where a dim is cut: multiples of a unit."""
    inner = sorted(draw(st.sets(st.integers(1, max(1, size // unit - 1)), max_size=2)))
    return [0, *(at * unit for at in inner if at * unit < size), size]


def blocks(shape, unit, draw):
    rows, columns = cuts(shape[0], 1, draw), cuts(shape[1], unit, draw)
    for top, bottom in pairwise(rows):
        for left, right in pairwise(columns):
            yield TensorPart(shape, (top, left), (bottom - top, right - left))


def low_bit_case(kind, shape, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    weight = values.to(HALF[kind]) if kind in HALF else None
    return LowBitTensors(
        target=values.bfloat16() if kind in ("bf16", "split24") else values,
        low=torch.zeros(shape, dtype=torch.int8) if kind == "split24" else None,
        grad=torch.randn(shape, generator=generator) * torch.exp2(4 * torch.randn(shape, generator=generator)),
        exp_avg=torch.zeros(shape, dtype=torch.int8),
        exp_avg_scale=torch.zeros(scale_shape(shape)),
        exp_avg_sq=torch.zeros(shape, dtype=torch.uint8),
        exp_avg_sq_scale=torch.zeros(scale_shape(shape)),
        number=5,
        weight=weight,
    )


def cut_out(whole, part):
    """A block of each tensor, its scales with it."""
    rows, columns = part.slices
    scales = slice(columns.start // BLOCK, -(-columns.stop // BLOCK))
    found = {}
    for name in NAMES:
        tensor = getattr(whole, name)
        at = (rows, scales if name.endswith("scale") else columns)
        found[name] = None if tensor is None else tensor[at].contiguous()
    return dataclasses.replace(whole, **found, first=part.first_element, skip=part.shape[1] - part.sizes[1])


@examples(6)
@given(
    data=st.data(), kind=st.sampled_from(KINDS), rows=st.integers(1, 7), columns=st.sampled_from([128, 256, 300, 640]),
    seed=st.integers(0, 9),
)  # fmt: skip
def test_moments_in_8_bits(data, kind, rows, columns, seed):
    parts = list(blocks((rows, columns), BLOCK, data.draw))
    for candidate in here(LOW_BIT_ADAM, torch.float32):
        whole = low_bit_case(kind, (rows, columns), seed)
        pieces = [cut_out(whole, part) for part in parts]
        for step in (1, 2):
            hyper = AdamHyper(step, 3e-2, 0.9, 0.95, 1e-8, 0.1, 11)
            candidate.run(whole, hyper)
            for piece in pieces:
                candidate.run(piece, hyper)
        for part, piece in zip(parts, pieces, strict=True):
            want = cut_out(whole, part)
            for name in NAMES:
                got = getattr(piece, name)
                assert got is None or torch.equal(got, getattr(want, name)), f"{candidate.name} {name} of {part}"


@examples(12)
@given(
    data=st.data(), rows=st.integers(1, 7), columns=st.integers(1, 40), seed=st.integers(0, 9),
    kind=st.sampled_from(["moments", "weights", "both", "masters"]),
)  # fmt: skip
def test_moments_and_weights_in_bf16(data, rows, columns, seed, kind):
    shape, parts = (rows, columns), list(blocks((rows, columns), 1, data.draw))
    wide = torch.float32 if kind in ("moments", "masters") else torch.bfloat16
    moments = torch.bfloat16 if kind != "weights" else torch.float32
    for candidate in here(MASTER_ADAM if kind == "masters" else ADAM, torch.bfloat16):
        generator = torch.Generator().manual_seed(seed)
        whole = [torch.randn(shape, generator=generator).to(wide), torch.randn(shape, generator=generator)]
        whole += [torch.zeros(shape, dtype=moments), torch.zeros(shape, dtype=moments)]
        whole += [whole[0].bfloat16()] if kind == "masters" else []
        pieces = [[tensor[part.slices].contiguous() for tensor in whole] for part in parts]
        lists = [[tensor] for tensor in whole]
        for step in (1, 2):
            hyper = AdamHyper(step, 3e-2, 0.9, 0.95, 1e-8, 0.1, 11)
            candidate.run(*lists[:4], [3], hyper, [0], *lists[4:])
            for part, piece in zip(parts, pieces, strict=True):
                given_, weights = [[tensor] for tensor in piece[:4]], [[t] for t in piece[4:]] or [()]
                candidate.run(*given_, [3], hyper, [part.first_element], *weights, [shape[1] - part.sizes[1]])
        for part, piece in zip(parts, pieces, strict=True):
            for place, tensor in enumerate(whole):
                assert torch.equal(piece[place], tensor[part.slices]), f"{candidate.name}: tensor {place} of {part}"


@pytest.mark.slow
def test_a_compiled_update_of_blocks():
    compiled = next(candidate for candidate in ADAM.candidates if candidate.name == "compiled")
    if compiled.why_not(MACHINE, Case("cpu", torch.bfloat16)) is not None:
        pytest.skip("no compiler here")
    whole = [torch.randn(6, 40).bfloat16(), torch.randn(6, 40), *(torch.zeros(6, 40) for _ in range(2))]
    part = TensorPart((6, 40), (2, 7), (3, 20))
    piece = [tensor[part.slices].contiguous() for tensor in whole]
    hyper = AdamHyper(1, 3e-2, 0.9, 0.95, 1e-8, 0.1, 11)
    compiled.run(*([tensor] for tensor in whole), [3], hyper)
    compiled.run(*([tensor] for tensor in piece), [3], hyper, [part.first_element], (), [20])
    assert torch.equal(piece[0], whole[0][part.slices])
