"""What llama.cpp needs to know of a model's shape: its architecture's name and the keys under it, or why it has none.

Reads the Hugging Face config of a model, which our decoder has too (`hf_config.to_hf_config`), so one path serves both.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tilewright.core.errors import CheckpointError
from tilewright.models.base.protocols import Model
from tilewright.models.build import spec_of

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "mistral": "llama"}
"""model_type of config.json -> architecture of llama.cpp that computes the same."""
_INTERLEAVED = ("llama",)
"""Architectures whose rotary pairs are neighbours (2i, 2i + 1); Hugging Face's are (i, i + D/2)."""
_PLAIN = {"hidden_act": ("silu",), "mlp_bias": (False, None), "use_sliding_window": (False, None)}
"""Keys that may only be absent or have these values."""


@dataclass(frozen=True)
class GGUFShape:
    """A model that llama.cpp can hold, in its words."""

    arch: str
    num_layers: int
    dim: int
    ffn_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context: int
    rope_theta: float
    norm_eps: float
    tied: bool

    @property
    def interleaved(self) -> bool:
        """Whether rows of query and key matrices are written in another order, see `tensors`."""
        return self.arch in _INTERLEAVED


def why_no_shape(model: Model, task: str) -> str | None:
    """Why llama.cpp has no architecture for the model; None where it has."""
    if task != "causal_lm":
        return f"llama.cpp continues text, and this model's task is {task}"
    try:
        raw = hf_config(model)
    except CheckpointError as error:
        return "; ".join(f"{problem.what}: {problem.got}" for problem in error.problems)
    kind = raw.get("model_type")
    if kind == "deepseek_v3":
        return (
            "latent attention and experts are not written: llama.cpp computes them as deepseek2, whose tensors this "
            "export does not make"
        )
    if kind not in ARCHITECTURES:
        return f"model_type {kind!r}: none of {', '.join(ARCHITECTURES)}"
    wrong = [f"{key} = {raw[key]!r}" for key, values in _PLAIN.items() if raw.get(key, values[0]) not in values]
    rope = raw.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
        wrong.append(f"rope_parameters = {rope}")
    if kind in ("llama", "mistral", "qwen3") and raw.get("attention_bias"):
        wrong.append("attention_bias = true")
    if kind == "mistral" and raw.get("sliding_window"):
        wrong.append(f"sliding_window = {raw['sliding_window']}")
    if _head_dim(raw) % 2:
        wrong.append(f"head_dim = {_head_dim(raw)}")
    return f"not written for {', '.join(wrong)}" if wrong else None


def hf_config(model: Model) -> Mapping[str, Any]:
    """The model's config.json as a mapping.

    Raises:
        CheckpointError: no Hugging Face layout describes it.
    """
    return spec_of(model.architecture).folder_config(model.config, "float32")


def state(model: Model) -> dict[str, Tensor]:
    """The model's weights under Hugging Face's names; of tied ones the first only."""
    seen: dict[int, str] = {}
    found = model.net.state_dict(keep_vars=True)
    return {name: t.detach() for name, t in found.items() if seen.setdefault(id(t), name) == name}


def shape_of(model: Model, context: int) -> GGUFShape:
    """The shape of a model that `why_no_shape` has no reason against.

    Args:
        context: positions that the model was trained for.
    """
    raw = hf_config(model)
    rope = raw.get("rope_parameters") or {}
    return GGUFShape(
        arch=ARCHITECTURES[raw["model_type"]],
        num_layers=raw["num_hidden_layers"],
        dim=raw["hidden_size"],
        ffn_dim=raw["intermediate_size"],
        num_heads=raw["num_attention_heads"],
        num_kv_heads=raw.get("num_key_value_heads") or raw["num_attention_heads"],
        head_dim=_head_dim(raw),
        vocab_size=raw["vocab_size"],
        context=context,
        rope_theta=rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0,
        norm_eps=raw["rms_norm_eps"],
        tied="lm_head.weight" not in state(model),
    )


def _head_dim(raw: Mapping[str, Any]) -> int:
    return raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
