"""Rows that run side by side: each gets the logits that it gets alone, whatever joins and leaves."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.draws import examples
from tests.models.shapes import KERNELS, SHAPES, make_decoder
from tests.models.test_cache import hf_model
from tests.zoo.families import FAMILIES
from tilewright.models.build import init_weights
from tilewright.models.continued_rows import RowBatch, RowBytes
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.hf.load import load_hf

CPU = torch.device("cpu")
HF = ("llama", "qwen3", "gemma2", "gpt2")


def alone(model, ids, tokens, width, chunk):
    """Logits after a prompt and after each token, of a row by itself."""
    rows = RowBatch(model, CPU, width=width, chunk=chunk)
    row = rows.begin(ids, len(tokens))
    found = []
    while row.in_prompt:
        found.append(rows.prefill(row))
    return [found[-1], *(rows.step([row], [token])[0] for token in tokens)]


def check(model, plans, width, chunk, compare):
    """Rows begin at the steps that `plans` say, and leave after their tokens; (start, prompt, tokens) each."""
    rows = RowBatch(model, CPU, width=width, chunk=chunk)
    begun, found = {}, {i: [] for i in range(len(plans))}
    for step in range(max(start + len(tokens) for start, _, tokens in plans) + 1):
        drawing = [i for i in begun if len(found[i]) <= len(plans[i][2])]
        if drawing:
            new = rows.step([begun[i] for i in drawing], [plans[i][2][len(found[i]) - 1] for i in drawing])
            for i, logits in zip(drawing, new, strict=True):
                found[i].append(logits)
        for i, (start, ids, tokens) in enumerate(plans):
            if start == step:
                begun[i] = rows.begin(ids, len(tokens))
                while begun[i].in_prompt:
                    logits = rows.prefill(begun[i])
                found[i].append(logits)
    for i, (_, ids, tokens) in enumerate(plans):
        compare(torch.stack(found[i]), torch.stack(alone(model, ids, tokens, width, chunk)))


def equal_bits(found, wanted):
    assert torch.equal(found, wanted), f"worst element {float((found - wanted).abs().max()):.3g} apart"


PLANS = [(0, [5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6]), (1, [9], [3, 3]), (2, [4] * 11, [7, 8, 9, 1]), (2, [8, 2], [1])]


@pytest.mark.parametrize("name", [name for name in SHAPES if not make_decoder(name).blocks[-1].is_moe])
def test_rows_of_the_decoder_are_the_same_bits_as_alone(name):
    check(make_decoder(name).eval(), PLANS, 4, 4, equal_bits)


@examples(10)
@given(st.data(), st.sampled_from(["gqa", "mla"]))
def test_any_rows_joining_and_leaving(data, name):
    ids = st.integers(0, 60)
    plan = st.tuples(st.integers(0, 4), st.lists(ids, min_size=1, max_size=9), st.lists(ids, min_size=1, max_size=5))
    plans = data.draw(st.lists(plan, min_size=1, max_size=5))
    check(make_decoder(name).eval(), plans, 5, data.draw(st.integers(1, 5)), equal_bits)


@pytest.mark.parametrize("name", HF)
def test_rows_of_a_hugging_face_model_are_the_same_bits_as_alone(name):
    model = hf_model(name).eval()
    check(model, PLANS, 4, 4, equal_bits)
    assert not model.notes, model.notes


def test_a_row_is_what_whole_rows_give():
    for model in (make_decoder("gqa").eval(), hf_model("qwen3").eval()):
        ids, tokens = [3, 1, 4, 1, 5, 9], [2, 6, 5]
        found = alone(model, ids, tokens, width=3, chunk=4)
        for end, logits in enumerate(found):
            whole = model.next_token_logits(torch.tensor([ids + tokens[:end]]))[0]
            torch.testing.assert_close(logits, whole, rtol=1e-3, atol=1e-3)


def test_a_model_whose_rows_cannot_join_runs_them_one_after_another_and_says_so():
    model = hf_model("bloom").eval()

    def near(found, wanted):
        torch.testing.assert_close(found, wanted)

    check(model, PLANS, 4, 4, near)
    assert any("one after another" in note for note in model.notes)


def test_a_mixture_of_experts_is_near():
    name = next(name for name in SHAPES if make_decoder(name).blocks[-1].is_moe)

    def near(found, wanted):  # how many rows an expert has depends on all rows: sums are added up in another order
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)

    check(make_decoder(name).eval(), PLANS, 4, 4, near)


@pytest.mark.parametrize("make", [lambda: make_decoder("mla"), lambda: hf_model("llama")])
def test_bytes_of_a_row_are_those_that_it_takes(make):
    model = make().eval()
    rows = RowBatch(model, CPU)
    sizes = rows.row_bytes()
    row = rows.begin([1] * 20, 0)
    rows.prefill(row)
    assert row.cache.num_bytes == sizes.of(20)


@given(
    windows=st.lists(st.integers(0, 9), min_size=2, max_size=2),
    chunk=st.integers(1, 12),
    prompt=st.integers(1, 30),
    new=st.integers(1, 12),
)
@examples(25)
def test_a_row_never_takes_more_than_its_bytes(windows, chunk, prompt, new):
    """Behind each pass; and rows of windows take no more from some length on."""
    layers = [{"sliding_window": window} for window in windows] + [{"attention": "linear"}]
    shape = {"vocab_size": 50, "dim": 32, "num_heads": 2, "ffn_dim": 32, "num_layers": 3}
    model = make_decoder(DecoderConfig.of(**shape, layers=layers)).eval()
    rows = RowBatch(model, CPU, chunk=chunk)
    sizes = rows.row_bytes()
    row = rows.begin(list(range(1, prompt + 1)), new)
    while row.in_prompt:
        rows.prefill(row)
        assert row.cache.num_bytes <= sizes.of(prompt + new)
    for token in range(new):
        rows.step([row], [token])
        assert row.cache.num_bytes <= sizes.of(prompt + new)
    assert (sizes.most_positions(10**9) is None) == all(windows)
    assert all(windows) == (sizes.of(1000) == sizes.of(10**6))


@given(
    fixed=st.integers(0, 100),
    layers=st.lists(st.tuples(st.integers(1, 9), st.one_of(st.just(math.inf), st.integers(1, 40))), max_size=4),
    budget=st.integers(0, 2000),
)
def test_the_most_positions_are_those_whose_bytes_are_enough(fixed, layers, budget):
    sizes = RowBytes(fixed, tuple(layers))
    most = sizes.most_positions(budget)
    if most is None:
        assert sizes.of(10**6) <= budget
    else:
        assert most == 0 or sizes.of(most) <= budget
        assert sizes.of(most + 1) > budget


@pytest.mark.slow
def test_windows_of_a_foreign_model_take_theirs_and_a_pass():
    """Every other layer has one. It keeps a view of what a pass had, so the memory behind it counts."""
    model = hf_model("gemma2", sliding_window=5).eval()
    rows = RowBatch(model, CPU, chunk=6)
    sizes = rows.row_bytes()
    assert sizes.of(1001) - sizes.of(1000) == (sizes.of(3) - sizes.of(2)) / 2
    row = rows.begin(list(range(1, 21)), 10)
    while row.in_prompt:
        rows.prefill(row)
        assert row.cache.num_bytes <= sizes.of(30)
    for token in range(10):
        rows.step([row], [token])
        assert row.cache.num_bytes <= sizes.of(30)


def test_windows_keep_the_whole_prompt_that_runs_in_one_pass(monkeypatch):
    """The view that a layer with a window keeps holds the memory of all of it."""
    monkeypatch.setattr("tilewright.models.hf.model.why_no_pieces", lambda net, vocab_size: "it forgets")
    model = hf_model("gemma2", sliding_window=5).eval()
    rows = RowBatch(model, CPU, chunk=6)
    sizes = rows.row_bytes()
    row = rows.begin([1] * 60, 4)
    rows.prefill(row)
    assert row.num_run == 60
    assert row.cache.num_bytes <= sizes.of(64)
    assert sizes.most_positions(10**9) is not None


@pytest.mark.slow
def test_a_model_that_attends_within_chunks_runs_its_rows_one_by_one():
    """Beyond the first chunk, which is longer than the rows that joining is tried with."""
    from transformers import AutoConfig

    sizes = {"hidden_size": 32, "intermediate_size": 48, "intermediate_size_mlp": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 2}
    chunk = {"attention_chunk_size": 16, "use_qk_norm": False, "initializer_range": 0.4, "pad_token_id": 0}
    config = AutoConfig.for_model("llama4_text", vocab_size=61, **sizes | heads | chunk)
    model = load_hf(config, "causal_lm", kernels=KERNELS)
    init_weights(model, 0)
    ids, tokens = [5, 6, 7, 8, 9], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]
    found = alone(model, ids, tokens, 2, 4)[-1]
    with torch.no_grad():
        whole = model.next_token_logits(torch.tensor([ids + tokens]))[0]
    torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-4)
    assert any("within chunks" in note for note in model.notes)


OTHERS = ("falcon_h1", "qwen3_next", "lfm2", "minimax", "gemma2")


@pytest.mark.parametrize("name", ["jamba", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_a_long_prompt_is_what_the_whole_row_gives(name):
    """In pieces, or in one pass where layers would forget their state between two of them; then memory is reserved for
    the states too."""
    family = next(one for one in FAMILIES if one.name == name)
    model = family.model().eval()
    init_weights(model, 0)
    rows = RowBatch(model, CPU, chunk=9)
    ids = torch.randint(4, 300, (40,), generator=torch.Generator().manual_seed(1))
    row = rows.begin(ids.tolist(), 1)
    while (found := rows.prefill(row)) is None:
        pass
    with torch.no_grad():
        whole = model.net(input_ids=ids[None], use_cache=False).logits[0, -1]
    torch.testing.assert_close(found, whole, rtol=1e-3, atol=1e-4)
    assert row.num_run == 40
    assert any("in one pass" in note for note in model.notes) == (name == "jamba")
    assert RowBatch(model, CPU).row_bytes().of(40) >= row.cache.num_bytes > 0
