"""The common ground of the stages of any model: layers in a row, and the work of a rank with some of them.

Prologue on the first stage, epilogue with its tiled loss on the last one. Each stage makes the context from the batch,
which every rank has; only the residual stream travels: where ranks that cut matrices have slices of it (`tp`), each
sends its own to the one that has the same slice in the next stage.

Legend: B rows  S positions  s of a slice, or S  D model width.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tilewright.models.base.preference import TOLD, is_pairs
from tilewright.models.base.protocols import LayerContext, LossOutput
from tilewright.models.decoder.layers import StreamSlices
from tilewright.parallel.pipeline.stage_split import Pipeline
from tilewright.parallel.world import Group

Finish = Callable[[Tensor, LayerContext], Tensor]
"""What the last stage makes of the last layer's output: a loss, or logits."""
StageWatch = Callable[[int], AbstractContextManager[None]]
"""Told of a stage that runs, by its number; what it returns is open while the stage does."""


def unwatched(stage: int) -> AbstractContextManager[None]:
    """A watch over a staged model that does nothing."""
    return nullcontext()


@dataclass(eq=False)
class MicroBatch:
    """One micro-batch on its way through the stages of a rank."""

    batch: Mapping[str, Tensor]
    finish: Finish
    counted: list[Tensor] = field(default_factory=list)
    """The load of the experts of each layer that has some."""


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
        index: which stage it is.
        layers: of it, by the numbers that `held.layer` takes.
        ends: modules before the first layer, or behind the last one.
    """

    def __init__(self, held: "Staged", index: int, layers: Mapping[int, nn.Module], ends: Iterable[nn.Module]) -> None:
        super().__init__()
        self.index, self.is_first, self.is_last = index, index == 0, index == held.pipeline.num_stages - 1
        self.layers, self.ends = nn.ModuleList(layers.values()), nn.ModuleList(ends)
        self._held, self._numbers = (held,), tuple(layers)  # in a tuple: no child of this module

    def forward(self, *received: Tensor, micro_batch: MicroBatch) -> Tensor:
        """Run a stage: returns the stream [B, s, D] after its last layer, or what `finish` makes of the whole stream.

        Args:
            received: the stream [B, s, D]; nothing for the first stage.
            micro_batch: which one. Loads of experts are added to it.
        """
        (held,) = self._held
        slices = held.slices
        if self.is_first:
            x_BSD, context = held.prologue(micro_batch.batch)
            x_BsD = x_BSD if slices is None else slices.enter(x_BSD)
        else:
            (x_BsD,), context = received, held.context(micro_batch.batch)
        for number in self._numbers:
            x_BsD, load_E = held.layer(number, x_BsD, context)
            if load_E is not None:
                micro_batch.counted.append(load_E)
        if not self.is_last:
            return x_BsD
        length = micro_batch.batch["input_ids"].shape[-1]
        return micro_batch.finish(x_BsD if slices is None else slices.leave(x_BsD, length), context)


@dataclass(frozen=True)
class Tie:
    """One parameter of two modules, the first before the layers and the second behind them."""

    first: nn.Module
    first_name: str
    last: nn.Module
    last_name: str


class Staged:
    """A rank's part of a model. What the whole one computes without gradients is computed by all ranks in a row
    together, one stage after the other, and all have it. What has this class is a model too."""

    stages: tuple[ModelStage, ...]
    """Of this rank, in the order of the layers. They are no children: a parameter has one name, that of the model."""
    pipeline: Pipeline
    row: Group
    """Ranks in a row."""
    width: int
    """Of the residual stream."""
    slices: StreamSlices | None = None
    """Where ranks have other positions of it."""
    stream_dtype: torch.dtype
    """Of what travels between stages, in the formats that the model has now."""
    ties: Sequence[Tie]
    """Ends that are one parameter, on ranks that have one of them."""
    words: int
    """Rows of the head's weight."""
    counting_layers: int | None = None
    """This rank's layers that count something in a pass; None where no layer of the model does."""
    prologue: Any
    context: Any
    layer: Any
    epilogue: Any
    aux_metrics: Any
    """See `layerwise.layer_view.LayerwiseModel`."""

    @property
    def has_first(self) -> bool:
        """True if this rank of a staged model has the first stage."""
        return self.row.rank == self.pipeline.rank_of(0)

    @property
    def has_last(self) -> bool:
        """True if this rank of a staged model has the last stage."""
        return self.row.rank == self.pipeline.rank_of(self.pipeline.num_stages - 1)

    @property
    def other_end(self) -> int | None:
        """The rank of the row that also holds this rank's tied parameters; None if there are none, or if one rank has
        both ends."""
        if not self.ties or self.has_first == self.has_last:
            return None
        return self.pipeline.rank_of(self.pipeline.num_stages - 1 if self.has_first else 0)

    @property
    def shared(self) -> list[nn.Parameter]:
        """Parameters of a staged model that `other_end` holds too."""
        return [] if self.other_end is None else [getattr(tie.last, tie.last_name) for tie in self.ties]

    @property
    def counted_elsewhere(self) -> frozenset[nn.Parameter]:
        """Parameters of a staged model that another rank holds too, and counts in what is summed over a row."""
        return frozenset([] if self.has_first else self.shared)

    def stream_shape(self, ids: Tensor) -> torch.Size:
        """[B, s, D] of the stream of a staged model, between stages, for a batch of these token ids [B, S]; of pairs of
        answers [B / 2, 2, S]."""
        rows, length = ids.shape[:-1].numel(), ids.shape[-1]
        return torch.Size((rows, length if self.slices is None else self.slices.positions(length), self.width))

    def tie_weights(self) -> None:
        """Let ends of a staged model that are tied be one parameter on this rank, also once FSDP2 has cut one of them,
        or each for itself."""
        for tie in self.ties:
            if self.has_first:
                tie.last._parameters[tie.last_name] = tie.first._parameters[tie.first_name]
            else:
                tie.first._parameters[tie.first_name] = tie.last._parameters[tie.last_name]

    def loss(self, batch: Mapping[str, Tensor]) -> LossOutput:
        """Loss of a batch by a staged model, without gradients; see the class."""
        names = TOLD if is_pairs(batch) else ()

        def finish(x_BSD: Tensor, context: LayerContext) -> Tensor:
            out = self.epilogue(x_BSD, context, batch)
            return torch.stack([out.loss_sum, out.count, *(out.aux[name] for name in names)])

        loss_sum, count, *told = self.pass_row(batch, finish, (2 + len(names),))
        return LossOutput(loss_sum, count.long(), dict(zip(names, told, strict=True)))

    def new_cache(self, rows: int, length: int) -> None:
        """Return None: a staged model has no cache, and its rows pass all ranks whole for each token."""

    def last_hidden(self, batch: Mapping[str, Tensor], watch: StageWatch = unwatched) -> Tensor | None:
        """A staged model's input of the head [B, S, D], without gradients, on the rank with the last stage; None on the
        others. All ranks in a row call it."""
        raise NotImplementedError

    @torch.no_grad()
    def pass_row(self, batch: Mapping[str, Tensor], finish: Finish, shape: tuple[int, ...]) -> Tensor:
        """Pass a batch through all stages of a row of ranks, and return the last stage's output, FP32 of this shape, on
        all of them."""
        made = self.pass_to_last(batch, finish)
        found = torch.empty(shape, dtype=torch.float32, device=batch["input_ids"].device)
        if made is not None:
            found = made.to(torch.float32).contiguous()
        dist.broadcast(found, group=self.row.handle, group_src=self.pipeline.rank_of(self.pipeline.num_stages - 1))
        return found

    @torch.no_grad()
    def pass_to_last(self, batch: Mapping[str, Tensor], finish: Finish, watch: StageWatch = unwatched) -> Tensor | None:
        """Pass a batch through all stages to the last rank, and return its output there; None on the others."""
        ids_BS, rank_of, made = batch["input_ids"], self.pipeline.rank_of, None
        micro_batch = MicroBatch(batch, finish)
        stream_BsD = torch.empty(self.stream_shape(ids_BS), dtype=self.stream_dtype, device=ids_BS.device)
        for stage in self.stages:
            if not stage.is_first and rank_of(stage.index - 1) != self.row.rank:
                dist.recv(stream_BsD, group=self.row.handle, group_src=rank_of(stage.index - 1))
            with watch(stage.index):
                given = stage(*([] if stage.is_first else [stream_BsD]), micro_batch=micro_batch)
            if stage.is_last:
                made = given
            elif rank_of(stage.index + 1) != self.row.rank:
                dist.send(given.contiguous(), group=self.row.handle, group_dst=rank_of(stage.index + 1))
            else:
                stream_BsD = given
        return made

    def backward_row(self, batch: Mapping[str, Tensor], targets: int) -> None:
        """Run forward and backward of one batch, stage after stage: gradients of the sum of its losses over `targets`
        are added to this rank's parameters. All ranks in a row call it; no schedule takes part."""
        row, rank_of, ids_BS = self.row, self.pipeline.rank_of, batch["input_ids"]

        def finish(x_BSD: Tensor, context: LayerContext) -> Tensor:
            return self.epilogue(x_BSD, context, batch).loss_sum / targets

        def buffer() -> Tensor:
            return torch.empty(self.stream_shape(ids_BS), dtype=self.stream_dtype, device=ids_BS.device)

        micro_batch, passed, stream_BsD = (
            MicroBatch(batch, finish),
            list[tuple[ModelStage, Tensor | None, Tensor]](),
            None,
        )
        # Forward: the stream comes from the rank of the stage before, if that is another one.
        for stage in self.stages:
            given_BsD = None
            if not stage.is_first:
                before = rank_of(stage.index - 1)
                given_BsD = buffer() if stream_BsD is None or before != row.rank else stream_BsD.detach()
                if before != row.rank:
                    dist.recv(given_BsD, group=row.handle, group_src=before)
                given_BsD.requires_grad_()
            stream_BsD = stage(*([] if given_BsD is None else [given_BsD]), micro_batch=micro_batch)
            passed.append((stage, given_BsD, stream_BsD))
            if not stage.is_last and rank_of(stage.index + 1) != row.rank:
                dist.send(stream_BsD.detach().contiguous(), group=row.handle, group_dst=rank_of(stage.index + 1))
        # Backward: the stream's gradient goes the same way back.
        grad_BsD = None
        for stage, given_BsD, out in reversed(passed):
            if not stage.is_last and rank_of(stage.index + 1) != row.rank:
                grad_BsD = buffer()
                dist.recv(grad_BsD, group=row.handle, group_src=rank_of(stage.index + 1))
            if out.requires_grad:
                out.backward(None if stage.is_last else grad_BsD)
            if given_BsD is not None:
                grad_BsD = given_BsD.grad
                if rank_of(stage.index - 1) != row.rank:
                    assert grad_BsD is not None, "a stage passes the stream on"
                    dist.send(grad_BsD.contiguous(), group=row.handle, group_dst=rank_of(stage.index - 1))
