"""Kinds of layers, by what their passes cost: the same on all ranks, however the layers are dealt out."""

from hypothesis import given
from hypothesis import strategies as st

from tests.draws import examples
from tests.models.shapes import KERNELS
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.parallel.pipeline.balance.layer_forms import LayerForm, kinds_of
from tilewright.parallel.pipeline.rank_stages import hold_stages
from tilewright.parallel.pipeline.stage_split import Pipeline
from tilewright.parallel.world import Group

BASE = {"vocab_size": 16, "dim": 32, "num_heads": 2, "ffn_dim": 48}
ENTRIES = ({}, {"num_heads": 4}, {"ffn_dim": 24}, {"sliding_window": 5}, {"num_heads": 0}, {"attention": "linear"})


def config(picks) -> DecoderConfig:
    return DecoderConfig.of(**BASE, num_layers=len(picks), head_dim=16, layers=tuple(ENTRIES[pick] for pick in picks))


def test_layers_of_other_shapes_windows_and_attention_are_of_other_kinds():
    layers = [*range(len(ENTRIES)), *range(len(ENTRIES))]
    found = kinds_of(LayerForm.of(layer) for layer in Decoder(config(layers), KERNELS).layers)
    assert found[: len(ENTRIES)] == ["dense", *(f"dense {number}" for number in range(2, len(ENTRIES) + 1))]
    assert found[len(ENTRIES) :] == found[: len(ENTRIES)]
    mixture = DecoderConfig.of(**BASE, num_layers=3, num_experts=4, expert_dim=16, num_dense_layers=1)
    assert kinds_of(LayerForm.of(layer) for layer in Decoder(mixture, KERNELS).layers) == ["dense", "moe", "moe"]


@examples(12)
@given(st.lists(st.integers(0, len(ENTRIES) - 1), min_size=4, max_size=6), st.sampled_from(["1f1b", "zbv"]))
def test_they_are_those_of_the_whole_model_however_it_is_cut(picks, schedule):
    pipeline = Pipeline(2, schedule, 2 if schedule == "zbv" else 1)
    made = config([*picks, 0])  # a decoder looks at other tokens somewhere
    forms = {}
    for rank in range(2):
        for stage in hold_stages(Decoder(made, KERNELS), pipeline, Group(rank, 2)).stages:
            forms[stage.index] = [LayerForm.of(layer) for layer in stage.layers]
    found = kinds_of(form for _, of_stage in sorted(forms.items()) for form in of_stage)
    assert found == kinds_of(LayerForm.of(layer) for layer in Decoder(made, KERNELS).layers)
