"""From settings to a policy within its limits, over the domains that there are."""

from collections.abc import Mapping, Sequence

from tilewright.core.config.sections.data import MixingSection
from tilewright.core.errors import ConfigError
from tilewright.data.mixing.fixed_weights import Schedule, Static, Temperature
from tilewright.data.mixing.learned_weights import Aioli, Exp3
from tilewright.data.mixing.loss_guard import PplGuard
from tilewright.data.mixing.mixer import Mixer
from tilewright.data.mixing.mixing_policy import MixPolicy
from tilewright.data.mixing.weight_limits import MixLimits

_BY_HELD_OUT = ("ppl_guard", "aioli")


def mixer_of(
    section: MixingSection, base: Mapping[str, float], tokens: Mapping[str, float], held_out: Sequence[str]
) -> Mixer:
    """Choose the mixer of a run by its settings.

    Args:
        section: `[data.mixing]`, with a policy.
        base: weights of the recipe, of all domains.
        tokens: of each domain, or what is in proportion to them.
        held_out: domains that have held-out text.

    Raises:
        ConfigError: one domain, bounds that cannot be met, a stage of unknown domains, or a policy by held-out loss and
            a domain without held-out text.
    """
    if len(base) < 2:
        raise ConfigError(
            "Mixing needs two domains",
            got=f'data.mixing.policy = "{section.policy}", and the one domain {", ".join(base)}',
            need="folders or data.sources with different names",
            try_='data.mixing.policy = "off"',
            where="data.mixing.policy",
        )
    without = [name for name in base if name not in held_out]
    if without and section.policy in _BY_HELD_OUT:
        raise ConfigError(
            f"{section.policy} moves weights by held-out loss, and a domain has no held-out text",
            got=f"none of {', '.join(without)}",
            need="a row or more that is held out, of each domain",
            try_='a larger data.holdout, or data.mixing.policy = "exp3", which goes by training loss',
            where="data.mixing.policy",
        )
    limits = MixLimits(section.lowest, section.highest, section.smoothing, section.max_epochs)
    limits.check(base)
    return Mixer(_policy(section, base, tokens), limits)


def _policy(section: MixingSection, base: Mapping[str, float], tokens: Mapping[str, float]) -> MixPolicy:
    if section.policy == "temperature":
        return Temperature(tokens, section.temperature)
    if section.policy == "schedule":
        # Domains of a folder are known only now; the schema checked those that a recipe lists.
        strangers = sorted({name for stage in section.schedule for name in stage.weights} - set(base))
        if strangers:
            raise ConfigError(
                "Schedule of the mixture has unknown domains",
                got=", ".join(strangers),
                need=f"domains among {', '.join(base)}",
                try_=f"data.mixing.schedule = [{{at = 0.0, weights = {{{next(iter(base))} = 1.0}}}}]",
                where="data.mixing.schedule",
            )
        return Schedule([(stage.at, stage.weights) for stage in section.schedule])
    # These move weights by what they measure during the run.
    if section.policy == "ppl_guard":
        return PplGuard(
            base,
            boost=section.boost,
            patience=section.patience,
            noise=section.noise,
            cooldown=section.cooldown,
            max_ratio=section.max_ratio,
            calm=section.calm,
        )
    if section.policy == "exp3":
        return Exp3(list(base), section.keep)
    if section.policy == "aioli":
        return Aioli(base, tokens, section.probe, section.hold, section.rate)
    return Static()
