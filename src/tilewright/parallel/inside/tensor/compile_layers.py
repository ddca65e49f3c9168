"""Compiled layers of a decoder that is cut: what a rank computes between two exchanges, each a graph of its own.

    cut_tensors(model, world)
    compile_cut(model)

Exchanges are in hooks of attention and MLPs, and so are the parts of parameters that these compute on; both stay
outside of the graphs. Uncompiled are latent attention, whose heads exchange what they share inside of it, MLPs in
chunks (`memory.chunked_mlp`), which compute again in backward where no hook puts parts in, and attention or an MLP that
reads codes which travel (`sequence_slices.Arrival`), for as long as it does.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.formats.tiled import WithCopies
from tilewright.memory.chunked_mlp import is_chunked
from tilewright.models.decoder.attention import LatentAttention
from tilewright.models.decoder.decoder import Decoder
from tilewright.ops.base.compile import graph_limit, layer_options
from tilewright.parallel.inside.tensor.parameter_parts import run_on_parts
from tilewright.precision.mixed.derived import Derived, derive


def compile_cut(model: Decoder) -> None:
    """Compile the layers of a model from `cut_decoder.cut_tensors`, in place; nothing is traced before they run. MLPs
    that run in chunks must do so by then (`chunk_mlps`)."""
    model.compile_blocks(between_exchanges=_compile_forward)
    if any(is_chunked(module) for module in model.modules()):
        model.notes.append("MLPs in chunks are not compiled where matrices are cut.")
    if model.config.attention == "mla":
        model.notes.append(
            "Latent attention is not compiled where matrices are cut: ranks exchange what heads share inside of it."
        )


def _compile_forward(module: nn.Module) -> None:
    if not isinstance(module, LatentAttention) and not is_chunked(module):
        run_on_parts(module, layers=[name for name, layer in module.named_children() if isinstance(layer, nn.Linear)])
        derive(module, _with_compiled_forward)


@functools.cache
def _with_compiled_forward(plain: type[nn.Module]) -> type[nn.Module]:
    """Compile the forward of cut layers: modules of one class share the graph."""
    compiled = torch.compile(plain.forward, options=layer_options(), **graph_limit())

    def forward(self: nn.Module, x: Tensor | WithCopies, *args: Any) -> Tensor:
        travels = isinstance(x, WithCopies) and x.arrive is not None
        grows = len(args) > 3 and args[3] is not None  # attention that continues a cache
        return (plain.forward if travels or grows else compiled)(self, x, *args)

    names = {"plain": plain, "made_by": _with_compiled_forward, "forward": forward}
    names |= {"__module__": plain.__module__, "__doc__": plain.__doc__}
    return type(plain.__name__, (Derived, plain), names)
