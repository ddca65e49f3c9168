"""What a teacher holds beside a run, as measured on one process and on two, and what the plan says."""

import gc
from pathlib import Path

import pytest

from tests.contracts.observe import fixed_ceilings
from tests.ranks import on_ranks
from tests.training.tiny import tiny
from tilewright.memory.tracking.process_memory import make_probe
from tilewright.models.distill import loss as distill
from tilewright.parallel.launch import launched
from tilewright.parallel.mesh import MeshSizes
from tilewright.planner.machine import ceilings
from tilewright.precision.policy.policy import Policy
from tilewright.training.assemble import build, set_up
from tilewright.training.components.teacher import Teacher, open_teacher
from tilewright.training.session import train

pytestmark = pytest.mark.dist
WITHIN = 0.05
"""Of the plan."""
WIDE = {"model__dim": 256, "model__num_layers": 2, "model__num_heads": 4, "data__seq_len": 128, "train__steps": 1}
STUDENT = {"data__seq_len": 128, "train__eval_interval": 0}
STUDENT |= {"train__global_batch_size": 96, "train__micro_batch_size": 8}


@pytest.fixture(scope="module")
def teacher(data, tmp_path_factory):
    """A run with a wider model than the student's."""
    folder = tmp_path_factory.mktemp("teacher")
    return train(tiny(data, folder, log__report=False, precision__mode="fp32", train__eval_interval=0, **WIDE)).run_dir


def storages(tensors):
    """Bytes of the storages of some tensors, each once."""
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(found.values())


def held(rank, data, runs, world, changes):
    """Bytes by what they are of, planned and measured: in storages, and as this process' allocator counts them."""
    ceilings.measure = fixed_ceilings  # this process is the test's own
    loaded = tiny(Path(data), Path(runs), **changes)
    with launched(MeshSizes(dp_shard=world), device="cpu", timeout_s=60) as there:
        setup = set_up(loaded, world=there)
        parts = build(setup, fresh=True)
        probe = make_probe(setup.device)

        def live():
            gc.collect()
            return probe.live_and_kept()[0]

        args = loaded.recipe, setup.prepared, parts.model, Policy(loaded.recipe.precision.mode, (), (), "cpu")
        open_teacher(*args)  # what libraries keep of a first time
        before = live()
        second = open_teacher(*args)
        grown = live() - before
        tensors = [*second.model.parameters(), *second.model.buffers()]
        taught = parts.hook(Teacher).taught
        taught(parts.stream.next_step())
        microbatches = parts.stream.next_step()
        before = live()
        found = taught(microbatches)
        handed, taught = storages([batch[distill.HIDDEN] for batch in found]), live() - before
        parts.executor.step(found, parts.schedule.lr_at(0))
        planned = setup.plan
        tokens = planned.setting.num_micro * planned.setting.micro_batch_size * planned.shape.seq_len
        theirs = planned.shape.teacher
        parts.close()
    return {
        "weights": (theirs.weights, storages(tensors), grown),
        "hidden": (tokens * theirs.hidden, handed, taught),
    }


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fp32", "bf16_mixed"])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.support("teacher", "one", "shards")
def test_bytes_of_a_teacher_are_those_of_the_plan(world, mode, teacher, data, tmp_path):
    """Weights are whole on each rank, hidden values those of its own rows."""
    changes = STUDENT | {"distill__teacher": str(teacher), "precision__mode": mode, "parallel__dp_shard": world}
    for rank, found in enumerate(on_ranks(world, held, str(data), str(tmp_path), world, changes)):
        for name, (planned, in_storages, allocated) in found.items():
            print(f"{name} of rank {rank}: {planned=:.0f}, {in_storages=}, {allocated=}")
            assert in_storages == pytest.approx(planned, rel=1e-3), f"{name}, {rank}"
            assert allocated == pytest.approx(planned, rel=WITHIN), f"{name}, {rank}"
