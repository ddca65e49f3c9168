"""First weights: a pure function of (seed, parameter name, shape).

Each parameter draws from a CPU generator of its own, seeded by its name (a large one from several, one for each 16Mi
elements), so neither the device, nor the number of threads, nor the order of construction, nor which other parameters
exist changes a value.
"""

import functools
import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor, nn

from tilewright.models.base.protocols import InitialValues
from tilewright.models.decoder.decoder import Decoder
from tilewright.models.decoder.layers import RMSNorm
from tilewright.models.decoder.moe import Router

_INTO_RESIDUAL = ("o_proj", "down_proj")
_PIECE = 2**24
"""Elements from one generator."""


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
    own, rules = model.state_dict(keep_vars=True), dict(_rules(model))
    _apply(rules, seed, {name: own[name] for name in rules})


def decoder_values(model: Decoder, seed: int) -> InitialValues:
    """Normal weights with deviation `config.init_std`, norms one, routing biases zero.

    Projections that write into the residual stream (o_proj, down_proj) start smaller by sqrt(2 * num_layers), so
    that the stream's variance does not grow with depth (Radford et al., GPT-2, 2019, section 2.3).

    Args:
        model: only its shape is read.
        seed: of the run.
    """
    return functools.partial(_apply, dict(_rules(model)), seed)


_Rule = float | Callable[[Tensor], object]
"""A deviation to draw with, or what fills a tensor."""


def _rules(model: Decoder) -> Iterator[tuple[str, _Rule]]:
    """For each parameter and buffer what its initial values are."""
    std = model.config.init_std
    into_residual = std / (2 * model.config.num_layers) ** 0.5
    for name, module in model.named_modules():
        if isinstance(module, RMSNorm):
            yield f"{name}.weight", nn.init.ones_
        elif isinstance(module, Router):
            yield f"{name}.e_score_correction_bias", nn.init.zeros_
            yield f"{name}.weight", std
        elif isinstance(module, nn.Embedding):
            yield f"{name}.weight", std
        elif isinstance(module, nn.Linear) and not (name == "lm_head" and model.config.tie_embeddings):
            yield f"{name}.weight", into_residual if name.rpartition(".")[2] in _INTO_RESIDUAL else std


@torch.no_grad()
def _apply(rules: Mapping[str, _Rule], seed: int, tensors: Mapping[str, Tensor]) -> None:
    """Fill tensors. Draws run in threads, a few ahead; a core draws some 100 million numbers per second."""
    draws: deque[tuple[Tensor, Future[Tensor]]] = deque()
    num_threads = torch.get_num_threads()
    with ThreadPoolExecutor(num_threads, thread_name_prefix="init") as pool:
        for name, tensor in tensors.items():
            rule = rules[name]
            if callable(rule):
                rule(tensor)
                continue
            for index, piece in enumerate(tensor.view(-1).split(_PIECE)):
                own_seed = name_seed(seed, f"{name}[{index}]" if index else name)
                draws.append((piece, pool.submit(_normal, len(piece), rule, own_seed)))
                if len(draws) > 2 * num_threads:
                    _copy_next(draws)
        while draws:
            _copy_next(draws)


def _copy_next(draws: deque[tuple[Tensor, Future[Tensor]]]) -> None:
    piece, drawn = draws.popleft()
    piece.copy_(drawn.result())


def _normal(count: int, std: float, seed: int) -> Tensor:
    return torch.empty(count, dtype=torch.float32).normal_(0.0, std, generator=torch.Generator().manual_seed(seed))
