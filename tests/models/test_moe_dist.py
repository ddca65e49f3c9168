"""Expert balance over ranks: the bias moves by the load of all of them, also where a rank had no rows."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.models.shapes import make_batch, make_decoder


@torch.no_grad()
def bias_after(batches, group=None):
    model = make_decoder("deepseek")
    for batch in batches:
        model.loss(batch)
    model.after_step(group)
    return model.blocks[1].mlp.gate.e_score_correction_bias


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=3)
    mine = {0: [make_batch(seed=1)], 1: [make_batch(rows=4, seed=2), make_batch(seed=3)], 2: []}[rank]
    torch.save(bias_after(mine, dist.group.WORLD), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.dist
@pytest.mark.support("experts", "copies")
def test_ranks_agree_with_one_process(tmp_path):
    mp.spawn(_rank, (str(tmp_path),), nprocs=3)
    want = bias_after([make_batch(seed=1), make_batch(rows=4, seed=2), make_batch(seed=3)])
    assert want.any()
    for rank in range(3):
        assert torch.equal(torch.load(tmp_path / f"{rank}.pt"), want), rank
