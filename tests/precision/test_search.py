"""The search against brute force, what is measured against switches made by hand, the file against the policy."""

import itertools
import math
import random
import tomllib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewright.core.errors import ConfigError, FitError, NumericsError
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.models.decoder.init import init_decoder
from tilewright.ops.kernels import Kernels
from tilewright.precision.convert import convert
from tilewright.precision.float8.linear import float8_layers
from tilewright.precision.policy.gemm_formats import GEMM_NAMES, Gemms, expected_gain
from tilewright.precision.policy.policy import Policy, Rule
from tilewright.precision.search.gemm_time import UnitTime, estimate, measure_times
from tilewright.precision.search.gradient_error import Compared, GradientChange, GradientTally, lost_by_batch
from tilewright.precision.search.layer_stats import SearchUnit
from tilewright.precision.search.loss_model import LossModel, loss_slope, parse_budget, shrink_to_mean
from tilewright.precision.search.policy_file import PolicyFile, fold
from tilewright.precision.search.policy_search import SearchSpace, baselines, curve, fastest
from tilewright.precision.search.sensitivity import (
    BASE,
    FormatSwitch,
    Sensitivity,
    measure,
    measure_policy,
    measuring_policy,
    num_passes,
    one_pass,
)

BF16, TILES = Gemms.all("bf16"), Gemms.all("fp8_tile")


# ---- solver ----


def space_of(seed: int, num_units: int = 3, fixed=None, broken=()) -> SearchSpace:
    """A made-up space: random times and changes; units 0 and 1 read one input."""
    draw = random.Random(seed)
    units = tuple(
        SearchUnit(f"layers.{i}.up", (f"layers.{i}.up",), 8, 8, 4, reads=max(i - 1, 0)) for i in range(num_units)
    )
    switches = []
    for unit, gemm in itertools.product(units, GEMM_NAMES):
        lost = math.nan if (unit.name, gemm) in broken else draw.uniform(0, 1e-3)
        change = GradientChange(1.0, 1.0, lost)
        loss = (draw.uniform(0, 2e-3),) * 2 if gemm == "fprop" else (0.0, 0.0)
        switches.append(FormatSwitch(unit.name, gemm, loss, (change,) * 2, (change,) * 2, (lost,) * 2))

    def time() -> UnitTime:
        bf16 = {gemm: draw.uniform(1, 2) for gemm in GEMM_NAMES}
        fp8 = {gemm: draw.uniform(0.5, 1.2) for gemm in GEMM_NAMES}
        return UnitTime(bf16, fp8, *(draw.uniform(0, 0.4) for _ in range(5)))

    times = {unit.name: time() for unit in units}
    shared = times["layers.0.up"]
    first = times["layers.1.up"]
    times["layers.1.up"] = UnitTime(
        first.bf16,
        first.fp8,
        shared.input_row,
        shared.input_column,
        first.gradient_row,
        first.gradient_column,
        first.weight,
    )
    return SearchSpace(units, LossModel(Sensitivity(units, tuple(switches), (5.0, 5.0)), 0.2), times, fixed or {})


def seconds_by_hand(space: SearchSpace, fp8: set) -> float:
    """The time of a policy, written differently: what is quantised is collected first."""
    total, work = 0.0, {}
    for unit in space.units:
        time = space.times[unit.name]
        for gemm in GEMM_NAMES:
            if (unit.name, gemm) not in fp8:
                total += time.bf16[gemm]
                continue
            total += time.fp8[gemm]
            if gemm != "dgrad":
                work["x", unit.reads] = time.input_row
            if gemm != "fprop":
                work["dy", unit.name] = time.gradient_row
            if gemm != "wgrad":
                work["w", unit.name] = time.weight
            if gemm == "wgrad":
                work["x column", unit.reads] = time.input_column
                work["dy column", unit.name] = time.gradient_column
    return total + sum(work.values())


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("share", [0.0, 0.2, 0.6, 1.0])
def test_the_fastest_policy_is_that_of_brute_force(seed, share):
    space = space_of(seed)
    costs = space.model.costs
    budget = share * sum(costs.values())
    best = math.inf
    for choice in itertools.product((False, True), repeat=len(costs)):
        fp8 = {matmul for matmul, taken in zip(space.matmuls(), choice, strict=True) if taken}
        if sum(costs[matmul] for matmul in fp8) <= budget * (1 + 1e-9):  # sums in another order
            best = min(best, seconds_by_hand(space, fp8))
    found = fastest(space, budget)
    assert found.predicted.change <= budget * (1 + 1e-6)  # the solver's own tolerance
    assert found.seconds == pytest.approx(best, rel=1e-5)
    assert found.seconds == pytest.approx(seconds_by_hand(space, set(found.fp8)), rel=1e-12)


def test_rules_of_the_recipe_are_followed():
    fixed = {("layers.0.up", "fprop"): "fp8_tile", ("layers.1.up", "wgrad"): "bf16"}
    space = space_of(3, fixed=fixed)
    for budget in (space.model.costs["layers.0.up", "fprop"], 1.0):
        found = fastest(space, budget)
        assert ("layers.0.up", "fprop") in found.fp8
        assert ("layers.1.up", "wgrad") not in found.fp8


def test_an_impossible_budget_says_the_best_possible():
    space = space_of(3, fixed={("layers.0.up", "fprop"): "fp8_tile"})
    least = space.model.costs["layers.0.up", "fprop"]
    with pytest.raises(FitError, match="best possible") as error:
        fastest(space, least / 2)
    assert error.value.exit_code == 3
    suggested = error.value.problems[0].try_.split('"')[1]
    assert fastest(space, parse_budget(suggested)).predicted.change <= parse_budget(suggested)
    with pytest.raises(FitError, match=r"0 % or more: the best possible, all matmuls in BF16"):
        fastest(space_of(3), -0.01)


def test_a_product_that_gave_nan_is_never_chosen():
    broken = ("layers.2.up", "dgrad")
    space = space_of(1, broken=(broken,))
    assert math.isinf(space.model.costs[broken])
    assert broken not in fastest(space, 1.0).fp8
    assert broken not in baselines(space)[1].fp8
    with pytest.raises(FitError, match="inf"):
        fastest(space_of(1, broken=(broken,), fixed={broken: "fp8_tile"}), 1.0)


def test_the_curve_falls_and_ends_at_all_fp8_or_faster():
    space = space_of(2)
    points = curve(space)
    seconds = [point.seconds for point in sorted(points, key=lambda point: point.predicted.change)]
    assert len(points) > 3
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] <= space.candidate("", space.allowed()).seconds + 1e-9
    assert [mark.name for mark in baselines(space)] == ["all BF16", "all FP8", "first and last block BF16"]


# ---- prediction ----


def test_noisy_changes_are_drawn_together_and_sharp_ones_are_not():
    noisy = shrink_to_mean({("a", "fprop"): (-1.0, 3.0), ("b", "fprop"): (0.0, 3.0)})
    assert noisy["a", "fprop"] == noisy["b", "fprop"] == 1.25
    sharp = shrink_to_mean({("a", "fprop"): (1.0, 1.0), ("b", "fprop"): (3.0, 3.0)})
    assert (sharp["a", "fprop"], sharp["b", "fprop"]) == (1.0, 3.0)


def test_a_lucky_switch_is_no_credit():
    change = GradientChange(1.0, 1.0, 0.0)
    unit = SearchUnit("up", ("up",), 8, 8, 4)
    lucky = FormatSwitch("up", "fprop", (-0.01, -0.01), (change,) * 2, (change,) * 2, (0.0, 0.0))
    assert LossModel(Sensitivity((unit,), (lucky,), (5.0, 5.0)), 0.2).costs == {("up", "fprop"): 0.0}


def test_slope_of_a_loss_that_rises_or_is_unknown_is_zero():
    assert loss_slope([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]) == 0
    assert loss_slope([1, 2], [4, 3]) == 0
    assert loss_slope([], []) == 0
    assert loss_slope([1, 2, 4, 8, 16, 32], [6, 5, 4, 3, math.nan, 2]) > 0


@pytest.mark.parametrize("text", ["0.25", "much", "%", "nan%", "inf %", ""])
def test_a_budget_without_per_cent_is_refused(text):
    with pytest.raises(ConfigError, match="percent"):
        parse_budget(text)


# ---- policy file ----

CHOICES = st.sampled_from([Gemms.of(*gemms) for gemms in itertools.product(("bf16", "fp8_tile"), repeat=3)])
NAMES = [f"model.layers.{i}.{part}" for i in range(3) for part in ("up", "down", "attn.o_proj")]
NAMES += ["model.layers.0.mlp.experts.*.up", "model.layers.1.mlp.experts.*.up"]


@given(st.fixed_dictionaries(dict.fromkeys(NAMES, CHOICES)), st.booleans())
def test_the_rules_of_the_file_mean_what_was_chosen(formats, with_rule):
    kept = (Rule("*.down", compute="fp8_tile"),) if with_rule else ()
    text = str(PolicyFile("default", ["one"], {"model": {"dim": 64}}, {}, kept, formats, {}, True))
    data = tomllib.loads(text)
    assert (data["extends"], data["model"]) == ("default", {"dim": 64})
    section = data["precision"]
    rules = tuple(Rule(**rule) for rule in section.get("rules", []))
    assert len(rules) <= len(NAMES) + len(kept)
    policy = Policy(
        section["mode"],
        rules,
        bf16_grad_layers=tuple(section["bf16_grad_layers"]),
        fp8_min_gain=section["fp8_min_gain"],
    ).on("cuda")
    for name, gemms in formats.items():
        decision = policy.decide(name.replace("*", "7"), "linear", (64, 64))
        assert (decision.gemms or Gemms.all(decision.compute)) == gemms


def test_layers_that_agree_share_a_rule():
    formats = {f"layers.{i}.up": BF16 for i in range(20)} | {f"layers.{i}.down": TILES for i in range(20)}
    assert [rule.match for rule in fold(formats)] == ["layers.*.up"]


# ---- measuring ----


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = DecoderConfig(vocab_size=64, dim=64, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=32, ffn_dim=128)
    model = Decoder(config, Kernels.default())
    init_decoder(model, seed=0)
    convert(model, measuring_policy(Policy("bf16_mixed")))
    return model.train()


@pytest.fixture(scope="module")
def batches():
    torch.manual_seed(1)
    found = []
    for _ in range(2):
        ids = torch.randint(0, 64, (2, 33))
        found.append({"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()})
    return found


@pytest.fixture(scope="module")
def sensitivity(model, batches):
    return measure(model, batches)


def by_hand(model, batch, name, gemm):
    """Loss and flat FP64 gradient with one matmul in FP8."""
    layers = float8_layers(model)
    for layer in layers.values():
        layer.set_gemms(BASE, power_of_two=True)
    if name:
        layers[name].set_gemms(BASE.changed({gemm: "fp8_tile"}), power_of_two=True)
    loss = one_pass(model, batch)
    grads = {key: param.grad.double().flatten() for key, param in model.named_parameters()}
    for layer in layers.values():
        layer.set_gemms(TILES, power_of_two=True)
    return loss, grads


@pytest.mark.parametrize("gemm", GEMM_NAMES)
def test_each_switch_is_what_one_switch_by_hand_gives(model, batches, sensitivity, gemm):
    name = next(unit.name for unit in sensitivity.units if "down" in unit.name)
    switch = next(s for s in sensitivity.switches if (s.unit, s.gemm) == (name, gemm))
    rounds = []
    for i, batch in enumerate(batches):
        base_loss, base = by_hand(model, batch, None, gemm)
        loss, grads = by_hand(model, batch, name, gemm)
        rounds.append((base, grads))
        assert switch.loss_change[i] == loss / base_loss - 1
        assert (loss != base_loss) == (gemm == "fprop")
        g, h = (torch.cat(list(flat.values())) for flat in (base, grads))
        assert switch.gradients[i].gain == pytest.approx(float(h @ g / (g @ g)), abs=1e-6)
        assert switch.gradients[i].cosine == pytest.approx(float(h @ g / (h.norm() * g.norm())), abs=1e-6)
        scaled = [(flat / base[key].square().mean().sqrt()) for key, flat in base.items()]
        changed = [(flat / base[key].square().mean().sqrt()) for key, flat in grads.items()]
        g, h = torch.cat(scaled), torch.cat(changed)
        assert switch.gradients[i].lost == pytest.approx(float(1 - h @ g / (h.norm() * g.norm())), abs=1e-6)
        g, h = base[f"{name}.weight"], grads[f"{name}.weight"]
        assert switch.own[i].cosine == pytest.approx(float(h @ g / (h.norm() * g.norm())), abs=1e-6)
    whole, *single = (lost_by_hand(part) for part in (rounds, rounds[:1], rounds[1:]))
    assert switch.lost == pytest.approx([2 * whole - single[1], 2 * whole - single[0]], abs=2e-6)


def lost_by_hand(rounds) -> float:
    """1 - cosine of the gradients of all rounds side by side, each parameter's divided by its own RMS over them."""
    parts = []
    for key in rounds[0][0]:
        g, h = (torch.cat([one[side][key] for one in rounds]).double() for side in (0, 1))
        # Each parameter weighs as many elements as it has, however many rounds there are.
        parts.append(torch.stack([g, h]) / g.square().mean().sqrt())
    g, h = torch.cat(parts, dim=1)
    return float(1 - h @ g / (h.norm() * g.norm()))


def test_a_batch_whose_gradient_is_nearly_all_rounding_does_not_decide_alone():
    layer = torch.nn.Linear(64, 1, bias=False)

    def compared(size: float) -> Compared:
        """A gradient of this size with an error of 0.01 an element."""
        layer.weight.grad = size * torch.ones(1, 64)
        tally = GradientTally(layer)
        layer.weight.grad = layer.weight.grad + 0.01 * torch.tensor([1.0, -1.0]).repeat(32)
        return tally.against(layer)

    usual, tiny = compared(1.0), compared(0.001)
    assert tiny.change().lost > 0.8
    lost = lost_by_batch([usual, usual, usual, tiny])
    assert sum(lost) / 4 < 2e-4
    assert lost_by_batch([usual])[0] == usual.change().lost == pytest.approx(5e-5, rel=0.01)


def test_measuring_leaves_the_model_as_it_was(model, batches):
    state = torch.random.get_rng_state()
    weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    calls = []
    measure(model, batches[:1], advance=calls.append)
    assert calls == list(range(1, num_passes(model, 1) + 1))
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(weights[name], param) for name, param in model.named_parameters())
    assert all(param.grad is None for param in model.parameters())
    assert {layer.gemms for layer in float8_layers(model).values()} == {TILES}


def test_single_switches_add_up(model, batches, sensitivity):
    """What all matmuls lose together is within 2x of the sum over single switches: independent errors' squares add."""
    everything = measure_policy(model, batches, dict.fromkeys(float8_layers(model), TILES))
    for i in range(len(batches)):
        total = sum(switch.gradients[i].lost for switch in sensitivity.switches)
        assert 0.5 < total / everything.gradients[i].lost < 2
    total = sum(sum(switch.lost) for switch in sensitivity.switches)
    assert 0.5 < total / sum(everything.lost) < 2
    nothing = measure_policy(model, batches, {})
    assert nothing.loss_change == (0.0, 0.0)
    assert all(change.lost == pytest.approx(0, abs=1e-12) for change in nothing.gradients)


def test_facts_of_the_layers(model, sensitivity):
    units = {unit.name.rpartition(".")[2]: unit for unit in sensitivity.units if ".0." in unit.name}
    assert {unit.tokens for unit in units.values()} == {64}
    assert units["q_proj"].reads == units["k_proj"].reads == units["v_proj"].reads
    assert units["gate_proj"].reads == units["up_proj"].reads
    assert len({units[name].reads for name in ("q_proj", "o_proj", "gate_proj", "down_proj")}) == 4
    assert all(set(unit.underflow) == {"x", "weight", "dy"} for unit in units.values())
    assert (units["down_proj"].in_features, units["down_proj"].out_features) == (128, 64)


def test_experts_are_switched_together():
    torch.manual_seed(0)
    config = DecoderConfig(
        vocab_size=64, dim=32, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=16, ffn_dim=64, num_dense_layers=0,
        num_experts=4, expert_dim=32,
    )  # fmt: skip
    model = Decoder(config, Kernels.default()).train()
    init_decoder(model, seed=0)
    convert(model, measuring_policy(Policy("bf16_mixed")))
    ids = torch.randint(0, 64, (2, 17))
    batch = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    found = measure(model, [batch, batch])
    experts = [unit for unit in found.units if "experts.*." in unit.name and "shared" not in unit.name]
    assert {len(unit.layers) for unit in experts} == {4}
    assert min(unit.tokens for unit in experts) >= 32 * config.num_experts_per_token  # padding of tiles comes on top
    assert all(switch.finite for switch in found.switches)


def test_only_linear_layers_that_rules_leave_free_are_switched():
    config = DecoderConfig(
        vocab_size=64, dim=64, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=32, ffn_dim=64, tie_embeddings=False
    )
    model = Decoder(config, Kernels.default())
    convert(model, measuring_policy(Policy("bf16_mixed", rules=(Rule("*.up_proj", compute="bf16"),))))
    names = {name.rpartition(".")[2] for name in float8_layers(model)}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"}


def test_weights_that_are_not_finite_tell_nothing(model, batches):
    weight = next(model.parameters())
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(math.nan)
    with pytest.raises(NumericsError, match="finite in FP32"):
        measure(model, batches[:1])
    with torch.no_grad():
        weight.copy_(kept)
    assert {layer.gemms for layer in float8_layers(model).values()} == {TILES}


def test_a_gradient_that_vanished_loses_the_whole_step():
    layer = torch.nn.Linear(4, 4)
    layer(torch.ones(1, 4)).sum().backward()
    tally = GradientTally(layer)
    layer.zero_grad(set_to_none=True)
    assert tally.against(layer).change() == GradientChange(0.0, 0.0, 1.0)
    layer.weight.grad = torch.full((4, 4), math.inf)
    assert not math.isfinite(tally.against(layer).change().lost)


# ---- time ----


@pytest.mark.parametrize(("k", "m"), [(256, 256), (4096, 16384), (320, 864)])
def test_the_estimate_is_expected_gain_for_many_tokens(k, m):
    time = estimate(SearchUnit("up", ("up",), k, m, tokens=10_000_000), micro_batches=8)
    quantise = time.input_row + time.input_column + time.gradient_row + time.gradient_column + time.weight
    gain = sum(time.bf16.values()) / (sum(time.fp8.values()) + quantise)
    assert gain == pytest.approx(expected_gain(k, m), rel=1e-3)


def test_measured_times_are_positive():
    time = measure_times(SearchUnit("up", ("up",), 128, 256, tokens=64), 2, Kernels.default(), torch.device("cpu"))
    assert all(value > 0 for value in (*time.bf16.values(), *time.fp8.values(), time.input_row, time.weight))
    assert min(time.input_column, time.gradient_column) >= 0
