"""Carry a policy out on a model, in place: `convert` once, then `set_mode` and `evaluating` switch it.

torch's layers change class (see `cast`), so parameters, names, hooks, optimizer and state_dict stay what they were.
What is not a layer of torch's runs in a region (see `autocast`). Nothing happens that the report does not list. Read
`convert` first, then `_apply`; what each part does is decided in `decide`.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized

from tilewright.core.errors import ConfigError
from tilewright.core.hardware import detect_machine
from tilewright.formats.spec import SPECS
from tilewright.models.base.eval_mode import evaluation
from tilewright.ops.attention import ATTENTION, IN_CPP
from tilewright.ops.backends.native.wide import widens
from tilewright.ops.base.dispatch import Case, choose
from tilewright.ops.kernels import Kernels
from tilewright.precision.assign.conversion_plan import (
    ConversionPlan,
    check_no_fallbacks,
    check_rules_kept,
    decide_all,
    fp32_functions,
)
from tilewright.precision.assign.gather_dtype import settle
from tilewright.precision.assign.module_kinds import Handling, ModuleSite
from tilewright.precision.float8.linear import Float8Linear
from tilewright.precision.float8.share_inputs import group_experts, share_inputs
from tilewright.precision.float8.third_party import give_over, tile_weights
from tilewright.precision.integer.compute_formats import COMPUTE_FORMATS, IntegerTrainedEmbedding, IntegerTrainedLinear
from tilewright.precision.mixed.autocast import region_of
from tilewright.precision.mixed.cast_layers import CASTS, Cast, CastEmbedding, CastLinear, become, plain_layer
from tilewright.precision.mixed.derived import parametrizations
from tilewright.precision.mixed.wrapper_errors import WIDE_GRADIENTS, has_wide_gradients, refuse_wrappers
from tilewright.precision.policy.gemm_formats import Gemms
from tilewright.precision.policy.policy import FormatDecision, Policy, as_policy, in_fp32
from tilewright.precision.policy.precision_report import ConversionReport, Table

ModuleT = TypeVar("ModuleT", bound=nn.Module)
_log = logging.getLogger(__name__)


def convert(model: ModuleT, policy: Policy | str = "bf16_mixed", *, kernels: Kernels | None = None) -> ModuleT:
    """Convert a model to compute as a policy says, in place, and return it.

    Parameters, names and state_dict stay what they were, so optimizers and checkpoints keep working. What was
    changed, what was not and why is in `model.precision_report`, a `ConversionReport`; print it.

    Do it before the optimizer is made where the mode stores parameters in 16 bit (pure_fp16), at any time otherwise.

    Args:
        model: any module; its parameters stay the same objects.
        policy: a policy or the name of a mode: fp32, tf32, bf16_mixed, hybrid, pure_fp16, fp8_tile or another of
            `precision.policy.gemm_formats.FORMATS`.
        kernels: implementations of the operations; None takes torch's own linear, and for 8-bit matmuls the best
            for this machine.

    Raises:
        ConfigError: a policy that cannot be, or a rule that matches no module.
        HardwareError: the policy is strict, and something would run in another way than it says.

    Example:
        >>> model = convert(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8)), "bf16_mixed")
        >>> model.precision_report.rows[0].compute, model(torch.ones(1, 4)).dtype, model[0].weight.dtype
        ('bf16', torch.float32, torch.float32)
    """
    plan = decide_all(model, _placed(model, policy))
    check_rules_kept(plan.report.policy, plan.sites)
    if plan.report.policy.strict:
        check_no_fallbacks(plan.report, plan.sites)
    notes = [_store(plan)]
    if has_wide_gradients(model):
        notes.append(WIDE_GRADIENTS)
        refuse_wrappers(model)
    plan = replace(plan, report=replace(plan.report, notes=(*plan.report.notes, *filter(None, notes))))
    _apply(model, plan, kernels)
    cast(Any, model).precision_report = plan.report
    for text in plan.report.unmatched:
        _log.warning("precision: no effect: %s", text)
    for text in plan.report.notes:
        _log.info("precision: %s", text)
    return model


def explain(model: nn.Module, policy: Policy | str) -> Table:
    """Explain the formats that `convert` would give each part of a model, and why. Changes nothing; works on the meta
    device."""
    return decide_all(model, _placed(model, policy)).report.rows


def set_mode(model: nn.Module, policy: Policy | str) -> ConversionReport:
    """Switch a converted model to another policy. The optimizer and its states are not touched.

    Args:
        model: converted before.
        policy: a policy, or a mode, which then keeps the rules of the model's own policy.

    Raises:
        ConfigError: the model is not converted, or its parameters would have to be stored in another format.
    """
    current = _report_of(model).policy
    policy = current.in_mode(policy) if isinstance(policy, str) else policy.on(current.device_type)
    plan = decide_all(model, policy)
    if policy.storage != current.storage:
        raise ConfigError(
            f"Model in {current.mode} cannot switch to {policy.mode}",
            got=f"parameters stored in {current.storage}, which the optimizer holds",
            need=f"parameters in {policy.storage}",
            try_=f'tilewright.convert(model, "{policy.mode}") before the optimizer is made',
        )
    _apply(model, plan)
    cast(Any, model).precision_report = plan.report
    return plan.report


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluate a converted model inside this context: FP32 throughout and `eval()` mode, everything as before outside.
    Gradients are left alone. Weights that are trained for integers are rounded to them here too.

    Matmuls that were moved to other formats at run time (`Float8Linear.set_gemms`) are in these again.

    Raises:
        ConfigError: the model is not converted.
    """
    report = _report_of(model)
    wide = decide_all(model, in_fp32(report.policy))
    narrow = decide_all(model, report.policy)
    moved = [(module, module.gemms) for module in model.modules() if isinstance(module, Float8Linear)]
    switches = (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) if wide.switch else None
    _store(wide)
    _apply(model, wide)
    try:
        with evaluation(model):
            yield
    finally:
        _store(narrow)  # exact: FP16 values went through FP32 and back
        _apply(model, narrow)
        for layer, gemms in moved:
            layer.set_gemms(gemms)
        if switches is not None:
            torch.set_float32_matmul_precision(switches[0])
            torch.backends.cudnn.allow_tf32 = switches[1]


def _report_of(model: nn.Module) -> ConversionReport:
    report = getattr(model, "precision_report", None)
    if report is None:
        raise ConfigError("Model is not converted", need='tilewright.convert(model, "bf16_mixed") first')
    return report


def _placed(model: nn.Module, policy: Policy | str) -> Policy:
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    return as_policy(policy).on("cpu" if device == "meta" else device)


# ---- carrying out ----


def _kernels_of(model: nn.Module) -> Kernels | None:
    """Kernels and policy with which a model's layers were converted before."""
    layers = [module.kernels for module in model.modules() if isinstance(module, CastLinear | Float8Linear)]
    weights = [given.matmuls.kernels for given in tile_weights(model).values()]
    return next((kernels for kernels in (*layers, *weights) if kernels is not None), None)


def _store(plan: ConversionPlan) -> str:
    """Give the parameters of a converted model their storage format; returns a note on the changes. Norm statistics are
    FP32 always.

    Sharded parameters (FSDP2) keep theirs, which whoever gathers them relies on: layers cast what they read.
    """
    count = 0
    for site, decision in plan.sites:
        dtype = SPECS[decision.storage].dtype
        for parameter in site.parameters():
            if parameter.is_floating_point() and parameter.dtype != dtype and not isinstance(parameter, DTensor):
                _store_parameter(parameter, dtype)
                count += 1
        if site.kind in ("norm", "batch_norm"):
            for name, buffer in site.module.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    setattr(site.module, name, buffer.to(torch.float32))
    return f"{count} parameters changed dtype for storage" if count else ""


def _store_parameter(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Change the dtype of a parameter, which stays the same object, as an optimizer may hold it. Its gradient is FP32
    always: in FP16 dividing by the loss scale would lose what the scale had saved."""
    parameter.data = parameter.data.to(dtype)
    grad, parameter.grad = parameter.grad, None
    parameter.grad_dtype = torch.float32
    parameter.grad = None if grad is None else grad.to(torch.float32)


def _apply(model: nn.Module, plan: ConversionPlan, kernels: Kernels | None = None) -> None:
    policy = plan.report.policy
    if kernels is None and any(decision.gemms for _, decision in plan.sites):
        kernels = _kernels_of(model) or Kernels.default()
    for site, decision in plan.sites:
        if site.handling is Handling.SWAP:
            _swap(site.module, decision, plan, kernels)
        elif site.handling is Handling.WEIGHT:
            _set_weight(site, decision, policy, kernels)
        elif site.handling is Handling.SETTING:
            cast(Any, site.module).compute_dtype = SPECS[decision.compute].dtype
        elif site.handling in (Handling.WRAP, Handling.REGION):
            _wrap(site, decision, policy)
    share_inputs(model)
    group_experts(model)
    for module in model.modules():
        if "residual_dtype" in vars(module):
            cast(Any, module).residual_dtype = SPECS[policy.stream].dtype
    if not plan.own:
        _surround(model, policy, plan.sites, kernels or _kernels_of(model))
        _narrow_beside_routers(model, policy, plan.sites)
    if plan.switch:
        # The older interface: torch refuses to read it once the newer one (fp32_precision) has been written.
        torch.set_float32_matmul_precision("high" if plan.switch == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = plan.switch == "tf32"
    settle(model, plan.sites)


def _swap(module: Any, decision: FormatDecision, plan: ConversionPlan, kernels: Kernels | None) -> None:
    if not isinstance(module, Cast):
        become(module, CASTS[plain_layer(module)])
    if isinstance(module, CastLinear | Float8Linear):
        plain = IntegerTrainedLinear if decision.to_integers else CastLinear
        become(module, plain if decision.gemms is None else Float8Linear)
        if kernels is not None:
            module.kernels = kernels
    elif isinstance(module, CastEmbedding):
        become(module, IntegerTrainedEmbedding if decision.to_integers else CastEmbedding)
    if decision.to_integers:
        cast(Any, module).integers = COMPUTE_FORMATS[decision.compute]
    if decision.gemms is not None:
        _set_gemms(module, decision.gemms, plan.report.policy)
        module.output_dtype = SPECS[decision.output].dtype
        return
    compute = decision.operands
    output = compute if decision.output == "input" else decision.output  # norms read their input's dtype
    module.set_formats(compute, output, round_tf32=plan.round_tf32 and compute == "tf32")


def _set_weight(site: ModuleSite, decision: FormatDecision, policy: Policy, kernels: Kernels | None) -> None:
    if site.weight is None:
        raise AssertionError("a site that is a weight names it")
    weight = give_over(site.module)[site.weight.name]
    weight.kernels = kernels or weight.kernels
    if decision.gemms is None:
        weight.set_formats(decision.compute, decision.output)
    else:
        weight.set_gemms(decision.gemms, decision.output, power_of_two=policy.power_of_two)


def _set_gemms(module: Any, gemms: Gemms, policy: Policy) -> None:
    if isinstance(module, Float8Linear):
        module.configure(gemms, power_of_two=policy.power_of_two, keep=policy.keep, strict=policy.strict)
    else:
        module.set_gemms(gemms, power_of_two=policy.power_of_two)


def _wrap(site: ModuleSite, decision: FormatDecision, policy: Policy) -> None:
    """Wrap a module that is not torch's: FP32 tensors and no autocast, or autocast to the 16-bit format.

    A norm returns its input's dtype. What another module returns may be the residual stream (embeddings with positions
    added) or a matmul; it is cast where the two have one format, and else left as it comes.
    """
    region = region_of(site.module, policy.device_type)
    low = decision.compute in ("bf16", "fp16")
    region.autocast = SPECS[decision.compute].dtype if low else None
    region.inputs = None if low else torch.float32
    if site.kind in ("norm", "batch_norm"):
        region.outputs = "input"
    elif site.kind == "router" or policy.stream != policy.activation:
        region.outputs = None
    else:
        region.outputs = SPECS[policy.stream].dtype


def _widens(policy: Policy, kernels: Kernels | None) -> bool:
    """True if the CPU of these kernels, or else of this machine, cannot multiply operands of this mode, so that they
    are widened."""
    dtype = SPECS[policy.activation].dtype
    if kernels is None:
        return widens(policy.device_type, dtype)
    return policy.device_type == kernels.machine.device == "cpu" and not kernels.machine.cpu_multiplies(dtype)


def _attention(policy: Policy, kernels: Kernels | None) -> str | None:
    """The kernel in C++ that attention of a converted model calls; None if it is torch's, or asked to be."""
    case = Case("cpu", torch.bfloat16)
    if policy.device_type != "cpu" or policy.activation != "bf16":
        return None
    if kernels is None:
        name = choose(ATTENTION, detect_machine("cpu"), case).candidate.name
    else:
        found = kernels.choices.get(("attention", case.device_type, case.dtype, case.kind))
        name = "" if found is None else found.candidate.name
    return name if name in IN_CPP else None


def _surround(
    model: nn.Module, policy: Policy, sites: Sequence[tuple[ModuleSite, FormatDecision]], kernels: Kernels | None
) -> None:
    """Surround a converted model by autocast regions: on every module through which a forward may enter, down to the
    repeated layers.

    Functions that run in FP32 need one on each layer too: recomputing a layer in backward enters there, and torch
    restores autocast for it but not this. The modules of `module_kinds` have their formats already, and those whose
    matmuls were given over need no region.
    """
    functions, widened, attention = fp32_functions(policy), _widens(policy, kernels), _attention(policy, kernels)
    decided = {id(site.module) for site, _ in sites}
    needless = {id(site.module) for site, _ in sites if site.handling in (Handling.WEIGHT, Handling.SWAP)}
    computing = parametrizations(model)
    needless |= {
        id(part) for module in model.modules() if is_parametrized(module) for part in _parts_of_weights(module)
    }
    autocast = SPECS[policy.activation].dtype if policy.activation != "fp32" else None
    stacks = [stack for stack in model.modules() if isinstance(stack, nn.ModuleList) and id(stack) not in needless]
    layers = [layer for stack in stacks for layer in stack]
    inside = {id(module) for layer in layers for module in layer.modules()}
    entries = [m for m in model.modules() if id(m) not in inside | needless and _has_children(m)]
    alone = functions or widened or attention is not None
    known = [layer for layer in layers if alone or getattr(layer, "precision_region", None) is not None]
    for module in [*entries, *known]:
        region = region_of(module, policy.device_type)
        region.functions, region.widens, region.attention = functions, widened, attention
        if id(module) not in decided:
            region.autocast = autocast
        if module is model:
            region.outputs = torch.float32
    for parts in computing:  # of weights, in the parameters' own format: the layer casts what comes out
        region_of(parts, policy.device_type).autocast = None


def _parts_of_weights(module: nn.Module) -> Iterator[nn.Module]:
    """The parametrizations of a converted module's weights."""
    return module.get_submodule("parametrizations").modules()


def _narrow_beside_routers(
    model: nn.Module, policy: Policy, sites: Sequence[tuple[ModuleSite, FormatDecision]]
) -> None:
    """Convert the weights that a FP32 router gives to experts with code of their own to the residual stream's format.

    They add matmuls with these weights into tensors made in the format of their input.
    """
    routers = {site.module for site, _ in sites if site.kind == "router"}
    own_code = {site.module for site, _ in sites if site.handling is Handling.REGION and site.kind == "other"}
    narrow = SPECS[policy.stream].dtype if policy.stream == policy.activation else None
    for parent in model.modules():
        if routers.isdisjoint(parent.children()):
            continue
        for child in parent.children():
            if child not in routers and _has_children(child) and not own_code.isdisjoint(child.modules()):
                region = region_of(child, policy.device_type)
                region.inputs, region.autocast = narrow, narrow


def _has_children(module: nn.Module) -> bool:
    return next(module.children(), None) is not None
