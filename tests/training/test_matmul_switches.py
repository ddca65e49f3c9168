"""Partial sums of 16-bit GEMMs on a GPU: rounded nowhere, and recorded."""

import pytest
import torch

from tilewright.training.components.lifecycle import add_in_fp32, switches


@pytest.fixture
def as_torch_has_it():
    before = switches()
    for name in before:
        setattr(torch.backends.cuda.matmul, name, True)
    yield
    for name, value in before.items():
        setattr(torch.backends.cuda.matmul, name, value)


@pytest.mark.usefixtures("as_torch_has_it")
def test_a_run_on_a_gpu_adds_in_fp32_and_a_cpu_s_changes_nothing():
    add_in_fp32("cpu")
    assert set(switches().values()) == {True}
    add_in_fp32("cuda")
    assert set(switches().values()) == {False}
