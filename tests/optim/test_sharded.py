"""Sharded parameters (DTensor): all-FP32 training equals torch's AdamW on whole ones, everything else is refused.

The refusals are tested in this process, on a mesh of one rank; the numbers on two.
"""

import copy
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests.optim.test_adam import FORMATS
from tests.optim.test_citizen import HYPER, assert_in_words, normal
from tilewright.core.errors import ConfigError
from tilewright.optim.adam import DeepSeekAdam
from tilewright.optim.clip import GradClip
from tilewright.optim.gradients import found_inf

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(sys.platform == "win32", reason="gloo over a file store"),
]


@pytest.fixture(scope="module")
def mesh():
    """One rank, in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def sharded(mesh, dtype=torch.float32):
    return nn.Parameter(distribute_tensor(normal(6, 4).to(dtype), mesh, [Shard(0)]))


def made(mesh, dtype, options):
    DeepSeekAdam([nn.Parameter(normal(6, 4).to(dtype)), sharded(mesh, dtype)], **options)


def added(mesh, dtype, options):
    optimizer = DeepSeekAdam([nn.Parameter(normal(6, 4).to(dtype))], **options)
    optimizer.add_param_group({"params": [sharded(mesh, dtype)], "lr": 1.0})


def replaced(mesh, dtype, options):
    """As code does that shards a model and mends its optimizer."""
    optimizer = DeepSeekAdam([nn.Parameter(normal(6, 4).to(dtype))], **options)
    param = optimizer.param_groups[0]["params"][0] = sharded(mesh, dtype)
    param.grad = distribute_tensor(torch.ones(6, 4, dtype=dtype), mesh, [Shard(0)])
    optimizer.step()


SHARDED_FORMATS = {name: case for name, case in FORMATS.items() if name != "fp32"}


@pytest.mark.parametrize(("dtype", "options"), SHARDED_FORMATS.values(), ids=SHARDED_FORMATS)
@pytest.mark.parametrize("when", [made, added, replaced])
def test_every_other_format_is_refused(mesh, when, dtype, options):
    with pytest.raises(ConfigError) as caught:
        when(mesh, dtype, options)
    assert_in_words(caught.value, "DTensor", "FP32")


def test_an_fp64_parameter_is_refused(mesh):
    with pytest.raises(ConfigError) as caught:
        DeepSeekAdam([sharded(mesh, torch.float64)])
    assert_in_words(caught.value, "DTensor", "FP32")


def test_parts_of_a_sum_are_refused(mesh):
    parts = nn.Parameter(DTensor.from_local(torch.ones(3), mesh, [Partial()]))
    with pytest.raises(ConfigError) as caught:
        DeepSeekAdam([parts])
    assert_in_words(caught.value, "Partial", "redistribute")


@pytest.mark.parametrize("stepped", [False, True])
def test_fully_shard_after_the_optimizer_was_made_is_refused(mesh, stepped):
    """It puts other parameters into the model; training would run, and change nothing."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = DeepSeekAdam(model.parameters())
    if stepped:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    fully_shard(model[1], mesh=mesh)  # the first layer trains on, the second one would not
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(ConfigError) as caught:
        optimizer.step()
    assert_in_words(caught.value, "2 parameters", "make the optimizer after fully_shard")


def test_a_whole_gradient_of_a_sharded_parameter_is_refused(mesh):
    param = sharded(mesh)
    optimizer = DeepSeekAdam([param])
    with pytest.raises(ConfigError) as caught:
        optimizer.step_params([param], [torch.ones(6, 4)])
    assert_in_words(caught.value, "DTensor")


def test_whole_states_of_a_sharded_parameter_are_refused(mesh):
    whole = nn.Parameter(normal(6, 4))
    source, param = DeepSeekAdam([whole]), sharded(mesh)
    whole.grad = torch.ones(6, 4)
    source.step()
    target = DeepSeekAdam([param])
    target.load_state_dict(source.state_dict())
    param.grad = distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)])
    with pytest.raises(ConfigError) as caught:
        target.step()
    assert_in_words(caught.value, "states", "Shard")


# ---- two ranks ----


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1))


def _train(model, optimizer, clip, start, steps, half=None):
    """Norms that the clipping saw. `half`: rows of this rank; FSDP averages the gradients of both."""
    norms = []
    for step in range(start, start + steps):
        x = normal(8, 6, seed=step) * 5
        x = x if half is None else x[half::2]
        model(x).square().mean().backward()
        norms.append(clip(list(model.parameters())).norm)
        optimizer.step()
        optimizer.zero_grad()
    return norms


def _fsdp(mesh, rank, record):
    """FSDP2 with shards of unequal size, one of them empty; states through a state_dict and a copy."""
    model, whole = _model(), _model()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    ours, theirs = DeepSeekAdam(model.parameters(), **HYPER), torch.optim.AdamW(whole.parameters(), **HYPER)
    start = [param.full_tensor().detach().clone() for param in model.parameters()]
    norms = _train(model, ours, GradClip(0.3), 0, 3, rank), _train(whole, theirs, GradClip(0.3), 0, 3)
    torch.testing.assert_close(*map(torch.tensor, norms))
    again = DeepSeekAdam(model.parameters())
    again.load_state_dict(copy.deepcopy(ours.state_dict()))
    norms = _train(model, again, GradClip(0.3), 3, 2, rank), _train(whole, theirs, GradClip(0.3), 3, 2)
    torch.testing.assert_close(*map(torch.tensor, norms))
    for mine, want, first in zip(model.parameters(), whole.parameters(), start, strict=True):
        got = mine.full_tensor()
        torch.testing.assert_close(got, want.detach(), rtol=1e-5, atol=1e-6)
        assert not torch.equal(got, first), "nothing was learned"
    for param in model.parameters():
        assert isinstance(again.state[param]["exp_avg"], DTensor)
    record["fsdp"] = True


def _by_hand(mesh, rank, record):
    """Columns, rows, replicas and a gradient that is still to be summed, beside a parameter that is not sharded."""
    placements = {"rows": Shard(0), "columns": Shard(1), "replicated": Replicate()}
    params = {name: nn.Parameter(distribute_tensor(normal(5, 4), mesh, [p])) for name, p in placements.items()}
    params["summed"] = nn.Parameter(distribute_tensor(normal(5, 4), mesh, [Replicate()]))
    params["whole"] = nn.Parameter(normal(5, 4))
    want = {name: nn.Parameter(normal(5, 4)) for name in params}
    ours, theirs = DeepSeekAdam(params.values(), **HYPER), torch.optim.AdamW(want.values(), **HYPER)
    for step in range(3):
        for place, (name, param) in enumerate(params.items()):
            grad = normal(5, 4, seed=10 * step + place)
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
        got = param.full_tensor() if isinstance(param, DTensor) else param
        torch.testing.assert_close(got.detach(), want[name].detach(), rtol=1e-5, atol=1e-6, msg=lambda m, n=name: n + m)
    record["by hand"] = True


def _overflow(mesh, rank, record):
    """A bad element on one rank's shard is seen by both, beside a gradient that is not sharded."""
    for bad in (None, 0, 4):  # a row of the first rank, and one of the second, which has none of a single row
        grad = torch.ones(5, 4)
        if bad is not None:
            grad[bad, 1] = torch.inf
        param, whole = nn.Parameter(distribute_tensor(grad, mesh, [Shard(0)])), nn.Parameter(torch.ones(2))
        param.grad, whole.grad = distribute_tensor(grad, mesh, [Shard(0)]), torch.ones(2)
        row = nn.Parameter(distribute_tensor(torch.ones(1, 2), mesh, [Shard(0)]))
        row.grad = distribute_tensor(torch.ones(1, 2), mesh, [Shard(0)])
        assert bool(found_inf([whole, row, param])) == (bad is not None)
    parts = nn.Parameter(distribute_tensor(torch.ones(2), mesh, [Replicate()]))
    parts.grad = DTensor.from_local(torch.tensor([3e38, 0.0]), mesh, [Partial()])
    assert bool(found_inf([parts])), "finite parts of an infinite sum"
    record["overflow"] = True


def _clipped(mesh, rank, record):
    """Norms and clipped gradients where some are sharded and some are not."""
    for clip in (GradClip(0.5), GradClip(0.5, elements=0.7)):
        whole = [nn.Parameter(torch.ones(5, 4)), nn.Parameter(torch.ones(3))]
        mixed = [nn.Parameter(distribute_tensor(whole[0].detach(), mesh, [Shard(0)])), nn.Parameter(torch.ones(3))]
        for place, param in enumerate(whole):
            param.grad = normal(*param.shape, seed=place)
        mixed[0].grad, mixed[1].grad = distribute_tensor(whole[0].grad, mesh, [Shard(0)]), whole[1].grad.clone()
        assert clip(mixed, 0.25).norm == pytest.approx(clip(whole, 0.25).norm, rel=1e-6)
        torch.testing.assert_close(mixed[0].grad.full_tensor(), whole[0].grad)
        torch.testing.assert_close(mixed[1].grad, whole[1].grad)
    record["clipped"] = True


def _rank(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    mesh, record = init_device_mesh("cpu", (world,)), {}
    for case in (_fsdp, _by_hand, _overflow, _clipped):
        case(mesh, rank, record)
    (Path(folder) / f"{rank}").write_text(str(sorted(record)))
    dist.destroy_process_group()


def test_two_ranks_equal_whole_parameters(tmp_path):
    mp.spawn(_rank, (2, str(tmp_path)), nprocs=2)
    for rank in range(2):
        assert (tmp_path / f"{rank}").read_text() == "['by hand', 'clipped', 'fsdp', 'overflow']"
