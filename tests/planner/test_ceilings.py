"""Ceilings: measured once, cached by machine, and read back; between widths by straight line."""

import json
import logging
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.planner.rates import GIB, make_machine, make_plan, make_rates, make_recipe
from tilewright.core.hardware import detect_machine
from tilewright.ops.kernels import Kernels
from tilewright.planner.machine import ceilings, microbench
from tilewright.planner.machine.ceilings import Ceilings, measure


@pytest.fixture(scope="module")
def machine():
    return detect_machine("cpu")


def timed_once(machine, folder, **changes):
    """One real measurement, each rate timed once."""
    lines = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(microbench, "_FEWEST", 1)
        patch.setattr(microbench, "_MOST", 1)
        patch.setattr(microbench, "WIDTHS", (256, 512))
        patch.setattr(ceilings, "_measure_all", partial(ceilings._measure_all, rounds=1, **changes))
        found = measure(machine, folder, progress=lines.append)
    assert lines, "progress is reported"
    return found


@pytest.fixture(scope="module")
def measured(machine, tmp_path_factory):
    """Two formats, and the optimizer without a compiler, which takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ceilings, "Kernels", partial(Kernels, compile=False))
        return timed_once(machine, tmp_path_factory.mktemp("cache"), formats=("fp32", "bf16"))


def test_every_rate_is_positive_and_sane(measured):
    check_rates(measured)


@pytest.mark.slow
def test_rates_of_all_formats_and_of_compiled_updates(machine, tmp_path):
    check_rates(timed_once(machine, tmp_path))


def check_rates(measured):
    row = measured.to_json()
    for name in ("matmul", "attention", "loss", "elementwise", "adam"):
        for fmt, rate in row[name].items():
            rates = rate.values() if isinstance(rate, dict) else [rate]
            assert all(1e4 < value < 1e16 for value in rates), (name, fmt, rate)
    assert 1e8 < measured.bandwidth < 1e13
    assert measured.threads == torch.get_num_threads()


@pytest.mark.slow
def test_measured_in_a_process_of_its_own(machine, tmp_path, monkeypatch):
    """Another module in the place of ours, which would measure for a quarter of a minute."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    monkeypatch.setattr(ceilings, "__name__", "stand_in")
    lines = []
    there = measure(machine, tmp_path, progress=lines.append, own_process=True)
    assert lines == ["measuring"]
    assert there.threads == torch.get_num_threads()
    assert measure(machine, tmp_path) == there, "from the cache"


STAND_IN = """
import dataclasses
from tests.planner.rates import make_rates
from tilewright.core.subprocess_call import answer
from tilewright.planner.machine import ceilings

def measured(machine, key, threads, progress, *_):
    progress("measuring")
    return dataclasses.replace(make_rates(), key=key, threads=threads)

ceilings._measure_all = measured
answer(ceilings._measure_here)
"""


def test_second_call_reads_the_cache(machine, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(ceilings, "_measure_all", lambda *a: calls.append(1) or make_rates())
    first = measure(machine, tmp_path)
    assert measure(machine, tmp_path) == first
    assert len(calls) == 1
    measure(machine, tmp_path, refresh=True)
    assert len(calls) == 2


def test_other_thread_counts_have_their_own_entry(machine, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(ceilings, "_measure_all", lambda *a: calls.append(1) or make_rates())
    measure(machine, tmp_path)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    measure(machine, tmp_path)
    assert len(calls) == 2
    assert len(list((tmp_path / "ceilings").iterdir())) == 2


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', json.dumps({"format": 5, "matmul": {}})])
def test_damaged_cache_is_measured_again_and_said(machine, tmp_path, monkeypatch, caplog, text):
    monkeypatch.setattr(ceilings, "_measure_all", lambda *a: make_rates())
    measure(machine, tmp_path)
    next((tmp_path / "ceilings").iterdir()).write_text(text)
    with caplog.at_level(logging.WARNING, logger="tilewright"):
        assert measure(machine, tmp_path) == make_rates()
    assert "measuring again" in caplog.text


def test_cache_that_cannot_be_written_is_said_and_does_not_stop(machine, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(ceilings, "_measure_all", lambda *a: make_rates())
    (tmp_path / "ceilings").write_text("a file in the way")
    with caplog.at_level(logging.WARNING, logger="tilewright"):
        assert measure(machine, tmp_path) == make_rates()
    assert "cannot be" in caplog.text


def test_a_busy_machine_is_told(machine, tmp_path, monkeypatch):
    monkeypatch.setattr(microbench.RateProbe, "busy", lambda self: 2.5)
    timed = microbench.Timed(width=512, few=1, few_s=1.0, many=2, many_s=1.5)
    monkeypatch.setattr(microbench.RateProbe, "matmul", lambda self, dtype: {512: timed})
    for name in ("attention", "loss", "elementwise", "adam"):
        monkeypatch.setattr(microbench.RateProbe, name, lambda self, *a: 1.0)
    for name in ("bandwidth", "exp", "low_bit_adam"):
        monkeypatch.setattr(microbench.RateProbe, name, lambda self: 1.0)
    lines = []
    measure(machine, tmp_path, progress=lines.append)
    assert "2.5x" in lines[-1]


@pytest.mark.parametrize("loud", [{"busy": 1.4}, {"others": 0.2}])
def test_rates_of_a_busy_machine_are_measured_again_in_an_hour(machine, tmp_path, monkeypatch, loud):
    calls = []
    monkeypatch.setattr(ceilings, "_measure_all", lambda *a: calls.append(1) or replace(make_rates(), **loud))
    assert measure(machine, tmp_path) == measure(machine, tmp_path)
    assert len(calls) == 1
    (file,) = (tmp_path / "ceilings").iterdir()
    hours_ago = time.time() - 3700
    os.utime(file, (hours_ago, hours_ago))
    measure(machine, tmp_path)
    assert len(calls) == 2


@pytest.mark.slow
def test_steady_load_of_another_process_is_seen():
    program = (
        "import os, time; from tilewright.planner.machine.microbench import Load;"
        "load = Load(); print(flush=True); time.sleep(1.0);"
        "print(load.others() * os.cpu_count())"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    child.stdout.readline()
    end = time.perf_counter() + 1.0
    while time.perf_counter() < end:
        sum(range(10**5))
    out, _ = child.communicate(timeout=60)
    assert float(out) > 0.5, "one processor was busy all the time"


def test_the_clock_takes_the_middle_and_remembers_the_fastest(monkeypatch):
    now, seconds = [0.0], iter([0.0, 3.0, 1.0])  # the first is the warm-up
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "thread_time", lambda: now[0])
    clock = microbench.Clock(torch.device("cpu"))
    assert clock(lambda: now.append(now.pop() + next(seconds)), budget_s=0.0) == 2.0
    assert clock.ratios == [2.0]


@given(
    own=st.lists(st.floats(0.01, 0.02), min_size=2, max_size=5),
    taken=st.lists(st.floats(0.0, 0.5), min_size=5, max_size=5),
)
def test_what_others_take_is_not_counted(own, taken):
    """However much: a call's seconds are within those in which it ran; a little that others take stays in."""
    calls, wall, cpu = iter([(0.0, 0.0), *zip(own, taken, strict=False)]), [0.0], [0.0]

    def work():
        mine, theirs = next(calls)
        wall[0], cpu[0] = wall[0] + mine + theirs, cpu[0] + mine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: wall[0])
        patch.setattr(time, "thread_time", lambda: cpu[0])
        patch.setattr(microbench, "_FEWEST", len(own))
        found = microbench.Clock(torch.device("cpu"))(work, budget_s=0.0)
    if sum(taken[: len(own)]) > 0.26 * sum(own):
        assert found == pytest.approx(min(own))
    elif not any(taken):
        assert found == pytest.approx(statistics.median(own))


@pytest.mark.slow
def test_rates_beside_other_programs_are_near_those_of_a_quiet_machine():
    """In alternation: alone, and beside four programs that take the processors. By the clock it is 3 times and more."""
    x = torch.randn(512, 512)
    clock, found = microbench.Clock(torch.device("cpu")), {False: [], True: []}
    for _ in range(3):
        for loaded in (False, True):
            others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4 * loaded)]
            try:
                time.sleep(0.2 * loaded)
                found[loaded].append(clock(lambda: x @ x, 0.2))
            finally:
                for other in others:
                    other.kill()
                    other.wait()
    assert min(found[True]) < 1.6 * min(found[False]), found


@pytest.mark.parametrize("loud", [{"busy": 1.4}, {"others": 0.2}])
def test_a_plan_on_rates_of_a_busy_machine_says_so(loud):
    assert make_rates().load_note == ""
    busy = replace(make_rates(), **loud)
    assert "planned seconds may be far off" in busy.load_note
    recipe, machine = make_recipe(), make_machine(64 * GIB)
    assert busy.load_note in make_plan(recipe, 512, machine, busy).notes
    assert not [note for note in make_plan(recipe, 512, machine, make_rates()).notes if "other programs" in note]


def test_the_middle_of_several_measurements():
    several = [make_rates(), replace(make_rates(), bandwidth=1e9), replace(make_rates(), bandwidth=2e9)]
    several[1].matmul["bf16"].update({width: 1.0 for width in several[1].matmul["bf16"]})
    found = ceilings.middle(several)
    assert found.bandwidth == 2e9
    assert found == replace(make_rates(), bandwidth=2e9)


def test_more_processes_than_cores_have_a_share_of_one(machine, tmp_path, monkeypatch):
    """What is kept in the file is what one process alone reached."""
    monkeypatch.setattr(ceilings, "_measure_all", lambda *a: make_rates())
    machine = replace(machine, physical_cores=2)
    for processes, share in ((1, 1.0), (2, 1.0), (4, 0.5)):
        shared = machine.shared_by(processes)
        assert (shared.core_share, shared.physical_cores) == (share, 2 // processes or 1)
        for found in (measure(shared, tmp_path), ceilings.known(shared, tmp_path)):
            assert found.matmul_s("bf16", 256, 1e9) == pytest.approx(make_rates().matmul_s("bf16", 256, 1e9) / share)
            assert found.bandwidth == make_rates().bandwidth * share
            assert all(rate == make_rates().adam[key] * share for key, rate in found.adam.items())


def test_json_round_trip(measured):
    assert Ceilings.from_json(json.loads(json.dumps(measured.to_json()))) == measured


def test_rate_between_widths_is_on_a_straight_line_and_flat_beyond():
    rates = make_rates(matmul={"fp32": {256: 100.0, 512: 200.0, 1024: 150.0}})
    assert [rates.matmul_rate("fp32", w) for w in (64, 256, 384, 768, 1024, 9999)] == [100, 100, 150, 175, 150, 150]


def test_a_product_takes_what_it_takes_to_start_and_what_its_rows_take():
    timed = microbench.Timed(width=10, few=4, few_s=1.4, many=14, many_s=2.4)  # 1 s, and 0.1 s a row of 600 FLOP
    assert timed.rate == pytest.approx(6000)
    assert timed.start == pytest.approx(1.0)
    others = [replace(timed, few_s=2.0, many_s=2.2), replace(timed, few_s=1.0, many_s=9.0)]
    assert microbench.Timed.of_rounds([timed, *others], statistics.median) == timed
    best = microbench.Timed.of_rounds([timed, *others], min)
    assert (best.few_s, best.many_s) == (1.0, 2.2)
    backwards = microbench.Timed(
        width=10, few=4, few_s=3.0, many=14, many_s=2.0
    )  # an impossible timing still gives a rate
    assert backwards.rate > 0
    assert backwards.start >= 0


def test_what_it_takes_to_start_grows_with_the_weight():
    rates = make_rates(matmul={"fp32": {10: 100.0}}, start={"fp32": {10: 0.3, 20: 0.6, 40: 1.8}})
    assert rates.call_s() == 0.3
    eager = [rates.matmul_s("fp32", width, 0.0) for width in (1, 10, 10 * 2.5**0.5, 20, 40, 80)]
    assert eager == pytest.approx([0.1, 0.1, 0.15, 0.2, 0.6, (0.3 + 4 * 1.5) / 3])
    compiled = [rates.matmul_s("fp32", width, 0.0, compiled=True) for width in (1, 10, 20, 40)]
    assert compiled == pytest.approx([0.0, 0.0, 0.1, 0.5], abs=1e-12)
    assert rates.matmul_s("fp32", 10, 50.0) == pytest.approx(0.6)
    assert make_rates().matmul_s("bf16", 300, 1e12) == pytest.approx(1.0)  # nothing measured: nothing to start
