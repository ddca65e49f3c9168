"""First weights: a pure function of (seed, parameter name, shape).

Each parameter draws from a CPU generator of its own, seeded by its name (a large one from several, one for each 16Mi
elements), so neither the device, nor the number of threads, nor the order of construction, nor which other parameters
exist changes a value. Numbers are drawn block by block into small buffers. A generator cannot skip: for some rows of a
parameter it draws from the start of its 16Mi elements, and keeps what was asked for; the other 16Mi are not drawn.
"""

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from tilewright.models.base.protocols import ALL_WHOLE, InitialValues
from tilewright.models.decoder.decoder import Decoder
from tilewright.models.decoder.layers import RMSNorm
from tilewright.models.decoder.moe import Router

_INTO_RESIDUAL = ("o_proj", "down_proj")
_PIECE = 2**24
"""Elements from one generator."""
_BLOCK = 2**18
"""Elements drawn at a time. torch turns 16 uniform numbers at a time into normal ones, so blocks of a multiple of 16
continue as one draw would."""


def name_seed(seed: int, name: str) -> int:
    """Seed of initial weights for `name`, 63 bits, within the run's `seed`.

    Example:
        >>> name_seed(0, "a") != name_seed(0, "b"), name_seed(0, "a") == name_seed(0, "a")
        (True, True)
    """
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def init_decoder(model: Decoder, seed: int) -> None:
    """Initialise all parameters and buffers of a decoder by `decoder_values`, in place."""
    own, rules = model.state_dict(keep_vars=True), dict(initial_rules(model))
    _apply(rules, {}, seed, {name: own[name] for name in rules})


def decoder_values(model: Decoder, seed: int) -> InitialValues:
    """The initial values of a decoder: normal weights with deviation `config.init_std`, norms one, routing biases zero.

    Projections that write into the residual stream (o_proj, down_proj) start smaller by sqrt(2 * num_layers), so
    that the stream's variance does not grow with depth (Radford et al., GPT-2, 2019, section 2.3).

    Args:
        model: only its shape is read.
        seed: of the run.
    """
    numels = {name: tensor.numel() for name, tensor in model.state_dict().items()}
    return functools.partial(_apply, dict(initial_rules(model)), numels, seed)


Rule = float | Callable[[Tensor], object]
"""A deviation to draw with, or what fills a tensor."""


def initial_rules(model: Decoder) -> Iterator[tuple[str, Rule]]:
    """The rule for the initial values of each parameter and buffer."""
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


def _apply(
    rules: Mapping[str, Rule],
    numels: Mapping[str, int],
    seed: int,
    tensors: Mapping[str, Tensor],
    first_rows: Mapping[str, int] = ALL_WHOLE,
) -> None:
    """Fill tensors, or rows of them, by rules of initial values. Threads draw; a core draws some 100 million numbers
    per second.

    Args:
        rules, numels: by name; of each tensor that comes in part the elements of the whole.
        seed: of the run.
        tensors, first_rows: see `InitialValues`.
    """
    with ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="init") as pool, torch.no_grad():
        draws = []
        for name, tensor in tensors.items():
            rule = rules[name]
            if callable(rule):
                rule(tensor)
                continue
            out = tensor.view(-1)
            first = first_rows[name] * tensor[:1].numel() if name in first_rows else 0
            end = numels[name] if name in first_rows else len(out)
            for index in range(first // _PIECE, -(-(first + len(out)) // _PIECE)):
                start = index * _PIECE
                own_seed = name_seed(seed, f"{name}[{index}]" if index else name)
                draws.append(pool.submit(fill_normal, out, first - start, min(_PIECE, end - start), rule, own_seed))
        for draw in draws:
            draw.result()


@torch.no_grad()
def fill_normal(out: Tensor, offset: int, count: int, std: float, seed: int) -> None:
    """Draw `torch.empty(count).normal_(0, std)` from a generator of its own, and write into `out` the part that belongs
    there.

    Args:
        out: one-dimensional.
        offset: number that its first element takes; negative where elements before it take others.
        count: numbers in all.
        std: their deviation.
        seed: of the generator.
    """
    generator = torch.Generator().manual_seed(seed)
    # A block of fewer than 16 numbers would be drawn in another way: the last block takes the rest.
    starts = range(0, max(1, count // _BLOCK) * _BLOCK, _BLOCK)
    buffer = torch.empty(min(count, 2 * _BLOCK))
    for start in starts:
        if start >= offset + len(out):
            return
        stop = count if start == starts[-1] else start + _BLOCK
        block = buffer[: stop - start].normal_(0.0, std, generator=generator)
        begin, end = max(start, offset), min(stop, offset + len(out))
        if begin < end:
            out[begin - offset : end - offset].copy_(block[begin - start : end - start])
