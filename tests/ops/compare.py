"""Comparison that prints the worst element, and the size of what operations make."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def snr_db(got: Tensor, want: Tensor) -> float:
    """Signal-to-noise ratio of `got` against `want` in dB, in FP64."""
    want64, got64 = want.double(), got.double()
    noise = (got64 - want64).square().sum().item()
    signal = want64.square().sum().item()
    return float("inf") if noise == 0 else 10 * torch.log10(torch.tensor(signal / noise)).item()


def assert_snr(got: Tensor, want: Tensor, at_least_db: float, name: str = "") -> None:
    """Fail, with the worst element, where the ratio is below `at_least_db` or anything is not finite."""
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, want {tuple(want.shape)}"
    worst = int((got.double() - want.double()).abs().nan_to_num(nan=float("inf")).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), got.shape)) if got.dim() else ()
    ratio = snr_db(got, want)
    message = f"{name}: {ratio:.1f} dB < {at_least_db} dB; worst at {index}: got {got[index]}, want {want[index]}"
    assert torch.isfinite(got).all(), message
    assert ratio >= at_least_db, message


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        found = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.num_bytes = max([self.num_bytes, *(x.untyped_storage().nbytes() for x in found)])
        return out


def largest_allocation(run: Callable[[], object]) -> int:
    """Bytes of the largest allocation while this runs, inside of operators too, on a CPU."""
    with torch.profiler.profile(profile_memory=True) as profile:
        run()
    events = profile.profiler.kineto_results.events()
    return max(event.nbytes() for event in events if event.name() == "[memory]")
