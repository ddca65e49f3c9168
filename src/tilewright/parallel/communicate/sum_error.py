"""How far sums in a wire format are from those of what ranks have: measured in some steps, by exchanging what the
format has lost as FP32 too.

    errors.measuring = True                 # on all ranks, before the passes of a step
    errors.add("dp_shard", error, total)    # by the communicators: of a rank's share of a sum
    errors.shares(group)                    # {"dp_shard": 0.03}: the error's norm over the sum's, of all ranks

The error of a rank's share is what its summands have lost, added up, and what the sum has lost where it is sent on. It
costs the bytes of an exchange in FP32 in the steps that are measured.
"""

import math
from collections.abc import Sequence
from threading import Lock

import torch
import torch.distributed as dist
from torch import Tensor

from tilewright.parallel.agree import sum_over


class SumError:
    """The error of sums in a wire format, by axis of the mesh. Threads may share it.

    Args:
        axes: along which there are sums, the same on all ranks.
    """

    def __init__(self, axes: Sequence[str]) -> None:
        self.measuring = False
        self._axes, self._lock = tuple(axes), Lock()
        self._squares = {axis: (0.0, 0.0) for axis in self._axes}

    def add(self, axis: str, error: Tensor, total: Tensor) -> None:
        """Add the error of a share of a sum that ranks exchanged in a wire format.

        Args:
            axis: along which it is summed.
            error: what is missing in it.
            total: the sum as it would be without.
        """
        squares = [float(part.double().square().sum()) for part in (error, total)]
        with self._lock:
            before = self._squares[axis]
            self._squares[axis] = before[0] + squares[0], before[1] + squares[1]

    def clear(self) -> None:
        """Clear the errors of sums, as the passes of a step begin, or begin again."""
        with self._lock:
            self._squares = {axis: (0.0, 0.0) for axis in self._axes}

    def shares(self, group: dist.ProcessGroup | None) -> dict[str, float]:
        """The norm of the sums' error over the norm of the sums, by axis, over all ranks of a group, which call it
        together. NaN where a sum is not finite; axes without a sum that is not zero are left out.

        Example:
            >>> errors = SumError(["data"])
            >>> errors.add("data", torch.tensor([0.0, 1.0]), torch.tensor([3.0, 4.0]))
            >>> errors.shares(None)
            {'data': 0.2}
        """
        with self._lock:
            squares = torch.tensor([self._squares[axis] for axis in self._axes], dtype=torch.float64)
        sum_over(group, [squares])
        found = zip(self._axes, squares.view(-1, 2).tolist(), strict=True)
        return {axis: math.sqrt(error / total) for axis, (error, total) in found if total != 0}
