"""No FP8 layer for the controller to move's state machine on made-up evidence: what it may never do, and what it
must."""

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.core.errors import EXIT_DOES_NOT_FIT, ConfigError, FitError
from tilewright.precision.controller.controller import APPLY, REDO, SKIP, Controller
from tilewright.precision.controller.controller_settings import ControllerSettings
from tilewright.precision.controller.groups import LEVELS, GemmSite, units_of
from tilewright.precision.controller.layer_statistics import GemmStats, LayerStats, QuantStats, TensorStats
from tilewright.precision.controller.spikes import SpikeDetector
from tilewright.precision.controller.thresholds import LIMITS, Threshold, excess, find

LAYERS = ("blocks.0.attn.q_proj", "blocks.0.mlp.up_proj", "blocks.1.mlp.up_proj")
GEMMS = ("fprop", "dgrad", "wgrad")
SITES = [GemmSite(layer, gemm, 0, 1.0 + i) for i, layer in enumerate(LAYERS) for gemm in GEMMS]

GOOD = GemmStats(0.999, 1.001, 0.9995, 29.0)
MIDDLING = GemmStats(0.985, 1.0, 0.985, 16.0)  # between the limits for leaving and for coming back
BAD = GemmStats(0.95, 1.0, 0.9, 8.0)
BROKEN = GemmStats(math.nan, math.nan, math.nan, math.nan)
PRODUCTS = (GOOD, MIDDLING, BAD, BROKEN)


def evidence(fp8, bf16=GOOD, layers=LAYERS):
    """Evidence that says the same of all matmuls, or what `fp8` has for a (layer, gemm)."""
    found = {}
    for layer in layers:
        matmuls = {f"{gemm}.bf16": bf16 for gemm in GEMMS}
        for gemm in GEMMS:
            matmuls[f"{gemm}.fp8_tile"] = fp8.get((layer, gemm), GOOD) if isinstance(fp8, dict) else fp8
        found[layer] = LayerStats(matmuls=matmuls)
    return QuantStats(found)


def settings(**changes):
    return ControllerSettings(**({"budget": 1.0, "cooldown": 200, "patience": 3} | changes))


# ---- what it must do ----


def test_a_bad_product_goes_up_alone_and_says_why():
    controller = Controller(SITES, settings())
    (move,) = controller.decide(0, evidence({(LAYERS[1], "wgrad"): BAD}))
    assert (move.layer, move.gemm, move.before, move.after) == (LAYERS[1], "wgrad", "fp8_tile", "bf16")
    assert move.evidence in LIMITS
    assert move.threshold == LIMITS[move.evidence].escalate
    assert controller.formats()[LAYERS[1], "wgrad"] == "bf16"
    assert sum(name != "fp8_tile" for name in controller.formats().values()) == 1


def test_bf16_that_is_bad_goes_up_to_fp32_and_no_further():
    controller = Controller(SITES[:1], settings(cooldown=1))
    names = []
    for step in range(4):
        controller.decide(step, evidence(BAD, bf16=BAD))
        names += controller.formats().values()
    assert names == ["bf16", "fp32", "fp32", "fp32"]


def test_between_the_limits_nothing_moves():
    controller = Controller(SITES, settings())
    assert controller.decide(0, evidence(MIDDLING)) == []
    controller.decide(200, evidence(BAD))
    for step in range(400, 4000, 200):
        assert controller.decide(step, evidence(MIDDLING)) == []
    assert set(controller.formats().values()) == {"bf16"}


def test_it_comes_down_after_quiet_samples_and_the_count_starts_again_when_one_is_not():
    controller = Controller(SITES[:1], settings(cooldown=1))
    controller.decide(0, evidence(BAD))
    verdicts = [controller.decide(step, evidence(e)) for step, e in enumerate([GOOD, GOOD, MIDDLING, GOOD, GOOD], 10)]
    assert verdicts == [[]] * 5
    (move,) = controller.decide(20, evidence(GOOD))
    assert (move.before, move.after) == ("bf16", "fp8_tile")


def test_recalibration_does_not_wait_for_quiet():
    controller = Controller(SITES[:1], settings(cooldown=1))
    controller.decide(0, evidence(BAD))
    assert len(controller.decide(5, evidence(GOOD), recalibrate=True)) == 1


def test_what_was_not_measured_is_not_judged():
    controller = Controller(SITES, settings(cooldown=1))
    assert controller.decide(0, QuantStats({})) == []
    controller.decide(1, evidence(BAD))
    for step in range(2, 20):
        assert controller.decide(step, QuantStats({}), recalibrate=True) == []


BROKEN_NUMBERS = [
    (signal, value)
    for signal in ("gain_low", "gain_high", "cosine", "sqnr_db")
    for value in (math.nan, math.inf, -math.inf)
    if (signal, value) not in (("sqnr_db", math.inf), ("cosine", math.inf))  # nothing lost; there is no such cosine
]


@pytest.mark.parametrize(("signal", "value"), BROKEN_NUMBERS)
def test_evidence_that_is_not_finite_is_the_worst(signal, value):
    broken = GemmStats(**{**vars(GOOD), signal: value})
    controller = Controller(SITES, settings(budget=0.06))  # room for one matmul of the first layer
    (move,) = controller.decide(0, evidence({(LAYERS[0], "dgrad"): broken, (LAYERS[0], "fprop"): BAD}))
    assert move.gemm == "dgrad"
    assert [refused.gemm for refused in controller.refused] == ["fprop"]


def test_tensors_count_for_8_bits_by_the_worse_of_both_operands():
    healthy = TensorStats(1.0, 0.001, 0.0, 0.0, 20.0, 31.0)
    flushed = TensorStats(1.0, 0.3, 0.0, 0.0, 20.0, 31.0)
    layer = LayerStats(
        {"input": healthy, "weight": healthy, "input_column": healthy, "gradient_column": flushed},
        {"fprop.fp8_tile": GOOD, "wgrad.fp8_tile": GOOD, "wgrad.bf16": GOOD},
    )
    assert find(layer, "fprop", "fp8_tile", LIMITS, relax=False).excess < 1
    worst = find(layer, "wgrad", "fp8_tile", LIMITS, relax=False)
    assert (worst.name, worst.value) == ("underflow", 0.3)
    assert find(layer, "wgrad", "bf16", LIMITS, relax=False).name != "underflow"
    assert find(layer, "dgrad", "fp8_tile", LIMITS, relax=False) is None


def test_excess_is_a_ratio_of_errors():
    assert excess("sqnr_db", -math.inf, 20.0) == math.inf
    assert excess("sqnr_db", math.inf, 20.0) == 0.0
    assert excess("not_finite", 0.0, 0.0) == 0.0
    assert excess("not_finite", 1e-9, 0.0) == math.inf
    assert excess("cosine", 0.98, 0.99) == pytest.approx(2.0)


# ---- budget ----


def test_the_worst_come_first_where_the_budget_is_small_and_the_others_are_told():
    bad = {(LAYERS[0], "fprop"): BAD, (LAYERS[0], "dgrad"): GemmStats(0.5, 1.0, 0.5, 0.0)}
    controller = Controller(SITES, settings(budget=1.5 / 18))
    moves = controller.decide(0, evidence(bad))
    assert [move.gemm for move in moves] == ["dgrad"]
    assert [move.gemm for move in controller.refused] == ["fprop"]
    assert controller.share_above_8bit == pytest.approx(1 / 18)


def test_an_impossible_budget_names_the_best_possible():
    sites = [GemmSite("o_proj", gemm, int(gemm != "fprop"), 1.0) for gemm in GEMMS] + SITES
    with pytest.raises(FitError) as caught:
        Controller(sites, settings(budget=0.05))
    assert caught.value.exit_code == EXIT_DOES_NOT_FIT
    (problem,) = caught.value.problems
    assert "at least 9.5 %" in problem.need  # 2 of 21
    least = float(problem.try_.split("=")[1].split(",")[0])
    assert Controller(sites, settings(budget=least)).share_above_8bit <= least


def test_settings_that_make_no_sense():
    for wrong in ({"granularity": "none"}, {"budget": 1.5}, {"interval": 0}, {"patience": 0}):
        with pytest.raises(ConfigError):
            ControllerSettings(**wrong)


# ---- groups and schedules ----


def test_three_levels_move_as_groups():
    controller = Controller(SITES, settings(granularity="three_level"))
    moves = controller.decide(0, evidence({(LAYERS[2], "wgrad"): BAD}))
    assert {(move.layer, move.gemm) for move in moves} == {(layer, gemm) for layer in LAYERS[1:] for gemm in GEMMS[1:]}
    assert {move.unit for move in moves} == {"gradient"}


def test_units_hold_every_site_once():
    for policy in ("per_gemm", "three_level"):
        held = [site for unit in units_of(SITES, policy) for site in unit.sites]
        assert sorted(held, key=str) == sorted(SITES, key=str)


def test_never_below_policy_or_schedule():
    sites = [GemmSite("a", "fprop", 0, 1.0), GemmSite("a", "dgrad", 1, 1.0)]
    controller = Controller(sites, settings())
    assert controller.formats() == {("a", "fprop"): "fp8_tile", ("a", "dgrad"): "bf16"}
    controller.set_floors({"fprop": 1})
    assert controller.formats()["a", "fprop"] == "bf16"
    assert controller.share_above_8bit == 1.0
    controller.set_floors({})
    assert controller.formats()["a", "fprop"] == "fp8_tile"


def test_a_product_that_the_policy_keeps_in_bf16_may_go_up_from_there():
    controller = Controller([GemmSite(LAYERS[0], "dgrad", 1, 1.0)], settings(cooldown=1))
    (move,) = controller.decide(0, evidence(BAD, bf16=BAD))
    assert (move.before, move.after) == ("bf16", "fp32")
    moves = [controller.decide(step, evidence(BAD, bf16=GOOD)) for step in range(1, 6)]
    assert [(m.before, m.after) for found in moves for m in found] == [("fp32", "bf16")]


# ---- steps ----


def steady(controller, steps=20):
    for step in range(steps):
        assert controller.observe(3.0 + 0.01 * (step % 3), 1.0 + 0.01 * (step % 2))[0] == APPLY


@pytest.mark.parametrize(
    ("loss", "norm", "name"),
    [(9.0, 1.0, "loss"), (3.0, 50.0, "grad_norm"), (math.nan, 1.0, "not_finite"), (3.0, math.inf, "not_finite")],
)
def test_a_bad_step_is_redone_and_applied_if_wider_formats_mend_it(loss, norm, name):
    controller = Controller(SITES, settings())
    steady(controller)
    verdict, spike = controller.observe(loss, norm)
    assert (verdict, spike.name) == (REDO, name)
    assert controller.observe_again(3.0, 1.0, spike) == (APPLY, None)
    assert controller.suspect is spike
    moves = controller.decide(20, evidence({(LAYERS[1], "wgrad"): MIDDLING}))  # not bad enough without the spike
    assert [(move.layer, move.gemm) for move in moves] == [(LAYERS[1], "wgrad")]


def test_after_a_mended_spike_something_moves_even_where_all_evidence_is_good():
    controller = Controller(SITES, settings())
    steady(controller)
    _, spike = controller.observe(9.0, 1.0)
    controller.observe_again(3.0, 1.0, spike)
    (move,) = controller.decide(20, evidence(GOOD))
    assert (move.evidence, move.value) == ("loss spike", 9.0)


def test_a_spike_that_stays_is_skipped_a_few_times_and_then_taken_as_the_new_level():
    controller = Controller(SITES, settings())
    steady(controller)
    verdicts = []
    for _ in range(5):
        verdict, spike = controller.observe(9.0, 1.0)
        verdicts.append(controller.observe_again(9.0, 1.0, spike)[0] if verdict == REDO else verdict)
    assert verdicts == [SKIP, SKIP, SKIP, APPLY, APPLY]
    assert controller.suspect is None


def test_a_step_that_is_not_finite_is_never_applied():
    controller = Controller(SITES, settings())
    for _ in range(10):
        verdict, spike = controller.observe(math.nan, 1.0)
        assert verdict == REDO
        assert controller.observe_again(math.nan, math.nan, spike)[0] == SKIP
    careless = Controller(SITES, settings(retry_steps=False))
    assert careless.observe(math.inf, 1.0)[0] == SKIP


def test_noise_is_no_spike():
    draw = random.Random(5)
    detector = SpikeDetector()
    found = []
    for step in range(5000):
        loss, norm = 3.0 - 2e-4 * step + draw.gauss(0, 0.1), math.exp(draw.gauss(0, 0.3))
        found += [step] if detector.spike(loss, norm) else []
        detector.add(loss, norm)
    assert len(found) <= 5, found


# ---- what it may never do ----

SAMPLES = st.lists(
    st.tuples(
        st.integers(1, 150),  # steps since the last sample
        st.lists(st.sampled_from(PRODUCTS), min_size=9, max_size=9),
        st.sampled_from(PRODUCTS),
        st.booleans(),
        st.sampled_from([3.0, 3.01, 9.0, math.nan]),
    ),
    max_size=25,
)
SETTINGS = st.builds(
    settings,
    granularity=st.sampled_from(["per_gemm", "three_level"]),
    budget=st.sampled_from([0.1, 0.3, 0.6, 1.0]),
    cooldown=st.integers(1, 300),
    patience=st.integers(1, 4),
)


def play(controller, samples, start=0, step=0):
    """All moves that a history brings about, and the last step."""
    moves = []
    for gap, matmuls, bf16, recalibrate, loss in samples[start:]:
        step += gap
        verdict, spike = controller.observe(loss, 1.0)
        if verdict == REDO:
            controller.observe_again(3.0 if bf16 is GOOD else loss, 1.0, spike)
        fp8 = {(site.layer, site.gemm): matmul for site, matmul in zip(SITES, matmuls, strict=True)}
        moves += controller.decide(step, evidence(fp8, bf16), recalibrate=recalibrate)
        assert controller.share_above_8bit <= controller.settings.budget + 1e-9
    return moves, step


@given(SETTINGS, SAMPLES)
def test_never_over_budget_and_never_two_moves_within_the_cooldown(chosen, samples):
    controller = Controller(SITES, chosen)
    moves, _ = play(controller, samples)
    last = {}
    formats = {(site.layer, site.gemm): "fp8_tile" for site in SITES}
    for move in moves:
        key = (move.layer, move.gemm)
        assert key not in last or move.step - last[key] >= chosen.cooldown
        assert move.before == formats[key]
        assert abs(LEVELS.index(move.after) - LEVELS.index(move.before)) == 1
        last[key], formats[key] = move.step, move.after
    assert formats == controller.formats()


@given(SETTINGS, SAMPLES)
def test_the_same_history_gives_the_same_moves(chosen, samples):
    a, b = Controller(SITES, chosen), Controller(SITES, chosen)
    assert play(a, samples) == play(b, samples)
    assert json.dumps(a.state_dict()) == json.dumps(b.state_dict())


@given(SETTINGS, SAMPLES, st.integers(0, 25))
def test_a_controller_from_a_checkpoint_goes_on_as_if_it_had_not_stopped(chosen, samples, cut):
    cut = min(cut, len(samples))
    straight = Controller(SITES, chosen)
    _, step = play(straight, samples[:cut])
    resumed = Controller(SITES, chosen)
    resumed.load_state_dict(json.loads(json.dumps(straight.state_dict(), allow_nan=False)))
    assert resumed.formats() == straight.formats()
    assert play(resumed, samples, cut, step) == play(straight, samples, cut, step)


# ---- evidence ----

NUMBERS = st.floats(0, 1e6) | st.sampled_from([math.inf, math.nan])


@given(st.lists(st.builds(GemmStats, NUMBERS, NUMBERS, NUMBERS, NUMBERS), min_size=2, max_size=5))
def test_merging_does_not_depend_on_the_order_or_on_how_samples_are_grouped(matmuls):
    samples = [QuantStats({"up": LayerStats(matmuls={"fprop.fp8_tile": matmul})}) for matmul in matmuls]
    whole = QuantStats.worst(samples)
    assert QuantStats.worst(samples[::-1]) == whole
    assert QuantStats.worst([QuantStats.worst(samples[:1]), QuantStats.worst(samples[1:])]) == whole
    assert QuantStats.from_vector(["up"], whole.vector(["up"])) == whole
    assert QuantStats.from_json(json.loads(json.dumps(whole.to_json(), allow_nan=False))) == whole


def test_limits_are_stricter_for_coming_back():
    for name, limit in LIMITS.items():
        assert isinstance(limit, Threshold)
        if name != "not_finite":
            assert excess(name, limit.relax, limit.escalate) < 1
