"""torch's schedules that compute weight gradients late, over stages of the decoder: gradients are those of one process,
and a layer that is recomputed runs twice per micro-batch. (Without the queue they recompute it up to three times, and
fail in the head's loss.)"""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import DTensor

from tests.ranks import on_ranks
from tilewright.core.hardware import detect_machine
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.ops.base.weight_gradient_queue import WeightGradientQueue
from tilewright.ops.kernels import Kernels
from tilewright.parallel.shard import Sharding, keep_fp32_sums, shard
from tilewright.precision.convert import convert
from tilewright.precision.mixed.gradient_queues import attach

pytestmark = pytest.mark.dist
SCHEDULES = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
ROWS, LENGTH, VOCAB = 2, 16, 64
SIZES = {"vocab_size": VOCAB, "dim": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "ffn_dim": 96}
EXPERTS = {"num_experts": 4, "num_experts_per_token": 2, "expert_dim": 32, "num_dense_layers": 1}


def decoder(layers, mode, recompute, kind):
    """The whole model: the same on all ranks."""
    kernels = Kernels(detect_machine("cpu"), compile=False)
    settings = {"tie_embeddings": kind == "tied", **(EXPERTS if kind == "moe" else {})}
    model = Decoder(DecoderConfig(num_layers=layers, **SIZES, **settings), kernels)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.08 + (param.ndim == 1))
    convert(model, mode, kernels=kernels)
    model.activation_checkpoint = recompute
    return model


class Part(nn.Module):
    """Layers in a row, with what is before the first and behind the last one."""

    def __init__(self, model, places, *, first, last):
        super().__init__()
        self.layers = nn.ModuleList(model.blocks[place] for place in places)
        self.ends = nn.ModuleList([model.model.embed_tokens] if first else [])
        if last:
            self.ends.extend([model.model.norm, model.lm_head])
        self._model, self.places, self.first, self.last = (model,), places, first, last

    def forward(self, x, ids, labels):
        (model,) = self._model
        batch = {"input_ids": ids, "labels": labels}
        if self.first:
            x, context = model.prologue(batch)
        else:
            context = model.context(batch)
        for place in self.places:
            x, _ = model.layer(place, x, context)
        return model.epilogue(x, context, batch).loss_sum if self.last else x


def run(rank, name, shards, mode, recompute, kind):
    """(worst error of a gradient, its name, runs of a layer per micro-batch, gradients that did not wait) of a rank."""
    pp = torch.distributed.get_world_size() // shards
    mesh = init_device_mesh("cpu", (pp, shards), mesh_dim_names=("pp", "dp"))
    place, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    stages = 2 * pp
    count = 2 * stages if name == "DualPipeV" else stages
    own = [place, place + pp] if name == "InterleavedZeroBubble" else [place, stages - 1 - place]
    model, whole = (decoder(2 * stages, mode, recompute, kind) for _ in range(2))
    parts, queues, runs = [], [], [0]
    for stage in own:
        part = Part(model, range(2 * stage, 2 * stage + 2), first=stage == 0, last=stage == stages - 1)
        for layer in part.layers:
            layer.post_attention_layernorm.register_forward_hook(lambda *_: runs.__setitem__(0, runs[0] + 1))
        if shards > 1:
            shard(part, list(part.layers), mesh["dp"], Sharding(reshard_after_forward=False))
        queue = WeightGradientQueue()
        attach(part, queue)
        parts.append(part)
        queues.append(queue)
    stream = torch.empty(ROWS, LENGTH, SIZES["dim"], device="meta", dtype=model.residual_dtype, requires_grad=True)
    loss = torch.empty((), device="meta", requires_grad=True)
    pipeline = [
        PipelineStage(
            part, stage, stages, torch.device("cpu"), group=mesh["pp"].get_group(), dw_builder=queue.builder,
            input_args=stream, output_args=loss if part.last else stream,
        )
        for stage, part, queue in zip(own, parts, queues, strict=True)
    ]  # fmt: skip
    schedule = get_schedule_class(name)(
        pipeline, n_microbatches=count, loss_fn=lambda output, _: output, scale_grads=False
    )
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (shards, count, ROWS, LENGTH + 1), generator=generator)
    for part in parts:
        keep_fp32_sums(part)
    mine = ids[replica].flatten(0, 1)
    nothing = torch.zeros(len(mine), LENGTH, SIZES["dim"], dtype=model.residual_dtype)
    with queues[0].region(), queues[1].region():
        schedule.step(
            *([nothing] if parts[0].first else []),
            target=torch.zeros(count) if any(part.last for part in parts) else None,
            return_outputs=False,
            ids=mine[:, :-1],
            labels=mine[:, 1:],
        )
    for one in ids.flatten(0, 1):
        whole.loss({"input_ids": one[:, :-1], "labels": one[:, 1:]}).loss_sum.backward()
    return *compare(model, whole, parts), runs[0] / (4 * count), max(queue.at_once for queue in queues)


def compare(model, whole, parts):
    """Worst relative error of this rank's parameters, and its name."""
    held = {id(param) for part in parts for param in part.parameters()}
    worst = (0.0, "")
    wants = dict(whole.named_parameters())
    for name, param in model.named_parameters():
        if id(param) in held:
            grad = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
            want = wants[name].grad
            assert grad is not None, f"{name} has no gradient"
            worst = max(worst, (float((grad - want).norm() / want.norm()), name))
    return worst


def cases(rank, given):
    return [run(rank, *case) for case in given]


def check(world, given):
    """Only the order of sums differs: eps of FP32 is 6e-8. In 8 bits all operands are those of one process."""
    for case, ranks in zip(given, zip(*on_ranks(world, cases, given, seconds=500), strict=True), strict=True):
        for error, name, runs, at_once in ranks:
            assert error <= 2e-6, f"{case}: {name} is off by {error:.2g}"
            assert runs == (1.0 if case[3] == "none" else 2.0), f"{case}: a layer runs {runs} times per micro-batch"
            assert at_once == 0


@pytest.mark.slow
def test_on_two_ranks():
    """Ragged micro-batches and other models: `pipeline/test_parity.py`."""
    check(2, [("InterleavedZeroBubble", 1, "fp32", "full", "gqa"), ("ZBVZeroBubble", 1, "fp8_tile", "full", "tied")])


@pytest.mark.slow
def test_with_shards_on_four_ranks():
    given = [(name, 2, mode, "full", "gqa") for name, mode in zip(SCHEDULES, ("fp32", "fp8_tile", "fp32"), strict=True)]
    check(4, [*given, ("ZBVZeroBubble", 2, "fp32", "none", "moe"), ("DualPipeV", 2, "fp8_tile", "none", "moe")])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", SCHEDULES)
def test_each_mode_and_kind(name):
    modes = ("bf16_mixed", "fp8_tile")
    check(2, [(name, 1, mode, recompute, kind) for mode in modes for recompute in ("selective", "full")
              for kind in ("gqa", "moe")])  # fmt: skip
    check(4, [(name, 2, mode, "full", kind) for mode in modes for kind in ("gqa", "moe")])
