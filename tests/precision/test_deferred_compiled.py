"""Compiled layers whose weight gradients wait: compiled code ends around their matmuls, whatever is recomputed and in
whatever order gradients are computed. The gradients are those of eager layers but for the order of sums, which is
rounded to other bits."""

import functools

import pytest
import torch

from tests.cover import covering
from tests.precision.test_deferred import decoder, deferred, plain, twin
from tilewright.core.hardware import detect_machine
from tilewright.ops.base.weight_gradient_queue import WeightGradientQueue
from tilewright.ops.kernels import Kernels
from tilewright.precision.mixed.gradient_queues import attach


@pytest.fixture
def as_traced(monkeypatch):
    """What torch.compile traces is run as it is, and nothing is left uncompiled in silence.

    Through AOTAutograd, as by default: torch's backend "eager" keeps what an autograd function saves where no
    checkpoint sees it, so a recomputed layer would take the values of its first pass.
    """
    plain_compile = torch.compile

    @functools.wraps(plain_compile)  # with its signature, which `graph_limit` reads
    def traced(*args, options=None, **kwargs):
        return plain_compile(*args, backend="aot_eager", **kwargs)

    monkeypatch.setattr(torch, "compile", traced)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield
    torch._dynamo.reset()


ROUNDING = {None: 2e-6, "fp32": 2e-6, "bf16_mixed": 1e-2, "fp8_tile": 5e-2}
"""Relative to the norm of a gradient: FP32 sums of a few dozen terms in another order (eps is 6e-8), rounded to 8 bits
(4e-3), or before values are rounded to 3 (3 % each). A gradient that is missing, or there twice, is off by 1."""


def assert_close(found, want, mode):
    assert found.keys() == want.keys()
    off = {name: float((found[name] - grad).norm() / grad.norm()) for name, grad in want.items()}
    worst = max(off, key=off.get)
    assert off[worst] <= ROUNDING[mode], f"{worst} is off by {off[worst]:.2g}"


WAYS = list(
    covering(
        ("fp32", "bf16_mixed", "fp8_tile", None),
        ("none", "full", "selective", "matmuls", "attention"),
        ("exact", "fp8"),
    )
)
FIRST = [("fp32", "selective", "exact", False)]
"""16 bits are traced for three times as long, and eager layers have them in `test_deferred`."""
OTHERS = [("bf16_mixed", "selective", "exact", False), ("fp8_tile", "full", "exact", False)]
OTHERS += [(*getattr(way, "values", way), False) for way in WAYS]
OTHERS += [(mode, checkpoint, "exact", True) for mode in ("bf16_mixed", "fp8_tile") for checkpoint in ("none", "full")]


@pytest.mark.parametrize(
    ("mode", "checkpoint", "inputs", "moe"),
    [*FIRST, *(pytest.param(*way, marks=pytest.mark.slow) for way in OTHERS if way not in FIRST)],
)
def test_the_gradients_of_eager_layers(mode, checkpoint, inputs, moe, as_traced):
    layers = 2 if moe else 1  # the first one is dense
    model = decoder(mode, checkpoint=checkpoint, inputs=inputs, moe=moe, layers=layers, tie_embeddings=False)
    want = plain(twin(model))
    model.compile_blocks(waits=True)
    found, most, queue = deferred(model)
    assert_close(found, want, mode)
    assert queue.at_once == 0
    assert most >= 7 * layers


@pytest.mark.slow
def test_compiled_and_attached_in_either_order(as_traced):
    first, second = (decoder("bf16_mixed") for _ in range(2))
    want = plain(twin(first))
    first.compile_blocks(waits=True)
    assert_close(plain(first), want, "bf16_mixed")  # without a queue, before it gets one
    first.zero_grad()
    assert_close(deferred(first)[0], want, "bf16_mixed")
    attach(second, WeightGradientQueue())
    second.compile_blocks(waits=True)
    assert_close(deferred(second)[0], want, "bf16_mixed")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fp32", "bf16_mixed", "fp8_tile"])
def test_inductors_code(mode):
    model = decoder(mode, kernels=Kernels(detect_machine()), tie_embeddings=False)
    want = plain(twin(model))
    model.compile_blocks(waits=True)
    found, _, queue = deferred(model)
    assert queue.at_once == 0
    assert_close(found, want, mode)
