"""Bytes of a rank of FSDP2 as torch's own `FSDPMemTracker` counts them, beside those of a search over meshes.

The model, its precision, FSDP2's groups and the optimizer are those of a run; tensors are fake, and so is the group of
ranks, so nothing is computed or sent. A step of the first rank is tracked, its second one: it has its states. What the
two count differently:

    the tracker    counts storages as an allocator hands them out, of eager layers and CPU operations; the head's loss
                   has five blocks of a chunk there, the fused ones of a GPU two
    the plan       takes the busiest moment of each phase: a layer's own gradients count where they are more than what
                   the layer has let go by then; small tensors (rotary angles, masks, ids) are in none of its phases
"""

import multiprocessing as mp
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tilewright.core.config.load import load_recipe
from tilewright.core.config.recipe import Recipe
from tilewright.core.hardware import detect_machine
from tilewright.core.memory_plan import KIND_OF, STEP_PHASES, memory_plan_of
from tilewright.models.build import build_model
from tilewright.ops.backends.ref.low_bit_adam import factors
from tilewright.ops.base.tensor_parts import part_of, zeros_beside
from tilewright.ops.kernels import Kernels
from tilewright.parallel.mesh import MeshSizes
from tilewright.parallel.pipeline.stage_split import Pipeline
from tilewright.parallel.shard import Sharding, shard
from tilewright.planner.machine.gpu_specs import HOST_BYTES, find_published
from tilewright.planner.simulate.mesh.mesh_model import MeshModel
from tilewright.planner.simulate.mesh.mesh_setting import MeshSetting
from tilewright.planner.simulate.mesh.rank_memory import rank_memory
from tilewright.planner.trace.fake_model import to_fake
from tilewright.precision.assign.conversion_plan import decide_all
from tilewright.precision.assign.gather_dtype import settle
from tilewright.precision.convert import convert
from tilewright.precision.policy.policy import Policy
from tilewright.training.components.optimizer import make_optimizer
from tilewright.training.executor.activation_policy import checkpoint_layers

LLAMA = {
    "model.tie_embeddings": "false", "model.num_kv_heads": "8", "data.vocab_size": "128256", "data.seq_len": "8192",
    "precision.mode": "bf16_mixed", "optim.kind": "adamw", "optim.moments": "fp32", "train.compile": "off",
    "train.micro_batch_size": "1", "ops.adam": "ref", "ops.low_bit_adam": "ref", "ops.cross_entropy": "native",
    "run.device": "cpu",
}  # fmt: skip


class LossModel(nn.Module):
    """A model whose forward pass gives the loss: the tracker sees modules that are called."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.uses_every_parameter = model, model.uses_every_parameter

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Of a batch."""
        return self.model.loss(batch).loss_sum


def recipe_of(settings: dict[str, str], world: int) -> Recipe:
    """Of a run of so many shards, one row in each."""
    mesh = {"parallel.dp_shard": str(world), "train.global_batch_size": str(world)}
    return load_recipe("default", settings | mesh, environ={}).recipe


def tracked(settings: dict[str, str], world: int) -> dict[str, float]:
    """Bytes by owner that the tracker counts. Call it in a process of its own: it makes a process group."""
    recipe, device = recipe_of(settings, world), torch.device("cpu")
    kernels = Kernels.from_sections(detect_machine("cpu"), recipe.ops, recipe.memory)
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    mesh, fake = init_device_mesh("cpu", (world,)), FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        model: Any = build_model(recipe.model, recipe.data.vocab_size, kernels, "meta")
        checkpoint_layers(model, memory_plan_of(recipe, len(model.layers)))
        convert(model.train(), Policy.from_section(recipe.precision, "cpu"))
        to_fake(model, device)
        whole = LossModel(model)
        shard(whole, model.layers, mesh, Sharding(recipe.parallel.reshard_after_forward))
        fully_shard.state(whole)._lazy_init()  # as `ready` does it: the root begins
        settle(model, decide_all(model, model.precision_report.policy).sites)
    with fake:
        optimizer = make_optimizer(recipe.optim, model, kernels, 0, None)
    for param in whole.parameters():  # where parts lie is read from the mesh, which is no fake tensor, and then kept
        part_of(param)
        for shape, dtype in optimizer.state_layout(param).values():
            zeros_beside(shape, dtype, param)
    for group in range(len(optimizer.param_groups)):  # these are numbers, which fake tensors have not
        for step in (1, 2):
            factors(optimizer._hyper(group, step))
    with fake:
        ids = torch.zeros(1, recipe.data.seq_len, dtype=torch.int64)
        batch = {"input_ids": ids, "labels": ids.clone()}
        for param in model.parameters():  # states are there before the step that is tracked
            param.grad = torch.zeros_like(param)
        optimizer.step()
        optimizer.zero_grad()
        tracker = FSDPMemTracker(whole, optimizer)
        tracker.track_inputs(tuple(batch.values()))
        with tracker:
            loss = whole(batch)
            forward = _by_name(tracker, "current")
            loss.backward()
            del loss
            update = _by_name(tracker, "current")
            optimizer.step()
    dist.destroy_process_group()
    return {
        "parameters": forward["SHARDED_PARAM"] + forward["UNSHARDED_PARAM"],
        "activations": forward["ACT"],
        "gradients": update["SHARDED_GRAD"],
        "optimizer": update["OPT"],
        "peak": _by_name(tracker, "peak")["TOTAL"],
    }


def _by_name(tracker: FSDPMemTracker, moment: str) -> dict[str, int]:
    """A snapshot of the one device."""
    found = tracker.get_tracker_snapshot(moment)[torch.device("cpu")]
    return {str(owner).rpartition(".")[2].upper(): size for owner, size in found.items()}


def planned(settings: dict[str, str], world: int) -> dict[str, float]:
    """The same of the search over meshes, of a rank whose memory is a GPU's."""
    recipe, gpu = recipe_of(settings, world), find_published("h100")
    model = MeshModel(recipe, recipe.data.vocab_size, gpu.machine(detect_machine("cpu"), HOST_BYTES), gpu.ceilings())
    optim, kind = recipe.optim, KIND_OF[recipe.train.activation_checkpoint]
    setting = MeshSetting(MeshSizes(dp_shard=world), Pipeline(1), 1, 1, kind, optim.moments, optim.master_weights)
    held = model.layers_of([range(model.whole.num_layers)], [0])
    phases = rank_memory(model, setting, held, 0.0)[0].phases
    peaks = [
        sum(owners.values()) - owners["process"] for name, owners in phases.items() if name.startswith(STEP_PHASES)
    ]
    return {
        "parameters": phases["loss"]["parameters"],
        "activations": phases["loss"]["activations"],
        "gradients": phases["update"]["gradients"],
        "optimizer": phases["update"]["optimizer"],
        "peak": max(peaks),
    }


def apart(settings: dict[str, str], world: int, timeout_s: float) -> dict[str, float]:
    """`tracked`, in a process of its own."""
    with ProcessPoolExecutor(1, mp.get_context("spawn")) as pool:
        return pool.submit(tracked, settings, world).result(timeout_s)
