"""A searched policy as a recipe that a person reads and edits: TOML, few rules, the measured numbers as comments.

The file extends the searched recipe, so `tilewright train policy.toml` trains it. Layers that differ by their number
alone share a rule where they can; the rules are checked against `policy` to mean what was chosen. Called by
`training.precision_search`.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilewright.core.config.toml import toml_text
from tilewright.precision.policy.gemm_formats import GEMM_NAMES, Gemms
from tilewright.precision.policy.policy import Policy, Rule

FP8 = Gemms.all("fp8_tile")
_RULE_FIELDS = ("match", "op", "kind", "compute", *GEMM_NAMES)


@dataclass(frozen=True)
class PolicyFile:
    """Contents of the file.

    Args:
        extends: the recipe that was searched, as the file names it.
        intro: lines of comment at the top.
        settings: settings given on the search's command line, by section, which make the job what it was.
        precision: those of the precision section.
        kept: the recipe's own rules.
        formats: chosen formats by unit.
        remarks: what was measured of each unit, a line each.
        clear_start_mode: the recipe begins in another mode, which the policy replaces.
    """

    extends: str
    intro: Sequence[str]
    settings: Mapping[str, Mapping[str, object]]
    precision: Mapping[str, object]
    kept: Sequence[Rule]
    formats: Mapping[str, Gemms]
    remarks: Mapping[str, str]
    clear_start_mode: bool = False

    def __str__(self) -> str:
        lines = [f"# {line}".rstrip() for line in self.intro]
        lines += [f"extends = {toml_text(self.extends)}", ""]
        for section, values in self.settings.items():
            lines += [f"[{section}]", *(f"{name} = {toml_text(value)}" for name, value in values.items()), ""]
        lines += ["[precision]", 'mode = "fp8_tile"       # what no rule below names is in FP8 tiles']
        lines += ["bf16_grad_layers = []   # the search has decided about attention output projections too"]
        lines += ["fp8_min_gain = 0.0      # and about layers too small to gain"]
        lines += [f"{name} = {toml_text(value)}" for name, value in self.precision.items()]
        if self.clear_start_mode:
            lines += ['start_mode = "none"']
        for rule in self.kept:
            lines += ["", "[[precision.rules]]         # from the recipe", *_fields(rule)]
        rules = fold(self.formats, self.kept)
        shown: set[str] = set()
        for rule in rules:
            named = [name for name in self.formats if Rule(rule.match, compute="bf16").matches(name, ("linear",))]
            lines += ["", *self._remarks([name for name in named if name not in shown])]
            shown |= set(named)
            lines += ["[[precision.rules]]", *_fields(rule)]
        rest = self._remarks([name for name in self.formats if name not in shown])
        if rest:
            lines += ["", "# In FP8 tiles throughout, without a rule:", *rest]
        return "\n".join(lines) + "\n"

    def _remarks(self, names: Sequence[str]) -> list[str]:
        width = max((len(name) for name in names), default=0)
        return [f"# {name:<{width}}  {self.remarks[name]}" for name in names if name in self.remarks]


def fold(formats: Mapping[str, Gemms], kept: Sequence[Rule] = ()) -> list[Rule]:
    """The fewest rules of simple kinds that give these formats in mode fp8_tile: by like name first, then one by one.

    Args:
        formats: by the layers' names.
        kept: rules that come before.

    Example:
        >>> bf16, tiles = Gemms.all("bf16"), Gemms.all("fp8_tile")
        >>> for rule in fold({"layers.0.up": bf16, "layers.1.up": bf16, "layers.0.down": tiles, "layers.1.down": bf16}):
        ...     print(rule)
        match = "layers.*.up" compute = "bf16"
        match = "layers.1.down" compute = "bf16"
    """
    families: dict[str, list[str]] = {}
    for name in formats:
        families.setdefault(re.sub(r"(?<![^.])\d+(?![^.])", "*", name), []).append(name)
    rules: list[Rule] = []
    for pattern, names in families.items():
        common, count = Counter(formats[name] for name in names).most_common(1)[0]
        if len(names) > 1 and count > len(names) / 2 and common != FP8:
            rules.append(_rule(pattern, common))
    for name, gemms in formats.items():
        if _decided(name, (*kept, *rules)) != gemms:
            rules.append(_rule(name, gemms))
    rules.sort(key=lambda rule: rule.match in formats)  # wide ones first: later rules win
    wrong = [name for name, gemms in formats.items() if _decided(name, (*kept, *rules)) != gemms]
    return rules if not wrong else [_rule(name, gemms) for name, gemms in formats.items()]


def _rule(match: str, gemms: Gemms) -> Rule:
    if gemms.uniform:
        return Rule(match, compute=gemms.fprop.name)
    return Rule(match, **dict(zip(GEMM_NAMES, gemms.names, strict=True)))


def _decided(name: str, rules: Sequence[Rule]) -> Gemms:
    """Formats of a linear layer under these rules of a policy file in mode fp8_tile."""
    policy = Policy("fp8_tile", tuple(rules), device_type="cpu", bf16_grad_layers=(), fp8_min_gain=0.0)
    decision = policy.decide(name, "linear")
    return decision.gemms or Gemms.all(decision.compute)


def _fields(rule: Rule) -> list[str]:
    values = {name: getattr(rule, name) for name in _RULE_FIELDS}
    return [f"{name} = {toml_text(value)}" for name, value in values.items() if value and (name, value) != ("op", "*")]
