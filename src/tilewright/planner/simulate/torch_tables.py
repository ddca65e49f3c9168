"""Tables of torch's own schedules, so that no schedule is described a second time.

torch makes a schedule only over a process group: here over a fake one, of any number of ranks, in a process of its own.
All of torch's that has no public name is in this file; canaries in the tests ask for it.
"""

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tilewright.core.subprocess_call import ModuleWorker, answer, call_module
from tilewright.parallel.pipeline.stage_split import Pipeline
from tilewright.planner.simulate.schedule_table import ScheduleTable, rows_text

Asked = tuple[Pipeline, int]
"""A pipeline, and micro-batches per step."""


def torch_tables(asked: Sequence[Asked]) -> dict[Asked, ScheduleTable]:
    """The tables of several schedules of torch's, all from one process.

    Args:
        asked: pipelines, each with a number of micro-batches. `virtual` of one stage per rank is allowed for
            `interleaved_zero_bubble`: the schedule ZB-H1 of the zero-bubble paper (arXiv 2401.10241).

    Raises:
        ConfigError: a schedule does not take so many micro-batches.
        HardwareError: this torch has no such schedules.
    """
    return _made_by(partial(call_module, __name__), asked)


class KeptTables:
    """Makes tables as `torch_tables` does, each once, and all in one process: one that imports torch takes three
    seconds."""

    def __init__(self) -> None:
        self._worker = ModuleWorker(__name__)
        self._made: dict[Asked, ScheduleTable] = {}

    def __call__(self, asked: Asked) -> ScheduleTable:
        """The table of one of torch's schedules; see `torch_tables`."""
        if asked not in self._made:
            self._made |= _made_by(self._worker.call, [asked])
        return self._made[asked]


def _made_by(call: Callable[..., list[list[str]]], asked: Sequence[Asked]) -> dict[Asked, ScheduleTable]:
    asked = list(dict.fromkeys(asked))
    for pipeline, count in asked:
        pipeline.check_count(count)
    if not asked:
        return {}
    found = call(wanted=[[one.pp, one.schedule, one.virtual, count] for one, count in asked])
    return {one: ScheduleTable.parse(rows, one[0].schedule) for one, rows in zip(asked, found, strict=True)}


def _tables_here(wanted: Sequence[tuple[int, Any, int, int]]) -> list[list[str]]:
    import torch.distributed as dist  # here: a module of the planner is imported where nothing is distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from tilewright.parallel.launch import PIPELINES  # torch is imported where it is needed

    PIPELINES.check()
    found = []
    for pp, schedule, virtual, count in wanted:
        dist.init_process_group("fake", rank=0, world_size=pp, store=FakeStore())
        found.append(_table(Pipeline(pp, schedule, virtual), count))
        dist.destroy_process_group()
    return found


def _table(pipeline: Pipeline, count: int) -> list[str]:
    import torch
    from torch import nn
    from torch.distributed.pipelining import PipelineStage

    from tilewright.parallel.pipeline.torch_names import SCHEDULES

    nothing = torch.empty(1, device="meta")
    stages = [
        PipelineStage(
            nn.Identity(), index, pipeline.num_stages, torch.device("cpu"), input_args=nothing, output_args=nothing
        )
        for index in pipeline.stages_of(0)
    ]
    made = _only_passes(SCHEDULES[pipeline.schedule])(
        stages[0] if pipeline.schedule in ("1f1b", "gpipe") else stages, n_microbatches=count, loss_fn=lambda x, y: x
    )
    return order_text(made, pipeline, count)


def order_text(made: Any, pipeline: Pipeline, count: int) -> list[str]:
    """Rows of a schedule of torch's, as `ScheduleTable.parse` reads them.

    Args:
        made: the schedule.
        pipeline: that it is of.
        count: its micro-batches.
    """
    table = made.pipeline_order
    rows = [[_passes(action) for action in table[rank] if action is not None] for rank in range(pipeline.pp)]
    if pipeline.schedule == "1f1b":
        rows[-1] = mended_1f1b(count, pipeline.pp - 1)
    return rows_text([[slot for slot in row if slot] for row in rows])


@functools.cache
def _only_passes(schedule: Any) -> Any:
    """Torch's schedule class without its search for an order of messages."""
    return type(schedule.__name__, (schedule,), {"_prepare_schedule_with_comms": lambda self, actions: None})


def _passes(action: Any) -> list[str]:
    """The passes of an action of torch's schedule; none of what only communicates."""
    kinds = {"F", "B", "I", "W"}
    return [
        f"{one.stage_index}{one.computation_type.value}{one.microbatch_index}"
        for one in (action.sub_actions or (action,))
        if one.computation_type.value in kinds
    ]


def mended_1f1b(count: int, stage: int) -> list[list[str]]:
    """Mend the last rank's row of torch's 1F1B table: each micro-batch forward, and at once backward. torch's runtime
    runs it so; the table of torch 2.13 begins there with micro-batch 1 and ends with one that does not exist."""
    return [[f"{stage}{kind}{number}"] for number in range(count) for kind in "FB"]


if __name__ == "__main__":
    answer(_tables_here)
