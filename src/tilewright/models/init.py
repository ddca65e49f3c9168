"""First weights: a pure function of (seed, parameter name, shape).

Each parameter draws from a CPU generator of its own, seeded by its name, so neither the device, nor the order of
construction, nor which other parameters exist changes a value. Called through `build.init_weights`.
"""

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from tilewright.models.contract import FirstValues
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


def init_decoder(model: Decoder, seed: int) -> None:
    """Give all parameters and buffers the values of `decoder_values`, in place."""
    own = model.state_dict(keep_vars=True)
    rules = dict(_rules(model, seed))
    _apply(rules, {name: own[name] for name in rules})


def decoder_values(model: Decoder, seed: int) -> FirstValues:
    """Normal weights with deviation `config.init_std`, norms one, routing biases zero.

    Projections that write into the residual stream (o_proj, down_proj) start smaller by sqrt(2 * num_layers), so
    that the stream's variance does not grow with depth (Radford et al., GPT-2, 2019, section 2.3).

    Args:
        model: only its shape is read.
        seed: of the run.
    """
    return functools.partial(_apply, dict(_rules(model, seed)))


_Rule = Callable[[Tensor], object]


def _apply(rules: Mapping[str, _Rule], tensors: Mapping[str, Tensor]) -> None:
    """Tensors side by side: a generator uses one core, at some 100 million numbers a second."""

    @torch.no_grad()
    def write(name: str) -> None:
        rules[name](tensors[name])

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for done in [pool.submit(write, name) for name in tensors]:
            done.result()


def _rules(model: Decoder, seed: int) -> Iterator[tuple[str, _Rule]]:
    """For each parameter and buffer what writes its first values."""
    std = model.config.init_std
    into_residual = std / (2 * model.config.num_layers) ** 0.5

    def normal(name: str, deviation: float) -> _Rule:
        return functools.partial(_fill_normal, std=deviation, seed=name_seed(seed, name))

    for name, module in model.named_modules():
        if isinstance(module, RMSNorm):
            yield f"{name}.weight", nn.init.ones_
        elif isinstance(module, Router):
            yield f"{name}.e_score_correction_bias", nn.init.zeros_
            yield f"{name}.weight", normal(f"{name}.weight", std)
        elif isinstance(module, nn.Embedding):
            yield f"{name}.weight", normal(f"{name}.weight", std)
        elif isinstance(module, nn.Linear) and not (name == "lm_head" and model.config.tie_embeddings):
            scale = into_residual if name.rpartition(".")[2] in _INTO_RESIDUAL else std
            yield f"{name}.weight", normal(f"{name}.weight", scale)


def _fill_normal(param: Tensor, std: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    param.copy_(torch.empty(param.shape, dtype=torch.float32).normal_(0.0, std, generator=generator))
