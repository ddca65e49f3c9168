"""Converted layers against FP64 references, and what a layer promises: same objects, FP32 gradients, no autocast."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.ops.compare import assert_snr
from tilewright.formats.spec import SPECS, TF32, round_to
from tilewright.precision.convert import convert
from tilewright.precision.mixed.cast_layers import CASTS, Cast
from tilewright.precision.policy.policy import Policy, Rule

LAYERS = {
    "linear": (lambda: nn.Linear(48, 40), (4, 10, 48)),
    "linear_no_bias": (lambda: nn.Linear(48, 40, bias=False), (4, 10, 48)),
    "conv1d": (lambda: nn.Conv1d(8, 6, 3, padding=1, padding_mode="circular"), (2, 8, 16)),
    "conv2d": (lambda: nn.Conv2d(8, 12, 3, stride=2, groups=2), (2, 8, 9, 9)),
    "conv3d": (lambda: nn.Conv3d(4, 6, 3, dilation=1), (2, 4, 5, 5, 5)),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(8, 6, 3, stride=2), (2, 8, 9)),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(8, 6, 3, stride=2, output_padding=1), (2, 8, 5, 5)),
    "conv_transpose3d": (lambda: nn.ConvTranspose3d(4, 6, 2, stride=2), (2, 4, 3, 3, 3)),
}
SNR_DB = {"bf16": 38, "fp16": 55, "tf32": 58, "fp32": 120}  # below the noise of one rounding, 6 dB a bit


def run(layer: nn.Module, x: torch.Tensor, grad_seed: int = 1) -> list[torch.Tensor]:
    """Output, input gradient and parameter gradients."""
    x = x.clone().requires_grad_()
    out = layer(x)
    generator = torch.Generator().manual_seed(grad_seed)
    out.backward(torch.randn(out.shape, generator=generator).to(out.dtype))
    return [out.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]


@pytest.mark.parametrize("compute", ["bf16", "fp16", "tf32", "fp32"])
@pytest.mark.parametrize("name", LAYERS)
def test_products_forward_and_backward(name, compute):
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    layer, x = make(), torch.randn(shape)
    want = run(copy.deepcopy(layer).double(), x.double())
    before = dict(layer.named_parameters())
    report = convert(layer, Policy("fp32", (Rule(compute=compute),), device_type="cpu")).precision_report
    assert report.rows[0].compute == compute
    got = run(layer, x)
    for tensor, reference in zip(got, want, strict=True):
        assert_snr(tensor, reference, SNR_DB[compute], f"{name} {compute}")
    assert all(dict(layer.named_parameters())[key] is value for key, value in before.items())
    assert all(parameter.grad.dtype == torch.float32 for parameter in layer.parameters())


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_linear_equals_torchs_own_bf16_linear(compute):
    """The matmul is torch's; only the parameters are kept wider."""
    torch.manual_seed(0)
    dtype = SPECS[compute].dtype
    layer = nn.Linear(32, 24)
    plain = copy.deepcopy(layer).to(dtype)
    convert(layer, Policy("fp32", (Rule(compute=compute),)))
    layer.output_dtype = dtype
    x = torch.randn(5, 32).to(dtype)
    for got, want in zip(run(layer, x), run(plain, x), strict=True):
        assert torch.equal(got.to(dtype), want)


def test_tf32_has_the_operands_of_a_tf32_unit_in_all_three_products():
    """With operands that differ from their TF32 value, results equal those of the rounded operands exactly."""
    torch.manual_seed(0)
    layer = nn.Linear(16, 8, bias=False)
    x, grad = torch.randn(6, 16), torch.randn(6, 8)
    x_r, w_r, g_r = (round_to(t, TF32) for t in (x, layer.weight.detach(), grad))
    convert(layer, "tf32")
    x.requires_grad_()
    out = layer(x)
    out.backward(grad)
    assert torch.equal(out, F.linear(x_r, w_r))
    assert torch.equal(x.grad, g_r @ w_r)
    assert torch.equal(layer.weight.grad, g_r.T @ x_r)
    assert not torch.equal(out, F.linear(x, layer.weight))


def test_tf32_gradient_of_the_bias_is_not_rounded():
    layer = nn.Linear(4, 4)
    convert(layer, "tf32")
    grad = torch.full((1, 4), 1 + 2**-12)
    layer(torch.ones(1, 4)).backward(grad)
    assert torch.equal(layer.bias.grad, grad[0])


@pytest.mark.parametrize("mode", ["bf16_mixed", "hybrid", "pure_fp16"])
def test_embedding_rounds_rows_and_not_the_table(mode):
    table = nn.Embedding(20, 8, padding_idx=3)
    want = table.weight.detach().clone()
    convert(table, mode)
    ids = torch.tensor([[1, 3, 1, 7]])
    out = table(ids)
    stream = {"bf16_mixed": torch.bfloat16, "hybrid": torch.float32, "pure_fp16": torch.float16}[mode]
    assert out.dtype == stream
    assert torch.equal(out, want[ids].to(stream))
    out.sum().backward()
    assert table.weight.grad[1].tolist() == [2.0] * 8
    assert table.weight.grad[3].tolist() == [0.0] * 8


NORMS = {
    "layer_norm": (lambda: nn.LayerNorm(64), (8, 64)),
    "rms_norm": (lambda: nn.RMSNorm(64), (8, 64)),
    "group_norm": (lambda: nn.GroupNorm(4, 16), (4, 16, 6, 6)),
    "instance_norm": (lambda: nn.InstanceNorm2d(16, affine=True), (4, 16, 6, 6)),
    "batch_norm1d": (lambda: nn.BatchNorm1d(64), (32, 64)),
    "batch_norm2d": (lambda: nn.BatchNorm2d(16), (4, 16, 6, 6)),
    "batch_norm3d": (lambda: nn.BatchNorm3d(4), (2, 4, 4, 4, 4)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", NORMS)
def test_norms_have_fp32_statistics_and_keep_the_dtype(name, dtype):
    """A mean of 100 times the deviation: statistics in 16 bit would be off by whole units."""
    torch.manual_seed(0)
    make, shape = NORMS[name]
    layer = make()
    x = (torch.randn(shape) + 100).to(dtype)
    want = copy.deepcopy(layer).double()(x.double())
    convert(layer, "bf16_mixed")
    out = layer(x)
    assert out.dtype == dtype
    error = (out.double() - want).abs().max()
    assert error <= want.abs().max() * (torch.finfo(dtype).eps + 1e-4), f"worst error {error:.2e}"
    assert all(buffer.dtype != dtype or dtype == torch.float32 for buffer in layer.buffers())


def test_an_outer_autocast_does_not_overrule_a_layer():
    layer, norm = nn.Linear(8, 8), nn.LayerNorm(8)
    convert(layer, "fp32")
    convert(norm, "fp32")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(torch.ones(2, 8)).dtype == torch.float32
        assert norm(torch.ones(2, 8)).dtype == torch.float32


def test_weights_written_behind_torchs_back_are_seen():
    """Fused AdamW and writes through .data leave `_version` alone: a kept copy would go stale."""
    layer = nn.Linear(8, 8, bias=False)
    convert(layer, "bf16_mixed")
    x = torch.ones(1, 8)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)
    layer(x).sum().backward()
    version = layer.weight._version
    optimizer.step()
    layer.weight.data.mul_(2)
    assert layer.weight._version == version
    assert torch.equal(layer(x), F.linear(x.bfloat16(), layer.weight.bfloat16()))


def test_a_converted_layer_copies_and_pickles():
    layer = nn.Linear(8, 4)
    convert(layer, "bf16_mixed")
    x = torch.ones(1, 8)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(x), layer(x))
        assert twin.weight is not layer.weight
        assert list(twin.state_dict()) == ["weight", "bias"]


def test_a_layer_says_what_it_computes_in():
    layer = nn.Linear(8, 4)
    convert(layer, "bf16_mixed")
    assert "compute=bfloat16" in repr(layer)


@pytest.mark.parametrize(("plain", "cast"), CASTS.items(), ids=lambda c: c.__name__)
def test_every_class_stands_for_one_torch_layer(plain, cast):
    assert issubclass(cast, plain)
    assert issubclass(cast, Cast)
    assert plain.__module__.startswith("torch.nn")
