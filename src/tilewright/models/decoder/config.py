"""The shape of tilewright's own decoder: one frozen dataclass, every value concrete, no tensors.

`DecoderConfig.from_section` fills in what a recipe leaves to us (zeros); afterwards nothing is derived or
changed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal

from tilewright.core.config.model_conflicts import Conflict, layer_conflicts, pattern_conflicts
from tilewright.core.config.sections.model import LayerSection, ModelSection
from tilewright.core.errors import ConfigError, Problem
from tilewright.core.units import ranges


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """The shape of one layer that differs from the rest of a decoder. Fields are those of `DecoderConfig`.

    Args:
        num_heads: 0: the layer has no attention.
        ffn_dim: 0: it has no FFN, and no experts.
        sliding_window: positions that its attention sees at most; 0: all.
        attention: that of the decoder, or "linear".
    """

    num_heads: int
    num_kv_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    ffn_dim: int
    expert_dim: int
    shared_dim: int
    sliding_window: int
    attention: str


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shape of a decoder. Fields mean what they mean in `core.config.recipe.ModelSection`; all are concrete here.

    With `attention = "gqa"` the fields q_lora_rank ... v_head_dim have no effect; with "mla" num_kv_heads and
    head_dim have none; with "linear" all of these but head_dim, and sliding_window, have none. With `num_experts = 0`
    the fields num_experts_per_token ... balance_rate have none.

    Layers are alike, or each has a `LayerShape` in `layers`. What reads one layer's shape reads `at(layer)`.

    Raises:
        ConfigError: the fields do not fit together; every problem at once.

    Example:
        >>> config = DecoderConfig.of(vocab_size=100, dim=64, num_heads=4, num_layers=2)
        >>> config.head_dim, config.num_kv_heads, config.ffn_dim
        (16, 4, 192)
    """

    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_dim: int
    sliding_window: int = 0
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = True
    init_std: float = 0.02
    attention: Literal["gqa", "mla", "linear"] = "gqa"
    q_lora_rank: int = 0
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 16
    v_head_dim: int = 32
    num_experts: int = 0
    num_experts_per_token: int = 2
    num_shared_experts: int = 1
    expert_dim: int = 0
    num_dense_layers: int = 1
    num_expert_groups: int = 1
    num_limited_groups: int = 1
    routed_scaling: float = 1.0
    balance_rate: float = 1e-3
    shared_dim: int = 0
    """Hidden width of the shared experts together; 0: `expert_dim` for each."""
    architecture: Any = "decoder"
    """Whose layers these are: a name, or the caller's own `models.spec.ModelSpec`."""
    layers: tuple[LayerShape, ...] = ()
    """Of each layer; empty: all have the fields above."""

    def __post_init__(self) -> None:
        problems = [*self._attention_problems(), *(self._expert_problems() if self.num_experts else [])]
        problems += self._layer_problems() if self.layers else []
        if problems:
            raise ConfigError.from_problems(problems)

    @classmethod
    def from_section(cls, section: ModelSection, vocab_size: int) -> "DecoderConfig":
        """The decoder's config (shape) that a recipe's `[model]` section asks for, its zeros filled in.

        Raises:
            ConfigError: the section's values do not fit together.
        """
        names = {field.name for field in fields(cls)}
        values: dict[str, Any] = {name: value for name, value in section if name in names}
        if not section.head_dim and section.attention != "mla" and section.dim % section.num_heads:
            raise ConfigError(
                "model.dim is not a multiple of model.num_heads",
                got=f"dim {section.dim}, num_heads {section.num_heads}",
                need="a multiple, or a head_dim of its own",
                try_=f"model.dim = {section.dim // section.num_heads * section.num_heads or section.num_heads}",
                where="model.dim",
            )
        if wrong := list(pattern_conflicts(section)):
            raise ConfigError.from_problems(_problems(wrong))
        values["architecture"] = section.kind
        values["num_kv_heads"] = section.num_kv_heads or section.num_heads
        if section.attention == "linear":  # which has neither, as in a list of layers
            values |= {"num_kv_heads": section.num_heads, "sliding_window": 0}
        values["head_dim"] = section.head_dim or section.dim // section.num_heads
        values["ffn_dim"] = section.hidden_width
        if section.num_experts:
            values["expert_dim"] = section.expert_width
        values["layers"] = ()
        config = cls(vocab_size=vocab_size, **values)
        return config.with_layers([config._own(index, entry) for index, entry in enumerate(section.layer_entries())])

    @classmethod
    def of(cls, vocab_size: int, **section_fields: Any) -> "DecoderConfig":
        """A decoder's config from keywords with the recipe's names and defaults."""
        return cls.from_section(ModelSection(**section_fields), vocab_size)

    @property
    def shape(self) -> LayerShape:
        """The shape of a layer by the fields of the decoder's config."""
        return LayerShape(**{field.name: getattr(self, field.name) for field in fields(LayerShape)})

    @property
    def shapes(self) -> tuple[LayerShape, ...]:
        """The shape of each layer in the decoder's config."""
        return self.layers or (self.shape,) * self.num_layers

    def with_layers(self, shapes: Sequence[LayerShape]) -> "DecoderConfig":
        """This decoder's config with layers of these shapes; where all have one shape, it is stored once for all.

        Raises:
            ConfigError: they are no decoder's.
        """
        made = replace(self, layers=tuple(shapes))
        return made.at(0) if len(set(shapes)) == 1 else made

    def at(self, layer: int) -> "DecoderConfig":
        """The config of one layer, with its shape in the fields of the whole decoder, so that it reads as a decoder
        whose layers are alike.

        Example:
            >>> config = DecoderConfig.of(
            ...     vocab_size=100, dim=64, num_heads=4, num_layers=2, layers=({"num_heads": 2}, {"ffn_dim": 0})
            ... )
            >>> [(config.at(layer).num_heads, config.at(layer).ffn_dim) for layer in (0, 1)]
            [(2, 192), (4, 0)]
        """
        return self._at[layer] if self.layers else self

    @cached_property
    def _at(self) -> tuple["DecoderConfig", ...]:
        made = {shape: replace(self, layers=(), **asdict(shape)) for shape in self.layers}
        return tuple(made[shape] for shape in self.layers)

    def _own(self, layer: int, entry: LayerSection) -> LayerShape:
        """The shape that a recipe's entry asks for, in the decoder's config."""
        values = {name: getattr(entry, name) for name in _LISTED}
        width = "expert_dim" if entry.ffn_dim and self.is_moe(layer) else "ffn_dim"
        return replace(self.shape, **values, **{width: entry.ffn_dim})

    def section_values(self) -> dict[str, Any]:
        """The decoder's config as values of a recipe's `[model]`: `DecoderConfig.of` makes the same of it.

        Raises:
            ConfigError: no recipe describes the shape.

        Example:
            >>> config = DecoderConfig.of(
            ...     vocab_size=100, dim=64, num_layers=3, layers=({"num_heads": 2}, {"ffn_dim": 0, "repeat": 2})
            ... )
            >>> config.section_values()["layers"]
            [{'num_heads': 2, 'num_kv_heads': 2}, {'ffn_dim': 0, 'repeat': 2}]
            >>> DecoderConfig.of(vocab_size=100, **config.section_values()) == config
            True
        """
        values = {name: getattr(self, name) for name in self.section_fields() if name != "layers"}
        if self.attention == "mla":
            values["num_kv_heads"] = 0  # as many as heads, in each layer
        if self.layers or not self.ffn_dim:
            values["layers"] = _joined([self._entry(layer, shape) for layer, shape in enumerate(self.shapes)])
        made = type(self).of(self.vocab_size, **values)
        if replace(made, architecture=self.architecture) != self:
            raise ConfigError(
                "No recipe describes the shape of this decoder",
                got=", ".join(one.name for one in fields(self) if getattr(made, one.name) != getattr(self, one.name)),
                need="what the settings of [model] can say",
                try_="a decoder without these",
                where="model",
            )
        return values

    @classmethod
    def section_fields(cls) -> tuple[str, ...]:
        """Names of the settings in a recipe's `[model]` that describe a decoder's config."""
        return tuple(field.name for field in fields(cls) if field.name in ModelSection.model_fields)

    def _entry(self, layer: int, shape: LayerShape) -> dict[str, Any]:
        """The entry of a recipe for one layer: its differences from the fields of the decoder's config."""
        own = {name: getattr(shape, name) for name in LayerSection.model_fields if name != "repeat"}
        usual = {name: getattr(self, name) for name in own}
        if self.num_experts and layer >= self.num_dense_layers:
            usual["ffn_dim"] = self.expert_dim
            own["ffn_dim"] = shape.expert_dim if shape.ffn_dim else 0
        if self.attention == "mla" or not shape.num_heads:
            del own["num_kv_heads"]
        return {name: value for name, value in own.items() if value != usual[name] or (name == "ffn_dim" and not value)}

    @property
    def rope_dim(self) -> int:
        """Width in the decoder's config of the part of a query or key head that carries the position."""
        return self.qk_rope_head_dim if self.attention == "mla" else self.head_dim

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key head in the decoder's config."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim if self.attention == "mla" else self.head_dim

    @property
    def value_head_dim(self) -> int:
        """Width of a value head in the decoder's config."""
        return self.v_head_dim if self.attention == "mla" else self.head_dim

    @property
    def shared_width(self) -> int:
        """Hidden width of the shared experts together in the decoder's config; 0 where there are none."""
        return self.shared_dim or self.num_shared_experts * self.expert_dim if self.num_experts else 0

    def is_moe(self, layer: int) -> bool:
        """True if layer number `layer` (from 0) of the decoder's config has experts."""
        return self.num_experts > 0 and layer >= self.num_dense_layers and self.at(layer).ffn_dim > 0

    def _attention_problems(self) -> list[Problem]:
        problems = []
        if self.attention == "gqa" and self.num_heads and self.num_heads % self.num_kv_heads:
            problems.append(
                Problem(
                    "model.num_heads is not a multiple of model.num_kv_heads",
                    got=f"num_heads {self.num_heads}, num_kv_heads {self.num_kv_heads}",
                    need="each key/value head serves the same number of query heads",
                    try_=f"model.num_kv_heads = {_largest_divisor(self.num_heads, self.num_kv_heads)}",
                    where="model.num_kv_heads",
                )
            )
        if self.sliding_window < 0:
            problems.append(_no_window(f"sliding_window {self.sliding_window}", "model.sliding_window"))
        if self.rope_dim % 2:
            name = "qk_rope_head_dim" if self.attention == "mla" else "head_dim"
            problems.append(
                Problem(
                    f"model.{name} is odd",
                    got=str(self.rope_dim),
                    need="an even width: rotary positions turn pairs",
                    try_=f"model.{name} = {self.rope_dim + 1}",
                    where=f"model.{name}",
                )
            )
        return problems

    def _layer_problems(self) -> list[Problem]:
        if len(self.layers) != self.num_layers:
            return [
                Problem(
                    "Shapes of layers are not as many as the layers",
                    got=f"{len(self.layers)} shapes, num_layers {self.num_layers}",
                    need="one of each layer, or none",
                    try_=f"num_layers = {len(self.layers)}",
                    where="model.layers",
                )
            ]
        groups = "num_heads" if self.attention == "mla" else "num_kv_heads"
        shapes = [(shape.num_heads, getattr(shape, groups), shape.ffn_dim) for shape in self.layers]
        below = [number for number, shape in enumerate(self.layers) if shape.sliding_window < 0]
        wrong = [_no_window(f"layers {ranges(below)}: sliding_window below 0", "model.layers")] if below else []
        if other := {shape.attention for shape in self.layers} - {self.attention, "linear"}:
            wrong.append(
                Problem(
                    "Layers with two kinds of softmax attention",
                    got=f"attention {', '.join(sorted(other))} in layers of a decoder with {self.attention}",
                    need="the decoder's own, or linear",
                    try_=f'attention = "{self.attention}" or "linear"',
                    where="model.layers",
                )
            )
        return [*_problems(layer_conflicts(shapes)), *wrong]

    def _expert_problems(self) -> list[Problem]:
        problems = []
        # Conflicts of a recipe find these earlier, in its words; here they hold for configs from code and from
        # folders.
        if self.num_experts % self.num_expert_groups:
            problems.append(
                Problem(
                    "model.num_experts is not a multiple of model.num_expert_groups",
                    got=f"num_experts {self.num_experts}, num_expert_groups {self.num_expert_groups}",
                    need="groups of equal size",
                    try_=f"model.num_expert_groups = {_largest_divisor(self.num_experts, self.num_expert_groups)}",
                    where="model.num_expert_groups",
                )
            )
        if self.num_limited_groups > self.num_expert_groups:
            problems.append(
                Problem(
                    "model.num_limited_groups is larger than model.num_expert_groups",
                    got=f"num_limited_groups {self.num_limited_groups}, num_expert_groups {self.num_expert_groups}",
                    need="at most all groups",
                    try_=f"model.num_limited_groups = {self.num_expert_groups}",
                    where="model.num_limited_groups",
                )
            )
        # A token chooses num_limited_groups groups, then experts within them.
        reachable = self.num_experts // self.num_expert_groups * self.num_limited_groups
        if self.num_experts_per_token > reachable:
            problems.append(
                Problem(
                    "Token cannot reach model.num_experts_per_token experts",
                    got=f"{self.num_experts_per_token} asked for, {reachable} in the groups a token may route to",
                    need="num_experts_per_token <= num_experts / num_expert_groups * num_limited_groups",
                    try_=f"model.num_experts_per_token = {reachable}",
                    where="model.num_experts_per_token",
                )
            )
        if self.expert_dim < 1:
            problems.append(
                Problem(
                    "model.expert_dim is not set",
                    got=str(self.expert_dim),
                    need="at least 1 where model.num_experts is not 0",
                    try_=f"model.expert_dim = {max(1, self.ffn_dim // self.num_experts_per_token)}",
                    where="model.expert_dim",
                )
            )
        return problems


_LISTED = ("num_heads", "num_kv_heads", "q_lora_rank", "kv_lora_rank", "sliding_window", "attention")
"""What a recipe lists of a layer, all but the width of its FFN: that of experts is another."""


def _problems(conflicts: Iterable[Conflict]) -> list[Problem]:
    return [Problem(one.what, got=one.got, need=one.need, try_=one.try_, where="model.layers") for one in conflicts]


def _no_window(got: str, where: str) -> Problem:
    return Problem(
        "Window of attention that is none",
        got=got,
        need="positions that a query attends to, its own included: at least 1; 0 for all before it",
        try_="sliding_window = 0",
        where=where,
    )


def _joined(entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Entries of a decoder's config for layers in a row that are alike, joined as one."""
    found: list[dict[str, Any]] = []
    for entry in entries:
        if found and {name: value for name, value in found[-1].items() if name != "repeat"} == entry:
            found[-1]["repeat"] = found[-1].get("repeat", 1) + 1
        else:
            found.append(dict(entry))
    return found


def _largest_divisor(number: int, at_most: int) -> int:
    """The largest divisor of a decoder's number of heads or experts that is at most `at_most`, for advice."""
    return next(d for d in range(min(number, at_most), 0, -1) if number % d == 0)
