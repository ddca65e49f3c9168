"""Events of a step against an independent reference, links, data, and tables that never end."""

import itertools
import random

import pytest

from tests.planner.simulate.test_formulas import step_of
from tilewright.core.errors import ConfigError
from tilewright.parallel.pipeline.stage_split import Pipeline
from tilewright.planner.simulate.pass_costs import (
    KindSeconds,
    Link,
    Network,
    PassCosts,
    StepCosts,
    by_rank,
    ready_one_by_one,
)
from tilewright.planner.simulate.schedule_table import ScheduleTable, rows_text
from tilewright.planner.simulate.simulated_step import SimulatedStep, idle_by_cause

TWO_RANKS = ScheduleTable.parse(["0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1"])


def drawn_costs(table, rows, draw):
    """Costs of which no two are equal."""

    def of(count):
        return tuple(tuple(draw.uniform(0.2, 3.0) for _ in range(count)) for _ in range(rows))

    kinds = KindSeconds(draw.uniform(0.5, 2), draw.uniform(0.5, 2), draw.uniform(0.5, 2))
    passes = PassCosts(kinds, of(table.num_microbatches), of(table.num_stages), of(table.num_ranks))
    network = Network(draw.randint(1, 4), Link(draw.uniform(1, 9), 0.01), Link(draw.uniform(0.5, 4), 0.1))
    ready = ready_one_by_one(rows, table.num_microbatches, draw.uniform(0.0, 1.5))
    return StepCosts(passes, draw.uniform(0.0, 1.0), network, ready, draw.uniform(0, 2), draw.uniform(0, 2))


def longest_paths(table, costs):
    """Ends of slots where no link is shared: the longest path to each, by going over all until nothing changes."""
    made = {}
    for row, rank in itertools.product(range(costs.num_rows), range(table.num_ranks)):
        for number in range(len(table.rows[rank])):
            made[row, rank, number] = 0.0
    at = {one: (rank, number) for rank, row in enumerate(table.rows) for number, slot in enumerate(row) for one in slot}
    whole = {(one.stage, one.microbatch): one for one in at if one.kind in "BI"}
    changed = True
    while changed:
        changed = False
        for (row, rank, number), old in made.items():
            slot = table.rows[rank][number]
            begin = made[row, rank, number - 1] if number else 0.0
            for one in slot:
                before = []
                if one.kind == "F" and one.stage:
                    before.append(one._replace(stage=one.stage - 1))
                elif one.kind == "F" and costs.ready_s:
                    begin = max(begin, costs.ready_s[row][one.microbatch])
                elif one.kind == "W":
                    before.append(one._replace(kind="I"))
                elif one.kind in "BI":
                    before.append(one._replace(kind="F"))
                    before += [whole[one.stage + 1, one.microbatch]] if one.stage + 1 < table.num_stages else []
                for need in before:
                    place = at[need]
                    if place != (rank, number):
                        path = costs.network.path(costs.world_rank(row, place[0]), costs.world_rank(row, rank))[1]
                        size = costs.message_bytes * costs.passes.work[row][one.microbatch]
                        begin = max(begin, made[row, *place] + (path.seconds(size) if place[0] != rank else 0.0))
            end = begin + costs.passes.seconds(row, rank, slot)
            if end > old:
                made[row, rank, number], changed = end, True
    return made


def test_ends_are_the_longest_paths_where_links_have_room_for_all(tables):
    draw = random.Random(1)
    for pipeline, m in tables:
        if pipeline.pp in (2, 3) and m <= 8:
            table = tables[pipeline, m]
            costs = drawn_costs(table, 2, draw)
            for number in range(3):  # latency alone: nothing waits for a link
                network = Network(draw.randint(1, 4), Link(latency_s=0.3 * number), Link(latency_s=0.7 * number))
                one = StepCosts(costs.passes, 1.0, network, costs.ready_s)
                step = SimulatedStep.of(table, one)
                for (row, rank, slot), end in longest_paths(table, one).items():
                    assert step.timeline.rows[row][rank][slot].end_s == pytest.approx(end), (pipeline, m)


def test_whatever_costs_are_causes_add_up_and_time_does_not_overlap(tables):
    draw = random.Random(2)
    for pipeline, m in tables:
        if pipeline.pp in (2, 3) and m <= 8:
            table = tables[pipeline, m]
            step = SimulatedStep.of(table, drawn_costs(table, 2, draw))
            assert sum(idle_by_cause(step).values()) == pytest.approx(step.idle)
            assert 0 <= step.exposed <= step.idle + 1e-12
            for row in step.timeline.rows:
                for slots in row:
                    assert slots[0].begin_s >= 0
                    assert all(b.begin_s >= a.end_s for a, b in itertools.pairwise(slots))
            path = step.critical_path()
            ends = [step.timeline.rows[row][place[0]][place[1]] for row, place in path]
            assert ends[-1].end_s == pytest.approx(step.timeline.passes_s)
            assert all(b.begin_s >= a.end_s - 1e-12 for a, b in itertools.pairwise(ends))


def test_a_shorter_pass_off_the_critical_path_changes_nothing_and_one_on_it_does(tables):
    table = tables[Pipeline(3, "1f1b"), 6]
    costs = StepCosts(drawn_costs(table, 1, random.Random(3)).passes)
    step = SimulatedStep.of(table, costs)
    (row,) = costs.passes.speeds
    on = {place[0] for _, place in step.critical_path()}
    for rank in range(3):
        speeds = (tuple(2.0 * speed if other == rank else speed for other, speed in enumerate(row)),)
        passes = PassCosts(costs.passes.kinds, costs.passes.work, costs.passes.shares, speeds)
        faster = SimulatedStep.of(table, StepCosts(passes)).seconds
        assert (faster < step.seconds) == (rank in on)


def test_messages_on_a_shared_link_follow_each_other():
    """Two rows on two nodes of two: both first ranks send at the same time, over one link out of their node."""
    passes = PassCosts.even(rows=2, ranks=2, stages=2, microbatches=2)
    shared = StepCosts(passes, 1.0, Network(2, Link(), Link(bytes_per_s=2.0)))
    first = SimulatedStep.of(TWO_RANKS, shared).timeline
    assert [row[1][0].begin_s for row in first.rows] == [1.5, 2.0]
    own = StepCosts(passes, 1.0, Network(1, Link(), Link(bytes_per_s=2.0)))
    assert [row[1][0].begin_s for row in SimulatedStep.of(TWO_RANKS, own).timeline.rows] == [1.5, 1.5]
    near = StepCosts(passes, 1.0, Network(4, Link(bytes_per_s=2.0), Link(bytes_per_s=1e-9)))
    assert [row[1][0].begin_s for row in SimulatedStep.of(TWO_RANKS, near).timeline.rows] == [1.5, 1.5]


def test_data_that_come_late_are_waited_for_and_named():
    passes = PassCosts.even(rows=1, ranks=2, stages=2, microbatches=2)
    late = SimulatedStep.of(TWO_RANKS, StepCosts(passes, ready_s=ready_one_by_one(1, 2, 5.0)))
    assert late.timeline.rows[0][0][1].begin_s == 10.0
    causes = idle_by_cause(late)
    assert causes["data"] > 0.25
    assert causes["messages"] == 0.0
    assert late.exposed == 0.0


def test_gradients_and_the_optimizer_come_last():
    passes = PassCosts.even(rows=2, ranks=2, stages=2, microbatches=2)
    plain = SimulatedStep.of(TWO_RANKS, StepCosts(passes))
    step = SimulatedStep.of(TWO_RANKS, StepCosts(passes, reduce_s=1.0, optimizer_s=2.0))
    assert step.seconds == plain.seconds + 3.0
    assert step.busy_s == plain.busy_s + 4 * 2.0
    assert idle_by_cause(step)["sum of gradients"] > 0
    assert step.exposed == pytest.approx(1.0 / step.seconds)


def test_a_slow_rank_is_where_it_is_in_the_mesh():
    speeds = [1.0] * 8
    speeds[5] = 0.5
    assert by_rank(speeds, rows=2) == ((1.0, 1.0, 1.0, 1.0), (1.0, 1.0, 0.5, 1.0))


@pytest.mark.parametrize("order", ["1B0,1F0", "1F1,1B0,1B1,1F0"])
def test_a_pass_behind_what_waits_for_it_is_named(order):
    rows = ["0F0,0F1,0B0,0B1" if "1F1" in order else "0F0,0B0", order]
    with pytest.raises(ConfigError, match="never ends") as caught:
        step_of(ScheduleTable.parse(rows))
    assert "1B0, which waits for 1F0 of rank 1" in str(caught.value)


def test_two_ranks_that_wait_for_each_other_are_named():
    table = ScheduleTable.parse(["0F0,0B0,0F1,0B1", "1F0,1F1,1B0,1B1"])
    with pytest.raises(ConfigError) as caught:
        step_of(table)
    (problem,) = caught.value.problems
    assert "rank 0 is at 0B0, which waits for 1B0 of rank 1" in problem.got
    assert "rank 1 is at 1F1, which waits for 0F1 of rank 0" in problem.got


def test_any_order_of_passes_ends_or_is_refused(tables):
    draw = random.Random(4)
    table = tables[Pipeline(3, "1f1b"), 3]
    refused = []
    for _ in range(40):
        rows = [list(row) for row in table.rows]
        for _ in range(draw.randint(0, 3)):
            row = draw.choice(rows)
            i = draw.randrange(len(row) - 1)
            row[i], row[i + 1] = row[i + 1], row[i]
        try:
            step_of(ScheduleTable.parse(rows_text(rows)))
        except ConfigError as error:
            refused.append(error.problems[0].got)
    assert 0 < len(refused) < 40
    assert all("waits for" in got for got in refused)
