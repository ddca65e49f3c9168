"""Canaries: each name of torch's pipelining that is not public, and what it does, asked for by itself."""

import inspect
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules, stage

from tests.ranks import on_ranks
from tilewright.parallel.pipeline import torch_names
from tilewright.parallel.pipeline.torch_names import SCHEDULES, RaggedStage, Schedules

ROOT = Path(torch_names.__file__).parent


def _made(rank):
    """Names of a stage and of schedules over it, and numbers of micro-batches that each takes."""
    options = {"device": torch.device("cpu"), "group": dist.group.WORLD, "width": 4}
    options |= {"watch": lambda *_: nullcontext(), "before_reduce": lambda: None, "sent": lambda _: None}
    stages = {
        name: [RaggedStage(nn.Identity(), index, 2 * virtual, **options) for index in range(rank, 2 * virtual, 2)]
        for name, virtual in (("1f1b", 1), ("gpipe", 1), ("interleaved", 2))
    }
    taken = {}
    for name, own in stages.items():
        for count in range(1, 10):
            try:
                SCHEDULES[name](own if name == "interleaved" else own[0], count, loss_fn=lambda x, y: x)
                taken.setdefault(name, []).append(count)
            except ValueError:
                continue
    made = {name: Schedules(name, own)._new(4) for name, own in stages.items()}
    infos = [info for of in stages.values() for one in of for info in one.args_recv_info[0]]
    of_stage = set(vars(stages["1f1b"][0])) | set(dir(RaggedStage))
    return of_stage, {name: set(dir(one)) for name, one in made.items()}, taken, {k for i in infos for k in vars(i)}


@pytest.mark.dist
def test_torch_has_the_names_and_takes_the_numbers_of_micro_batches_that_are_said_of_it():
    from tilewright.parallel.pipeline.stage_split import Pipeline

    of_stage, of_schedules, taken, of_info = on_ranks(2, _made)[0]
    assert set(torch_names.PRIVATE_OF_STAGE) <= of_stage
    assert {"buffer", "is_root_arg"} <= of_info
    for name, found in of_schedules.items():
        own = "_initialize_stages" if name == "interleaved" else "_initialize_stage"
        assert {*torch_names.PRIVATE_OF_SCHEDULE, own} <= found
        virtual = 2 if name == "interleaved" else 1
        assert taken[name] == [count for count in range(1, 10) if Pipeline(2, name, virtual).takes(count)]


@pytest.mark.parametrize(
    ("owner", "name", "words"),
    [
        (PipelineStage, "get_fwd_recv_ops", "args_recv_info[fwd_chunk_id]"),
        (PipelineStage, "get_bwd_recv_ops", "grad_recv_info[bwd_chunk_id]"),
        (PipelineStage, "_retrieve_recv_activations", "info.buffer.requires_grad_"),
        (PipelineStage, "backward_one_chunk", "self.fwd_cache.pop"),
        (PipelineStage, "_check_chunk_id", "self.chunks"),
        (PipelineStage, "perform_reduce_grad", "fsdp_param_group.post_backward()"),
        (stage.PipelineStage, "_setup_forward_recv_info", "self._stage_meta.inputs"),
        (schedules._PipelineSchedule, "_update_losses", "self._internal_losses.clear()"),
        (schedules.ScheduleInterleaved1F1B, "__init__", "self._calculate_single_rank_operations(rank)"),
        (schedules.ScheduleInterleaved1F1B, "_calculate_single_rank_operations", "_get_1f1b_rank_ops("),
    ],
)
def test_what_is_overridden_does_what_it_is_overridden_for(owner, name, words):
    assert words in inspect.getsource(getattr(owner, name))


def test_one_file_has_them():
    private = re.compile(r"_step_microbatches|_recv_info|_runtime_validate|_initialize_stage|pipelining import")
    used = [path.name for path in ROOT.glob("*.py") if private.search(path.read_text())]
    assert used == ["torch_names.py"]
