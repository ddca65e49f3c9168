"""FSDP2 over tensor parallelism: a rank's rows of rows are one range, its rows of columns a block, and both are updated
to the bits of the whole. Parts that cut a block of codes, or that do not come out even, are refused where states or
weights are rounded."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.optim.shard_cases import FORMATS, HYPER, kernels_with, normal
from tests.ranks import on_ranks
from tilewright.core.errors import ConfigError
from tilewright.ops.base.tensor_parts import holds_rows, part_of, place_of
from tilewright.optim.adam import DeepSeekAdam
from tilewright.optim.clip import GradClip
from tilewright.optim.muon import Muon
from tilewright.parallel.fill_shards import fill_part, shard_from_meta
from tilewright.parallel.shard import Sharding
from tilewright.parallel.world import Group, World
from tilewright.training.checkpoint.checkpoint_state import TrainState
from tilewright.training.checkpoint.checkpoint_store import CheckpointStore

pytestmark = pytest.mark.dist
EIGHT_BITS = (torch.float32, "8bit", "fp32")
STYLES = {
    "rows": ColwiseParallel, "columns": RowwiseParallel, "uneven": ColwiseParallel, "blocks": RowwiseParallel,
}  # fmt: skip


class Layers(nn.Module):
    """A matrix whose rows tensor parallelism cuts, two whose columns (in whole blocks of codes in one of them), and one
    whose 6 rows do not divide by 4 ranks."""

    def __init__(self, names, dtype):
        super().__init__()
        shapes = {"rows": (130, 8), "columns": (8, 12), "uneven": (130, 6), "blocks": (512, 12)}
        for name in names:
            self.add_module(name, nn.Linear(*shapes[name], dtype=dtype))
        self.norm = nn.LayerNorm(8, dtype=dtype)
        for number, param in enumerate(self.parameters()):
            param.data = normal(*param.shape, seed=number).to(dtype)


def _cut(whole, kind, rank):
    """This rank's block, counted by hand: over tp, then over dp_shard. The bias of cut columns is whole along tp."""
    shard, tp = divmod(rank, 2)
    if kind in ("columns", "blocks") and whole.ndim == 2 and whole.shape[1] > 1:  # not the scales of a bias
        whole = whole.chunk(2, dim=1)[tp]
    elif kind in ("rows", "uneven"):
        whole = whole.chunk(2)[tp]
    chunks = whole.chunk(2)
    return chunks[shard] if shard < len(chunks) else whole[:0]


def _layers(mesh, names, dtype=torch.float32):
    model = Layers(names, dtype)
    parallelize_module(model, mesh["tp"], {name: STYLES[name]() for name in names})
    fully_shard(model, mesh=mesh["dp_shard"])
    return model


def _optimizer(params, format, muon=False):
    kernels = kernels_with(None if format[1:] == ("fp32", "fp32") else "ref")
    more = {"moments": format[1], "master": format[2], "kernels": kernels, "seed": 5}
    if not muon:
        return DeepSeekAdam(params, **HYPER, **more)
    matrices, rest = ([param for param in params if (param.ndim == 2) is two] for two in (True, False))
    return Muon([{"params": matrices, "muon": True}, {"params": rest}], **HYPER, **more)


def _kind(name):
    return name.partition(".")[0]


def _updates(rank, mesh, names, format, muon=False):
    """What differs after three updates: parameters and states, each against the block of the whole one."""
    whole, model, found = Layers(names, format[0]), _layers(mesh, names, format[0]), []
    law, ours = (_optimizer(list(each.parameters()), format, muon) for each in (whole, model))
    params = dict(model.named_parameters())
    for number in range(3):
        for index, (name, want) in enumerate(whole.named_parameters()):
            want.grad = normal(*want.shape, seed=100 * number + index).to(want.dtype)
            param = params[name]
            held = _cut(want.grad, _kind(name), rank).contiguous()
            assert held.shape == param.to_local().shape, name
            how = {"run_check": False, "shape": param.shape, "stride": param.stride()}
            param.grad = DTensor.from_local(held, param.device_mesh, param.placements, **how)
        norms = [GradClip(0.0)(list(each.parameters())).norm for each in (whole, model)]
        if format[0] == torch.float32:
            assert norms[0] == pytest.approx(norms[1], rel=1e-5)
        law.step()
        ours.step()
    for name, want in whole.named_parameters():
        pairs = {"": (params[name], want)}
        pairs |= {key: (ours.state[params[name]][key], value) for key, value in law.state[want].items()}
        for key, (got, expected) in pairs.items():
            block = expected if key == "step" else _cut(expected.detach(), _kind(name), rank)
            held = got.to_local() if isinstance(got, DTensor) else got
            if not torch.equal(held, block):
                worst = (held.double() - block.double()).abs().max().item() if held.shape == block.shape else held.shape
                found.append(f"{format} {name} {key}: off by {worst}")
    return found


def _said(call):
    try:
        call()
    except ConfigError as error:
        return str(error)
    return ""


def _everything(rank, folder):
    mesh, found = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp")), {"updates": []}
    for format in FORMATS:
        more = ("columns",) if format[1] != "8bit" else ()
        found["updates"] += _updates(rank, mesh, ("rows", "blocks", *more), format)
    found["updates"] += _updates(rank, mesh, ("rows", "columns", "uneven"), (torch.float32, "fp32", "fp32"))
    for moments in ("fp32", "bf16", "8bit"):
        found["updates"] += _updates(rank, mesh, ("rows", "blocks"), (torch.float32, moments, "fp32"), muon=True)

    model = _layers(mesh, ("rows", "columns", "uneven"))
    params, whole = dict(model.named_parameters()), Layers(("rows", "columns", "uneven"), torch.float32).state_dict()
    asked = []

    def values(tensors, first_rows):
        for name, tensor in tensors.items():
            asked.append(tuple(tensor.shape))
            tensor.copy_(whole[name][first_rows[name] : first_rows[name] + len(tensor)])

    found["filled"], found["rows"], found["places"] = [], {}, {}
    for name, param in params.items():
        found["rows"][name] = holds_rows(param)
        if _kind(name) == "uneven":
            continue
        found["places"][name] = place_of(name, param.detach())[1]
        out, want = torch.empty(part_of(param).sizes), _cut(whole[name], _kind(name), rank)
        fill_part(values, name, out, part_of(param))
        found["filled"] += [] if torch.equal(out, want) else [name]
    refused = {"place": lambda: place_of("uneven", params["uneven.weight"])}
    for kind in ("columns", "uneven"):
        refused |= {f"8bit {kind}": lambda kind=kind: DeepSeekAdam([params[f"{kind}.weight"]], moments="8bit")}
    refused["muon"] = lambda: Muon([{"params": [params["uneven.weight"]], "muon": True}])
    found["refused"] = {name: _said(call) for name, call in refused.items()}

    world = World(Group(rank, 4, dist.new_group(backend="gloo")), waiting_group=dist.new_group(backend="gloo"))
    for again in (False, True):
        model = _layers(mesh, ("rows",))
        state = TrainState(model, _optimizer(list(model.parameters()), EIGHT_BITS), {}, world=world)
        if not again:
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            state.optimizer.step()
            store = CheckpointStore(folder, world=world, background=False)
            store.save(1, state.tensors(), state.meta())
            store.close()
            kept = {name: t.to_local().clone() for name, t in state.tensors().items() if isinstance(t, DTensor)}
        else:
            state.restore(store.newest_sound()[0])
            got = state.tensors()
            found["restored"] = [name for name, tensor in kept.items() if not torch.equal(got[name].to_local(), tensor)]
    return found


def _made_from_nothing(rank):
    """Of each parameter, whether the block that this rank fills is that of the whole one, placed as ever."""
    mesh, names = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp")), ("rows", "columns", "blocks")
    whole = dict(Layers(names, torch.float32).named_parameters())
    model = Layers(names, torch.float32).to("meta")
    parallelize_module(model, mesh["tp"], {name: STYLES[name]() for name in names})

    def values(tensors, first_rows=None):
        for name, tensor in tensors.items():
            start = (first_rows or {}).get(name, 0)
            tensor.copy_(whole[name].detach()[start : start + len(tensor)])

    shard_from_meta(model, [], mesh["dp_shard"], Sharding(), values, torch.device("cpu"))
    params, filled = dict(model.named_parameters()), _layers(mesh, names)
    return {
        name: torch.equal(params[name].to_local(), _cut(want.detach(), _kind(name), rank))
        and params[name].placements == filled.get_parameter(name).placements
        for name, want in whole.items()
    }


def test_a_model_that_tensor_parallelism_has_cut_is_made_from_nothing():
    for rank, found in enumerate(on_ranks(4, _made_from_nothing)):
        assert all(found.values()), f"rank {rank}: {found}"


def test_rows_of_rows_are_updated_like_the_whole(tmp_path):
    results = on_ranks(4, _everything, tmp_path)
    for rank, found in enumerate(results):
        assert not found["updates"], f"rank {rank}:\n" + "\n".join(found["updates"])
        assert not found["filled"]
        assert not found["restored"]
        assert found["rows"] == {
            "rows.weight": True, "rows.bias": True, "columns.weight": False, "columns.bias": True,
            "uneven.weight": False, "uneven.bias": False, "norm.weight": True, "norm.bias": True,
        }  # fmt: skip
        refused = found["refused"]
        assert refused == results[0]["refused"], "the same on all ranks"
        assert "divides by the number of its parts" in refused["place"]
        assert "a multiple of 256 columns" in refused["8bit columns"]
        assert "in equal parts" in refused["8bit uneven"]
        assert "even ones where several axes of the mesh cut the same dim" in refused["muon"]
    starts = [found["places"]["rows.weight"][0] for found in results]
    assert starts == [0, 4, 2, 6], "two rows for each rank, not in the order of ranks"
    assert [found["places"]["columns.weight"] for found in results] == [(0, 0), (0, 4), (6, 0), (6, 4)]

    model = Layers(("rows",), torch.float32)
    state = TrainState(model, _optimizer(list(model.parameters()), EIGHT_BITS), {})
    law = Layers(("rows",), torch.float32)
    expected = TrainState(law, _optimizer(list(law.parameters()), EIGHT_BITS), {})
    for param in law.parameters():
        param.grad = torch.ones_like(param)
    expected.optimizer.step()
    state.restore(CheckpointStore(tmp_path).newest_sound()[0])
    for name, tensor in expected.tensors().items():
        if not name.startswith("rng."):
            assert torch.equal(state.tensors()[name], tensor), name
