"""A run's plan corrected beside its first steps: machine busy when it was measured, when it runs, both, neither."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planner.rates import GIB, make_machine, make_plan, make_rates, make_recipe
from tests.training.tiny import rows, tiny
from tilewright.core.json_text import from_json
from tilewright.planner.machine import ceilings
from tilewright.planner.site import Site
from tilewright.report.run_data.collect_run import collect
from tilewright.report.verdict.resources import off_pace
from tilewright.report.verdict.rule import VerdictState
from tilewright.training.executor.standard import StandardExecutor
from tilewright.training.planning import pace
from tilewright.training.planning.off_plan import OFF
from tilewright.training.planning.pace import MULTIPLIED, WORTH_S, at_rates, corrector, formats_of
from tilewright.training.session import train

MACHINE, RATES = make_machine(64 * GIB), make_rates()
PLAN = make_plan(make_recipe(), 512, MACHINE, RATES)
SITE = Site(512, MACHINE, RATES, Path("unused"))


@given(factor=st.floats(0.05, 20))
def test_a_plan_at_other_rates_takes_other_seconds(factor):
    found = at_rates(PLAN, SITE, RATES.slowed(factor))
    assert found.step_s == pytest.approx(PLAN.step_s / factor)
    assert found.phases == PLAN.phases, "bytes stay"


@pytest.mark.parametrize(
    ("mode", "kind", "used"),
    [
        ("bf16_mixed", "adamw", {"bf16"}),
        ("bf16_mixed", "muon", {"bf16", "fp32"}),  # directions, on a CPU that has no 16-bit units
        ("fp32", "muon", {"fp32"}),
        ("fp8_tile", "adamw", {"bf16"}),
    ],
)
def test_rates_of_formats_that_the_run_has_are_measured(mode, kind, used):
    plan = make_plan(make_recipe(precision={"mode": mode}, optim={"kind": kind}), 512, MACHINE, RATES)
    assert formats_of(plan, RATES) == used


@given(cached=st.floats(0.1, 10), now=st.floats(0.1, 10), own=st.floats(0.1, 10))
def test_a_corrected_plan_is_one_of_rates_that_hold(cached, now, own):
    """Seconds of the steps `own` times those at rates of 1; known and measured rates at `cached` and `now`."""
    known, own_s, kept = RATES.slowed(cached), own * PLAN.step_s, []
    plan = make_plan(make_recipe(), 512, MACHINE, known)
    site = replace(SITE, rates=known)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pace, "measured_again", lambda *_, **__: RATES.slowed(now))

        def reached(machine, rates, formats, times):
            kept.append(times)
            faster = {name: {w: times * r for w, r in row.items()} for name, row in rates.matmul.items()}
            return replace(rates, matmul=faster)

        patch.setattr(pace, "reached", reached)
        found = corrector(plan, site)(own_s)
    matmuls_s = sum(PLAN.seconds.get(part, 0.0) for part in MULTIPLIED) / now
    if matmuls_s <= own_s * (1 - 1e-9):
        assert kept == []
        assert found == pytest.approx(PLAN.step_s / now)
    elif matmuls_s > own_s * (1 + 1e-9):  # measured beside a program that slowed the measurement and not the steps
        assert kept == [pytest.approx(matmuls_s / own_s)]
        assert found == pytest.approx(PLAN.step_s / now - matmuls_s + own_s)


def slowly(seconds):
    """Steps that say that they took so long, all of it on a processor."""
    real = StandardExecutor.step

    def step(self, *args):
        return replace(real(self, *args), seconds=seconds, processor_s=seconds)

    return step


def test_a_run_says_how_its_plan_was_corrected(data, tmp_path, monkeypatch, capsys):
    """Once; the file of the plan, the verdict and the screen have both."""
    monkeypatch.setattr(ceilings, "measure", lambda *_, **__: make_rates())
    asked = []
    monkeypatch.setattr(
        pace, "measured_again", lambda machine, known, *_, **__: asked.append(known) or known.slowed(0.5)
    )
    took = 100.0
    monkeypatch.setattr(StandardExecutor, "step", slowly(took))
    settings = {"train__eval_interval": 0, "train__sample_tokens": 0, "checkpoint__interval": 0}
    train(tiny(data, tmp_path, train__steps=6, **settings))
    folder = tmp_path / "tiny"
    (event,) = [row for row in rows(folder / "events.jsonl") if row["kind"] == "pace"]
    assert took > OFF * event["planned_s"]
    assert 2 * took > WORTH_S
    assert len(asked) == 1
    assert event["correction"] == pytest.approx(2.0)
    plan = from_json((folder / "plan.json").read_text())
    assert plan["corrected"]["step"] == event["step"] == 4
    assert plan["corrected"]["step_s"] == event["corrected_s"] == pytest.approx(2 * plan["step_s"])
    said = " ".join(capsys.readouterr().out.split())
    assert "the plan is corrected, to 2 times what it was" in said
    found = off_pace(collect(folder))
    assert found.value == pytest.approx(took / event["corrected_s"])
    assert found.state is VerdictState.BAD
    assert "measured again beside the first steps, give" in found.text
