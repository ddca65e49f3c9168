"""Traces of foreign models on fake tensors, against the same models on real ones."""

import copy
import gc
import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.plan.families import FAMILIES, VOCAB, Family
from tests.plan.rates import make_machine, make_rates, make_recipe
from tilewright.models.build import build_model, init_weights
from tilewright.ops.kernels import Kernels
from tilewright.plan import trace
from tilewright.plan.cost import make_plan
from tilewright.plan.fake_model import KERNELS
from tilewright.plan.live_bytes import LiveBytes
from tilewright.plan.trace import DOCUMENTS_AS_ROWS, trace_model
from tilewright.plan.traced import free_pages, traced_footprint
from tilewright.plan.workload import Planner
from tilewright.precision.convert import convert
from tilewright.precision.policy import Policy

transformers = pytest.importorskip("transformers")
MACHINE = make_machine()
AMD = replace(MACHINE, cpu_features=frozenset({"avx512_bf16"}))
ROWS, LENGTH = 2, 64


def recipe_of(family: Family, folder, **sections):
    (folder / "config.json").write_text(json.dumps(family.config))
    base = {
        "model": {"kind": "hf", "path": str(folder), "task": family.task},
        "data": {"seq_len": LENGTH, "vocab_size": VOCAB, "image_size": family.image_size or 64},
        "train": {"micro_batch": ROWS, "batch_size": ROWS},
    }
    return make_recipe(**{name: base.get(name, {}) | sections.get(name, {}) for name in {*base, *sections}})


def traced(recipe, machine=MACHINE):
    return trace_model(build_model(recipe.model, 2, device="meta"), recipe, machine, ROWS)


class Real:
    """A forward and a backward pass of the model on real tensors, counted like a trace."""

    def __init__(self, recipe, documents) -> None:
        gc.collect()
        model = build_model(recipe.model, 2, Kernels(MACHINE), "cpu")
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


@pytest.mark.parametrize("name", ["llama", "opt", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "mamba2", "vit"])
def test_what_fake_tensors_say_is_what_real_ones_do(name, tmp_path):
    family = FAMILIES[name]
    recipe = recipe_of(family, tmp_path)
    found = traced(recipe)
    as_rows = name in ("mamba2", "gpt_oss")
    assert found.trouble == (DOCUMENTS_AS_ROWS if as_rows else "")
    real = Real(recipe, "rows" if as_rows or name == "vit" else "positions")
    told = f"{name}: {found}"
    # Experts are taken to be equally busy; on few tokens some have no rows, and keep no weights in 16 bits.
    some_idle = name in ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")
    assert found.kept_bytes == pytest.approx(real.kept, rel=0.1 if some_idle else 0.05), told
    assert found.backward_bytes == pytest.approx(real.backward, rel=0.08), told
    assert found.moved_bytes == pytest.approx(real.moved, rel=0.25), told  # sums of gradients are made in place
    assert found.flops == pytest.approx(real.flops, rel=0.02), told


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_stacked_experts_are_counted_in_the_format_that_they_run_in(name, tmp_path):
    """As the policy's BF16, one GEMM for each expert, all of them equally busy."""
    recipe = recipe_of(FAMILIES[name], tmp_path)
    found = traced(recipe)
    experts = {
        kind: flops for kind, (_, flops) in found.gemms.items() if kind.dtype is torch.bfloat16 and not kind.module
    }
    model = build_model(recipe.model, 2, device="meta")
    stacked = [p for p in model.parameters() if p.dim() == 3]
    config = FAMILIES[name].config
    share = config["num_experts_per_tok"] / stacked[0].shape[0]
    expected = 2 * ROWS * LENGTH * share * sum(p.numel() for p in stacked)
    if name == "gpt_oss":  # its attention has sinks, which no fused kernel knows: two batched GEMMs a layer
        heads = config["num_attention_heads"] * config["head_dim"]
        expected += config["num_hidden_layers"] * 2 * 2 * ROWS * LENGTH**2 * heads
    assert sum(experts.values()) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mixtral", "deepseek_v3", "falcon_h1"])
def test_a_long_model_is_traced_by_kinds_of_layers(name, tmp_path, monkeypatch):
    recipe = recipe_of(FAMILIES[name], tmp_path)
    whole = traced(recipe)
    monkeypatch.setattr(trace, "WHOLE", 50)
    found = traced(recipe)
    assert found.trouble == (DOCUMENTS_AS_ROWS if name == "falcon_h1" else "")
    for what in ("kept_bytes", "peak_bytes", "backward_bytes", "moved_bytes", "operations", "flops", "attention_flops"):
        assert getattr(found, what) == pytest.approx(getattr(whole, what), rel=0.03), what
    names = {kind.module for kind in found.gemms}
    assert names <= {kind.module for kind in whole.gemms}
    monkeypatch.setattr(trace, "REDUCED", 50)
    plan = make_plan(recipe, VOCAB, MACHINE, make_rates())
    assert plan.state == "not known"
    assert "more than 50 operations" in plan.unknown


def test_every_way_to_keep_less_is_in_the_trace(tmp_path):
    kinds = ("none", "selective", "products", "attention", "full")
    found = [traced(recipe_of(FAMILIES["llama"], tmp_path, train={"activation_checkpoint": kind})) for kind in kinds]
    kept = [one.kept_bytes for one in found]
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == len(kept)
    operations = [one.operations for one in found]
    assert operations[0] == min(operations)
    for one in found:
        assert one.backward_bytes >= one.kept_bytes
        assert one.flops == found[0].flops


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "cohere", "granite"])
def test_a_head_that_does_more_than_multiply_holds_all_its_logits(model_type, tmp_path):
    family = replace(FAMILIES["llama"], config=FAMILIES["llama"].config | {"model_type": model_type})
    found = traced(recipe_of(family, tmp_path))
    assert not found.trouble
    if model_type == "llama":
        assert found.head == (ROWS * LENGTH, 320, VOCAB)
    else:
        assert found.head is None
        assert found.peak_bytes > 2 * 4 * ROWS * LENGTH * VOCAB


def test_gradients_count_once(tmp_path):
    """A first micro-batch makes all gradients; a later one adds to them, and makes one at a time."""
    family = FAMILIES["llama"]
    one, two = (
        Planner(VOCAB, AMD).workload(recipe_of(family, tmp_path, train={"batch_size": size}))
        for size in (ROWS, 2 * ROWS)
    )
    all_gradients = 4 * one.num_trainable
    assert one.trace.backward_bytes > all_gradients - 4 * VOCAB * 320
    assert two.trace.passing_bytes < one.trace.backward_bytes
    phases = [traced_footprint(work).phases["backward"] for work in (one, two)]
    assert all(owners["gradients"] == all_gradients for owners in phases)
    assert sum(phases[1].values()) > sum(phases[0].values())


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
    trace_model(model, recipe, MACHINE, ROWS)
    assert all(p.is_meta for p in model.parameters())
    assert list(model.state_dict()) == list(before)
    assert not any(module._forward_hooks for module in model.modules() if isinstance(module, nn.Linear))
