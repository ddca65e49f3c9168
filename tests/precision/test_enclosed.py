"""Training inside of one autocast region: modules with code of their own read their weights as they are, each time.

Autocast keeps 16-bit copies of weights until the outermost region ends, which may be after many steps.
"""

import contextlib
import copy

import pytest
import torch
from torch import nn

from tests.cover import covering
from tilewright.ops.backends.native.wide import widens
from tilewright.precision.convert import convert


class OwnWeight(nn.Module):
    """Multiplies by a parameter itself; writes to it within the forward where that is asked for, as averages do."""

    def __init__(self, writes=False):
        super().__init__()
        self.w, self.writes = nn.Parameter(torch.eye(8)), writes

    def forward(self, x):
        x = x @ self.w
        if self.writes:
            with torch.no_grad():
                self.w.mul_(0.5)
            x = x @ self.w
        return x


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.inner(x, x, x, need_weights=False)[0]


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.GRU(8, 8, batch_first=True)

    def forward(self, x):
        return self.inner(x)[0]


def losses(kind, enclosing, steps=5):
    torch.manual_seed(0)
    model = convert(nn.Sequential(kind(), nn.Linear(8, 8)), "bf16_mixed")
    x, y = torch.randn(4, 6, 8), torch.randn(4, 6, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    with enclosing:
        for _ in range(steps):
            loss = (model(x).float() - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(float(loss))
    return found


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("kind", [OwnWeight, Attention, Recurrent])
def test_steps_inside_of_a_region_are_those_outside(kind, enabled):
    want = losses(kind, contextlib.nullcontext())
    got = losses(kind, torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled))
    assert len(set(want)) == len(want)
    if widens("cpu", torch.bfloat16):  # a region around backward rounds what is FP32 in there, as it does everywhere
        assert got == pytest.approx(want, rel=2**-8)
    else:
        assert got == want


def test_a_write_within_a_forward_is_seen():
    model = convert(nn.Sequential(OwnWeight(writes=True)), "bf16_mixed")
    assert torch.equal(model(torch.ones(2, 8)).float(), torch.full((2, 8), 0.5))


class Averaged(nn.Module):
    """Answers by an average of its own weight before and after it moves, all within one forward."""

    def __init__(self, make, write):
        super().__init__()
        self.own, self.average, self.write = make(), make().requires_grad_(False), write

    def forward(self, x):
        before = self.average(x)
        with torch.no_grad():
            self.write(self.average.weight, self.own.weight)
        return before, self.average(x)


class Rows(nn.Module):
    """A weight that only its own code multiplies by."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x):
        return x @ self.weight


AVERAGES = {
    "lerp": lambda average, own: average.lerp_(own, 0.5),
    "data": lambda average, own: average.data.copy_(own),
    "foreach": lambda average, own: torch._foreach_lerp_([average], [own], 0.75),
}
MAKES = {"layer": lambda: nn.Linear(16, 16, bias=False), "own code": Rows}
REGIONS = {
    "none": contextlib.nullcontext,
    "16 bits": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "disabled": lambda: torch.autocast("cpu", dtype=torch.bfloat16, enabled=False),
}


@pytest.mark.parametrize(
    ("make", "write", "mode", "region"),
    covering(
        tuple(MAKES), tuple(AVERAGES), ("fp32", "tf32", "bf16_mixed", "pure_fp16", "hybrid", "fp8_tile"), tuple(REGIONS)
    ),
)
def test_an_average_that_moves_within_a_forward_is_seen(make, write, mode, region):
    """Against FP32: what was multiplied after the write is nearer to the weight of then than to the one before by the
    mode's own error, 2^-3 at most of a norm (E4M3, rounded twice), where the two weights are a norm apart."""
    model = Averaged(MAKES[make], AVERAGES[write])
    plain = copy.deepcopy(model)
    convert(model, mode)
    x = torch.randn(8, 16)
    with REGIONS[region]():
        found = model(x)
    for got, want in zip(found, plain(x), strict=True):
        error = ((got.float() - want).norm() / want.norm()).item()
        assert error < 2**-3, f"off by {error:.2g} of its norm"
