"""Each setting of `[data.mixing]` reaches its rule: with another value, other answers to the same evaluations."""

import math

import pytest

from tilewright.core.config.recipe import Recipe
from tilewright.core.config.sections.data import MixingSection, MixingStage
from tilewright.core.config.unused_settings import without_effect
from tilewright.core.errors import ConfigError
from tilewright.data.mixing.choose_mixer import mixer_of
from tilewright.data.mixing.mixing_policy import DomainSeen, MixEvaluation, shares

BASE = {"code": 3.0, "docs": 2.0, "mail": 1.0}
TOKENS = {"code": 25e6, "docs": 4e6, "mail": 1e6}
STAGES = (MixingStage(at=0.0, weights={"code": 1.0}), MixingStage(at=0.5, weights={"docs": 1.0, "mail": 1.0}))
OTHER = {
    "temperature": ("temperature", 9.0),
    "schedule": ("schedule", STAGES[1:]),
    "boost": ("ppl_guard", 1.5),
    "patience": ("ppl_guard", 6),
    "noise": ("ppl_guard", 90.0),
    "cooldown": ("ppl_guard", 60),
    "max_ratio": ("ppl_guard", 1.2),
    "calm": ("ppl_guard", 60),
    "keep": ("exp3", 0.1),
    "probe": ("aioli", 0.95),
    "hold": ("aioli", 2),
    "rate": ("aioli", 3.0),
    "lowest": ("exp3", 0.3),
    "highest": ("exp3", 0.35),
    "smoothing": ("exp3", 0.7),
    "max_epochs": ("exp3", 0.5),
}


def answers(section):
    """To losses that wave a little, of which one climbs in the middle and stands then."""
    mixer, weights, found = mixer_of(section, BASE, TOKENS, list(BASE)), shares(BASE), []
    for t in range(120):
        climb = 0.4 * min(max(0, t - 30), 20)
        losses = [3 + 0.01 * math.sin(7 * t + i) + climb * (i == 2) - 0.002 * t * i for i in range(3)]
        seen = {name: DomainSeen(loss, loss, t / 100 / BASE[name]) for name, loss in zip(BASE, losses, strict=True)}
        told = mixer.decide(MixEvaluation(t, 120, weights, seen))
        weights = told.weights or weights
        found.append(weights)
    return found


@pytest.mark.parametrize("field", OTHER)
def test_a_setting_of_mixing_reaches_its_rule(field):
    policy, value = OTHER[field]
    given = {"policy": policy, "schedule": STAGES if policy == "schedule" else ()}
    usual, other = answers(MixingSection(**given)), answers(MixingSection(**given | {field: value}))
    assert usual != other
    assert any(weights != shares(BASE) for weights in usual)


def test_each_field_is_proven_and_void_where_another_policy_is_chosen():
    fields = set(MixingSection.model_fields)
    assert fields - set(OTHER) == {"policy", "interval", "eval_batches"}
    for policy in ("off", "static", "temperature", "schedule", "ppl_guard", "exp3", "aioli"):
        mixing = {"policy": policy, "schedule": STAGES if policy == "schedule" else ()}
        void = without_effect(Recipe.model_validate({"data": {"mixing": mixing}}))
        own = {
            name for name, (of, _) in OTHER.items() if of == policy and name not in ("lowest", "highest", "smoothing")
        }
        for name in sorted(fields - {"policy"}):
            limits = name in ("interval", "eval_batches", "lowest", "highest", "smoothing", "max_epochs")
            assert (f"data.mixing.{name}" in void) == (policy == "off" or not (limits or name in own)), name


@pytest.mark.parametrize(
    ("section", "base", "held_out", "what"),
    [
        ({"policy": "static"}, {"code": 1.0}, ["code"], "needs two domains"),
        ({"policy": "ppl_guard"}, BASE, ["code", "docs"], "no held-out text"),
        ({"policy": "aioli"}, BASE, [], "no held-out text"),
        ({"policy": "exp3", "lowest": 0.4}, BASE, [], "Bounds of the mixture"),
        ({"policy": "schedule", "schedule": (MixingStage(at=0, weights={"x": 1}),)}, BASE, [], "unknown domains"),
    ],
)
def test_what_cannot_be_mixed(section, base, held_out, what):
    with pytest.raises(ConfigError, match=what) as caught:
        mixer_of(MixingSection(**section), base, TOKENS, held_out)
    problem = caught.value.problems[0]
    assert all((problem.got, problem.need, problem.try_, problem.where))
