"""Layer-major with compiled layers: the same training, and nothing compiled after the first step."""

import pytest
import torch
from torch._dynamo.utils import counters

from tests.models.shapes import make_decoder
from tests.training.test_layer_major_step import LR, executor, reference, steps, worst
from tilewright.core.hardware import detect_machine
from tilewright.ops.base.compile import why_no_compile
from tilewright.optim.clip import GradClip

pytestmark = pytest.mark.skipif(bool(why_no_compile(detect_machine("cpu"))), reason="no compiler for the layers")


def test_compiled_layers_train_as_plain_ones():
    """FP32, uneven micro-batches of the same rows (a new shape would be a new graph), against torch's AdamW.

    Within 1 % of one update: fused code rounds otherwise, which Adam amplifies where a gradient is almost zero.
    """
    ours, theirs = make_decoder("tied").train(), make_decoder("tied").train()
    made = [[batch for batch in microbatches if len(batch["labels"]) == 1] for microbatches in steps(4)]
    norms = reference(theirs, made, LR, max_norm=0.5)
    ours.compile_blocks()
    torch._dynamo.reset()
    counters.clear()
    run = executor(ours, clip=GradClip(0.5))
    results = [run.step(made[0], LR)]
    graphs = counters["stats"]["unique_graphs"]
    assert graphs > 0
    results += [run.step(microbatches, LR) for microbatches in made[1:]]
    assert counters["stats"]["unique_graphs"] == graphs
    assert worst(ours, theirs)[0] <= 0.01 * LR, worst(ours, theirs)
    assert [result.grad_norm for result in results] == pytest.approx(norms, rel=1e-5)
