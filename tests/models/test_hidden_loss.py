"""Hidden values of a teacher in a student's loss: against plain autograd in FP64 for drawn cases, and first values."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewright.models.build import init_weights
from tilewright.models.decoder.block import Block
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.models.distill import loss as distill
from tilewright.models.distill.hidden import LOSSES, NAME, VALUES, HiddenLoss, Pair, of_batch, with_projections

DIM, LAYERS, WORDS = 16, 3, 50


WEIGHTS = {"hidden": 0.75, "attention": 0.5}


def pairs_of(hidden, attention=()):
    """Pairs of layers; what the teacher's are does not matter here."""
    return [Pair("hidden", layer, 0) for layer in hidden] + [Pair("attention", layer, 0) for layer in attention]


def student(pairs, width, *, learned):
    model = Decoder(DecoderConfig.of(vocab_size=WORDS, dim=DIM, num_heads=2, num_layers=LAYERS, ffn_dim=24))
    init_weights(model, seed=0)
    model.hidden_loss = HiddenLoss(pairs, (DIM, width), WEIGHTS, learned=learned)
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.3) if param.ndim > 1 else torch.nn.init.ones_(param)
    return model.double()


def taught_batch(rows, length, count, width):
    labels = torch.randint(WORDS, (rows, length))
    labels[torch.rand(rows, length) < 0.3] = -100
    labels[0, 0] = 7
    values = torch.randn(rows, length, count, width, dtype=torch.float64)
    values[labels == -100] = torch.nan  # of padding a teacher may give anything
    return {
        "input_ids": torch.randint(WORDS, (rows, length)),
        "labels": labels,
        VALUES: values,
        distill.HIDDEN: torch.randn(rows, length, 12, dtype=torch.float64),
        distill.HEAD: torch.randn(WORDS, 12, dtype=torch.float64),
        distill.HOW: distill.how(1.0, 0.5, "forward_kl"),
    }


def by_hand(model, batch, pairs):
    """From the streams behind all layers and what plain hooks see of attention, by the formula of the module, one
    position after another."""
    plain = {name: tensor for name, tensor in batch.items() if name != VALUES}
    model.activation_checkpoint = "none"
    x, context = model.prologue(plain)
    found = {}
    for layer, block in enumerate(model.blocks):
        keep = lambda module, args, out, layer=layer: found.__setitem__(("attention", layer), out)  # noqa: E731
        handle = block.self_attn.register_forward_hook(keep)
        x, _ = model.layer(layer, x, context)
        handle.remove()
        found["hidden", layer] = x
    loss = distill.batch_loss(model.kernels, model.lm_head, model.model.norm(x).flatten(0, 1), plain).loss_sum
    for place, pair in enumerate(pairs):
        weight = WEIGHTS[pair.target] / sum(other.target == pair.target for other in pairs)
        for row, position in (batch["labels"] != -100).nonzero().tolist():
            ours, theirs = found[pair.target, pair.ours][row, position], batch[VALUES][row, position, place]
            if len(model.hidden_loss.projections):
                ours = model.hidden_loss.projections[place] @ ours
            loss = loss + weight * ((ours - theirs) ** 2).sum() / (theirs**2).sum()
    return loss


@given(
    hidden=st.permutations(range(LAYERS)).flatmap(lambda some: st.integers(0, LAYERS).map(lambda n: some[:n])),
    attention=st.permutations(range(LAYERS)).flatmap(lambda some: st.integers(0, LAYERS).map(lambda n: some[:n])),
    width=st.sampled_from([DIM, 8, 24]),
    learned=st.booleans(),
    factor=st.sampled_from([1.0, 0.125, 1024.0]),
    kept=st.sampled_from(["none", "selective", "full"]),
    rows=st.integers(1, 3),
)
def test_loss_and_gradients_are_those_of_autograd(hidden, attention, width, learned, factor, kept, rows):
    """Of the student and of the projections, whatever factor the loss has, and whatever layers keep."""
    torch.manual_seed(rows)
    width, pairs = width if learned else DIM, pairs_of(hidden, attention) or pairs_of([1])
    model = student(pairs, width, learned=learned)
    model.activation_checkpoint = kept
    batch = taught_batch(rows, 7, len(pairs), width)
    out = model.loss(batch)
    (out.loss_sum * factor).backward()
    found = {name: param.grad.clone() for name, param in model.named_parameters()}
    model.zero_grad()
    expected = by_hand(model, batch, pairs)
    (expected * factor).backward()
    # bound: logits and losses of rows are FP32, so that sums of a few numbers of size 10 differ by 1e-5 at most
    assert float(out.loss_sum.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    for name, param in model.named_parameters():
        assert (found[name] - param.grad).abs().max() <= 2e-6 * param.grad.abs().max(), name
    assert out.each is not None
    assert float(out.each.sum()) == pytest.approx(float(expected.detach()), rel=1e-6)
    told = out.aux["cross_entropy"] / 2 + out.aux["distillation"] / 2
    told = told + sum(weight * out.aux[name] for name, weight in WEIGHTS.items() if name in out.aux)
    assert float(told) * int(out.count) == pytest.approx(float(expected.detach()), rel=1e-6)


def test_layers_that_run_alone_have_the_same_gradients():
    """As the layer-major executor runs them: forward without a graph, then the loss, then each layer again, twice."""
    torch.manual_seed(1)
    pairs = pairs_of([0, 2], [2, 1])
    model, batch = student(pairs, 8, learned=True), taught_batch(2, 5, len(pairs), 8)
    (model.loss(batch).loss_sum * 0.5).backward()
    expected = {name: param.grad.clone() for name, param in model.named_parameters()}
    with torch.no_grad():
        x, context = model.prologue(batch)
        xs = [x]
        for layer in range(LAYERS):
            xs.append(model.layer(layer, xs[-1], context)[0])
    for _ in range(2):
        model.zero_grad()
        last = xs[-1].detach().requires_grad_()
        (model.epilogue(last, context, batch).loss_sum * 0.5).backward()
        grad = last.grad
        for layer in reversed(range(LAYERS)):
            start = xs[layer].detach().requires_grad_()
            model.layer(layer, start, context)[0].backward(grad)
            grad = start.grad
        model.prologue(batch)[0].backward(grad)
        for name, param in model.named_parameters():
            assert (param.grad - expected[name]).abs().max() <= 1e-12 * expected[name].abs().max(), name


def test_positions_without_a_target_may_hold_anything():
    """An overflow there is no loss and no gradient."""
    model, batch = student(pairs_of([1], [1]), DIM, learned=False), taught_batch(1, 4, 2, DIM)
    batch["labels"][0, 3], batch[VALUES][0, 3] = -100, 1e300
    out = model.loss(batch)
    out.loss_sum.backward()
    assert bool(out.loss_sum.isfinite())
    assert all(bool(param.grad.isfinite().all()) for param in model.parameters())


@given(
    zeros=st.lists(st.integers(0, 9), unique=True, max_size=10),
    size=st.sampled_from([0.0, 1e-22]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    learned=st.booleans(),
)
def test_a_target_of_zeros_adds_nothing(zeros, size, dtype, learned):
    """As of an attention whose output projection is zero: no distance is relative to it. All others count as they
    do where it is not there, and gradients are finite."""
    torch.manual_seed(3)
    hidden = HiddenLoss(pairs_of([1], [1]), (DIM, DIM), WEIGHTS, learned=learned)
    x, given_ = (torch.randn(1, 10, DIM).to(dtype).requires_grad_() for _ in range(2))
    values, labels = torch.randn(1, 10, 2, DIM).to(dtype), torch.zeros(1, 10, dtype=torch.int64)
    [torch.nn.init.normal_(one) for one in hidden.projections]

    def losses(labels, values):
        context = of_batch({VALUES: values, "labels": labels})
        found = torch.autograd.grad(hidden(1, x, given_, context).float().sum(), (x, *hidden.parameters()))
        return context[LOSSES], found

    without, without_grads = losses(labels.index_fill(1, torch.tensor(zeros, dtype=torch.int64), -100), values)
    values[:, zeros] *= size
    found, grads = losses(labels, values)
    assert torch.equal(found, without)
    assert all(torch.equal(one, other) for one, other in zip(grads, without_grads, strict=True))


@pytest.mark.parametrize("alike", [True, False])
def test_first_values_of_parts_are_those_of_the_whole(alike):
    """Ranks fill their rows; everything else comes from the values that were given."""
    seen = []
    fill = with_projections(lambda tensors, first_rows: seen.append((list(tensors), first_rows)), 3, alike=alike)
    name = f"{NAME}.projections.1"
    whole = torch.full((16, 16), float("nan"))
    fill({name: whole, "other": torch.zeros(2)}, {"other": 1})
    assert seen == [(["other"], {"other": 1})]
    parts = [torch.empty(6, 16), torch.empty(10, 16)]
    fill({name: parts[0]})
    fill({name: parts[1]}, {name: 6})
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(whole, torch.eye(16)) if alike else 0.2 < float(whole.std()) < 0.3


def test_a_layer_of_ones_own_that_does_not_say_its_attention_has_none():
    """What a recipe's `distill.attention` asks before a run; such layers train without it."""

    class Own(Block):
        def _run(self, x, cos, sin, segments, cache=None):
            return super()._run(x, cos, sin, segments, cache)[:2]

    model = student([], DIM, learned=True)
    model.layers[1].__class__ = Own
    assert [model.attention_of(layer) is None for layer in model.layers] == [False, True, False]
    batch = {"input_ids": torch.zeros(1, 4, dtype=torch.long), "labels": torch.zeros(1, 4, dtype=torch.long)}
    assert model.loss(batch).loss_sum.isfinite()
