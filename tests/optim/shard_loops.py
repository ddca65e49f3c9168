"""Loops that ranks run in the tests of sharded optimizers, each beside the same loop on whole parameters."""

import copy
import io
import pickle

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests.optim.shard_cases import HYPER, kernels_with, mesh_of, normal, sharded
from tilewright.core.errors import ConfigError
from tilewright.optim.adam import DeepSeekAdam
from tilewright.optim.clip import GradClip
from tilewright.optim.gradients import found_inf
from tilewright.precision.loss_scaling.loss_scale import DynamicScaler


def full(tensor):
    """A copy of all of a tensor that may be sharded."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


# ---- FSDP2 ----


def net(dtype=torch.float32, mesh=None):
    """Layers whose rows no number of ranks divides, the last one of one row."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1)).to(dtype)
    if mesh is not None:
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def train(model, optimizer, clip, steps, part=None):
    """Norms that the clipping saw. `part`: this rank and how many there are; FSDP averages their gradients."""
    norms = []
    for number in steps:
        x = normal(8, 6, seed=number).to(next(model.parameters()).dtype)
        x = x if part is None else x[part[0] :: part[1]]
        model(x).float().square().mean().backward()
        norms.append(clip(list(model.parameters())))
        optimizer.step()
        optimizer.zero_grad()
    return torch.tensor(norms)


def fsdp_beside_adamw(rank, sizes):
    """FP32 against torch's AdamW on the whole model, states through a state_dict."""
    mesh, part = mesh_of(sizes), (rank, dist.get_world_size())
    model, whole = net(mesh=mesh), net()
    ours, theirs = DeepSeekAdam(model.parameters(), **HYPER), torch.optim.AdamW(whole.parameters(), **HYPER)
    starts = [full(param) for param in model.parameters()]
    clips = [GradClip(0.3) for _ in range(2)]
    norms = [train(model, ours, lambda p: clips[0](p).norm, range(3), part),
             train(whole, theirs, lambda p: clips[1](p).norm, range(3))]  # fmt: skip
    torch.testing.assert_close(*norms)
    again = DeepSeekAdam(model.parameters())
    again.load_state_dict(copy.deepcopy(ours.state_dict()))
    norms = [train(model, again, lambda p: clips[0](p).norm, range(3, 5), part),
             train(whole, theirs, lambda p: clips[1](p).norm, range(3, 5))]  # fmt: skip
    torch.testing.assert_close(*norms)
    for mine, want, first in zip(model.parameters(), whole.parameters(), starts, strict=True):
        torch.testing.assert_close(full(mine), want.detach(), rtol=1e-5, atol=1e-6)
        assert not torch.equal(full(mine), first), "nothing was learned"
        assert isinstance(again.state[mine]["exp_avg"], DTensor)


def own_loop(mesh, dtype, options):
    """A model and its optimizer, as a user's own FSDP2 loop makes them."""
    model = net(dtype, mesh)
    return model, DeepSeekAdam(model.parameters(), **HYPER, seed=3, kernels=kernels_with("ref"), **options)


def run(model, optimizer, steps, part):
    """As such a loop trains; whole parameters in the end."""
    train(model, optimizer, lambda p: float(full(nn.utils.clip_grad_norm_(p, 0.5))), steps, part)
    return [full(param) for param in model.parameters()]


def whole_states(model, optimizer):
    """Parameters and states by name, whole."""
    names = {param: name for name, param in model.named_parameters()}
    values = {name: full(param) for param, name in names.items()}
    for param, name in names.items():
        values |= {f"{name}.{key}": full(value) for key, value in optimizer.state[param].items()}
    return values


def save_with_dcp(rank, folder, dtype, options):
    """Two steps, saved; a new model and optimizer that load it go on with the same bits. What was saved."""
    mesh, part = mesh_of((dist.get_world_size(),)), (rank, dist.get_world_size())
    model, optimizer = own_loop(mesh, dtype, options)
    run(model, optimizer, range(2), part)
    saved = whole_states(model, optimizer)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=folder)
    want = run(model, optimizer, range(2, 4), part)
    model, optimizer = loaded_with_dcp(folder, mesh, dtype, options)
    got = run(model, optimizer, range(2, 4), part)
    assert all(map(torch.equal, got, want))
    return pickle.dumps(saved)  # a tensor itself would be shared memory of a process that ends


def loaded_with_dcp(folder, mesh, dtype, options):
    """A new model and optimizer from what was saved."""
    model, optimizer = own_loop(mesh, dtype, options)
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optim": states}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    return model, optimizer


def load_with_dcp(rank, folder, dtype, options):
    """What another number of ranks finds."""
    return pickle.dumps(whole_states(*loaded_with_dcp(folder, mesh_of((dist.get_world_size(),)), dtype, options)))


def copies(rank, dtype, options):
    """Copies of an optimizer of shards, and states that were saved by torch.save, go on with the same bits."""
    mesh = mesh_of((2,))
    for way in (copy.deepcopy, through_torch_save):
        param = nn.Parameter(sharded(normal(5, 140).to(dtype), mesh))
        optimizer = DeepSeekAdam([param], **HYPER, seed=3, kernels=kernels_with("ref"), **options)
        updated(optimizer, param, range(2), mesh)
        twin = nn.Parameter(param.detach().clone())
        other = DeepSeekAdam([twin], seed=3, kernels=kernels_with("ref"), **options)
        other.load_state_dict(way(optimizer.state_dict()))
        copied = copy.deepcopy(optimizer)
        its = copied.param_groups[0]["params"][0]
        assert its is not param
        want = updated(optimizer, param, range(2, 4), mesh)
        assert torch.equal(updated(other, twin, range(2, 4), mesh), want), way.__name__
        assert torch.equal(updated(copied, its, range(2, 4), mesh), want), "deepcopy of the optimizer"


def through_torch_save(states):
    """With no code run on loading but torch's own."""
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def updated(optimizer, param, steps, mesh=None):
    """The whole parameter after these steps."""
    for number in steps:
        grad = normal(*param.shape, seed=50 + number).to(param.dtype)
        param.grad = grad if mesh is None else sharded(grad, mesh)
        optimizer.step()
    return full(param)


def whole_states_into_shards(rank, dtype, options, pickled):
    """States of one process, loaded by each rank, go on with its bits."""
    states, value, want = pickle.loads(pickled)
    mesh = mesh_of((dist.get_world_size(),))
    param = nn.Parameter(sharded(value, mesh))
    optimizer = DeepSeekAdam([param], seed=3, kernels=kernels_with("ref"), **options)
    optimizer.load_state_dict(states)
    assert torch.equal(updated(optimizer, param, range(2, 4), mesh), want)


# ---- by hand ----


def placements_beside_adamw(rank):
    """Columns, rows, replicas and a gradient that is still to be summed, beside a parameter that is not sharded."""
    mesh = mesh_of((2,))
    placements = {"rows": Shard(0), "columns": Shard(1), "replicated": Replicate()}
    params = {name: nn.Parameter(distribute_tensor(normal(5, 4), mesh, [p])) for name, p in placements.items()}
    params["summed"] = nn.Parameter(distribute_tensor(normal(5, 4), mesh, [Replicate()]))
    params["whole"] = nn.Parameter(normal(5, 4))
    want = {name: nn.Parameter(normal(5, 4)) for name in params}
    ours, theirs = DeepSeekAdam(params.values(), **HYPER), torch.optim.AdamW(want.values(), **HYPER)
    for number in range(3):
        for place, (name, param) in enumerate(params.items()):
            grad = normal(5, 4, seed=10 * number + place)
            want[name].grad = grad
            if name in placements:
                param.grad = distribute_tensor(grad, mesh, [placements[name]])
            elif name == "summed":
                part = grad / 4 if rank == 0 else grad * 3 / 4
                param.grad = DTensor.from_local(part, mesh, [Partial()])
            else:
                param.grad = grad.clone()
        ours.step()
        theirs.step()
    for name, param in params.items():
        torch.testing.assert_close(full(param), want[name].detach(), rtol=1e-5, atol=1e-6, msg=lambda m, n=name: n + m)


def overflows(rank):
    """A bad element on one rank's shard is seen by both, beside a gradient that is not sharded."""
    mesh = mesh_of((2,))
    for bad in (None, 0, 4):  # a row of the first rank, and one of the second, which has none of a single row
        grad = torch.ones(5, 4)
        if bad is not None:
            grad[bad, 1] = torch.inf
        param, whole = nn.Parameter(sharded(grad, mesh)), nn.Parameter(torch.ones(2))
        param.grad, whole.grad = sharded(grad, mesh), torch.ones(2)
        row = nn.Parameter(sharded(torch.ones(1, 2), mesh))
        row.grad = sharded(torch.ones(1, 2), mesh)
        assert bool(found_inf([whole, row, param])) == (bad is not None)
    parts = nn.Parameter(distribute_tensor(torch.ones(2), mesh, [Replicate()]))
    parts.grad = DTensor.from_local(torch.tensor([3e38, 0.0]), mesh, [Partial()])
    assert bool(found_inf([parts])), "finite parts of an infinite sum"


SCALES = (1.0, 1.2, 0.8, torch.inf, 3.0, 500.0, 1.0, torch.nan, 1.1, 0.9)
"""Of gradients: among them overflows, a surge above the threshold, and one that the adaptive bound cuts."""


def decisions(rank, sizes):
    """What clipping and the loss scale do with a sequence of gradients, and the weights in the end.

    Args:
        rank: of this process.
        sizes: of the mesh; empty on one process with whole tensors.
    """
    mesh = mesh_of(sizes) if sizes else None
    group = dist.group.WORLD if sizes else None
    values = [normal(5, 7), normal(1, 3, seed=1), normal(4, seed=2)]
    params = [nn.Parameter(value if mesh is None else sharded(value, mesh)) for value in values]
    params += [nn.Parameter(normal(3, seed=3))]  # one that is not sharded
    optimizer = DeepSeekAdam(params, **HYPER)
    clip, scaler = (
        GradClip(1000.0, adaptive=1.2, threshold=2000.0, momentum=3, elements=400.0),
        DynamicScaler(64.0, window=3),
    )
    found = []
    for number, scale in enumerate(SCALES):
        scaler.scale(torch.zeros(()))
        for index, param in enumerate(params):
            grad = normal(*param.shape, seed=10 * number + index) * scaler.scale_value
            if index == 0:
                grad[4] = grad[4] * scale  # the last rank's row, or one rank's alone
            param.grad = sharded(grad, mesh) if isinstance(param, DTensor) else grad
        bad = bool(scaler.unscale_(optimizer, group))
        assert bad == bool(found_inf(params, group))
        result = clip(params)
        stepped = result.skip is None and scaler.step(optimizer, group)
        found.append((bad, result.skip is None, stepped, scaler.update(), result.norm, result.bound))
        optimizer.zero_grad()
    return found, clip.state_dict(), [full(param).tolist() for param in params]


def misuse(rank):
    """Gradients of shards that are used out of turn are refused as whole ones are."""
    mesh = mesh_of((2,))
    param = nn.Parameter(sharded(torch.ones(1, 3), mesh))  # the second rank has no row
    optimizer, scaler, refusals = torch.optim.SGD([param], lr=1.0), DynamicScaler(4.0), []
    scaler.scale(torch.zeros(()))
    param.grad = sharded(torch.ones(1, 3), mesh)
    scaler.unscale_(optimizer)
    scaler.scale(torch.zeros(()))
    param.grad.mul_(2)
    for call in (lambda: scaler.step(optimizer), lambda: left_from_before(scaler, optimizer, param)):
        try:
            call()
        except ConfigError as error:
            refusals.append(str(error.problems[0].got))
    return refusals


def left_from_before(scaler, optimizer, param):
    """A step whose gradient is not set to zero before the next loss."""
    scaler = DynamicScaler(4.0)
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)
    scaler.update()
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)


def one_rank_overflows(rank):
    """A loss scale of ranks with whole parameters: what one sees, all act on."""
    scaler, weight = DynamicScaler(1024.0, window=2), nn.Parameter(torch.ones(4))
    optimizer, history = torch.optim.SGD([weight], lr=1.0), []
    for bad_rank in (None, 1, None, None, 0, None):
        scaler.scale(torch.zeros(()))
        weight.grad = torch.ones(4)
        if rank == bad_rank:
            weight.grad[2] = torch.inf
        assert bool(found_inf([weight])) == (rank == bad_rank)
        stepped = scaler.step(optimizer, group=dist.group.WORLD)
        history.append((scaler.update(), stepped))
    return history, weight.tolist()
