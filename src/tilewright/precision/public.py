"""`tilewright.convert`: the conversion as a plain PyTorch loop wants it. Imports nothing of the training stack."""

from typing import TypeVar

from torch import nn

from tilewright.precision import convert as conversion
from tilewright.precision.policy import Policy

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def convert(model: ModuleT, policy: Policy | str = "bf16_mixed") -> ModuleT:
    """Makes a model compute as a policy says, in place, and returns it.

    Parameters, names and state_dict stay what they were, so optimizers and checkpoints keep working. What was
    changed, what was not and why is in `model.precision_report`; print it.

    Args:
        model: any module.
        policy: a policy or the name of a mode: fp32, tf32, bf16_mixed, hybrid, pure_fp16, fp8_tile, fp8_hybrid,
            fp8_tensorwise.

    Raises:
        ConfigError: a policy that cannot be.

    Example:
        >>> model = convert(nn.Linear(4, 8), "bf16_mixed")
        >>> model.precision_report.rows[0].compute
        'bf16'
    """
    conversion.convert(model, policy)
    return model
