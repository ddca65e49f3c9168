"""Gradients of a step in each wire format, on copies, shards and copies of shards, against one process in FP32."""

import time
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.models.shapes import KERNELS
from tests.parallel.steps import Case, Seen, groups_of, is_part, made, microbatches, relative, world_of
from tests.parallel.test_buckets import Net, drawn, gathered, passes
from tests.ranks import on_ranks
from tilewright.core.config.recipe import ParallelSection
from tilewright.optim.adam import DeepSeekAdam
from tilewright.optim.clip import GradClip
from tilewright.parallel.communicate.communicator import AsyncCommunicator
from tilewright.parallel.communicate.gradient_sync import GradientSync
from tilewright.parallel.gradients import GradientReduction
from tilewright.parallel.shard import Sharding, shard
from tilewright.parallel.world import World
from tilewright.precision.loss_scaling.loss_scale import DynamicScaler
from tilewright.training.checkpoint.checkpoint_state import TrainState
from tilewright.training.checkpoint.checkpoint_store import CheckpointStore
from tilewright.training.executor.standard import StandardExecutor

SECTIONS = {wire: ParallelSection(grad_sync=wire) for wire in ("fp32", "bf16", "fp8")}
LATE_S = 1.0
UNIT = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp8": 2.0**-4}


def cut(case, world, section, optimizer=Seen, **options):
    """Model, optimizer and executor of this rank, as a run makes them."""
    world = replace(world, copies_apart=section.grad_sync != "fp32")
    model = made(case)
    if world.fsdp_mesh is not None:
        shard(model, model.layers, world.fsdp_mesh, case.sharding or Sharding())
    sync = GradientSync.attached(world, section, KERNELS, model)
    chosen = optimizer(model)
    executor = StandardExecutor(model, chosen, clip=GradClip(0.0), sync=sync, **groups_of(world), **options)
    return model, chosen, executor, sync


def steps_of(rank, sizes, cases):
    """For each case and wire: the worst error against one process, and what was exchanged by kind."""
    world = world_of(sizes)
    found = []
    for case in cases:
        _, want, alone, _ = cut(case, World.alone(), SECTIONS["fp32"])
        if rank == 0:
            alone.step([batch for other in range(world.size) for batch in microbatches(other, case.number)], 0.0)
        for wire, section in SECTIONS.items():
            _, seen, executor, _ = cut(case, world, section, **case.options)
            world.traffic.take()
            executor.step(microbatches(rank, case.number), 0.0)
            sent = world.traffic.take()
            digest = [grad.sum().item() for grad in seen.grads.values()]
            errors = {name: relative(seen.grads[name], grad) for name, grad in want.grads.items()}
            found.append((wire, max(errors.values(), default=0.0), sent, digest))
    return found


CASES = (Case("gqa", "bf16_mixed", options={"reduce_each": True}), Case("deepseek"))


@pytest.mark.dist
@pytest.mark.parametrize("sizes", [*(pytest.param(of, marks=pytest.mark.slow) for of in ((2, 1), (1, 2))), (2, 2)])
def test_gradients_arrive_in_each_wire_format(sizes):
    ranks = sizes[0] * sizes[1]
    results = on_ranks(ranks, steps_of, sizes, CASES)
    first = results[0]
    for found in results[1:]:
        assert [digest for *_, digest in found] == [digest for *_, digest in first], "the same bits on all ranks"
    for wire, error, sent, _ in first:
        assert all(one.sent_bytes > 0 and one.seconds >= one.exposed_s > 0 for one in sent.values()), sent
        # Each rank's values are rounded once, and sums of copies once more (both, where shards have copies).
        assert error <= (ranks + 2) * UNIT[wire] + (0.02 if wire == "fp32" else 0.05), (wire, error)
        assert error > 0 or wire == "fp32"
        reduced = {(axis, operation) for axis, operation, name in sent if operation != "all_gather" and name == wire}
        assert ("dp_replicate", "all_reduce") in reduced or sizes[0] == 1
        assert ("dp_shard", "reduce_scatter") in reduced or sizes[1] == 1
    by_wire = dict(zip(SECTIONS, first[-3:], strict=True))  # of FP32 parameters: others have 16-bit gradients
    total = {
        wire: sum(one.sent_bytes for (_, operation, _), one in sent.items() if operation != "all_gather")
        for wire, (_, _, sent, _) in by_wire.items()
    }
    assert total["bf16"] <= 0.51 * total["fp32"]
    assert total["fp8"] <= 0.29 * total["fp32"], "tiles of a tiny model are not full"


def late(rank, wire):
    """Seconds by axis that this rank of two copies of two shards waits in a step, where the other copy is late."""
    world = world_of((2, 2))
    model, _, executor, _ = cut(Case("gqa"), world, SECTIONS[wire])
    executor.step(microbatches(rank, 1), 0.0)
    world.traffic.take()
    if rank >= 2:
        embedding = next(module for module in model.modules() if isinstance(module, torch.nn.Embedding))
        embedding.register_forward_pre_hook(lambda *_: time.sleep(LATE_S))
    executor.step(microbatches(rank, 1), 0.0)
    found = {"dp_shard": 0.0, "dp_replicate": 0.0}
    for (axis, _, _), one in world.traffic.take().items():
        found[axis] += one.exposed_s
    return found


@pytest.mark.dist
@pytest.mark.parametrize("wire", ["fp32", pytest.param("fp8", marks=pytest.mark.slow)])
def test_a_copy_counts_how_long_it_waits_for_a_late_one(wire):
    found = on_ranks(4, late, wire)
    for waited in found[:2]:
        assert waited["dp_replicate"] > LATE_S / 4, found  # its own step takes a while too, on a busy machine


def odd(rank, wire, plans):
    """Steps of a model some of whose parameters are used at times, and twice in a pass; what is wrong, in words."""
    torch.manual_seed(0)
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    communicator = AsyncCommunicator(dist.group.WORLD, wire=wire, kernels=KERNELS)
    reduction = GradientReduction(
        model, list(model.parameters()), dist.group.WORLD, everyone=dist.group.WORLD, bucket_bytes=2000,
        communicator=communicator,
    )  # fmt: skip
    for number, plan in enumerate(plans):
        passes(plain, plan, rank, number)
        passes(model, plan, rank, number, lambda last: reduction.begin(last=last))
        reduction.finish()
        for (name, param), sums, parts in zip(model.named_parameters(), gathered(model), gathered(plain), strict=True):
            present = [part for part in parts if part is not None]
            if not present:
                if param.grad is not None:
                    return f"step {number}, {name}: a gradient though no rank used it"
                continue
            if not all(torch.equal(total, sums[0]) for total in sums):
                return f"step {number}, {name}: not the same on all ranks"
            want = torch.stack([part.double() for part in present]).sum(0)
            largest = max(float(part.abs().max()) for part in present)
            off = float((param.grad.double() - want).abs().max()) - (len(parts) + 1) * len(parts) * UNIT[wire] * largest
            if off > 0 or param.grad.stride() != param.stride():
                return f"step {number}, {name}: off by {off}"
        for param in (*model.parameters(), *plain.parameters()):
            param.grad = None
    return None


@pytest.mark.dist
@pytest.mark.parametrize("wire", ["bf16", "fp8"])
def test_parameters_in_a_bucket_share_no_scale(wire):
    for found in on_ranks(2, odd, wire, drawn(2, 8, 5)):
        assert found is None, found


def _spoiled(module, inputs, out, factor):
    out.register_hook(lambda grad: grad * factor)


def overflow(rank, sizes):
    """A gradient of one rank that is infinite; whether each rank skips the step, and what comes after."""
    world, found = world_of(sizes), []
    section = ParallelSection(grad_sync="fp8", grad_feedback=True)
    for value in (torch.inf, torch.nan):
        model, seen, executor, sync = cut(Case("gqa"), world, section)
        executor.step(microbatches(rank, 2), 0.0)
        kept = {name: tensor.clone() for name, tensor in sync.feedback.tensors().items()}
        spoil = partial(_spoiled, factor=value if rank == world.size - 1 else 1.0)
        embedding = next(module for module in model.modules() if isinstance(module, torch.nn.Embedding))
        bad = embedding.register_forward_hook(spoil)
        result = executor.step(microbatches(rank, 2), 0.0)
        bad.remove()
        after = executor.step(microbatches(rank, 2), 0.0)
        _, without, alone, _ = cut(Case("gqa"), world, section)
        for _ in range(2):  # the same steps without the bad one
            alone.step(microbatches(rank, 2), 0.0)
        same = all(torch.equal(grad, seen.grads[name]) for name, grad in without.grads.items())
        found.append((result.skipped is not None, same, len(kept) > 0, after.skipped is None))
    return found


@pytest.mark.dist
@pytest.mark.parametrize("sizes", [pytest.param((2, 1), marks=pytest.mark.slow), (1, 2)])
def test_an_overflow_on_one_rank_skips_the_step_on_all_and_is_not_fed_back(sizes):
    for found in on_ranks(2, overflow, sizes):
        assert found == [(True, True, True, True)] * 2


def scaled(rank, sizes):
    """Whether gradients are those of a run without a loss scale, where that falls from step to step."""
    world, section = world_of(sizes), ParallelSection(grad_sync="fp8", grad_feedback=True)
    _, plain, alone, _ = cut(Case("gqa"), world, section)
    scaler = DynamicScaler(2.0**12, window=1000)
    _, seen, executor, _ = cut(Case("gqa"), world, section, scaler=scaler)
    found = []
    for number in range(3):
        alone.step(microbatches(rank, 2), 0.0)
        scaler.load_state_dict(scaler.state_dict() | {"scale": 2.0 ** (12 - 3 * number)})
        executor.step(microbatches(rank, 2), 0.0)
        found.append(all(torch.equal(grad, seen.grads[name]) for name, grad in plain.grads.items()))
    return found


@pytest.mark.dist
@pytest.mark.parametrize("sizes", [pytest.param((2, 1), marks=pytest.mark.slow), (1, 2)])
def test_what_is_owed_is_without_the_loss_scale(sizes):
    for found in on_ranks(2, scaled, sizes):
        assert found == [True] * 3


def resumed(rank, sizes, folder):
    """Whether weights after a resume are those without one; and whether feedback has changed them."""
    world, lr = world_of(sizes), 1e-2
    section = ParallelSection(grad_sync="fp8", grad_feedback=True)
    adam = partial(_adam, lr=lr)

    def weights(model):
        return [(p.full_tensor() if is_part(p) else p).detach().clone() for p in model.parameters()]

    def go(executor, numbers):
        for number in numbers:
            executor.step([microbatches(10 * number + rank, 1)[0] for _ in range(2)], lr)

    model, optimizer, executor, sync = cut(Case("gqa"), world, section, adam)
    state = TrainState(model, optimizer, {}, world=world, feedback=sync.feedback)
    go(executor, range(2, 4))
    store = CheckpointStore(folder, world=world, background=False)
    state.save(store, 2, state.meta(), now=True)
    store.wait()
    go(executor, range(4, 6))
    again, optimizer, executor, sync = cut(Case("gqa"), world, section, adam)
    TrainState(again, optimizer, {}, world=world, feedback=sync.feedback).restore(store.path_of(2))
    assert sync.feedback.nbytes > 0
    go(executor, range(4, 6))
    store.close()
    plain, optimizer, executor, sync = cut(Case("gqa"), world, section, adam)
    TrainState(plain, optimizer, {}, world=world).restore(store.path_of(2))  # without what was lost
    go(executor, range(4, 6))
    pairs = [list(zip(weights(model), weights(other), strict=True)) for other in (again, plain)]
    return [all(torch.equal(a, b) for a, b in pair) for pair in pairs]


def _adam(model, lr):
    return DeepSeekAdam(model.parameters(), lr=lr, kernels=KERNELS)


@pytest.mark.dist
@pytest.mark.parametrize("sizes", [pytest.param((2, 1), marks=pytest.mark.slow), (1, 2)])
def test_a_resumed_run_owes_what_it_owed(sizes, tmp_path):
    for found in on_ranks(2, resumed, sizes, tmp_path):
        assert found == [True, False]
