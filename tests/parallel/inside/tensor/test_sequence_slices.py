"""The residual stream in slices (`parallel.sequence_parallel`): gradients, odd lengths, and what a rank keeps."""

import time

import pytest
import torch

from tests.models.test_activation_bytes import AliveStorages
from tests.parallel.inside.tensor.cut import CONFIGS, Case, compare, cut, world_of
from tests.parallel.inside.tensor.test_parity import check
from tests.ranks import on_ranks
from tilewright.models.decoder.activation_bytes import Storage, layer_bytes
from tilewright.models.decoder.layers import rope_angles
from tilewright.parallel.inside.tensor.matrix_cuts import config_on_rank
from tilewright.parallel.inside.tensor.sequence_slices import SequenceSlices, sliced_parameters

pytestmark = pytest.mark.dist
FULL = {"activation_checkpoint": "full"}
ROWS, POSITIONS = 2, 32


def test_on_two_ranks():
    """Rows of an odd length, and of documents with padding: load of experts is that of one process."""
    cases = [Case(2, kind="moe", length=15), Case(2, kind="mla", length=3, settings=FULL)]
    cases += [Case(2, ep=2, kind="moe", documents=True, length=13), Case(2, kind="moe", slices=False, documents=True)]
    check(cases, on_ranks(2, compare, cases))


@pytest.mark.slow
def test_on_four_ranks():
    """Two positions over four ranks, some of which have none; slices of shards."""
    cases = [Case(4, kind="moe", length=2), Case(2, 2, kind="mla_q", length=11, options={"reduce_each": True})]
    check(cases, on_ranks(4, compare, cases))


@pytest.mark.slow
def test_more_on_four_ranks():
    cases = [Case(4, length=3), Case(2, 2, kind="moe", documents=True), Case(2, 2, slices=False, settings=FULL)]
    check(cases, on_ranks(4, compare, cases))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["selective", "matmuls", "attention"])
def test_what_layers_keep_changes_no_gradient(mode):
    cases = [Case(2, kind=kind, settings={"activation_checkpoint": mode}) for kind in ("gqa", "latent_moe", "mla_q")]
    check(cases, on_ranks(2, compare, cases))


def _kept(rank):
    """Bytes alive after a layer's forward pass, and those that plans count, by what layers keep and whether there are
    slices."""
    found = []
    for mode in ("none", "selective", "full"):
        for slices in (True, False):
            case = Case(2, settings={"activation_checkpoint": mode}, slices=slices)
            model, config = cut(case, world_of(case)), CONFIGS[case.kind]
            cos_sin = rope_angles(torch.arange(POSITIONS)[None], config.rope_dim, 1e4)
            x_BSD = torch.randn(ROWS, POSITIONS // (2 if slices else 1), config.dim, requires_grad=True)
            entered = x_BSD.nbytes
            with AliveStorages() as storages:
                out = model.blocks[0](x_BSD, *cos_sin, None)
            storage = Storage(4, 4, compiled=False, slices=2 if slices else 1)
            counted = ROWS * POSITIONS * layer_bytes(config_on_rank(config, 2, 1), 0, mode, storage)
            own, end = entered - out[0].nbytes, time.monotonic() + 5
            # The thread of gloo that has added up lets go of the tensor a moment after the sum is there.
            while storages.alive_bytes() + own > counted and time.monotonic() < end:
                time.sleep(0.01)
            found.append((mode, slices, storages.alive_bytes() + own, counted))
    return found


def test_a_rank_keeps_its_slice():
    for rank, found in enumerate(on_ranks(2, _kept)):
        kept = {(mode, slices): (alive, counted) for mode, slices, alive, counted in found}
        for key, (alive, counted) in kept.items():
            print(f"rank {rank}: {key}: {alive} alive, {counted} counted")
        for mode in ("none", "selective", "full"):
            (alive, counted), (alive_whole, counted_whole) = kept[mode, True], kept[mode, False]
            assert alive < alive_whole, mode
            assert alive == pytest.approx(counted, rel=0.03), mode
            if mode != "selective":  # where sums are whole, they are kept beside what was added up
                assert alive_whole == pytest.approx(counted_whole, rel=0.03), mode
        assert 2 * kept["full", True][0] == kept["full", False][0], "a layer that is recomputed keeps its input alone"


def test_parameters_whose_gradient_is_in_parts():
    assert on_ranks(2, _named) == [[5, 4, 0]] * 2, "norms of layers, and the router"


def _named(rank):
    found = []
    for case in (Case(2, kind="moe"), Case(2), Case(2, slices=False)):
        model = cut(case, world_of(case))
        found.append(len(list(sliced_parameters(model))))
        assert isinstance(model.slices, SequenceSlices) is case.slices
    return found
