"""Which derivatives FP8 GEMMs have: first ones, in backward mode. Any other is refused in words.

The gradient of a rounding is taken to be that of no rounding (straight-through). A second derivative of that would be a
number without a meaning: zero where an operator has no derivative of its own.
"""

from torch import Tensor

from tilewright.core.errors import ConfigError
from tilewright.ops.base.derivatives import without_second


def first_order_only(*grads: Tensor | None, of: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Gradients as they are, of which no further derivative can be taken: `ops.base.derivatives.without_second`."""
    return without_second(*grads, of=of, error=_no_second)


def _no_second() -> ConfigError:
    return ConfigError(
        "FP8 layers have no second derivative",
        got="a gradient of a gradient (create_graph=True, a gradient penalty, torch.func.hessian)",
        need="layers in 16 or 32 bits where it is taken",
        try_='tilewright.set_mode(model, "bf16_mixed"), or a rule for these layers with compute = "bf16"',
        where="precision",
    )


class NoForwardMode:
    """A base for an autograd.Function: Jacobian-vector products are refused.

    Not for compiled code: Dynamo (torch 2.13) does not trace a Function that has a `jvp`.
    """

    @staticmethod
    def jvp(ctx, *_):
        raise ConfigError(
            "FP8 layers have no forward-mode derivative",
            got="torch.func.jvp, jacfwd, hessian, or torch.autograd.forward_ad",
            need="backward mode, or layers in 16 or 32 bits",
            try_='torch.func.vjp or jacrev; or tilewright.set_mode(model, "bf16_mixed")',
            where="precision",
        )
