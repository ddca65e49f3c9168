"""A Hugging Face language model as a graph, for one row: see `decoder.DecoderGraph`, whose interface this has.

What is kept of earlier tokens are the keys and values of transformers' `DynamicCache`. A model that keeps something
else, or nothing (BERT), becomes a graph of whole rows.

Legend: S new positions  T all positions so far  V vocabulary.
"""

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tilewright.models.hf.cache import cache_name, why_no_cache
from tilewright.models.hf.model import HFModel

if TYPE_CHECKING:  # it takes seconds to import
    from transformers.modeling_utils import PreTrainedModel

_DENSE_EXPERTS = "batched_mm"
"""transformers' way to compute experts without branches on data: each token's matrices are looked up."""


class HFGraph(nn.Module):
    """A transformers model in FP32 on the CPU, for one row.

    Args:
        model: a causal or masked language model. Copied.
    """

    def __init__(self, model: HFModel):
        super().__init__()
        self.net = copy.deepcopy(model.net).float().eval().requires_grad_(False)
        if hasattr(self.net.config, "num_experts_per_tok"):
            self.net.set_experts_implementation(_DENSE_EXPERTS)
        self.kept: tuple[tuple[str, tuple[int, int, int]], ...] = _kept(self.net, model)
        self._cache = cache_name(self.net) or ""

    def forward(self, ids_1S: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        """Run a Hugging Face model's graph with the keys and values of earlier tokens: see
        `decoder.DecoderGraph.forward`."""
        if not self.kept:
            return (self.net(input_ids=ids_1S).logits,)
        from transformers.cache_utils import DynamicCache

        cache = DynamicCache(ddp_cache_data=list(zip(past[0::2], past[1::2], strict=True)))
        start = past[0].shape[2]
        position_1S = torch.arange(start, start + ids_1S.shape[1])[None]
        past_of = {self._cache: cache}
        logits = self.net(input_ids=ids_1S, position_ids=position_1S, use_cache=True, **past_of).logits
        layers: Any = cache.layers  # each has both, once it has seen a token
        return (logits, *(tensor for layer in layers for tensor in (layer.keys, layer.values)))


@torch.no_grad()
def _kept(net: "PreTrainedModel", model: HFModel) -> tuple[tuple[str, tuple[int, int, int]], ...]:
    if model.task != "causal_lm" or why_no_cache(net, model.vocab_size) is not None:
        return ()
    out = net(input_ids=torch.arange(4)[None] % model.vocab_size, use_cache=True)
    past = getattr(out, cache_name(net) or "")
    layers = getattr(past, "layers", ())
    names = [type(layer).__name__ for layer in layers]
    if not names or set(names) != {"DynamicLayer"}:
        return ()
    return tuple(
        (f"{name}.{index}", (tensor.shape[1], -1, tensor.shape[3]))
        for index, layer in enumerate(layers)
        for name, tensor in (("key", layer.keys), ("value", layer.values))
    )
