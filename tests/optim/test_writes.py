"""Writes to weights between two steps: every way to write, in every format, has its effect on the next step.

The reference keeps nothing of a weight: FP32 parameters with the weights as they were stored after the write, and the
same moments. Where nothing was written an optimizer knows more bits than are stored: half a step of the format at most.
"""

import copy
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.optim.shard_cases import BF16, FORMATS, FP16, FP32, HYPER, kernels_with, mesh_of, normal, sharded
from tests.optim.write_ways import WAYS, awkward, clamp, held, local_part, swapped_data
from tests.ranks import on_ranks
from tilewright.core.hardware import detect_machine
from tilewright.formats.rounding import join24
from tilewright.optim.adam import DeepSeekAdam
from tilewright.optim.muon import Muon

ULP = {FP32: 2.0**-23, BF16: 2.0**-7, FP16: 2.0**-10}
KINDS = (
    *((DeepSeekAdam, shape, cut) for shape in ((6, 20), (300,)) for cut in (False, True)),
    *((Muon, shape, cut) for shape in ((6, 20), (3, 4, 10)) for cut in (False, True)),
)
"""Optimizer, shape (of Muon a matrix and a stack), and whether it is sharded."""
COPIES = [format for format in FORMATS if format[0] != FP32 and format[2] != "stochastic"]
"""Formats that keep something of a weight. The others are trained here to see that the reference is right."""
CASES = [(kind, format) for kind in KINDS for format in (FORMATS if kind in (KINDS[0], KINDS[4]) else COPIES)]


def module_of(shape, dtype, mesh):
    module = nn.Module()
    value = normal(*shape).to(dtype)
    module.weight = nn.Parameter(value if mesh is None else sharded(value, mesh))
    return module


def updates_of(format):
    """Implementations of AdamW: a reference in FP32 has the same one, and so the same roundings."""
    if format[1:] != ("fp32", "fp32"):
        return ("ref",)
    return ("native", "cpu") if format[0] != FP32 and detect_machine("cpu").cxx_compiler else ("native",)


def optimizer_of(cls, param, format, update):
    options = {"moments": format[1], "master": format[2], "kernels": kernels_with(update)}
    groups = [{"params": [param], "muon": True, "stacks": param.ndim == 3}] if cls is Muon else [param]
    return cls(groups, **HYPER, **options)


def step(optimizer, param, number, dtype):
    """One update by a gradient that is exact in `dtype`."""
    grad = normal(*param.shape, seed=50 + number).to(dtype).to(param.dtype)
    param.grad = sharded(grad, param.device_mesh) if isinstance(param, DTensor) else grad
    optimizer.step()


def value_held(optimizer, module):
    """What the optimizer takes the weight for: FP32, of a sharded one this rank's part."""
    state, stored = optimizer.state[module.weight], held(module)
    local = {key: value.to_local() if isinstance(value, DTensor) else value for key, value in state.items()}
    if "low" in local:
        return join24(stored, local["low"])
    return local.get("master", stored).float()


def tolerance(format, before, written):
    """Relative to the weight: what may be between what is held and the reference, which goes by what is stored."""
    dtype, _, master = format
    kept_bits = torch.full(written.shape, ULP[dtype] / 2)  # more bits than are stored
    if master == "stochastic" and dtype == BF16:
        return 2 * kept_bits  # the next step's own rounding
    if master == "split24" and dtype == BF16:
        return kept_bits + 2.0**-15  # which of the 16 bits were written is not known, so the 8 others stay
    as_stored = written.view(torch.uint8) == before.view(torch.uint8)
    changed = ~as_stored.view(*written.shape, written.itemsize).all(-1)
    return torch.where(changed, 0.0, kept_bits if dtype != FP32 else 0.0) + 2.0**-21


def difference(way, kind, format, mesh):
    """What is wrong with a step after a write, in words; None if nothing is."""
    found = [difference_by(update, way, kind, format, mesh) for update in updates_of(format)]
    return next((words for words in found if words), None)


def difference_by(update, way, kind, format, mesh):
    """With this implementation of AdamW."""
    cls, shape, cut = kind
    module = module_of(shape, format[0], mesh if cut else None)
    optimizer = optimizer_of(cls, module.weight, format, update)
    step(optimizer, module.weight, 0, format[0])
    before = held(module).clone()
    with torch.no_grad():
        way(module)
    written = held(module).clone()
    plain = nn.Module()
    plain.weight = nn.Parameter(module.weight.detach().to(FP32, copy=True))
    reference = optimizer_of(cls, plain.weight, (FP32, format[1], "fp32"), update)
    kept = {name: value for name, value in optimizer.state[module.weight].items() if name not in ("master", "low")}
    reference.state[plain.weight] = copy.deepcopy(kept)
    step(optimizer, module.weight, 1, format[0])
    step(reference, plain.weight, 1, format[0])
    got, want = value_held(optimizer, module), held(plain)
    reach = torch.stack([written.float(), want, want - written.float()]).abs().amax(0)  # what is rounded on the way
    off = (got - want).abs() - tolerance(format, before, written) * reach
    off -= 2.0**-24 if format[0] == FP16 else 0.0  # half a step of numbers below FP16's least normal one, and its like
    same = (got == want) | (got.isnan() & want.isnan()) | (off <= 0)
    # The largest number and the next step beyond it: rounded to the format, an infinity.
    same |= (written.float().abs() >= torch.finfo(format[0]).max / 2) & (got.abs() >= torch.finfo(format[0]).max / 2)
    if bool(same.all()):
        return None
    worst = torch.where(same, -1.0, off.nan_to_num(nan=torch.inf)).flatten().argmax()
    return (
        f"{update}, {way.__name__}, {cls.__name__}, {shape}, {'sharded' if cut else 'whole'}, {format}: "
        f"{int((~same).sum())} of {same.numel()}; at {int(worst)}: {got.flatten()[worst]}, "
        f"want {want.flatten()[worst]}; "
        f"stored before {before.flatten()[worst]}, written {written.flatten()[worst]}"
    )


def differences(rank, sizes, ways):
    """On each rank."""
    mesh = mesh_of(sizes)
    kinds, formats = [KINDS[1], KINDS[7]], [(BF16, "fp32", "fp32"), (BF16, "8bit", "split24"), (FP16, "8bit", "fp32")]
    found = [difference(way, kind, format, mesh) for way in ways for kind in kinds for format in formats]
    return [words for words in found if words]


@pytest.fixture(scope="module")
def mesh():
    """One rank, in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield mesh_of((1,))
    dist.destroy_process_group()


def check(way, cases, mesh):
    found = [difference(way, kind, format, mesh) for kind, format in cases]
    found = [words for words in found if words]
    assert not found, f"{len(found)} of {len(cases)}:\n" + "\n".join(found)


@pytest.mark.parametrize("number", range(len(WAYS)), ids=lambda number: WAYS[number].__name__)
def test_a_write_has_its_effect(number, mesh):
    """In every fourth case, so that each case is there with a fourth of the ways."""
    check(WAYS[number], CASES[number % 4 :: 4], mesh)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_write_has_its_effect_in_each_case(way, mesh):
    check(way, CASES, mesh)


@pytest.mark.dist
@pytest.mark.skipif(sys.platform == "win32", reason="gloo over a file store")
def test_a_write_to_a_rank_s_part_has_its_effect():
    for rank, found in enumerate(on_ranks(2, differences, (2,), (clamp, local_part, awkward, swapped_data))):
        assert not found, f"rank {rank}:\n" + "\n".join(found)
