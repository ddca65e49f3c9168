"""The layer-major executor against the standard one: two steps have the same losses, whether a model is cut or not."""

import pytest
import torch
from torch import nn

from tests.training.test_layer_major_step import LR, executor
from tests.zoo.cases import cases
from tests.zoo.families import TRAINED
from tilewright.models.build import layered
from tilewright.models.layerwise.layer_view import SingleBlock
from tilewright.optim.adam import DeepSeekAdam
from tilewright.optim.clip import GradClip
from tilewright.optim.param_groups import decay_groups
from tilewright.training.executor.standard import StandardExecutor

SIZES = (3, 1, 2)
"""Rows of the micro-batches of a step."""
SAMPLE = ("gpt2", "gemma2", "modernbert", "swin", "resnet", "qwen3_moe", "mamba2", "falcon_h1")
DROPOUT = ("attention_dropout", "dropout_prob", "dropout", "drop_prob", "router_jitter_noise", "input_jitter_noise")
"""What modules call the probabilities that they pass to functions."""


def deterministic(model):
    """The model in training mode, and nothing drawn."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in DROPOUT:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model.train()


def steps(family):
    """Two steps of uneven micro-batches."""
    made = []
    for step in range(2):
        batch = family.rows(sum(SIZES), seed=step)
        parts = [torch.split(tensor, SIZES) for tensor in batch.values()]
        made.append([dict(zip(batch, part, strict=True)) for part in zip(*parts, strict=True)])
    return made


@pytest.mark.parametrize("case", cases("layer_major", families=TRAINED, sample=SAMPLE), indirect=True)
def test_layer_major_is_standard(case, remark):
    ours, theirs = (deterministic(case.family.model()) for _ in range(2))
    view = layered(ours)
    if isinstance(view, SingleBlock):
        remark("as one slice")
    run = executor(ours, view)
    plain = StandardExecutor(theirs, DeepSeekAdam(decay_groups(theirs, 0.1), betas=(0.9, 0.95)), clip=GradClip(0.0))
    for microbatches in steps(case.family):
        got, want = run.step(microbatches, LR), plain.step(microbatches, LR)
        assert got.loss == pytest.approx(want.loss, rel=1e-5), f"layer_major {got.loss}, standard {want.loss}"
        assert got.num_targets == want.num_targets
