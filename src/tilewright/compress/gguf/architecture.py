"""A model's shape for llama.cpp: its architecture's name and the keys under it, or why it has none.

Reads the Hugging Face config of a model, which our decoder has too (`hf_config.to_hf_config`), so one path serves both.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from tilewright.core.errors import CheckpointError
from tilewright.models.base.protocols import Model
from tilewright.models.build import spec_of
from tilewright.models.decoder.config import DecoderConfig

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "mistral": "llama"}
"""model_type of config.json -> architecture of llama.cpp that computes the same."""
OWN_LAYERS = "deci"
"""The architecture of llama.cpp that is Llama with numbers of its own in each layer; no FFN is none of them, since its
layers without one drop their attention."""
_INTERLEAVED = ("llama", OWN_LAYERS)
"""Architectures whose rotary pairs are neighbours (2i, 2i + 1); Hugging Face's are (i, i + D/2)."""
_PLAIN = {"hidden_act": ("silu",), "mlp_bias": (False, None), "use_sliding_window": (False, None)}
"""Keys that may only be absent or have these values."""


@dataclass(frozen=True)
class GGUFShape:
    """A model that llama.cpp can hold, in its words."""

    arch: str
    num_layers: int
    dim: int
    ffn_dim: int | list[int]
    """One number, or one for each layer; so the next two."""
    num_heads: int | list[int]
    num_kv_heads: int | list[int]
    head_dim: int
    vocab_size: int
    context: int
    rope_theta: float
    norm_eps: float
    tied: bool

    @property
    def interleaved(self) -> bool:
        """True if a GGUF architecture's rows of query and key matrices are written in another order, see `tensors`."""
        return self.arch in _INTERLEAVED


def why_no_shape(model: Model, task: str) -> str | None:
    """Why llama.cpp has no architecture for the model; None where it has."""
    if task != "causal_lm":
        return f"llama.cpp continues text, and this model's task is {task}"
    # 1. Parts that no architecture of llama.cpp computes as the model does.
    try:
        raw = hf_config(model)
    except CheckpointError as error:
        return "; ".join(f"{problem.what}: {problem.got}" for problem in error.problems)
    kind = raw.get("model_type")
    if any(not layer.ffn_dim for layer in own_layers(model)):
        return "layers without an FFN: llama.cpp leaves out their attention"
    if any(layer.attention == "linear" for layer in own_layers(model)):
        return "linear attention: none of its architectures computes it"
    if window := _window(model, raw):
        return f"sliding_window = {window}: llama.cpp computes its architecture llama without a window"
    if kind == "deepseek_v3":
        return (
            "latent attention and experts are not written: llama.cpp computes them as deepseek2, whose tensors this "
            "export does not make"
        )
    if kind not in ARCHITECTURES:
        return f"model_type {kind!r}: none of {', '.join(ARCHITECTURES)}"
    # 2. Values of config.json that have no key in a GGUF file: llama.cpp would compute with its own.
    wrong = [f"{key} = {raw[key]!r}" for key, values in _PLAIN.items() if raw.get(key, values[0]) not in values]
    rope = raw.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
        wrong.append(f"rope_parameters = {rope}")
    if kind in ("llama", "mistral", "qwen3") and raw.get("attention_bias"):
        wrong.append("attention_bias = true")
    if _head_dim(raw) % 2:
        wrong.append(f"head_dim = {_head_dim(raw)}")
    return f"not written for {', '.join(wrong)}" if wrong else None


def hf_config(model: Model) -> Mapping[str, Any]:
    """The model's config.json as a mapping, for its GGUF architecture; where layers have shapes of their own, of the
    same model without them.

    Raises:
        CheckpointError: no Hugging Face layout describes it.
    """
    config = replace(model.config, layers=()) if own_layers(model) else model.config
    return spec_of(model.architecture).folder_config(config, "float32")


def own_layers(model: Model) -> list[DecoderConfig]:
    """The shape for GGUF of each layer of a decoder whose layers have shapes of their own; else empty."""
    config = model.config
    listed = isinstance(config, DecoderConfig) and config.layers
    return [config.at(layer) for layer in range(config.num_layers)] if listed else []


def state(model: Model) -> dict[str, Tensor]:
    """The model's weights for a GGUF architecture under Hugging Face's names; of tied ones the first only."""
    seen: dict[int, str] = {}
    found = model.net.state_dict(keep_vars=True)
    return {name: t.detach() for name, t in found.items() if seen.setdefault(id(t), name) == name}


def shape_of(model: Model, context: int) -> GGUFShape:
    """The GGUF architecture's shape of a model that `why_no_shape` has no reason against.

    Args:
        context: positions that the model was trained for.
    """
    raw = hf_config(model)
    rope = raw.get("rope_parameters") or {}
    own = own_layers(model)
    return GGUFShape(
        arch=OWN_LAYERS if own else ARCHITECTURES[raw["model_type"]],
        num_layers=raw["num_hidden_layers"],
        dim=raw["hidden_size"],
        ffn_dim=[layer.ffn_dim for layer in own] or raw["intermediate_size"],
        num_heads=[layer.num_heads for layer in own] or raw["num_attention_heads"],
        num_kv_heads=[layer.num_kv_heads for layer in own]
        or raw.get("num_key_value_heads")
        or raw["num_attention_heads"],
        head_dim=_head_dim(raw),
        vocab_size=raw["vocab_size"],
        context=context,
        rope_theta=rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0,
        norm_eps=raw["rms_norm_eps"],
        tied="lm_head.weight" not in state(model),
    )


def _window(model: Model, raw: Mapping[str, Any]) -> int:
    """The widest window of attention that a layer has, for its GGUF architecture; 0: none has one, or its family says
    so in another way."""
    own = [layer.sliding_window for layer in own_layers(model)]
    return max(own) if own else (raw.get("sliding_window") or 0) * (raw.get("model_type") == "mistral")


def _head_dim(raw: Mapping[str, Any]) -> int:
    return raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
