"""Exceptions of a policy, by name and kind, and the names that they are written with. Without torch."""

import difflib
import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass

from tilewright.core.errors import ConfigError
from tilewright.precision.policy.gemm_formats import GEMM_FORMATS, GEMM_NAMES, SCALED_FORMATS

INTEGER_FORMATS = ("int8", "int4", "int4_a8")
"""Formats of quantisation-aware training: weights are rounded to integers and back, the matmul itself runs in the
mode's format. int8: a scale per output channel, inputs rounded to INT8 per token too. int4: a scale per 32 weights.
int4_a8: the same with inputs rounded as for int8."""
FORMATS = ("fp32", "tf32", "bf16", "fp16", *SCALED_FORMATS, *INTEGER_FORMATS)
FP8_KINDS = ("linear", "head", "experts")
"""Kinds of module that can compute in 8 bits."""
INTEGER_KINDS = (*FP8_KINDS, "embedding")
"""Kinds of module that can be rounded to integers; an embedding has no input to round."""
KINDS = ("linear", "conv", "embedding", "norm", "batch_norm", "attention", "head", "experts", "router")
"""Kinds of module a rule can mean. `head` and `experts` (stacked) are also `linear`, `batch_norm` is also `norm`."""
GIVEN_KINDS = ("linear", "head", "router")
"""Kinds that a rule can give to a module, where its structure does not tell or tells wrong."""

ALWAYS_FP32 = {
    "norm": "mean and variance in FP32 in every mode; the result takes the input's dtype",
    "batch_norm": "batch and running statistics in FP32 in every mode; the result takes the input's dtype",
    "router": "the choice of experts is a comparison of close numbers: FP32 in every mode",
}


@dataclass(frozen=True)
class Rule:
    """A precision rule: modules whose name matches the glob `match` and whose kind is `op` compute in `compute`.

    Args:
        match: glob on the module's name.
        op: kind of module, or "*".
        compute: format, one of `FORMATS`. Empty: as it was decided before this rule.
        fprop: format of a linear layer's forward matmul alone, one of `GEMM_FORMATS`. Empty: as `compute` says.
        dgrad: the same for the matmul that gives the input's gradient.
        wgrad: the same for the matmul that gives the weight's gradient.
        kind: what the matched modules are, one of `GIVEN_KINDS`, before formats are decided: names a router that was
            not found as one ("router"), or un-names one ("linear"). Empty: as their structure tells.

    Raises:
        ConfigError: an unknown kind or format, another format than FP32 for a kind that is always FP32, or a rule
            that says nothing.

    Example:
        >>> print(Rule("*.o_proj", dgrad="bf16", wgrad="bf16"))
        match = "*.o_proj" dgrad = "bf16" wgrad = "bf16"
    """

    match: str = "*"
    op: str = "*"
    compute: str = ""
    fprop: str = ""
    dgrad: str = ""
    wgrad: str = ""
    kind: str = ""

    def __post_init__(self) -> None:
        # 1. Names.
        known_or_raise("precision.rules.op", self.op, ("*", *KINDS))
        known_or_raise("precision.rules.kind", self.kind, ("", *GIVEN_KINDS))
        known_or_raise("precision.rules.compute", self.compute, ("", *FORMATS))
        for name in GEMM_NAMES:
            known_or_raise(f"precision.rules.{name}", getattr(self, name), ("", *GEMM_FORMATS))
        # 2. A rule that would change nothing, or pick by what it sets.
        if not self.sets_formats and not self.kind:
            raise rule_error("A rule names no format.", self, "compute, one of fprop, dgrad, wgrad, or kind")
        if self.kind and self.op != "*":
            raise rule_error("A rule gives a kind to modules that it picks by kind.", self, "match, and no op")
        # 3. Formats that a kind does not have.
        fixed = self.kind if self.kind in ALWAYS_FP32 and self.sets_formats else self.op
        if fixed in ALWAYS_FP32 and (self.compute != "fp32" or self.gemms):
            raise rule_error(f"{fixed} cannot compute in anything but FP32.", self, f"fp32: {ALWAYS_FP32[fixed]}")
        if self.op not in ("*", *FP8_KINDS) and (self.compute in SCALED_FORMATS or self.gemms):
            raise rule_error(
                f"{self.op} has no matmul that can be set so.",
                self,
                "8-bit formats and fprop, dgrad, wgrad for linear layers only",
            )
        if self.op not in ("*", *INTEGER_KINDS) and self.compute in INTEGER_FORMATS:
            raise rule_error(
                f"{self.op} has no weight that can be rounded to integers.",
                self,
                f"op one of {', '.join(INTEGER_KINDS)}",
            )
        if self.compute in INTEGER_FORMATS and self.gemms:
            raise rule_error(
                f"Single matmuls cannot be set beside {self.compute}.",
                self,
                f"{self.compute} alone: its matmuls run in the mode's format",
            )

    @property
    def gemms(self) -> dict[str, str]:
        """Formats of single matmuls that the rule names."""
        return {name: value for name in GEMM_NAMES if (value := getattr(self, name))}

    @property
    def sets_formats(self) -> bool:
        """True where the rule names a format, not only a kind."""
        return bool(self.compute or self.gemms)

    def __str__(self) -> str:
        op = self.op if self.op != "*" else ""
        parts = {"match": self.match, "op": op, "kind": self.kind, "compute": self.compute, **self.gemms}
        return " ".join(f'{name} = "{value}"' for name, value in parts.items() if value)

    def matches(self, fqn: str, kinds: Iterable[str]) -> bool:
        """True where this precision rule speaks about the module."""
        return (self.op == "*" or self.op in kinds) and fnmatch.fnmatchcase(fqn, self.match)


def kinds_of(kind: str) -> tuple[str, ...]:
    """All kinds that a module of this kind counts as in rules.

    Example:
        >>> kinds_of("head"), kinds_of("conv")
        (('head', 'linear'), ('conv',))
    """
    also = {"head": ("head", "linear"), "experts": ("experts", "linear"), "batch_norm": ("batch_norm", "norm")}
    return also.get(kind, (kind,))


def rule_error(what: str, rule: Rule, need: str) -> ConfigError:
    return ConfigError(what, got=str(rule), need=need, try_="leave the rule out", where="precision.rules")


def known_or_raise(what: str, value: str, known: tuple[str, ...]) -> None:
    if value in known:
        return
    close = difflib.get_close_matches(value, known, n=1, cutoff=0.5)
    raise ConfigError(
        f"{what}: unknown value {value!r}",
        got=repr(value),
        need=", ".join(known),
        try_=f'"{close[0]}"' if close else f'"{known[0]}"',
        where="precision",
    )
