"""A Hugging Face model of which a rank holds some layers, under the whole one's names.

Each stage runs the model's own forward with stand-ins in the place of its layers (`models.layerwise.hf_view`): up to
the first layer for what layers are called with, from the last one on for the loss. So whatever the model does around
its layers is done by its own code. What a model does to its embedding's output, outside of that module, is in the
stream that the first stage sends, and nowhere else: later stages drop the stream of their own prologue, which reads no
values.

Legend: B rows  S positions  D model width  V vocabulary  N tokens that are asked for.
"""

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tilewright.core.errors import ConfigError
from tilewright.memory.offload.lazy_params import dummy_values
from tilewright.models.base.protocols import LayerContext, LossOutput
from tilewright.models.hf.model import HFModel
from tilewright.models.layerwise.hf_view import HFLayers, cut_hf, vacant_like
from tilewright.ops.base.labels import IGNORED
from tilewright.parallel.pipeline.stage_base import HeldLayers, ModelStage, Staged, StageWatch, Tie, unwatched
from tilewright.parallel.pipeline.stage_split import Pipeline
from tilewright.parallel.world import Group

if TYPE_CHECKING:  # it takes seconds to import
    from transformers.modeling_utils import PreTrainedModel
from tilewright.precision.mixed.derived import Derived, derive


class StagedHF(Staged, Derived):
    """A rank's part of a Hugging Face model. Made by `hold_hf`, which gives a model a class that has this one too."""

    view: HFLayers
    net: "PreTrainedModel"
    elsewhere: frozenset[nn.Module]
    """Ends of which this rank has no parameter, but a stand-in."""

    @property
    def stream_dtype(self) -> torch.dtype:
        """The dtype of the stream between a Hugging Face model's stages: see `Staged`."""
        return self.view.stream_dtype

    @property
    def words(self) -> int:
        """The size of the vocabulary of a Hugging Face model in stages: see `Staged`."""
        return self.net.get_output_embeddings().out_features  # type: ignore[operator]

    def prologue(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, LayerContext]:
        """Run what is before the layers of a Hugging Face model in stages: see `LayerwiseModel`, and so the others."""
        return self.view.prologue(batch)

    def context(self, batch: Mapping[str, Tensor]) -> LayerContext:
        return self.view.context(batch)

    def layer(self, index: int, x_BSD: Tensor, context: LayerContext) -> tuple[Tensor, None]:
        return self.view.layer(index, x_BSD, context)

    def epilogue(self, x_BSD: Tensor, context: LayerContext, batch: Mapping[str, Tensor]) -> LossOutput:
        return self.view.epilogue(x_BSD, context, batch)

    def aux_metrics(self, counted: Any) -> dict[str, Tensor]:
        return {}

    def last_hidden(self, batch: Mapping[str, Tensor], watch: StageWatch = unwatched) -> Tensor | None:
        """Hidden values in front of the head of a Hugging Face model in stages: see `Staged`."""

        def finish(x_BSD: Tensor, context: LayerContext) -> Tensor:
            with self.view.giving(x_BSD):
                return super(StagedHF, self).hidden(batch)  # type: ignore[misc]  # of the class that comes behind

        return self.pass_to_last(batch, finish, watch)

    def next_token_logits(self, input_ids_BS: Tensor, cache: None = None) -> Tensor:
        """FP32 logits [B, V] of the token after each row, of a Hugging Face model in stages; see the class."""
        return self._logits(input_ids_BS, "next_token_logits", len(input_ids_BS))

    def logits_at(self, input_ids_BS: Tensor, wanted_BS: Tensor) -> Tensor:
        """FP32 logits [N, V] of the tokens after the wanted positions, of a Hugging Face model in stages; see the
        class."""
        return self._logits(input_ids_BS, "logits_at", int(wanted_BS.sum()), wanted_BS)

    def _logits(self, ids_BS: Tensor, method: str, rows: int, *more: Tensor) -> Tensor:
        def finish(x_BSD: Tensor, context: LayerContext) -> Tensor:
            with self.view.giving(x_BSD):
                return getattr(super(StagedHF, self), method)(ids_BS, *more)

        batch = {"input_ids": ids_BS, "labels": torch.full_like(ids_BS, IGNORED)}
        return self.pass_row(batch, finish, (rows, self.words))


def hold_hf(whole: HFModel, pipeline: Pipeline, row: Group) -> StagedHF:
    """Make a Hugging Face model this rank's stages: the same object, with another class and fewer layers.

    Args:
        whole: converted; its parameters have values, or are placeholders (`memory.offload.lazy_params`).
        pipeline, row: see `hold_stages`.

    Raises:
        ConfigError: it cannot be cut so.
    """
    # 1. The whole model's parts, found by running it on stand-in values. Reasons against a cut come before any
    # change.
    with dummy_values(whole):
        view = cut_hf(whole)
    if isinstance(view, str):
        raise _not_cut(whole, pipeline, view)
    if reason := _obstacle(whole, view):
        raise _not_cut(whole, pipeline, reason)
    # 2. This rank's layers. The model stays the same object with a class that has `StagedHF` too.
    ranges, blocks = pipeline.split(len(view.blocks)), view.blocks
    own = {stage: ranges[stage] for stage in pipeline.stages_of(row.rank)}
    first = list(view.before)
    last = [module for module in view.outside() if module not in view.before]
    derive(whole, _staged)
    held: Any = whole
    held.pipeline, held.row, held.width = pipeline, row, view.streams[0].shape[-1]
    held.__dict__["view"] = view
    # 3. Ends of other ranks lose their memory, except for weights that are tied to an end of this rank.
    ties = _ties(first, last) if held.has_first or held.has_last else []
    held.ties = ties
    tied = {(module, name) for tie in ties for module, name in ((tie.first, tie.first_name), (tie.last, tie.last_name))}
    for modules, here in ((first, held.has_first), (last, held.has_last)):
        for module in modules if not here else ():
            _let_go(module, {name for of, name in tied if of is module})
    held.elsewhere = frozenset((*first, *last)) - frozenset(view.outside())
    # 4. Checkpointing is listed by layer: of the layers that are left.
    modes = whole.checkpointing
    numbers = [number for of_stage in own.values() for number in of_stage]
    view.hold(HeldLayers({number: blocks[number] for number in numbers}))
    if len(modes) == len(blocks):
        whole._checkpointing = tuple(modes[number] for number in numbers)
    # 5. A module per stage, for the schedule.
    made = []
    for stage, of_stage in own.items():
        ends = (first if stage == 0 else []) + (last if stage == pipeline.num_stages - 1 else [])
        made.append(ModelStage(held, stage, {number: blocks[number] for number in of_stage}, ends))
    held.__dict__["stages"] = tuple(made)
    return held


@cache
def _staged(kind: type[nn.Module]) -> type[nn.Module]:
    name = f"Staged{kind.__name__}"
    return type(name, (StagedHF, kind), {"made_by": staticmethod(_staged), "plain": kind})


def _obstacle(model: HFModel, view: HFLayers) -> str:
    """Why a Hugging Face model that can be run layer by layer has no stages; empty where it has."""
    kinds = {(tuple(x.shape), x.dtype) for x in view.streams}
    batch = model.short_batch()
    if len(kinds) > 1 or "input_ids" not in batch or view.streams[0].shape[:-1] != batch["input_ids"].shape:
        return "the stream between its layers is not [rows, positions, width] of one dtype"
    if view.both:
        return f"its {type(view.both[0]).__name__} is used before its layers and behind them"
    if model._input_style(packed=False).documents == "rows":
        return "it takes no document masks, so packed rows are cut"
    read = {id(param) for param in view.outer_parameters()[0]}
    known = {id(param) for module in view.before for param in module._parameters.values()}
    return "it reads a parameter before its layers in a way that is not seen" if read - known else ""


def _ties(first: list[nn.Module], last: list[nn.Module]) -> list[Tie]:
    behind = {id(param): (module, name) for module in last for name, param in module._parameters.items()
              if param is not None}  # fmt: skip
    return [
        Tie(module, name, *behind[id(param)])
        for module in first
        for name, param in module._parameters.items()
        if id(param) in behind
    ]


def _let_go(module: nn.Module, tied: set[str]) -> None:
    """Replace parameters that another rank holds by zeros without memory. The model's own forward may read them; what
    it computes from them is dropped."""
    for name in [name for name, param in module._parameters.items() if param is not None and name not in tied]:
        param = module._parameters.pop(name)
        assert param is not None
        setattr(module, name, vacant_like(param))


def _not_cut(model: HFModel, pipeline: Pipeline, reason: str) -> ConfigError:
    return ConfigError(
        "Model that cannot be cut into stages",
        got=f"{type(model.net).__name__}, parallel.pp = {pipeline.pp}: {reason}",
        need="a language model with one stream through a list of layers",
        try_="--parallel.pp 1, with dp_shard = N for N processes",
        where="parallel.pp",
    )
