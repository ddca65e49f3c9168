"""Attention of another party's module, in BF16 on a CPU: calls that the kernel in C++ takes, and all others."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ops.test_bf16_attention import REASONS
from tilewright.core.hardware import detect_machine
from tilewright.ops.kernels import Kernels
from tilewright.precision.convert import convert
from tilewright.precision.mixed.own_attention import taken_call

KERNEL = next((name for name, reason in REASONS.items() if reason is None), None)
needs_kernel = pytest.mark.skipif(KERNEL is None, reason=f"{REASONS}")


class Attending(nn.Module):
    """Another party's attention; two key heads for four of queries where `grouped`."""

    def __init__(self, grouped=False, **call):
        super().__init__()
        self.heads, self.keys, self.call = 4, 2 if grouped else 4, call | ({"enable_gqa": True} if grouped else {})
        self.q, self.out = nn.Linear(32, 32), nn.Linear(32, 32)
        self.k, self.v = nn.Linear(32, 8 * self.keys), nn.Linear(32, 8 * self.keys)

    def forward(self, x):
        q, k, v = (
            layer(x).view(*x.shape[:2], heads, 8).transpose(1, 2)
            for layer, heads in ((self.q, self.heads), (self.k, self.keys), (self.v, self.keys))
        )
        return self.out(F.scaled_dot_product_attention(q, k, v, **self.call).transpose(1, 2).flatten(2))


class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def step(model, x):
    with Calls() as calls:
        loss = model(x).square().mean()
        loss.backward()
    return [name for name in calls.names if "attention" in name], [p.grad.clone() for p in model.parameters()]


def documents(length=20):
    segments = torch.arange(length) // 7
    return ((segments[:, None] == segments) & torch.ones(length, length, dtype=torch.bool).tril())[None, None]


@needs_kernel
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(
    ("call", "name"), [({"is_causal": True}, "bf16_attention"), ({"attn_mask": documents()}, "masked_bf16_attention")]
)
def test_a_causal_call_goes_to_the_kernel(call, name, grouped):
    torch.manual_seed(0)
    plain = Attending(grouped, **call)
    x, (of_torch, own) = torch.randn(2, 20, 32), (copy.deepcopy(plain) for _ in range(2))
    exact = step(plain.double(), x.double())[1]
    convert(of_torch, "bf16_mixed", kernels=Kernels(detect_machine("cpu"), {"attention": "native"}, compile=False))
    convert(own, "bf16_mixed")
    names, grads = step(own, x)
    of_torch_names, of_torch_grads = step(of_torch, x)
    assert names == [name, f"{name}_backward"]
    assert not [one for one in of_torch_names if "bf16" in one]
    off, of_torch_off = (
        sum((g.double() - e).square().sum() for g, e in zip(found, exact, strict=True)).sqrt()
        for found in (grads, of_torch_grads)
    )
    assert off <= 1.5 * of_torch_off  # both round where the other does, give or take


@needs_kernel
@pytest.mark.parametrize(
    "call", [{}, {"is_causal": True, "dropout_p": 0.5}, {"attn_mask": torch.zeros(20, 20)}], ids=["all", "drop", "adds"]
)
def test_other_calls_stay(call):
    names, _ = step(convert(Attending(**call), "bf16_mixed"), torch.randn(2, 20, 32))
    assert not [name for name in names if "bf16" in name]


@needs_kernel
def test_recomputed_and_compiled_layers_take_it_too():
    torch.manual_seed(0)
    layers = nn.Sequential(*(Attending(is_causal=True) for _ in range(2)))
    model = convert(nn.ModuleDict({"layers": layers}), "bf16_mixed")["layers"]
    x = torch.randn(2, 20, 32)
    want = step(model, x)[1]
    model.zero_grad()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(x).square().mean().backward()
    assert all(torch.equal(p.grad, one) for p, one in zip(model.parameters(), want, strict=True))


def of(*shape, dtype=torch.bfloat16):
    return torch.zeros(*shape, dtype=dtype)


@pytest.mark.parametrize(
    ("arguments", "taken"),
    [
        ({"is_causal": True}, True),
        ({"is_causal": True, "query": of(2, 3, 5, 8, dtype=torch.float32)}, False),
        ({"is_causal": True, "query": of(2, 3, 4, 8)}, False),
        ({"is_causal": True, "query": of(2, 6, 5, 8)}, False),
        ({"is_causal": True, "query": of(2, 6, 5, 8), "enable_gqa": True}, True),
        ({"is_causal": True, "value": of(2, 3, 5, 9)}, False),
        ({"is_causal": True, "value": of(2, 3, 5, 7)}, True),
        ({"is_causal": True, "query": of(3, 5, 8), "key": of(3, 5, 8), "value": of(3, 5, 8)}, False),
        ({"attn_mask": of(2, 1, 5, 5, dtype=torch.bool)}, True),
        ({"attn_mask": of(5, 5, dtype=torch.bool)}, False),
        ({"attn_mask": of(2, 1, 5, 5)}, False),
        ({"attn_mask": of(2, 1, 1, 5, dtype=torch.bool)}, False),
    ],
)
def test_calls_that_are_taken(arguments, taken):
    operands = {name: of(2, 3, 5, 8) for name in ("query", "key", "value")}
    assert (taken_call(**operands | arguments) is not None) == taken


def test_autocast_makes_operands_of_it():
    operands = [of(2, 3, 5, 8, dtype=torch.float32)] * 3
    with torch.autocast("cpu", torch.bfloat16):
        found = taken_call(*operands, is_causal=True)
    assert {x.dtype for x in found[:3]} == {torch.bfloat16}
    with torch.autocast("cpu", torch.float16):
        assert taken_call(*operands, is_causal=True) is None
