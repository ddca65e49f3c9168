"""What ranks draw while they train: each its own numbers, in a fresh run as in one that goes on."""

import shutil
from pathlib import Path

import pytest
import torch
import xxhash

from tests.contracts.observe import fixed_ceilings
from tests.ranks import on_ranks
from tests.training.test_session_hf import _bert
from tests.training.tiny import assert_same_run, tiny
from tilewright.parallel.liveness.heartbeat import FOLDER
from tilewright.planner.machine import ceilings
from tilewright.training.executor.standard import StandardExecutor
from tilewright.training.session import train

pytestmark = pytest.mark.dist
MESHES = {"copies": {"parallel__dp_replicate": 2, "parallel__dp_shard": 1}, "shards": {"parallel__dp_shard": 2}}
SETTINGS = {"train__steps": 4, "checkpoint__interval": 2, "train__eval_interval": 0, "train__sample_tokens": 0}


def seeds(data, runs, changes):
    """The state of torch's generator before each step of a run."""
    seen, step = [], StandardExecutor.step

    def stepped(executor, *args):
        seen.append(xxhash.xxh3_64_hexdigest(torch.get_rng_state().numpy().tobytes()))
        return step(executor, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ceilings, "measure", fixed_ceilings)
        patch.setattr(StandardExecutor, "step", stepped)
        train(tiny(data, runs, **changes))
    return seen


def ranks_main(rank, data, runs, changes):
    """A run, and the same one again from its second step."""
    straight, stopped = Path(runs) / "straight", Path(runs) / "stopped"
    whole = seeds(Path(data), straight, changes)
    if rank == 0:
        shutil.copytree(straight / "tiny", stopped / "tiny", ignore=shutil.ignore_patterns(FOLDER, "step_*4"))
    torch.distributed.barrier()
    return whole, seeds(Path(data), stopped, changes)


@pytest.mark.parametrize("mesh", ["copies", pytest.param("shards", marks=pytest.mark.slow)])
@pytest.mark.support("dropout", "copies", "shards")
@pytest.mark.support("resume", "copies", "shards")
def test_each_rank_draws_its_own_masks_and_goes_on_with_them(mesh, data, tmp_path):
    """A bert with dropout. One process draws as it always did: its losses are golden."""
    changes = _bert(tmp_path / "model") | SETTINGS | MESHES[mesh]
    (first, first_again), (second, second_again) = on_ranks(2, ranks_main, str(data), str(tmp_path), changes)
    assert len({*first, *second}) == 8, "no two steps of any rank draw the same"
    assert (first_again, second_again) == (first[2:], second[2:])
    assert_same_run(tmp_path / "stopped" / "tiny", tmp_path / "straight" / "tiny")
