"""Plain transformers models after `convert`, in six modes: right numbers, nothing stale, independent copies."""

import copy
import io
import math

import pytest
import torch

from tests.zoo.cases import cases
from tilewright.models.base.routers import find_routers
from tilewright.precision.convert import convert, explain

MODES = ("fp32", "bf16_mixed", "pure_fp16", "fp8_tile", "fp8_hybrid", "fp8_tensorwise")
UNIT = {"fp32": 2.0**-24, "bf16_mixed": 2.0**-8, "pure_fp16": 2.0**-11}
"""Largest relative error of one rounding; E4M3's is 2^-4."""
SAMPLE = ("gpt2", "gemma2", "modernbert", "vit", "resnet", "whisper", "qwen3_moe", "gpt_oss", "mamba2", "qwen3_next")
COVERED = 0.9
ROUNDED = ("linear", "conv", "head", "router", "embedding", "other")


def converted(case):
    """A fresh conversion, and its report."""
    net = case.family.net()
    return net, convert(net, case.variant).precision_report


def bound(report):
    """Error of logits relative to their length: two operands of each matrix are rounded, errors add in quadrature."""
    unit = UNIT.get(report.policy.mode, 2.0**-4)
    return unit * math.sqrt(2 * sum(row.op in ROUNDED for row in report.rows))


def error_of(logits, exact):
    """The middle of the positions' relative errors: a token whose experts change is far off, and is one of many."""
    logits, exact = logits.flatten(0, -2), exact.flatten(0, -2)
    return ((logits - exact).norm(dim=-1) / exact.norm(dim=-1)).median().item()


@pytest.mark.parametrize("case", cases("numbers", MODES, sample=SAMPLE), indirect=True)
def test_numbers_are_those_of_fp32_within_the_format(case):
    batch = case.family.inputs()
    plain = case.family.net()
    exact = plain(**batch)
    exact.loss.backward()
    net, report = converted(case)
    out = net(**batch)
    out.loss.backward()
    limit = bound(report)
    error = error_of(out.logits.detach(), exact.logits.detach())
    assert error <= limit, f"logits are off by {error:.2g} of their length, {limit:.2g} allowed"
    gap = abs(out.loss.item() / exact.loss.item() - 1)
    assert gap <= limit, f"loss {out.loss.item():.6g}, FP32 {exact.loss.item():.6g}"
    for (name, param), other in zip(net.named_parameters(), plain.parameters(), strict=True):
        assert (param.grad is None) == (other.grad is None), f"{name} takes part in one of the models only"
        assert param.grad is None or param.grad.isfinite().all(), f"the gradient of {name} is not finite"


@pytest.mark.parametrize("case", cases("rewritten input", MODES, sample=SAMPLE), indirect=True)
def test_a_rewritten_input_is_read_again(case):
    """The same buffers with other values, where autograd counts no writes: the output of a fresh conversion."""
    first, second = (case.family.inputs(seed=seed) for seed in (1, 2))
    net, fresh = converted(case)[0], converted(case)[0]
    with torch.inference_mode():
        batch = {name: tensor.clone() for name, tensor in first.items()}
        net(**batch)
        for name, tensor in batch.items():
            tensor.copy_(second[name])
        got, want = net(**batch).logits, fresh(**second).logits
    assert torch.equal(got, want), f"off by up to {(got - want).abs().max().item():.3g}"


@pytest.mark.parametrize("case", cases("copies", MODES, sample=SAMPLE), indirect=True)
def test_copies_and_pickles_are_whole_and_independent(case):
    batch = case.family.inputs()
    net, _ = converted(case)
    with torch.no_grad():
        want = net(**batch).logits
        file = io.BytesIO()
        torch.save(net, file)
        file.seek(0)
        for twin in (copy.deepcopy(net), torch.load(file, weights_only=False)):
            assert torch.equal(twin(**batch).logits, want)
            for param in twin.parameters():
                param.mul_(0.5)
            assert not torch.equal(twin(**batch).logits, want), "a copy whose weights were changed computes as before"
            assert torch.equal(net(**batch).logits, want), "the original changed with its copy"


@pytest.mark.parametrize("case", cases("FP8 coverage", sample=SAMPLE), indirect=True)
def test_fp8_modes_are_fp8(case):
    """Of the elements of weight matrices, without embeddings, head, routers and convolutions, nine tenths have 8-bit
    operands."""
    net = case.family.net()
    rows = {row.fqn: row for row in explain(net, "fp8_tile")}
    covered, total, rest = 0, 0, []
    for fqn, module in net.named_modules():
        row = rows.get(fqn)
        if row is None or row.op in ("embedding", "head", "router", "conv", "norm", "batch_norm"):
            continue
        if ".parametrizations." in fqn:  # the parts of another weight
            continue
        size = sum(param.numel() for param in module.parameters(recurse=False) if param.ndim >= 2)
        covered, total = covered + size * (row.gemms is not None), total + size
        rest += [f"{fqn} ({row.reason})"] * (row.gemms is None and size > 0)
    assert covered >= COVERED * total, f"{covered / total:.0%} in FP8; not so: {'; '.join(rest[:3])}"


@pytest.mark.parametrize("case", cases("routers", sample=SAMPLE), indirect=True)
def test_routers_are_found_and_none_is_invented(case):
    net = case.family.net()
    names = {module: name for name, module in net.named_modules()}
    found = [names[module] for module in find_routers(net)]
    outer = [name for name in found if not any(name.startswith(f"{other}.") for other in found)]
    assert len(outer) == case.family.routers, f"found {found}"
    rows = {row.fqn: row for row in explain(net, "fp8_tile")}
    assert all(rows[name].compute == "fp32" for name in found), "a router does not compute in FP32"
