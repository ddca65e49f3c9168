"""A test of whether a module treats each token alone, made by computing some tokens together and apart.

It is tried in the mode in which it is asked: a batch norm treats tokens alone in evaluation, and not in training.
Dropout is left out, since it draws other numbers in another order and is no tie between tokens. The trial leaves
nothing behind: buffers, counts and generators are put back.

Legend: N tokens  D width.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tilewright.precision.snapshot import ModuleSlots, Snapshot, torch_states

TRIED = 5
"""Tokens that are tried, in parts of two and three: a batch norm takes no token alone."""
_MAX_DIFFERENCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Of a token computed with some and with others, against the largest output. Else 2^-6: sums in another order, rounded
to 16 bit twice or thrice."""
_DROPOUTS = (
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
    *(torch.dropout, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout),
)


class _NoDropout(TorchFunctionMode):
    """Inside, functions of dropout return their argument."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _DROPOUTS:
            return args[0] if args else (kwargs or {})["input"]
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def why_not_token_wise(module: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> str | None:
    """Explain why a module is not token-wise; None if a token's result does not depend on the tokens beside it.

    Args:
        module: what `run` computes with; it may be in training or evaluation.
        run: [..., N, D] -> [..., N, any].
        x: [..., N, D] with `TRIED` tokens or more; some of them are tried.

    Example:
        >>> x = torch.randn(8, 4)
        >>> norm = nn.BatchNorm1d(4)
        >>> why_not_token_wise(norm, norm, x), why_not_token_wise(norm.eval(), norm, x)
        ('its forward changes its buffers', None)
    """
    tokens = x.detach().flatten(0, -2)[:TRIED]
    tokens = tokens.reshape(*(1,) * (x.ndim - 2), TRIED, x.shape[-1])
    slots = ModuleSlots(module)
    before = Snapshot(slots, x.device)
    try:
        with _NoDropout():
            return _find(slots, run, tokens)
    finally:
        before.restore()


def _find(slots: ModuleSlots, run: Callable[[Tensor], Tensor], x: Tensor) -> str | None:
    buffers, states = _values(slots), torch_states(x.device)
    together = run(x)
    if not isinstance(together, Tensor) or together.shape[:-1] != x.shape[:-1]:
        return "its result is not one row per token"
    if any(not torch.equal(state, states[name]) for name, state in torch_states(x.device).items()):
        return "it draws random numbers in a way of its own"
    if not all(_same(value, other) for value, other in zip(buffers, _values(slots), strict=True)):
        return "its forward changes its buffers"
    apart = torch.cat([run(part) for part in x.split((2, TRIED - 2), dim=-2)], dim=-2)
    difference = (together.double() - apart.double()).abs().max() / together.double().abs().max().clamp_min(1e-30)
    if difference > _MAX_DIFFERENCE.get(together.dtype, 2**-6):
        return f"a token's result depends on the others (by {float(difference):.1e} of the largest)"
    return None


def _values(slots: ModuleSlots) -> list[Tensor | None]:
    held = [buffers.get(name) for buffers, name in slots.buffers]
    return [None if buffer is None else buffer.clone() for buffer in held]


def _same(value: Tensor | None, other: Tensor | None) -> bool:
    if value is None or other is None:
        return value is other
    return value.shape == other.shape and torch.equal(value.view(-1), other.view(-1))
