"""Rates measured again beside a run: what the run is held against, and what the cache keeps."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planner.rates import make_rates
from tilewright.core.hardware import detect_machine
from tilewright.planner.machine import ceilings, remeasure
from tilewright.planner.machine.ceilings import Ceilings, known, measure
from tilewright.planner.machine.remeasure import LESS, learned, measured_again, reached, replaced

FACTOR = st.floats(0.05, 20)
QUIET, BUSY = {"busy": 1.0, "others": 0.0}, {"busy": 1.1, "others": 0.5}


def of_bf16(rates: Ceilings) -> Ceilings:
    """As one round of one format gives them."""
    tables = ("matmul", "start", "attention", "loss", "elementwise")
    return replace(rates, **{name: {"bf16": getattr(rates, name)["bf16"]} for name in tables})


@given(factor=FACTOR, load=st.sampled_from([QUIET, BUSY]))
def test_only_what_was_measured_again_is_replaced(factor, load):
    known = make_rates()
    found = replaced(known, of_bf16(replace(make_rates().slowed(factor), **load)))
    assert found.matmul["bf16"][256] == pytest.approx(1e12 * factor)
    assert found.attention["bf16"] == pytest.approx(1e11 * factor)
    assert found.bandwidth == pytest.approx(1e10 * factor)
    assert (found.matmul["fp32"], found.loss["fp16"]) == (known.matmul["fp32"], known.loss["fp16"])
    assert (found.busy, found.others) == (load["busy"], load["others"])


@given(factor=FACTOR, before=st.sampled_from([QUIET, BUSY]), now=st.sampled_from([QUIET, BUSY]))
def test_the_cache_keeps_what_was_reached_once(factor, before, now):
    """Busy when it was measured first, when it was measured again, both, or neither."""
    old, new = replace(make_rates(), **before), replace(make_rates().slowed(factor), **now)
    found = learned(old, new)
    lost = factor < 1 / LESS
    if factor > 1 or (lost and now == QUIET):
        assert found.bandwidth == pytest.approx(1e10 * factor)
        assert found.matmul["bf16"][2048] == pytest.approx(1e12 * factor)
    else:
        assert (found.bandwidth, found.matmul) == (old.bandwidth, old.matmul)
    # Far slower on a busy machine says nothing of the machine: it is measured again, after an hour.
    assert found.quiet == ((now if lost else before) == QUIET)


def test_seconds_to_start_are_better_where_they_are_fewer():
    old, new = (make_rates(start={"bf16": {256: seconds}}) for seconds in (2e-3, 1e-3))
    assert learned(old, new).start["bf16"] == {256: 1e-3}
    assert learned(new, replace(old, **BUSY)).start["bf16"] == {256: 1e-3}


@pytest.fixture
def here(monkeypatch, tmp_path):
    """This machine with a cache that holds rates of a busy hour; a round measures twice as much."""
    machine = detect_machine("cpu")
    monkeypatch.setattr(ceilings, "_measure_all", lambda *_: replace(make_rates(), **BUSY))
    measure(machine, tmp_path)
    asked = []

    def round_of(machine, formats, progress):
        asked.append(formats)
        return of_bf16(make_rates().slowed(2))

    monkeypatch.setattr(remeasure, "one_round", round_of)
    return machine, tmp_path, asked


def test_the_next_plan_has_what_this_one_found(here):
    machine, folder, asked = here
    found = measured_again(machine, known(machine, folder), {"bf16"}, cache_dir=folder, progress=print)
    assert asked == [{"bf16"}]
    assert found.matmul["bf16"][256] == 2e12
    later = measure(machine, folder)
    assert (later.matmul["bf16"], later.matmul["fp32"][256]) == (found.matmul["bf16"], 1e12)
    faster = reached(machine, later, {"bf16"}, 1.5, folder)
    assert measure(machine, folder).matmul == faster.matmul
    assert faster.matmul["bf16"][256] == 3e12


def test_a_share_of_a_core_is_counted_once(here):
    machine, folder, _ = here
    shared = replace(machine, physical_cores=1, core_share=0.5)
    found = measured_again(shared, known(shared, folder), {"bf16"}, cache_dir=folder, progress=print)
    assert found.matmul["bf16"][256] == pytest.approx(1e12), "half of what one process alone reaches"
    assert known(machine, folder).matmul["bf16"][256] == pytest.approx(2e12)


def test_the_cache_of_another_processor_is_not_touched(here):
    machine, folder, _ = here
    other = replace(machine, device_name="another")
    assert known(other, folder) is None
    measure(other, folder)
    before = {path: path.read_text() for path in (folder / "ceilings").iterdir()}
    measured_again(machine, known(machine, folder), {"bf16"}, cache_dir=folder, progress=print)
    changed = [path for path, text in before.items() if path.read_text() != text]
    assert len(before) == 2
    assert len(changed) == 1
    assert known(other, folder).matmul == make_rates().matmul


STAND_IN = """
from dataclasses import replace
from tests.planner.rates import make_rates
from tilewright.core.subprocess_call import answer
from tilewright.planner.machine import ceilings

def measured(machine, key, threads, progress, rounds, formats):
    progress(f"{rounds} round of {formats}")
    return replace(make_rates(), key=key, threads=threads)

ceilings._measure_all = measured
answer(ceilings._measure_here)
"""


@pytest.mark.slow
def test_a_round_runs_in_a_process_of_its_own(tmp_path, monkeypatch):
    """Another module in the place of ours, which would measure for seconds."""
    (tmp_path / "stand_in_round.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    monkeypatch.setattr(ceilings, "__name__", "stand_in_round")
    lines = []
    found = ceilings.one_round(detect_machine("cpu"), {"fp32", "bf16"}, lines.append)
    assert lines == ["1 round of ['bf16', 'fp32']"]
    assert found.matmul == make_rates().matmul


@pytest.mark.slow
def test_one_round_of_one_format_takes_seconds():
    found = ceilings.one_round(detect_machine("cpu"), {"bf16"}, print)
    assert set(found.matmul) == set(found.attention) == {"bf16"}
    assert found.measured_s < 15
    assert json.dumps(found.to_json())
    assert replaced(make_rates(matmul={"bf16": dict.fromkeys(found.matmul["bf16"], 1.0)}), found).matmul == found.matmul
