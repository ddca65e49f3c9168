"""A policy spelled out for a model: what each part does, whether it can, and the report that says so.

Read `decide_all` first. `convert` carries a plan out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from tilewright.models.base.own_weights import held_weight
from tilewright.models.base.routers import find_routers
from tilewright.models.hf.keep_fp32 import kept_fp32
from tilewright.precision.assign.module_kinds import Handling, ModuleSite, find_sites, is_own
from tilewright.precision.assign.validate import without_effect
from tilewright.precision.assign.work import Work, multiplies, work_of
from tilewright.precision.float8.frozen_linear import FrozenFloat8Linear
from tilewright.precision.integer.compute_formats import COMPUTE_FORMATS
from tilewright.precision.mixed.autocast import FUNCTIONS
from tilewright.precision.policy.policy import KIND_OPS, FormatDecision, Policy
from tilewright.precision.policy.report import ConversionReport, ModuleRow, Table, worst

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
    """What torch's process-wide switches for FP32 matmuls on CUDA are set to, fp32 or tf32; empty: left alone."""


def decide_all(model: nn.Module, policy: Policy) -> ConversionPlan:
    """What every part of a model does under a policy that names its device. Changes nothing; works on meta."""
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
    """What the policy says. Of weights that a transformers model keeps in FP32, only a rule says otherwise."""
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
    """The decision as it can be carried out: TF32 without a unit and 8 bits exist for plain linear layers only."""
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
    """Whether a part may do the work of linear layers without being one."""
    return site.handling is Handling.REGION and site.kind in ("attention", "other") and multiplies(site)


def _frozen(module: FrozenFloat8Linear, decision: FormatDecision) -> FormatDecision:
    """The decision for a layer whose weight is FP8 codes and stays so."""
    if decision.gemms is not None:
        module.check_gemms(decision.gemms)
    compute = "fp32" if decision.compute == "tf32" else decision.compute
    return replace(decision, compute=compute, reason=f"{decision.reason}; the weight is frozen, in FP8")


# ---- rules that round weights to integers ----


def _why_not_integers(site: ModuleSite, name: str) -> str | None:
    """Why a part's weight cannot be rounded as a rule says; None where it can.

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
    """One decision for a weight that several parts share: that of the last rule which rounds it.

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
    """Rows for what is called as a function, not held as a module."""
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
    """Functions that the policy's `fp32_ops` mean, of 16-bit modes; FP32 tensors need no help."""
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
