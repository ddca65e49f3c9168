"""The article "DeepSeek-R1 and FP8 mixed precision training": what its samples and claims are, and what is true."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import tilewright
from tilewright import FP8Quantizer, Policy
from tilewright.core.errors import ConfigError
from tilewright.core.hardware import fp8_choice
from tilewright.formats.quantize import quantize
from tilewright.formats.spec import E4M3
from tilewright.formats.tiled import FP8_ROW


class ArticleQuantizer(nn.Module):
    """The article's `FP8Quantizer`, word for word."""

    def __init__(self, scale, zero_point):
        super().__init__()
        self.scale = scale
        self.zero_point = zero_point

    def forward(self, x):
        x_quant = torch.round((x / self.scale) + self.zero_point)
        return (x_quant - self.zero_point) * self.scale


def test_the_articles_quantizer_rounds_to_integers():
    """Not FP8: evenly spaced values, of which small ones become zero, and none is ever too large for 8 bits."""
    x = torch.tensor([0.3, 0.4, 1.3, 100.2, 1e6])
    article, ours = ArticleQuantizer(1.0, 0)(x), FP8Quantizer(scale=1.0, zero_point=0)(x)
    assert article.tolist() == [0.0, 0.0, 1.0, 100.0, 1e6]
    assert torch.equal(article, article.round())
    assert ours.tolist() == [0.3125, 0.40625, 1.25, 104.0, 448.0]  # within 1/16 of each; the largest is 448


def test_the_articles_quantizer_has_no_gradient():
    """torch.round's gradient is zero: a model with it in the loop learns nothing. Ours passes it straight through."""
    for quantizer, want in ((ArticleQuantizer(0.5, 0), 0.0), (FP8Quantizer(0.5, 0), 1.0)):
        x = torch.randn(8, requires_grad=True)
        quantizer(x).sum().backward()
        assert x.grad.unique().tolist() == [want]


def test_a_zero_point_belongs_to_integers():
    """E4M3 is symmetric about zero and densest there: a shift would move the density away from the small values."""
    qdata = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    finite = qdata[qdata.isfinite()]
    assert torch.equal(finite.sort().values, (-finite).sort().values)
    x = torch.tensor([0.01, 0.02, -0.03])
    shifted = ((x / 0.1 + 8).to(torch.float8_e4m3fn).float() - 8) * 0.1  # what a zero point of 8 would do
    plain = (x / 0.1).to(torch.float8_e4m3fn).float() * 0.1
    assert (shifted - x).abs().max() > 10 * (plain - x).abs().max()
    with pytest.raises(ConfigError, match="FP8 has no zero point"):
        FP8Quantizer(0.1, 8)


def test_per_channel_weights_and_per_tensor_or_per_token_activations():
    """As the article has it; each part gets the scale that its own largest value asks for."""
    weight = torch.tensor([[1.0, 0.5], [1e-4, 3e-5]])
    assert (FP8Quantizer(granularity="channel")(weight) / weight - 1).abs().max() <= 1 / 16
    tokens = torch.tensor([[1e5, 1.0], [1e-3, 1e-4]])
    assert FP8Quantizer(granularity="tensor")(tokens)[1].tolist() == [0.0, 0.0]
    assert (FP8Quantizer(granularity="token")(tokens)[1] / tokens[1] - 1).abs().max() <= 1 / 16


def test_memory_of_activations():
    """A quarter of FP32: nearly, of codes that are kept (a scale for 128 values comes on top). A fake quantiser saves
    nothing: its result is FP32 again."""
    x = torch.randn(64, 1024)
    assert FP8Quantizer()(x).nbytes == x.nbytes
    assert quantize(x, FP8_ROW).nbytes == x.nbytes * (1 / 4 + 1 / 128)


def test_clipping_gradients_to_six_does_not_prevent_overflow():
    """Against FP8 overflow, the article says. E4M3 goes to 448, a scale moves that anywhere, and what is
    lost in gradients is at the other end, where clipping does nothing."""
    assert E4M3.max == 448
    large = torch.tensor([1e6, -3e5, 2e4])
    assert (FP8Quantizer()(large) / large - 1).abs().max() <= 1 / 16
    small = torch.tensor([1e-4, -3e-5])
    unscaled = FP8Quantizer(1.0)
    assert unscaled(small.clamp(-6, 6)).tolist() == [0.0, 0.0]
    assert (FP8Quantizer()(small) / small - 1).abs().max() <= 1 / 16


def test_a_scale_that_is_found_once_in_a_thousand_steps():
    """As the article has it. Values that grow meanwhile are clipped. Here each tensor gets its own scale; a
    fixed one is for those who ask for it."""
    quantizer = FP8Quantizer(calibrate_batches=1)
    first = torch.tensor([1.0, -1.5])
    quantizer(first)
    grown = first * 4
    assert quantizer(grown).abs().max() < 0.6 * grown.abs().max()
    assert torch.equal(FP8Quantizer()(grown), grown)


def test_architecture_sample():
    """`if torch.cuda.get_device_capability()[0] >= 9: quant_mode = 'full_fp8' else: 'hybrid_fp16'`.

    It raises where there is no CUDA. The names are kept, with the reason and the matmuls that the unit runs.
    """
    if not torch.cuda.is_available():
        with pytest.raises((AssertionError, RuntimeError)):
            torch.cuda.get_device_capability()
    machine = replace(tilewright.detect_machine("cpu"), capability=None)
    assert fp8_choice(machine).mode == "hybrid_fp16"
    hopper = fp8_choice(replace(machine, device="cuda", capability=(9, 0)))
    assert (hopper.mode, hopper.native[0]) == ("full_fp8", "fp8_tile")
    assert fp8_choice(replace(machine, device="cuda", capability=(8, 0))).mode == "hybrid_fp16"
    assert Policy("hybrid", device_type="cpu").decide("layer", "linear").compute == "bf16"
    assert Policy("hybrid", device_type="cuda").decide("layer", "linear").compute == "fp16"


def test_ampere_has_no_fp8_operations():
    """The article says some. None at 8.0 and 8.6, where operands are decoded, exactly; Ada, 8.9, has a unit."""
    machine = tilewright.detect_machine("cpu")
    for capability in ((8, 0), (8, 6)):
        choice = fp8_choice(replace(machine, device="cuda", capability=capability))
        assert choice.native == ()
        assert "has no FP8 unit" in choice.reason
