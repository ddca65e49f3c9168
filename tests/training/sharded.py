"""A small model in shards, uneven and empty ones among them, with what a run on several ranks saves and loads."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.training.test_state import Tied
from tilewright.core import env
from tilewright.optim.adam import DeepSeekAdam
from tilewright.optim.clip import GradClip
from tilewright.parallel.mesh import MeshSizes
from tilewright.parallel.world import World, join
from tilewright.training.checkpoint.checkpoint_state import TrainState, model_fingerprint
from tilewright.training.checkpoint.checkpoint_store import CheckpointStore


class Rows(Tied):
    """Embedding of 11 rows, tied to the head; layers of 5 and of 3 rows, so that the last of 4 ranks holds nothing of
    one; a batch norm, whose running means follow each rank's own data."""

    def __init__(self, seed: int = 0):
        super().__init__(seed=seed)
        self.up, self.down = nn.Linear(8, 5), nn.Linear(5, 3)

    def forward(self, ids: Tensor) -> Tensor:
        logits = super().forward(ids)
        return logits + self.down(self.up(self.embed(ids))).mean(-1, keepdim=True)


def joined(shard: int, replicate: int = 1) -> World:
    """The world of these ranks; `World.alone` for one."""
    if shard * replicate == 1:
        return World.alone()
    return join(env.ranks(), MeshSizes(dp_replicate=replicate, dp_shard=shard), torch.device("cpu"))


def sharded_state(world: World, seed: int, **options: Any) -> tuple[TrainState, GradClip]:
    """Model, optimizer and clipping, cut as the world says."""
    model = Rows(seed)
    if world.fsdp_mesh is not None:
        fully_shard(model.up, mesh=world.fsdp_mesh)
        fully_shard(model, mesh=world.fsdp_mesh)
    optimizer, clip = DeepSeekAdam(model.parameters(), lr=0.01, **options), GradClip(1.0, adaptive=1.1)
    return TrainState(model, optimizer, {"clip": clip}, world=world), clip


def train(state: TrainState, steps: int) -> list[float]:
    """Losses on rows that differ by rank."""
    losses = []
    for _ in range(steps):
        ids = torch.randint(0, 11, (16,))
        loss = nn.functional.cross_entropy(state.model(ids), ids.flip(0))
        loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


def whole(state: TrainState) -> dict[str, np.ndarray]:
    """Copies of model and optimizer, every tensor whole, its bits as integers; the generators left out."""
    tensors = {name: tensor for name, tensor in state.tensors().items() if not name.startswith("rng.")}
    full = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in tensors.items()}
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return {name: value.clone().view(bits[value.itemsize]).numpy() for name, value in full.items()}


def saved(rank: int, folder: Path, shard: int, replicate: int = 1, steps: int = 3, **save: Any) -> dict[str, Any]:
    """Train and save; what the tensors were, what became of the save, and what the run did after it."""
    torch.manual_seed(100 + rank)
    world = joined(shard, replicate)
    state, clip = sharded_state(world, seed=0)
    train(state, steps)
    clip(list(state.model.parameters()))
    store = CheckpointStore(folder, world=world)
    before = whole(state)
    store.save(steps, state.tensors(), state.meta() | {"of_rank": rank}, **save)
    after = train(state, 2)
    store.close()
    (record,) = store.finished()
    return {
        "names": list(state.tensors()),
        "fingerprint": model_fingerprint(state.model),
        "tensors": before,
        "record": record,
        "after": after,
        "next": torch.rand(3).tolist(),
    }


def loaded(rank: int, path: Path, shard: int, replicate: int = 1) -> dict[str, Any]:
    """Load into fresh objects; the tensors, and what the run does from there."""
    torch.manual_seed(7)
    world = joined(shard, replicate)
    state, _ = sharded_state(world, seed=99)
    meta = state.restore(path)
    tensors = whole(state)
    return {"tensors": tensors, "meta": meta, "after": train(state, 2), "next": torch.rand(3).tolist()}
