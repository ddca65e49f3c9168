"""Traces of Hugging Face models on fake tensors, against the same models on real ones."""

import copy
import gc
import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.cover import some
from tests.planner.families import FAMILIES, VOCAB, Family
from tests.planner.rates import make_machine, make_plan, make_rates, make_recipe
from tilewright.models.build import build_model, init_weights
from tilewright.ops.kernels import Kernels
from tilewright.planner.machine.process_bytes import free_pages
from tilewright.planner.model.layer_classes import ShapeFinder
from tilewright.planner.model.skeleton import skeleton_of
from tilewright.planner.trace import model_trace
from tilewright.planner.trace.byte_counter import LiveBytes, flops_of
from tilewright.planner.trace.fake_model import KERNELS
from tilewright.planner.trace.layer_trace import Measures
from tilewright.planner.trace.model_trace import DOCUMENTS_AS_ROWS, ModelCalls, Tracer, Untraceable, trace_model
from tilewright.precision.convert import convert
from tilewright.precision.policy.policy import Policy

transformers = pytest.importorskip("transformers")
MACHINE = make_machine()
AMD = replace(MACHINE, cpu_features=frozenset({"avx512_bf16"}))
ROWS, LENGTH = 2, 64
LONGER = [pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "mixtral", "swin")]


def recipe_of(family: Family, folder, **sections):
    """Of three layers, where these show all kinds of them, and of eight experts."""
    small = {"n_routed_experts": 8, "num_experts": 8} | (
        {"num_hidden_layers": 3} if family.name != "gemma3_text" else {}
    )
    config = family.config | {name: value for name, value in small.items() if name in family.config}
    (folder / "config.json").write_text(json.dumps(config))
    base = {
        "model": {"kind": "hf", "path": str(folder), "task": family.task},
        "data": {"seq_len": LENGTH, "vocab_size": VOCAB, "image_size": family.image_size or 64},
        "train": {"micro_batch_size": ROWS, "global_batch_size": ROWS},
    }
    return make_recipe(**{name: base.get(name, {}) | sections.get(name, {}) for name in {*base, *sections}})


def traced(recipe, machine=MACHINE):
    """The whole model, all its layers."""
    policy = Policy.from_section(recipe.precision, machine.device)
    return trace_model(build_model(recipe.model, 2, device="meta"), (), recipe, policy, machine, ROWS)


class Real:
    """A forward and a backward pass of the model on real tensors, counted like a trace."""

    def __init__(self, recipe, documents) -> None:
        gc.collect()
        model = build_model(recipe.model, 2, Kernels(MACHINE, compile=False), "cpu")
        init_weights(model, 0)
        convert(model, Policy.from_section(recipe.precision, "cpu"), kernels=Kernels(MACHINE, KERNELS, compile=False))
        live = LiveBytes()
        with live.watching(model.train()), live:
            out = self.output(model, recipe, documents)
            self.kept, self.flops = live.live, sum(flops for _, flops in live.gemms.values())
            live.peak, live.in_backward = live.live, True
            out.backward(torch.empty_like(out).fill_(1e-3))
        self.backward, self.moved = live.peak, live.moved

    def output(self, model, recipe, documents):
        if recipe.model.task == "image_classification":
            side = recipe.data.image_size
            return model.net(pixel_values=torch.randn(ROWS, 3, side, side)).logits
        ids = torch.randint(3, 500, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
        positions = torch.arange(LENGTH).expand(ROWS, -1) % (LENGTH // 2)
        arguments = {"position_ids": positions} if documents == "positions" else {}
        net = model.net.base_model if recipe.model.task == "causal_lm" else model.net
        return net(input_ids=ids, **arguments)[0]


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_moe",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("llama", "vit", "opt", "mixtral", "deepseek_v3")),
    ],
)
def test_what_fake_tensors_say_is_what_real_ones_do(name, tmp_path):
    family = FAMILIES[name]
    recipe = recipe_of(family, tmp_path)
    found = traced(recipe)
    real = Real(recipe, "rows" if name == "vit" else "positions")
    told = f"{name}: {found}"
    # Experts are taken to be equally busy; on few tokens some have no rows, and keep no weights in 16 bits.
    some_idle = name in ("mixtral", "qwen3_moe", "deepseek_v3")
    assert found.kept == pytest.approx(real.kept, rel=0.1 if some_idle else 0.05), told
    assert found.backward == pytest.approx(real.backward, rel=0.08), told
    assert found.moved == pytest.approx(real.moved, rel=0.25), told  # sums of gradients are made in place
    assert flops_of(found.gemms) == pytest.approx(real.flops, rel=0.02), told


@pytest.mark.parametrize("name", some(("mixtral", "qwen3_moe", "deepseek_v3"), "deepseek_v3"))
def test_stacked_experts_are_counted_in_the_format_that_they_run_in(name, tmp_path):
    """As the policy's BF16, one GEMM for each expert, all of them equally busy."""
    recipe = recipe_of(FAMILIES[name], tmp_path)
    found = traced(recipe, AMD)
    experts = {
        kind: flops for kind, (_, flops) in found.gemms.items() if kind.dtype is torch.bfloat16 and not kind.module
    }
    model = build_model(recipe.model, 2, device="meta")
    stacked = [p for p in model.parameters() if p.dim() == 3]
    config = FAMILIES[name].config
    share = config["num_experts_per_tok"] / stacked[0].shape[0]
    expected = 2 * ROWS * LENGTH * share * sum(p.numel() for p in stacked)
    assert sum(experts.values()) == pytest.approx(expected, rel=0.01)


PLAIN = [pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "bert", "gemma3_text")]
"""Layers of one kind; DeepSeek-V3 has two of them, and a ViT no tokens."""


@pytest.mark.parametrize("name", [*PLAIN, "deepseek_v3", "vit", *LONGER])
def test_classes_and_what_stands_around_them_add_up_to_the_whole_model(name, tmp_path):
    """The skeleton's layers, each times its number, and the rest are what all layers together are."""
    recipe = recipe_of(FAMILIES[name], tmp_path)
    whole = traced(recipe, AMD)
    shape = ShapeFinder(VOCAB, AMD).find(recipe)
    assert not shape.unknown
    parts = [*((found.count, found) for found in shape.classes), (1, shape.rest)]
    kept = sum(times * found.kept(ROWS) for times, found in parts)
    if shape.plain_head:  # its finished gradient for the hidden states is no part of the base model
        kept -= 2 * ROWS * LENGTH * shape.dim
    assert kept == pytest.approx(whole.kept, rel=0.05)
    linear = sum(n * sum(p.share * p.num_weights for p in found.matmuls) for n, found in parts)
    others = sum(n * sum(flops for _, flops in found.others.values()) for n, found in parts)
    assert ROWS * (2 * shape.seq_len * linear + others) == pytest.approx(flops_of(whole.gemms), rel=0.01)
    causal = 0.5 if recipe.model.task == "causal_lm" else 1.0
    attention = sum(n * found.attention_flops for n, found in parts)
    assert ROWS * attention == pytest.approx(causal * whole.attention, rel=0.01)
    moved = sum(n * found.moved(ROWS) for n, found in parts)
    assert moved == pytest.approx(whole.moved + 4.5 * whole.fresh, rel=0.05)
    assert sum(n * found.operations for n, found in parts) == pytest.approx(whole.operations, rel=0.1)
    counted = sum(p.numel() for p in build_model(recipe.model, 2, device="meta").parameters())
    assert shape.num_parameters == counted


@pytest.mark.parametrize("name", ["mamba2", "gpt_oss", "falcon_h1"])
def test_documents_that_run_as_rows_are_not_known(name, tmp_path):
    with pytest.raises(Untraceable, match="document masks"):
        traced(recipe_of(FAMILIES[name], tmp_path))
    assert (
        DOCUMENTS_AS_ROWS in make_plan(recipe_of(FAMILIES[name], tmp_path), VOCAB, MACHINE, make_rates()).shape.unknown
    )


def test_a_step_that_is_too_long_is_not_known(tmp_path, monkeypatch):
    monkeypatch.setattr(model_trace, "LIMIT", 50)
    plan = make_plan(recipe_of(FAMILIES["llama"], tmp_path), VOCAB, MACHINE, make_rates())
    assert plan.state == "not known"
    assert "more than 50 operations" in plan.shape.unknown


def test_every_way_to_keep_less_is_in_the_trace(tmp_path):
    kinds = ("none", "selective", "matmuls", "attention", "full")
    found = [traced(recipe_of(FAMILIES["llama"], tmp_path, train={"activation_checkpoint": kind})) for kind in kinds]
    kept = [one.kept for one in found]
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == len(kept)
    operations = [one.operations for one in found]
    assert operations[0] == min(operations)
    for one in found:
        assert one.backward >= one.kept
        assert flops_of(one.gemms) == flops_of(found[0].gemms)


@pytest.mark.parametrize(
    "model_type", ["llama", "gemma2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("cohere", "granite"))]
)
def test_a_head_that_does_more_than_multiply_holds_all_its_logits(model_type, tmp_path):
    family = replace(FAMILIES["llama"], config=FAMILIES["llama"].config | {"model_type": model_type})
    found = traced(recipe_of(family, tmp_path))
    assert found.plain_head == (model_type == "llama")
    if model_type != "llama":
        assert found.peak > 2 * 4 * ROWS * LENGTH * VOCAB


def test_gradients_count_once(tmp_path):
    """A first micro-batch makes all gradients; a later one adds to them, and makes one at a time."""
    found = traced(recipe_of(FAMILIES["llama"], tmp_path))
    assert found.passing < found.backward
    plans = [
        make_plan(recipe_of(FAMILIES["llama"], tmp_path, train={"global_batch_size": size}), VOCAB, AMD, make_rates())
        for size in (ROWS, 2 * ROWS)
    ]
    one, two = (plan.tracked["backward"] for plan in plans)
    assert two["gradients"] == 4 * plans[1].shape.num_parameters
    assert sum(two.values()) > sum(one.values())


def test_free_pages_are_those_of_the_kind_of_cpu():
    amx = replace(MACHINE, cpu_features=frozenset({"amx_bf16", "avx512_bf16"}))
    assert [free_pages(machine, 2) for machine in (AMD, amx, MACHINE, make_machine(device="cuda"))] == [
        0.3,
        0.65,
        1.3,
        0,
    ]
    assert free_pages(MACHINE, 4) == free_pages(AMD, 4) == 0.3


def test_a_trace_leaves_the_model_as_it_was(tmp_path):
    recipe = recipe_of(FAMILIES["mixtral"], tmp_path)
    model = build_model(recipe.model, 2, device="meta")
    before = copy.deepcopy(model.state_dict())
    trace_model(model, (), recipe, Policy.from_section(recipe.precision, "cpu"), MACHINE, ROWS)
    assert all(p.is_meta for p in model.parameters())
    assert list(model.state_dict()) == list(before)
    assert not any(module._forward_hooks for module in model.modules() if isinstance(module, nn.Linear))


ADAPTERS = {"rank": 4, "alpha": 8.0}
LONGER_SHARED = [
    ("llama", "hybrid", {}),
    ("llama", "fp8_tile", ADAPTERS),
    ("mixtral", "fp8_tile", {}),
    ("gpt2", "bf16_mixed", {}),
    ("vit", "fp32", {}),
]
SHARED = [*(pytest.param(*case, marks=pytest.mark.slow) for case in LONGER_SHARED)]


@pytest.mark.parametrize(("name", "mode", "lora"), SHARED)
def test_a_conversion_that_several_traces_share_changes_no_number(name, mode, lora, tmp_path):
    """Against a conversion for each: to the byte and the FLOP, with all parts of a layer measured at once or alone."""
    recipe = recipe_of(FAMILIES[name], tmp_path, precision={"mode": mode}, lora=lora)
    skeleton, policy = skeleton_of(recipe, VOCAB), Policy.from_section(recipe.precision, "cpu")
    args = skeleton.model, skeleton.names, recipe, policy, AMD
    calls = ModelCalls()
    shared = Tracer(*args, calls)
    one, two = shared.trace(1, Measures.MEMORY | Measures.FLOPS), shared.trace(2, Measures.MEMORY)
    again = Tracer(*args, calls).trace(2, Measures.TRAFFIC)
    fresh = [trace_model(*args, rows) for rows in (1, 2)]
    empty = {"layers": None}
    assert [replace(found, **empty) for found in (one, two, again)] == [
        replace(found, **empty) for found in (*fresh, fresh[1])
    ]
    assert (one.layers.memory, one.layers.flops) == (fresh[0].layers.memory, fresh[0].layers.flops)
    assert (two.layers.memory, two.layers.flops) == (fresh[1].layers.memory, ())
    assert (again.layers.memory, again.layers.traffic) == ((), fresh[1].layers.traffic)
    assert len(fresh[0].layers.traffic) == len(skeleton.names)
