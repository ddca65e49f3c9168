"""`StepResult.rows`: the losses of a step's rows, one by one, the same from both executors; a step waits for none."""

import pytest
import torch

from tests.models.shapes import make_decoder
from tests.training.test_layer_major_step import LR, SIZES, executor, steps
from tilewright.optim.adam import DeepSeekAdam
from tilewright.optim.clip import GradClip
from tilewright.optim.param_groups import decay_groups
from tilewright.training.executor.standard import StandardExecutor


def standard(model):
    return StandardExecutor(model, DeepSeekAdam(decay_groups(model, 0.1), betas=(0.9, 0.95)), clip=GradClip(0.0))


@pytest.mark.parametrize("make", [standard, executor])
def test_rows_are_in_the_order_of_micro_batches(make):
    model = make_decoder("gqa")
    run = make(model)
    for microbatches in steps(2):
        with torch.no_grad():
            single = [
                model.loss({name: tensor[row : row + 1] for name, tensor in batch.items()})
                for batch in microbatches
                for row in range(len(batch["labels"]))
            ]
        result = run.step(microbatches, LR)
        sums, counts = result.rows
        assert counts.tolist() == [int(out.count) for out in single]
        assert len(sums) == sum(SIZES)
        torch.testing.assert_close(sums, torch.stack([out.loss_sum for out in single]), rtol=2e-6, atol=0)
        assert float(sums.sum()) / result.num_targets == pytest.approx(result.loss, rel=2e-6)


def test_a_model_that_tells_only_the_sum_is_trained_as_before():
    from dataclasses import replace

    model = make_decoder("gqa")
    told = model.loss
    model.loss = lambda batch: replace(told(batch), each=None)
    result = standard(model).step(steps(1)[0], LR)
    assert result.rows is None
    assert result.skipped is None


def test_a_step_without_targets_or_with_a_bad_gradient_tells_no_rows_of_the_step_before():
    model = make_decoder("gqa")
    run = executor(model)
    run.step(steps(1)[0], LR)
    empty = [{name: tensor for name, tensor in batch.items()} for batch in steps(1)[0]]
    for batch in empty:
        batch["labels"] = torch.full_like(batch["labels"], -100)
    assert run.step(empty, LR).rows is None
    with torch.no_grad():
        next(iter(model.blocks[0].parameters())).fill_(torch.nan)
    result = run.step(steps(1)[0], LR)
    assert result.skipped is not None
    assert result.rows is None or bool(result.rows[0].isnan().any())
