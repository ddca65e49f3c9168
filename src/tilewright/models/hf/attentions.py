"""The attention of a foreign layer, by what transformers says that it can record of a model."""

from collections.abc import Iterator
from typing import Any

from torch import nn


def attention_in(net: nn.Module, layer: nn.Module) -> nn.Module | None:
    """Find the module of a Hugging Face layer whose first result is the attention's output, by what the model's class
    calls "attentions"; None if it is none of the layer's modules, or several.

    Args:
        net: of transformers.
        layer: of its list of layers.

    Example:
        >>> import transformers
        >>> config = transformers.LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        ...     num_attention_heads=2)
        >>> net = transformers.LlamaForCausalLM(config)
        >>> attention_in(net, net.model.layers[0]) is net.model.layers[0].self_attn
        True
    """
    targets = list(_targets((getattr(net, "_can_record_outputs", None) or {}).get("attentions")))
    found = [
        module
        for path, module in layer.named_modules()
        if any(isinstance(module, made) and end in f".{path}" for made, end in targets)
    ]
    return found[0] if len(found) == 1 else None


def _targets(said: Any) -> Iterator[tuple[type[nn.Module], str]]:
    """The classes of modules that transformers' recorders of attentions name, each with a part of the modules' names. A
    recorder may be a class, a recorder of outputs, or several."""
    for one in said if isinstance(said, (list, tuple)) else (said,):
        made = getattr(one, "target_class", one)
        if isinstance(made, type):
            yield made, getattr(one, "layer_name", None) or ""
