"""Memory plans: what is uniform, and what is refused."""

import pytest

from tilewright.core.memory_plan import LayerMemory, MemoryPlan


def test_uniform_says_the_same_of_all_layers():
    memory_plan = MemoryPlan.uniform(
        4, parameters="host", states="disk", inputs="host", activations="recompute", mlp_chunks=2, attention_block=8
    )
    layer = LayerMemory(
        parameters="host", states="disk", inputs="host", activations="recompute", mlp_chunks=2, attention_block=8
    )
    assert memory_plan.layers == (layer,) * 4
    for end in (memory_plan.embedding, memory_plan.head):
        assert (end.parameters, end.states, end.inputs) == ("host", "disk", "host")
        assert (end.activations, end.mlp_chunks, end.attention_block) == ("keep", 1, 0)


def test_uniform_without_words_is_the_default():
    assert MemoryPlan.uniform(2) == MemoryPlan(layers=(LayerMemory(), LayerMemory()))


WRONG = [
    {"parameters": "tape"},
    {"states": ""},
    {"inputs": "gpu"},
    {"activations": "full"},
    {"mlp_chunks": 0},
    {"attention_block": -1},
]


@pytest.mark.parametrize("wrong", WRONG)
def test_words_that_mean_nothing(wrong):
    with pytest.raises(ValueError, match=r"a tier is|activations are|need mlp_chunks"):
        LayerMemory(**wrong)
