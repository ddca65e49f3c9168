"""Matrix matmuls of a model's linear layers, and the formats of them.

Found on the meta device; `planner.model.decoder_shape` and `planner.model.hf_shape` make layer classes of them.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from tilewright.core.config.recipe import Recipe
from tilewright.core.hardware import Machine
from tilewright.precision.assign.conversion_plan import ConversionPlan
from tilewright.precision.float8.frozen_linear import FrozenFloat8Linear
from tilewright.precision.float8.gemm.gemm_ops import SWITCH_BYTES
from tilewright.precision.float8.gemm.weight_store import store_bytes
from tilewright.precision.policy.gemm_formats import GemmFormat, Gemms

BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class LinearGemm:
    """The shape of a linear layer, the tokens that pass it as a share of a row's, and the formats of its GEMMs."""

    fqn: str
    num_in: int
    num_out: int
    share: float
    gemms: Gemms
    is_head: bool = False
    frozen: bool = False
    """The weight has no gradient."""
    coded: bool = False
    """The weight is kept in 8 bits alone: it counts as a parameter."""
    integers: str = ""
    """What the weight is rounded to in each pass, one of `INTEGER_FORMATS`; `gemms` are those of the rounded values."""

    @property
    def num_weights(self) -> int:
        """Elements of the weight of a linear layer's GEMM."""
        return self.num_in * self.num_out

    @property
    def code_bytes(self) -> int:
        """Bytes kept of a GEMM's quantised weight between passes; 0 without 8-bit GEMMs, and on a GPU
        (`weight_store`)."""
        if self.coded or self.gemms.operands is None:
            return 0
        return store_bytes((self.num_out, self.num_in), self.gemms.operands.weight)


def matmuls_of(
    model: nn.Module, decided: ConversionPlan, shares: Mapping[str, float] | float = 1.0
) -> tuple[LinearGemm, ...]:
    """List the GEMMs of a model: linear layers and the router, in the model's order, with their formats.

    Args:
        model: on the meta device.
        decided: the formats of its parts in one mode.
        shares: of a row's tokens that pass a layer, by name, those without a name left out; one number for all, of
            which the experts of our decoder get those that the router sends them.
    """
    rows = {row.fqn: row for row in decided.report.rows}
    found = []
    for fqn, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if fqn not in rows or weight is None or weight.dim() != 2 or isinstance(module, nn.Embedding):
            continue
        if isinstance(shares, Mapping):
            if fqn not in shares:
                continue
            share = shares[fqn]
        else:
            share = shares if ".experts." in fqn else 1.0
        row = rows[fqn]
        gemms, integers = row.gemms or Gemms.all(row.matmul or row.compute), row.compute if row.matmul else ""
        coded = isinstance(module, FrozenFloat8Linear)
        shape = weight.shape[1], weight.shape[0]
        found.append(LinearGemm(fqn, *shape, share, gemms, row.op == "head", not weight.requires_grad, coded, integers))
    return tuple(found)


def fp8_unit(machine: Machine, form: GemmFormat) -> bool:
    """True if matrix units run GEMMs of operands of this format as they are: with scales that kernels know."""
    known = form.operands is not None and form.operands.input.is_fp8
    return known and machine.capability is not None and machine.capability >= (8, 9)


def multiplied_in(form: GemmFormat, units: Collection[str]) -> str:
    """The format in which a GEMM runs, of those that a machine has rates of: that of decoded operands where no unit
    takes them as they are."""
    if form.operands is None:
        return form.name
    if form.operands.input.is_fp8:
        return "fp8" if "fp8" in units else "bf16"
    forms = (form.operands.input, form.operands.weight, form.operands.gradient)
    return "fp32" if any(each.scale.rule == "exact" for each in forms) else "bf16"


def keeps_qdata(machine: Machine, recipe: Recipe) -> bool:
    """True if GEMMs keep codes of weights from step to step: on a CPU, and not of sharded ones, which each pass gathers
    and quantises."""
    return machine.device == "cpu" and recipe.parallel.dp_shard <= 1 and recipe.parallel.tp == 1


def held_qdata(matmuls: Sequence[LinearGemm], kept: bool) -> int:
    """Bytes kept of weights quantised for GEMMs, and of what says their formats; nothing where each pass makes them."""
    if not kept:
        return 0
    return sum(matmul.code_bytes + SWITCH_BYTES for matmul in matmuls if matmul.gemms.any_scaled)


def operand_work(matmuls: Sequence[LinearGemm], tokens: float, machine: Machine) -> float:
    """Bytes of the operands of the busiest 8-bit GEMM: both copies of codes, and the decoded ones if no unit multiplies
    codes."""
    needs = (
        (2 if all(fp8_unit(machine, form) for form in matmul.gemms.formats if form.scaled) else 4)
        * (tokens * matmul.share * (matmul.num_in + matmul.num_out) + matmul.num_weights)
        for matmul in matmuls
        if matmul.gemms.any_scaled
    )
    return max(needs, default=0.0)


def uncast(matmuls: Iterable[LinearGemm]) -> int:
    """Count the weights that no pass casts to 16 bits: all three of their GEMMs read codes."""
    return sum(matmul.num_weights for matmul in matmuls if matmul.gemms.all_scaled)
