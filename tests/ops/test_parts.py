"""Parts of tensors: blocks of the whole, whatever axes of a mesh have cut them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewright.ops.base.tensor_parts import TensorPart, part_of, rows_of


@given(rows=st.integers(1, 130), count=st.integers(1, 9))
def test_rows_are_cut_as_torch_cuts_them(rows, count):
    chunks = torch.arange(rows).chunk(count)
    for number in range(count):
        want = chunks[number].tolist() if number < len(chunks) else []
        assert list(rows_of(rows, count, number)) == want


@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    data=st.data(),
)
def test_a_block_knows_its_elements(shape, data):
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    starts = [data.draw(st.integers(0, size - 1)) for size in shape]
    sizes = [data.draw(st.integers(1, size - start)) for size, start in zip(shape, starts, strict=True)]
    part = TensorPart(tuple(shape), tuple(starts), tuple(sizes))
    block = whole[part.slices]
    assert list(block.shape) == sizes
    assert part.first_element == block.flatten()[0]
    assert list(part.rows) == list(range(starts[0], starts[0] + sizes[0]))
    flat = block.flatten().tolist()
    if part.is_rows:
        assert flat == list(range(flat[0], flat[0] + len(flat))), "one range of memory"
        assert part == TensorPart.of_rows(shape, part.rows)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_a_tensor_of_one_process_is_whole(shape):
    part = part_of(torch.zeros(shape))
    assert (part.shape, part.sizes, part.first_element, part.is_rows) == (shape, shape, 0, True)
