"""A pass that runs one of alike experts counts what the loop over all of them does: bytes, peaks, traffic, FLOPs."""

import json
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.draws import examples
from tests.planner.families import FAMILIES
from tests.planner.rates import make_machine
from tests.planner.test_trace import recipe_of
from tilewright.ops.kernels import Kernels
from tilewright.planner.model.skeleton import skeleton_of
from tilewright.planner.trace.alike_experts import AlikeExperts
from tilewright.planner.trace.byte_counter import LiveBytes
from tilewright.planner.trace.fake_model import KERNELS
from tilewright.planner.trace.layer_trace import Measures
from tilewright.planner.trace.model_trace import Tracer
from tilewright.precision.float8.third_party import tile_weights
from tilewright.precision.float8.weight import ExpertLoop, Float8Weight
from tilewright.precision.policy.gemm_formats import Gemms
from tilewright.precision.policy.policy import Policy

MACHINE = make_machine()
WIDTH, OUT = 96, 40


@st.composite
def stacks(draw):
    """Rows of each expert, and what of the matmuls, the stack and its gradient differs."""
    groups = draw(st.lists(st.tuples(st.integers(0, 70), st.integers(1, 5)), min_size=1, max_size=3))
    return {
        "counts": [rows for rows, number in groups for _ in range(number)],
        "format": draw(st.sampled_from(["fp32", "bf16", "fp8_tile", "fp8_tensorwise"])),
        "stored": draw(st.sampled_from([torch.float32, torch.bfloat16])),
        "transposed": draw(st.booleans()),
        "bias": draw(st.booleans()),
        "trained": draw(st.booleans()),
        "x_trained": draw(st.booleans()),
    }


def counted(loop: type[ExpertLoop], case) -> dict:
    """What a pass through a stack, forward and backward, is counted as."""
    with FakeTensorMode():
        weight = Float8Weight()
        weight.expert_loop, weight.kernels = loop, Kernels(MACHINE, KERNELS, compile=False)
        if case["format"].startswith("fp8"):
            weight.set_gemms(Gemms.all(case["format"]), "bf16", power_of_two=True)
        else:
            weight.set_formats(case["format"], "bf16")
        shape = (len(case["counts"]), WIDTH, OUT) if case["transposed"] else (len(case["counts"]), OUT, WIDTH)
        stack = torch.empty(shape, dtype=case["stored"], requires_grad=case["trained"])
        stack.grad_dtype = torch.float32 if case["trained"] else None
        bias = torch.empty(shape[0], OUT, requires_grad=case["trained"]) if case["bias"] else None
        x = torch.empty(sum(case["counts"]), WIDTH, requires_grad=case["x_trained"])
        live = LiveBytes()
        with live:
            out = weight.grouped(x, case["counts"], stack.transpose(1, 2) if case["transposed"] else stack, bias)
            kept, peak = live.live, live.peak
            live.peak = live.passing_peak = live.live
            live.in_backward = True
            if out.requires_grad:
                out.backward(torch.empty_like(out))
            del out
    numbers = ("live", "peak", "passing_peak", "moved", "fresh", "operations", "gemms")
    return {"kept": kept, "forward": peak} | {name: getattr(live, name) for name in numbers}


@examples(15)
@given(case=stacks())
def test_one_expert_counts_for_all_that_are_alike(case):
    assert counted(AlikeExperts, case) == counted(ExpertLoop, case)


MODELS = [
    ("mixtral", "fp8_tile", 51, 8),
    ("qwen3_moe", "pure_fp16", 16, 72),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode", "length", "experts"), MODELS)
def test_a_model_is_traced_as_with_all_experts(name, mode, length, experts, tmp_path):
    recipe = recipe_of(FAMILIES[name], tmp_path, precision={"mode": mode}, data={"seq_len": length})
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    field = "num_experts" if "num_experts" in config else "num_local_experts"
    file.write_text(json.dumps(config | {field: experts}))
    skeleton = skeleton_of(recipe, 2)
    found = []
    for loop in (ExpertLoop, AlikeExperts):
        tracer = Tracer(skeleton.model, skeleton.names, recipe, Policy.from_section(recipe.precision, "cpu"), MACHINE)
        for stack in tile_weights(tracer.model).values():
            stack.matmuls.expert_loop = loop
        found.append(tracer.trace(1, Measures.MEMORY))
    assert found[1] == found[0]


def test_the_number_of_experts_takes_no_time():
    def seconds(number: int) -> float:
        case = {
            "counts": [4] * number, "format": "fp8_tile", "stored": torch.float32, "transposed": False, "bias": False,
            "trained": True, "x_trained": True,
        }  # fmt: skip
        begin = time.process_time()
        counted(AlikeExperts, case)
        return time.process_time() - begin

    seconds(2)
    assert min(seconds(256) for _ in range(3)) < 10 * min(seconds(2) for _ in range(3))
