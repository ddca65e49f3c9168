"""`[model]`: which model a run trains, and the shape of our own decoder."""

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

from pydantic import Field, PlainSerializer, SerializerFunctionWrapHandler, WrapValidator, model_serializer
from pydantic.json_schema import SkipJsonSchema

from tilewright.core.config.section import EVERY, Count, PathText, Section


@runtime_checkable
class Architecture(Protocol):
    """An architecture of the caller's own in place of a name: a `models.spec.ModelSpec`, which no file holds."""

    name: str
    build: Callable[..., Any]


_PATH = r"^[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*$"
"""package.module:NAME. Whether there is such an object is found out where a model is built: reading a recipe imports
nothing."""


def named_or_own(value: Any, check: Callable[[Any], Any]) -> Any:
    """The model section's name of ours, which is checked, or an architecture of the caller's own: its path, or
    itself."""
    is_path = isinstance(value, str) and re.fullmatch(_PATH, value) is not None
    return value if is_path or isinstance(value, Architecture) else check(value)


_Kind = Annotated[
    Literal["decoder", "hf"],
    WrapValidator(named_or_own, json_schema_input_type=Literal["decoder", "hf"] | Annotated[str, Field(pattern=_PATH)]),
    PlainSerializer(lambda kind: getattr(kind, "name", kind), when_used="json"),
]


_Own = Count | SkipJsonSchema[None]
"""A number of a layer's own; None: that of the model. It is left out in files."""


class LayerSection(Section):
    """A layer, or some that follow each other: what differs from the model's own fields."""

    repeat: Count = Field(default=1, ge=1)
    """Layers of this shape, one behind the other."""
    num_heads: _Own = Field(default=None, ge=0)
    """Query heads, as wide as the model's. 0: no attention."""
    num_kv_heads: _Own = Field(default=None, ge=0)
    """Key and value heads. 0: as many as query heads."""
    q_lora_rank: _Own = Field(default=None, ge=0)
    """MLA: rank of the query compression. 0: none."""
    kv_lora_rank: _Own = Field(default=None, ge=1)
    """MLA: rank of the key/value compression."""
    ffn_dim: _Own = Field(default=None, ge=0)
    """Width of the SwiGLU hidden layer; in a layer with experts that of an expert. 0: attention alone."""
    sliding_window: _Own = Field(default=None, ge=0)
    """Positions that a query attends to at most, its own included. 0: all before it."""
    attention: Literal["gqa", "mla", "linear"] | SkipJsonSchema[None] = None
    """`linear`, or the model's own."""

    @model_serializer(mode="wrap")
    def _without_none(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in dump(self).items() if value is not None}


class ModelSection(Section):
    changes_numbers = EVERY

    kind: _Kind = "decoder"
    """`decoder`: tilewright's own decoder. `hf`: any Hugging Face model, described by `path`. `package.module:NAME`: an
    architecture of your own, imported where a model is built
    ([Add a model](../how-to/add-a-model.md))."""
    path: PathText = ""
    """Hugging Face folder (config.json, and weights where `weights = "load"`), or a model of the Hugging Face Hub,
    `org/name` or `org/name@revision`, which is downloaded once. Read for `hf`; for `decoder` a folder of Llama, Mistral
    or DeepSeek-V3 layout, or of tilewright's own, whose shape then replaces the fields below."""
    weights: Literal["random", "load"] = "random"
    """Start from random weights, or load those in `path`."""
    task: Literal["causal_lm", "masked_lm", "image_classification"] = "causal_lm"
    """Task that is learned. `decoder` does `causal_lm` only."""
    dim: Count = Field(default=256, ge=8)
    """Width of the residual stream."""
    num_layers: Count = Field(default=6, ge=1)
    """Decoder layers."""
    num_heads: Count = Field(default=4, ge=1)
    """Query heads. `dim` must be a multiple of it unless `head_dim` is given."""
    num_kv_heads: Count = Field(default=0, ge=0)
    """Key and value heads of grouped-query attention. 0: as many as `num_heads`."""
    head_dim: Count = Field(default=0, ge=0)
    """Width of a head. 0: `dim / num_heads`."""
    ffn_dim: Count = Field(default=0, ge=0)
    """Width of the SwiGLU hidden layer. 0: 8/3 of `dim`, rounded up to a multiple of 64."""
    sliding_window: Count = Field(default=0, ge=0)
    """Positions that a query attends to at most, its own included: a sliding window, as Mistral has it. 0: all before
    it."""
    layers: tuple[LayerSection, ...] = ()
    """Layers of their own shape, in order: a table for each, with what differs from the fields above: `num_heads`,
    `num_kv_heads`, `q_lora_rank`, `kv_lora_rank`, `ffn_dim`, `sliding_window`, `attention` (`linear`). No heads: no
    attention; `ffn_dim = 0`: no FFN. `repeat` layers in a row share a table. A list of fewer than `num_layers` is a
    pattern that repeats. Empty: all are alike."""
    rope_theta: float = Field(default=10_000.0, gt=0)
    """Base of the rotary position frequencies."""
    norm_eps: float = Field(default=1e-5, gt=0)
    """Added to the mean square in RMSNorm."""
    tie_embeddings: bool = True
    """One matrix for embedding and output head."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of the initial weights."""
    attention: Literal["gqa", "mla", "linear"] = "gqa"
    """Grouped-query; multi-head latent attention as in DeepSeek-V3; or linear attention by the gated delta rule, whose
    cost per token and whose cache do not grow with the row."""
    q_lora_rank: Count = Field(default=0, ge=0)
    """MLA: rank of the query compression. 0: none."""
    kv_lora_rank: Count = Field(default=64, ge=1)
    """MLA: rank of the key/value compression."""
    qk_nope_head_dim: Count = Field(default=32, ge=1)
    """MLA: query/key width per head, without position."""
    qk_rope_head_dim: Count = Field(default=16, ge=2)
    """MLA: query/key width per head that carries the rotary position."""
    v_head_dim: Count = Field(default=32, ge=1)
    """MLA: value width per head."""
    num_experts: Count = Field(default=0, ge=0)
    """Routed experts. 0: dense."""
    num_experts_per_token: Count = Field(default=2, ge=1)
    """Routed experts that each token uses."""
    num_shared_experts: Count = Field(default=1, ge=0)
    """Experts that every token uses too."""
    expert_dim: Count = Field(default=0, ge=0)
    """Hidden width of an expert. 0: `ffn_dim / num_experts_per_token`."""
    num_dense_layers: Count = Field(default=1, ge=0)
    """MoE: first layers that stay dense."""
    num_expert_groups: Count = Field(default=1, ge=1)
    """MoE: groups for group-limited routing."""
    num_limited_groups: Count = Field(default=1, ge=1)
    """MoE: groups that a token may route to."""
    routed_scaling: float = Field(default=1.0, gt=0)
    """MoE: factor on the routed experts' output."""
    balance_rate: float = Field(default=1e-3, ge=0)
    """MoE: step of the auxiliary-loss-free balancing bias (DeepSeek-V3, section 2.1.2). 0: off."""

    @property
    def hidden_width(self) -> int:
        """Width of the SwiGLU hidden layer by the model section."""
        return self.ffn_dim or -(-8 * self.dim // (3 * 64)) * 64

    @property
    def expert_width(self) -> int:
        """The hidden width of an expert by the model section; 0: there are none."""
        return (self.expert_dim or self.hidden_width // self.num_experts_per_token) if self.num_experts else 0

    @property
    def period(self) -> int:
        """Layers that `layers` of the model section describes, before it repeats."""
        return sum(entry.repeat for entry in self.layers)

    def routes(self, layer: int) -> bool:
        """True where by the model section layer number `layer` has experts, where it has an FFN."""
        return self.num_experts > 0 and layer >= self.num_dense_layers

    def layer_entries(self) -> list[LayerSection]:
        """An entry of the model section for each layer, all its numbers concrete; empty where `layers` is.

        Example:
            >>> section = ModelSection(num_layers=4, num_heads=8, ffn_dim=96, layers=({"num_heads": 2}, {"ffn_dim": 0}))
            >>> [(entry.num_heads, entry.num_kv_heads, entry.ffn_dim) for entry in section.layer_entries()]
            [(2, 2, 96), (8, 8, 0), (2, 2, 96), (8, 8, 0)]
        """
        pattern = [entry for entry in self.layers for _ in range(entry.repeat)]
        return [
            self._filled(pattern[layer % len(pattern)], layer) for layer in range(self.num_layers if pattern else 0)
        ]

    def _filled(self, entry: LayerSection, layer: int) -> LayerSection:
        def own(name: str, otherwise: int) -> int:
            value = getattr(entry, name)
            return otherwise if value is None else value

        heads = own("num_heads", self.num_heads)
        attention = entry.attention or self.attention
        softmax = heads > 0 and attention != "linear"
        return LayerSection(
            attention=attention,
            num_heads=heads,
            num_kv_heads=(own("num_kv_heads", self.num_kv_heads) or heads) if softmax else heads,
            q_lora_rank=own("q_lora_rank", self.q_lora_rank),
            kv_lora_rank=own("kv_lora_rank", self.kv_lora_rank),
            ffn_dim=own("ffn_dim", self.expert_width if self.routes(layer) else self.hidden_width),
            sliding_window=own("sliding_window", self.sliding_window) if softmax else 0,
        )
