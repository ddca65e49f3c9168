"""The integer program against all combinations by hand, for generated options."""

import itertools
import random

import pytest

from tilewright.compress.search.choose_shapes import Option, best_shapes, nearest_shape, uniform_shapes, within
from tilewright.compress.search.library.layer_parts import PartPlace
from tilewright.compress.search.search_settings import MEASURES, LayerSearchSettings
from tilewright.core.errors import ConfigError


def drawn_options(seed, layers=2):
    """Of each part its own, two smaller ones and none; some smaller ones lower the loss."""
    draw = random.Random(seed)
    found = []
    for layer, part in itertools.product(range(layers), ("attention", "ffn")):
        for number, name in enumerate(("own", "half", "quarter", "none")):
            costs = {measure: (1.0, 0.6, 0.3, 0.0)[number] * draw.uniform(0.8, 1.2) for measure in MEASURES}
            rise = 0.0 if name == "own" else draw.uniform(-0.01, 0.05) * number
            found.append(Option(PartPlace(layer, part), name, rise, costs))
    return found


REST = dict.fromkeys(MEASURES, 0.5)


def every_shape(options):
    of_place = {}
    for option in options:
        of_place.setdefault(option.place, []).append(option)
    return [c for c in itertools.product(*of_place.values()) if any(o.attends for o in c)]


def rise(chosen):
    return sum(option.rise for option in chosen)


def holds(chosen, limits):
    return all(REST[m] + sum(o.costs[m] for o in chosen) <= limit + 1e-9 for m, limit in limits.items())


@pytest.mark.parametrize("seed", range(12))
def test_the_best_shapes_within_limits(seed):
    """Each is the best of those that differ from all before it."""
    options = drawn_options(seed)
    limits = {"token": random.Random(seed).uniform(1.2, 4), "cache": 3.0}
    distance = 1 + seed % 2
    found = best_shapes(options, REST, limits, 3, distance)
    rest = [chosen for chosen in every_shape(options) if holds(chosen, limits)]
    for shape in found:
        assert shape.rise == pytest.approx(min(map(rise, rest)), abs=1e-9)
        assert holds(shape.options, limits)
        assert within(shape, REST, {name: limit + 1e-9 for name, limit in limits.items()})
        rest = [c for c in rest if sum(a != b for a, b in zip(c, shape.options, strict=True)) >= distance]
    assert len(found) == 3 or not rest


@pytest.mark.parametrize("seed", range(6))
def test_where_no_shape_is_within_limits_the_nearest_is_named(seed):
    options = drawn_options(seed)
    limits = {"token": 0.6, "parameters": 0.7}
    assert best_shapes(options, REST, limits, 3, 1) == []
    shape, shares = nearest_shape(options, REST, limits)
    over = lambda chosen: sum(  # noqa: E731
        max(0.0, (REST[m] + sum(o.costs[m] for o in chosen)) / limit - 1) for m, limit in limits.items()
    )
    assert over(shape.options) == pytest.approx(min(map(over, every_shape(options))), abs=1e-6)
    assert sum(max(0.0, share - 1) for share in shares.values()) == pytest.approx(over(shape.options))


def test_uniform_shapes_are_alike_in_all_layers():
    options = drawn_options(0, layers=3)
    odd = [o for o in options if not (o.place.layer == 2 and o.name == "quarter")]
    for given, number in ((options, 12), (odd, 6)):
        shapes = uniform_shapes(given)
        assert len(shapes) == number
        for shape in shapes:
            assert len(shape.options) == 6
            for part in ("attention", "ffn"):
                assert len({o.name for o in shape.options if o.place.part == part}) == 1


@pytest.mark.parametrize(
    ("limits", "kinds", "match"),
    [
        ("", "ffn", "Limit is not"),
        ("token", "ffn", "Limit is not"),
        ("token=0%", "ffn", "Limit is not"),
        ("token=101%", "ffn", "Limit is not"),
        ("token=nan%", "ffn", "Limit is not"),
        ("token=0.9", "ffn", "Limit is not"),
        ("token=90%,token=80%", "ffn", "Limit is not"),
        ("speed=90%", "ffn", "Limit is not"),
        ("token=90%", "", "No such kind of replacement"),
        ("token=90%", "experts", "No such kind of replacement"),
    ],
)
def test_bad_words_are_refused_before_anything_is_loaded(limits, kinds, match):
    with pytest.raises(ConfigError, match=match) as error:
        LayerSearchSettings.of(limits, kinds)
    assert all((problem.got and problem.need and problem.try_) for problem in error.value.problems)
