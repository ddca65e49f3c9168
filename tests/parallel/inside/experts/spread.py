"""One step of a tiny mixture of experts spread over ranks, against the step of one process with all micro-batches."""

import itertools
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from tests.models.shapes import KERNELS, SHAPES, make_batch
from tests.parallel.steps import Seen, adapt, groups_of, relative
from tests.ranks import of_one_rank
from tilewright.core import env
from tilewright.formats.quantize import quantize
from tilewright.formats.tiled import FP8_ROW
from tilewright.models.build import init_weights, random_values
from tilewright.models.decoder.decoder import Decoder
from tilewright.optim.clip import GradClip
from tilewright.parallel.fill_shards import shard_all, shard_from_meta
from tilewright.parallel.inside.experts.rank_experts import hold_experts, mixtures
from tilewright.parallel.inside.experts.redundant_experts import held_before
from tilewright.parallel.liveness.checksum import checksum
from tilewright.parallel.mesh import MeshSizes
from tilewright.parallel.shard import Sharding
from tilewright.parallel.world import World, join
from tilewright.precision.convert import convert
from tilewright.training.executor.standard import StandardExecutor

EXPERTS = 4


@dataclass(frozen=True)
class Case:
    """A model and how it is trained."""

    ep: int
    shards: int = 0
    """0: as many as `ep`."""
    copies: int = 1
    kind: str = "gqa_moe"
    mode: str = "fp32"
    number: int = 2
    settings: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    dispatch: str = "stream"
    batches: str = "mixed"
    """`mixed`, or `last`: all tokens go to the last expert that they may go to, and most ranks get none."""
    lora: str = ""
    """Storage of the frozen weights under adapters."""
    targets: tuple[str, ...] = ("*",)
    """Of adapters."""
    dropout: float = 0.0
    """Of their inputs."""
    redundant: int = 0
    """Copies of others' experts that a rank holds."""
    order: tuple[int, ...] = ()
    """Of the experts of each layer, as ranks hold them."""

    @property
    def sizes(self) -> MeshSizes:
        """The mesh."""
        return MeshSizes(dp_replicate=self.copies, dp_shard=self.shards or self.ep, ep=self.ep)


def world_of(case: Case) -> World:
    """Of a test's ranks."""
    return join(env.ranks(), case.sizes, torch.device("cpu"))


def whole(case: Case) -> Decoder:
    """The model of one process."""
    model = Decoder(SHAPES[case.kind], KERNELS)
    init_weights(model, 0)
    if case.dispatch == "fp8":
        for layer in mixtures(model):
            layer.exchange = rounded_rows
    adapt(model, case.lora, 0.02, targets=case.targets, dropout=case.dropout)
    return prepared(model, case)


def rounded_rows(rows_PD: torch.Tensor, counts_E: torch.Tensor, run: Any) -> torch.Tensor:
    """What experts of one process make of rows that are rounded as FP8 rounds them."""
    return torch.cat(run(_Rounded.apply(rows_PD).split(counts_E.tolist())))


class _Rounded(torch.autograd.Function):
    """By the definition of the format. Gradients pass as they are."""

    @staticmethod
    def forward(ctx, x_PD):
        return quantize(x_PD, FP8_ROW).dequantize(x_PD.dtype)

    @staticmethod
    def backward(ctx, grad_PD):
        return grad_PD


def prepared(model: Decoder, case: Case) -> Decoder:
    """Converted and set as the case says."""
    convert(model.train(), case.mode, kernels=KERNELS)
    for name, value in case.settings.items():
        setattr(model, name, value)
    if case.batches == "last":
        for layer in mixtures(model):
            layer.gate.e_score_correction_bias = torch.arange(layer.num_experts).float() * 100
    return model


def spread(case: Case, world: World) -> Decoder:
    """The same over ranks, from the meta device; with adapters from one that is whole."""
    if case.lora:
        model = whole(case)
        hold(model, world, case)
        assert world.fsdp_mesh is not None, "shards"
        shard_all(model, model.layers, world.fsdp_mesh, Sharding())
        return model
    with torch.device("meta"):
        model = Decoder(SHAPES[case.kind], KERNELS)
    values = random_values(model, 0)
    prepared(model, case)
    hold(model, world, case)
    shard_from_meta(model, model.layers, world.fsdp_mesh, Sharding(), values, torch.device("cpu"))
    return prepared_buffers(model, case)


def hold(model: Decoder, world: World, case: Case) -> None:
    """Its experts over ranks."""
    order = case.order * len(list(mixtures(model)))
    hold_experts(model, world, case.dispatch, order, redundant=case.redundant)


def prepared_buffers(model: Decoder, case: Case) -> Decoder:
    """What the initial values have written over."""
    if case.batches == "last":
        for layer in mixtures(model):
            layer.gate.e_score_correction_bias.copy_(torch.arange(layer.num_experts).float() * 100)
    return model


def microbatches(rank: int, number: int) -> list[dict[str, torch.Tensor]]:
    """A rank's, with numbers of targets of their own; the first of rank 1 has none."""
    batches = [make_batch(2, 16, seed=100 * rank + index) for index in range(number)]
    for index, batch in enumerate(batches):
        batch["labels"][:, : (3 * rank + index) % 7] = -100
    if rank == 1:
        batches[0]["labels"][:] = -100
    return batches


def step(model: Decoder, world: World, batches: list[Any], **options: Any) -> tuple[Seen, Any]:
    """One step; (optimizer with gradients, result)."""
    seen = Seen(model)
    groups = {"row": world.row.handle, "experts": world.experts.handle}
    clip = GradClip(0.0, **groups, counted_elsewhere=held_before(model))
    executor = StandardExecutor(model, seen, clip=clip, **groups_of(world), **options)
    return seen, executor.step(batches, 0.0)


def draw_by_batch(model: Decoder, first: int) -> None:
    """Let each micro-batch draw what belongs to its number among those of all ranks.

    Args:
        model: whose embedding runs once for each.
        first: the number of this rank's first.
    """
    numbers = itertools.count(first)
    model.model.embed_tokens.register_forward_pre_hook(lambda *_: torch.manual_seed(next(numbers)) and None)


def alone_step(case: Case, ranks: int) -> tuple[dict[str, torch.Tensor], Any, list[torch.Tensor]]:
    """Of one process with the micro-batches of all ranks: gradients by name, the result, the biases of routers."""
    model = whole(case)
    draw_by_batch(model, 0)
    batches = [batch for rank in range(ranks) for batch in microbatches(rank, case.number)]
    seen, result = step(model, World.alone(), batches)
    return seen.grads, result, [layer.gate.e_score_correction_bias for layer in mixtures(model)]


def compare(rank: int, cases: list[Case]) -> list[dict[str, Any]]:
    """On each rank, for each case: errors by name, of loss and norm, and how many rows experts here have had."""
    found = []
    for case in cases:
        world = world_of(case)
        model = spread(case, world)
        draw_by_batch(model, rank * case.number)
        seen, result = step(model, world, microbatches(rank, case.number), **case.options)
        want, alone, want_biases = of_one_rank(partial(alone_step, case, world.size))
        errors = {name: relative(grad, want[name]) for name, grad in seen.grads.items()}
        biases = [
            torch.equal(ours.gate.e_score_correction_bias, theirs)
            for ours, theirs in zip(mixtures(model), want_biases, strict=True)
        ]
        found.append({
            "errors": errors,
            "bits": {name: checksum(grad) for name, grad in seen.grads.items()},
            "whole": sorted(want),
            "loss": abs(result.loss - alone.loss),
            "norm": abs(result.grad_norm / alone.grad_norm - 1),
            "aux": (result.aux, alone.aux) if hasattr(result, "aux") else (),
            "biases": all(biases),
            "sent": sum(layer.exchange.sent_bytes for layer in mixtures(model)),
            "dtypes": seen.dtypes,
        })  # fmt: skip
    return found
