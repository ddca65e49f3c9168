"""A model without memory, ready to be filled layer group by layer group.

    model = build_model(section, vocab_size, kernels, "meta")
    values = random_values(model, seed)  # or stored_values(model, folder)
    convert(model, policy)  # dtypes are chosen on meta
    to_placeholders(model, device)
    fill_buffers(model, values)
    pool.add("layers.0", {name: parameter, ...}, fill=values)  # and so on; bytes are made in pool.seal()

So a parameter's first bytes are those in its tier, and nothing ever holds the model twice.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tilewright.memory.offload.flat_layout import placeholder
from tilewright.models.base.protocols import InitialValues
from tilewright.ops.base.code_modules import codes_of, named_constants


@torch.no_grad()
def to_placeholders(model: nn.Module, device: torch.device | str) -> None:
    """Replace meta parameters by placeholders with their shape, dtype and device, but one value and no memory; buffers
    and codes get memory, unfilled.

    The parameters are new objects, and stay the same ones from here on: make the optimizer afterwards. Tied ones stay
    tied. What is not on the meta device is left alone.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is None or not param.is_meta:
                continue
            if param not in made:
                made[param] = nn.Parameter(placeholder(param.shape, param.dtype, device), param.requires_grad)
                vars(made[param]).update(vars(param))
            module._parameters[name] = made[param]
        for name, buffer in (module._buffers | codes_of(module)).items():
            if buffer is not None and buffer.is_meta:
                setattr(module, name, torch.empty_like(buffer, device=device))


def fill_buffers(model: nn.Module, values: InitialValues) -> None:
    """Give all buffers and codes their initial values: they are always on the device."""
    values(named_constants(model))


@contextmanager
def dummy_values(model: nn.Module) -> Iterator[None]:
    """Give lazy parameters dummy values inside, to try out how a model behaves before it has its own.

    All are views of one buffer of random numbers for each dtype, as large as the largest parameter: weights around
    zero, vectors (norms, biases) around one. Nothing may be written to them, and they mean nothing.
    """
    lent = [param for param in model.parameters() if is_placeholder(param)]
    before = [param.data for param in lent]
    buffers: dict[tuple[torch.dtype, bool], Tensor] = {}
    for param in sorted(lent, key=torch.numel, reverse=True):
        key = param.dtype, param.ndim > 1
        if key not in buffers:
            generator = torch.Generator().manual_seed(0)
            numbers = torch.empty(param.numel()).normal_(0.0 if param.ndim > 1 else 1.0, 0.02, generator=generator)
            buffers[key] = numbers.to(param.device, param.dtype)
        param.data = buffers[key][: param.numel()].view(param.shape)
    try:
        yield
    finally:
        for param, value in zip(lent, before, strict=True):
            param.data = value


def is_placeholder(param: Tensor) -> bool:
    """True where a tensor stands in for one that has no memory yet (`flat_layout.placeholder`), or has it elsewhere
    (`hf_view.vacant_like`): one value in all places.

    Example:
        >>> is_placeholder(placeholder((2, 3), torch.float32, "cpu")), is_placeholder(torch.ones(2, 3))
        (True, False)
    """
    alone = param.untyped_storage().nbytes() == param.itemsize
    return alone and (param.numel() > 1 or bool(param.isnan().all()))
