"""Ranks that hold other layers of one model: checkpoint, its checks and exported folder are those of one process."""

import pytest
import torch
from torch import nn

from tests.models.shapes import make_decoder
from tests.ranks import on_ranks
from tilewright.core import env
from tilewright.core.config.recipe import Recipe
from tilewright.core.errors import CheckpointError
from tilewright.optim.adam import DeepSeekAdam
from tilewright.parallel.communicate.whole_tensors import WholeTensors
from tilewright.parallel.mesh import MeshSizes
from tilewright.parallel.world import World, join
from tilewright.training.checkpoint.checkpoint_state import TrainState
from tilewright.training.checkpoint.checkpoint_store import CheckpointStore
from tilewright.training.checkpoint.write_checkpoint import ReplicasDifferError
from tilewright.training.components.export import export

pytestmark = pytest.mark.dist
SHARED = "model.norm.weight"
"""Of both ranks: what they hold of it is compared."""
FORMATS = ("keep", "bf16", "fp8")


def _stage(kind, rank, seed=0):
    """The first rank has the embedding and the first layer, the second one the rest; None: all of it."""
    model = make_decoder(kind, seed)
    if rank is None:
        return model
    del model.model.layers._modules[str(1 - rank)]
    if rank == 0:
        model.lm_head = nn.Identity()
    else:
        model.model.embed_tokens = nn.Identity()
    return model


def _state(model, world):
    """After one update by gradients that a parameter's name gives."""
    optimizer = DeepSeekAdam(model.parameters(), lr=0.01)
    for name, param in model.named_parameters():
        generator = torch.Generator().manual_seed(sum(name.encode()))
        param.grad = torch.randn(param.shape, generator=generator)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return TrainState(model, optimizer, {}, world=world)


def _save(folder, world, model, spoil=False):
    state = _state(model, world)
    if spoil:
        dict(model.named_parameters())[SHARED].data[0] += 1.0
    store = CheckpointStore(folder, world=world, background=False)
    try:
        store.save(1, state.tensors(), state.meta(), compared=state._compared())
        store.wait()
        return [record.error for record in store.finished()], state
    finally:
        store.close()


def _stages(rank, folder):
    world, found = join(env.ranks(), MeshSizes(pp=2), torch.device("cpu")), {}
    found["saved"], state = _save(folder / "saved", world, _stage("gqa", rank))
    found["fingerprint"] = state.meta()["model"]
    try:
        found["spoiled"] = str(_save(folder / "spoiled", world, _stage("gqa", rank), spoil=rank == 1)[0])
    except ReplicasDifferError as error:
        found["spoiled"] = str(error)
    path = CheckpointStore(folder / "saved").newest_sound()[0]
    fresh = _stage("gqa", rank, seed=5)
    again = TrainState(fresh, DeepSeekAdam(fresh.parameters(), lr=0.01), {}, world=world)
    again.restore(path)
    found["restored"] = _differences(again, state)
    other = _stage("tied", rank)
    try:
        TrainState(other, DeepSeekAdam(other.parameters()), {}, world=world).restore(path)
    except CheckpointError as error:
        found["other"] = str(error)
    whole = WholeTensors(world.everyone.handle, state.model.state_dict(keep_vars=True))
    found["elsewhere"] = sorted(whole.elsewhere)
    for format in FORMATS:
        recipe = Recipe.model_validate({"checkpoint": {"export_format": format}})
        found[format] = export(recipe, state.model, state, None, folder / "stages" / format)
    return found


def _differences(got, want):
    ours, theirs = (
        {name: t for name, t in state.tensors().items() if not name.startswith("rng.")} for state in (got, want)
    )
    assert ours.keys() == theirs.keys()
    return [name for name, tensor in theirs.items() if not torch.equal(ours[name], tensor)]


def test_ranks_with_other_layers_save_restore_and_export_one_model(tmp_path):
    (tmp_path / "stages").mkdir()
    (tmp_path / "alone").mkdir()
    results = on_ranks(2, _stages, tmp_path)
    alone = _state(_stage("gqa", None), World.alone())
    for rank, found in enumerate(results):
        assert found["saved"] == [None]
        assert found["fingerprint"] == alone.meta()["model"]
        assert SHARED in found["spoiled"]
        assert not found["restored"], f"rank {rank}"
        assert found["other"] == results[0]["other"], "the same on all ranks"
        assert "checkpoint of another model" in found["other"]
        assert found["elsewhere"]
    assert set(results[0]["elsewhere"]) & set(results[1]["elsewhere"]) == set()

    model = _stage("gqa", None, seed=7)
    state = TrainState(model, DeepSeekAdam(model.parameters(), lr=0.01), {})
    state.restore(CheckpointStore(tmp_path / "saved").newest_sound()[0])
    assert not _differences(state, alone)
    for format in FORMATS:
        recipe = Recipe.model_validate({"checkpoint": {"export_format": format}})
        text = export(recipe, model, state, None, tmp_path / "alone" / format)
        assert [found[format].replace("stages", "alone") for found in results] == [text] * 2
        ours, theirs = tmp_path / "stages" / format, tmp_path / "alone" / format
        for path in theirs.iterdir():
            assert (ours / path.name).read_bytes() == path.read_bytes(), f"{format}: {path.name}"
