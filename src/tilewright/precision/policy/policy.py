"""Which number format each part of a model computes in, and why: a mode, then exceptions to it.

Decisions only; `convert` carries them out. A policy is a value: it can be compared,
stored and printed. Later rules win over earlier ones, rules win over `fp32_ops`, and both win over the mode.
"""

import fnmatch
from dataclasses import dataclass, replace

from tilewright.core.config.sections.precision import PrecisionSection
from tilewright.core.errors import ConfigError
from tilewright.precision.policy.gemm_formats import GEMM_FORMATS, SCALED_FORMATS, Gemms, expected_gain, named_format
from tilewright.precision.policy.rules import (
    ALWAYS_FP32,
    FP8_KINDS,
    INTEGER_FORMATS,
    INTEGER_KINDS,
    Rule,
    kinds_of,
    known_or_raise,
    rule_error,
)

MODES = ("fp32", "tf32", "bf16_mixed", "hybrid", "pure_fp16", *SCALED_FORMATS)
KEEPS = ("qdata", "value")
DECOUPLED = ("*.o_proj", "*.out_proj", "*attn.c_proj", "*attention.output.dense")
"""Names of attention output projections, whose gradients the FP8 modes compute in BF16 ("precision decoupling")."""
KIND_OPS = {
    "linear": ("linear",),
    "conv": ("conv",),
    "embedding": ("embedding",),
    "attention": ("attention",),
    "head": ("head",),
    "experts": ("experts",),
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
class FormatDecision:
    """The precision of one module: the format it computes in, that of its parameters, that of its result, and why.

    An `output` of "input" means the format that came in.
    `rule` is the index of the rule that decided, None where none did.
    `gemms` says it for each matmul of a linear layer, where they differ or have 8-bit operands; else None.
    """

    compute: str
    storage: str
    output: str
    reason: str
    rule: int | None = None
    gemms: Gemms | None = None
    fallback: bool = False
    """True where the module does not do what the policy asked for."""
    matmul: str = ""
    """Where `compute` is one of `INTEGER_FORMATS`: the format that the rounded values are multiplied in."""

    @property
    def operands(self) -> str:
        """Format that the policy decides for storing a matmul's operands."""
        return self.matmul or self.compute

    @property
    def to_integers(self) -> bool:
        """True where the policy decides that the weight is rounded to integers."""
        return self.compute in INTEGER_FORMATS


@dataclass(frozen=True)
class Policy:
    """A mode and its exceptions.

    Args:
        mode: fp32 | tf32 (FP32 with TF32 matmuls) | bf16_mixed (BF16 matmuls and residual stream) | hybrid (16-bit
            matmuls; FP32 residual stream, norms, softmax and loss) | pure_fp16 (FP16 parameters and activations) |
            fp8_tile and the others of `gemm_formats.FORMATS` (bf16_mixed with the matmuls of linear layers in 8 or 4
            bits; embedding, head, norms, router and softmax as in bf16_mixed).
            Sums are accumulated in FP32 and masters are FP32 in all of them.
        rules: exceptions by name and kind, later ones win.
        fp32_ops: operations kept in FP32: `layer_norm`, `softmax`, ... (all names: `FP32_OPS`).
        device_type: "cpu" or "cuda". Empty: that of the model at conversion.
        parameters: format that parameters are kept in, for all but norms and routers. Empty: that of the mode (FP16
            for pure_fp16, else FP32). "bf16" is for an optimizer that updates BF16 weights by stochastic rounding.
        power_of_two: scales of 8-bit operands are powers of two, which keeps them exact in BF16; else FP32.
        fp8_min_gain: on a GPU, linear layers whose `expected_gain` is below this stay in BF16 in the FP8 modes.
        bf16_grad_layers: globs of linear layers whose gradients the FP8 modes compute in BF16.
        strict: `convert` refuses what would run in another way than the policy says: emulated, or in another format.
        keep: what layers with 8-bit matmuls keep of their input for backward. "qdata": its 8-bit copy, where the
            weight's gradient is in 8 bits, which it then stays. "value": the input itself, so that all three matmuls
            may move between formats at run time.

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
    power_of_two: bool = True
    fp8_min_gain: float = 1.0
    bf16_grad_layers: tuple[str, ...] = DECOUPLED
    strict: bool = False
    keep: str = "qdata"

    def __post_init__(self) -> None:
        known_or_raise("precision.mode", self.mode, MODES)
        known_or_raise("keep", self.keep, KEEPS)
        for op in self.fp32_ops:
            known_or_raise("precision.fp32_ops", op, FP32_OPS)
        if self.parameters:
            known_or_raise("parameters", self.parameters, ("fp32", "bf16", "fp16"))

    @classmethod
    def from_section(cls, section: PrecisionSection, device_type: str, *, parameters: str = "") -> "Policy":
        """The precision policy of a recipe's `[precision]` section. `enabled = false` is FP32 everywhere, without
        rules.

        Args:
            section: of a recipe.
            device_type: "cpu" or "cuda".
            parameters: "bf16" where `optim.master_weights` is not "fp32".
        """
        if not section.enabled:
            return cls("fp32", device_type=device_type, parameters=parameters)
        rules = tuple(Rule(**rule.model_dump()) for rule in section.rules)
        return cls(
            section.mode,
            rules,
            tuple(section.fp32_ops),
            device_type,
            parameters,
            power_of_two=section.fp8_scale == "power_of_two",
            fp8_min_gain=section.fp8_min_gain,
            bf16_grad_layers=tuple(section.bf16_grad_layers),
            strict=section.strict,
            keep="value" if section.moves_matmuls else "qdata",
        )

    def on(self, device_type: str) -> "Policy":
        """This precision policy for a device, unless it already names one."""
        return self if self.device_type else replace(self, device_type=device_type)

    def in_mode(self, mode: str) -> "Policy":
        """This precision policy's exceptions in another mode."""
        return replace(self, mode=mode)

    @property
    def matmul(self) -> str:
        """The policy's format of matmuls without exceptions, 8-bit ones apart."""
        if self.mode == "hybrid":
            return "fp16" if self.device_type == "cuda" else "bf16"
        if self.is_fp8:
            return "bf16"
        return {"fp32": "fp32", "tf32": "tf32", "bf16_mixed": "bf16", "pure_fp16": "fp16"}[self.mode]

    @property
    def is_fp8(self) -> bool:
        """True for a policy's modes in which linear layers have operands of 8 or 4 bits with scales."""
        return self.mode in SCALED_FORMATS

    @property
    def rounds_to_integers(self) -> bool:
        """True where a rule of the policy asks for integers."""
        return any(rule.compute in INTEGER_FORMATS for rule in self.rules)

    @property
    def stream(self) -> str:
        """The format of the residual stream: what embeddings return and norms receive."""
        if self.is_fp8:
            return "bf16"
        return {"bf16_mixed": "bf16", "pure_fp16": "fp16"}.get(self.mode, "fp32")

    @property
    def storage(self) -> str:
        """The policy's format of stored parameters, but for norms and routers, which are FP32."""
        return self.parameters or ("fp16" if self.mode == "pure_fp16" else "fp32")

    @property
    def activation(self) -> str:
        """The policy's format of activations that matmuls hand on."""
        return self.matmul if self.matmul in ("bf16", "fp16") else "fp32"

    def function_ops(self) -> tuple[str, ...]:
        """Entries of the policy's `fp32_ops` that mean functions called in a forward, not modules."""
        return tuple(op for op in self.fp32_ops if op in FUNCTION_OPS)

    def decide(self, fqn: str, kind: str, features: tuple[int, int] | None = None) -> FormatDecision:
        """Decide by the policy the precision of the module `fqn` of kind `kind` (one of `KINDS`, or `other`).

        Args:
            fqn: the module's name.
            kind: what it is.
            features: in and out features of a linear layer; None where they are not known or there are none.

        Raises:
            ConfigError: the policy names no device yet (see `on`).
        """
        if not self.device_type:
            raise ConfigError("Policy without a device", need='Policy(..., device_type="cpu") or policy.on("cpu")')
        kinds = kinds_of(kind)
        if kind in ALWAYS_FP32:
            return FormatDecision("fp32", "fp32", "fp32" if kind == "router" else "input", ALWAYS_FP32[kind])
        decision = self._by_mode(fqn, kind, features)
        named = [op for op in self.fp32_ops if set(KIND_OPS.get(op, ())) & set(kinds)]
        if named:
            decision = replace(decision, compute="fp32", reason=f'fp32_ops names "{named[-1]}"', gemms=None)
        for index, rule in enumerate(self.rules):
            if rule.sets_formats and rule.matches(fqn, kinds):
                decision = _follow(rule, index, decision, kind, self.stream if kind == "embedding" else self.matmul)
        if kind == "head":
            name = decision.gemms.fprop.name if decision.gemms else decision.operands
            wide = {"tf32": "fp32"} | dict.fromkeys(SCALED_FORMATS, "bf16")
            decision = replace(decision, output=wide.get(name, name))
        if decision.compute == "fp16" and self.device_type == "cpu" and kind != "embedding":
            decision = replace(decision, reason=decision.reason + "; slow on CPUs: no matrix unit for FP16")
        return decision

    def _by_mode(self, fqn: str, kind: str, features: tuple[int, int] | None) -> FormatDecision:
        if kind == "embedding":
            return FormatDecision(self.stream, self.storage, self.stream, _EMBEDDING[self.stream])
        if not self.is_fp8:
            return FormatDecision(self.matmul, self.storage, self.activation, self._matmul_reason())
        if kind not in ("linear", "experts"):
            reason = f"{self.mode}: linear layers only, without the head; the rest in BF16 with FP32 accumulation"
            return FormatDecision("bf16", self.storage, "bf16", reason)
        gain = expected_gain(*features) if features else 0.0
        form = named_format(self.mode)
        faster = form.operands is not None and form.operands.input.is_fp8  # the others are emulated, and never are
        if features and self.device_type == "cuda" and faster and gain < self.fp8_min_gain:
            reason = (
                f"{self.mode}: too small, {features[0]} -> {features[1]} features are expected to run "
                f"{gain:.2f}x as fast as in BF16, and fp8_min_gain is {self.fp8_min_gain:g}"
            )
            return FormatDecision("bf16", self.storage, "bf16", reason)
        gemms, reason = Gemms.all(form), f"{self.mode}: {form.reason}"
        if any(fnmatch.fnmatchcase(fqn, pattern) for pattern in self.bf16_grad_layers):
            gemms = gemms.changed({"dgrad": "bf16", "wgrad": "bf16"})
            reason += "; gradients in BF16: attention output projections are sensitive (precision.bf16_grad_layers)"
        return FormatDecision(str(gemms), self.storage, "bf16", reason, gemms=gemms)

    def _matmul_reason(self) -> str:
        if self.mode == "hybrid" and self.device_type == "cuda":
            return "hybrid: matmul in FP16 with FP32 accumulation; gradients need loss scaling"
        if self.mode == "hybrid":
            return "hybrid: matmul in 16 bit with FP32 accumulation; BF16, as CPU matrix units (AMX) take no FP16"
        return {
            "fp32": "fp32: everything in FP32",
            "tf32": "tf32: operands rounded to 10 mantissa bits, FP32 accumulation",
            "bf16_mixed": "bf16_mixed: matmul in BF16 with FP32 accumulation, FP32 master weights",
            "pure_fp16": "pure_fp16: FP16 parameters and activations; gradients need loss scaling",
        }[self.mode]


_EMBEDDING = {
    "fp32": "a look-up multiplies nothing: FP32 rows start an FP32 residual stream",
    "bf16": "a look-up multiplies nothing: its rows are rounded to the BF16 residual stream",
    "fp16": "a look-up multiplies nothing: its rows start the FP16 residual stream",
}


def _follow(rule: Rule, index: int, decision: FormatDecision, kind: str, plain: str) -> FormatDecision:
    """Apply a matching rule of the policy to a decision. `plain`: the format that the mode computes in, 8 bits
    apart."""
    if rule.compute in INTEGER_FORMATS:
        if kind not in INTEGER_KINDS:
            return decision
        how = "looked up" if kind == "embedding" else f"multiplied in {plain.upper()}"
        reason = f"rule {index + 1}: {rule}; rounded to integers and {how}, so training is not faster"
        return replace(decision, compute=rule.compute, reason=reason, rule=index, gemms=None, matmul=plain)
    if kind not in FP8_KINDS and (rule.compute in SCALED_FORMATS or not rule.compute):
        return decision
    reason = f"rule {index + 1}: {rule}"
    gemms = Gemms.all(rule.compute) if rule.compute in SCALED_FORMATS else None if rule.compute else decision.gemms
    if rule.gemms:
        gemms = (gemms or _all_gemms(rule.compute or decision.compute, rule)).changed(rule.gemms)
        gemms = None if gemms.uniform and not gemms.any_scaled else gemms
    compute = str(gemms) if gemms else (rule.gemms.get("fprop") or rule.compute or decision.compute)
    return replace(decision, compute=compute, reason=reason, rule=index, gemms=gemms, matmul="")


def in_fp32(policy: Policy) -> Policy:
    """Change a policy to FP32, with the parts that it rounds to integers: a model is evaluated in it, and exported from
    it."""
    rounds = policy.rounds_to_integers
    rules = tuple(_widened(rule) for rule in policy.rules if rule.kind or (rounds and rule.sets_formats))
    return Policy("fp32", rules, device_type=policy.device_type)


def _widened(rule: Rule) -> Rule:
    compute = rule.compute if rule.compute in INTEGER_FORMATS else "fp32" if rule.sets_formats else ""
    return replace(rule, compute=compute, fprop="", dgrad="", wgrad="")


def as_policy(policy: "Policy | str") -> Policy:
    """A policy from itself or from the name of a mode."""
    return Policy(policy) if isinstance(policy, str) else policy


def _all_gemms(compute: str, rule: Rule) -> Gemms:
    if compute not in GEMM_FORMATS:
        raise rule_error(
            f"Single matmuls cannot be set in a layer that computes in {compute}.", rule, ", ".join(GEMM_FORMATS)
        )
    return Gemms.all(compute)
