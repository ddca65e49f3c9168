"""Tiled MLPs against the whole ones: results, gradients, how many of them, and what is in memory."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.models.shapes import KERNELS, make_batch
from tests.models.test_hf_models import make, make_inputs
from tests.ops.compare import LargestTensor
from tilewright.memory.chunked_mlp import chunk_mlps
from tilewright.models.build import init_weights
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.models.decoder.layers import MLP
from tilewright.precision.convert import convert


def quiet(text):
    raise AssertionError(f"unexpected note: {text}")


class Layer(nn.Module):
    """Something around an MLP."""

    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp

    def forward(self, x):
        return x + self.mlp(x)


def make_layer(dtype=torch.float64, dim=12, hidden=40):
    torch.manual_seed(0)
    return Layer(MLP(dim, hidden, KERNELS)).to(dtype)


def results(layer, x, run=None):
    """Output, gradient of x, and of each parameter."""
    x = x.clone().requires_grad_()
    out = (run or layer)(x)
    (out * torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    return {"out": out.detach(), "x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}


def assert_equal_results(got, want, rtol):
    assert got.keys() == want.keys()
    for name, value in want.items():
        worst = (got[name] - value).abs().max() / value.abs().max()
        assert worst <= rtol, f"{name} is off by {worst:.2e} of its largest element"


@pytest.mark.parametrize("tiles", [2, 3, 7, 100])
@pytest.mark.parametrize("shape", [(2, 9, 12), (23, 12), (1, 1, 12)])
@pytest.mark.support("tiled", "one")
def test_equals_the_whole_mlp(tiles, shape):
    layer, x = make_layer(), torch.randn(*shape, dtype=torch.float64)
    whole = results(copy.deepcopy(layer), x)
    assert chunk_mlps(layer, tiles, quiet) == ["mlp"]
    assert_equal_results(results(layer, x), whole, 1e-14)  # FP64 sums in another order
    assert list(layer.state_dict()) == ["mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"]


def test_inside_of_a_layer_that_is_recomputed():
    layer, x = make_layer(), torch.randn(3, 11, 12, dtype=torch.float64)
    whole = results(copy.deepcopy(layer), x)
    chunk_mlps(layer, 4, quiet)
    assert_equal_results(
        results(layer, x, lambda x: checkpoint(layer, x, use_reentrant=False)), whole, 1e-14
    )  # fmt: skip


def test_the_hidden_values_of_one_tile_are_alive():
    layer, tokens, hidden = make_layer(torch.float32, hidden=4096), 512, 4096
    sizes = {}
    for tiles in (1, 4):
        model = copy.deepcopy(layer)
        if tiles > 1:
            chunk_mlps(model, tiles, quiet)
        with LargestTensor() as largest:
            results(model, torch.randn(tokens, 12))
        sizes[tiles] = largest.num_bytes
    assert sizes == {1: 4 * tokens * hidden, 4: 4 * tokens * hidden // 4}


def test_each_weight_gets_one_gradient_summed_in_fp32():
    """A 16-bit weight whose gradient is a sum of many small parts: summed in BF16 it would stop growing."""
    layer = make_layer(torch.bfloat16)
    x = torch.full((1024, 12), 0.5, dtype=torch.bfloat16)
    exact = copy.deepcopy(layer).double()
    calls = []
    for name, param in layer.named_parameters():
        param.grad_dtype = torch.float32
        param.register_post_accumulate_grad_hook(lambda param, name=name: calls.append((name, param.grad.dtype)))
    chunk_mlps(layer, 8, quiet)
    layer.mlp(x).sum().backward()
    exact.mlp(x.double()).sum().backward()
    assert sorted(calls) == sorted((name, torch.float32) for name, _ in layer.named_parameters())
    for (name, param), (_, want) in zip(layer.named_parameters(), exact.named_parameters(), strict=True):
        worst = (param.grad - want.grad).abs().max() / want.grad.abs().max()
        assert worst < 2**-6, f"{name}: {worst}"  # each tile's part is a BF16 matmul of BF16-rounded factors


def test_draws_the_same_numbers_again_and_leaves_the_generator_alone():
    torch.manual_seed(1)
    mlp = nn.Sequential(nn.Linear(6, 30), nn.Dropout(0.5), nn.Linear(30, 6)).double()
    tiled, x = Layer(copy.deepcopy(mlp)), torch.randn(20, 6, dtype=torch.float64, requires_grad=True)
    chunk_mlps(tiled, 4, quiet)
    tiled.mlp.eval()(x)  # the trial of its class
    tiled.train()
    torch.manual_seed(2)
    want = torch.cat([mlp(part) for part in x.split(5)])
    (grad,) = torch.autograd.grad(want.square().sum(), x)
    torch.manual_seed(2)
    got = tiled.mlp(x)
    state = torch.get_rng_state()
    (tiled_grad,) = torch.autograd.grad(got.square().sum(), x)
    torch.testing.assert_close(got, want, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(tiled_grad, grad, rtol=1e-13, atol=1e-13)
    assert torch.equal(torch.get_rng_state(), state)


def test_frozen_weights_and_inputs_without_gradient():
    layer = make_layer()
    layer.mlp.up_proj.requires_grad_(False)
    chunk_mlps(layer, 3, quiet)
    layer.mlp(torch.randn(10, 12, dtype=torch.float64)).sum().backward()
    assert layer.mlp.up_proj.weight.grad is None
    assert layer.mlp.gate_proj.weight.grad.any()


@pytest.mark.parametrize("mode", ["fp8_tile", "bf16_mixed"])
def test_own_decoder_in_low_precision(mode):
    """Tiles are whole multiples of 128 tokens, so that scales of 128 tokens are those of the whole MLP."""
    config = DecoderConfig.of(vocab_size=64, dim=64, num_heads=2, num_layers=2, ffn_dim=192)
    batch, losses, grads = make_batch(4, 128, vocab=64), {}, {}
    for tiles in (1, 3):
        model = Decoder(config, KERNELS)
        init_weights(model, 0)
        convert(model, mode, kernels=KERNELS)
        if tiles > 1:
            assert len(chunk_mlps(model, tiles, quiet)) == 2
        loss = model.loss(batch).loss_sum
        loss.backward()
        losses[tiles], grads[tiles] = loss.item(), {name: p.grad for name, p in model.named_parameters()}
    assert losses[1] == losses[3]
    for name, want in grads[1].items():
        noise = (grads[3][name] - want).norm() / want.norm()
        # Of the whole, a matmul of 16 bit is rounded once; of tiles each tile's part is. FP8 matmuls sum in FP32.
        assert noise < 2**-8, f"{name}: {noise}"


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "gemma2", "bloom"])
def test_foreign_models(name):
    model, whole = (make(name).double().eval() for _ in range(2))
    batch = make_inputs(model)
    notes = []
    assert len(chunk_mlps(model, 3, notes.append)) == 2
    for each in (whole, model):
        each.loss(batch).loss_sum.backward()
    assert notes == (["BloomMLP is not cut into chunks: it takes more than its tokens."] if name == "bloom" else [])
    for (fqn, got), (_, want) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
        worst = (got.grad - want.grad).abs().max() / want.grad.abs().max().clamp_min(1e-30)
        assert worst < 1e-9, f"{fqn} is off by {worst:.2e}"


def test_what_cannot_be_tiled_runs_whole_and_is_told():
    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return (x - x.mean(-2, keepdim=True)) * self.weight

    notes, layer = [], Layer(Mixing())
    x = torch.randn(2, 6, 4)
    want = layer(x)
    chunk_mlps(layer, 2, notes.append)
    torch.testing.assert_close(layer(x), want)
    layer(x)
    assert len(notes) == 1
    assert "Mixing is not cut into chunks: a token's result depends on the others" in notes[0]
    mixture, notes = make("mixtral"), []
    assert chunk_mlps(mixture, 2, notes.append) == []
    assert "mixtures of experts" in notes[0]
    assert "no effect" in notes[1]


@pytest.mark.slow
def test_inside_of_a_compiled_layer():
    layer, x = make_layer(torch.float32), torch.randn(2, 50, 12)
    whole = results(copy.deepcopy(layer), x)
    chunk_mlps(layer, 3, quiet, compile=True)
    layer.compile()
    assert_equal_results(results(layer, x), whole, 1e-5)
