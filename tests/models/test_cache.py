"""Key/value cache: the tokens and logits of whole rows, for each kind of model, mode and way of handing tokens over."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.cover import covering, some
from tests.draws import examples
from tests.models.shapes import KERNELS, MIXED, SHAPES, make_decoder
from tests.models.test_hf_models import CAUSAL, make
from tilewright.models.generate import generate
from tilewright.models.hf.load import load_hf
from tilewright.ops.backends.ref import math as ref
from tilewright.precision.convert import convert
from tilewright.precision.lora.lora import adapted_layers, add_lora

LONG = 512


def ids_of(rows=2, positions=5, seed=0):
    return torch.randint(0, 61, (rows, positions), generator=torch.Generator().manual_seed(seed))


def hf_model(name, **changes):
    """A model of a family with room for 600 positions, its weights large enough that tokens matter."""
    from transformers import AutoConfig
    from transformers.utils import logging

    from tilewright.models.build import init_weights

    logging.set_verbosity_error()
    sizes = CAUSAL[name] | {"initializer_range": 0.4} | changes
    sizes |= {key: 600 for key in ("max_position_embeddings", "n_positions") if key in sizes}
    model = load_hf(AutoConfig.for_model(name, **sizes), "causal_lm", kernels=KERNELS)
    init_weights(model, 0)
    return model


def all_logits(model, ids):
    """Logits [B, S, V] of whole rows in one pass: what an uncached run has at each of its tokens."""
    with torch.no_grad():
        return (model.net(input_ids=ids, use_cache=False).logits if model.net is not model else model(ids)).float()


def assert_same_tokens(model, num_tokens=LONG, rows=2):
    """Each cached token is what whole rows give. (If all of them are, an uncached run writes the same.)"""
    model.eval()
    ids = ids_of(rows)
    cached = generate(model, ids, num_tokens, temperature=0)
    assert cached.shape == (rows, 5 + num_tokens)
    wanted = all_logits(model, cached)[:, 4:-1].argmax(-1)
    first = (cached[:, 5:] != wanted).any(0).nonzero()[:1].flatten().tolist()
    assert not first, f"first difference at token {first[0]} of {num_tokens}"
    assert len(cached.unique()) > 3, "a model that repeats one token shows nothing"
    assert torch.equal(cached[:, :25], generate(model, ids, 20, temperature=0, use_cache=False))


@pytest.mark.parametrize("name", some([*SHAPES, *MIXED], "deepseek", "own_gqa"))
def test_own_decoder_writes_the_same(name):
    assert_same_tokens(make_decoder(name))


@pytest.mark.parametrize("name", some([name for name in CAUSAL if name != "gpt2"], "gemma2", "bloom"))
def test_hugging_face_model_writes_the_same(name):
    model = hf_model(name)
    assert model.new_cache(2, 8) is not None, model.notes
    assert_same_tokens(model)


def test_learned_positions():
    assert_same_tokens(hf_model("gpt2"), 500)


def assert_near(model, exact, num_tokens=64):
    """Values are rounded alike with a cache and without, sums are added up in another order: a last bit may fall
    differently, and what is left of it is no more than what the low precision itself changes."""
    model.eval(), exact.eval()
    ids = ids_of(2, num_tokens)
    cache = model.new_cache(2, num_tokens)
    logits = torch.stack([model.next_token_logits(ids[:, i : i + 1], cache) for i in range(num_tokens)], dim=1)
    whole = all_logits(model, ids)
    assert (logits - whole).norm() <= (whole - all_logits(exact, ids)).norm()


@pytest.mark.parametrize(
    ("name", "mode"),
    covering(("gqa", "mla", "llama"), ("bf16_mixed", "fp8_tile", "fp8_hybrid", "pure_fp16", "hybrid"), pairs=False),
)
def test_precision_modes(name, mode):
    make_one = hf_model if name == "llama" else make_decoder
    assert_near(convert(make_one(name), mode, kernels=KERNELS), make_one(name))


def with_adapters(model, base):
    add_lora(model, rank=4, base=base, kernels=KERNELS)
    with torch.no_grad():
        for module in adapted_layers(model).values():
            module.lora_B.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
    return model


@pytest.mark.parametrize("kind", some(["gqa", "mla", "llama"], "mla"))
def test_adapters(kind):
    make_one = hf_model if kind == "llama" else make_decoder
    assert_same_tokens(with_adapters(make_one(kind), "keep"))
    assert_near(with_adapters(make_one(kind), "fp8"), with_adapters(make_one(kind), "keep"))


@examples(15)
@given(data=st.data(), name=st.sampled_from(["gqa", "mla", "deepseek", *MIXED, "llama", "gemma2", "bloom"]))
def test_tokens_in_pieces_of_any_size(data, name):
    """Logits after each piece are those of the whole row so far."""
    model = (make_decoder(name) if name in SHAPES | MIXED else hf_model(name)).eval()
    sizes = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=6))
    rows = data.draw(st.integers(1, 3))
    ids = ids_of(rows, sum(sizes), data.draw(st.integers(0, 99)))
    cache, end = model.new_cache(rows, sum(sizes)), 0
    for size in sizes:
        logits = model.next_token_logits(ids[:, end : end + size], cache)
        end += size
        with torch.no_grad():
            whole = model.next_token_logits(ids[:, :end])
        torch.testing.assert_close(logits, whole, rtol=1e-3, atol=1e-3)
        assert cache.length == end


@examples(30)
@given(
    keys=st.integers(1, 3), group=st.integers(1, 3), new=st.integers(1, 4), past=st.integers(1, 9),
    narrow=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_attention_to_past_is_the_end_of_the_whole(keys, group, new, past, narrow, seed):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, heads, new + past, width, generator=generator, dtype=torch.float64)
               for heads, width in ((keys * group, 8), (keys, 8), (keys, 6 if narrow else 8)))  # fmt: skip
    found = KERNELS.attention_to_past(q[:, :, past:], k, v)
    torch.testing.assert_close(found, ref.attention(q, k, v)[:, :, past:], rtol=1e-12, atol=1e-12)


def test_latent_attention_keeps_the_latent_alone():
    model = make_decoder("mla")
    cache = model.new_cache(3, 10)
    model.next_token_logits(ids_of(3, 4), cache)
    config = model.config
    assert cache.num_bytes == 4 * config.num_layers * 3 * 10 * (config.kv_lora_rank + config.qk_rope_head_dim)


def test_rows_that_end_early_and_seeds_are_those_of_whole_rows():
    model, ids = make_decoder("gqa"), ids_of(12)
    drawn = [
        generate(model, ids, 60, temperature=9.0, top_p=0.95, top_k=30, eos_id=4, use_cache=use_cache,
                 generator=torch.Generator().manual_seed(3))
        for use_cache in (True, False)
    ]  # fmt: skip
    assert torch.equal(*drawn)
    ends = [row.index(4) for row in drawn[0][:, 5:].tolist() if 4 in row]
    assert len(set(ends)) > 1


def test_a_full_cache_refuses_and_stays_as_it_was():
    model = make_decoder("gqa").eval()
    cache = model.new_cache(1, 4)
    model.next_token_logits(ids_of(1, 3), cache)
    with pytest.raises(ValueError, match="3 of them used"):
        model.next_token_logits(ids_of(1, 2), cache)
    assert cache.length == 3
    with pytest.raises(ValueError, match="1 rows of 4 positions"):
        model.next_token_logits(ids_of(2, 1), cache)


def test_a_model_whose_cache_is_wrong_runs_whole_rows_and_says_so():
    model = make("llama")
    forward = model.net.forward

    def forgets(input_ids=None, past_key_values=None, use_cache=None, **kwargs):
        return forward(input_ids=input_ids, use_cache=use_cache, **kwargs)

    model.net.forward = forgets
    ids = ids_of()
    cached, whole = (generate(model, ids, 8, temperature=0, use_cache=use) for use in (True, False))
    assert torch.equal(cached, whole)
    assert model.new_cache(1, 8) is None
    assert any("No key/value cache" in note and "from those of the whole row" in note for note in model.notes)


def test_a_model_without_a_cache_says_so():
    model = make("llama")
    forward = model.net.forward

    def plain(input_ids=None, use_cache=None):
        return forward(input_ids=input_ids, use_cache=use_cache)

    model.net.forward = plain
    assert generate(model, ids_of(), 3, temperature=0).shape == (2, 8)
    assert model.notes == ["No key/value cache: LlamaForCausalLM takes none. Rows are run whole for each new token."]
