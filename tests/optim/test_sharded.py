"""Sharded parameters (DTensor): for equal gradients, every format of the states has the bits of the unsharded update.

Whole parameters and sharded ones are trained side by side on each rank. What is refused is refused on one rank too.
"""

import sys

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from tests.draws import examples
from tests.optim.shard_cases import BF16, FORMATS, FP32, Case, differences, normal, refusals
from tests.optim.test_citizen import assert_in_words
from tests.ranks import on_ranks
from tilewright.core.errors import ConfigError
from tilewright.optim.adam import DeepSeekAdam
from tilewright.optim.muon import Muon

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(sys.platform == "win32", reason="gloo over a file store"),
]

ROWS, LENGTHS = st.integers(1, 19), st.sampled_from([1, 2, 5, 16, 127, 128, 129, 256, 300])
SHAPES = st.one_of(
    st.tuples(st.integers(1, 300)),
    st.tuples(ROWS, LENGTHS),
    st.tuples(ROWS, st.sampled_from([1, 3, 16]), st.sampled_from([1, 8, 17, 50])),
    st.sampled_from([(), (0,), (0, 5), (3, 0)]),
)
CASES = st.builds(
    Case,
    shapes=st.lists(SHAPES, min_size=1, max_size=3).map(tuple),
    format=st.sampled_from(FORMATS),
    whole=st.sampled_from([(), (), (0,), (1,)]),
    seed=st.integers(0, 5),
)
MESHES = st.one_of(st.integers(1, 8).map(lambda size: (size,)), st.sampled_from([(2, 2), (1, 3), (3, 2), (2, 4)]))
EVERY_FORMAT = [Case(((7, 300), (5,), (3, 4, 40)), format) for format in FORMATS]


@given(sizes=MESHES, cases=st.lists(CASES, min_size=5, max_size=8))
@example(sizes=(5,), cases=EVERY_FORMAT)  # one rank and more without a row
@example(sizes=(2, 2), cases=EVERY_FORMAT)
@examples(2, suppress_health_check=list(HealthCheck))
@pytest.mark.support("adam", "shards", "hsdp")
def test_a_sharded_update_has_the_bits_of_the_whole_one(sizes, cases):
    of_ranks = on_ranks(torch.Size(sizes).numel(), differences, sizes, cases)
    for rank, found in enumerate(of_ranks):
        assert not found, f"rank {rank} of {sizes}:\n" + "\n".join(found)


BLOCKS = [Case(((7, 512), (5,), (6, 1024)), format, columns=True, seed=seed) for seed, format in enumerate(FORMATS)] + [
    Case(((7, 40), (3, 5)), format, columns=True) for format in FORMATS if format[1] != "8bit"
]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2,), (2, 2)])
def test_blocks_of_rows_and_columns_have_the_bits_of_the_whole_update(sizes):
    """As tensor parallelism by columns leaves them, and FSDP2 over it."""
    for rank, found in enumerate(on_ranks(torch.Size(sizes).numel(), differences, sizes, BLOCKS)):
        assert not found, f"rank {rank} of {sizes}:\n" + "\n".join(found)


def test_columns_that_would_cut_a_block_of_codes_are_refused_on_every_rank():
    cases = [Case(((7, columns),), (FP32, "8bit", "fp32"), columns=True) for columns in (300, 384, 640)]
    for found in on_ranks(2, refusals, (2,), cases):
        assert len(found) == len(cases), found
        assert all("a multiple of 256" in text for text in found), found


MATRICES = [
    Case(((7, 30), (12, 12), (12, 12), (1, 5), (30, 130)), format, muon=True) for format in FORMATS if format[0] != BF16
] + [Case(((7, 130), (9, 4)), format, muon=True, whole=(1,)) for format in FORMATS if format[0] == BF16]


@pytest.mark.parametrize("sizes", [(2,), *(pytest.param(sizes, marks=pytest.mark.slow) for sizes in ((3,), (2, 2)))])
@pytest.mark.support("muon", "shards", "hsdp")
def test_a_sharded_matrix_of_muons_has_the_bits_of_the_whole_one(sizes):
    """More and fewer matrices than ranks, and matrices with fewer rows than those."""
    for rank, found in enumerate(on_ranks(torch.Size(sizes).numel(), differences, sizes, MATRICES)):
        assert not found, f"rank {rank} of {sizes}:\n" + "\n".join(found)


FEW_BLOCKS = [(FP32, "fp32", "fp32"), (BF16, "bf16", "stochastic"), (BF16, "8bit", "split24")]
ALL_BLOCKS = [format for format in FORMATS if format[0] != torch.float16]


@pytest.mark.parametrize(
    ("sizes", "formats"),
    [((2, 2), FEW_BLOCKS), *(pytest.param(of, ALL_BLOCKS, marks=pytest.mark.slow) for of in ((2,), (2, 2)))],
    ids=["few", "one axis", "all"],
)
def test_blocks_of_a_matrix_of_muons_have_the_bits_of_the_whole_one(sizes, formats):
    """As tensor parallelism by columns leaves them, and FSDP2 over it: more matrices than ranks."""
    shapes = (7, 256), (12, 256), (12, 512), (3, 256), (256, 256)
    cases = [Case(shapes, format, muon=True, columns=True) for format in formats]
    of_ranks = on_ranks(torch.Size(sizes).numel(), differences, sizes, cases)
    for rank, found in enumerate(of_ranks):
        assert not found, f"rank {rank} of {sizes}:\n" + "\n".join(found)


def test_experts_of_a_stack_are_updated_where_they_are():
    """Each rank multiplies its own matrices as one stack: the bits of a smaller stack."""
    cases = [Case(((5, 12, 20),), (FP32, moments, "fp32"), muon=True) for moments in ("fp32", "bf16", "8bit")]
    for found in on_ranks(3, differences, (3,), cases):
        assert not found, "\n".join(found)


# ---- what is refused, on a mesh of one rank in this process ----


@pytest.fixture(scope="module")
def mesh():
    """One rank, in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def sharded(mesh, dtype=FP32, placement=None, shape=(6, 4)):
    return nn.Parameter(distribute_tensor(normal(*shape).to(dtype), mesh, [placement or Shard(0)]))


STACK = (6, 4, 2)


def made(mesh, dtype, options):
    DeepSeekAdam([nn.Parameter(normal(6, 4).to(dtype)), sharded(mesh, dtype, Shard(1), STACK)], **options)


def added(mesh, dtype, options):
    optimizer = DeepSeekAdam([nn.Parameter(normal(6, 4).to(dtype))], **options)
    optimizer.add_param_group({"params": [sharded(mesh, dtype, Shard(1), STACK)], "lr": 1.0})


def replaced(mesh, dtype, options):
    """As code does that shards a model and mends its optimizer."""
    optimizer = DeepSeekAdam([nn.Parameter(normal(6, 4).to(dtype))], **options)
    param = optimizer.param_groups[0]["params"][0] = sharded(mesh, dtype, Shard(1), STACK)
    param.grad = distribute_tensor(torch.ones(STACK, dtype=dtype), mesh, [Shard(1)])
    optimizer.step()


ROUNDED = [case for case in FORMATS if case[1] != "fp32" or (case[0] == BF16 and case[2] == "stochastic")]


@pytest.mark.parametrize("format", ROUNDED, ids=str)
@pytest.mark.parametrize("when", [made, added, replaced])
def test_a_stack_cut_in_its_matrices_is_refused_where_something_is_rounded(mesh, when, format):
    dtype, moments, master = format
    with pytest.raises(ConfigError) as caught:
        when(mesh, dtype, {"moments": moments, "master": master})
    assert_in_words(caught.value, "DTensor", "Shard(0)", moments)


def test_a_stack_cut_in_its_matrices_is_refused_by_muon(mesh):
    with pytest.raises(ConfigError) as caught:
        Muon([{"params": [sharded(mesh, placement=Shard(1), shape=STACK)], "muon": True, "stacks": True}])
    assert_in_words(caught.value, "Shard(dim=1)", "whole matrices")


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
    replaced = model[1].weight
    fully_shard(model[1], mesh=mesh)  # the first layer trains on, the second one would not
    if not hasattr(replaced, "_fsdp_orig_uid"):
        pytest.skip(f"torch {torch.__version__} does not mark what fully_shard replaces")
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


def test_states_of_a_parameter_that_was_sharded_under_them_are_refused(mesh):
    whole = nn.Parameter(normal(6, 4))
    optimizer, param = DeepSeekAdam([whole]), sharded(mesh)
    whole.grad = torch.ones(6, 4)
    optimizer.step()
    optimizer.param_groups[0]["params"][0] = param
    optimizer.state[param] = optimizer.state.pop(whole)
    param.grad = distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)])
    with pytest.raises(ConfigError) as caught:
        optimizer.step()
    assert_in_words(caught.value, "states", "Shard")
