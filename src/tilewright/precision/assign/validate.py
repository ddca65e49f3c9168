"""What of a policy cannot be, or changes nothing, in one model; said before a change is made."""

import difflib
import fnmatch
from collections.abc import Iterator, Sequence

from tilewright.core.errors import ConfigError, HardwareError, Problem
from tilewright.core.hardware import detect_machine
from tilewright.precision.assign.module_kinds import ModuleSite
from tilewright.precision.mixed.autocast import FUNCTIONS
from tilewright.precision.policy.gemm_formats import FORMATS, why_emulated
from tilewright.precision.policy.policy import FUNCTION_OPS, KIND_OPS, FormatDecision, Policy
from tilewright.precision.policy.report import ConversionReport, fallbacks, worst
from tilewright.precision.policy.rules import KINDS, kinds_of

Decided = Sequence[tuple[ModuleSite, FormatDecision]]

_OWN_FP32 = ("softmax", "log_softmax", "cross_entropy", "silu")
"""Functions that tilewright's own operations compute in FP32 in every mode."""


def check_rules_kept(policy: Policy, decided: Decided) -> None:
    """A rule that matches no module is a misspelt name: the run would continue without what was asked for.

    Raises:
        ConfigError: all such rules, each with names near to its pattern.
    """
    sites = [site for site, _ in decided]
    names = sorted({part for site in sites for part in (site.fqn, site.fqn.rpartition(".")[2])})
    kinds = sorted({kind for site in sites for kind in kinds_of(site.kind)} & set(KINDS))
    problems = []
    for index, rule in enumerate(policy.rules):
        if any(rule.matches(site.fqn, kinds_of(site.kind)) for site in sites):
            continue
        named = [site.fqn for site in sites if fnmatch.fnmatchcase(site.fqn, rule.match)]
        close = difflib.get_close_matches(rule.match.strip("*."), names, n=3, cutoff=0.5)
        problems.append(
            Problem(
                f"precision.rules: rule {index + 1} matches no module",
                got=str(rule),
                need=f"op one of {', '.join(kinds)}" if named else f"near names: {', '.join(close) or 'none'}",
                try_=f'match = "*{close[0]}"'
                if close and not named
                else "tilewright.explain, which lists every module",
                where="precision.rules",
            )
        )
    if problems:
        raise ConfigError.from_problems(problems)


def check_no_fallbacks(report: ConversionReport, decided: Decided) -> None:
    """For a strict policy: nothing may be emulated or run in another format.

    Raises:
        HardwareError: all that would be, at once, the parts with the most work first.
    """
    machine, problems = detect_machine(report.policy.device_type), []
    for form in FORMATS:
        layers = [site.fqn for site, d in decided if d.gemms and form.name in d.gemms.names]
        if layers and (reason := why_emulated(form, machine)):
            problems.append(_fallback(f"{len(layers)} layers in {form}, the first is {layers[0]}", reason))
    for reason, rows in fallbacks(report.rows).items():
        problems.append(_fallback(worst(rows, report.rows), reason))
    if problems:
        raise HardwareError.from_problems(problems)


def _fallback(what: str, reason: str) -> Problem:
    return Problem(
        f"{what}: format is not available, and precision.strict is set",
        got=reason,
        need="a machine, a module or a format in which it runs as it says",
        try_="precision.strict = false, another precision.mode, or a rule that names the format these shall have",
        where="precision",
    )


def without_effect(policy: Policy, decided: Decided, own: bool) -> Iterator[str]:
    """Rules and `fp32_ops` that change nothing in this model, each with the reason."""
    for index, rule in enumerate(policy.rules):
        matched = [(site, d) for site, d in decided if rule.matches(site.fqn, kinds_of(site.kind))]
        if not matched:
            yield f"rule {index + 1}: {rule} matches no module"
        elif not rule.sets_formats:
            continue
        elif all(d.rule is None for _, d in matched) and rule.compute != "fp32":
            yield f"rule {index + 1}: {rule} matches no module that can compute so"
        elif all(d.rule != index for _, d in matched if d.rule is not None) and rule.compute != "fp32":
            yield f"rule {index + 1}: {rule} is overruled by later rules wherever it matches"
    kinds = {kind for site, _ in decided for kind in kinds_of(site.kind)}
    for op in policy.fp32_ops:
        if op in FUNCTION_OPS and own and op not in _OWN_FP32:
            yield f'fp32_ops "{op}": the fused operations of tilewright\'s models do not expose it'
        elif op in KIND_OPS and not kinds & set(KIND_OPS[op]) and (own or not set(KIND_OPS[op]) & set(FUNCTIONS)):
            yield f'fp32_ops "{op}": the model has no such module'
