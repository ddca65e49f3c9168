"""A policy spelled out for a model: what each part does, whether it can, and the report that says so.

Read `decide_all` first. `convert` carries a plan out.

What of a policy cannot be, or changes nothing, in one model is said before a change is made.
"""

import difflib
import fnmatch
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from tilewright.core.errors import ConfigError, HardwareError, Problem
from tilewright.core.hardware import detect_machine
from tilewright.models.base.own_weights import held_weight
from tilewright.models.base.routers import find_routers
from tilewright.precision.assign.module_kinds import Handling, ModuleSite, Work, find_sites, is_own, multiplies, work_of
from tilewright.precision.float8.frozen_linear import FrozenFloat8Linear
from tilewright.precision.integer.compute_formats import COMPUTE_FORMATS
from tilewright.precision.mixed.autocast import FUNCTIONS
from tilewright.precision.policy.gemm_formats import FORMATS, why_emulated
from tilewright.precision.policy.policy import FUNCTION_OPS, KIND_OPS, FormatDecision, Policy
from tilewright.precision.policy.precision_report import ConversionReport, ModuleRow, Table, fallbacks, worst
from tilewright.precision.policy.rules import KINDS, kinds_of

_Decided = tuple[ModuleSite, FormatDecision]
_EMULATED_KINDS = ("linear", "conv")
_MATRIX_KINDS = ("linear", "conv", "head", "experts", "router", "attention", "other")


@dataclass(frozen=True)
class ConversionPlan:
    """A policy spelled out for a model: a decision for each site."""

    report: ConversionReport
    sites: tuple[tuple[ModuleSite, FormatDecision], ...]
    own: bool
    round_tf32: bool
    """TF32 operands are rounded here, because no TF32 unit does it."""
    switch: str
    """Setting of torch's process-wide switches for FP32 matmuls on CUDA, fp32 or tf32; empty: left alone."""

    def storage(self) -> dict[nn.Parameter, str]:
        """The format that is decided in which each parameter is stored."""
        return {parameter: decision.storage for site, decision in self.sites for parameter in site.parameters()}


def decide_all(model: nn.Module, policy: Policy) -> ConversionPlan:
    """Decide the precision of every part of a model by a policy that names its device. Changes nothing; works on
    meta."""
    own = is_own(model)
    routers = set(find_routers(model))
    sites = find_sites(model, policy.rules, routers=routers)
    kept = kept_fp32(model)
    decided = _tied_alike([(site, _decide(site, policy, kept)) for site in sites])
    formats = {decision.operands for site, decision in decided if site.kind in _MATRIX_KINDS}
    cuda = policy.device_type == "cuda"
    round_tf32 = "tf32" in formats and (not cuda or "fp32" in formats)
    switch = "" if not cuda or not formats & {"fp32", "tf32"} else "fp32" if "fp32" in formats else "tf32"
    possible = tuple((site, _possible(site, decision, policy, round_tf32)) for site, decision in decided)
    work = work_of(model, sites, routers)
    rows = [_row(site, decision, policy, each) for (site, decision), each in zip(possible, work, strict=True)]
    report = ConversionReport(
        policy,
        Table([*rows, *_function_rows(policy, own)]),
        tuple(without_effect(policy, decided, own)),
        (*_switch_notes(switch, round_tf32, cuda), *_work_notes(rows, work, policy)),
    )
    return ConversionPlan(report, possible, own, round_tf32, switch)


def _decide(site: ModuleSite, policy: Policy, kept: dict[nn.Parameter, str]) -> FormatDecision:
    """Decide a part's precision by the policy. Of weights that a transformers model keeps in FP32, only a rule says
    otherwise."""
    decision = policy.decide(site.fqn, site.kind, site.features)
    listed = [parameter for parameter in site.parameters() if parameter in kept]
    if not listed or decision.rule is not None:
        return decision
    weights = [kept[parameter] for parameter in listed if parameter.ndim >= 2]
    if not weights or decision.compute in ("fp32", "tf32"):
        return replace(decision, storage="fp32")
    reason = f'transformers keeps it in FP32 (its _keep_in_fp32_modules_strict names "{weights[0]}")'
    return replace(decision, compute="fp32", storage="fp32", reason=reason, gemms=None)


def _possible(site: ModuleSite, decision: FormatDecision, policy: Policy, round_tf32: bool) -> FormatDecision:
    """Change a decision to one that can be carried out: TF32 without a unit and 8 bits exist for plain linear layers
    only."""
    if decision.to_integers and (lost := _why_not_integers(site, decision.compute)) is not None:
        reason = f"{decision.matmul.upper()}, not {decision.compute}: {lost} ({decision.reason})"
        decision = replace(decision, compute=decision.matmul, matmul="", reason=reason, fallback=True)
    if isinstance(site.module, FrozenFloat8Linear):
        return _frozen(site.module, decision)
    if decision.gemms is not None and site.handling not in (Handling.SWAP, Handling.WEIGHT):
        reason = f"BF16, not {decision.gemms.fprop}: this layer multiplies by code of its own ({decision.reason})"
        decision = replace(decision, compute="bf16", gemms=None, reason=reason, fallback=True)
    elif policy.is_fp8 and decision.rule is None and decision.compute == "bf16" and _is_hidden(site):
        reason = f"BF16, not {policy.mode}: multiplies by weights in code of its own, which cannot be reached into"
        decision = replace(decision, reason=reason, fallback=True)
    if site.handling is Handling.REGION and decision.compute not in ("bf16", "fp16"):
        decision = replace(decision, storage="fp32")  # its own code multiplies its parameters as they are stored
    can_round = site.kind in _EMULATED_KINDS and site.handling is Handling.SWAP
    if decision.compute == "tf32" and round_tf32 and not can_round:
        reason = "FP32, more than asked: TF32 is emulated here, and only in linear layers and convolutions"
        return replace(decision, compute="fp32", reason=reason, fallback=True)
    if decision.compute == "tf32" and round_tf32:
        reason = f"{decision.reason}; emulated in FP32, no TF32 unit is used"
        return replace(decision, reason=reason, fallback=True)
    return decision


def _is_hidden(site: ModuleSite) -> bool:
    """True where a part, of which precision is decided, may do the work of linear layers without being one."""
    return site.handling is Handling.REGION and site.kind in ("attention", "other") and multiplies(site)


def _frozen(module: FrozenFloat8Linear, decision: FormatDecision) -> FormatDecision:
    """The decision on precision for a layer whose weight is FP8 codes and stays so."""
    if decision.gemms is not None:
        module.check_gemms(decision.gemms)
    compute = "fp32" if decision.compute == "tf32" else decision.compute
    return replace(decision, compute=compute, reason=f"{decision.reason}; the weight is frozen, in FP8")


# ---- rules that round weights to integers ----


def _why_not_integers(site: ModuleSite, name: str) -> str | None:
    """Why it is decided that a part's weight cannot be rounded as a rule says; None where it can.

    A row that is no whole number of groups would be exported in another way than it was trained.
    """
    if isinstance(site.module, FrozenFloat8Linear):
        return "its weight is frozen in FP8 and is not trained"
    if site.handling is not Handling.SWAP or not isinstance(site.module, nn.Linear | nn.Embedding):
        return "it multiplies by code of its own"
    if isinstance(site.module, nn.Embedding) and (site.module.max_norm is not None or site.module.sparse):
        return "its rows are renormalised as they are read, or have sparse gradients"
    group, width = COMPUTE_FORMATS[name].group, site.module.weight.shape[1]
    if group and width % group:
        return f"{width} inputs are no multiple of its group of {group}"
    return None


def _tied_alike(decided: Sequence[_Decided]) -> list[_Decided]:
    """Give a weight that several parts share one decision: that of the last rule which rounds it.

    An embedding and a head of one matrix are stored once, so one grid must hold for both.
    """
    by_weight: dict[Tensor | None, list[_Decided]] = {}
    for site, decision in decided:
        if decision.to_integers and isinstance(site.module, nn.Linear | nn.Embedding):
            by_weight.setdefault(held_weight(site.module), []).append((site, decision))
    found = []
    for site, decision in decided:
        weight = held_weight(site.module) if isinstance(site.module, nn.Linear | nn.Embedding) else None
        named = by_weight.get(weight, []) if isinstance(weight, nn.Parameter) else []
        if named:
            leader, leading = max(named, key=lambda each: each[1].rule or 0)
            if leading.compute != decision.compute:
                reason = f"one weight with {leader.fqn or 'the model'}, so one grid: {leading.reason}"
                plain = decision.operands if decision.gemms is None else leading.matmul
                decision = replace(
                    decision, compute=leading.compute, reason=reason, rule=leading.rule, gemms=None, matmul=plain
                )
        found.append((site, decision))
    return found


# ---- the report ----


def _row(site: ModuleSite, decision: FormatDecision, policy: Policy, work: Work) -> ModuleRow:
    reason = f"{site.remark}: {decision.reason}" if site.remark else decision.reason
    own = site.handling is Handling.OWN
    output = "-" if site.handling is Handling.REGION and policy.stream != policy.activation else decision.output
    storage = "fp8" if isinstance(site.module, FrozenFloat8Linear) else decision.storage
    shown = (site.fqn, site.kind, decision.compute, storage, output, reason)
    return ModuleRow(*shown, not own, decision.gemms, decision.fallback, work.flops, decision.matmul)


def _function_rows(policy: Policy, own: bool) -> list[ModuleRow]:
    """Rows of the decision for what is called as a function, not held as a module."""
    loss = ModuleRow("(loss)", "cross_entropy", "fp32", "-", "fp32", "softmax and loss in FP32 in every mode")
    if own:
        return [replace(loss, set_by_policy=False)]
    rest = "sums, softmax and element-wise functions follow torch's autocast lists"
    reason = f"matmuls called as functions; {rest}" if policy.activation != "fp32" else "no autocast in an FP32 stream"
    rows = [ModuleRow("(functions)", "matmul, attention", policy.activation, "-", policy.activation, reason)]
    for name in sorted(fp32_functions(policy)):
        rows.append(ModuleRow("(functions)", name, "fp32", "-", policy.activation, "fp32_ops names it"))
    return [*rows, loss]


def fp32_functions(policy: Policy) -> frozenset[str]:
    """Functions of which it is decided that the policy's `fp32_ops` mean, of 16-bit modes; FP32 tensors need no
    help."""
    names = {*policy.function_ops(), *(kind for op in policy.fp32_ops for kind in KIND_OPS.get(op, ()))}
    return frozenset(names & set(FUNCTIONS)) if policy.activation != "fp32" else frozenset()


def _switch_notes(switch: str, round_tf32: bool, cuda: bool) -> Iterator[str]:
    if switch:
        yield f"torch's process-wide switches for FP32 matmuls on CUDA (matmul and cuDNN) are set to {switch.upper()}"
    if round_tf32 and cuda:
        yield "some matmuls stay FP32, so the process-wide TF32 switch cannot be on: TF32 is emulated by rounding"


def _work_notes(rows: list[ModuleRow], work: list[Work], policy: Policy) -> Iterator[str]:
    lost = [row for row in rows if row.fallback and row.work]
    if lost and policy.is_fp8:
        head, _, names = worst(lost, rows).partition(": ")
        yield f"{head} {'are' if len(lost) > 1 else 'is'} not in {policy.mode}: {names}"
    unknown = [row.fqn for row, each in zip(rows, work, strict=True) if not each.known]
    if unknown:
        yield (
            f"how many experts a token has is not known: {len(unknown)} weights count in the matmul work as if every "
            f"token went to all of them, the first is {unknown[0]}"
        )


Decided = Sequence[tuple[ModuleSite, FormatDecision]]

_OWN_FP32 = ("softmax", "log_softmax", "cross_entropy", "silu")
"""Functions that tilewright's own operations compute in FP32 in every mode."""


def check_rules_kept(policy: Policy, decided: Decided) -> None:
    """Check rules that were decided on: one that matches no module is a misspelt name: the run would continue without
    what was asked for.

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
    """Check a strict policy's decisions: nothing may be emulated or run in another format.

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
    """List rules and `fp32_ops` of a policy that change nothing in this model, each with the reason."""
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


def kept_fp32(model: nn.Module) -> dict[nn.Parameter, str]:
    """The parameters that `_keep_in_fp32_modules_strict` of a model, or of a part of one, keeps in FP32, and the
    pattern of each.

    transformers loads these in FP32 also where a model is asked for in 16 bits. (`_keep_in_fp32_modules` is about the
    range of FP16, which is the loss scale's affair.)

    Example:
        >>> model = nn.ModuleDict({"gate": nn.Linear(2, 2, bias=False), "up": nn.Linear(2, 2, bias=False)})
        >>> model._keep_in_fp32_modules_strict = ["gate.weight"]
        >>> list(kept_fp32(model).values())
        ['gate.weight']
    """
    found: dict[nn.Parameter, str] = {}
    for part in model.modules():
        for pattern in sorted(vars(part).get("_keep_in_fp32_modules_strict") or ()):
            expression = re.compile(pattern.replace("*", ".*"))
            found |= {value: pattern for name, value in part.named_parameters() if expression.search(name)}
    return found
