"""A decoder of which a rank holds some layers: its stages, and the decoder around them, under the whole one's names.

    held = hold_stages(whole, pipeline, group)   # on meta: what other ranks have is let go before it takes memory
    held.stages          what is run, and sharded, as one: modules over the same parameters
    held.loss(batch)     without gradients: all ranks in a row call it, and all have the result

Prologue on the first stage, epilogue with its tiled loss on the last one. Each stage makes the context from the batch,
which every rank has; only the residual stream travels.

Legend: B rows  S positions  D model width  V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tilewright.core.errors import ConfigError
from tilewright.models.base.protocols import LayerContext, LossOutput
from tilewright.models.decoder.decoder import Decoder
from tilewright.parallel.pipeline.split import Pipeline
from tilewright.parallel.world import Group

Finish = Callable[[Tensor, LayerContext], Tensor]
"""What the last stage makes of the last layer's output: a loss, or logits."""


@dataclass(eq=False)
class MicroBatch:
    """One micro-batch on its way through the stages of a rank."""

    batch: Mapping[str, Tensor]
    finish: Finish
    counted: list[Tensor] = field(default_factory=list)
    """The load of the experts of each layer that has some."""


class Elsewhere(nn.Module):
    """In the place of a part that another rank holds."""

    def forward(self, *args: Any) -> Tensor:
        """Never called."""
        raise AssertionError("this part of the model is on another rank")


class HeldLayers(nn.ModuleList):
    """Some of the layers of a model, under the names that they have in the whole one, counted from 0 here.

    Example:
        >>> layers = HeldLayers({3: nn.Linear(2, 2), 7: nn.Linear(2, 2)})
        >>> len(layers), layers[1] is list(layers)[1], sorted(layers.state_dict())
        (2, True, ['3.bias', '3.weight', '7.bias', '7.weight'])
    """

    def __init__(self, layers: Mapping[int, nn.Module]) -> None:
        super().__init__()
        for number, layer in layers.items():
            self.add_module(str(number), layer)

    def __getitem__(self, place: Any) -> Any:
        return list(self._modules.values())[place]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._modules.values())


class ModelStage(nn.Module):
    """Some layers in a row, with what is before the first one or behind the last one. FSDP2's root where it shards.

    Args:
        held: this rank's part of the model.
        index, num_stages: which stage it is, of how many.
        places: of its layers in `held.blocks`.
    """

    def __init__(self, held: "StagedDecoder", index: int, num_stages: int, places: range) -> None:
        super().__init__()
        self.index, self.is_first, self.is_last = index, index == 0, index == num_stages - 1
        self.layers = nn.ModuleList(held.blocks[place] for place in places)
        before = [held.model.embed_tokens] if self.is_first else []
        self.ends = nn.ModuleList([*before, *([held.model.norm, held.lm_head] if self.is_last else [])])
        self._held, self._places = (held,), places  # in a tuple: no child of this module

    def forward(self, *received: Tensor, micro_batch: MicroBatch) -> Tensor:
        """The stream [B, S, D] behind the last of its layers, or what `finish` makes of it.

        Args:
            received: the stream [B, S, D]; nothing for the first stage.
            micro_batch: which one. Loads of experts are added to it.
        """
        (held,) = self._held
        if self.is_first:
            x_BSD, context = held.prologue(micro_batch.batch)
        else:
            (x_BSD,), context = received, held.context(micro_batch.batch)
        for place in self._places:
            x_BSD, load_E = held.layer(place, x_BSD, context)
            if load_E is not None:
                micro_batch.counted.append(load_E)
        return micro_batch.finish(x_BSD, context) if self.is_last else x_BSD


class StagedDecoder(Decoder):
    """A rank's part of a decoder. What the whole one computes without gradients is computed by all ranks in a row
    together, one stage after the other, and all have it. Made by `hold_stages`."""

    stages: tuple[ModelStage, ...]
    """Of this rank, in the order of the layers. They are no children: a parameter has one name, that of the model."""
    pipeline: Pipeline
    row: Group
    """Ranks in a row."""

    def __init__(self, whole: Decoder, layers: Mapping[int, nn.Module], pipeline: Pipeline, row: Group) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(vars(whole))  # all that it is, and what `convert` has noted; `whole` is not used again
        self.pipeline, self.row = pipeline, row
        self.model.layers = HeldLayers(layers)
        is_first, is_last = (row.rank == pipeline.rank_of(stage) for stage in (0, pipeline.num_stages - 1))
        tied = self.config.tie_embeddings and (is_first or is_last)  # both modules, of which one may only hold it
        if not is_first and not tied:
            self.model.embed_tokens = Elsewhere()
        if not is_last:
            self.model.norm = Elsewhere()
        if not is_last and not tied:
            self.lm_head = Elsewhere()
        self.stages = ()

    @property
    def output_layers(self) -> tuple[nn.Linear, ...]:
        """The head, on the rank that has it; see `models.base.output_layers`."""
        return (self.lm_head,) if isinstance(self.lm_head, nn.Linear) else ()

    @property
    def stream_dtype(self) -> torch.dtype:
        """Of what travels between stages."""
        return self.residual_dtype or torch.float32

    @property
    def other_end(self) -> int | None:
        """The rank in the row that holds this rank's embedding too, as its head, or the other way round; None where
        ends are not tied, or where one rank has both."""
        ends = self.pipeline.rank_of(0), self.pipeline.rank_of(self.pipeline.num_stages - 1)
        if not self.config.tie_embeddings or ends[0] == ends[1] or self.row.rank not in ends:
            return None
        return sum(ends) - self.row.rank

    @property
    def counted_elsewhere(self) -> frozenset[nn.Parameter]:
        """Parameters that another rank holds too, and counts in what is summed over a row: the last stage's of ends
        that are tied over two ranks."""
        again = self.other_end is not None and self.row.rank != self.pipeline.rank_of(0)
        return frozenset([self.lm_head.weight] if again else [])

    def tie_weights(self) -> None:
        """Where ends are tied, they are one parameter on a rank that has one of them; also once FSDP2 has cut one of
        them, or each for itself."""
        if isinstance(self.lm_head, Elsewhere) or isinstance(self.model.embed_tokens, Elsewhere):
            return
        if self.row.rank != self.pipeline.rank_of(0) and self.config.tie_embeddings:
            self.model.embed_tokens.weight = self.lm_head.weight
        else:
            super().tie_weights()

    def loss(self, batch: Mapping[str, Tensor]) -> LossOutput:
        """Loss of a batch, without gradients; see the class."""
        counts: list[Tensor] = []

        def finish(x_BSD: Tensor, context: LayerContext) -> Tensor:
            out = self.epilogue(x_BSD, context, batch)
            counts.append(out.count)
            return out.loss_sum

        loss_sum = self._pass(batch, finish, (), torch.float32)
        return LossOutput(loss_sum, counts[0] if counts else (batch["labels"] >= 0).sum(), {})

    def new_cache(self, rows: int, length: int) -> None:
        """None: rows pass all ranks whole for each token."""

    def next_token_logits(self, input_ids_BS: Tensor, cache: None = None) -> Tensor:
        """FP32 logits [B, V] of the token after each row; see the class."""
        return self._logits(input_ids_BS, lambda x_BSD: x_BSD[:, -1], len(input_ids_BS))

    def logits_at(self, input_ids_BS: Tensor, wanted_BS: Tensor) -> Tensor:
        """FP32 logits [N, V] of the tokens after the wanted positions; see the class."""
        return self._logits(input_ids_BS, lambda x_BSD: x_BSD[wanted_BS], int(wanted_BS.sum()))

    def _logits(self, ids_BS: Tensor, pick: Callable[[Tensor], Tensor], rows: int) -> Tensor:
        def finish(x_BSD: Tensor, context: LayerContext) -> Tensor:
            return self.lm_head(pick(self.model.norm(x_BSD))).float()

        return self._pass({"input_ids": ids_BS}, finish, (rows, self.config.vocab_size), torch.float32)

    @torch.no_grad()
    def _pass(self, batch: Mapping[str, Tensor], finish: Finish, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """What the last stage makes of a batch, on all ranks in a row."""
        ids_BS, rank_of = batch["input_ids"], self.pipeline.rank_of
        micro_batch = MicroBatch(batch, finish)
        found = torch.empty(shape, dtype=dtype, device=ids_BS.device)
        stream_BSD = torch.empty(*ids_BS.shape, self.config.dim, dtype=self.stream_dtype, device=ids_BS.device)
        for stage in self.stages:
            if not stage.is_first and rank_of(stage.index - 1) != self.row.rank:
                dist.recv(stream_BSD, group=self.row.handle, group_src=rank_of(stage.index - 1))
            given = stage(*([] if stage.is_first else [stream_BSD]), micro_batch=micro_batch)
            if stage.is_last:
                found = given.to(dtype).contiguous()
            elif rank_of(stage.index + 1) != self.row.rank:
                dist.send(given.contiguous(), group=self.row.handle, group_dst=rank_of(stage.index + 1))
            else:
                stream_BSD = given
        dist.broadcast(found, group=self.row.handle, group_src=rank_of(self.pipeline.num_stages - 1))
        return found


def hold_stages(whole: Decoder, pipeline: Pipeline, row: Group) -> StagedDecoder:
    """This rank's part of a decoder, whose other layers are let go of. `whole` is not to be used again.

    Args:
        whole: converted, on meta, or with memory in tests.
        pipeline: how it is cut.
        row: the ranks that hold a copy's layers, this one among them.

    Raises:
        ConfigError: it cannot be cut so.
    """
    if not isinstance(whole, Decoder):
        raise ConfigError(
            "Model that has no stages",
            got=f"{type(whole).__name__}, parallel.pp = {pipeline.pp}",
            need="tilewright's own decoder",
            try_="--parallel.pp 1, with dp_shard = N for N processes",
            where="parallel.pp",
        )
    ranges, blocks = pipeline.split(len(whole.blocks)), list(whole.blocks)
    own = pipeline.stages_of(row.rank)
    layers = {number: blocks[number] for stage in own for number in ranges[stage]}
    held = StagedDecoder(whole, layers, pipeline, row)
    places = {number: place for place, number in enumerate(layers)}
    held.stages = tuple(
        ModelStage(held, stage, pipeline.num_stages, range(places[ranges[stage][0]], places[ranges[stage][-1]] + 1))
        for stage in own
    )
    return held
