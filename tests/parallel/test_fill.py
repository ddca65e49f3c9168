"""First weights on shards: bitwise those of one process, whole on no rank."""

import pytest
import torch

from tests.models.shapes import KERNELS
from tests.parallel.steps import build, hf_config, is_part, microbatches, run, world_of
from tests.ranks import on_ranks
from tilewright.models.base.protocols import InitialValues
from tilewright.models.hf.load import load_hf
from tilewright.models.layerwise.lazy_init import random_values, stored_values
from tilewright.parallel.fill import first_of_part, len_of_part, shard_from_meta
from tilewright.parallel.shard import Sharding
from tilewright.precision.convert import convert

CPU = torch.device("cpu")
CASES = (("tied", "fp32"), ("deepseek", "fp8_tile"), ("gqa", "pure_fp16"), ("llama", "fp32"), ("bert", "pure_fp16"))


class Asked:
    """Initial values, and how many elements were asked for at once."""

    def __init__(self, values: InitialValues):
        self.values, self.most = values, 0

    def __call__(self, tensors):
        self.most = max(self.most, sum(tensor.numel() for tensor in tensors.values()))
        self.values(tensors)


def _filled(kind, mode, world, folder=None, *, fresh=True):
    model = build(kind, "meta")
    values = Asked(random_values(model, 0) if folder is None else stored_values(model, folder))
    convert(model, mode, kernels=KERNELS)
    shard_from_meta(model, model.layers, world.fsdp_mesh, Sharding(), values, CPU, fresh=fresh)
    return model, values.most


def _first_weights(rank, sizes, folder):
    world = world_of(sizes)
    for kind, mode in CASES:
        model, most = _filled(kind, mode, world)
        want = dict(convert(build(kind), mode, kernels=KERNELS).state_dict())
        _same(model, want, f"{kind} {mode}")
        assert most <= max(tensor.numel() for tensor in want.values())
        trained, _ = run(model, world, microbatches(rank, 1))
        assert trained.grads
    model, _ = _filled("llama", "fp32", world, folder)
    _same(model, load_hf(folder, "causal_lm", "load", kernels=KERNELS).state_dict(), "folder")


def _same(model, want, what):
    state = model.state_dict()
    assert state.keys() == want.keys()
    for name, tensor in state.items():
        whole = tensor.full_tensor() if is_part(tensor) else tensor
        assert tensor.device.type == "cpu"
        assert torch.equal(whole, want[name]), f"{what}: {name}"


@pytest.mark.dist
@pytest.mark.parametrize("sizes", [(1, 3), pytest.param((2, 2), marks=pytest.mark.slow)])
def test_first_weights_are_those_of_one_process(sizes, tmp_path):
    torch.manual_seed(5)
    folder = tmp_path / "llama"
    load_hf(hf_config("llama"), "causal_lm", kernels=KERNELS).save_hf(folder)
    on_ranks(sizes[0] * sizes[1], _first_weights, sizes, str(folder))


def _parts(rank, world_size):
    world, found = world_of((1, world_size)), []
    for rows in (1, 2, 3, 5, 8, 61, 128):
        start, rows_here = first_of_part(rows, world.fsdp_mesh), len_of_part(rows, world.fsdp_mesh)
        chunks = torch.arange(rows).chunk(world_size)
        want = chunks[rank].tolist() if rank < len(chunks) else []
        found.append((list(range(start, start + rows_here)), want))
    return found


@pytest.mark.dist
def test_parts_are_cut_as_torch_cuts_them():
    for found in on_ranks(4, _parts, 4):
        for got, want in found:
            assert got == want


def _unfilled(rank):
    world = world_of((1, 2))
    model, most = _filled("deepseek", "fp32", world, fresh=False)
    bias = model.blocks[1].mlp.gate.e_score_correction_bias
    return most, bias.tolist()


@pytest.mark.dist
def test_a_checkpoint_needs_no_draws_but_buffers():
    for most, bias in on_ranks(2, _unfilled):
        assert most < 100
        assert bias == [0.0] * 8
