"""Calls of one model at the same time: each gets what it gets alone, in every mode, in any order of their lines."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.cover import some
from tests.draws import examples
from tests.interleave import interleave
from tests.precision.test_fp8_cover import NAMES, build
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.models.decoder.init import init_decoder
from tilewright.models.generate import generate
from tilewright.precision.convert import convert
from tilewright.precision.float8.gemm import input_cache
from tilewright.precision.float8.weight_cache import QuantizedWeights
from tilewright.precision.integer.linear import Int8Linear
from tilewright.precision.lora.lora import add_lora

MODES = ("fp8_tile", "fp8_hybrid", "fp8_tensorwise", "bf16_mixed", "tf32", "pure_fp16")
CALLS = 3


class Block(nn.Module):
    """Query, key and value of one input, as in a model whose layers stand side by side."""

    def __init__(self, dim=128):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x):
        return self.q(x) * self.k(x) + self.v(x)


def decoder():
    model = Decoder(DecoderConfig.of(dim=128, num_layers=2, num_heads=2, vocab_size=64, num_experts=4, expert_dim=128))
    init_decoder(model, seed=0)
    return model


def inputs_of(model):
    """An input for each call: of a language model tokens, of any other a matrix."""
    if isinstance(model, Block | nn.Sequential):
        return [torch.randn(4, 128, generator=torch.Generator().manual_seed(seed)) for seed in range(CALLS)]
    return [torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(seed)) for seed in range(CALLS)]


def outputs_of(model, x):
    """The tensor that a call returns."""
    out = model(x)
    return getattr(out, "logits", out)


@examples(25)
@given(order=st.lists(st.integers(0, CALLS - 1), max_size=60))
def test_any_order_of_lines_gives_each_call_its_own_input(order):
    torch.manual_seed(0)
    model = convert(Block(), "fp8_tile")
    inputs = inputs_of(model)
    want = [model(x) for x in inputs]
    got = interleave([lambda x=x: model(x) for x in inputs], order, [input_cache.__file__])
    for number, (a, b) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(a, b), f"call {number} is off by {(a - b).abs().max()}"


def at_once(functions, rounds):
    """Results of each function in each round, all functions in threads of their own."""
    barrier = threading.Barrier(len(functions), timeout=60)

    def run(function):
        found = []
        for _ in range(rounds):
            barrier.wait()
            found.append(function())
        return found

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(len(functions)) as pool:
            return list(pool.map(run, functions, timeout=120))
    finally:
        sys.setswitchinterval(before)


def assert_as_alone(model, rounds=6):
    inputs = inputs_of(model)
    with torch.no_grad():
        want = [outputs_of(model, x) for x in inputs]

    def call(x):
        with torch.no_grad():
            return outputs_of(model, x)

    for number, found in enumerate(at_once([lambda x=x: call(x) for x in inputs], rounds)):
        wrong = [out for out in found if not torch.equal(out, want[number])]
        worst = max(((out - want[number]).abs().max() for out in wrong), default=0.0)
        assert not wrong, f"call {number}: {len(wrong)} of {len(found)} differ, by up to {worst}"


MODELS = {"block": Block, "decoder": decoder, **{name: lambda name=name: build(name) for name in NAMES}}
CASES = [(name, "fp8_tile") for name in MODELS] + [(name, mode) for name in ("block", "decoder") for mode in MODES[1:]]


@pytest.mark.parametrize(
    ("name", "mode"),
    some(CASES, *((name, "fp8_tile") for name in ("block", "decoder", "mixtral")), ("decoder", MODES[-1])),
)
def test_forwards_in_threads(name, mode):
    assert_as_alone(convert(MODELS[name](), mode).eval())


def test_forwards_with_weights_kept_in_fp8():
    model = convert(decoder(), "fp8_tile").eval()
    QuantizedWeights(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert_as_alone(model)


def test_forwards_of_a_frozen_base_with_adapters():
    model = decoder()
    add_lora(model, rank=4, alpha=8.0)
    assert_as_alone(model.eval())


def test_forwards_of_integer_layers():
    torch.manual_seed(0)
    assert_as_alone(nn.Sequential(*(Int8Linear.from_linear(nn.Linear(128, 128)) for _ in range(3))))


@pytest.mark.parametrize("mode", ["fp8_tile", "bf16_mixed"])
def test_gradients_in_threads(mode):
    """Each call's own gradient, of its input, forward and backward at the same time as the others'."""
    torch.manual_seed(0)
    model = convert(Block(), mode)
    inputs = inputs_of(model)

    def gradient(x):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(model(x).square().sum(), x)[0]

    want = [gradient(x) for x in inputs]
    for number, found in enumerate(at_once([lambda x=x: gradient(x) for x in inputs], 6)):
        assert all(torch.equal(grad, want[number]) for grad in found), f"call {number}"


def test_answers_in_threads():
    """Of a model in training mode, which it is in afterwards too."""
    model = convert(decoder(), "fp8_tile")
    prompts = inputs_of(model)
    want = [generate(model, ids, 6, temperature=0.0) for ids in prompts]
    found = at_once([lambda ids=ids: generate(model, ids, 6, temperature=0.0) for ids in prompts], 2)
    for number, answers in enumerate(found):
        assert all(torch.equal(answer, want[number]) for answer in answers), f"prompt {number}"
    assert all(part.training for part in model.modules())
