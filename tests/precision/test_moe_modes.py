"""Every mixture in transformers, converted: it runs and learns, its routers multiply in FP32, its experts in FP8."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tests.models.moe_families import build, families, run
from tests.models.test_routers import SAMPLE, owners, watched
from tilewright.precision.convert import convert

OWN_CODE = ("dbrx", "jetmoe", "llama4", "longcat_flash", "step3p7")
"""Experts that are not behind transformers' interface: BF16, and the report says so."""


class Dtypes(TorchFunctionMode):
    """Dtypes of the results of matmuls with some weights."""

    def __init__(self, weights: set[Tensor]) -> None:
        super().__init__()
        self.seen: dict[Tensor, set[torch.dtype]] = {weight: set() for weight in weights}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in (F.linear, torch.mm, torch.matmul):
            for arg in args:
                if isinstance(arg, Tensor) and arg in self.seen:
                    self.seen[arg].add(out.dtype)
        return out


def check(family: str, mode: str) -> None:
    model = build(family)
    weights = {name: parameter for name, parameter in model.named_parameters() if parameter.ndim == 2}
    found = watched(model).found
    routers, deciding = owners(model, found), {weights[name] for name in found}
    _floats(run(model)).square().mean().backward()
    learns = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    report = convert(model, mode).precision_report
    rows = {row.fqn: row for row in report.rows}
    names = {module: name for name, module in model.named_modules()}
    wrong = [names[router] for router in routers if (rows[names[router]].op, rows[names[router]].compute) != _FP32]
    assert not wrong, f"{family}: routers in another format: {wrong}"
    with Dtypes(deciding) as dtypes:
        out = _floats(run(model))
    assert all(seen == {torch.float32} for seen in dtypes.seen.values()), f"{family}: {dtypes.seen.values()}"
    out.square().mean().backward()
    assert out.isfinite().all()
    missing = learns - {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert not missing, f"{family}: without gradients: {sorted(missing)}"
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)
    hidden = [row.fqn for row in report.rows if row.fallback and "experts" in row.fqn]
    if mode.startswith("fp8") and family not in (*OWN_CODE, "inkling"):
        assert not hidden, f"{family}: {hidden}"


_FP32 = ("router", "fp32")


def _floats(output) -> Tensor:
    return next(value for value in output.values() if isinstance(value, Tensor) and value.is_floating_point())


@pytest.mark.parametrize("family", SAMPLE)
def test_a_mixture_in_fp8(family):
    check(family, "fp8_tile")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["bf16_mixed", "fp8_tile"])
@pytest.mark.parametrize("family", families())
def test_every_mixture(family, mode):
    check(family, mode)


@pytest.mark.slow
@pytest.mark.parametrize("family", families())
def test_in_fp32_every_mixture_computes_what_transformers_computes(family):
    model = build(family)
    with torch.no_grad():
        want = _floats(run(model))
        convert(model, "fp32")
        torch.testing.assert_close(_floats(run(model)), want, rtol=1e-4, atol=1e-4)
