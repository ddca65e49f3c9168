"""What the CPU multiplies, as a constant of compiled code.

A module of its own because the decorator imports torch's compiler, which takes seconds: `wide` imports it while
something is compiled.
"""

import torch

from tilewright.ops.native.cpu_has import cpu_has


@torch.compiler.assume_constant_result
def multiplies(dtype: torch.dtype) -> bool:
    """See `cpu_has`."""
    return cpu_has(dtype)
