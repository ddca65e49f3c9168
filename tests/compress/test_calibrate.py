"""Calibration text goes no further through a model than the layers that are looked at, where that changes nothing."""

import pytest
import torch
from torch import nn

from tests.compress.test_quantize import BATCHES, OURS, THEIRS, make
from tilewright.compress.quantize.calibrate import observe, run_in_turn


@pytest.mark.parametrize("name", [*OURS, *THEIRS])
def test_inputs_are_those_of_a_whole_pass(name):
    model = make(name)
    stages = [*model.layers]
    assert run_in_turn(model, stages, BATCHES[0])
    for stage, following in zip(stages, [*stages[1:], None], strict=True):
        layers = {key: part for key, part in stage.named_modules() if isinstance(part, nn.Linear)}
        whole, part = observe(model, layers, BATCHES), observe(model, layers, BATCHES, stop_before=following)
        assert any(stats.num_tokens for stats in whole.values())
        for key, stats in whole.items():
            assert torch.equal(part[key].hessian_KK, stats.hessian_KK), key
            assert (part[key].norm, part[key].num_tokens) == (stats.norm, stats.num_tokens), key


def test_nothing_behind_is_computed():
    model = make("gqa")
    first, second = [*model.layers][:2]
    ran = []
    second.mlp.register_forward_hook(lambda *_: ran.append(1))
    layers = {key: part for key, part in first.named_modules() if isinstance(part, nn.Linear)}
    observe(model, layers, BATCHES, stop_before=second)
    assert not ran
    observe(model, layers, BATCHES)
    assert len(ran) == len(BATCHES)


def test_a_layer_that_runs_again_is_seen():
    """Later passes of a layer may read what layers behind it make."""
    model = make("gqa")
    stages = [*model.layers]
    handle = stages[1].register_forward_hook(lambda module, args, out: stages[0](*args))
    assert not run_in_turn(model, stages, BATCHES[0])
    handle.remove()
    assert run_in_turn(model, stages, BATCHES[0])
    assert not run_in_turn(model, stages[::-1], BATCHES[0])


def test_a_part_of_two_layers_is_seen_in_both():
    model = make("gqa")
    stages = [*model.layers]
    stages[1].mlp = stages[0].mlp
    assert not run_in_turn(model, stages, BATCHES[0])
