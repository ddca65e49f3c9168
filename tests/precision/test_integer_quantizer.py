"""IntegerQuantizer: the bits of `formats.integer`, straight-through and step gradients against float64, calibration."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrize

from tests.draws import examples
from tilewright import IntegerQuantizer
from tilewright.core.errors import ConfigError
from tilewright.formats.integer import IntSpec, quantize_integer
from tilewright.formats.scaling import TENSORWISE, Tile
from tilewright.precision.quantizers.integers import lsq_step

TILES = {"tensor": TENSORWISE, "token": Tile(1, 0), "channel": Tile(1, 0), "group": Tile(1, 32)}


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("granularity", TILES)
@given(rows=st.integers(0, 20), cols=st.integers(1, 100), seed=st.integers(0, 2**31))
@examples(12)
def test_the_bits_are_those_of_the_format(granularity, bits, symmetric, rows, cols, seed):
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) + 1
    spec = IntSpec(bits, narrow=symmetric and bits == 8)
    quantizer = IntegerQuantizer(bits=bits, symmetric=symmetric, granularity=granularity)
    want = quantize_integer(x, spec, TILES[granularity], symmetric=symmetric)
    assert torch.equal(quantizer(x), want.dequantize())
    assert torch.equal(quantizer.quantize(x).codes, want.codes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_shape_keeps_shape_and_dtype(dtype):
    x = torch.randn(2, 3, 200).to(dtype)
    per_token = IntegerQuantizer(granularity="token")(x)
    assert (per_token.shape, per_token.dtype) == (x.shape, dtype)
    assert torch.equal(per_token[1, 2], IntegerQuantizer()(x[1, 2]))
    weight = torch.randn(8, 3, 5, 5).to(dtype)
    assert torch.equal(IntegerQuantizer(granularity="channel")(weight)[3], IntegerQuantizer()(weight[3]))
    assert IntegerQuantizer(0.5)(torch.tensor(3.3)).item() == 3.5
    assert IntegerQuantizer()(torch.empty(0, 4)).shape == (0, 4)
    assert IntegerQuantizer()(torch.tensor([1.0, torch.inf])).isnan().all()


# ---- gradients ----


def gradient(quantizer, x):
    x = x.clone().requires_grad_()
    quantizer(x).backward(torch.arange(1.0, x.numel() + 1).view(x.shape))
    return x.grad


def test_the_gradient_passes_inside_and_stops_where_clipped():
    x = torch.tensor([0.1, 127.0, 127.6, -1e6, 0.0, 1e-9])
    straight = torch.arange(1.0, 7.0)
    assert torch.equal(gradient(IntegerQuantizer(1.0), x), straight * torch.tensor([1, 1, 0, 0, 1, 1]))
    assert torch.equal(gradient(IntegerQuantizer(1.0, clip_gradient=False), x), straight)
    assert torch.equal(gradient(IntegerQuantizer(), x), straight)  # its own scale clips nothing
    moved = IntegerQuantizer(1.0, 100, symmetric=False)  # codes -128..127 are values -228..27
    assert gradient(moved, torch.tensor([-228.0, -229.0, 27.0, 28.0])).tolist() == [1, 0, 3, 0]
    assert moved(torch.tensor([-300.0, 300.0])).tolist() == [-228.0, 27.0]


@examples(40)
@given(
    st.integers(1, 5),
    st.integers(1, 70),
    st.sampled_from([2, 4, 8]),
    st.sampled_from(["tensor", "channel", "group"]),
    st.integers(0, 2**31),
)
def test_the_learned_step_has_the_gradient_of_the_paper(rows, cols, bits, granularity, seed):
    """LSQ, equations 1 to 5, element by element in float64 numpy; an element on a border of rounding is left out."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator)
    out_grad = torch.randn(rows, cols, generator=generator)
    step = lsq_step(x, bits=bits, granularity=granularity) * 0.8
    quantizer = IntegerQuantizer(step, bits=bits, granularity=granularity, learned=True)
    low, high = quantizer.spec.lowest, quantizer.spec.highest
    spread = np.array([[pick(step, quantizer.tile, i, j) for j in range(cols)] for i in range(rows)])
    steps = x.double().numpy() / spread
    border = np.abs(steps - np.floor(steps) - 0.5) < 1e-4
    out_grad[torch.from_numpy(border)] = 0.0
    leaf = x.clone().requires_grad_()
    out = quantizer(leaf)
    out.backward(out_grad)

    inside = (steps > low) & (steps < high)
    rounded = np.clip(np.round(steps), low, high)
    error = np.abs(out.detach().double().numpy() - rounded * spread)[~border]
    assert error.size == 0 or error.max() <= 4 * 2.0**-24 * np.abs(rounded * spread).max()
    np.testing.assert_allclose(leaf.grad.numpy(), np.where(inside, out_grad.numpy(), 0), rtol=2**-22)  # times s, by s
    per_element = np.where(inside, rounded - steps, rounded) * out_grad.double().numpy()
    factor = (max(x.numel() / step.numel(), 1) * high) ** -0.5
    want = torch.zeros(step.shape, dtype=torch.float64)
    for i in range(rows):
        for j in range(cols):
            want[place(quantizer.tile, i, j)] += per_element[i, j] * factor
    got = quantizer.scale.grad.double()
    bound = 2.0**-22 * high * out_grad.double().abs().sum() * factor + 1e-12  # FP32 rounding of each term
    assert (got - want).abs().max() <= bound, f"worst {(got - want).abs().max()} of {bound}"


def place(tile, i, j):
    return (i // tile.rows if tile.rows else 0, j // tile.cols if tile.cols else 0)


def pick(step, tile, i, j):
    return step.double()[place(tile, i, j)].item()


def test_the_initial_step_is_that_of_the_paper():
    weight = torch.randn(3, 70)
    got = lsq_step(weight, bits=4, granularity="group", group=32)
    want = [[2 * part.abs().mean().item() / 7**0.5 for part in row.split(32)] for row in weight.double()]
    assert got.shape == (3, 3)
    torch.testing.assert_close(got.double(), torch.tensor(want, dtype=torch.float64), rtol=1e-6, atol=0)
    assert lsq_step(torch.zeros(2, 4)).item() > 0


def test_a_step_that_the_optimizer_carries_through_zero():
    quantizer = IntegerQuantizer(0.5, learned=True)
    with torch.no_grad():
        quantizer.scale.neg_()
    assert torch.equal(quantizer(torch.tensor([1.1])), torch.tensor([1.0]))
    assert quantizer.quantize(torch.tensor([1.1])).codes.item() == 2


def test_traced_is_the_same():
    x = torch.randn(7, 300)
    for quantizer in (IntegerQuantizer(0.01, granularity="channel"), IntegerQuantizer(granularity="group")):
        compiled = torch.compile(quantizer, fullgraph=True, backend="aot_eager")
        assert torch.equal(gradient(compiled, x), gradient(quantizer, x))


@pytest.mark.parametrize("learned", [False, True])
def test_a_layer_learns_with_four_bits_in_the_loop(learned):
    torch.manual_seed(0)
    mix = torch.linalg.qr(torch.randn(16, 16)).Q * torch.logspace(0, -2, 16)  # inputs that correlate, as activations do
    x, target = torch.randn(256, 16) @ mix.T * 4, torch.randn(16, 4)
    layer = nn.Linear(16, 4, bias=False)
    layer.weight.data.copy_(target.T)
    step = lsq_step(layer.weight, bits=4, granularity="channel") if learned else None
    quantizer = IntegerQuantizer(step, bits=4, granularity="channel", learned=learned)
    parametrize.register_parametrization(layer, "weight", quantizer)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.02)
    losses = []
    for number in range(200):
        optimizer.param_groups[0]["lr"] = 0.02 * (1 - number / 200)
        loss = (layer(x) - x @ target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    rounded = quantize_integer(target.T.contiguous(), IntSpec(4), Tile(1, 0)).dequantize()
    plain = (x @ rounded.T - x @ target).square().mean().item()
    assert losses[-1] < 0.75 * plain, f"not under 3/4 of the error of rounding the solution: {losses[-1]} and {plain}"
    assert layer.weight.unique(dim=1).numel() <= 4 * 16


# ---- fixed scales ----


@pytest.mark.parametrize("symmetric", [True, False])
def test_calibration_takes_the_common_range(symmetric):
    batches = [torch.randn(4, 8) * size + size for size in (1.0, 30.0, 2.0)]
    quantizer = IntegerQuantizer(calibrate_batches=3, symmetric=symmetric)
    for batch in batches:
        assert quantizer.scale is None
        assert torch.equal(quantizer(batch), IntegerQuantizer(symmetric=symmetric)(batch))
    together = IntegerQuantizer(symmetric=symmetric)
    everything = torch.cat(batches)
    assert torch.equal(quantizer(everything), together(everything))
    later = torch.randn(4, 8) * 1000
    assert quantizer(later).abs().max() < later.abs().max()
    again = IntegerQuantizer(calibrate_batches=3, symmetric=symmetric)
    again.load_state_dict(quantizer.state_dict())
    assert torch.equal(again(later), quantizer(later))
    quantizer.reset()
    assert torch.equal(quantizer(later), together(later))


def test_a_learned_step_travels_with_the_state():
    quantizer = IntegerQuantizer(torch.tensor([0.5, 0.25]), granularity="channel", learned=True)
    again = IntegerQuantizer(torch.ones(2), granularity="channel", learned=True)
    again.load_state_dict(quantizer.state_dict())
    x = torch.randn(2, 9)
    assert torch.equal(again(x), quantizer(x))


# ---- bad input ----


@pytest.mark.parametrize(
    ("arguments", "got"),
    [
        ({"bits": 1}, "1"),
        ({"granularity": "row"}, "'row'"),
        ({"granularity": "group", "group": 0}, "group = 0"),
        ({"scale": 0.0}, "0.0"),
        ({"scale": float("nan")}, "nan"),
        ({"zero_point": 3}, "zero_point = 3"),
        ({"scale": 1.0, "zero_point": 3, "learned": True}, "zero_point = 3"),
        ({"scale": 1.0, "zero_point": 9, "bits": 4}, "zero_point = 9"),
        ({"granularity": "token", "calibrate_batches": 2}, "calibrate_batches = 2"),
        ({"granularity": "token", "scale": 1.0, "learned": True}, "learned"),
        ({"learned": True}, "scale = None"),
    ],
)
def test_what_cannot_be_is_an_error(arguments, got):
    with pytest.raises(ConfigError) as error:
        IntegerQuantizer(**arguments)
    (problem,) = error.value.problems
    assert got in problem.got
    assert all((problem.what, problem.need, problem.try_, problem.where))


def test_scales_of_another_tensor():
    with pytest.raises(ConfigError, match="does not fit the tensor"):
        IntegerQuantizer(torch.ones(3), granularity="channel")(torch.ones(4, 8))
