"""Tables of kinds: modules that differ only by numbers as one row, and the kernels that a run uses. Without torch."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from tilewright.core.config.sections.precision import ScaledFormat
from tilewright.core.units import collapse_names, format_share, pattern_of

Row = Mapping[str, Any]
Table = tuple[tuple[str, ...], list[tuple[str, ...]]]

MODULE_COLUMNS = ("module", "number", "op", "compute", "storage", "output", "matmul work", "why")
_DTYPES = {"fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
# Operation by kind of module. 8-bit layers also quantise; a run updates its parameters whatever its modules.
_OPERATION = {
    "linear": "linear",
    "head": "linear",
    "norm": "rms_norm",
    "attention": "attention",
    "cross_entropy": "cross_entropy",
}
_OF_SCALED = ("quantize", "quantize_both", "tile_gemm", "rms_norm_quantize", "swiglu_quantize")
_KINDS = dict.fromkeys(("fp8_tile", "fp8_hybrid"), ("tiles", "fp8")) | {"fp8_tensorwise": ("tensorwise", "fp8")}
"""Kinds of call of these operations by the format of a matmul, those of other scales than powers of two included."""


def module_table(rows: Sequence[Row]) -> tuple[Table, list[str]]:
    """Table of the kinds of a run's modules, and the reasons that its last column numbers.

    Args:
        rows: of precision.json.
    """
    groups: dict[tuple[str, ...], list[Row]] = {}
    cells = ("op", "compute", "storage", "output", "reason")
    for row in rows:
        key = (pattern_of(str(row["fqn"])), *(str(row.get(name, "-")) for name in cells))
        groups.setdefault(key, []).append(row)
    reasons = list(dict.fromkeys(key[-1] for key in groups))
    total = sum(row.get("work", 0.0) for row in rows)
    lines = []
    for (_, *about, reason), members in groups.items():
        name = collapse_names([str(row["fqn"]) for row in members]) or "(model)"
        work = sum(row.get("work", 0.0) for row in members)
        share = format_share(work / total) if work else "-"
        lines.append((name, str(len(members)), *about, share, f"[{reasons.index(reason) + 1}]"))
    return (MODULE_COLUMNS, lines), [f"[{number}] {reason}" for number, reason in enumerate(reasons, 1)]


def kernels_in_use(kernels: Sequence[Row], modules: Sequence[Row], moments: str) -> list[Row]:
    """Rows of a run's kernel table for the operations and operand formats that the run uses.

    Args:
        kernels: of machine.json: one row per operation and case, see `ops.kernels.Kernels.explain`.
        modules: of precision.json.
        moments: storage of the optimizer's moments.
    """
    formats = {name for row in modules for key in ("compute", "output") for name in str(row.get(key)).split("/")}
    dtypes = {_DTYPES[name] for name in formats | {moments} if name in _DTYPES}
    operations = {_OPERATION.get(str(row["op"]), "linear") for row in modules} | {"adam"}
    scaled = formats & set(get_args(ScaledFormat))
    operations |= {"low_bit_adam"} if moments == "8bit" else set()
    operations |= {*_OF_SCALED, "linear"} if scaled else set()
    kinds = {kind for name in scaled for kind in _KINDS.get(name, ("other", "decoded"))}

    def is_used(row: Row) -> bool:
        _, dtype, *kind = str(row["case"]).split()
        return row["op"] in operations and dtype in dtypes and (row["op"] not in _OF_SCALED or set(kind) <= kinds)

    return [row for row in kernels if is_used(row)]


def chosen_table(kernels: Sequence[Row]) -> Table:
    """Table of the kernels that a run chose: one row per operation, device and kernel, with all operand formats. There
    is no device column if there is one device."""
    groups = _grouped(kernels, lambda row: ())
    if len({device for (_, device, _), _ in groups}) == 1:
        return ("operation", "formats", "kernel"), [(op, formats, chosen) for (op, _, chosen), formats in groups]
    return ("operation", "device", "formats", "kernel"), [
        (op, device, formats, chosen) for (op, device, chosen), formats in groups
    ]


def candidate_table(kernels: Sequence[Row]) -> Table:
    """Table of a run's candidate kernels: one row per operation, device and chosen kernel, with the reasons against the
    candidates before the chosen one."""

    def reasons(row: Row) -> tuple[str, ...]:
        return ("; ".join(f"{name}: {reason}" for name, reason in row["rejected"]),)

    groups = _grouped(kernels, reasons)
    return ("operation", "device", "formats", "kernel", "unavailable, with reason"), [
        (op, device, formats, chosen, why) for (op, device, chosen, why), formats in groups
    ]


def _grouped(kernels: Iterable[Row], more: Any) -> list[tuple[tuple[str, ...], str]]:
    """Rows of a run's table of kernels, grouped: operation, device, chosen kernel and `more` of the row, each with the
    operand formats of all such rows."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for row in kernels:
        device, dtype, *kind = str(row["case"]).split()
        op = f"{row['op']}, {kind[0]}" if kind else str(row["op"])
        groups.setdefault((op, device, str(row["chosen"]), *more(row)), []).append(_SHORT.get(dtype, dtype))
    return [(key, " ".join(dtypes)) for key, dtypes in groups.items()]
