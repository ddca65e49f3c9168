"""Ways in which code that is no optimizer writes a weight between two steps: light to import, since ranks do.

Each takes a module whose only parameter is `weight`, whole or a DTensor, and writes what this rank holds of it.
"""

import copy

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def held(module) -> torch.Tensor:
    """What this rank holds, without autograd: as `.data`, writes to it leave the parameter's version as it is."""
    data = module.weight.data
    return data.to_local() if isinstance(data, DTensor) else data


def other(module) -> torch.Tensor:
    """Numbers of the same shape."""
    data = held(module)
    return torch.randn(data.shape, generator=torch.Generator().manual_seed(7)).to(data.dtype)


def clamp(module):
    module.weight.clamp_(min=0)


def data_mul(module):
    module.weight.data.mul_(0.37)


def data_copy(module):
    held(module).copy_(other(module))


def local_part(module):
    """Of a DTensor its `_local_tensor`, as FSDP's own loading writes it."""
    weight = module.weight
    (weight._local_tensor if isinstance(weight, DTensor) else weight).add_(0.25)


def add(module):
    module.weight.add_(module.weight, alpha=-0.3)


def zero(module):
    module.weight.zero_()


def negate(module):
    module.weight.detach().neg_()


def mask(module):
    """Pruning: some elements are zero from now on."""
    held(module).mul_(other(module) > 0)


def some_rows(module):
    held(module)[..., :2] = 1.0


def awkward(module):
    """Zeros of both signs, the largest and least numbers, infinities and NaN."""
    data = held(module)
    info = torch.finfo(data.dtype)
    some = torch.tensor([0.0, -0.0, info.max, -info.max, info.tiny, -info.tiny, torch.inf, -torch.inf, torch.nan, 1.0])
    flat = data.flatten()
    flat[: len(some)] = some[: len(flat)].to(data.dtype)
    data.copy_(flat.view(data.shape))


def as_bytes(module):
    """Past torch: through the memory that NumPy sees."""
    held(module).view(torch.int16 if held(module).itemsize == 2 else torch.int32).numpy()[..., 1:] &= ~0xFF


def initialised(module):
    nn.init.constant_(module.weight, 0.125)


def state_dict(module):
    saved = copy.deepcopy(module.state_dict())
    for value in saved.values():
        value.mul_(1.7)
    module.load_state_dict(saved)


def swapped_data(module):
    """Other memory in the parameter's place."""
    module.weight.data = module.weight.data * 0.6


def from_vector(module):
    """All parameters as views of one vector."""
    if isinstance(module.weight, DTensor):  # has no such view
        swapped_data(module)
    else:
        vector_to_parameters(parameters_to_vector(module.parameters()) * 1.3, module.parameters())


def foreach_lerp(module):
    """As an exponential average that is put into the model."""
    torch._foreach_lerp_([held(module)], [other(module)], 0.1)


def swapped_tensors(module):
    """As `load_state_dict` does it with `torch.__future__.set_swap_module_params_on_conversion`."""
    new = nn.Parameter((module.weight.detach() * 0.8).clone())
    torch.utils.swap_tensors(module.weight, new)


def permuted(module):
    """The same numbers elsewhere: sums and norms stay."""
    held(module).copy_(held(module).flip(-1))


WAYS = (
    *(clamp, data_mul, data_copy, local_part, add, zero, negate, mask, some_rows, awkward, as_bytes),
    *(initialised, state_dict, swapped_data, from_vector, foreach_lerp, swapped_tensors, permuted),
)
