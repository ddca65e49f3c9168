"""`model.sliding_window`: training, cache, folders, plans and exports of layers that see the last positions alone."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models.shapes import KERNELS, SHAPES, load_decoder, make_batch
from tests.models.test_cache import ids_of
from tests.models.test_hf_io import FP32_DB, hf_logits, mistral
from tests.ops.compare import assert_snr
from tests.optim.test_citizen import assert_in_words
from tests.planner.rates import make_machine, make_plan, make_rates, make_recipe
from tilewright.core.config.load import load_recipe
from tilewright.core.errors import CheckpointError, ConfigError
from tilewright.models.build import init_weights
from tilewright.models.continued_rows import RowBatch
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.models.hf.load import load_hf
from tilewright.planner.model.layer_classes import ShapeFinder


def decoder(window, name="gqa"):
    config = replace(SHAPES[name], sliding_window=window)
    model = Decoder(config, KERNELS)
    init_weights(model, 0)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(4.0) if param.dim() > 1 else param.add_(0.1)
    return model


def packed(first, second):
    """A row of two documents, and each document as a row."""
    length = first + second
    ids = torch.randint(0, 61, (1, length), generator=torch.Generator().manual_seed(length))
    positions = torch.cat((torch.arange(first), torch.arange(second)))[None]
    batch = {"input_ids": ids, "labels": ids.roll(-1, 1), "positions": positions}
    batch["segments"] = (torch.arange(length) >= first).int()[None]
    rows = [
        {"input_ids": ids[:, part], "labels": batch["labels"][:, part]} for part in (slice(first), slice(first, length))
    ]
    return batch, rows


@pytest.mark.parametrize("window", [1, 2, 5, 30])
def test_transformers_mistral_has_the_same_logits(window, tmp_path):
    """Of rows longer than the window; read as a folder and written as one."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(window)
    net = mistral(sliding_window=window)
    net.save_pretrained(tmp_path / "theirs")
    ours = load_decoder(tmp_path / "theirs").eval()
    ids = make_batch(rows=2, positions=23)["input_ids"]
    assert_snr(ours(ids), hf_logits(net, ids), FP32_DB)
    ours.save_hf(tmp_path / "ours")
    assert json.loads((tmp_path / "ours/config.json").read_text())["sliding_window"] == window
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert_snr(hf_logits(again, ids), ours(ids), FP32_DB)


def test_a_window_alone_is_written_as_mistral(tmp_path):
    """Also where the heads are those of Llama's layout."""
    decoder(4).save_hf(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert (raw["model_type"], raw["sliding_window"]) == ("mistral", 4)


@pytest.mark.parametrize("kind", ["gqa", "mla", "hf"])
def test_documents_of_a_row_are_those_of_rows_of_their_own(kind):
    model = (
        load_hf(mistral(sliding_window=3).config, "causal_lm", kernels=KERNELS) if kind == "hf" else decoder(3, kind)
    )
    if kind == "hf":
        init_weights(model, 0)
    batch, rows = packed(9, 6)
    model.train()
    whole = model.loss(batch).loss_sum
    assert whole.item() == pytest.approx(sum(model.loss(row).loss_sum.item() for row in rows), rel=1e-5)
    if kind != "hf":
        assert whole != replace_window(model, 0).loss(batch).loss_sum


def replace_window(model, window):
    other = Decoder(replace(model.config, sliding_window=window), KERNELS)
    other.load_state_dict(model.state_dict())
    return other


@settings(max_examples=20, deadline=None)
@given(
    name=st.sampled_from(["gqa", "mla"]), window=st.integers(1, 9),
    sizes=st.lists(st.one_of(st.just(1), st.integers(1, 30)), min_size=1, max_size=12), seed=st.integers(0, 99),
)  # fmt: skip
def test_a_cached_row_in_any_pieces_is_the_whole_row(name, window, sizes, seed):
    """Pieces shorter and longer than the window and than what the cache has room for."""
    model = decoder(window, name).eval()
    ids, end = ids_of(2, sum(sizes), seed), 0
    cache = model.new_cache(2, sum(sizes))
    with torch.no_grad():
        whole = model(ids)
    for size in sizes:
        found = model.next_token_logits(ids[:, end : end + size], cache)
        end += size
        torch.testing.assert_close(found, whole[:, end - 1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("piece", [1, 11])
def test_a_pass_that_fails_leaves_the_cache_as_it_was(piece):
    """In its last layer, when the first have written: a token, and a piece that is longer than what is kept."""
    model, ids = decoder(3).eval(), ids_of(1, 40)
    cache = model.new_cache(1, 40)
    for end in range(1, 9):
        model.next_token_logits(ids[:, end - 1 : end], cache)

    def fails(*_):
        raise MemoryError

    handle = model.blocks[-1].self_attn.core.register_forward_pre_hook(fails)
    for _ in range(2):
        with pytest.raises(MemoryError):
            model.next_token_logits(ids[:, 8 : 8 + piece].flip(1), cache)
    handle.remove()
    found = model.next_token_logits(ids[:, 8 : 8 + piece], cache)
    torch.testing.assert_close(found, model.next_token_logits(ids[:, : 8 + piece]), rtol=1e-4, atol=1e-4)


def test_the_cache_has_room_for_two_windows_and_rows_join():
    model = decoder(4).eval()
    width = 2 * model.config.num_kv_heads * model.config.head_dim * 4
    rows = RowBatch(model, torch.device("cpu"), width=2, chunk=3)
    first, second = rows.begin(list(range(1, 12)), 80), rows.begin([3, 4], 80)
    for row in (first, second):
        while rows.prefill(row) is None:
            pass
    for token in range(20, 50):
        found = rows.step([first, second], [token, token + 1])
    assert first.cache.num_bytes == second.cache.num_bytes == model.config.num_layers * 8 * width
    for row, logits in zip((first, second), found, strict=True):
        with torch.no_grad():
            whole = model.next_token_logits(torch.tensor([row.ids]))[0]
        torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-4)


def test_a_plan_counts_what_the_window_leaves():
    layers = ({}, {"sliding_window": 16}, {"sliding_window": 4096})
    recipe = make_recipe(model={"num_layers": 6, "layers": layers}, data={"seq_len": 256}, train={"compile": "off"})
    shape = ShapeFinder(512, make_machine()).find(recipe)
    assert [found.indices for found in shape.classes] == [(0, 3), (1, 4), (2, 5)]
    whole, narrow, beyond = (found.attention_flops for found in shape.classes)
    pairs = sum(min(place, 16) for place in range(1, 257))
    assert narrow / whole == pytest.approx(pairs / (256 * 257 / 2))
    assert beyond == whole
    masks = [found.mask for found in shape.classes]
    assert masks[1] == 0
    assert masks[0] == masks[2]
    seconds = [
        sum(one.seconds for one in row.operations) for row in make_plan(recipe, 512, make_machine(), make_rates()).rows
    ]
    assert seconds[1] < seconds[0] == pytest.approx(seconds[2], rel=1e-6)


def test_what_is_wrong_with_windows_is_said_at_once():
    with pytest.raises(ConfigError) as caught:
        load_recipe(
            None, {"model.sliding_window": "-1", "model.layers": "[{ sliding_window = -2 }]", "train.steps": "-1"},
            environ={},
        )  # fmt: skip
    assert len(caught.value.problems) == 3
    shape = replace(SHAPES["gqa"].shape, sliding_window=-1)
    with pytest.raises(ConfigError) as caught:
        replace(SHAPES["gqa"], sliding_window=-3, layers=(shape, replace(shape, num_kv_heads=3)))
    assert_in_words(caught.value, "sliding_window -3", "layers 0-1", "num_kv_heads 3", "at least 1")


def test_what_no_format_holds_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="latent attention with a window"):
        decoder(4, "mla").save_hf(tmp_path / "folder")
    latent = {"model.attention": "mla", "model.sliding_window": "8"}
    with pytest.raises(ConfigError) as caught:
        load_recipe(None, latent | {"checkpoint.export_hf": "true"}, environ={})
    assert_in_words(caught.value, "a window")
    load_recipe(None, {"model.sliding_window": "8", "checkpoint.export_hf": "true"}, environ={})


def test_equal_windows_are_the_uniform_decoder():
    sizes = {"vocab_size": 61, "dim": 64, "num_layers": 2, "num_heads": 4}
    listed = DecoderConfig.of(**sizes, layers=({"sliding_window": 8},))
    assert listed == DecoderConfig.of(**sizes, sliding_window=8)
    assert not listed.layers
