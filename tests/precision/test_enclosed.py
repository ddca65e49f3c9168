"""Training inside of one autocast region: modules with code of their own read their weights as they are, each time.

Autocast keeps 16-bit copies of weights until the outermost region ends, which may be after many steps.
"""

import contextlib

import pytest
import torch
from torch import nn

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
