"""torch's fused AdamW on tensors of any layout."""

import pytest
import torch

from tilewright.ops.backends.native import adam as native_adam


@pytest.mark.parametrize("layout", ["plain", "turned", "cut", "overlapping", "in two orders"])
def test_the_fused_update_copies_only_what_it_must(layout):
    """Its kernel goes through memory: four tensors without gaps and in one order need no copy."""
    stored = [torch.arange(24.0).reshape(4, 6) + number for number in range(4)]
    if layout == "turned":
        row = tuple(tensor.T for tensor in stored)
    elif layout == "cut":
        row = tuple(tensor[:, :5] for tensor in stored)
    elif layout == "overlapping":
        row = tuple(tensor.as_strided((3, 3), (1, 1)) for tensor in stored)
    elif layout == "in two orders":
        row = (stored[0].reshape(6, 4), *(tensor.T for tensor in stored[1:]))
    else:
        row = tuple(stored)
    alike = native_adam._alike(row)
    assert (alike is row) == (layout in ("plain", "turned"))
    assert all(torch.equal(tensor, given) for tensor, given in zip(alike, row, strict=True))
    assert len({tensor.stride() for tensor in alike}) == 1
