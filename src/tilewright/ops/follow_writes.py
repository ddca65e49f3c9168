"""follow_writes: FP32 masters take over what was written to their 16-bit weights.

An optimizer updates a master and stores it as the weight, rounded to nearest. So a weight has the bits of its master
rounded, or something else has written it since: a clamp, a loaded checkpoint, a broadcast. Each element whose bits
differ becomes its master; the others keep the bits that they have beyond the weight. It is by content, since writes
through `.data`, or past torch, leave no other trace. The case's dtype is the weight's.

    follow_writes(master, weight): both of one shape; writes to `master` alone.
"""

from torch import Tensor

from tilewright.ops.backends.ref import follow_writes as ref
from tilewright.ops.backends.triton.availability import needs_triton
from tilewright.ops.base.dispatch import Candidate, Op, always


def _triton(master: Tensor, weight: Tensor) -> None:
    from tilewright.ops.backends.triton import follow_writes  # it imports triton

    follow_writes.follow_writes(master, weight)


FOLLOW_WRITES = Op(
    "follow_writes",
    (Candidate("triton", _triton, needs_triton), Candidate("ref", ref.follow_writes, always)),
)
