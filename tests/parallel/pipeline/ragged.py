"""Steps of micro-batches whose shapes and numbers differ, and the gradients that one process has of them."""

import copy
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache, partial

import torch
from torch.distributed.tensor import DTensor

from tests.models.shapes import KERNELS, MIXED, SHAPES
from tests.ranks import of_one_rank
from tests.zoo.families import FAMILIES
from tilewright.core import env
from tilewright.models.build import init_weights
from tilewright.models.decoder.decoder import Decoder
from tilewright.models.hf.load import load_hf
from tilewright.models.hf.model import HFModel
from tilewright.parallel.communicate.communicator import AsyncCommunicator
from tilewright.parallel.fill_shards import shard_all
from tilewright.parallel.gradients import sum_gradients
from tilewright.parallel.inside.experts.rank_experts import has_experts, hold_experts
from tilewright.parallel.inside.tensor.cut_decoder import cut_tensors
from tilewright.parallel.inside.tensor.sequence_slices import sum_of_slices
from tilewright.parallel.mesh import MeshSizes
from tilewright.parallel.pipeline.rank_passes import PipelineSteps
from tilewright.parallel.pipeline.rank_stages import hold_stages
from tilewright.parallel.pipeline.stage_split import Pipeline
from tilewright.parallel.shard import Sharding
from tilewright.parallel.world import join

EVEN = {
    "gqa_even": replace(SHAPES["gqa"], vocab_size=64),
    "tied_even": replace(SHAPES["tied"], vocab_size=64, num_kv_heads=2),
    "mla_even": replace(SHAPES["mla_q_rank"], vocab_size=64),
    "moe_even": replace(SHAPES["deepseek"], vocab_size=64),
    "own_even": replace(MIXED["own_gqa"], vocab_size=64),
}
"""Shapes whose embedding and head can be cut over ranks too."""
TOLERANCE = 2e-6
"""Of a gradient in FP32, relative to its norm: eps is 6e-8, and what differs is the order of a few dozen sums. Norms of
heads in Hugging Face models cancel out more: there it is beyond what FP32 of one process is off from FP64."""
FACTOR = 0.125


def decoder(kind: str, layers: int, seed: int = 0) -> Decoder:
    """A tiny decoder of so many layers, in FP32."""
    config = (SHAPES | EVEN)[kind]
    own = (config.layers * layers)[:layers]  # those of one shape are as many as there are to be
    model = Decoder(replace(config, num_layers=layers, layers=own), KERNELS)
    init_weights(model, seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.dim() > 1 and "gate.weight" not in name:
                param.mul_(3.0)
    return model


def model_of(kind: str, layers: int) -> Decoder | HFModel:
    """The decoder of a shape, or the Hugging Face model of a family of the zoo."""
    if kind in SHAPES or kind in EVEN:
        return decoder(kind, layers)
    family = next(one for one in FAMILIES if one.name == kind.removesuffix("-tied"))
    changes = {"num_hidden_layers": layers, "tie_word_embeddings": kind.endswith("-tied")}
    torch.manual_seed(0)
    return load_hf(family.config(**changes), "causal_lm", kernels=KERNELS).train()


def micro_batches(count: int, generator: torch.Generator) -> list[dict[str, torch.Tensor]]:
    """Rows, positions and documents differ from one to the next."""

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    found = []
    for _ in range(count):
        rows, length = number(1, 4), number(3, 24)
        cut = number(1, length)
        ids = torch.randint(0, 61, (rows, length + 1), generator=generator)
        labels = ids[:, 1:].clone()
        labels[:, number(0, length)] = -100
        positions = torch.cat([torch.arange(cut), torch.arange(length - cut)]).expand(rows, -1).contiguous()
        segments = (torch.arange(length) >= cut).int().expand(rows, -1).contiguous()
        ids = ids[:, :-1].contiguous()
        found.append({"input_ids": ids, "labels": labels, "positions": positions, "segments": segments})
    return found


def counts_of(pipeline: Pipeline) -> tuple[int, ...]:
    """Numbers of micro-batches of the steps: the second is the larger one, and the first comes again; the schedule
    takes both."""
    few, many = [count for count in range(1, 4 * pipeline.pp) if pipeline.takes(count)][:2]
    return few, many, few


def _batches(counts: Iterable[int], rows: int) -> Iterator[list[list[dict[str, torch.Tensor]]]]:
    """Micro-batches of each step, by row of the mesh."""
    generator = torch.Generator().manual_seed(3)
    for count in counts:
        yield [micro_batches(count, generator) for _ in range(rows)]


@cache
def _alone(
    kind: str, layers: int, counts: tuple[int, ...], rows: int
) -> list[tuple[dict[str, torch.Tensor], list[list[torch.Tensor]], dict[str, float]]]:
    """Of one process, for each step: gradients by name, losses by row of the mesh and micro-batch, and of a Hugging
    Face model how far each gradient is off from FP64."""
    model, found = model_of(kind, layers), []
    exact = _in_fp64(model) if isinstance(model, HFModel) else None
    for batches in _batches(counts, rows):
        gradients, losses = _step(model, batches)
        wanted = {} if exact is None else _step(exact, batches)[0]
        found.append((gradients, losses, {name: _off(gradients[name], grad) for name, grad in wanted.items()}))
    return found


def _in_fp64(model: HFModel) -> HFModel:
    """A copy whose experts are run one by one: grouped matmuls take no FP64."""
    exact = copy.deepcopy(model).double()
    exact.net.set_experts_implementation("eager")  # type: ignore[operator]
    return exact


def _step(
    model: Decoder | HFModel, batches: list[list[dict[str, torch.Tensor]]]
) -> tuple[dict[str, torch.Tensor], list[list[torch.Tensor]]]:
    """Gradients by name, and losses, of one process."""
    model.zero_grad(set_to_none=True)
    losses = [[model.loss(batch).loss_sum for batch in of_row] for of_row in batches]
    sum(loss for of_row in losses for loss in of_row).mul(FACTOR).backward()
    gradients = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    return gradients, [[loss.detach() for loss in of_row] for of_row in losses]


def _off(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The norm of the difference, relative to that of what is wanted."""
    return float((got.to(wanted.dtype) - wanted).norm() / wanted.norm())


def worst_gradient(
    pipeline: Pipeline,
    kind: str,
    shards: int = 1,
    copies: int = 1,
    recompute: str = "none",
    tp: int = 1,
    slices: bool = True,
    ep: int = 1,
):
    """The worst gradient of any step on this rank, against one process: (error as `TOLERANCE` counts it, name, error);
    and the names of its parameters."""
    sizes = MeshSizes(pp=pipeline.pp, dp_shard=shards, dp_replicate=copies, tp=tp, ep=ep)
    world = join(env.ranks(), sizes, torch.device("cpu"))
    layers = pipeline.num_stages + 1
    whole = model_of(kind, layers)
    apart = ep > 1 or (tp > 1 and has_experts(whole))
    held = hold_stages(whole, pipeline, world.row)
    held.activation_checkpoint = recompute
    if apart:
        hold_experts(held, world)
    if tp > 1:
        cut_tensors(held, world, sequence_parallel=slices)
    mesh = world.fsdp_mesh_beside(apart)
    if mesh is not None:
        shard_all(held, (), mesh, Sharding(reshard_after_forward=recompute != "none"), held.stages)
    steps, worst = PipelineSteps(held, torch.device("cpu")), (0.0, "", 0.0)
    params, counts = list(held.parameters()), counts_of(pipeline)
    wanted = of_one_rank(partial(_alone, kind, layers, counts, world.data.size))
    for batches, (want, losses, own) in zip(_batches(counts, world.data.size), wanted, strict=True):
        for param in params:
            param.grad = None
        results = steps.run(batches[world.data.rank], FACTOR)
        if mesh is None:
            sum_gradients(AsyncCommunicator(world.data.handle), params)
        sum_of_slices(held)
        assert tp * ep == 1 or not any(queue.at_once for queue in steps.queues), "weights' gradients wait"
        for result, loss in zip(results, losses[world.data.rank], strict=True):
            if held.stages[-1].is_last:
                torch.testing.assert_close(result.loss_sum, loss, rtol=1e-6, atol=0)
        names = [name for name, _ in held.named_parameters()]
        assert set(names) <= want.keys()
        for name, param in held.named_parameters():
            assert param.grad is not None, name
            got = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
            error = _off(got, want[name])
            worst = max(worst, (error - own.get(name, 0.0), name, error))
    return worst, names
