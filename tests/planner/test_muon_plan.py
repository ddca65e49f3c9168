"""What the plan says of Muon: states as the optimizer makes them, work as the update takes it, seconds by hand."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.cover import covering
from tests.optim.test_citizen import normal
from tests.planner.rates import make_machine, make_plan, make_rates, make_recipe
from tests.planner.test_cost import HF, MLA, MOE
from tilewright.core.hardware import detect_machine
from tilewright.models.build import build_model
from tilewright.ops.kernels import Kernels
from tilewright.ops.newton_schulz import operand_format
from tilewright.optim.muon import Muon
from tilewright.planner.cost.layer_choices import GlobalConfig, state_bytes, update_bytes
from tilewright.planner.model.gemms import BYTES
from tilewright.planner.model.layer_classes import ShapeFinder
from tilewright.planner.model.part_weights import Matrices
from tilewright.precision.convert import convert
from tilewright.precision.policy.policy import Policy
from tilewright.training.components.optimizer import make_optimizer

CPU, H200 = make_machine(), make_machine(device="cuda")
STORAGE = {
    "fp32": {},
    "bf16": {"moments": "bf16"},
    "8bit": {"moments": "8bit"},
    "split24": {"moments": "8bit", "master_weights": "split24"},
    "stochastic": {"moments": "8bit", "master_weights": "stochastic"},
}


def held_bytes(recipe):
    """Bytes of the states that an optimizer of the whole model would make."""
    model = build_model(recipe.model, 512, device="meta")
    parameters = "" if recipe.optim.master_weights == "fp32" else "bf16"
    convert(model, Policy.from_section(recipe.precision, "cpu", parameters=parameters), kernels=Kernels.default())
    optimizer = make_optimizer(recipe.optim, model, Kernels.default(), 0)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    layouts = [optimizer.state_layout(param).values() for param in params]
    return sum(shape.numel() * dtype.itemsize for layout in layouts for shape, dtype in layout)


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize(
    "model", [{}, {"tie_embeddings": False}, MOE, MLA | MOE], ids=["dense", "untied", "moe", "mla"]
)
def test_states_are_those_that_the_optimizer_makes(storage, model):
    recipe = make_recipe(model=model, optim={"kind": "muon", **STORAGE[storage]})
    planned = state_bytes(ShapeFinder(512, CPU).find(recipe).weights, GlobalConfig.of(recipe))
    assert planned == held_bytes(recipe)


def test_states_of_a_foreign_model(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(HF))
    recipe = make_recipe(model={"kind": "hf", "path": str(tmp_path)}, optim={"kind": "muon"})
    shape = ShapeFinder(512, CPU).find(recipe)
    assert state_bytes(shape.weights, GlobalConfig.of(recipe)) == held_bytes(recipe)
    assert shape.direction_format == "fp32", "this CPU has no instructions for BF16"


@pytest.mark.parametrize(
    ("shape", "storage", "candidate"),
    covering([(768, 1024), (2048, 512), (3, 512, 512)], tuple(STORAGE), ("native", "wide"), pairs=False),
)
def test_the_bytes_of_an_update_bound_what_it_takes(storage, shape, candidate):
    """Measured with torch's profiler of memory, which sees each allocation. Bound: the chunks that rounding works on,
    2^18 elements of at most 44 bytes, are not counted, nor are the GEMMs' own buffers: with AMX oneDNN reorders an
    operand of each, a square of the smaller side."""
    options = {"master" if name == "master_weights" else name: value for name, value in STORAGE[storage].items()}
    dtype = torch.bfloat16 if "master" in options else torch.float32
    param = nn.Parameter(normal(*shape).to(dtype))
    machine = detect_machine("cpu")
    bare = replace(machine, cpu_features=frozenset()) if candidate == "wide" else machine
    kernels = Kernels(bare, {"newton_schulz": candidate})
    # An iteration holds what the next one holds; five of them take CPUs without instructions for BF16 10 s.
    group = {"params": [param], "muon": True, "stacks": len(shape) == 3, "num_steps": 2}
    optimizer = Muon([group], **options, kernels=kernels)
    optimizer.init_states()
    grad = normal(*shape)
    optimizer.step_params([param], [grad])
    with torch.profiler.profile(profile_memory=True) as profile:
        optimizer.step_params([param], [grad])
    held = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    matrices = Matrices({tuple(param.shape): 1})
    planned = matrices.update_bytes(
        options.get("moments", "fp32"), options.get("master", "fp32"), multiplied=BYTES[operand_format(bare, candidate)]
    )
    chunks = 0 if storage == "fp32" else 44 * 2**18
    buffers = 2**18 + (2 * min(shape[-2:]) ** 2 if candidate == "native" else 0)
    assert most <= planned + chunks + buffers, f"{most:,} bytes, planned {planned:,.0f}"
    assert planned <= most + 2**16, f"{most:,} bytes, planned {planned:,.0f}"


@pytest.mark.parametrize("executor", ["standard", "layer_major"])
def test_on_a_gpu_the_update_of_the_largest_matrix_is_in_the_peak(executor):
    """A batch so small that nothing else is: a GPU has no free pages of others."""
    ffn_dim = 10_944
    model = {"dim": 4096, "ffn_dim": ffn_dim, "num_layers": 2, "num_heads": 8}
    sections = {"model": model, "train": {"micro_batch_size": 1, "global_batch_size": 1}}
    sections["data"] = {"seq_len": 8, "vocab_size": 512}
    peaks = {}
    for kind in ("adamw", "muon"):
        recipe = make_recipe(**sections, optim={"kind": kind}, memory={"executor": executor})
        plan = make_plan(recipe, 512, H200, make_rates())
        shape, setting = ShapeFinder(512, H200).find(recipe), GlobalConfig.of(recipe)
        peaks[kind] = plan.peak_bytes - state_bytes(shape.weights, setting)
        takes = update_bytes(shape.weights, setting, shape)
    gradients = 4 * shape.weights.trained
    assert takes == 6 * 4096 * ffn_dim  # momentum in FP32 and BF16
    assert peaks["muon"] >= gradients * (executor == "standard") + takes


def test_seconds_of_newton_schulz_by_hand():
    """Rates of 1e12 FLOPs/s and nothing to start: 5 iterations of 2 products [64, 256] and one [64, 64]."""
    seconds = Matrices({(64, 256): 2}).newton_schulz_s(lambda _, flops: flops / 1e12)
    assert seconds == pytest.approx(2 * 5 * (2 * 2 * 64 * 64 * 256 + 2 * 64**3) / 1e12)
    stacked = Matrices({(3, 256, 64): 1}).newton_schulz_s(lambda _, flops: flops / 1e12)
    assert stacked == pytest.approx(3 / 2 * seconds)


@pytest.mark.parametrize("executor", ["standard", "layer_major"])
def test_a_step_with_muon_takes_longer_by_that(executor):
    plans = {}
    for kind in ("adamw", "muon"):
        recipe = make_recipe(optim={"kind": kind}, memory={"executor": executor})
        plans[kind] = make_plan(recipe, 512, CPU, make_rates()).step_s
    matrices = ShapeFinder(512, CPU).find(recipe).weights.matrices
    more = matrices.newton_schulz_s(lambda _, flops: flops / 1e12)
    more += matrices.elements * (70 / 1e10 - 1 / 1e9)  # bytes through the bandwidth, for elements through AdamW
    assert plans["muon"] - plans["adamw"] == pytest.approx(more, rel=0.01)


@pytest.mark.parametrize("features", [(), ("avx2",), ("avx512_bf16",), ("amx_bf16",)])
def test_a_step_is_planned_at_the_candidate_that_runs(features):
    """BF16 products run at 2 GFLOP/s on a CPU without instructions for them: there Newton-Schulz is in FP32."""
    machine = replace(CPU, cpu_features=frozenset(features))
    rates = make_rates(matmul={fmt: {256: 1e9 if fmt == "bf16" else 1e12} for fmt in ("fp32", "tf32", "bf16", "fp16")})
    seconds = {}
    for forced in ("auto", "wide", "native"):
        if forced == "wide" and machine.cpu_multiplies(torch.bfloat16):
            continue
        recipe = make_recipe(optim={"kind": "muon"}, ops={"newton_schulz": forced})
        matrices = ShapeFinder(512, machine).find(recipe).weights.matrices
        adamw = make_plan(make_recipe(), 512, machine, rates).step_s
        seconds[forced] = make_plan(recipe, 512, machine, rates).step_s - adamw
        chosen = Kernels.from_sections(machine, recipe.ops, recipe.memory)
        name = chosen.choices["newton_schulz", "cpu", torch.bfloat16, ""].candidate.name
        rate = 1e12 if name == "wide" else 1e9
        assert seconds[forced] == pytest.approx(
            matrices.newton_schulz_s(lambda _, flops, rate=rate: flops / rate)
            + matrices.elements * (70 / 1e10 - 1 / 1e9),
            rel=0.02,
        )
    assert seconds["auto"] == seconds.get("wide", seconds["native"])
