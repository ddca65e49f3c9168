"""The monitor's numbers against float64 references, and that looking changes nothing."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.models.shapes import make_batch, make_decoder
from tilewright.formats.quantize import quantize
from tilewright.formats.scaling import BLOCK_TILE, ROW_TILE
from tilewright.formats.spec import E4M3
from tilewright.formats.tiled import fp8_format
from tilewright.precision.controller.layer_statistics import COMPARED, TENSORS, LayerStats
from tilewright.precision.controller.monitor import Monitor, compare, measure_layer, picked_rows
from tilewright.precision.controller.precision_controller import sites_of
from tilewright.precision.convert import convert
from tilewright.precision.float8.linear import float8_layers
from tilewright.precision.lora.lora import add_lora
from tilewright.precision.policy.gemm_formats import GEMM_NAMES
from tilewright.precision.policy.policy import Policy, Rule


def one_layer(rules=(), features=(200, 72)):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(*features, bias=True))
    convert(model, Policy("fp8_tile", rules=rules))
    return model


def rounded(x, tile):
    return quantize(x, fp8_format(E4M3, tile)).dequantize().double()


def columns(x):
    """x as weight gradients read it: tiles along the rows."""
    return rounded(x.T.contiguous(), ROW_TILE).T


def heavy_tailed(*shape, seed):
    """Gaussian elements with a few that are a million times larger, and some zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    x[torch.rand(*shape, generator=generator) < 0.002] *= 2.0**20
    x[torch.rand(*shape, generator=generator) < 0.05] = 0.0
    return x.bfloat16()


@pytest.mark.parametrize(
    "make",
    [heavy_tailed, lambda *s, seed: torch.randn(*s, generator=torch.Generator().manual_seed(seed)).bfloat16()],
    ids=["outliers", "gaussian"],
)
def test_products_against_float64(make):
    layer = one_layer()[0]
    x, dy = make(300, 200, seed=1), make(300, 72, seed=2)
    found = measure_layer(layer, x, dy)
    weight = layer.weight.detach().double()
    exact = {
        "fprop": (rounded(x, ROW_TILE) @ rounded(layer.weight.detach(), BLOCK_TILE).T, x.double() @ weight.T),
        "dgrad": (rounded(dy, ROW_TILE) @ rounded(layer.weight.detach(), BLOCK_TILE), dy.double() @ weight),
        "wgrad": (columns(dy).T @ columns(x), dy.double().T @ x.double()),
    }
    for gemm, (narrow, shadow) in exact.items():
        matmul = found.matmuls[f"{gemm}.fp8_tile"]
        gain = float((narrow * shadow).sum() / (shadow * shadow).sum())
        cosine = float(F.cosine_similarity(narrow.flatten(), shadow.flatten(), dim=0))
        noise = float(10 * torch.log10((shadow**2).sum() / ((narrow - shadow) ** 2).sum()))
        # Both matmuls are rounded to BF16 besides (2^-9), and the shadow's weight too: that moves a gain by less than
        # 2^-9, and noise of 30 dB by a few hundredths of it.
        assert matmul.gain_low == matmul.gain_high == pytest.approx(gain, abs=2e-3)
        assert matmul.cosine == pytest.approx(cosine, abs=2e-4)
        assert matmul.sqnr_db == pytest.approx(noise, abs=0.5)
        assert f"{gemm}.bf16" not in found.matmuls


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_against_float64(name):
    layer = one_layer()[0]
    x, dy = heavy_tailed(256, 200, seed=1), heavy_tailed(256, 72, seed=2)
    given = {"input": x, "weight": layer.weight.detach(), "gradient": dy, "input_column": x.T, "gradient_column": dy.T}
    tensor, tile = given[name].contiguous(), BLOCK_TILE if name == "weight" else ROW_TILE
    found = measure_layer(layer, x, dy).tensors[name]
    exact, narrow = tensor.double(), rounded(tensor, tile)
    alive = exact != 0
    assert found.amax == exact.abs().max()
    assert found.underflow == pytest.approx(float((alive & (narrow == 0)).sum() / alive.sum()), rel=1e-5)
    assert found.sqnr_db == pytest.approx(
        float(10 * torch.log10((exact**2).sum() / ((exact - narrow) ** 2).sum())), abs=0.01
    )
    assert (found.saturation, found.not_finite) == (0.0, 0.0)
    rows = exact.abs().split(128 if name == "weight" else 1)
    tiles = [part[part > 0] for row in rows for part in row.split(128, dim=1)]
    assert found.dynamic_range_log2 == pytest.approx(
        max(float(torch.log2(t.max() / t.min())) for t in tiles if len(t)), abs=1e-3
    )
    if name != "weight":
        assert found.underflow > 0.05, "the case is meant to lose elements"


def test_products_above_8_bits_are_compared_with_fp32_too():
    layer = one_layer(rules=(Rule("*", op="linear", dgrad="bf16"),))[0]
    found = measure_layer(layer, heavy_tailed(64, 200, seed=1), heavy_tailed(64, 72, seed=2)).matmuls
    assert found.keys() == {*(f"{gemm}.fp8_tile" for gemm in GEMM_NAMES), "dgrad.bf16"}
    assert found["dgrad.bf16"].sqnr_db > 40 > found["dgrad.fp8_tile"].sqnr_db


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_tensors_that_are_not_finite(value):
    layer = one_layer()[0]
    x, dy = heavy_tailed(64, 200, seed=1), heavy_tailed(64, 72, seed=2)
    x[3, 5] = value
    found = measure_layer(layer, x, dy)
    assert found.tensors["input"].not_finite == pytest.approx(1 / x.numel())
    assert found.tensors["gradient"].not_finite == 0.0
    assert math.isnan(found.matmuls["fprop.fp8_tile"].gain_error)
    assert found.matmuls["dgrad.fp8_tile"].gain_error < 0.1


def test_zeros_and_small_numbers():
    small = 1e-30 * torch.randn(8, 8, dtype=torch.float64)  # squares are below FP32's range
    matmul = compare(small.float(), small.float())
    assert (matmul.gain_low, matmul.cosine, matmul.sqnr_db) == (pytest.approx(1), pytest.approx(1), math.inf)
    nothing = compare(torch.zeros(4), torch.zeros(4))
    assert (nothing.gain_error, nothing.cosine, nothing.sqnr_db) == (0.0, 1.0, math.inf)
    lost = compare(torch.zeros(4), torch.ones(4))
    assert (lost.gain_low, lost.cosine, lost.sqnr_db) == (0.0, 0.0, pytest.approx(0.0))


@pytest.mark.parametrize(("num_rows", "max_rows"), [(1000, 384), (1024, 256), (129, 128), (5000, 4992), (300, 256)])
def test_rows_are_picked_in_whole_runs_over_all_of_them(num_rows, max_rows):
    rows = picked_rows(num_rows, max_rows, torch.device("cpu")).tolist()
    starts = [row for row in rows if row % 128 == 0]
    assert len(starts) == max_rows // 128
    assert rows == [row for start in starts for row in range(start, min(start + 128, num_rows))]
    assert starts[0] == 0
    assert len(starts) == 1 or starts[-1] == (num_rows - 1) // 128 * 128


def test_all_rows_where_there_are_few():
    assert picked_rows(256, 256, torch.device("cpu")) is None


def test_a_weight_is_measured_in_its_own_blocks():
    layer = one_layer(features=(200, 600))[0]
    with torch.no_grad():
        layer.weight[512:, :] = heavy_tailed(88, 200, seed=3).float()  # the last block, and a ragged one
    x, dy = heavy_tailed(128, 200, seed=1), heavy_tailed(128, 600, seed=2)
    found = measure_layer(layer, x, dy, max_rows=256).tensors["weight"]
    exact = torch.cat([layer.weight.detach()[:128], layer.weight.detach()[512:]]).double()
    narrow = rounded(layer.weight.detach(), BLOCK_TILE)
    narrow = torch.cat([narrow[:128], narrow[512:]])
    lost = float(((exact != 0) & (narrow == 0)).sum() / (exact != 0).sum())
    assert found.underflow == pytest.approx(lost, rel=1e-5)
    assert lost > 0.05
    assert found.sqnr_db == pytest.approx(
        float(10 * torch.log10((exact**2).sum() / ((exact - narrow) ** 2).sum())), abs=0.01
    )


# ---- looking changes nothing ----


def state(model):
    return {
        **{name: value.clone() for name, value in model.state_dict().items()},
        **{f"grad.{name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None},
        "rng": torch.get_rng_state(),
    }


@pytest.mark.parametrize("kind", ["gqa", "deepseek"])
def test_a_sample_leaves_the_model_as_it_was(kind):
    model = make_decoder(kind)
    convert(model, Policy("fp8_tile"))
    batch = make_batch()
    model.loss(batch).loss_sum.backward()
    before, notes = state(model), model._load_LE
    layers = list(float8_layers(model).items())
    hooks = [len(layer._forward_hooks) for _, layer in layers]
    torch.rand(3)
    rng = torch.get_rng_state()
    evidence = Monitor(model).sample([lambda: (model.loss(batch).loss_sum + 0 * torch.rand(())).backward()] * 2)
    assert torch.equal(torch.get_rng_state(), rng)
    after = state(model)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before if name != "rng")
    assert model._load_LE is notes
    assert [len(layer._forward_hooks) for _, layer in layers] == hooks
    assert set(evidence.layers) == {name for name, _ in layers}
    for name, layer in evidence.layers.items():
        assert layer == LayerStats() or {f"{gemm}.fp8_tile" for gemm in GEMM_NAMES} <= set(layer.matmuls), name
        assert all(key.partition(".")[2] in COMPARED for key in layer.matmuls)


def test_a_model_that_raises_is_left_as_it_was():
    model = one_layer()

    def fail():
        model(torch.ones(2, 200)).sum().backward()
        raise ValueError("from the pass")

    with pytest.raises(ValueError, match="from the pass"):
        Monitor(model).sample([fail])
    assert model[0].weight.grad is None
    assert not model[0]._forward_hooks


def test_samples_are_merged_by_the_worse_number():
    model = one_layer()
    x = [heavy_tailed(128, 200, seed=seed) for seed in (1, 2)]
    passes = [lambda x=x: model(x).square().mean().backward() for x in x]
    both, single = Monitor(model).sample(passes), [Monitor(model).sample([run]) for run in passes]
    underflow = [sample.layers["0"].tensors["input"].underflow for sample in single]
    assert underflow[0] != underflow[1]
    assert both.layers["0"].tensors["input"].underflow == max(underflow)
    cosines = [sample.layers["0"].matmuls["fprop.fp8_tile"].cosine for sample in single]
    assert both.layers["0"].matmuls["fprop.fp8_tile"].cosine == min(cosines)


def test_frozen_weights_under_adapters_are_measured_as_they_compute():
    """Adapters whose B is zero change no number: of the matmuls that there are the evidence is that of a model whose
    weights are trained, also of the first layer, whose input needs no gradient. There is none of weights' gradients."""
    found = {}
    for adapted in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(128, 256), nn.SiLU(), nn.Linear(256, 72))
        if adapted:
            add_lora(model, 2, base="keep")
        convert(model, Policy("fp8_tile", keep="value"))
        x = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
        found[adapted] = Monitor(model).sample([lambda model=model, x=x: model(x).square().mean().backward()])
        gemms = {site.gemm for site in sites_of(model)}
        assert gemms == set(GEMM_NAMES[:2] if adapted else GEMM_NAMES)
    assert found[True].layers.keys() == found[False].layers.keys() == {"0", "2"}
    for name, layer in found[True].layers.items():
        trained = found[False].layers[name]
        assert set(layer.matmuls) == {key for key in trained.matmuls if not key.startswith("wgrad")}
        assert set(layer.tensors) == {key for key in trained.tensors if not key.endswith("_column")}
        assert all(layer.matmuls[key] == trained.matmuls[key] for key in layer.matmuls)
        assert all(layer.tensors[key] == trained.tensors[key] for key in layer.tensors)
