"""Which cuts are tried: against all combinations by hand, for generated costs."""

import itertools
import math

import pytest
import torch

from tilewright.compress.budget.budget_rise import in_words, rises_of, rounded, ruling
from tilewright.compress.budget.compress_settings import CompressSettings
from tilewright.compress.budget.cut_candidates import FACTORS, CutPlan, by_halves, cut_plans
from tilewright.compress.budget.held_out_rise import RowLosses
from tilewright.compress.budget.sensitivity import CutCost
from tilewright.core.errors import ConfigError


def drawn_costs():
    """Three kinds, each with a few numbers of units; some cuts make the loss better."""
    found = []
    for kind, many in (("ffn", 4), ("heads", 2), ("layers", 3)):
        rises = (torch.rand(many) * 0.3 - 0.02).sort().values.tolist()
        saved = torch.randint(1, 1000, (many,)).sort().values.tolist()
        for i in range(many):
            speed = 1 - float(torch.rand(())) / 4
            found.append(CutCost(kind, (i + 1) / 8, 100 - i, 100, rises[i], 0.001, saved[i], speed))
    return found


@pytest.mark.parametrize("goal", ["bytes", "latency"])
@pytest.mark.parametrize("turn", range(10))
def test_each_plan_is_the_best_within_its_limit(goal, turn):
    costs, budget = drawn_costs(), 0.01
    plans = cut_plans(costs, budget, goal)
    won = lambda chosen: sum(cut.saved if goal == "bytes" else 1 - cut.speed for cut in chosen)  # noqa: E731
    by_kind = [[None, *(cut for cut in costs if cut.kind == kind)] for kind in ("ffn", "heads", "layers")]
    every = [tuple(filter(None, combination)) for combination in itertools.product(*by_kind)]
    expected = []
    for factor in FACTORS:
        within = [c for c in every if sum(max(cut.rise, 0) for cut in c) <= factor * budget]
        best = max(map(won, within))
        if best > 0 and (not expected or not math.isclose(expected[-1], best)):
            expected.append(best)
    assert [won(plan.cuts) for plan in plans] == pytest.approx(expected)


@pytest.mark.parametrize("turn", range(10))
def test_the_time_of_cuts_together_is_that_of_their_parts(turn):
    """A model whose layers take a, b and c in FFN, heads and the rest, whose embedding and head take d: what cuts of
    each alone were seen to save gives the time of all together, whatever is left of each."""
    ffn, heads, rest, ends = torch.rand(4).tolist()
    before = {"ffn": 512, "heads": 12, "layers": 8}
    left = {kind: int(torch.randint(1, count, ())) for kind, count in before.items()}

    def time(kept):
        inside = ffn * kept.get("ffn", 512) / 512 + heads * kept.get("heads", 12) / 12 + rest
        return kept.get("layers", 8) * inside + 8 * ends

    def cost(kind):
        return CutCost(kind, 0.5, left[kind], before[kind], 0.0, 0.0, 1, time({kind: left[kind]}) / time({}))

    for kinds in itertools.chain.from_iterable(itertools.combinations(left, size) for size in (1, 2, 3)):
        predicted = CutPlan(tuple(cost(kind) for kind in kinds)).speed
        assert predicted == pytest.approx(time({kind: left[kind] for kind in kinds}) / time({}), rel=1e-9)


@pytest.mark.parametrize("tries", [1, 2, 3])
@pytest.mark.parametrize("count", range(7))
def test_halves_find_the_largest_cut_inside(count, tries):
    """Six plans take three tries; with fewer the largest of those that were tried, if one is inside."""
    plans = [CutPlan((CutCost("ffn", 0.0, 32 * i, 256, 0.0, 0.0, 0, 1.0),)) for i in range(1, count + 1)]
    for first in range(count + 1):  # the first one that is inside
        tried = []
        found = by_halves(
            plans, tries, lambda plan, first=first, tried=tried: tried.append(plan) or plan in plans[first:]
        )
        assert len(tried) == len({plan.name for plan in tried}) <= tries
        inside = [plan for plan in plans[first:] if plan in tried]
        assert found is (inside[0] if inside else None)
        if tries == 3:
            assert found is (plans[first] if first < count else None)


def test_no_cut_within_the_widest_limit_is_no_plan():
    assert cut_plans([CutCost("ffn", 0.5, 32, 64, 0.5, 0.0, 10, 0.9)], 0.01, "bytes") == []
    assert cut_plans([], 0.01, "bytes") == [], "a model without anything to cut"


def test_rise_and_error_are_those_of_rows():
    before = {"a": (torch.tensor([10.0, 30.0, 20.0]), torch.tensor([5.0, 10.0, 5.0])), "b": (torch.tensor([8.0]),) * 2}
    after = {"a": (torch.tensor([11.0, 30.0, 22.0]), before["a"][1]), "b": (torch.tensor([8.0]),) * 2}
    rise, error = RowLosses(after).rise_over(RowLosses(before))
    differences = torch.tensor([1.0, 0.0, 2.0, 0.0])
    assert rise == pytest.approx(3 / 68)
    assert error == pytest.approx(float(differences.std()) * 2 / 68)


@pytest.mark.parametrize(
    ("budget", "targets", "kinds", "match"),
    [
        ("0%", "fp8", "ffn", "not above zero"),
        ("-1%", "fp8", "ffn", "not above zero"),
        ("1", "fp8", "ffn", "not a percentage"),
        ("nan%", "fp8", "ffn", "not a percentage"),
        ("1%", "int9", "ffn", "No such export target"),
        ("1%", "", "ffn", "No such export target"),
        ("1%", "fp8", "neurons", "No such kind of unit"),
        ("1%", "fp8", " , ", "No such kind of unit"),
    ],
)
def test_bad_words_are_refused_before_anything_is_loaded(budget, targets, kinds, match):
    with pytest.raises(ConfigError, match=match) as error:
        CompressSettings.of(budget, targets, kinds)
    assert all((problem.got and problem.need and problem.try_) for problem in error.value.problems)
    assert {problem.where for problem in error.value.problems} <= {"--budget", "--targets", "--cut"}


def test_short_names_of_targets():
    found = CompressSettings.of("1%", "int8,edge4,fp8", "heads,ffn")
    assert [target.name for target in found.targets] == ["fp8", "gguf-q4_0", "onnx-int8"]
    assert found.kinds == ("ffn", "heads")


def drawn_losses(scale):
    counts = torch.full((6,), 10.0)
    return RowLosses({"a": (scale * (20 + torch.rand(6)), counts), "b": (scale * (30 + torch.rand(6)), counts)})


@pytest.mark.parametrize("turn", range(20))
def test_the_budget_is_over_the_better_of_the_run_and_the_run_trained_further(turn):
    """A run that was still learning makes each cut look free beside what it was; one that further steps spoil makes
    it look free beside those."""
    whole, equal, cut = (drawn_losses(0.9 + 0.2 * float(torch.rand(()))) for _ in range(3))
    row = rises_of(cut, whole, equal)
    assert ruling(row) == pytest.approx(cut.loss / min(whole.loss, equal.loss) - 1, abs=1e-6)
    assert row["equal_rise"] == pytest.approx((1 + row["rise"]) / (1 + rises_of(equal, whole, None)["rise"]) - 1)
    artefact = rounded(row, 1.0, 1.01)
    assert ruling(artefact) == pytest.approx(1.01 * (1 + ruling(row)) - 1)
    assert "with as many more steps" in in_words(row)
    alone = rises_of(cut, whole, None)
    assert ruling(alone) == alone["rise"]
    assert ruling(rounded(alone, 1.0, 1.01)) == pytest.approx(1.01 * cut.loss / whole.loss - 1, abs=1e-6)
