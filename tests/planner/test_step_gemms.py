"""The matmuls of a step by themselves: as many FLOPs as the model's, and each shape is timed once."""

from types import SimpleNamespace

import pytest
import torch

from tests.planner.rates import make_machine, make_recipe
from tests.planner.test_cost import MLA, MOE
from tilewright.models.build import decoder_config
from tilewright.models.decoder.flops import count_flops
from tilewright.ops.kernels import Kernels
from tilewright.planner.advice.step_gemms import StepGemm, alone_s, step_gemms, total_flops
from tilewright.planner.machine.microbench import RateProbe
from tilewright.planner.model.layer_classes import ShapeFinder

UNITS = ("fp32", "bf16", "fp8")


@pytest.mark.parametrize("model", [{}, MOE, MLA | MOE], ids=["dense", "moe", "mla_moe"])
def test_flops_are_those_of_the_model(model):
    recipe = make_recipe(model=model)
    shape, flops = ShapeFinder(512, make_machine()).find(recipe), count_flops(decoder_config(recipe.model, 512), 128)
    gemms = step_gemms(shape, [128, 256], UNITS)
    head = 6 * 384 * shape.dim * 512
    assert total_flops(gemms) - head == pytest.approx(3 * 384 * sum(flops.layers), rel=1e-9)
    assert {one.rows for one in gemms if one.num_out == 512 and one.num_in == shape.dim} >= {128, 256}


def test_a_shape_that_comes_often_is_timed_once():
    timed = []

    def clock(work):
        work()
        timed.append(work)
        return 0.5

    def linear(*given, frozen):
        return lambda: given

    one, other = StepGemm(8, 4, 2, "fp32"), StepGemm(8, 4, 2, "fp32", frozen=True)
    assert alone_s(SimpleNamespace(clock=clock, linear=linear), {one: 6, other: 1}) == 3.5
    assert len(timed) == 2
    assert (one.flops, other.flops) == (6 * 64, 4 * 64)


@pytest.mark.parametrize("fmt", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("frozen", [False, True])
def test_every_format_runs(fmt, frozen):
    probe = RateProbe(Kernels.default(), torch.device("cpu"))
    assert alone_s(probe, {StepGemm(128, 128, 256, fmt, frozen): 2}) > 0
