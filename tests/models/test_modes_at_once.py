"""Modes that belong to the process, held by blocks in several threads: afterwards all is as it was before."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.draws import examples
from tests.interleave import interleave
from tilewright.models.base import eval_mode
from tilewright.models.base.eval_mode import eager, evaluation

ORDERS = st.lists(st.integers(0, 2), max_size=25)


def net():
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Linear(2, 2), nn.Dropout()))
    model[1][1].eval()
    return model


@examples(8)
@given(order=ORDERS)
def test_evaluation_ends_with_the_last_block(order):
    """Blocks of a model and of a part of it."""
    model = net()
    before = [part.training for part in model.modules()]

    def use(part):
        with evaluation(part):
            return [one.training for one in part.modules()]

    uses = [lambda: use(model), lambda: use(model[1]), lambda: use(model)]
    found = interleave(uses, order, [eval_mode.__file__])
    assert not any(map(any, found)), "a block was left in training mode by another's end"
    assert [part.training for part in model.modules()] == before
    assert not eval_mode._OPEN.parts


@examples(8)
@given(order=ORDERS)
def test_eager_mode_ends_with_the_last_block(order):
    stance = torch._dynamo.eval_frame._stance
    compiled = torch.compile(lambda x: x + torch.compiler.is_compiling(), backend="eager")

    def use():
        with eager():
            return float(compiled(torch.zeros(())))

    found = interleave([use] * 3, order, [eval_mode.__file__])
    assert found == [0.0] * 3, "compiled inside of a block"
    assert torch._dynamo.eval_frame._stance == stance


def test_blocks_within_blocks_and_errors():
    model = net()
    before = [part.training for part in model.modules()]
    with pytest.raises(ZeroDivisionError), evaluation(model), eager(), evaluation(model[1]), eager():
        raise ZeroDivisionError
    assert [part.training for part in model.modules()] == before
    with evaluation(model):
        with evaluation(model[1]):
            pass
        assert not any(part.training for part in model.modules())
