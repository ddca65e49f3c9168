"""One step of a tiny model on several ranks, and on one process with the same micro-batches: what both tests of
`parallel` and of the executors compare."""

import torch
from torch.distributed.tensor import DTensor

from tests.models.shapes import KERNELS, SHAPES, make_batch
from tilewright.core import env
from tilewright.models.build import init_weights
from tilewright.models.decoder.decoder import Decoder
from tilewright.models.hf.load import load_hf
from tilewright.optim.clip import GradClip
from tilewright.parallel.shard import shard
from tilewright.parallel.world import MeshSizes, World, join
from tilewright.precision.convert import convert
from tilewright.training.executor.standard import StandardExecutor

HF_SIZES = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
            "intermediate_size": 48, "max_position_embeddings": 64}  # fmt: skip


def hf_config(kind):
    """A tiny transformers config: llama, qwen3 or bert; no dropout, whose draws ranks do not share."""
    import transformers as hf

    grouped = {**HF_SIZES, "num_key_value_heads": 2}
    if kind == "llama":
        return hf.LlamaConfig(**grouped, tie_word_embeddings=True)
    if kind == "qwen3":
        return hf.Qwen3Config(**grouped, head_dim=8)
    return hf.BertConfig(**HF_SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def build(kind, device="cpu"):
    """A decoder by its name in `shapes`, or a Hugging Face model; on the meta device without values."""
    if kind in SHAPES:
        with torch.device(device):
            model = Decoder(SHAPES[kind], KERNELS)
    else:
        task = "masked_lm" if kind == "bert" else "causal_lm"
        model = load_hf(hf_config(kind), task, kernels=KERNELS, device=device)
    if device == "cpu":
        init_weights(model, 0)
    return model


def microbatches(rank, number, rows=2):
    """A rank's micro-batches of one step, with numbers of targets of their own; the first of rank 1 has none."""
    made = [make_batch(rows, 16, seed=100 * rank + index) for index in range(number)]
    for index, batch in enumerate(made):
        batch["labels"][:, : (3 * rank + index) % 7] = -100
    if rank == 1:
        made[0]["labels"][:] = -100
    return made


class Seen(torch.optim.SGD):
    """Keeps whole gradients as the update sees them, in FP64; on ranks all of them gather what is in parts."""

    def __init__(self, model, lr):
        super().__init__(model.parameters(), lr=lr)
        self.model, self.grads, self.dtypes = model, {}, {}

    def step(self):
        for name, param in self.model.named_parameters():
            grad = param.grad
            self.dtypes[name] = None if grad is None else grad.dtype
            whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
            self.grads[name] = None if whole is None else whole.double()
        super().step()


def world_of(replicate, shards):
    """The mesh of a test's ranks."""
    return join(env.ranks(), MeshSizes(replicate, shards), torch.device("cpu"))


def run(model, world, batches, *, lr=0.0, **options):
    """One step; (gradients, result)."""
    optimizer = Seen(model, lr)
    executor = StandardExecutor(model, optimizer, clip=GradClip(0.0), group=world.data_group, **options)
    result = executor.step(batches, lr)
    return optimizer, result


def on_one(kind, ranks, number, mode="fp32", prepare=lambda model: None, **policy):
    """The step of one process with the micro-batches of all ranks."""
    model = convert(build(kind), mode, kernels=KERNELS)
    prepare(model)
    batches = [batch for rank in range(ranks) for batch in microbatches(rank, number)]
    return run(model, World.alone(), batches)


def on_rank(rank, kind, sizes, number, mode, sharding, options, prepare):
    """The same step on one of the ranks: (gradients, loss, norm, targets)."""
    world = world_of(*sizes)
    model = convert(build(kind), mode, kernels=KERNELS)
    if prepare is not None:
        prepare(model)
    if world.fsdp_mesh is not None:
        shard(model, model.layers, world.fsdp_mesh, sharding)
    seen, result = run(model, world, microbatches(rank, number), **options)
    grads = {name: None if grad is None else grad.numpy() for name, grad in seen.grads.items()}
    return grads if rank == 0 else None, result.loss, result.grad_norm, result.num_targets
