"""A record of what each matmul of a model executed: kernel, format, how often, and why where it is a fallback.

Matmuls of `Float8Linear` and of weights that were given over (`third_party`) are counted where they run, by the
operators themselves (`gemm_ops`); of a stack, one for each expert. Other layers are not counted: their rows say
what the conversion set, and that. The counts are in the checkpoint, so a resumed run continues counting.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from tilewright.core.errors import ConfigError, HardwareError, Problem
from tilewright.ops.gemm import UNITS, kind_of
from tilewright.ops.kernels import Kernels
from tilewright.precision.float8.audit_table import AuditRow
from tilewright.precision.float8.frozen_linear import FrozenFloat8Linear
from tilewright.precision.float8.linear import Float8Linear
from tilewright.precision.float8.third_party import Given, counters, tile_weights
from tilewright.precision.mixed.cast_layers import CastLinear
from tilewright.precision.policy.gemm_formats import (
    GEMM_FORMATS,
    GEMM_NAMES,
    GemmFormat,
    named_format,
    of_text,
    why_emulated,
)
from tilewright.precision.policy.precision_report import ConversionReport, ModuleRow

Counts = dict[str, dict[str, dict[str, int]]]
"""Layer -> matmul -> format -> calls."""

Gather = Callable[[Any], Sequence[Any]]
"""Gathers what all ranks say, by rank."""

_PRODUCT_KINDS = ("linear", "head", "conv", "experts", "router", "attention")
"""Kinds of module that multiply matrices."""


class Audit:
    """Matmuls that a converted model has executed since its run began.

    Args:
        model: converted.
        others: gives what each of the ranks that hold other layers of the model says, with what this one says among it:
            what is asked of the audit is of all of them then, and all of them ask. None: the model is whole here.

    Raises:
        ConfigError: the model is not converted.

    Example:
        >>> from tilewright.precision.convert import convert
        >>> model = nn.Sequential(nn.Linear(8, 8))
        >>> model = convert(model, "fp8_tile")
        >>> model(torch.ones(4, 8)).sum().backward()
        >>> [(row.layer, row.gemm, row.format, row.calls) for row in Audit(model).rows()]
        [('0', 'fprop', 'fp8_tile', 1), ('0', 'dgrad', 'fp8_tile', 0), ('0', 'wgrad', 'fp8_tile', 1)]
    """

    def __init__(self, model: nn.Module, others: Gather | None = None) -> None:
        if getattr(model, "precision_report", None) is None:
            raise ConfigError("Model is not converted", need='tilewright.convert(model, "fp8_tile") first')
        self._model, self._others = model, others
        self._before: Counts = {}

    @property
    def _report(self) -> ConversionReport:
        return cast(ConversionReport, self._model.precision_report)

    def rows(self) -> list[AuditRow]:
        """Rows of an audit, one per layer, matmul and format that ran; the present format also if it has not run
        yet."""
        names = {row.fqn: None for row in self._report.rows}
        found = self._own_rows()
        for of_rank in [] if self._others is None else self._others(found):
            names |= dict.fromkeys(of_rank)
            for fqn, rows in of_rank.items():  # a tied end is held twice, and runs on one rank
                if fqn not in found or _ran(rows) > _ran(found[fqn]):
                    found[fqn] = rows
        return [row for fqn in names for row in found.get(fqn, [])]

    def _own_rows(self) -> dict[str, list[AuditRow]]:
        """An audit's rows of this rank's modules, by their names."""
        modules = dict(self._model.named_modules())
        weights = tile_weights(self._model)
        counts = self._own_counts()
        found: dict[str, list[AuditRow]] = {}
        for row in self._report.rows:
            module, ran = modules.get(row.fqn), counts.get(row.fqn, {})
            if row.fqn in weights:
                found[row.fqn] = list(_given_over(row, weights[row.fqn], ran))
                continue
            if module is None and self._others is not None:
                continue
            rows = list(_counted(row.fqn, module, ran))
            if isinstance(module, FrozenFloat8Linear):
                rows += _frozen(row, module)
            elif not isinstance(module, Float8Linear) and (row.op in _PRODUCT_KINDS or row.fallback):
                rows.append(_uncounted(row, module))
            found[row.fqn] = rows
        return found

    def counts(self) -> Counts:
        """Count the audited calls so far, those before a resume included; formats that never ran are left out."""
        own = self._own_counts()
        for of_rank in [] if self._others is None else self._others(own):
            for fqn, ran in of_rank.items():
                if fqn not in own or _total(ran) > _total(own[fqn]):
                    own[fqn] = ran
        return own

    def _own_counts(self) -> Counts:
        found: Counts = {}
        for fqn, module in self._model.named_modules():
            if isinstance(module, nn.Linear) and "counts" in vars(module):  # also of a layer in another mode now
                found[fqn] = Float8Linear.executed(cast(Float8Linear, module))
        found |= {name: given.matmuls.executed() for name, given in tile_weights(self._model).items()}
        return {
            fqn: {gemm: _added(self._before.get(fqn, {}).get(gemm, {}), ran[gemm]) for gemm in GEMM_NAMES}
            for fqn, ran in found.items()
        }

    def check_no_fallbacks(self) -> None:
        """Check by the audit that no matmul fell back to another format, for strict runs.

        Raises:
            HardwareError: something ran in another way than the policy says; all such matmuls, by reason.
        """
        reasons: dict[str, list[AuditRow]] = {}
        for row in self.rows():
            if row.fallback and row.calls != 0:
                reasons.setdefault(row.fallback, []).append(row)
        if reasons:
            raise HardwareError.from_problems([_refused(reason, rows) for reason, rows in reasons.items()])

    def to_json(self, step: int) -> dict[str, Any]:
        """The audit as plain data, for audit.json."""
        report = self._report
        rows = [row.to_json() for row in self.rows()]
        return {"step": step, "mode": report.policy.mode, "strict": report.policy.strict, "rows": rows}

    def state_dict(self) -> Counts:
        """The counts of an audit, for a checkpoint."""
        return self.counts()

    def load_state_dict(self, state: Counts) -> None:
        """Restore an audit from these counts."""
        self._before = state
        for module in self._model.modules():
            if "counts" in vars(module):
                Float8Linear.reset_executed(cast(Float8Linear, module))
        for count in counters(self._model):
            count.zero_()


def _ran(rows: list[AuditRow]) -> tuple[int, int]:
    """Describe how much an audit knows of what ran: calls, and kernels where calls are not counted."""
    return sum(row.calls or 0 for row in rows), sum(row.kernel != "-" for row in rows)


def _total(ran: dict[str, dict[str, int]]) -> int:
    return sum(calls for of_gemm in ran.values() for calls in of_gemm.values())


def _added(before: dict[str, int], ran: dict[str, int]) -> dict[str, int]:
    names = dict.fromkeys((*GEMM_FORMATS, *before, *ran))
    totals = {name: before.get(name, 0) + ran.get(name, 0) for name in names}
    return {name: calls for name, calls in totals.items() if calls}


def _counted(fqn: str, module: nn.Module | None, counts: dict[str, dict[str, int]]) -> Iterator[AuditRow]:
    kernels: Kernels | None = getattr(module, "kernels", None)
    if not isinstance(module, nn.Linear) or kernels is None:
        return
    output_dtype = cast(torch.dtype, module.output_dtype)
    for gemm in GEMM_NAMES:
        ran = counts.get(gemm, {})
        if not ran and isinstance(module, Float8Linear):
            ran = {module.gemms[gemm].name: 0}
        for name, calls in ran.items():
            form = _known(vars(module).get("known"), name)
            kernel, fallback = _kernel(kernels, module.weight, output_dtype, gemm, form)
            yield AuditRow(fqn, gemm, name, kernel, calls, fallback)


def _given_over(row: ModuleRow, given: Given, counts: dict[str, dict[str, int]]) -> Iterator[AuditRow]:
    matmuls, kernels = given.matmuls, given.matmuls.kernels
    if matmuls.gemms is None:
        yield AuditRow(row.fqn, "all", row.compute, "-", None, row.reason if row.fallback else "")
    if kernels is None:
        return
    for gemm in GEMM_NAMES:
        ran = counts.get(gemm, {})
        if not ran and matmuls.gemms is not None:
            ran = {matmuls.gemms[gemm].name: 0}
        for name, calls in ran.items():
            form = _known(matmuls.switch.known, name)
            kernel, fallback = _kernel(kernels, given.parameter, matmuls.output_dtype, gemm, form)
            yield AuditRow(row.fqn, gemm, name, kernel, calls, fallback)


def _known(known: str | None, name: str) -> GemmFormat:
    """The format of a name for an audit among those that a layer knows."""
    every = () if known is None else of_text(known)
    return next((each for each in every if each.name == name), named_format(name))


def _kernel(
    kernels: Kernels, weight: Tensor, output_dtype: torch.dtype | None, gemm: str, form: GemmFormat
) -> tuple[str, str]:
    """The kernel that a matmul of this format runs on, for an audit, and why that is a fallback, if it is.

    The input's gradient has the input's dtype, which is that of the layer's result wherever it is settled here.
    """
    device = weight.device.type
    if form.operands is None:
        dtype = torch.float32 if form.name == "fp32" else torch.bfloat16
        return _chosen(kernels, ("linear", device, dtype, ""))[0], ""
    dtype = weight.dtype if gemm == "wgrad" else output_dtype or torch.bfloat16
    kernel, rejected = _chosen(kernels, ("tile_gemm", device, dtype, kind_of(*form.operands.of(gemm))))
    if reason := why_emulated(form, kernels.machine):
        return kernel, reason
    how = "decoded to 16 bits" if form.operands.input.is_fp8 else "decoded"
    return kernel, "" if kernel in UNITS else f"operands are {how} by {kernel}; {rejected}"


def _chosen(kernels: Kernels, key: tuple[str, str, torch.dtype, str]) -> tuple[str, str]:
    choice = kernels.choices.get(key)
    if choice is None:
        return "-", ""
    return choice.candidate.name, "; ".join(f"{name}: {reason}" for name, reason in choice.rejected)


def _uncounted(row: ModuleRow, module: nn.Module | None) -> AuditRow:
    kernel = "-"
    if isinstance(module, CastLinear) and module.kernels is not None:
        kernel, _ = _chosen(module.kernels, ("linear", module.weight.device.type, module.compute_dtype, ""))
    return AuditRow(row.fqn, "all", row.compute, kernel, None, row.reason if row.fallback else "")


def _frozen(row: ModuleRow, module: FrozenFloat8Linear) -> Iterator[AuditRow]:
    """Audit a frozen weight: it has no gradient, and its two matmuls are not counted."""
    assert module.kernels is not None, "`freeze_in_fp8` gives them"
    for gemm in ("fprop", "dgrad"):
        form = getattr(module, gemm)
        kernel, fallback = _kernel(module.kernels, module.weight, module.output_dtype, gemm, form)
        yield AuditRow(row.fqn, gemm, form.name, kernel, None, fallback)


def _refused(reason: str, rows: list[AuditRow]) -> Problem:
    layers = list(dict.fromkeys(row.layer for row in rows))
    return Problem(
        f"{len(layers)} layers fell back to another format, and precision.strict is set; the first is {layers[0]}",
        got=f"{rows[0].gemm} in {rows[0].format} by {rows[0].kernel}: {reason}",
        need="a machine, a kernel or a format in which it runs as it says",
        try_='precision.strict = false, or ops.tile_gemm = "auto"',
        where="precision",
    )
