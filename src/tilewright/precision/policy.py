"""Which number format each part of a model computes in, and why: a mode, then exceptions to it.

Decisions only, in plain words and without torch; `convert` carries them out. A policy is a value: it can be compared,
stored and printed. Later rules win over earlier ones, rules win over `fp32_ops`, and both win over the mode.
"""

import difflib
import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from tilewright.core.errors import ConfigError

MODES = ("fp32", "tf32", "bf16_mixed", "hybrid", "pure_fp16")
FORMATS = ("fp32", "tf32", "bf16", "fp16")
KINDS = ("linear", "conv", "embedding", "norm", "batch_norm", "attention", "head", "router")
"""Kinds of module a rule can name. `head` is also `linear`, `batch_norm` is also `norm`."""

ALWAYS_FP32 = {
    "norm": "mean and variance in FP32 in every mode; the result takes the input's dtype",
    "batch_norm": "batch and running statistics in FP32 in every mode; the result takes the input's dtype",
    "router": "the choice of experts is a comparison of close numbers: FP32 in every mode",
}

KIND_OPS = {
    "linear": ("linear",),
    "conv": ("conv",),
    "embedding": ("embedding",),
    "attention": ("attention",),
    "head": ("head",),
    "router": ("router",),
    "norm": ("norm",),
    "layer_norm": ("norm",),
    "rms_norm": ("norm",),
    "group_norm": ("norm",),
    "batch_norm": ("batch_norm",),
}
"""Entries of `fp32_ops` that stand for modules, and the kinds they mean."""

FUNCTION_OPS = ("softmax", "log_softmax", "cross_entropy", "silu", "gelu", "matmul", "sum", "mean")
"""Entries of `fp32_ops` that stand for functions called inside a forward."""

FP32_OPS = tuple(sorted({*KIND_OPS, *FUNCTION_OPS}))


@dataclass(frozen=True)
class Rule:
    """An exception: modules whose name matches the glob `match` and whose kind is `op` compute in `compute`.

    Raises:
        ConfigError: an unknown kind or format, or another format than FP32 for a kind that is always FP32.
    """

    match: str = "*"
    op: str = "*"
    compute: str = "fp32"

    def __post_init__(self) -> None:
        _known("precision.rules.op", self.op, ("*", *KINDS))
        _known("precision.rules.compute", self.compute, FORMATS)
        if self.op in ALWAYS_FP32 and self.compute != "fp32":
            raise ConfigError(
                f"{self.op} cannot compute in {self.compute}.",
                got=str(self),
                need=f"fp32: {ALWAYS_FP32[self.op]}",
                try_="leave the rule out",
                where="precision.rules",
            )

    def __str__(self) -> str:
        return f'match = "{self.match}" op = "{self.op}" compute = "{self.compute}"'

    def matches(self, fqn: str, kinds: Iterable[str]) -> bool:
        """True where this rule speaks about the module."""
        return (self.op == "*" or self.op in kinds) and fnmatch.fnmatchcase(fqn, self.match)


class RuleFields(Protocol):
    """A rule as the recipe has it."""

    @property
    def match(self) -> str: ...

    @property
    def op(self) -> str: ...

    @property
    def compute(self) -> str: ...


class SectionFields(Protocol):
    """The fields of the recipe's `[precision]` section that make a policy (`core.config.PrecisionSection`)."""

    @property
    def enabled(self) -> bool: ...

    @property
    def mode(self) -> str: ...

    @property
    def rules(self) -> tuple[RuleFields, ...]: ...

    @property
    def fp32_ops(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class Decision:
    """What one module does: the format it computes in, that of its parameters, that of its result, and why.

    An `output` of "input" means the format that came in.
    `rule` is the index of the rule that decided, None where none did.
    """

    compute: str
    storage: str
    output: str
    reason: str
    rule: int | None = None


@dataclass(frozen=True)
class Policy:
    """A mode and its exceptions.

    Args:
        mode: fp32 | tf32 (FP32 with TF32 products) | bf16_mixed (BF16 products and residual stream) | hybrid (16-bit
            products; FP32 residual stream, norms, softmax and loss) | pure_fp16 (FP16 parameters and activations).
            Sums are accumulated in FP32 and masters are FP32 in all of them.
        rules: exceptions by name and kind, later ones win.
        fp32_ops: operations kept in FP32: `layer_norm`, `softmax`, ... (all names: `FP32_OPS`).
        device_type: "cpu" or "cuda". Empty: that of the model at conversion.
        parameters: format that parameters are kept in, for all but norms and routers. Empty: that of the mode (FP16
            for pure_fp16, else FP32). "bf16" is for an optimizer that updates BF16 weights by stochastic rounding.

    Raises:
        ConfigError: an unknown mode or operation, with the nearest known one.

    Example:
        >>> policy = Policy("bf16_mixed", rules=(Rule("*.down_proj", compute="fp32"),), device_type="cpu")
        >>> policy.decide("layers.0.up_proj", "linear").compute, policy.decide("layers.0.down_proj", "linear").compute
        ('bf16', 'fp32')
    """

    mode: str = "bf16_mixed"
    rules: tuple[Rule, ...] = ()
    fp32_ops: tuple[str, ...] = ()
    device_type: str = ""
    parameters: str = ""

    def __post_init__(self) -> None:
        _known("precision.mode", self.mode, MODES)
        for op in self.fp32_ops:
            _known("precision.fp32_ops", op, FP32_OPS)
        if self.parameters:
            _known("parameters", self.parameters, ("fp32", "bf16", "fp16"))

    @classmethod
    def from_section(cls, section: SectionFields, device_type: str, *, parameters: str = "") -> "Policy":
        """The policy of a recipe's `[precision]` section. `enabled = false` is FP32 everywhere, without rules.

        Args:
            section: `core.config.PrecisionSection`.
            device_type: "cpu" or "cuda".
            parameters: "bf16" where `optim.master = "stochastic"`.
        """
        if not section.enabled:
            return cls("fp32", device_type=device_type, parameters=parameters)
        rules = tuple(Rule(rule.match, rule.op, rule.compute) for rule in section.rules)
        return cls(section.mode, rules, tuple(section.fp32_ops), device_type, parameters)

    def on(self, device_type: str) -> "Policy":
        """This policy for a device, unless it already names one."""
        return self if self.device_type else replace(self, device_type=device_type)

    def in_mode(self, mode: str) -> "Policy":
        """The same exceptions in another mode."""
        return replace(self, mode=mode)

    @property
    def product(self) -> str:
        """Format of matrix products without exceptions."""
        if self.mode == "hybrid":
            return "fp16" if self.device_type == "cuda" else "bf16"
        return {"fp32": "fp32", "tf32": "tf32", "bf16_mixed": "bf16", "pure_fp16": "fp16"}[self.mode]

    @property
    def stream(self) -> str:
        """Format of the residual stream: what embeddings return and norms receive."""
        return {"bf16_mixed": "bf16", "pure_fp16": "fp16"}.get(self.mode, "fp32")

    @property
    def storage(self) -> str:
        """Format of the parameters, but for norms and routers, which are FP32."""
        return self.parameters or ("fp16" if self.mode == "pure_fp16" else "fp32")

    @property
    def activation(self) -> str:
        """Format that products hand on."""
        return self.product if self.product in ("bf16", "fp16") else "fp32"

    def function_ops(self) -> tuple[str, ...]:
        """Entries of `fp32_ops` that mean functions called in a forward, not modules."""
        return tuple(op for op in self.fp32_ops if op in FUNCTION_OPS)

    def decide(self, fqn: str, kind: str) -> Decision:
        """What the module `fqn` of kind `kind` (one of `KINDS`, or `other`) does.

        Raises:
            ConfigError: the policy names no device yet (see `on`).
        """
        if not self.device_type:
            raise ConfigError("The policy names no device.", need='Policy(..., device_type="cpu") or policy.on("cpu")')
        kinds = kinds_of(kind)
        if kind in ALWAYS_FP32:
            return Decision("fp32", "fp32", "fp32" if kind == "router" else "input", ALWAYS_FP32[kind])
        decision = self._by_mode(kind)
        named = [op for op in self.fp32_ops if set(KIND_OPS.get(op, ())) & set(kinds)]
        if named:
            decision = replace(decision, compute="fp32", reason=f'fp32_ops names "{named[-1]}"')
        for index, rule in enumerate(self.rules):
            if rule.matches(fqn, kinds):
                decision = replace(decision, compute=rule.compute, reason=f"rule {index + 1}: {rule}", rule=index)
        if kind == "head":
            decision = replace(decision, output="fp32" if decision.compute == "tf32" else decision.compute)
        if decision.compute == "fp16" and self.device_type == "cpu" and kind != "embedding":
            decision = replace(decision, reason=decision.reason + "; slow on CPUs: no matrix unit for FP16")
        return decision

    def _by_mode(self, kind: str) -> Decision:
        if kind == "embedding":
            return Decision(self.stream, self.storage, self.stream, _EMBEDDING[self.stream])
        return Decision(self.product, self.storage, self.activation, self._product_reason())

    def _product_reason(self) -> str:
        if self.mode == "hybrid" and self.device_type == "cuda":
            return "hybrid: product in FP16 with FP32 accumulation; gradients need loss scaling"
        if self.mode == "hybrid":
            return "hybrid: product in 16 bit with FP32 accumulation; BF16, as CPU matrix units (AMX) take no FP16"
        return {
            "fp32": "fp32: everything in FP32",
            "tf32": "tf32: operands rounded to 10 mantissa bits, FP32 accumulation",
            "bf16_mixed": "bf16_mixed: product in BF16 with FP32 accumulation, FP32 master weights",
            "pure_fp16": "pure_fp16: FP16 parameters and activations; gradients need loss scaling",
        }[self.mode]


_EMBEDDING = {
    "fp32": "a look-up multiplies nothing: FP32 rows start an FP32 residual stream",
    "bf16": "a look-up multiplies nothing: its rows are rounded to the BF16 residual stream",
    "fp16": "a look-up multiplies nothing: its rows start the FP16 residual stream",
}


def kinds_of(kind: str) -> tuple[str, ...]:
    """All kinds that a module of this kind counts as in rules.

    Example:
        >>> kinds_of("head"), kinds_of("conv")
        (('head', 'linear'), ('conv',))
    """
    return {"head": ("head", "linear"), "batch_norm": ("batch_norm", "norm")}.get(kind, (kind,))


def as_policy(policy: "Policy | str") -> Policy:
    """A policy from itself or from the name of a mode."""
    return Policy(policy) if isinstance(policy, str) else policy


def _known(what: str, value: str, known: tuple[str, ...]) -> None:
    if value in known:
        return
    close = difflib.get_close_matches(value, known, n=1, cutoff=0.5)
    raise ConfigError(
        f"{what}: {value!r} is not known.",
        got=repr(value),
        need=", ".join(known),
        try_=f'"{close[0]}"' if close else f'"{known[0]}"',
        where="precision",
    )
