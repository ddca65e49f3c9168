"""Tables are torch's own: canaries of its private names, the row that is mended, and tables from files."""

import inspect

import pytest
from torch.distributed.pipelining import Schedule1F1B, schedules

from tilewright.core.errors import ConfigError
from tilewright.parallel.pipeline.stage_split import Pipeline
from tilewright.planner.simulate import torch_tables
from tilewright.planner.simulate.schedule_table import ScheduleTable, rows_text


def test_every_schedule_has_each_pass_once_on_the_rank_that_has_the_stage(tables):
    for (pipeline, m), table in tables.items():
        assert (table.num_ranks, table.num_stages, table.num_microbatches) == (pipeline.pp, pipeline.num_stages, m)
        assert list(table.rank_of) == [pipeline.rank_of(stage) for stage in range(pipeline.num_stages)]


def test_an_order_is_made_without_messages_by_the_name_that_is_left_out():
    for kind in (schedules.ScheduleInterleaved1F1B, schedules.ScheduleZBVZeroBubble, schedules.ScheduleDualPipeV):
        assert "self._prepare_schedule_with_comms(self.pipeline_order" in inspect.getsource(kind.__init__)
    assert "pipeline_order" in inspect.getsource(schedules.PipelineScheduleSingle.__init__)
    assert {"stage_index", "computation_type", "microbatch_index", "sub_actions"} <= set(schedules._Action._fields)


def test_the_table_of_1f1b_still_lacks_the_first_micro_batch_of_the_last_rank():
    """When this fails, torch has mended it: `torch_tables.mended_1f1b` can go."""
    schedule = Schedule1F1B.__new__(Schedule1F1B)
    schedule._num_stages, schedule._n_microbatches = 2, 3
    row = [str(action) for action in schedule._get_pipeline_order()[1] if action is not None]
    assert [one for one in row if "F" in one] == ["1F1", "1F2", "1F3"]


def test_the_mended_row_is_what_the_runtime_does():
    """Its last stage has one micro-batch ahead: forward, then at once backward."""
    source = inspect.getsource(Schedule1F1B._step_microbatches)
    assert "self._num_stages - self._stage.stage_index" in source
    assert torch_tables.mended_1f1b(2, 1) == [["1F0"], ["1B0"], ["1F1"], ["1B1"]]


def test_a_number_of_micro_batches_that_a_schedule_does_not_take_is_refused_before_a_process_starts():
    with pytest.raises(ConfigError, match="does not take"):
        torch_tables.torch_tables([(Pipeline(4, "1f1b"), 3)])
    assert torch_tables.torch_tables([]) == {}


def test_a_table_is_read_as_it_is_written(tables):
    for table in tables.values():
        if table.num_microbatches <= 8:
            assert ScheduleTable.parse(rows_text(table.rows)) == table


def test_entries_for_communication_are_left_out():
    text = ["0UNSHARD,0F0,0SEND_F0,,0RECV_B0,0B0,0REDUCE_GRAD", "1RECV_F0,(1F0;1B0)OVERLAP_F_B,1SEND_B0"]
    table = ScheduleTable.parse(text)
    assert rows_text(table.rows) == ["0F0,0B0", "1F0;1B0"]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (["0F0,0X0"], "'0X0'"),
        (["0F0,hello"], "'hello'"),
        (["0F0"], "stage 0 has F of micro-batch 0"),
        (["0F0,0B0", "1F0,1I0"], "stage 1 has F, I of micro-batch 0"),
        (["0F0,0B0,0F0"], "0F0 is there 2 times"),
        (["0F0", "0B0"], "stage 0 is on ranks [0, 1]"),
        (["1F0,1B0"], "stage 0 has nothing"),
        ([""], "rank 0 has no pass"),
        ([], "no pass"),
    ],
)
def test_a_table_that_is_no_step_is_refused_in_words(rows, says):
    with pytest.raises(ConfigError) as caught:
        ScheduleTable.parse(rows, where="x.csv")
    assert says in caught.value.problems[0].got
    assert "x.csv" in caught.value.problems[0].where
