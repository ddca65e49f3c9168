"""A layer for the next token of a few rows: each candidate against FP64, its cache, the models that have it, and what
goes to the layer's own parts."""

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tests.draws import examples
from tests.models.shapes import make_decoder
from tilewright.core.hardware import detect_machine
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.models.generate import generate, inference
from tilewright.ops.backends.cpu.cached_layer import cached_layer
from tilewright.ops.backends.ref.cached_layer import AttentionWeights, LayerWeights, MLPWeights, RowPast
from tilewright.ops.base.dispatch import Case
from tilewright.ops.kernels import Kernels
from tilewright.ops.linear import CACHED_LAYER, MOST_ROWS
from tilewright.precision.mixed.few_row_layers import attach
from tilewright.precision.mixed.row_block import RowBlock

MACHINE = detect_machine("cpu")
DTYPES = (torch.float32, torch.bfloat16)
HERE = {d: [c for c in CACHED_LAYER.candidates if c.why_not(MACHINE, Case("cpu", d)) is None] for d in DTYPES}
REF = CACHED_LAYER.candidates[-1].run
EPS = 1e-5


def drawn(rows, keys, group, dim, width, hidden, positions, dtype, seed=0):
    """Operands of a layer whose sums keep the size of what they are made from; no key heads: it has no attention, no
    hidden units: no MLP."""
    generator = torch.Generator().manual_seed(seed)

    def tensor(*shape, size=1.0):
        return (torch.randn(shape, generator=generator) * size).to(dtype)

    def matrix(outs, ins):
        return tensor(outs, ins, size=ins**-0.5)

    heads, of_keys = keys * group * dim, keys * dim
    attention, mlp, pasts = None, None, []
    if keys:
        projections = matrix(heads, width), matrix(of_keys, width), matrix(of_keys, width), matrix(width, heads)
        attention = AttentionWeights(1 + tensor(width, size=0.1), *projections)
        pasts = [RowPast(*(tensor(positions + row, keys, dim) for _ in range(2))) for row in range(rows)]
    if hidden:
        projections = matrix(hidden, width), matrix(hidden, width), matrix(width, hidden)
        mlp = MLPWeights(1 + tensor(width, size=0.1), *projections)
    weights = LayerWeights(attention, mlp)
    angles = torch.rand(rows, dim // 2, generator=generator) * 6
    return tensor(rows, width), weights, EPS, angles.cos(), angles.sin(), pasts


def with_past(operands, change=torch.clone):
    """The same with a cache of its own, all tensors but angles changed."""
    x, weights, eps, cos, sin, pasts = operands
    parts = [part and type(part)(*map(change, part)) for part in weights]
    return change(x), LayerWeights(*parts), eps, cos, sin, [RowPast(*map(change, p)) for p in pasts]


@examples(60)
@given(
    st.integers(1, MOST_ROWS), st.integers(0, 3), st.integers(1, 3), st.integers(1, 40), st.integers(1, 90),
    st.one_of(st.just(0), st.integers(1, 120)), st.integers(1, 70), st.sampled_from(DTYPES), st.integers(0, 2**31),
)  # fmt: skip
def test_every_candidate_is_near_fp64(rows, keys, group, half, width, hidden, positions, dtype, seed):
    assume(keys or hidden)
    operands = drawn(rows, keys, group, 2 * half, width, hidden, positions, dtype, seed)
    exact = with_past(operands, torch.Tensor.double)
    want = REF(*exact)
    for candidate in HERE[dtype]:
        given_ = with_past(operands)
        got = candidate.run(*given_)
        # Each of nine results of a layer rounds once; norms of few columns pass on a multiple of that.
        bound = 30 * torch.finfo(dtype).eps * max(1.0, want.norm().item(), given_[0].double().norm().item())
        assert got.dtype == dtype
        assert (got.double() - want).norm() <= bound
        for past, exact_past, before in zip(given_[-1], exact[-1], operands[-1], strict=True):
            for kept, exact_kept, kept_before in zip(past, exact_past, before, strict=True):
                assert torch.equal(kept[:-1], kept_before[:-1])
                new = (kept[-1].double() - exact_kept[-1]).norm()
                assert new <= 10 * torch.finfo(dtype).eps * max(1.0, exact_kept[-1].norm())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_beside_any_others_and_with_any_threads(dtype):
    x, weights, eps, cos, sin, _ = operands = drawn(MOST_ROWS, 2, 3, 34, 200, 531, 300, dtype)
    rows = [slice(row, row + 1) for row in range(MOST_ROWS)]
    alone = torch.cat([cached_layer(x[r], weights, eps, cos[r], sin[r], with_past(operands)[-1][r]) for r in rows])
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            for count in range(1, MOST_ROWS + 1):
                got = cached_layer(x[:count], weights, eps, cos[:count], sin[:count], with_past(operands)[-1][:count])
                assert torch.equal(got, alone[:count])
        finally:
            torch.set_num_threads(before)


def attending(weights, **others):
    return weights._replace(attention=weights.attention._replace(**others))


def mixing(weights, **others):
    return weights._replace(mlp=weights.mlp._replace(**others))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda x, w, e, c, s, p: (x.repeat(3, 1), w, e, c, s, p), ValueError),
        (lambda x, w, e, c, s, p: (x, w, e, c, s, p[:1]), ValueError),
        (lambda x, w, e, c, s, p: (x, w, e, c[:, 1:], s, p), ValueError),
        (lambda x, w, e, c, s, p: (x, attending(w, o=w.attention.o.T), e, c, s, p), ValueError),
        (lambda x, w, e, c, s, p: (x, attending(w, q=w.attention.q[:-1]), e, c, s, p), ValueError),
        (lambda x, w, e, c, s, p: (x, mixing(w, down_DF=w.mlp.down_DF.T.contiguous().T), e, c, s, p), ValueError),
        (lambda x, w, e, c, s, p: (x, mixing(w, up_FD=w.mlp.up_FD[:-1]), e, c, s, p), ValueError),
        (lambda x, w, e, c, s, p: (x, w._replace(attention=None), e, c, s, p), ValueError),
        (lambda x, w, e, c, s, p: (x, LayerWeights(None, None), e, c, s, []), ValueError),
        (lambda x, w, e, c, s, p: (x, w, e, c, s, [p[0], RowPast(p[1][0][:0], p[1][1][:0])]), ValueError),
        (lambda x, w, e, c, s, p: (x, w, e, c, s, [p[0], RowPast(p[1][0], p[1][1][1:])]), ValueError),
        (lambda x, w, e, c, s, p: (x, attending(w, k=w.attention.k.bfloat16()), e, c, s, p), TypeError),
        (lambda x, w, e, c, s, p: (x.half(), w, e, c, s, p), TypeError),
    ],
)
def test_what_the_library_cannot_read_is_refused(change, error):
    with pytest.raises(error, match="needed"):
        cached_layer(*change(*drawn(2, 2, 2, 8, 24, 40, 5, torch.float32)))


def counted(model):
    """How many layers each of the model's kernels has run."""
    calls = []
    for block in (module for module in model.modules() if isinstance(module, RowBlock)):
        run = block.cached_layer
        block.cached_layer = lambda *args, run=run: (calls.append(len(args[0])), run(*args))[1]
    return calls


@pytest.mark.parametrize(("name", "layers"), [("gqa", 2), ("tied", 2), ("own_gqa", 3), ("mla", 0), ("gqa_moe", 1)])
def test_a_model_draws_the_tokens_that_it_drew_before(name, layers):
    """Experts and a latent go to the layer's own parts; a layer without attention or FFN is computed as it is."""
    model = make_decoder(name).eval()
    ids = torch.arange(10).reshape(2, 5)
    before = generate(model, ids, 40, temperature=0)
    attach(model, MACHINE)
    calls = counted(model)
    assert torch.equal(generate(model, ids, 40, temperature=0), before)
    assert len(before.unique()) > 5
    assert calls == [2] * 39 * layers


def test_a_window_leaves_positions_behind():
    sizes = {"vocab_size": 61, "dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "sliding_window": 3}
    model = make_decoder(DecoderConfig.of(**sizes)).eval()
    ids = torch.arange(5)[None]
    before = generate(model, ids, 30, temperature=0)
    attach(model, MACHINE)
    calls = counted(model)
    assert torch.equal(generate(model, ids, 30, temperature=0), before)
    assert len(calls) == 2 * 29


def test_rows_that_began_at_different_times_have_the_bits_that_they_have_alone():
    model = make_decoder("gqa").eval()
    attach(model, MACHINE)
    calls = counted(model)
    texts = [torch.arange(3)[None], torch.arange(20, 29)[None]]
    with inference(model):
        caches = [model.new_cache(1, 20) for _ in texts]
        alone = [model.new_cache(1, 20) for _ in texts]
        for ids, *of_row in zip(texts, caches, alone, strict=True):
            for cache in of_row:
                model.next_token_logits(ids, cache)
        for token in range(5):
            next_ids = torch.tensor([[token], [token + 7], [token], [token]])
            together = model.next_token_logits(next_ids, caches[0].joined(caches[1:], 4))
            each = [
                model.next_token_logits(next_ids[[row] * 4], cache.joined((), 4)) for row, cache in enumerate(alone)
            ]
            assert torch.equal(together, torch.cat([each[0][:1], each[1][:1], each[0][:2]]))
            assert [cache.length for cache in caches] == [cache.length for cache in alone]
    assert set(calls) == {1, 2}


def test_a_layer_takes_the_token_where_nothing_needs_its_parts():
    model = make_decoder("gqa").eval()
    attach(model, MACHINE)
    calls, block, one = counted(model), model.blocks[0], torch.tensor([[3]])

    def layers_taken(rows=1, tokens=1):
        calls.clear()
        with inference(model):
            model.next_token_logits(one.expand(rows, tokens), model.new_cache(rows, 4))
        return len(calls)

    assert layers_taken() == layers_taken(MOST_ROWS) == 2
    assert layers_taken(MOST_ROWS + 1) == layers_taken(tokens=2) == 0
    seen = []
    hook = block.mlp.up_proj.register_forward_hook(lambda *args: seen.append(args))
    assert (layers_taken(), len(seen)) == (1, 1)
    hook.remove()
    block.self_attn.core.compute_dtype = torch.bfloat16
    assert layers_taken() == 1
    block.self_attn.core.compute_dtype = None
    model.model.layers[1].mlp.down_proj = nn.Linear(96, 64)
    assert layers_taken() == 1
    with torch.autocast("cpu", torch.bfloat16):
        assert layers_taken() == 0
    with FlopCounterMode(display=False) as counter:
        assert layers_taken() == 0
    assert counter.get_total_flops() > 0
    model.double()
    assert layers_taken() == 0
    asked = Decoder(model.config, Kernels(MACHINE, {"rms_norm": "ref"}, compile=False)).eval()
    attach(asked, MACHINE)
    calls = counted(asked)
    generate(asked, one, 3)
    assert not calls


def test_writes_to_a_weight_count_at_once_and_copies_have_their_own():
    model = make_decoder("gqa").eval()
    attach(model, MACHINE)
    other, ids = copy.deepcopy(model), torch.arange(4)[None]
    with torch.no_grad():
        for block in other.blocks:
            block.mlp.down_proj.weight.data.mul_(0.5)
    plain = make_decoder("gqa").eval()
    plain.load_state_dict(other.state_dict())
    assert torch.equal(generate(other, ids, 20, temperature=0), generate(plain, ids, 20, temperature=0))
    assert torch.equal(generate(model, ids, 20, temperature=0), generate(make_decoder("gqa"), ids, 20, temperature=0))


@pytest.mark.parametrize("rows", [1, 3])
def test_a_cache_that_was_filled_under_autocast_is_read_as_it_is(rows):
    """In BF16, beside weights in FP32; tokens that follow with autocast, and without, have the layer's own parts."""
    found = []
    for is_attached in (False, True):
        model, ids = make_decoder("gqa").eval(), torch.arange(5 * rows).reshape(rows, 5)
        if is_attached:
            attach(model, MACHINE)
        with inference(model):
            cache, logits = model.new_cache(rows, 12), []
            for step in range(5):
                with torch.autocast("cpu", torch.bfloat16, enabled=step in (0, 3)):
                    given_ = ids if step == 0 else ids[:, :1] + step
                    logits.append(model.next_token_logits(given_, cache))
        found.append(torch.stack(logits))
    plain, attached = found
    # bound: sums in another order may round a key or a value to its neighbour in BF16
    assert (attached - plain).abs().max() <= torch.finfo(torch.bfloat16).eps * plain.abs().max()


def test_without_a_compiler_the_layers_stay():
    model = make_decoder("gqa")
    attach(model, replace(MACHINE, cxx_compiler=None))
    assert not any(isinstance(module, RowBlock) for module in model.modules())


def test_formats_without_code_are_said_to_run_by_parts():
    chosen = {row["case"]: row["chosen"] for row in Kernels(MACHINE).explain() if row["op"] == "cached_layer"}
    assert chosen["cpu float16"] == chosen["cpu float64"] == "none (its parts run)"
    assert chosen["cpu float32"] in ("cpu", "none (its parts run)")
