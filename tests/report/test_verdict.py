"""Every rule on a run that has the illness, on a clean one, and at its thresholds; the headline names the worst."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cover import some
from tests.draws import examples
from tests.report.synthetic import eval_rows, read, step_rows
from tests.report.verdict_cases import BAD, CASES, CLEAN, COUNT, GOOD, LOOK, NOT_MEASURED, Case, falling, marked, rise
from tilewright.report.page import FIGURES, render
from tilewright.report.run_data.collect_run import RunData
from tilewright.report.summary import learned
from tilewright.report.verdict.judge import RULES, Judgement, judge
from tilewright.report.verdict.rule import MIN_RECORDS, Verdict, VerdictRule, VerdictState

BY_NAME = {rule.name: rule for rule in RULES}
ALL = [(name, what, case, state) for name, cases in CASES.items() for what, case, state in cases]


def verdict(run: RunData, name: str) -> Verdict:
    return RULES[BY_NAME[name]](run)


@pytest.mark.parametrize(("name", "what", "case", "state"), ALL, ids=[f"{row[0]}: {row[1]}" for row in ALL])
def test_rule(tmp_path, name, what, case, state):
    found = verdict(case.read(tmp_path), name)
    assert found.state is state, f"{what}: {found}"
    assert found.text.endswith("."), found.text
    assert (found.value is None) <= (found.state in (BAD, NOT_MEASURED))
    if found.limit:
        assert BY_NAME[name].amount(found.rule.bad if state is BAD else found.rule.look) in found.sentence


def test_every_rule_is_shown_in_every_state():
    assert CASES.keys() == BY_NAME.keys()
    for name, cases in CASES.items():
        assert {state for _, _, state in cases} == set(VerdictState), name


def test_rules_are_whole_and_belong_to_charts():
    for rule in RULES:
        assert 0 < rule.look < rule.bad
        assert rule.chart in FIGURES
        assert all((rule.name, rule.measures, rule.why, rule.unit in ("nats", "share", "times")))
    assert len(BY_NAME) == len(RULES)


@given(st.sampled_from(list(RULES)), st.floats(0, 1e6))
def test_states_rise_with_the_number_and_thresholds_belong_to_the_graver_one(rule: VerdictRule, value: float):
    order = [GOOD, LOOK, BAD]
    assert rule.state(rule.look) is LOOK
    assert rule.state(rule.bad) is BAD
    assert rule.state(math.nextafter(rule.look, 0)) is GOOD
    assert rule.state(math.nextafter(rule.bad, 0)) is LOOK
    assert order.index(rule.state(value)) <= order.index(rule.state(value * 1.5))


@examples(20)
@given(times=st.floats(1.01, 1000), slower=st.booleans())
def test_a_run_that_is_faster_than_planned_is_never_bad(tmp_path_factory, times, slower):
    """Whatever the factor; one that is as much slower is judged by it."""
    seconds = [9.0] + [times if slower else 1 / times] * (COUNT - 1)  # `PLAN` has a step of one second
    found = verdict(Case(columns={"step_s": seconds}).read(tmp_path_factory.mktemp("pace")), "time plan")
    assert found.value == pytest.approx(times)
    by_factor = found.rule.state(found.value)
    assert found.state is (LOOK if by_factor is BAD and not slower else by_factor)


@pytest.mark.parametrize(
    ("pace", "said"),
    [
        (
            {"measured_s": 4.0, "processor_s": 0.8},
            "80.0 %",
        ),
        ({"measured_s": 4.0, "processor_s": 4.0}, ""),
        ({"measured_s": 4.0, "processor_s": None}, ""),
        ({"measured_s": 0.0, "processor_s": 1.0}, ""),
        ({}, ""),
    ],
)
def test_a_step_that_waited_is_told_from_one_that_worked(tmp_path, pace, said):
    """Other programs had the processor: neither the plan nor a kernel is wrong, and the headline says so."""
    if said:
        said = f" (the first ones waited for other programs, a disk or other ranks in {said} of their time)"
    case = Case(columns={"step_s": [4.0] * COUNT}, files={"events": [{"step": 4, "kind": "pace", **pace}]})
    assert verdict(case.read(tmp_path), "time plan").text == f"A step took 4.0 s{said}, 1.0 s were planned."


@examples(20)
@given(seed=st.integers(0, 2**32), scatter=st.floats(0.001, 0.15), count=st.integers(200, 600))
def test_a_clean_run_is_never_bad_and_never_diverges(tmp_path_factory, seed, scatter, count):
    run = Case(falling(count, seed, scatter), evals={}).read(tmp_path_factory.mktemp("clean"))
    found = {one.rule.name: one for one in judge(run).verdicts}
    assert found["divergence"].state is GOOD, found["divergence"]
    assert found["loss spikes"].state in (GOOD, LOOK)
    assert found["plateau"].state in (GOOD, LOOK)
    assert judge(run).in_state(BAD) == []


@examples(25)
@given(
    seed=st.integers(0, 2**32),
    at=st.floats(0.05, 0.9),
    to=st.floats(3.0, 1e6),
    scatter=st.floats(0.001, 0.15),
)
def test_a_loss_that_jumps_and_stays_is_always_found(tmp_path_factory, seed, at, to, scatter):
    losses = falling(200, seed, scatter)
    begin = int(at * len(losses))
    losses = losses[:begin] + [loss + to for loss in losses[begin:]]
    run = Case(losses, evals={}).read(tmp_path_factory.mktemp("jump"))
    found = judge(run)
    if losses[-1] > min(losses[: max(begin, 1)]) + 1.5:
        assert found.verdicts[0].state is BAD, found.verdicts[0]
        assert found.headline(learned(run)).startswith("The run diverged")


def test_clean_run_is_good_throughout_and_says_what_it_learned(tmp_path):
    run = CLEAN.read(tmp_path)
    found = judge(run)
    assert [one for one in found.verdicts if one.state is not GOOD] == []
    assert found.state is GOOD
    assert found.headline(learned(run)) == learned(run)
    assert found.line(learned(run)) == f"verdict: good: {learned(run)} (14 good)"
    assert learned(run).startswith("The loss fell from 9.06 to 2.7")


def test_loss_from_6_to_80_with_a_third_clipped_is_named_with_its_number(tmp_path):
    norms = marked(134, 402, 20.0, 0.5)
    run = Case([6.0, 5.5] + [80.0] * COUNT, {"grad_norm": norms}, evals={}).read(tmp_path)
    found = judge(run)
    assert found.state is BAD
    assert found.headline(learned(run)) == (
        "The run diverged: the loss ended at 80 nats per token, 74 above the 6 of the first step."
    )
    assert "clipping" in found.line(learned(run))
    assert found.of_chart("norm").state is LOOK
    assert found.of_chart("loss").state is BAD
    assert found.of_chart("rate").verdicts == []


def test_bad_goes_before_worth_a_look_and_else_the_order_of_the_rules(tmp_path):
    columns = {"grad_norm": marked(300, COUNT, 2.0, 0.5), "wait_s": [0.5] * COUNT, "step_s": [0.5] * COUNT}
    run = Case(rise(0.2), columns).read(tmp_path)
    found = judge(run)
    assert verdict(run, "divergence").state is LOOK
    assert found.worst is not None
    assert found.worst.rule.name == "clipping"
    assert "300 of 400 recorded steps (75 %) were clipped" in found.headline("x")
    assert found.line("x").count("\n") == 0
    assert "Also: data wait, divergence" in found.line("x")


@pytest.mark.parametrize("count", [0, 1, 2, 3, MIN_RECORDS - 1])
def test_a_short_run_is_never_good_and_says_that_it_is_short(tmp_path, count):
    columns = {"memory_bytes": [None] * count}  # the one column that is not written at each step
    run = Case(falling(100)[:count], columns, evals={}, files={"plan": None}).read(tmp_path)
    found = judge(run)
    assert found.in_state(GOOD) == []
    assert found.state is NOT_MEASURED
    assert "good" not in found.line(learned(run))
    if count:
        assert f"recorded, {MIN_RECORDS} are needed" in found.headline(learned(run))
    else:
        assert found.headline(learned(run)) == "No training step has been recorded yet."


def test_a_run_that_diverged_has_nothing_good_said_about_what_it_learned(tmp_path):
    found = judge(Case(falling(380) + [345_341.0] * 20).read(tmp_path))
    states = {one.rule.name: one.state for one in found.verdicts}
    assert states["divergence"] is BAD
    assert {states[name] for name in ("plateau", "memorising", "forgetting")} == {NOT_MEASURED}
    assert found.of_chart("perplexity").state is NOT_MEASURED


def test_chart_of_a_run_whose_first_rule_is_not_measured_is_not_good(tmp_path):
    run = Case(falling(30)).read(tmp_path)
    only = Judgement([verdict(run, "loss spikes"), verdict(run, "skipped steps")])
    assert [one.state for one in only.verdicts] == [NOT_MEASURED, GOOD]
    assert only.state is NOT_MEASURED


@pytest.mark.parametrize("name", some(CASES, "divergence", "time plan"))
def test_repeated_steps_of_a_resumed_run_count_once(tmp_path, name):
    for number, (what, case, state) in enumerate(CASES[name]):
        rows = step_rows(case.losses, **case.columns) + eval_rows(case.evals)
        again = [row for row in rows if row["step"] > len(case.losses) // 2]
        wrong = [row | ({"loss": 1e9, "skipped": "overflow"} if "loss" in row else {}) for row in again]
        run = read(tmp_path / str(number), [*rows, *again, *wrong, *again], **case.files)
        assert verdict(run, name).state is state, what


@pytest.mark.parametrize("name", list(CASES))
def test_constants_of_other_writers_read_as_null(tmp_path, name):
    for number, (what, case, state) in enumerate(CASES[name]):
        rows = step_rows(case.losses, **case.columns) + eval_rows(case.evals)
        run = read(tmp_path / str(number), rows, strict=False, **case.files)
        assert verdict(run, name).state is state, what


def test_a_stop_on_numerics_is_a_divergence_until_the_run_goes_on(tmp_path):
    stop = {
        "step": 4,
        "kind": "stop",
        "cause": "numerics",
        "message": "The gradient was not finite in 3 steps.\n  got x",
    }
    run = Case(falling(3), evals={}, files={"events": [stop]}).read(tmp_path)
    said = "The run diverged and was stopped at step 4: the gradient was not finite in 3 steps."
    assert judge(run).headline("x") == said
    resumed = Case(falling(3), evals={}, files={"events": [stop, {"step": 3, "kind": "resume"}]}).read(tmp_path)
    assert judge(resumed).state is NOT_MEASURED
    signal = Case(falling(3), evals={}, files={"events": [{"step": 3, "kind": "stop", "message": "SIGTERM"}]})
    assert judge(signal.read(tmp_path)).state is NOT_MEASURED


@pytest.mark.parametrize("case", [CLEAN, CASES["divergence"][0][1], Case([], evals={}, files={"plan": None})])
def test_nothing_on_the_page_is_green_that_was_not_measured_to_be_good(tmp_path, case):
    run = case.read(tmp_path)
    found, page = judge(run), render(run)
    assert "healthy" not in page.lower()
    body = page[page.index("</style>") :]
    shown = [chart for chart, make in FIGURES.items() if make(run)]
    badges = re.findall(r'<h3>.*?<span class="badge (.*?)">(.*?)</span>', body, re.DOTALL)
    assert len(badges) == len(shown), "a badge on every chart"
    good = len(found.in_state(GOOD))
    charts = [found.of_chart(chart) for chart in shown]
    on_charts = sum(len(one.in_state(GOOD)) for one in charts) + sum(one.state is GOOD for one in charts)
    assert body.count("state-good") == good + on_charts + (found.state is GOOD)
    headline = re.search(r"<h1>(.*?)</h1>", body)
    assert headline is not None
    assert headline[1].replace("\u00a0", " ") == found.headline(learned(run))
