"""A model of which a rank holds some layers: its stages, and the model around them, under the whole one's names.

    held = hold_stages(whole, pipeline, group)   # on meta: what other ranks have is let go before it takes memory
    held.stages          what is run, and sharded, as one: modules over the same parameters
    held.loss(batch)     without gradients: all ranks in a row call it, and all have the result

Legend: B rows  S positions  D model width  V vocabulary.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from tilewright.core.errors import ConfigError
from tilewright.models.base.protocols import LayerContext, Model
from tilewright.models.decoder.decoder import Decoder
from tilewright.models.hf.model import HFModel
from tilewright.parallel.pipeline.hf_stages import StagedHF, hold_hf
from tilewright.parallel.pipeline.stage_base import HeldLayers, ModelStage, Staged, StageWatch, Tie, unwatched
from tilewright.parallel.pipeline.stage_split import Pipeline
from tilewright.parallel.world import Group


class Elsewhere(nn.Module):
    """Stands in the place of a part that another rank holds."""

    def forward(self, *args: Any) -> Tensor:
        """Stand in for a layer of another rank's stages: it is never called."""
        raise AssertionError("this part of the model is on another rank")


class StagedDecoder(Staged, Decoder):
    """A rank's part of a decoder. Made by `hold_stages`."""

    def __init__(self, whole: Decoder, pipeline: Pipeline, row: Group) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(vars(whole))  # all that it is, and what `convert` has noted; `whole` is not used again
        self.pipeline, self.row, self.width = pipeline, row, whole.config.dim
        ranges, blocks = pipeline.split(len(whole.blocks)), list(whole.blocks)
        own = {stage: ranges[stage] for stage in pipeline.stages_of(row.rank)}
        self.model.layers = HeldLayers({number: blocks[number] for numbers in own.values() for number in numbers})
        places = {number: place for place, number in enumerate(number for of in own.values() for number in of)}
        tied = self.config.tie_embeddings and (self.has_first or self.has_last)  # one of them may only hold it
        if not self.has_first and not tied:
            self.model.embed_tokens = cast(Any, Elsewhere())
        if not self.has_last:
            self.model.norm = cast(Any, Elsewhere())
        if not self.has_last and not tied:
            self.lm_head = Elsewhere()
        made = []
        for stage, numbers in own.items():
            ends = [self.model.embed_tokens] if stage == 0 else []
            ends += [self.model.norm, self.lm_head] if stage == pipeline.num_stages - 1 else []
            made.append(ModelStage(self, stage, {places[number]: blocks[number] for number in numbers}, ends))
        self.stages = tuple(made)

    @property
    def output_layers(self) -> tuple[nn.Linear, ...]:
        """The head among the stages, on the rank that has it; see `models.base.output_layers`."""
        return (self.lm_head,) if isinstance(self.lm_head, nn.Linear) else ()

    @property
    def stream_dtype(self) -> torch.dtype:
        """The dtype of the stream between a decoder's stages: see `Staged`."""
        return self.residual_dtype or torch.float32

    @property
    def words(self) -> int:
        """The size of the vocabulary of a decoder in stages: see `Staged`."""
        return self.config.vocab_size

    @property
    def counting_layers(self) -> int | None:
        """This rank's layers of a decoder in stages that count something in a pass: see `Staged`."""
        return sum(block.is_moe for block in self.blocks) if self.config.num_experts else None

    @property
    def ties(self) -> list[Tie]:
        """The tied parameters of a decoder's stages whose ends are on different ranks: see `Staged`."""
        if not self.config.tie_embeddings or not (self.has_first or self.has_last):
            return []
        return [Tie(self.model.embed_tokens, "weight", self.lm_head, "weight")]

    def last_hidden(self, batch: Mapping[str, Tensor], watch: StageWatch = unwatched) -> Tensor | None:
        """The values that the head of a decoder in stages reads: see `Staged`."""
        return self.pass_to_last(batch, lambda x_BSD, context: self.model.norm(x_BSD), watch)

    def next_token_logits(self, input_ids_BS: Tensor, cache: None = None) -> Tensor:
        """FP32 logits [B, V] of the token after each row, of a decoder in stages; see the class."""
        return self._logits(input_ids_BS, lambda x_BSD: x_BSD[:, -1], len(input_ids_BS))

    def logits_at(self, input_ids_BS: Tensor, wanted_BS: Tensor) -> Tensor:
        """FP32 logits [N, V] of the tokens after the wanted positions, of a decoder in stages; see the class."""
        return self._logits(input_ids_BS, lambda x_BSD: x_BSD[wanted_BS], int(wanted_BS.sum()))

    def _logits(self, ids_BS: Tensor, pick: Callable[[Tensor], Tensor], rows: int) -> Tensor:
        def finish(x_BSD: Tensor, context: LayerContext) -> Tensor:
            return self.lm_head(pick(self.model.norm(x_BSD))).float()

        return self.pass_row({"input_ids": ids_BS}, finish, (rows, self.words))


def hold_stages(whole: Model, pipeline: Pipeline, row: Group) -> StagedDecoder | StagedHF:
    """Hold this rank's stages of a model, whose other layers are freed. `whole` is not to be used again.

    Args:
        whole: converted, on meta, or with memory in tests; a Hugging Face model with placeholders of its parameters,
            which is run to find its layers.
        pipeline: how it is cut.
        row: the ranks that hold a copy's layers, this one among them.

    Raises:
        ConfigError: it cannot be cut so.
    """
    if isinstance(whole, Decoder):
        return StagedDecoder(whole, pipeline, row)
    if isinstance(whole, HFModel):
        return hold_hf(whole, pipeline, row)
    raise ConfigError(
        "Model that has no stages",
        got=f"{type(whole).__name__}, parallel.pp = {pipeline.pp}",
        need="tilewright's own decoder, or a language model of Hugging Face",
        try_="--parallel.pp 1, with dp_shard = N for N processes",
        where="parallel.pp",
    )
