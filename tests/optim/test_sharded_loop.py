"""Loops on shards: FSDP2 and DCP as a user's own loop uses them, clipping and loss scale against one process."""

import pickle
import sys

import pytest
import torch
from torch import nn

from tests.cover import some
from tests.optim import shard_loops as loops
from tests.optim.shard_cases import BF16, FP32, HYPER, kernels_with, normal
from tests.ranks import on_ranks
from tilewright.optim.adam import DeepSeekAdam

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(sys.platform == "win32", reason="gloo over a file store"),
]

FORMATS = {
    "fp32": (FP32, {}),
    "bf16_stochastic": (BF16, {"moments": "bf16", "master": "stochastic"}),
    "8bit_split24": (BF16, {"moments": "8bit", "master": "split24"}),
    "8bit_master": (BF16, {"moments": "8bit"}),
}
ODD = ("bf16_stochastic", "8bit_split24")
"""What the other formats have, and random bits or halves of weights besides."""
EVERY_FORMAT = pytest.mark.parametrize(
    ("dtype", "options"),
    [pytest.param(*of, id=name, marks=() if name in ODD else pytest.mark.slow) for name, of in FORMATS.items()],
)


@pytest.mark.parametrize("sizes", [pytest.param((2,), marks=pytest.mark.slow), (2, 2)])
def test_fsdp2_equals_adamw_on_one_process(sizes):
    on_ranks(torch.Size(sizes).numel(), loops.fsdp_beside_adamw, sizes)


@pytest.mark.parametrize("name", some(ODD, "8bit_split24"))
def test_states_go_through_dcp_and_load_at_any_number_of_ranks(tmp_path, name):
    """Weights and states have the saved bits; at the same number of ranks training goes on with the same bits."""
    saved = pickle.loads(on_ranks(2, loops.save_with_dcp, str(tmp_path), *FORMATS[name])[0])
    for world in (1, 3):
        for pickled in on_ranks(world, loops.load_with_dcp, str(tmp_path), *FORMATS[name]):
            found = pickle.loads(pickled)
            assert found.keys() == saved.keys()
            for key, value in saved.items():
                assert torch.equal(found[key], value), f"{key} at {world} ranks"
    assert saved["0.weight.step"] == 2


@EVERY_FORMAT
@pytest.mark.support("adam", "copies")
def test_copies_go_on_with_the_same_bits(dtype, options):
    on_ranks(2, loops.copies, dtype, options)


@EVERY_FORMAT
def test_states_of_one_process_go_on_in_shards(dtype, options):
    param = nn.Parameter(normal(5, 140).to(dtype))
    optimizer = DeepSeekAdam([param], **HYPER, seed=3, kernels=kernels_with("ref"), **options)
    value = loops.updated(optimizer, param, range(2))
    states = pickle.loads(pickle.dumps(optimizer.state_dict()))
    want = loops.updated(optimizer, param, range(2, 4))
    on_ranks(3, loops.whole_states_into_shards, dtype, options, pickle.dumps((states, value, want)))


def test_any_placement_equals_adamw_in_fp32():
    on_ranks(2, loops.placements_beside_adamw)


def test_an_overflow_on_one_rank_is_seen_by_all():
    on_ranks(2, loops.overflows)


@pytest.mark.parametrize("sizes", [*(pytest.param((n,), marks=pytest.mark.slow) for n in (2, 3)), (2, 2)])
@pytest.mark.support("clip", "shards", "hsdp")
def test_clipping_and_loss_scale_decide_as_one_process_does(sizes):
    want, mean, weights = loops.decisions(0, ())
    assert {flag for _, flag, *_ in want} == {True, False}, "a sequence that decides nothing tests nothing"
    assert len({bound for *_, bound in want}) > 2, "the adaptive bound was not in force"
    everywhere = on_ranks(torch.Size(sizes).numel(), loops.decisions, sizes)
    for found, its_mean, its_weights in everywhere:
        assert [row[:4] for row in found] == [row[:4] for row in want]
        # Squares are summed in another order: some units in the last place of FP32.
        norms, law = (torch.tensor([row[4:] for row in rows], dtype=torch.float64) for rows in (found, want))
        torch.testing.assert_close(norms, law, rtol=1e-6, atol=0, equal_nan=True)
        torch.testing.assert_close(its_mean, mean, rtol=1e-6, atol=0)
        for got, value in zip(its_weights, weights, strict=True):
            torch.testing.assert_close(torch.tensor(got), torch.tensor(value), rtol=1e-5, atol=1e-6)
        assert str(found) == str(everywhere[0][0]), "ranks differ"


def test_gradients_out_of_turn_are_refused_on_shards():
    for refusals in on_ranks(2, loops.misuse):
        assert len(refusals) == 2
        assert "changed since another loss was scaled" in refusals[0]
        assert "still hold" in refusals[1]
