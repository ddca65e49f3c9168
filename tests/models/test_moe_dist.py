"""Expert balance over ranks: the bias moves by the load of all of them, also where a rank had no rows."""

import pytest
import torch
import torch.distributed as dist

from tests.models.shapes import make_batch, make_decoder
from tests.ranks import on_ranks


@torch.no_grad()
def bias_after(batches, group=None):
    model = make_decoder("deepseek")
    for batch in batches:
        model.loss(batch)
    model.after_step(group)
    return model.blocks[1].mlp.gate.e_score_correction_bias


def _bias(rank: int) -> list[float]:
    mine = {0: [make_batch(seed=1)], 1: [make_batch(rows=4, seed=2), make_batch(seed=3)], 2: []}[rank]
    return bias_after(mine, dist.group.WORLD).tolist()


@pytest.mark.dist
@pytest.mark.support("experts", "copies")
def test_ranks_agree_with_one_process():
    found = on_ranks(3, _bias)
    want = bias_after([make_batch(seed=1), make_batch(rows=4, seed=2), make_batch(seed=3)])
    assert want.any()
    assert found == [want.tolist()] * 3
