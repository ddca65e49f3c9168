"""The graph form against the decoder itself: whole rows, a row in parts, one token at a time."""

import pytest
import torch

from tests.models.shapes import MIXED, SHAPES, make_decoder
from tilewright.compress.graph.decoder import DecoderGraph
from tilewright.compress.graph.quantized import Int8Embedding, why_not_8da4w

BOUND = 1e-5
"""Of logits around 3 in FP32, summed in another order over two layers."""


def nothing_kept(graph):
    return [torch.zeros(1, heads, 0, width) for _, (heads, _, width) in graph.kept]


@pytest.mark.parametrize("parts", [(13,), (1,) * 13, (5, 7, 1), (1, 12)], ids=str)
@pytest.mark.parametrize("name", [*SHAPES, *MIXED])
@torch.no_grad()
def test_graph_gives_the_logits_of_the_decoder_however_a_row_is_cut(name, parts):
    model = make_decoder(name).eval()
    graph = DecoderGraph(model)
    ids_1S = torch.randint(0, 61, (1, 13), generator=torch.Generator().manual_seed(1))
    found, kept, start = [], nothing_kept(graph), 0
    for length in parts:
        logits, *kept = graph(ids_1S[:, start : start + length], *kept)
        found.append(logits)
        start += length
    assert (torch.cat(found, 1) - model(ids_1S)).abs().max() < BOUND
    assert [tuple(t.shape) for t in kept] == [(1, heads, 13, width) for _, (heads, _, width) in graph.kept]


def test_graph_leaves_the_model_alone():
    model = make_decoder("tied").eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    graph = DecoderGraph(model)
    assert graph.head.weight is graph.embed.weight
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_int8_embedding_is_off_by_half_a_step_at_most_and_holds_rows_of_zeros():
    weight_VD = torch.randn(9, 32, generator=torch.Generator().manual_seed(0))
    weight_VD[4] = 0.0
    rows = Int8Embedding(weight_VD)(torch.arange(9)[None])[0]
    step_V1 = weight_VD.abs().amax(1, keepdim=True) / 127
    assert bool(((rows - weight_VD).abs() <= step_V1 * 0.5001).all())
    assert torch.equal(rows[4], torch.zeros(32))


def test_layers_too_narrow_for_groups_are_a_reason():
    assert "multiple of 32" in (why_not_8da4w(torch.nn.Linear(31, 4)) or "")
    assert why_not_8da4w(torch.nn.Linear(64, 4)) is None
