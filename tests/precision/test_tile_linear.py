"""The tile-scaled linear layer against float64 matmuls of the operands it should have multiplied."""

import gc
import itertools
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.cover import some
from tilewright.core.errors import ConfigError
from tilewright.core.hardware import detect_machine
from tilewright.formats.quant_error import sqnr_db
from tilewright.formats.quantize import quantize
from tilewright.formats.scaling import BLOCK_TILE, ROW_TILE, TENSORWISE
from tilewright.formats.spec import E4M3, E5M2
from tilewright.formats.tiled import FP8_BLOCK, fp8_format
from tilewright.ops.kernels import Kernels
from tilewright.precision.convert import convert, set_mode
from tilewright.precision.float8.gemm.gemm_ops import StaticConfig, matmuls
from tilewright.precision.float8.gemm.input_cache import InputCopies, InputShare
from tilewright.precision.float8.gemm.operands import quantize_copies
from tilewright.precision.float8.gemm.weight_store import contents
from tilewright.precision.float8.linear import Float8Linear, new_switch, operands_of
from tilewright.precision.float8.weight_cache import QuantizedWeights
from tilewright.precision.policy.gemm_formats import SCALED_FORMATS, Gemms, named_format
from tilewright.precision.policy.policy import Policy, Rule

KERNELS = Kernels.default()
SHAPES = [(256, 128, 384), (1, 576, 200), (130, 72, 576), (0, 128, 64), (300, 1000, 8)]


def tile_linear(x, weight, bias, gemms, kernels):
    """x W^T + b without a layer: the three matmuls as a layer calls them."""
    keep_value, form = not gemms.wgrad.scaled, operands_of(gemms).input
    column = not keep_value and weight.requires_grad and torch.is_grad_enabled()
    copies = InputCopies(*quantize_copies(x.detach(), form, kernels, row=gemms.fprop.scaled, column=column))
    fixed = StaticConfig(keep_value, kernels.spec, torch.bfloat16)
    return matmuls(x, weight, bias, copies, None, new_switch(gemms), fixed)


def rounded(x, spec, tile):
    """The operand as it is multiplied, in float64."""
    return quantize(x, fp8_format(spec, tile)).dequantize().double()


def operands(x, weight, dy, gemms):
    """(x for fprop, W for fprop, dy for dgrad, W for dgrad, dy for wgrad, x for wgrad), independent of the layer."""

    def pick(name, tensor, spec, tile, role):
        if name == "bf16":
            return tensor.bfloat16().double()
        if name == "fp32":
            return tensor.double()
        if not name.startswith("fp8"):  # whose bits `test_recipe_formats` writes out
            return quantize(tensor, getattr(named_format(name).operands, role)).dequantize().double()
        return rounded(tensor, spec, TENSORWISE if name == "fp8_tensorwise" else tile)

    def grad_spec(name):
        return E4M3 if name == "fp8_tile" else E5M2

    column = lambda name, t, spec, role: pick(name, t.T.contiguous(), spec, ROW_TILE, role).T  # noqa: E731
    return (
        pick(gemms.fprop.name, x, E4M3, ROW_TILE, "input"),
        pick(gemms.fprop.name, weight, E4M3, BLOCK_TILE, "weight"),
        pick(gemms.dgrad.name, dy, grad_spec(gemms.dgrad.name), ROW_TILE, "gradient"),
        pick(gemms.dgrad.name, weight.T, E4M3, BLOCK_TILE, "weight").T,
        column(gemms.wgrad.name, dy, grad_spec(gemms.wgrad.name), "gradient"),
        column(gemms.wgrad.name, x, E4M3, "input"),
    )


def assert_rounding_only(ours, exact, magnitude, what):
    """Equal but for FP32 sums and one rounding to BF16. `magnitude` is the matmul of absolute values."""
    bound = exact.abs() * 2.0**-8 + magnitude * 2.0**-20 + 1e-30
    excess = (ours.double() - exact).abs() / bound
    worst = int(excess.argmax()) if excess.numel() else 0
    assert excess.numel() == 0 or excess.max() <= 1, (
        f"{what}: element {worst} is {ours.flatten()[worst].item()}, exact {exact.flatten()[worst].item()}"
    )


MIXTURES = [
    *(Gemms.all(name) for name in SCALED_FORMATS),
    Gemms.of("fp8_tile", "bf16", "bf16"),
    Gemms.of("bf16", "fp8_tile", "bf16"),
    Gemms.of("bf16", "bf16", "fp8_tile"),
    Gemms.of("fp8_tile", "fp8_hybrid", "fp8_tile"),
    Gemms.of("fp8_tile", "fp32", "fp8_hybrid"),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("gemms", MIXTURES, ids=str)
@pytest.mark.support("fp8", "one")
def test_three_products_multiply_the_operands_they_should(gemms, shape):
    num, num_in, num_out = shape
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num, num_in, generator=generator).bfloat16().requires_grad_()
    weight = (torch.randn(num_out, num_in, generator=generator) / num_in**0.5).requires_grad_()
    bias = torch.randn(num_out, generator=generator).requires_grad_()
    dy = (torch.randn(num, num_out, generator=generator) * 1e-3).bfloat16()
    out = tile_linear(x, weight, bias, gemms, KERNELS)
    dx, dw, db = torch.autograd.grad(out, (x, weight, bias), dy)
    assert (out.dtype, dx.dtype, dw.dtype, db.dtype) == (torch.bfloat16, x.dtype, torch.float32, torch.float32)
    x1, w1, dy1, w2, dy2, x2 = operands(x.detach(), weight.detach(), dy, gemms)
    wide_bias = bias.detach().bfloat16().double()  # the bias has the dtype of the result
    assert_rounding_only(out, x1 @ w1.T + wide_bias, x1.abs() @ w1.abs().T + wide_bias.abs(), "fprop")
    assert_rounding_only(dx, dy1 @ w2, dy1.abs() @ w2.abs(), "dgrad")
    assert_rounding_only(dw, dy2.T @ x2, dy2.abs().T @ x2.abs(), "wgrad")
    assert_rounding_only(db, dy.double().sum(0), dy.double().abs().sum(0), "bias")


def test_noise_is_that_of_three_mantissa_bits():
    x, weight = torch.randn(512, 512, requires_grad=True), nn.Parameter(torch.randn(512, 512) / 23)
    dy = torch.randn(512, 512)
    exact = torch.autograd.grad(x @ weight.T, (x, weight), dy)
    ours = torch.autograd.grad(tile_linear(x, weight, None, Gemms.all("fp8_tile"), KERNELS), (x, weight), dy)
    for theirs, mine in zip(exact, ours, strict=True):
        assert 26 < sqnr_db(theirs, mine) < 36  # two operands with a relative error of up to 2^-4 each


def test_an_overflow_upstream_stays_visible():
    x = torch.randn(4, 256)
    x[2, 7] = float("inf")
    out = tile_linear(x, torch.randn(8, 256), None, Gemms.all("fp8_tile"), KERNELS)
    assert out[2].isnan().all()
    assert out[[0, 1, 3]].isfinite().all()


class Branches(nn.Module):
    """Three layers that read one input, and one that reads theirs."""

    def __init__(self, dim=256):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.down = (nn.Linear(dim, dim, bias=i == 1) for i in range(4))

    def forward(self, x):
        return self.down(torch.tanh(self.q_proj(x)) * self.k_proj(x) + self.v_proj(x))


class CountingKernels(Kernels):
    """Notes the shape of each quantised matrix."""

    def __init__(self):
        super().__init__(detect_machine())
        self.seen = []

    def quantize(self, x_MK, form, **kwargs):
        self.seen.append(("one", tuple(x_MK.shape), str(form.tile)))
        return super().quantize(x_MK, form, **kwargs)

    def quantize_both(self, x_MK, form):
        self.seen.append(("both", tuple(x_MK.shape), ""))
        return super().quantize_both(x_MK, form)


@pytest.fixture
def counting(monkeypatch):
    """Kernels that count, also where the matmuls make their own from text."""
    kernels = CountingKernels()
    monkeypatch.setattr("tilewright.precision.float8.gemm.gemm_ops.kernels_of", lambda spec: kernels)
    return kernels


def converted(mode="fp8_tile", kernels=None, **policy):
    torch.manual_seed(0)
    model = Branches()
    convert(model, Policy(mode, **policy), kernels=kernels or KERNELS)
    return model


def test_one_quantisation_is_shared_by_layers_that_read_one_input(counting):
    kernels = counting
    model = converted(kernels=kernels)
    out = model(torch.randn(100, 256))
    inputs = [seen for seen in kernels.seen if seen[0] == "both"]
    assert inputs == [("both", (100, 256), "")] * 2  # one for q, k and v, one for down
    kernels.seen.clear()
    out.sum().backward()
    assert [seen[0] for seen in kernels.seen].count("both") == 4  # one output gradient each


def test_compiled_code_quantises_one_input_once_too():
    torch.compiler.reset()
    model = converted()
    compiled = torch.compile(model, fullgraph=True)
    counts = []
    for run in (compiled, compiled, model):
        x = torch.randn(100, 256)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            run(x).sum().backward()
        counts.append(sum(e.count for e in profile.key_averages() if e.key == "tilewright::cpu_encode_both"))
    assert counts[1:] == [2 + 4] * 2  # two inputs and four output gradients


def test_a_changed_or_dead_input_is_not_shared():
    share, made = InputShare(), []

    def copies_of(x):
        return share.copies_of(x, ("key",), lambda: made.append(1) or InputCopies(None, None))

    x = torch.randn(4)
    assert copies_of(x) is copies_of(x)
    x.add_(1)
    copies_of(x)
    assert len(made) == 2
    assert copies_of(x.clone()) is not copies_of(x)  # equal values, but who knows for how long
    copies = weakref.ref(copies_of(torch.randn(4)))  # the input dies at once, and its copies with it
    gc.collect()
    assert copies() is None


def saved_bytes(model, x):
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    own = {p.untyped_storage()._cdata for p in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(x)
    return sum(size for key, size in storages.items() if key not in own), out


def test_inputs_of_linear_layers_take_half_the_bytes_for_backward():
    class Linears(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(512, 1024, bias=False), nn.Linear(1024, 512, bias=False)

        def forward(self, x):
            return self.down(self.up(x))

    bytes_of = {}
    for mode in ("bf16_mixed", "fp8_tile"):
        model = Linears()
        convert(model, mode, kernels=KERNELS)
        bytes_of[mode], _ = saved_bytes(model, torch.randn(1024, 512, dtype=torch.bfloat16))
    kept = 1024 * (512 + 1024)
    assert bytes_of["fp8_tile"] <= kept * 1.04  # codes, and a scale of 4 bytes for 128 of them
    assert bytes_of["fp8_tile"] <= 0.55 * bytes_of["bf16_mixed"] or bytes_of["bf16_mixed"] < 2 * kept


def test_weights_are_quantised_once_a_step_when_managed(counting):
    kernels = counting
    model = converted(kernels=kernels)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)  # writes weights without moving _version
    weights = QuantizedWeights(model, optimizer)
    kernels.seen.clear()
    for _ in range(3):
        for _ in range(4):
            model(torch.randn(64, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [seen[2] for seen in kernels.seen].count("128x128") == 3 * 4  # steps times layers
    for layer in weights.layers():
        fresh = quantize(layer.weight.detach(), FP8_BLOCK)
        kept = contents(layer.weight_store, layer.weight.shape, FP8_BLOCK)
        assert torch.equal(kept.qdata, fresh.qdata)
        assert torch.equal(kept.scale_inv, fresh.scale_inv)
    weights.close()
    assert model.down.weight_store is None


def test_managed_and_unmanaged_weights_give_the_same_bits():
    x = torch.randn(64, 256)
    results = []
    for managed in (False, True):
        model = converted()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if managed:
            QuantizedWeights(model, optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("mode", "managed"),
    some(itertools.product(SCALED_FORMATS, (True, False)), ("fp8_tile", True)),
)
def test_compiled_equals_eager(mode, managed):
    torch.compiler.reset()
    x = torch.randn(130, 256).bfloat16()
    model = converted(mode)
    if managed:
        QuantizedWeights(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(x).sum().backward()
    eager = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    compiled = torch.compile(model, fullgraph=True)
    out = compiled(x)
    out.sum().backward()
    for (name, parameter), expected in zip(model.named_parameters(), eager, strict=True):
        # Tanh and sums are fused, so operands may round elsewhere; E2M1's steps are four times E4M3's (12 dB).
        assert sqnr_db(expected, parameter.grad) > (18 if mode.endswith("p4") else 30), name
    assert sqnr_db(model(x), out) > (23 if mode.endswith("p4") else 35)


def test_recomputation_gives_the_same_bits():
    x = torch.randn(70, 256, requires_grad=True)
    model = converted()
    plain = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    again = torch.autograd.grad(checkpoint(model, x, use_reentrant=False).square().sum(), [x, *model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_gradients_add_up_over_micro_batches():
    x = torch.randn(256, 256)
    model = converted()
    model(x).sum().backward()
    whole = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for part in x.split(128):  # tiles of 128 tokens do not straddle the parts
        model(part).sum().backward()
    for parameter, expected in zip(model.parameters(), whole, strict=True):
        assert sqnr_db(expected, parameter.grad) > 45


def test_switching_modes_keeps_parameters_and_optimizer():
    model = converted()
    parameters = list(model.parameters())
    assert isinstance(model.down, Float8Linear)
    set_mode(model, "bf16_mixed")
    assert not isinstance(model.down, Float8Linear)
    set_mode(model, "fp8_hybrid")
    assert model.q_proj.gemms == Gemms.all("fp8_hybrid")
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))


def test_rules_name_single_products():
    model = converted(rules=(Rule("down", wgrad="bf16"), Rule("q_proj", compute="bf16")))
    assert str(model.down.gemms) == "fp8_tile/fp8_tile/bf16"
    assert not isinstance(model.q_proj, Float8Linear)
    assert [row.compute for row in model.precision_report.rows if row.fqn == "down"] == ["fp8_tile/fp8_tile/bf16"]


def test_one_layer_has_one_kind_of_scale():
    with pytest.raises(ConfigError, match="Matmuls of one layer need the same kind of scale"):
        Gemms.of("fp8_tile", "fp8_tensorwise", "bf16")


def test_a_rule_that_matches_nothing_names_near_ones():
    with pytest.raises(ConfigError, match="q_proj"):
        convert(Branches(), Policy("fp8_tile", (Rule("q_porj", wgrad="bf16"),)), kernels=KERNELS)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("policy", ["fp8_tile", "fp8_hybrid", "fp8_tensorwise"])
def test_without_gradients_the_output_is_the_same(mode, policy):
    """Also with the copies of an input that an earlier forward with gradients left."""
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(200, 300), nn.Linear(200, 40)])
    convert(layers, policy, kernels=Kernels.default())
    x = torch.randn(5, 200)
    wanted = [layer(x) for layer in layers]
    with mode():
        assert all(torch.equal(layer(x), want) for layer, want in zip(layers, wanted, strict=True))
        y = torch.randn(5, 200)
        assert torch.equal(layers[0](y), layers[0](y.clone()))
