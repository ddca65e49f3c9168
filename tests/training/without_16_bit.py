"""Run by `test_without_16_bit` under restricted instruction sets: no matrix of 16-bit operands reaches torch.

On a CPU without instructions for them torch multiplies these at 2 GFLOP/s, a fiftieth of its FP32. The profiler sees
what runs inside of operators, compiled code and backward too.
"""

import functools
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from tests.contracts.observe import fixed_ceilings
from tests.ops.cases import attention_cases
from tests.precision.test_fp8_cover import build, ids
from tests.training.test_dpo import dpo, model, pairs  # noqa: F401  the last two are fixtures
from tests.training.tiny import tiny
from tilewright.core.hardware import detect_machine
from tilewright.formats.tiled import FP8_BLOCK, FP8_ROW
from tilewright.ops.kernels import Kernels
from tilewright.planner.machine import ceilings
from tilewright.precision.convert import convert
from tilewright.training.session import train

PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "linear", "_convolution", "_int_mm", "_grouped_mm")
FLASH = ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward")
SLOW = frozenset(f"aten::{name}" for name in (*PRODUCTS, *FLASH))
LOW = ("c10::BFloat16", "c10::Half")
LOW_DTYPES = (torch.bfloat16, torch.float16)


@contextmanager
def no_16_bit_products():
    with torch.profiler.profile(record_shapes=True) as profile:
        yield
    events = profile.profiler.kineto_results.events()
    found = {f"{e.name()} {e.shapes()[:2]}" for e in events if e.name() in SLOW and set(e.dtypes()[:3]) & set(LOW)}
    assert not found, f"{len(found)} kinds of products of 16-bit operands, the first: {sorted(found)[:5]}"
    assert any(e.name() in SLOW for e in events), "the profiler sees products"


@pytest.fixture(autouse=True)
def _fixed(monkeypatch):
    """No run measures the machine, which takes seconds under these instruction sets."""
    monkeypatch.setattr(ceilings, "measure", fixed_ceilings)


@functools.cache
def kernels(compiled):
    return Kernels(detect_machine("cpu"), compile=compiled)


def test_the_instruction_sets_are_restricted():
    assert torch.backends.cpu.get_cpu_capability() == "AVX2"
    assert not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    machine = detect_machine("cpu")
    assert not any(machine.cpu_multiplies(dtype) for dtype in LOW_DTYPES)


@pytest.mark.parametrize("dtype", LOW_DTYPES)
def test_a_planted_product_is_found(dtype):
    x = torch.randn(8, 8, dtype=dtype, requires_grad=True)
    with pytest.raises(AssertionError, match="products of 16-bit operands"), no_16_bit_products():
        (x @ x).sum().backward()
    with pytest.raises(AssertionError, match="products of 16-bit operands"), no_16_bit_products():
        nn.functional.scaled_dot_product_attention(*[x.view(1, 1, 8, 8)] * 3)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", LOW_DTYPES)
def test_operations(dtype, autocast, compiled):
    run = kernels(compiled)
    x, weight = torch.randn(2, 5, 16).to(dtype).requires_grad_(), torch.randn(24, 16, requires_grad=True)
    labels = torch.randint(0, 24, (10,))
    with no_16_bit_products(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        run.linear(x, weight, weight[:, 0]).sum().backward()
        for case in list(attention_cases())[:4]:
            q, k, v, segments = case.tensors(dtype)
            for block in (0, 19):
                run.attention(q, k, v, segments=segments, block=block).sum().backward()
            with torch.no_grad():
                run.attention(q, k, v, segments=segments)
                for new in (1, 2):
                    run.attention_to_past(q[:, :, -new:], k, v)
        run.linear_cross_entropy(x.flatten(0, 1), weight, labels)[0].backward()
        with torch.no_grad():
            run.linear_cross_entropy(x.flatten(0, 1), weight, labels)
        run.newton_schulz("cpu")(weight.detach().to(torch.bfloat16))
        a, b = run.quantize(x[0].detach(), FP8_ROW), run.quantize(weight.detach(), FP8_BLOCK)
        run.tile_gemm(a, b, out_dtype=dtype)


MLA = {"model__attention": "mla", "model__q_lora_rank": 8, "model__kv_lora_rank": 8}
NARROW = {"optim__moments": "8bit", "optim__master_weights": "stochastic"}
RECIPES = {  # several things in one run: a run takes a second of the processor
    "experts_fp8": {"precision__mode": "fp8_tile", "optim__kind": "muon", "model__num_experts": 4} | MLA,
    "pure_fp16": {"precision__mode": "pure_fp16"},
    "layer_major": {"memory__executor": "layer_major"} | NARROW,
}
LONGER = {
    "bf16_mixed": {},  # muon updates the embedding and norms as it does
    "muon": {"optim__kind": "muon"},
    "fp8_tile": {"precision__mode": "fp8_tile"},
    "experts": {"model__num_experts": 4} | MLA,
    "lora": {"lora__rank": 4, "lora__alpha": 8.0},
    "hybrid": {"precision__mode": "hybrid"},
    "fp8_tensorwise": {"precision__mode": "fp8_tensorwise"},
    "mla": MLA,
    "narrow": NARROW,
    "layer_major 8bit": {"memory__executor": "layer_major", "optim__moments": "8bit"},
}


SHORT = {
    "train__steps": 3,
    "train__eval_interval": 2,
    "train__global_batch_size": 2,
    "train__micro_batch_size": 1,
    "train__sample_tokens": 2,
    "checkpoint__interval": 0,
    "checkpoint__save_last": False,
    "log__report": False,
    "ops__cross_entropy": "native",
    "precision__eval_fp32": False,
}


@pytest.mark.parametrize("name", RECIPES)
def test_three_steps_evaluation_and_a_sample(name, data, tmp_path):
    with no_16_bit_products():
        train(tiny(data, tmp_path, **SHORT | RECIPES[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", LONGER)
def test_three_steps_of_more_recipes(name, data, tmp_path):
    with no_16_bit_products():
        train(tiny(data, tmp_path, **SHORT | LONGER[name]))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["bf16_mixed", "fp8_tile"])
def test_a_teacher_beside_the_steps(mode, data, tmp_path):
    """Which computes in BF16 where the student does."""
    last = {"checkpoint__save_last": True, "train__steps": 1, "run__name": "teacher", "precision__mode": "fp32"}
    folder = train(tiny(data, tmp_path, **SHORT | last)).run_dir
    with no_16_bit_products():
        train(tiny(data, tmp_path, **SHORT, precision__mode=mode, distill__teacher=folder))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["decoder", "hf"])
def test_preferences_and_their_reference(kind, pairs, model, tmp_path):  # noqa: F811
    few = {"train__steps": 2, "train__global_batch_size": 4, "train__micro_batch_size": 2, "train__eval_interval": 0}
    with no_16_bit_products():
        train(dpo(pairs, model, tmp_path, **SHORT | few, model__kind=kind, precision__mode="bf16_mixed"))


@pytest.mark.slow
@pytest.mark.timeout(1500)  # of a cold cache on a busy machine the C++ compiler alone takes over five minutes
@pytest.mark.parametrize("name", ["bf16_mixed", "fp8_tile", "muon"])
def test_compiled_layers_loss_and_optimizer(name, data, tmp_path):
    compiled = {"train__compile": "on", "ops__cross_entropy": "auto", "ops__adam": "auto"}
    with no_16_bit_products():
        train(tiny(data, tmp_path, **SHORT | LONGER[name] | compiled))


@pytest.mark.parametrize("mode", ["bf16_mixed", "hybrid", "fp8_tile"])
@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_models_with_code_of_their_own(name, mode):
    net = convert(build(name), mode)
    with no_16_bit_products():
        net(input_ids=ids(), labels=ids()).loss.backward()


@pytest.mark.parametrize("mode", ["bf16_mixed", "hybrid"])
def test_convolutions_and_functions(mode):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.heads = nn.Conv2d(3, 8, 3), nn.MultiheadAttention(8, 2, batch_first=True)
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x):
            x = self.conv(x).flatten(2).mT
            x = self.heads(x, x, x)[0] @ self.weight
            return torch.einsum("bsd,de->bse", x, self.weight).sum()

    net = convert(Net(), mode)
    with no_16_bit_products():
        net(torch.randn(2, 3, 6, 6)).backward()
