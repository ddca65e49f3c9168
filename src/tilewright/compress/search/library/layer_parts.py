"""A layer as two parts that are replaced apart: attention with its norm, and FFN with its norm.

A part is a `Block` whose other part is missing, so what trains, runs and is timed here is what a decoder of this shape
runs. Parts of the run share its weights.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from torch import Tensor

from tilewright.models.build import shapes_only
from tilewright.models.decoder.block import Block
from tilewright.models.decoder.config import DecoderConfig, LayerShape
from tilewright.ops.base.documents import documents_from
from tilewright.ops.kernels import Kernels

Part = Literal["attention", "ffn"]
PARTS: tuple[Part, ...] = ("attention", "ffn")
MODULES: Mapping[Part, tuple[str, str]] = {
    "attention": ("input_layernorm", "self_attn"),
    "ffn": ("post_attention_layernorm", "mlp"),
}
"""Of a block: the norm and the rest."""


@dataclass(frozen=True, order=True)
class PartPlace:
    """A part of one layer."""

    layer: int
    part: Part

    def __str__(self) -> str:
        return f"{self.layer}.{self.part}"


def places(config: DecoderConfig) -> Iterator[PartPlace]:
    """The places of the parts that layers have, in the order of a forward pass."""
    for layer, shape in enumerate(config.shapes):
        for part in PARTS:
            if shape.num_heads if part == "attention" else shape.ffn_dim:
                yield PartPlace(layer, part)


def alone(shape: LayerShape, part: Part) -> LayerShape:
    """The shape of a layer with one part alone, without the other."""
    if part == "attention":
        return replace(shape, ffn_dim=0)
    return replace(shape, num_heads=0, num_kv_heads=0, sliding_window=0)


def joined(attention: LayerShape | None, ffn: LayerShape | None) -> LayerShape | None:
    """The shape of a layer of two parts, each None where it is missing; None: the layer is left out."""
    if attention is None or ffn is None:
        return attention or ffn
    return replace(attention, ffn_dim=ffn.ffn_dim, expert_dim=ffn.expert_dim, shared_dim=ffn.shared_dim)


def config_of(config: DecoderConfig, layer: int, shape: LayerShape) -> DecoderConfig:
    """A decoder's shape in which one layer reads as another one, for a layer's part."""
    return replace(config.at(layer), **asdict(shape))


def new_part(config: DecoderConfig, layer: int, shape: LayerShape, kernels: Kernels) -> Block:
    """Make a new part of a layer: a block on the host, its values not yet set, in evaluation mode."""
    with shapes_only():
        made = Block(config_of(config, layer, shape), layer, kernels)
    return made.to_empty(device="cpu").eval()


def own_part(model: Any, place: PartPlace) -> Block:
    """A decoder's own part of a layer, with the decoder's own tensors."""
    block = model.blocks[place.layer]
    with shapes_only():
        shape = alone(model.config.shapes[place.layer], place.part)
        made = Block(config_of(model.config, place.layer, shape), place.layer, model.kernels)
    state = block.state_dict(keep_vars=True)
    own = {name: state[name] for name in made.state_dict()}
    made.load_state_dict(own, assign=True)
    return made.eval()


def run_part(part: Block | None, x_BSD: Tensor, context: Mapping[str, Tensor]) -> Tensor:
    """Run a part of a layer: the stream behind it; behind a missing one it is as it was."""
    return x_BSD if part is None else part(x_BSD, context["cos"], context["sin"], documents_from(context))[0]
