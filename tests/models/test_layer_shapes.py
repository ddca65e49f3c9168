"""Layers of their own shape (`model.layers`): written one by one as the uniform decoder, mixed as what they say."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.draws import examples
from tests.models.shapes import KERNELS, MIXED, SHAPES, make_batch, make_decoder
from tests.optim.test_citizen import assert_in_words
from tests.planner.rates import make_machine, make_plan, make_rates, make_recipe
from tests.training.test_layer_major_step import executor, steps, worst
from tilewright.compress.prune.unit_kinds import Whole, counts
from tilewright.core.config.change_recipe import changed
from tilewright.core.config.load import load_recipe, write_run_toml
from tilewright.core.errors import CheckpointError, ConfigError
from tilewright.models.build import init_weights
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.models.decoder.flops import count_flops, count_parameters
from tilewright.optim.adam import DeepSeekAdam
from tilewright.optim.clip import GradClip
from tilewright.optim.param_groups import decay_groups
from tilewright.parallel.inside.tensor.matrix_cuts import check_cuts, config_on_rank
from tilewright.planner.advice.recipe_changes import of_all
from tilewright.planner.model.layer_classes import ShapeFinder
from tilewright.planner.simulate.mesh.setting_space import _cut
from tilewright.precision.convert import convert
from tilewright.training.executor.standard import StandardExecutor

BASE = {"vocab_size": 61, "dim": 64, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 96}


@pytest.mark.parametrize("name", ["gqa", "mla_q_rank", "deepseek"])
def test_equal_layers_written_one_by_one_have_the_bits_of_the_uniform_form(name):
    """Weights, loss, gradients, what a step makes of them, and the plan's numbers."""
    uniform = SHAPES[name]
    listed = replace(uniform, layers=uniform.shapes)
    losses, weights = [], []
    for config in (uniform, listed):
        model = convert(Decoder(config, KERNELS).train(), "bf16_mixed")
        init_weights(model, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for seed in range(2):
            out = model.loss(make_batch(seed=seed))
            out.loss_sum.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(out.loss_sum)
        weights.append(model.state_dict())
    assert torch.equal(losses[0], losses[2])
    assert torch.equal(losses[1], losses[3])
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    assert count_parameters(listed) == count_parameters(uniform)
    assert count_flops(listed, 16) == count_flops(uniform, 16)
    assert uniform.with_layers(listed.layers) == uniform


def test_a_list_of_one_shape_is_the_uniform_decoder():
    config = DecoderConfig.of(**BASE, num_layers=4, layers=({"num_heads": 2, "repeat": 2},))
    assert config == DecoderConfig.of(**BASE | {"num_heads": 2, "head_dim": 16}, num_layers=4)


@pytest.mark.parametrize("name", MIXED)
def test_both_executors_make_the_same_weights(name):
    ours, theirs = make_decoder(name).train(), make_decoder(name).train()
    run = executor(ours)
    plain = StandardExecutor(theirs, DeepSeekAdam(decay_groups(theirs, 0.1)), clip=GradClip(0.0))
    for microbatches in steps(3):
        assert run.step(microbatches, 1e-3).loss == pytest.approx(plain.step(microbatches, 1e-3).loss, rel=1e-6)
    assert worst(ours, theirs)[0] == 0.0, worst(ours, theirs)


@pytest.mark.parametrize("mode", ["fp8_tile", "hybrid", "pure_fp16"])
@pytest.mark.parametrize("name", MIXED)
def test_precision_modes_are_near_fp32(name, mode):
    batch = make_batch()
    want = make_decoder(name).loss(batch).loss_sum
    model = convert(make_decoder(name), mode, kernels=KERNELS)
    out = model.loss(batch)
    out.loss_sum.backward()
    assert (out.loss_sum - want).abs() < (0.05 if mode == "fp8_tile" else 0.01) * want
    assert all(param.grad is not None and param.grad.isfinite().all() for param in model.parameters())


ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "num_heads": st.sampled_from([0, 2, 4, 6]),
        "num_kv_heads": st.sampled_from([0, 1, 2]),
        "ffn_dim": st.sampled_from([0, 24, 96]),
        "sliding_window": st.sampled_from([0, 1, 3]),
        "repeat": st.integers(1, 3),
    },
)


@examples(40)
@given(entries=st.lists(ENTRIES, min_size=1, max_size=4), times=st.integers(1, 2), seq_len=st.integers(1, 9))
def test_any_list_is_a_decoder_or_an_error_of_four_parts(entries, times, seq_len):
    length = times * sum(entry.get("repeat", 1) for entry in entries)
    run = [entry for _ in range(times) for entry in entries for _ in range(entry.get("repeat", 1))]
    shapes = [(entry.get("num_heads", 4), entry.get("num_kv_heads", 2), entry.get("ffn_dim", 96)) for entry in run]
    bad = any(heads % (groups or 1) or heads + ffn_dim == 0 for heads, groups, ffn_dim in shapes)
    if bad or not any(heads for heads, *_ in shapes):
        with pytest.raises(ConfigError) as caught:
            DecoderConfig.of(**BASE, num_layers=length, layers=tuple(entries))
        assert_in_words(caught.value, "layer")
        return
    config = DecoderConfig.of(**BASE, num_layers=length, layers=tuple(entries))
    with torch.device("meta"):
        model = Decoder(config, KERNELS)
    for layer, (entry, block) in enumerate(zip(run, model.blocks, strict=True)):
        shape = config.at(layer)
        heads, width = entry.get("num_heads", 4), entry.get("ffn_dim", 96)
        assert (shape.num_heads, shape.ffn_dim) == (heads, width)
        assert (block.has_attention, block.has_mlp) == (heads > 0, width > 0)
        assert count_parameters(config).layers[layer] == sum(param.numel() for param in block.parameters())
        assert count_flops(config, seq_len).layers[layer] == 2 * sum(
            param.numel() for param in block.parameters() if param.dim() == 2
        )
        seen = sum(min(place + 1, entry.get("sliding_window") or seq_len) for place in range(seq_len))
        assert count_flops(config, seq_len).attention[layer] == pytest.approx(2 * heads * 32 * seen / seq_len)


def test_everything_wrong_in_a_list_is_said_at_once():
    layers = "[{ num_kv_heads = 3 }, { num_heads = 0, ffn_dim = 0 }, { kv_lora_rank = 8 }]"
    with pytest.raises(ConfigError) as caught:
        load_recipe(None, {"model.layers": layers, "checkpoint.export_hf": "true", "train.steps": "-1"}, environ={})
    problems = {problem.what: problem for problem in caught.value.problems}
    assert len(problems) == 5
    assert all(problem.got and problem.need for problem in problems.values())
    assert_in_words(caught.value, "layers 0, 3: num_heads 4, num_kv_heads 3", "layers 1, 4", "ranks in 1 entries")


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ("[{ repeat = 4 }]", ("model.num_layers = 6", "describes 4", "model.num_layers = 8")),
        ("[{ repeat = 7, num_heads = 2 }]", ("describes 7", "model.num_layers = 7")),
        ("[{ num_heads = 0 }]", ("No layer has attention", "all 6 layers")),
    ],
)  # fmt: skip
def test_a_bad_list_is_refused_in_words(layers, words):
    with pytest.raises(ConfigError) as caught:
        load_recipe(None, {"model.layers": layers}, environ={})
    assert_in_words(caught.value, *words)


@pytest.mark.parametrize("layers", ["[{ heads = 3 }]", "[{ num_heads = -1 }]", "[{ repeat = 0 }]", "7"])
def test_what_is_no_list_of_layers_is_refused(layers):
    with pytest.raises(ConfigError, match=r"model\.layers[\s\S]*a list of tables"):
        load_recipe(None, {"model.layers": layers}, environ={})


def test_a_python_caller_hears_of_a_list_of_the_wrong_length():
    config = SHAPES["gqa"]
    with pytest.raises(ConfigError) as caught:
        replace(config, layers=(config.shape,))
    assert_in_words(caught.value, "1 shapes, num_layers 2", "num_layers = 1")
    with pytest.raises(ConfigError) as caught:
        DecoderConfig.of(**BASE, num_layers=2, layers=({"repeat": 2}, {"repeat": 2}))
    assert_in_words(caught.value, "describes 4")


def test_run_toml_holds_the_list(tmp_path):
    text = "[{ repeat = 2, num_heads = 2 }, { ffn_dim = 0 }]"
    loaded = load_recipe(None, {"model.layers": text}, environ={})
    write_run_toml(loaded, tmp_path / "run.toml")
    assert load_recipe(tmp_path / "run.toml", environ={}).recipe == loaded.recipe


def test_a_plan_has_a_class_for_each_shape():
    layers = ({"repeat": 2, "ffn_dim": 64}, {"num_heads": 0}, {"ffn_dim": 0})
    recipe = make_recipe(model={"num_layers": 8, "layers": layers})
    shape = ShapeFinder(512, make_machine()).find(recipe)
    assert [found.indices for found in shape.classes] == [(0, 1, 4, 5), (2, 6), (3, 7)]
    assert len({found.name for found in shape.classes}) == 3
    wide, bare, narrow = shape.classes
    assert bare.attention_flops == 0 < wide.attention_flops
    assert narrow.mlp_flops == 0 < bare.mlp_flops
    config = DecoderConfig.from_section(recipe.model, 512)
    assert shape.num_parameters == count_parameters(config).total


def test_a_plan_prices_each_layer_by_its_own_class():
    recipe = make_recipe(model={"num_layers": 4, "layers": ({"ffn_dim": 64}, {"ffn_dim": 1024})})
    plan = make_plan(recipe, 512, make_machine(), make_rates())
    narrow, wide = plan.rows[:2]  # behind them is what is around the layers
    assert narrow.name != wide.name
    seconds = [sum(one.seconds for one in row.operations) for row in (narrow, wide)]
    assert seconds[1] > 2 * seconds[0]


def test_ranks_cut_each_layer():
    config = DecoderConfig.of(
        **BASE | {"num_kv_heads": 4}, num_layers=2, layers=({"ffn_dim": 32}, {"num_heads": 2, "num_kv_heads": 2})
    )
    on_rank = config_on_rank(config, 2, 1)
    assert [(shape.num_heads, shape.num_kv_heads, shape.ffn_dim) for shape in on_rank.shapes] == [
        (2, 2, 16),
        (1, 1, 48),
    ]
    assert _cut(config)[0] == 2  # heads and widths of all layers
    with pytest.raises(ConfigError) as caught:
        check_cuts(Decoder(config, KERNELS), 4, 1)
    assert_in_words(caught.value, "parallel.tp = 4, model.layers: num_heads = 2")
    with pytest.raises(ConfigError) as caught:
        load_recipe(None, {"parallel.tp": "4", "model.layers": "[{ num_heads = 2 }, {}]"}, environ={})
    assert_in_words(caught.value, "model.layers: num_heads = 2")


def test_no_folder_of_hugging_face_holds_them(tmp_path):
    with pytest.raises(CheckpointError) as caught:
        make_decoder("own_gqa").save_hf(tmp_path / "folder")
    assert_in_words(caught.value, "layers of their own shape", "checkpoint.export_hf = false")
    assert not (tmp_path / "folder").exists()


def test_layers_can_be_cut_and_their_parts_are_left_whole():
    found = counts(MIXED["own_gqa"])
    assert isinstance(found["ffn"], Whole)
    assert isinstance(found["heads"], Whole)
    assert found["layers"].fewer([0, 2]).layers == (MIXED["own_gqa"].layers[0], MIXED["own_gqa"].layers[2])


def test_advice_halves_no_listed_layers():
    recipe = make_recipe(model={"num_layers": 8, "layers": ({}, {"ffn_dim": 64})})
    for one, halved in ((recipe, False), (changed(recipe, {"model.layers": ()}), True)):
        assert any("model.num_layers" in change for change, _ in of_all(one)) == halved
