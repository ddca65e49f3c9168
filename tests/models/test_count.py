"""Counts from the shape against real modules and torch's own FLOP counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.cover import some
from tests.models.shapes import MIXED, SHAPES, make_batch
from tilewright.core.hardware import detect_machine
from tilewright.models.build import init_weights
from tilewright.models.decoder.decoder import Decoder
from tilewright.models.decoder.flops import count_flops, count_parameters, layer_parameters
from tilewright.ops.kernels import Kernels


@pytest.fixture(autouse=True)
def unpadded_experts(monkeypatch):
    """Rows of experts as counted; the padding that saves oneDNN from new shapes depends on the routing."""
    monkeypatch.setattr("tilewright.models.decoder.moe._row_multiple", lambda mean_rows, device_type: 1)


@pytest.mark.parametrize("name", [*SHAPES, *MIXED])
def test_parameters(name):
    with torch.device("meta"):
        model = Decoder((SHAPES | MIXED)[name])
    count = count_parameters((SHAPES | MIXED)[name])
    assert count.total == sum(param.numel() for param in model.parameters())
    for layer, block in enumerate(model.blocks):
        assert layer_parameters((SHAPES | MIXED)[name], layer) == sum(param.numel() for param in block.parameters())


def test_active_parameters_leave_out_idle_experts():
    count = count_parameters(SHAPES["deepseek"])
    assert count.total - count.active == (8 - 2) * 3 * 64 * 32


@pytest.mark.parametrize("name", [*SHAPES, *MIXED])
def test_flops_of_forward_and_backward(name):
    """Held against torch's counter over the reference attention, which is made of plain matmuls."""
    overrides = dict.fromkeys(("attention", "linear", "cross_entropy"), "ref")
    model = Decoder((SHAPES | MIXED)[name], Kernels(detect_machine("cpu"), overrides, compile=False))
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.02)
    batch = make_batch(rows=2, positions=16)
    count = count_flops((SHAPES | MIXED)[name], 16, causal=False)
    with FlopCounterMode(display=False) as counter:
        out = model.loss(batch)
    assert counter.get_total_flops() == 32 * count.forward
    with FlopCounterMode(display=False) as counter:
        out.loss_sum.backward()
    assert counter.get_total_flops() == 32 * count.backward


@pytest.mark.parametrize("name", some(["gqa", "mla", "deepseek", *MIXED], "deepseek"))
def test_recomputation_runs_the_layers_again(name):
    overrides = {"attention": "ref", "cross_entropy": "ref"}
    model = Decoder((SHAPES | MIXED)[name], Kernels(detect_machine("cpu"), overrides, compile=False))
    init_weights(model, 0)
    batch = make_batch(rows=2, positions=16)
    count = count_flops((SHAPES | MIXED)[name], 16, causal=False)
    measured = {}
    for mode in ("none", "selective", "matmuls", "attention", "full"):
        model.activation_checkpoint = mode
        with FlopCounterMode(display=False) as counter:
            model.loss(batch).loss_sum.backward()
        measured[mode] = counter.get_total_flops() / 32
    # The reference attention forms no scores again, so the flash term of `step` is taken out.
    attention = sum(count.attention)
    flash = 0.5 * attention
    assert measured["none"] == count.step("none") - flash
    assert measured["selective"] == measured["none"]
    assert measured["full"] == measured["attention"] == count.step("full") - flash  # nor is it one operation to keep
    assert count.step("full") - count.step("attention") == attention


def test_causal_counts_half_the_pairs():
    full, half = (count_flops(SHAPES["gqa"], 15, causal=causal).attention[0] for causal in (False, True))
    assert half == full * 8 / 15
