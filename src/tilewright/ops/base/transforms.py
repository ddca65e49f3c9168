"""Finds out if a `torch.func` transform is at work, in which operations have another form, or if something else follows
what torch computes.

Inside of `torch.func.grad`, `vmap` and the like tensors may have no memory to read, and an autograd.Function must be
written for it. So operations with a form made of torch's own differentiable ones (`Op.in_transforms`) run that there:
it takes any transform, holds what it computes whole, and rounds as the reference does.
"""

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor, peek_interpreter_stack
from torch.autograd import forward_ad


def in_func_transform() -> bool:
    """True if a `torch.func` transform (grad, vmap, ...) is at work.

    Never so for torch.compile, which reads no memory either and would take the question itself for such a transform.

    Example:
        >>> found = []
        >>> _ = torch.func.grad(lambda x: (found.append(in_func_transform()), x * x)[1])(torch.tensor(3.0))
        >>> found, in_func_transform()
        ([True], False)
    """
    return not torch.compiler.is_compiling() and peek_interpreter_stack() is not None


def is_followed() -> bool:
    """True if something follows torch's operations one by one, and would miss an operation that is none of torch's: a
    transform of `torch.func`, forward derivatives, a tracer, or a mode that sees all calls (fake tensors, counters of
    FLOPs).

    `torch.is_grad_enabled()` says so of backward, and `torch.compiler.is_compiling()` of what compiles.

    Example:
        >>> from torch.utils.flop_counter import FlopCounterMode
        >>> with FlopCounterMode(display=False):
        ...     found = is_followed()
        >>> found, is_followed()
        (True, False)
    """
    # No public function says that there is such a level, or such a mode.
    modes, level = torch._C._len_torch_dispatch_stack(), forward_ad._current_level
    return modes > 0 or level >= 0 or torch._C._is_tracing() or in_func_transform()


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor under a transform that holds the values, with the dims that `vmap` maps.

    Example:
        >>> shapes = []
        >>> _ = torch.vmap(lambda x: (shapes.append(unwrapped(x).shape), x)[1])(torch.ones(3, 2))
        >>> shapes
        [torch.Size([3, 2])]
    """
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor
