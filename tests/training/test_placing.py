"""The standard executor does with each layer what its memory plan says, and another thing between steps: same bits."""

import copy
import itertools
import random
from dataclasses import replace

import pytest
import torch

from tests.models.shapes import KERNELS, make_decoder
from tests.models.test_hf_models import make as make_hf
from tests.training.test_layer_major_hf import steps as hf_steps
from tests.training.test_layer_major_step import steps
from tests.training.tiny import tiny, write_text
from tilewright.core.errors import ConfigError
from tilewright.core.memory_plan import LayerMemory, MemoryPlan, memory_plan_of
from tilewright.models.build import init_weights
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.ops.backends.ref import math as ref
from tilewright.optim.adam import DeepSeekAdam
from tilewright.optim.clip import GradClip
from tilewright.optim.param_groups import decay_groups
from tilewright.precision.convert import convert
from tilewright.training import assemble
from tilewright.training.executor.activation_policy import ActivationPolicy, checkpoint_layers, cut_layers
from tilewright.training.executor.standard import StandardExecutor

KINDS = ("keep", "selective", "matmuls", "attention", "recompute")
LR = 1e-3


def memory_plan(*kinds, **options):
    return MemoryPlan(layers=tuple(LayerMemory(activations=kind, **options) for kind in kinds))


def standard(model, given):
    optimizer = DeepSeekAdam(decay_groups(model, 0.1), betas=(0.9, 0.95))
    return StandardExecutor(model, optimizer, clip=GradClip(0.5), policy=ActivationPolicy(model, given))


def outcome(model, made, given, changes=()):
    executor, results = standard(model, given), []
    for number, microbatches in enumerate(made):
        if number < len(changes):
            executor.apply_memory_plan(changes[number])
            assert executor.memory_plan == changes[number]
        results.append(executor.step(microbatches, LR).loss)
    return results, [param.detach().clone() for param in model.parameters()]


def assert_same(one, other):
    assert one[0] == other[0]
    assert all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


def make_model(name, mode="fp32"):
    torch.manual_seed(5)
    model = (make_decoder if name in ("gqa", "deepseek") else make_hf)(name).train()
    convert(model, mode)
    made = steps(2) if isinstance(model, Decoder) else hf_steps(model, 2)
    torch.manual_seed(6)
    return model, made


EVERY = tuple(itertools.product(KINDS, KINDS))
NEXT = tuple((kind, KINDS[(at + more) % len(KINDS)]) for at, kind in enumerate(KINDS) for more in (0, 1))
"""Mixes of two layers: each kind in either of them, beside itself and beside another one."""
LONGER = (
    ("llama", "fp32", NEXT), ("gpt2", "bf16_mixed", NEXT), ("gqa", "fp8_tile", EVERY), ("deepseek", "bf16_mixed", EVERY)
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "mode", "mixes"),
    [
        pytest.param("gqa", "fp32", EVERY, marks=pytest.mark.slow),
        pytest.param("gqa", "fp8_tile", NEXT, marks=pytest.mark.slow),
        ("deepseek", "bf16_mixed", NEXT),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in LONGER),
    ],
)
def test_any_mix_changes_no_number(name, mode, mixes):
    """gpt2 drops out. Dense layers and experts."""
    want = None
    for kinds in mixes:
        model, made = make_model(name, mode)
        got = outcome(model, made, memory_plan(*kinds)), torch.get_rng_state()
        want = want or got
        assert_same(got[0], want[0])
        assert torch.equal(got[1], want[1])
    assert len(set(want[0][0])) == 2, "it learned"


@pytest.mark.parametrize(
    "name", ["deepseek", "llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gqa", "gpt2"))]
)
def test_a_change_between_steps_changes_no_number(name):
    model, _ = make_model(name)
    made = steps(6) if isinstance(model, Decoder) else hf_steps(model, 6)
    want = outcome(model, made, memory_plan("keep", "keep"))
    draw = random.Random(name)
    changes = [memory_plan(draw.choice(KINDS), draw.choice(KINDS)) for _ in made]
    model, _ = make_model(name)
    assert_same(outcome(model, made, memory_plan("recompute", "keep"), changes), want)


@pytest.mark.parametrize("name", ["gqa", "llama"])
def test_layers_are_computed_again_where_it_says_so(name):
    """Calls of each layer's MLP by one micro-batch."""
    calls = {}
    for kinds in itertools.product(KINDS, KINDS):
        model, made = make_model(name)
        checkpoint_layers(model, memory_plan(*kinds))
        model.loss(made[0][0])  # Hugging Face models are tried out with their first batch
        told = calls[kinds] = [0, 0]
        for index, layer in enumerate(model.layers):
            layer.mlp.register_forward_pre_hook(lambda *_, i=index, told=told: told.__setitem__(i, told[i] + 1))
        model.loss(made[0][0]).loss_sum.backward()
    assert calls == {kinds: [1 if kind == "keep" else 2 for kind in kinds] for kinds in calls}


def saved_bytes(model, batch):
    """Bytes that autograd keeps for backward, each storage once, by the layer that was running."""
    held, running = {}, [None]
    for index, layer in enumerate(model.layers):
        layer.register_forward_pre_hook(lambda *_, i=index: running.__setitem__(0, i))
        layer.register_forward_hook(lambda *_: running.__setitem__(0, None))
    parameters = {param.untyped_storage().data_ptr() for param in model.parameters()}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in parameters:
            held.setdefault(running[0], {})[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model.loss(batch)
    del out
    return [sum(held.get(index, {}).values()) for index in range(len(model.layers))]


def test_what_is_kept_is_less_where_it_says_so():
    model, made = make_model("gqa")
    checkpoint_layers(model, memory_plan("keep", "keep"))
    all_of_it = saved_bytes(model, made[0][0])
    checkpoint_layers(model, memory_plan("keep", "recompute"))
    assert saved_bytes(model, made[0][0])[1] < 0.2 * all_of_it[1]
    checkpoint_layers(model, memory_plan("recompute", "keep"))
    assert saved_bytes(model, made[0][0])[0] < 0.2 * all_of_it[0]


@pytest.mark.slow
def test_compiled_layers_of_a_mode_share_a_graph():
    """Four layers: one graph a mode, none more when modes move about, and the numbers of uncompiled modes."""
    shape = DecoderConfig.of(vocab_size=61, dim=64, num_heads=4, num_layers=4)
    want, made = None, steps(2)
    for kinds in (("keep",) * 4, ("keep", "recompute", "attention", "selective")):
        torch._dynamo.reset()
        model = Decoder(shape, KERNELS)
        init_weights(model, 0)
        model.train().compile_blocks()
        executor = standard(model, memory_plan(*kinds))
        torch._dynamo.utils.counters.clear()
        model.blocks[0](torch.randn(3, 16, 64), torch.ones(1, 16, 8), torch.zeros(1, 16, 8), None)
        graphs = torch._dynamo.utils.counters["stats"]
        for block in model.blocks:
            block(torch.randn(3, 16, 64), torch.ones(1, 16, 8), torch.zeros(1, 16, 8), None)
        assert graphs["unique_graphs"] == len(set(kinds))
        losses = []
        for number, microbatches in enumerate(made):
            losses.append(executor.step(microbatches[:1], LR).loss)
            if number == 0:
                executor.apply_memory_plan(memory_plan(*reversed(kinds)))
        want = want or losses
        assert losses == want


# ---- parts of MLPs and attention ----


def test_each_layer_is_cut_as_it_says(monkeypatch):
    """Query rows of each layer's attention, tokens of each call of its MLP; the loss up to the order of sums."""
    batch, rows, tokens = steps(1)[0][0], [], []
    model, attention, swiglu = make_decoder("gqa").double(), type(KERNELS).attention, ref.swiglu
    whole = model.loss(batch).loss_sum.item()
    layers = (LayerMemory(mlp_chunks=3, attention_block=5), LayerMemory())
    cut_layers(model, MemoryPlan(layers=layers), compile=False)
    assert model.attention_blocks == (5, 0)
    monkeypatch.setattr(type(KERNELS), "attention", lambda *a, **k: (rows.append(k["block"]), attention(*a, **k))[1])
    monkeypatch.setattr(ref, "swiglu", lambda g, u: (tokens.append(g[..., 0].numel()), swiglu(g, u))[1])
    assert model.loss(batch).loss_sum.item() == pytest.approx(whole, rel=1e-12)
    assert rows == [5, 0]
    assert tokens[-4:] == [16, 16, 16, 48], "three tiles of 48 tokens, then all of them"
    assert model.notes == []


def test_parts_of_foreign_layers():
    whole = make_hf("llama").train()
    model = copy.deepcopy(whole)
    cut_layers(model, MemoryPlan(layers=(LayerMemory(), LayerMemory(mlp_chunks=2))), compile=False)
    assert type(model.layers[0].mlp) is type(whole.layers[0].mlp)
    assert type(model.layers[1].mlp) is not type(whole.layers[1].mlp)
    batch = hf_steps(whole, 1)[0][0]
    for each in (whole, model):
        each.loss(batch).loss_sum.backward()
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigError, match="Attention blocks are not supported by this model"):
        cut_layers(model, MemoryPlan.uniform(2, attention_block=8), compile=False)


# ---- what cannot be done ----


def refused(executor, given, says):
    before = executor.memory_plan
    with pytest.raises(ConfigError, match=says):
        executor.apply_memory_plan(given)
    assert executor.memory_plan == before


def test_what_cannot_be_changed():
    executor = standard(make_decoder("gqa"), memory_plan("keep", "recompute"))
    refused(executor, memory_plan("keep"), "another model")
    refused(executor, memory_plan("keep", "keep", states="host"), "Offloading needs the layer-major executor")
    refused(executor, replace(memory_plan("keep", "keep"), head=LayerMemory(parameters="disk")), "Offloading needs")
    refused(executor, memory_plan("keep", "keep", mlp_chunks=2), "cannot change during a run")
    model = make_decoder("gqa")
    model.checkpoint_inputs = "fp8"
    executor = standard(model, memory_plan("keep", "recompute"))
    refused(executor, memory_plan("recompute", "recompute"), "FP8 layer inputs")
    executor.apply_memory_plan(memory_plan("selective", "recompute"))


def test_a_model_without_a_list_of_layers_does_the_same_everywhere():
    model = make_hf("resnet")
    assert model.layers == ()
    executor = standard(model, memory_plan("keep", "keep", "keep"))
    assert executor.memory_plan == memory_plan("keep", "keep", "keep")
    refused(executor, memory_plan("keep", "keep", "recompute"), "Per-layer memory plans")
    refused(executor, memory_plan("recompute", "recompute", "recompute"), "Activation checkpointing is not supported")


def test_modes_by_layer_are_checked():
    model = make_decoder("gqa")
    model.checkpointing = ("none", "full")
    with pytest.raises(ValueError, match="layers keep different things"):
        _ = model.activation_checkpoint
    with pytest.raises(ValueError, match="2 layers, got 1"):
        model.checkpointing = ("none",)
    with pytest.raises(ValueError, match="one of none, selective, matmuls, attention, full"):
        model.checkpointing = ("none", "all")
    assert model.checkpointing == ("none", "full")


# ---- in a run ----


@pytest.mark.parametrize("executor", ["standard", "layer_major"])
def test_a_run_is_built_as_its_placement_says(executor, tmp_path):
    write_text(tmp_path / "text")
    want, made = None, []
    for number in range(2):
        loaded = tiny(tmp_path, tmp_path, precision__mode="fp32", memory__executor=executor)
        setup = assemble.set_up(loaded)
        given = memory_plan("recompute", "keep") if number else None
        if number and executor == "layer_major":
            given = replace(given, layers=(replace(given.layers[0], states="disk", inputs="disk"), given.layers[1]))
        parts = assemble.build(setup, fresh=True, memory_plan=given)
        assert parts.executor.memory_plan == (given or memory_plan_of(loaded.recipe, 2))
        made = made or [parts.stream.next_step() for _ in range(3)]
        losses = [parts.executor.step(microbatches, LR).loss for microbatches in made]
        parts.close()
        want = want or losses
        assert losses == want


def test_a_recipe_without_a_plan_is_a_uniform_placement(tmp_path):
    write_text(tmp_path / "text")
    kinds = {"none": "keep", "selective": "selective", "matmuls": "matmuls", "attention": "attention"}
    kinds["full"] = "recompute"
    for mode, kind in kinds.items():
        recipe = tiny(tmp_path, tmp_path, train__activation_checkpoint=mode, memory__mlp_chunks=2).recipe
        assert memory_plan_of(recipe, 3) == MemoryPlan.uniform(3, activations=kind, mlp_chunks=2)
    options = {
        "memory__executor": "layer_major",
        "memory__offload_optimizer": "disk",
        "memory__offload_activations": "cpu",
    }
    recipe = tiny(tmp_path, tmp_path, **options, memory__attention_block=8).recipe
    assert memory_plan_of(recipe, 2) == MemoryPlan.uniform(
        2, states="disk", inputs="host", activations="recompute", attention_block=8
    )
