"""The decoder against plain cross-entropy, against itself on single documents, and across checkpoint modes."""

import pytest
import torch

from tests.cover import covering
from tests.models.shapes import KERNELS, MIXED, SHAPES, make_batch, make_decoder
from tests.ops.compare import assert_snr
from tilewright.models.build import init_weights
from tilewright.models.decoder.decoder import Decoder
from tilewright.precision.convert import convert


def loss_and_grads(model, batch):
    model.zero_grad()
    out = model.loss(batch)
    out.loss_sum.backward()
    return out, {name: param.grad.clone() for name, param in model.named_parameters()}


@pytest.mark.parametrize("name", [*SHAPES, *MIXED])
def test_loss_is_cross_entropy_of_the_logits(name):
    model, batch = make_decoder(name), make_batch()
    out = model.loss(batch)
    logits = model(batch["input_ids"]).double().flatten(0, 1)
    want = torch.nn.functional.cross_entropy(logits, batch["labels"].flatten(), reduction="sum")
    assert out.count.item() == (batch["labels"] != -100).sum().item()
    assert out.loss_sum.dtype == torch.float32
    assert abs(out.loss_sum.item() - want.item()) < 1e-5 * want.item()


@pytest.mark.parametrize("name", [*SHAPES, *MIXED])
def test_every_parameter_gets_a_gradient(name):
    _, grads = loss_and_grads(make_decoder(name), make_batch(rows=4))
    silent = [name for name, grad in grads.items() if not grad.abs().sum() > 0]
    assert not silent, silent


@pytest.mark.parametrize("name", [*SHAPES, *MIXED])
def test_packed_documents_are_as_if_alone(name):
    """Three documents in one row and padding give the logits that each gives in a row of its own."""
    model = make_decoder(name).eval()
    lengths = (5, 1, 7)
    ids = make_batch(rows=1, positions=16)["input_ids"]
    segments = torch.tensor([[0] * 5 + [1] + [2] * 7 + [-1] * 3], dtype=torch.int32)
    positions = torch.tensor([[*range(5), 0, *range(7), 0, 0, 0]])
    packed = model(ids, positions, segments)
    start = 0
    for length in lengths:
        alone = model(ids[:, start : start + length])
        assert_snr(packed[:, start : start + length], alone, 100, f"document at {start}")
        start += length


@pytest.mark.parametrize("mode", ["selective", "matmuls", "attention", "full"])
@pytest.mark.parametrize("name", [*SHAPES, *MIXED])
def test_activation_checkpointing_is_exact(name, mode):
    model, batch = make_decoder(name), make_batch(rows=3)
    out, want = loss_and_grads(model, batch)
    model.activation_checkpoint = mode
    again, got = loss_and_grads(model, batch)
    assert torch.equal(out.loss_sum, again.loss_sum)
    different = [key for key in want if not torch.equal(want[key], got[key])]
    assert not different, different


def test_activation_checkpoint_must_be_a_mode():
    with pytest.raises(ValueError, match="one of none, selective, matmuls, attention, full"):
        make_decoder("gqa").activation_checkpoint = "half"


@pytest.mark.parametrize("stream", ["bf16_mixed", "hybrid"])
@pytest.mark.parametrize("name", ["gqa", "deepseek"])
def test_residual_stream_keeps_its_dtype(name, stream):
    model = Decoder(SHAPES[name], KERNELS)
    init_weights(model, 0)
    batch = make_batch()
    want = model.loss(batch).loss_sum.item()
    convert(model, stream)
    hidden = model.hidden(batch)
    assert hidden.dtype == (torch.bfloat16 if stream == "bf16_mixed" else torch.float32)
    out, grads = loss_and_grads(model, batch)
    assert abs(out.loss_sum.item() - want) < 5e-3 * want
    assert {grad.dtype for grad in grads.values()} == {torch.float32}


@pytest.mark.parametrize(("name", "policy"), covering([*SHAPES, *MIXED], ("fp32", "bf16_mixed"), pairs=False))
def test_it_learns(name, policy):
    model, batch = make_decoder(name), make_batch(rows=4)
    convert(model, policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        out, _ = loss_and_grads(model, batch)
        optimizer.step()
        model.after_step()
        losses.append(out.loss_sum.item() / out.count.item())
    assert losses[-1] < 0.5 * losses[0], losses


def test_meta_model_matches_its_materialised_twin():
    with torch.device("meta"):
        meta = Decoder(SHAPES["deepseek"])
    real = make_decoder("deepseek")
    assert {k: v.shape for k, v in meta.state_dict().items()} == {k: v.shape for k, v in real.state_dict().items()}


def test_compiled_layers_share_one_graph_and_change_nothing():
    torch._dynamo.reset()
    model, batch = make_decoder("gqa"), make_batch()
    out, want = loss_and_grads(model, batch)
    model.compile_blocks()
    torch._dynamo.utils.counters.clear()
    graphs = torch._dynamo.utils.counters["stats"]
    for block in model.blocks:  # the head compiles its own loops, so only the layers run here
        block(torch.randn(2, 16, 64), torch.ones(1, 16, 8), torch.zeros(1, 16, 8), None)
    assert graphs["unique_graphs"] == 1
    compiled, got = loss_and_grads(model, batch)
    assert abs(compiled.loss_sum.item() - out.loss_sum.item()) < 1e-5 * out.loss_sum.item()
    for name, grad in got.items():
        assert_snr(grad, want[name], 90, name)
