"""First weights: a pure function of (seed, parameter name, shape).

Each parameter draws from a CPU generator of its own, seeded by its name, so neither the device, nor the order of
construction, nor which other parameters exist changes a value. Called through `build.init_weights`.
"""

import hashlib

import torch
from torch import Tensor, nn

from tilewright.models.decoder import Decoder
from tilewright.models.layers import RMSNorm
from tilewright.models.moe import Router

_INTO_RESIDUAL = ("o_proj", "down_proj")


def name_seed(seed: int, name: str) -> int:
    """A 63-bit seed for `name` within the run's `seed`.

    Example:
        >>> name_seed(0, "a") != name_seed(0, "b"), name_seed(0, "a") == name_seed(0, "a")
        (True, True)
    """
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@torch.no_grad()
def init_decoder(model: Decoder, seed: int) -> None:
    """Normal weights with deviation `config.init_std`, norms one, routing biases zero.

    Projections that write into the residual stream (o_proj, down_proj) start smaller by sqrt(2 * num_layers), so
    that the stream's variance does not grow with depth (Radford et al., GPT-2, 2019, section 2.3).
    """
    std = model.config.init_std
    into_residual = std / (2 * model.config.num_layers) ** 0.5
    for name, module in model.named_modules():
        if isinstance(module, RMSNorm):
            module.weight.fill_(1.0)
        elif isinstance(module, Router):
            module.e_score_correction_bias.zero_()
            _fill_normal(module.weight, std, name_seed(seed, f"{name}.weight"))
        elif isinstance(module, nn.Embedding):
            _fill_normal(module.weight, std, name_seed(seed, f"{name}.weight"))
        elif isinstance(module, nn.Linear) and not (name == "lm_head" and model.config.tie_embeddings):
            scale = into_residual if name.rpartition(".")[2] in _INTO_RESIDUAL else std
            _fill_normal(module.weight, scale, name_seed(seed, f"{name}.weight"))


def _fill_normal(param: Tensor, std: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    param.copy_(torch.empty(param.shape, dtype=torch.float32).normal_(0.0, std, generator=generator))
