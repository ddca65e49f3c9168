"""`attention = "linear"`: layers with a state in the place of keys, alone and beside softmax attention."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models.shapes import KERNELS, SHAPES, make_batch
from tests.models.test_activation_bytes import TOKENS, AliveStorages
from tests.models.test_cache import ids_of
from tests.models.test_window import packed
from tests.optim.test_citizen import assert_in_words
from tests.planner.rates import make_machine, make_plan, make_rates, make_recipe
from tests.training.test_layer_major_step import executor, steps, worst
from tilewright.compress.gguf.architecture import why_no_shape
from tilewright.compress.graph.trace import why_no_graph
from tilewright.compress.prune.unit_kinds import Whole, counts
from tilewright.core.config.load import load_recipe
from tilewright.core.errors import CheckpointError, ConfigError
from tilewright.models.build import init_weights
from tilewright.models.continued_rows import RowBatch
from tilewright.models.decoder.activation_bytes import Storage, layer_bytes, weight_copy_bytes
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.models.decoder.flops import count_flops, count_parameters
from tilewright.models.decoder.layers import rope_angles
from tilewright.ops.base.documents import STARTS, document_starts
from tilewright.optim.adam import DeepSeekAdam
from tilewright.optim.clip import GradClip
from tilewright.optim.param_groups import decay_groups
from tilewright.parallel.inside.tensor.matrix_cuts import check_cuts
from tilewright.planner.model.layer_classes import ShapeFinder
from tilewright.precision.convert import convert
from tilewright.training.executor.standard import StandardExecutor

LINEAR = replace(SHAPES["gqa"], attention="linear")


def mixed(name="gqa"):
    """Two layers of which the first is linear."""
    shape = SHAPES[name].shape
    return replace(SHAPES[name], layers=(replace(shape, attention="linear"), shape))


def decoder(config):
    model = Decoder(config, KERNELS)
    init_weights(model, 0)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(4.0) if param.dim() > 1 else param.add_(0.1)
    return model


CONFIGS = {"linear": LINEAR, "gqa": mixed(), "mla": mixed("mla")}


@pytest.mark.parametrize("name", CONFIGS)
def test_documents_of_a_row_are_those_of_rows_of_their_own(name):
    model = decoder(CONFIGS[name])
    batch, rows = packed(40, 33)
    alone = sum(model.loss(row).loss_sum.item() for row in rows)
    for more in ({}, {STARTS: document_starts(batch["segments"])}):
        assert model.loss(batch | more).loss_sum.item() == pytest.approx(alone, rel=1e-5)


@settings(max_examples=12, deadline=None)
@given(
    name=st.sampled_from([*CONFIGS]), seed=st.integers(0, 99),
    sizes=st.lists(st.one_of(st.just(1), st.integers(1, 70)), min_size=1, max_size=6),
)  # fmt: skip
def test_a_cached_row_in_any_pieces_is_the_whole_row(name, seed, sizes):
    model = decoder(CONFIGS[name]).eval()
    ids, end = ids_of(2, sum(sizes), seed), 0
    cache = model.new_cache(2, sum(sizes))
    with torch.no_grad():
        whole = model(ids)
    for size in sizes:
        found = model.next_token_logits(ids[:, end : end + size], cache)
        end += size
        torch.testing.assert_close(found, whole[:, end - 1], rtol=1e-3, atol=1e-3)


def test_a_pass_that_fails_leaves_the_state_as_it_was_and_rows_join():
    model, ids = decoder(LINEAR).eval(), ids_of(1, 20)
    cache = model.new_cache(1, 20)
    model.next_token_logits(ids[:, :7], cache)

    def fails(*_):
        raise MemoryError

    handle = model.blocks[-1].mlp.register_forward_pre_hook(fails)
    for _ in range(2):
        with pytest.raises(MemoryError):
            model.next_token_logits(ids[:, 7:9] + 1, cache)
    handle.remove()
    found = model.next_token_logits(ids[:, 7:9], cache)
    torch.testing.assert_close(found, model.next_token_logits(ids[:, :9]), rtol=1e-4, atol=1e-4)
    rows = RowBatch(model, torch.device("cpu"), width=3, chunk=4)
    first, second = rows.begin(list(range(1, 12)), 30), rows.begin([3, 4], 30)
    for row in (first, second):
        while rows.prefill(row) is None:
            pass
    size = first.cache.num_bytes
    for token in range(20, 30):
        logits = rows.step([first, second], [token, token + 1])
    assert first.cache.num_bytes == size, "it does not grow"
    for row, mine in zip((first, second), logits, strict=True):
        with torch.no_grad():
            torch.testing.assert_close(mine, model.next_token_logits(torch.tensor([row.ids]))[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["linear", "mla"])
def test_both_executors_make_the_same_weights(name):
    ours, theirs = decoder(CONFIGS[name]).train(), decoder(CONFIGS[name]).train()
    run = executor(ours)
    plain = StandardExecutor(theirs, DeepSeekAdam(decay_groups(theirs, 0.1)), clip=GradClip(0.0))
    for microbatches in steps(2):
        assert run.step(microbatches, 1e-3).loss == pytest.approx(plain.step(microbatches, 1e-3).loss, rel=1e-6)
    assert worst(ours, theirs)[0] == 0.0, worst(ours, theirs)


@pytest.mark.parametrize("mode", ["bf16_mixed", "fp8_tile", "hybrid"])
def test_precision_modes_are_near_fp32(mode):
    batch = make_batch()
    want = decoder(LINEAR).loss(batch).loss_sum
    model = convert(decoder(LINEAR), mode, kernels=KERNELS)
    out = model.loss(batch)
    out.loss_sum.backward()
    assert (out.loss_sum - want).abs() < (0.05 if mode == "fp8_tile" else 0.02) * want
    assert all(param.grad is not None and param.grad.isfinite().all() for param in model.parameters())


@pytest.mark.parametrize("mode", ["none", "selective", "matmuls", "attention", "full"])
@pytest.mark.parametrize(("policy", "size"), [("fp32", 4), ("bf16_mixed", 2)])
def test_counts_are_those_of_the_modules(mode, policy, size):
    model = convert(Decoder(LINEAR, KERNELS), policy)
    init_weights(model, 0)
    block = model.blocks[0]
    assert count_parameters(LINEAR).layers[0] == sum(param.numel() for param in block.parameters())
    matrices = sum(param.numel() for param in block.parameters() if param.dim() == 2)
    assert count_flops(LINEAR, 16).layers[0] == 2 * matrices
    assert count_flops(LINEAR, 16).attention == count_flops(LINEAR, 512).attention
    model.activation_checkpoint = mode
    x = torch.randn(2, 32, LINEAR.dim, dtype=model.residual_dtype, requires_grad=True)
    angles = rope_angles(torch.arange(32)[None], LINEAR.rope_dim, 1e4)
    with AliveStorages() as storages:
        out = block(x * 1, *angles, None)
    kept = storages.alive_bytes() - sum(t.nbytes for t in out if t is not None)
    storage = Storage(size, size, compiled=False)
    assert kept == TOKENS * layer_bytes(LINEAR, 0, mode, storage) + weight_copy_bytes(LINEAR, 0, mode, storage)


def test_a_plan_has_a_class_for_them():
    layers = ({"repeat": 3, "attention": "linear"}, {})
    recipe = make_recipe(model={"num_layers": 8, "layers": layers}, data={"seq_len": 512})
    shape = ShapeFinder(512, make_machine()).find(recipe)
    assert [found.indices for found in shape.classes] == [(0, 1, 2, 4, 5, 6), (3, 7)]
    config = DecoderConfig.from_section(recipe.model, 512)
    assert shape.num_parameters == count_parameters(config).total
    assert shape.classes[0].mask == 0
    linear, softmax = (found.attention_flops for found in shape.classes)
    assert linear / softmax == pytest.approx(5 * 3 * 32 / (2 * 256.5))
    assert make_plan(recipe, 512, make_machine(), make_rates()).rows


def test_what_does_not_take_them_says_so(tmp_path):
    for config in (LINEAR, mixed()):
        model = decoder(config)
        with pytest.raises(CheckpointError, match=r"linear attention|layers of their own shape"):
            model.save_hf(tmp_path / "folder")
        assert "linear attention" in (why_no_graph(model) or "")
        assert "linear attention" in (why_no_shape(model, "causal_lm") or "")
        with pytest.raises(ConfigError, match="Linear attention"):
            check_cuts(model, 2, 1)
        assert isinstance(counts(config)["heads"], Whole)
    for settings_ in ({"model.attention": "linear"}, {"model.layers": '[{ attention = "linear" }, {}]'}):
        with pytest.raises(ConfigError) as caught:
            load_recipe(None, settings_ | {"checkpoint.export_hf": "true", "parallel.tp": "2"}, environ={})
        assert_in_words(caught.value, "Linear attention", "No Hugging Face layout")
    with pytest.raises(ConfigError) as caught:
        load_recipe(None, {"model.layers": '[{ attention = "mla" }, {}]'}, environ={})
    assert_in_words(caught.value, "two kinds of softmax attention")
    with pytest.raises(ConfigError, match="two kinds"):
        replace(LINEAR, attention="gqa", layers=(replace(LINEAR.shape, attention="mla"), LINEAR.shape))


def test_linear_layers_one_by_one_are_the_uniform_decoder():
    sizes = {"vocab_size": 61, "dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    listed = DecoderConfig.of(**sizes, layers=({"attention": "linear"},))
    assert listed.attention == "linear"
    assert not listed.layers
    assert listed == DecoderConfig.of(**sizes | {"num_kv_heads": 4}, attention="linear")


def test_settings_without_effect_are_no_part_of_the_shape():
    """So that a search may change some layers of such a decoder, and a recipe describes what it finds."""
    sizes = {"vocab_size": 61, "dim": 64, "num_layers": 2, "num_heads": 4, "attention": "linear"}
    config = DecoderConfig.of(**sizes, num_kv_heads=3, sliding_window=8)
    assert config == DecoderConfig.of(**sizes)
    made = config.with_layers([replace(config.shape, ffn_dim=32), config.shape])
    assert DecoderConfig.of(61, **made.section_values()) == made
