"""What ranks run in the tests of sharded optimizers: light to import, since each rank does."""

from dataclasses import dataclass
from functools import cache, partial
from itertools import product

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.ranks import of_one_rank
from tilewright.core.errors import ConfigError
from tilewright.core.hardware import detect_machine
from tilewright.ops.kernels import Kernels
from tilewright.optim.adam import DeepSeekAdam
from tilewright.optim.muon import Muon

HYPER = {"lr": 3e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
MOMENTS, MASTERS = ("fp32", "bf16", "8bit"), ("fp32", "split24", "stochastic")
FORMATS = [
    (dtype, moments, master)
    for dtype, moments, master in product((FP32, BF16, FP16), MOMENTS, MASTERS)
    if (master != "split24" or moments == "8bit") and (dtype != FP16 or master == "fp32")
]
"""Every dtype of parameters with every storage of states that goes with it."""


@cache
def kernels_with(adam) -> Kernels:
    """Of this machine."""
    return Kernels(detect_machine("cpu"), {} if adam is None else {"adam": adam})


@dataclass(frozen=True)
class Case:
    """Parameters that one optimizer updates. `whole`: those whose placement is Replicate."""

    shapes: tuple[tuple[int, ...], ...]
    format: tuple[torch.dtype, str, str]
    whole: tuple[int, ...] = ()
    muon: bool = False
    seed: int = 0
    columns: bool = False
    """Matrices are cut by columns along the last axis of the mesh, and by rows along the one before it."""

    @property
    def options(self):
        """Of the optimizer. BF16 moments without the compiler, which takes its time; tests/ops compare the two."""
        kernels = kernels_with(None if self.format[1:] == ("fp32", "fp32") else "ref")
        return {"moments": self.format[1], "master": self.format[2], "kernels": kernels, "seed": 5}


def normal(*shape, seed=0):
    """Random numbers of a wide range, with zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp2(3 * torch.randn(shape, generator=generator))
    return x * (torch.rand(shape, generator=generator) > 0.05)


def mesh_of(sizes) -> DeviceMesh:
    """Of one axis, or of two for HSDP."""
    names = ("dp_replicate", "dp_shard")[-len(sizes) :]
    return init_device_mesh("cpu", tuple(sizes), mesh_dim_names=names)


def sharded(value, mesh, *, whole=False, columns=False) -> DTensor:
    """Rows on the last axis of the mesh, as FSDP2 cuts them; or columns there, and rows on the axis before."""
    if columns and value.ndim == 2:
        return distribute_tensor(value, mesh, [Shard(0), Shard(1)][-mesh.ndim :], src_data_rank=None)
    last = Replicate() if whole or not value.ndim else Shard(0)
    return distribute_tensor(value, mesh, [Replicate()] * (mesh.ndim - 1) + [last], src_data_rank=None)


def optimizer_of(case, params):
    """Of the case's kind."""
    kind = {"muon": case.muon, "stacks": case.muon}
    groups = [{"params": params[:1], **kind}, {"params": params[1:], **kind, "lr": 0.01}]
    if case.muon:
        return Muon(groups, **HYPER, **case.options)
    return DeepSeekAdam(groups, **HYPER, **case.options)


def params_of(case, mesh=None):
    """Fresh parameters, sharded where there is a mesh."""
    dtype, found = case.format[0], []
    for number, shape in enumerate(case.shapes):
        value = normal(*shape, seed=case.seed + number).to(dtype)
        how = {"whole": number in case.whole, "columns": case.columns}
        found.append(nn.Parameter(value if mesh is None else sharded(value, mesh, **how)))
    return found


def step(case, optimizer, params, number, mesh=None):
    """One update by this step's gradients."""
    for index, param in enumerate(params):
        grad = normal(*case.shapes[index], seed=1000 + 100 * number + index + case.seed).to(param.dtype)
        how = {"whole": index in case.whole, "columns": case.columns}
        param.grad = grad if mesh is None else sharded(grad, mesh, **how)
    optimizer.step()


def difference(got, want, name) -> list[str]:
    """How a tensor, of a sharded one what this rank holds, differs from a whole one; in words."""
    if isinstance(got, DTensor):
        assert got.shape == want.shape
        want = distribute_tensor(want.detach(), got.device_mesh, got.placements, src_data_rank=None).to_local()
        got = got.to_local()
    got, want = got.detach(), want.detach()
    if got.shape != want.shape or got.dtype != want.dtype:
        return [f"{name}: {got.dtype} {tuple(got.shape)}, want {want.dtype} {tuple(want.shape)}"]
    places = (got != want).nonzero()
    if not len(places):
        return []
    at = tuple(places[0].tolist())
    return [f"{name}: {len(places)} of {want.numel()} differ, the first at {at}: {got[at]}, want {want[at]}"]


def refusals(rank, sizes, cases) -> list[str]:
    """What each rank is told where a case cannot be."""
    mesh, found = mesh_of(sizes), []
    for case in cases:
        try:
            optimizer_of(case, params_of(case, mesh))
        except ConfigError as error:
            found.append(str(error))
    return found


def whole_steps(case, steps):
    """Updates of whole tensors: of each its first value, its last one, and its states."""
    params = params_of(case)
    optimizer, starts = optimizer_of(case, params), [param.detach().clone() for param in params]
    for number in range(steps):
        step(case, optimizer, params, number)
    return [(start, param.detach(), optimizer.state[param]) for start, param in zip(starts, params, strict=True)]


def differences(rank, sizes, cases, steps=3) -> list[str]:
    """Updates of shards against those of whole tensors, on each rank: parameters, states, and what is sharded."""
    mesh, found = mesh_of(sizes), []
    for case in cases:
        parts = params_of(case, mesh)
        ours = optimizer_of(case, parts)
        for number in range(steps):
            step(case, ours, parts, number, mesh)
        law = of_one_rank(partial(whole_steps, case, steps))
        for index, ((start, want, states), got) in enumerate(zip(law, parts, strict=True)):
            name = f"{case}, parameter {index}"
            found += difference(got, want, name)
            if want.numel() > 8 and torch.equal(want, start):
                found.append(f"{name} did not change")
            held = ours.state[got]
            assert states.keys() == held.keys()
            for key, state in states.items():
                found += difference(held[key], state, f"{name}, {key}")
                if key != "step" and (not isinstance(held[key], DTensor) or held[key].placements != got.placements):
                    found.append(f"{name}, {key} is not sharded like its parameter")
    return found
