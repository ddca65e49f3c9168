"""Cases: documents into micro-batches, layers into stages, lengths from anywhere, and ladders of levers."""

import math
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.draws import examples
from tilewright.core.config.sections.parallel import ScheduleName
from tilewright.core.errors import TilewrightError
from tilewright.parallel.pipeline.balance.assign import WeighedDocuments, assign
from tilewright.parallel.pipeline.stage_split import Pipeline
from tilewright.planner.simulate.describe_steps import ladder_row, ladder_verdict
from tilewright.planner.simulate.document_lengths import DrawnLengths, lengths_from
from tilewright.planner.simulate.ladder import climb, ladder_cases
from tilewright.planner.simulate.option_texts import check_case, network_of, pipeline_of, seconds_of, speeds_of
from tilewright.planner.simulate.pass_costs import KindSeconds, Link, PassCosts, StepCosts
from tilewright.planner.simulate.simulated_step import SimulatedStep, idle_by_cause
from tilewright.planner.simulate.step_case import DocumentCosts, SimulatedCase

LENGTHS = DrawnLengths("lognormal", (6.6, 1.1), 8192)


@examples(60)
@given(
    st.sampled_from(["fixed", "tokens", "cost"]),
    st.integers(1, 3),
    st.integers(2, 9),
    st.sampled_from([1, 2, 5, 40, 300]),
    st.booleans(),
    st.sampled_from([64, 67, 200, 8192]),
    st.sampled_from([3000.0, 777.7, math.inf]),
    st.integers(0, 99),
)
def test_work_is_that_of_the_documents_that_a_run_would_assign(packing, rows, count, each, slow, most, attention, seed):
    """Bit for bit, with many documents of one length and with few; none is lost."""
    speeds = (0.7,) + (1.0,) * (2 * rows - 1) if slow else ()
    documents = DocumentCosts(attention)
    case = SimulatedCase(Pipeline(2), rows, count, packing, speeds=speeds, documents=documents)
    lengths_N = np.minimum(LENGTHS.draw(rows * count * each, seed), most)
    costs_N = documents.of(lengths_N).tolist()
    if packing == "fixed":
        places = np.arange(len(lengths_N)).reshape(rows, count, each).tolist()
    else:
        weights = [float(one) for one in lengths_N] if packing == "tokens" else costs_N
        step = WeighedDocuments(lengths_N.tolist(), weights)
        places = assign(step, case.row_speeds(), count, int(lengths_N.sum()))
    assert case.work(lengths_N) == [[math.fsum(costs_N[i] for i in one) for one in row] for row in places]
    work = sum(map(math.fsum, case.costs(lengths_N).passes.work))
    assert work == pytest.approx(rows * count)


@pytest.mark.parametrize("packing", ["tokens", "cost"])
@pytest.mark.parametrize(
    ("numbers", "attention"),
    [
        ({1: 2000, 2_000_000_000: 1}, 1.0),
        ({1: 2000, 7: 500, 2_000_000_000: 40}, 0.1),
        ({0: 1000, 1: 1000}, math.inf),
        ({5: 1}, math.inf),
    ],
    ids=["one is long", "short ones vanish beside long ones", "empty ones", "one alone"],
)
def test_documents_may_differ_by_any_factor(packing, numbers, attention):
    """Bins that a long document fills get none of the short ones; times of the others are not counted up to theirs."""
    case = SimulatedCase(Pipeline(2), 2, 3, packing, speeds=(0.3, 1, 1, 1), documents=DocumentCosts(attention))
    lengths_N = np.repeat(np.array(list(numbers), np.int64), list(numbers.values()))
    costs_N = case.documents.of(lengths_N).tolist()
    step = WeighedDocuments(lengths_N.tolist(), lengths_N.tolist() if packing == "tokens" else costs_N)
    places = assign(step, case.row_speeds(), case.count, int(lengths_N.sum()))
    assert case.work(lengths_N) == [[math.fsum(costs_N[i] for i in one) for one in row] for row in places]


def test_padding_costs_what_the_longest_document_of_the_step_costs():
    case = SimulatedCase(Pipeline(2), 1, 2, "padded", documents=DocumentCosts(math.inf))
    work = case.costs(np.array([100, 100, 100, 300])).passes.work
    assert work == ((2.0, 2.0),)


@pytest.mark.parametrize("pipeline", [Pipeline(4), Pipeline(4, "interleaved", 2), Pipeline(4, "zbv", 2)])
@pytest.mark.parametrize("layers", [0, 16, 37, 64])
def test_layers_are_split_by_the_speed_of_ranks(pipeline, layers):
    """A column of slow ranks: all rows have one split, which takes less time; the sum of the shares stays."""
    speeds = tuple(0.6 if rank // 2 == 1 else 1.0 for rank in range(8))
    even = SimulatedCase(pipeline, 2, 8, layers=layers, speeds=speeds)
    for split in ("same", "own"):
        again = SimulatedCase(pipeline, 2, 8, layers=layers, speeds=speeds, split=split)
        for shares in again.splits():
            assert sum(shares) == pytest.approx(pipeline.pp)
            assert min(shares) > 0
        assert len(set(again.splits())) == 1
        assert min(again.row_speeds()) >= max(even.row_speeds()) - 1e-12


def test_one_slow_rank_is_split_for_in_its_own_row_alone():
    case = SimulatedCase(Pipeline(4), 2, 8, layers=32, speeds=(1.0,) * 3 + (0.5,) + (1.0,) * 4, split="own")
    first, second = case.splits()
    assert set(first) == {1.0}
    assert second[1] < 1.0 < max(second)


@pytest.mark.parametrize("text", ["lognormal:6.6,1.1", "uniform:64,4096", "fixed:512"])
def test_equal_seeds_draw_equal_lengths_within_the_limit(text):
    lengths = lengths_from(text, 2048)
    drawn = lengths.draw(500, 3)
    assert drawn.tolist() == lengths.draw(500, 3).tolist()
    assert drawn.dtype == np.int64
    assert 64 <= drawn.min() <= drawn.max() <= 2048


@pytest.mark.parametrize("text", ["12\n7\n\n90\n", "[12, 7, 90]"])
def test_a_file_of_lengths_is_drawn_from_without_repeating(tmp_path, text):
    (tmp_path / "lengths").write_text(text)
    lengths = lengths_from(str(tmp_path / "lengths"), 100)
    assert sorted(lengths.draw(3, 0).tolist()) == [7, 12, 90]
    with pytest.raises(TilewrightError, match="fewer documents") as caught:
        lengths.draw(4, 0)
    assert "4" in caught.value.problems[0].need


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"", "empty"), (b"12\nx\n", "'x' at place 2"), (b"[1, 2.5]", "2.5"), (b"0", "'0'"), (b"-4", "'-4'"),
     (b"[1,", "no JSON"), (b"\xff\xfe\x00", "no text"), (b"5000", "5,000 tokens"), (b"[]", "empty"),
     (b'[{"a": 1}]', "{'a': 1}")],
)  # fmt: skip
def test_a_file_without_lengths_is_refused_in_words(tmp_path, content, says):
    path = tmp_path / "lengths.txt"
    path.write_bytes(content)
    with pytest.raises(TilewrightError) as caught:
        lengths_from(str(path), 4096)
    (problem,) = caught.value.problems
    assert says in problem.got
    assert all((problem.need, problem.try_, problem.where))


@pytest.mark.parametrize(
    "text",
    ["lognormal", "lognormal:1", "lognormal:1,2,3", "lognormal:a,b", "uniform:9,3", "fixed:-1", "fixed:inf", 
     "logormal:6,1", "nothing.txt", ""],
)  # fmt: skip
def test_lengths_from_nowhere_are_refused_with_what_would_do(text):
    with pytest.raises(TilewrightError) as caught:
        lengths_from(text, 4096)
    assert "lognormal" in caught.value.problems[0].need + caught.value.problems[0].try_


@pytest.mark.parametrize("text", ["13", "13=", "x=0.8", "32=0.8", "13=0", "5-3=0.8", "13=-1", "30-32=0.5"])
def test_a_slow_rank_that_is_not_there_is_refused(text):
    with pytest.raises(TilewrightError, match="--slow"):
        speeds_of([text], 32)


@given(st.sampled_from(get_args(ScheduleName)), st.integers(1, 9), st.integers(1, 40), st.integers(1, 70))
def test_a_case_that_is_refused_comes_with_options_that_are_taken(schedule, pp, count, layers):
    case, said = SimulatedCase(pipeline_of(pp, schedule, None), 1, count, layers=layers), []
    while problem := refusal_of(case):
        option, number = problem.try_.split()
        assert option == problem.where
        assert option not in said
        said.append(option)
        case = replace(case, **{{"--layers": "layers", "--microbatches": "count"}[option]: int(number)})
    assert case.pipeline.takes(case.count)
    case.splits()


def refusal_of(case):
    """What `check_case` says of it, if anything."""
    try:
        check_case(case)
    except TilewrightError as error:
        return error.problems[0]
    return None


def test_slow_ranks_are_named_once():
    assert speeds_of([], 4) == ()
    assert speeds_of(["0=0.5", "2-3=0.9"], 4) == (0.5, 1.0, 0.9, 0.9)
    with pytest.raises(TilewrightError, match="--slow") as caught:
        speeds_of(["0-2=0.5", "2=0.9"], 4)
    assert "once" in caught.value.problems[0].need


def test_links_have_a_rate_and_a_latency():
    found = network_of(["inter=50GB/s,5us", "intra=400GB/s"], 8, 1)
    assert (found.inter.bytes_per_s, found.intra, found.ranks_per_node) == (5e10, Link(4e11), 8)
    assert found.inter.latency_s == pytest.approx(5e-6)
    assert seconds_of("5us", "--data") == pytest.approx(5e-6)


@pytest.mark.parametrize(
    "texts",
    [
        ["inter=50"],
        ["inter"],
        ["nvlink=50GB/s"],
        ["inter=x/s"],
        ["inter=0GB/s"],
        ["inter=1GB/s,x"],
        ["inter=1GB/s"] * 2,
    ],
)
def test_links_that_are_none_are_refused(texts):
    with pytest.raises(TilewrightError, match="--link"):
        network_of(texts, 8, 1)


def test_links_without_messages_are_refused():
    with pytest.raises(TilewrightError, match="no effect"):
        network_of(["inter=1GB/s"], 8, 0)


def test_a_ladder_takes_idle_time_away_step_by_step(tables):
    speeds = (1.0,) * 5 + (0.8,) + (1.0,) * 10
    case = SimulatedCase(Pipeline(8), 2, 16, layers=64, speeds=speeds, documents=DocumentCosts(6000))
    rungs = climb(case, LENGTHS, [0, 1], 8, tables=lambda asked: {one: tables[one] for one in asked})
    assert len(rungs) == len(ladder_cases(case)) + 2
    idle = {rung.name: max(rung.idle) for rung in rungs}
    seconds = {rung.name: rung.seconds for rung in rungs}
    assert seconds["documents as long as they are"] > seconds["balanced by tokens"] > seconds["balanced by cost"]
    assert idle["zero bubble, V (ZBV)"] < 0.5 * idle["balanced by cost"]
    assert rungs[-1].seconds < rungs[5].seconds
    for rung in rungs:
        assert sum(rung.causes().values()) == pytest.approx(sum(rung.idle) / 2)
        assert len(ladder_row(rung, rungs[0])) == 9
    assert rungs[0].padding > 0.5 > rungs[1].padding + 0.49
    assert rungs[-1].seconds <= rungs[-2].seconds
    assert rungs[-1].name not in ladder_verdict(rungs), "it is a bound"
    assert ladder_verdict(rungs[-1:]).startswith("A step takes")


def test_a_schedule_that_does_not_take_the_case_says_why_on_its_rung(tables):
    case = SimulatedCase(Pipeline(8), 1, 16, layers=20)
    rungs = climb(case, LENGTHS, [0], 1, tables=lambda asked: {one: tables[one] for one in asked})
    (rung,) = [rung for rung in rungs if "4 stages" in rung.name]
    assert "Fewer layers than stages" in rung.why_not
    assert "not possible" in ladder_row(rung, rungs[0])[1]
    assert rung.to_json().keys() == {"name", "why_not"}


def test_a_slow_row_waits_for_nobody_where_documents_follow_speeds(tables):
    table = tables[Pipeline(3, "1f1b"), 12]
    work, speeds = ((1.0,) * 12, (0.5,) * 12), ((1.0,) * 3, (0.5,) * 3)
    step = SimulatedStep.of(table, StepCosts(PassCosts(KindSeconds(), work, ((1.0,) * 3,) * 2, speeds)))
    causes = idle_by_cause(step)
    assert causes["unequal rows"] == pytest.approx(0.0, abs=1e-9)
    assert causes["unequal stages"] == pytest.approx(0.0, abs=1e-9)
