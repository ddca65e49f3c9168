"""Every rule on a run that has the illness, on a clean one, and at its thresholds; the headline names the worst."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.report.synthetic import PLAN, RECIPE, eval_rows, read, step_rows
from tilewright.report.collect import RunData
from tilewright.report.figures import Figure
from tilewright.report.page import FIGURES
from tilewright.report.summary import learned
from tilewright.report.verdict.judge import RULES, Judgement, judge
from tilewright.report.verdict.rule import MIN_RECORDS, Rule, State, Verdict

GOOD, LOOK, BAD, NOT_MEASURED = State.GOOD, State.LOOK, State.BAD, State.NOT_MEASURED
COUNT = 400
BY_NAME = {rule.name: rule for rule in RULES}


def falling(count: int = COUNT, seed: int = 1, scatter: float = 0.05) -> list[float]:
    """Losses of a run that learns: 9 to 2.5 nats, with normal noise."""
    draw = random.Random(seed)
    return [
        2.5 + 5.5 * math.exp(-step / (0.1 * count)) + math.exp(-step / (0.7 * count)) + draw.gauss(0, scatter)
        for step in range(count)
    ]


def held(losses: Sequence[float], **others: Sequence[float]) -> dict[int, dict[str, float]]:
    """Evaluations at equal distances over `COUNT` steps; domain `a`, and `others`."""
    return {
        COUNT * (i + 1) // len(losses): {"a": loss} | {name: values[i] for name, values in others.items()}
        for i, loss in enumerate(losses)
    }


@dataclass(frozen=True)
class Case:
    """A run: its losses, columns, evaluations and files."""

    losses: Sequence[Any] = field(default_factory=falling)
    columns: Mapping[str, Any] = field(default_factory=dict)
    evals: Mapping[int, Mapping[str, Any]] = field(default_factory=lambda: held([5, 4, 3.5, 3.2], b=[6, 5, 4, 3.9]))
    files: Mapping[str, Any] = field(default_factory=dict)

    def read(self, folder) -> RunData:
        return read(folder / "run", step_rows(self.losses, **self.columns) + eval_rows(self.evals), **self.files)


def noisy(level: float, seed: int = 0):
    """A column that scatters by a fifth around a level."""
    draw = random.Random(seed)
    return [level * math.exp(draw.gauss(0, 0.2)) for _ in range(COUNT)]


CLEAN = Case(columns={"grad_norm": noisy(0.4)}, files={"plan": PLAN | {"tokens_per_s": 1100.0}})


def marked(count: int, of: int, yes: Any, no: Any) -> list[Any]:
    """`of` values, `count` of them `yes`, at equal distances."""
    places = {of * i // count for i in range(count)} if count else set()
    return [yes if i in places else no for i in range(of)]


def rise(by: float, slow: int = 20) -> list[float]:
    """Falls from 6 to 3 and stays; in the last twentieth it is `by` above. Without noise."""
    return [6 - 3 * min(1.0, step / 300) for step in range(COUNT - slow)] + [3 + by] * slow


def growing(factor: float) -> list[float]:
    return [0.1] * (3 * COUNT // 4) + [0.1 * factor] * (COUNT // 4)


def spiky(count: int) -> list[float]:
    """Losses with `count` spikes among the 384 that are compared with earlier ones."""
    draw = random.Random(2)
    return [3 - step / COUNT + draw.gauss(0, 0.05) for step in range(16)] + [
        3 - step / COUNT + draw.gauss(0, 0.05) + high
        for step, high in enumerate(marked(count, COUNT - 16, 9.0, 0.0), 16)
    ]


def norms_with_spikes(count: int) -> list[float]:
    return noisy(0.4)[:16] + [
        norm + high for norm, high in zip(noisy(0.4)[16:], marked(count, COUNT - 16, 9.0, 0.0), strict=True)
    ]


def memory(planned: float) -> dict[str, Any]:
    return {"plan": {"step_phase": "backward", "phases": {"backward": {"activations": planned * 2**30}}}}


# rule -> (what is wrong, the run, its state)
CASES: dict[str, list[tuple[str, Case, State]]] = {
    "divergence": [
        ("6 to 80", Case([6.0, 5.5] + [80.0 + 0.1 * (i % 7) for i in range(COUNT)]), BAD),
        ("345,341 at the end", Case(falling(380) + [345_341.0] * 20), BAD),
        ("1e300 at the end", Case(falling(380) + [1e300] * 20), BAD),
        ("last loss NaN", Case([*falling(399), math.nan]), BAD),
        ("all NaN", Case([math.nan] * COUNT), BAD),
        ("all infinite", Case([math.inf] * COUNT), BAD),
        ("one step, NaN", Case([math.nan], evals={}), BAD),
        ("second step is far above", Case([6.0, 11.0], evals={}), BAD),
        ("second step is above", Case([6.0, 10.9], evals={}), NOT_MEASURED),
        ("gradients at the end", Case(columns={"grad_norm": [0.5] * 398 + [math.nan] * 2}), BAD),
        ("the last gradient", Case(columns={"grad_norm": [0.5] * 399 + [math.nan]}), GOOD),
        (
            "overflows at the end, with a loss scale",
            Case(columns={"grad_norm": [0.5] * 398 + [math.inf] * 2, "skipped": [None] * 398 + ["overflow"] * 2}),
            GOOD,
        ),
        ("NaN in the middle, skipped", Case([*falling()[:200], math.nan, *falling()[201:]]), GOOD),
        ("held-out NaN", Case(evals=held([5, 4, 3, math.nan])), BAD),
        ("held-out NaN once", Case(evals=held([5, math.nan, 3, 2.9])), GOOD),
        ("rise of 0.09", Case(rise(0.09)), GOOD),
        ("rise of 0.11", Case(rise(0.11)), LOOK),
        ("rise of 0.49", Case(rise(0.49)), LOOK),
        ("rise of 0.51", Case(rise(0.51)), BAD),
        ("a spike that comes back", Case(falling()[:200] + [50.0] * 5 + falling()[205:]), GOOD),
        ("too few", Case(falling(19), evals={}), NOT_MEASURED),
        ("negative losses that fall", Case([-step / 10 for step in range(COUNT)]), GOOD),
        ("negative losses that rise", Case([-50 + abs(step - 200) / 10 for step in range(COUNT)]), BAD),
    ],
    "plateau": [
        ("never fell", Case([5.0 + 0.01 * (i % 3) for i in range(COUNT)]), BAD),
        ("rises slowly", Case([5.0 + 0.001 * i for i in range(60)]), BAD),
        ("flat and noisy", Case([5.0 + random.Random(i).gauss(0, 0.3) for i in range(COUNT)]), BAD),
        ("flat in the second half", Case([8 - 5 * min(1.0, i / 200) for i in range(COUNT)]), LOOK),
        ("flat after three steps", Case([9.0, 8.0, 7.0] + [3.0] * 397), LOOK),
        ("flat in the last fifth", Case([8 - 5 * min(1.0, i / 320) for i in range(COUNT)]), GOOD),
        ("too few", Case(falling(19), evals={}), NOT_MEASURED),
    ],
    "memorising": [
        ("held-out rises, training falls", Case(evals=held([5, 4, 3.5, 3.9])), BAD),
        ("by 0.03", Case(evals=held([5, 4, 3.5, 3.53])), LOOK),
        ("by 0.01", Case(evals=held([5, 4, 3.5, 3.51])), GOOD),
        ("both rise", Case([*falling(360), *[6.0] * 40], evals=held([5, 4, 3.5, 5.0])), GOOD),
        ("no evaluation", Case(evals={}), NOT_MEASURED),
        ("one evaluation", Case(evals=held([5])), NOT_MEASURED),
        ("NaN evaluations", Case(evals=held([math.nan, math.nan, 4, math.nan])), NOT_MEASURED),
        ("few steps", Case(falling(5), evals={1: {"a": 4.0}, 5: {"a": 3.0}}), NOT_MEASURED),
    ],
    "forgetting": [
        ("one domain rises", Case(evals=held([5, 4, 3, 2], b=[2, 2, 2.2, 2.4])), BAD),
        ("by 0.06", Case(evals=held([5, 4, 3, 2], b=[2, 2, 2, 2.06])), LOOK),
        ("by 0.04", Case(evals=held([5, 4, 3, 2], b=[2, 2, 2, 2.04])), GOOD),
        ("both rise", Case(evals=held([5, 4, 3, 4], b=[5, 4, 3, 4])), GOOD),
        ("one domain", Case(evals=held([5, 4, 3, 2])), NOT_MEASURED),
        ("no evaluation", Case(evals={}), NOT_MEASURED),
    ],
    "loss spikes": [
        ("one in 384", Case(spiky(1)), GOOD),
        ("two in 384", Case(spiky(2)), LOOK),
        ("19 in 384", Case(spiky(19)), LOOK),
        ("20 in 384", Case(spiky(20)), BAD),
        ("too few", Case(falling(35)), NOT_MEASURED),
    ],
    "gradient spikes": [
        ("one in 384", Case(columns={"grad_norm": norms_with_spikes(1)}), GOOD),
        ("two in 384", Case(columns={"grad_norm": norms_with_spikes(2)}), LOOK),
        ("20 in 384", Case(columns={"grad_norm": norms_with_spikes(20)}), BAD),
        ("none recorded", Case(columns={"grad_norm": [None] * COUNT}), NOT_MEASURED),
    ],
    "gradient growth": [
        ("2.9 times", Case(columns={"grad_norm": growing(2.9)}), GOOD),
        ("3.1 times", Case(columns={"grad_norm": growing(3.1)}), LOOK),
        ("9.9 times", Case(columns={"grad_norm": growing(9.9)}), LOOK),
        ("11 times", Case(columns={"grad_norm": growing(11)}), BAD),
        ("falling", Case(columns={"grad_norm": growing(0.1)}), GOOD),
        ("too few", Case(falling(19)), NOT_MEASURED),
    ],
    "clipping": [
        ("39 of 400", Case(columns={"grad_norm": marked(39, COUNT, 2.0, 0.5)}), GOOD),
        ("40 of 400", Case(columns={"grad_norm": marked(40, COUNT, 2.0, 0.5)}), LOOK),
        ("a third", Case(columns={"grad_norm": marked(133, COUNT, 2.0, 0.5)}), LOOK),
        ("199 of 400", Case(columns={"grad_norm": marked(199, COUNT, 2.0, 0.5)}), LOOK),
        ("200 of 400", Case(columns={"grad_norm": marked(200, COUNT, 2.0, 0.5)}), BAD),
        (
            "only in the warm-up",
            Case(
                columns={"grad_norm": [2.0] * 100 + [0.5] * 300},
                files={"recipe": RECIPE.replace("warmup_steps = 0", "warmup_steps = 100")},
            ),
            GOOD,
        ),
        ("off", Case(files={"recipe": RECIPE.replace("clip_norm = 1.0", "clip_norm = 0.0")}), NOT_MEASURED),
        ("no recipe", Case(files={"recipe": ""}), NOT_MEASURED),
        ("too few", Case(falling(19)), NOT_MEASURED),
    ],
    "skipped steps": [
        ("3 of 400", Case(columns={"skipped": marked(3, COUNT, "overflow", None)[::-1]}), GOOD),
        ("4 of 400", Case(columns={"skipped": marked(4, COUNT, "overflow", None)[::-1]}), LOOK),
        ("39 of 400", Case(columns={"skipped": marked(39, COUNT, "too large", None)}), LOOK),
        ("40 of 400", Case(columns={"skipped": marked(40, COUNT, "too large", None)}), BAD),
        ("looks for the loss scale", Case(columns={"skipped": ["overflow"] * 12 + [None] * 388}), GOOD),
        ("never found the loss scale", Case(columns={"skipped": ["overflow"] * COUNT}), BAD),
        ("one of one", Case([3.0], {"skipped": ["too large"]}, evals={}), BAD),
        ("none of 19", Case(falling(19)), NOT_MEASURED),
    ],
    "memory plan": [
        ("9 % above", Case(files=memory(1.09)), GOOD),
        ("11 % above", Case(files=memory(1.11)), LOOK),
        ("11 % below", Case(files=memory(0.89)), LOOK),
        ("26 % above", Case(files=memory(1.26)), BAD),
        ("26 % below", Case(files=memory(0.74)), BAD),
        ("no plan", Case(files={"plan": None}), NOT_MEASURED),
        ("no bytes in the plan", Case(files={"plan": {"phases": {"backward": {"other": None}}}}), NOT_MEASURED),
        ("no memory", Case(columns={"memory_bytes": [None] * COUNT}), NOT_MEASURED),
        (
            "planned again",
            Case(files=memory(2.0) | {"events": [{"step": 3, "kind": "regroup", "after": "8 x recompute"}]}),
            NOT_MEASURED,
        ),
    ],
    "memory growth": [
        ("4 %", Case(columns={"memory_bytes": [1e9] * 300 + [1.04e9] * 100}), GOOD),
        ("6 %", Case(columns={"memory_bytes": [1e9] * 300 + [1.06e9] * 100}), LOOK),
        ("26 %", Case(columns={"memory_bytes": [1e9] * 300 + [1.26e9] * 100}), BAD),
        ("in the first quarter", Case(columns={"memory_bytes": [1e9] * 100 + [2e9] * 300}), GOOD),
        ("seven", Case(falling(7)), NOT_MEASURED),
    ],
    "slowdown": [
        ("9 %", Case(columns={"tokens_per_s": [1000.0] * 300 + [910.0] * 100}), GOOD),
        ("11 %", Case(columns={"tokens_per_s": [1000.0] * 300 + [890.0] * 100}), LOOK),
        ("31 %", Case(columns={"tokens_per_s": [1000.0] * 300 + [690.0] * 100}), BAD),
        ("faster", Case(columns={"tokens_per_s": [1000.0] * 300 + [2000.0] * 100}), GOOD),
        ("too few", Case(falling(19)), NOT_MEASURED),
    ],
    "speed plan": [
        ("1.9 times as planned", Case(files={"plan": PLAN | {"tokens_per_s": 526.0}}), GOOD),
        ("half", Case(files={"plan": PLAN | {"tokens_per_s": 2000.0}}), LOOK),
        ("twice", Case(files={"plan": PLAN | {"tokens_per_s": 500.0}}), LOOK),
        ("a tenth", Case(files={"plan": PLAN | {"tokens_per_s": 10_000.0}}), BAD),
        ("no plan", Case(files={"plan": None}), NOT_MEASURED),
    ],
    "data wait": [
        ("4.9 %", Case(columns={"wait_s": [0.049] * COUNT, "step_s": [0.951] * COUNT}), GOOD),
        ("5.1 %", Case(columns={"wait_s": [0.051] * COUNT, "step_s": [0.949] * COUNT}), LOOK),
        ("26 %", Case(columns={"wait_s": [0.26] * COUNT, "step_s": [0.74] * COUNT}), BAD),
        ("the first step alone", Case(columns={"wait_s": [1000.0] + [0.0] * 399}), GOOD),
        ("some long waits", Case(columns={"wait_s": marked(4, COUNT, 50.0, 0.0)[::-1]}), BAD),
        ("too few", Case(falling(20)), NOT_MEASURED),
    ],
}  # fmt: skip
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
        assert {state for _, _, state in cases} == set(State), name


def test_rules_are_whole_and_belong_to_charts():
    for rule in RULES:
        assert 0 < rule.look < rule.bad
        assert rule.chart in FIGURES
        assert all((rule.name, rule.measures, rule.why, rule.unit in ("nats", "share", "times")))
    assert len(BY_NAME) == len(RULES)


@given(st.sampled_from(list(RULES)), st.floats(0, 1e6))
def test_states_rise_with_the_number_and_thresholds_belong_to_the_graver_one(rule: Rule, value: float):
    order = [GOOD, LOOK, BAD]
    assert rule.state(rule.look) is LOOK
    assert rule.state(rule.bad) is BAD
    assert rule.state(math.nextafter(rule.look, 0)) is GOOD
    assert rule.state(math.nextafter(rule.bad, 0)) is LOOK
    assert order.index(rule.state(value)) <= order.index(rule.state(value * 1.5))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), scatter=st.floats(0.001, 0.15), count=st.integers(200, 600))
def test_a_clean_run_is_never_bad_and_never_diverges(tmp_path_factory, seed, scatter, count):
    run = Case(falling(count, seed, scatter), evals={}).read(tmp_path_factory.mktemp("clean"))
    found = {one.rule.name: one for one in judge(run).verdicts}
    assert found["divergence"].state is GOOD, found["divergence"]
    assert found["loss spikes"].state in (GOOD, LOOK)
    assert found["plateau"].state in (GOOD, LOOK)
    assert judge(run).in_state(BAD) == []


@settings(max_examples=25, deadline=None)
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
    assert "Besides: data wait, divergence" in found.line("x")


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


@pytest.mark.parametrize("name", list(CASES))
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
    assert judge(run).headline("x") == ("The run diverged and was stopped at step 4: the gradient was not finite in 3 steps.")
    resumed = Case(falling(3), evals={}, files={"events": [stop, {"step": 3, "kind": "resume"}]}).read(tmp_path)
    assert judge(resumed).state is NOT_MEASURED
    signal = Case(falling(3), evals={}, files={"events": [{"step": 3, "kind": "stop", "message": "SIGTERM"}]})
    assert judge(signal.read(tmp_path)).state is NOT_MEASURED


def test_no_figure_says_that_it_is_healthy(tmp_path):
    run = CLEAN.read(tmp_path)
    made: list[Figure | None] = [make(run) for make in FIGURES.values()]
    assert not any("healthy" in figure.reading.lower() for figure in made if figure)
