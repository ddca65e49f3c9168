"""One step of a tiny model on several ranks, against the step of one process with the micro-batches of all of them."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tests.models.shapes import KERNELS, MIXED, SHAPES, make_batch
from tilewright.core import env
from tilewright.memory.chunked_mlp import chunk_mlps
from tilewright.models.base.preference import REFERENCE
from tilewright.models.build import init_weights
from tilewright.models.decoder.decoder import Decoder
from tilewright.models.hf.load import load_hf
from tilewright.optim.clip import GradClip
from tilewright.parallel.mesh import MeshSizes
from tilewright.parallel.shard import Sharding, shard
from tilewright.parallel.world import World, join
from tilewright.precision.convert import convert
from tilewright.precision.lora.lora import add_lora
from tilewright.precision.policy.policy import Policy
from tilewright.precision.policy.rules import Rule
from tilewright.training.executor.standard import StandardExecutor

HF_SIZES = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
            "intermediate_size": 48, "max_position_embeddings": 64}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model and how it is trained."""

    kind: str
    mode: str = "fp32"
    number: int = 2
    """Micro-batches of each rank."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Attributes of the model."""
    chunks: int = 1
    compute: str = ""
    """Integers that linear layers are trained for."""
    lora: str = ""
    """Storage of the frozen weights under adapters."""
    compiled: bool = False
    sharding: Sharding | None = None
    options: dict[str, Any] = field(default_factory=dict)
    """Of the executor on ranks."""


def hf_config(kind):
    """A tiny transformers config: llama, qwen3, mixtral or bert; no dropout, whose draws ranks do not share."""
    import transformers as hf

    grouped = {**HF_SIZES, "num_key_value_heads": 2}
    if kind == "llama":
        return hf.LlamaConfig(**grouped, tie_word_embeddings=True)
    if kind == "qwen3":
        return hf.Qwen3Config(**grouped, head_dim=8)
    if kind == "mixtral":
        return hf.MixtralConfig(**grouped, num_local_experts=5)
    return hf.BertConfig(**HF_SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def build(kind, device="cpu"):
    """A decoder by its name in `shapes`, or a Hugging Face model; on the meta device without values."""
    if kind in SHAPES | MIXED:
        with torch.device(device):
            model = Decoder((SHAPES | MIXED)[kind], KERNELS)
    else:
        task = "masked_lm" if kind == "bert" else "causal_lm"
        model = load_hf(hf_config(kind), task, kernels=KERNELS, device=device)
    if device == "cpu":
        init_weights(model, 0)
    return model.train()


def adapt(model, base, size=0.1, **more):
    """Adapters that are not zero, on frozen weights stored as `base`; none where that is empty. Of a `size` that makes
    more of the adapters than of the base, softmax makes much of a last bit."""
    if base:
        add_lora(model, 4, base=base, kernels=KERNELS, **more)
        for name, param in model.named_parameters():
            if name.endswith("lora_B"):
                param.data.normal_(0, size, generator=torch.Generator().manual_seed(len(name)))


def made(case):
    """The model of a case, whole."""
    model = build(case.kind)
    adapt(model, case.lora)
    rules = (Rule(compute=case.compute),) if case.compute else ()
    convert(model, Policy(case.mode, rules, device_type="cpu"), kernels=KERNELS)
    for name, value in case.settings.items():
        setattr(model, name, value)
    if case.compiled:
        model.compile_blocks()
    if case.chunks > 1:
        chunk_mlps(model, case.chunks, print)
    return model


def microbatches(rank, number, rows=2):
    """A rank's micro-batches of one step, with numbers of targets of their own; the first of rank 1 has none."""
    batches = [make_batch(rows, 16, seed=100 * rank + index) for index in range(number)]
    for index, batch in enumerate(batches):
        batch["labels"][:, : (3 * rank + index) % 7] = -100
    if rank == 1:
        batches[0]["labels"][:] = -100
    return batches


def as_pairs(batch):
    """Two rows each as the answers to a prompt, of which the first is preferred."""
    pairs = {name: tensor.view(-1, 2, *tensor.shape[1:]) for name, tensor in batch.items()}
    count = len(pairs["labels"])
    generator = torch.Generator().manual_seed(int(batch["input_ids"].sum()))
    reference = -50 - 10 * torch.rand(count, 2, generator=generator)
    return {**pairs, REFERENCE: reference, "beta": torch.full((count,), 0.1), "rows": torch.arange(count)}


class Seen(torch.optim.SGD):
    """Keeps whole gradients as the update sees them, in FP64; on ranks all of them gather what is in parts."""

    def __init__(self, model, lr=0.0):
        trained = [param for param in model.parameters() if param.requires_grad]
        super().__init__(trained or [{"params": []}], lr=lr)  # a rank may have nothing to train
        self.model, self.grads, self.dtypes = model, {}, set()

    def step(self):
        for name, param in self.model.named_parameters():
            if param.grad is not None:
                self.dtypes.add(param.grad.dtype)
                self.grads[name] = (param.grad.full_tensor() if is_part(param) else param.grad).double()


def is_part(param):
    """Whether a rank holds a part of it."""
    return isinstance(param, DTensor)


def world_of(sizes):
    """The mesh of a test's ranks: copies, shards."""
    return join(env.ranks(), MeshSizes(dp_replicate=sizes[0], dp_shard=sizes[1]), torch.device("cpu"))


def groups_of(world):
    """What executors take of a world."""
    return {"data": world.data.handle, "everyone": world.everyone.handle}


def run(model, world, batches, **options):
    """One step; (optimizer with gradients, result)."""
    optimizer = Seen(model)
    executor = StandardExecutor(
        model, optimizer, clip=GradClip(0.0, experts=world.experts.handle), **groups_of(world), **options
    )
    return optimizer, executor.step(batches, 0.0)


def compare(rank, sizes, cases):
    """On one of the ranks: for each case (worst tensor, its error against its largest element, error of the loss, of
    the norm); of the first rank alone, which computes the step of one process too."""
    world = world_of(sizes)
    ranks, found = world.size, []
    for case in cases:
        model = made(case)
        if world.fsdp_mesh is not None:
            shard(model, model.layers, world.fsdp_mesh, case.sharding or Sharding())
        seen, result = run(model, world, microbatches(rank, case.number), **case.options)
        if rank:
            continue
        batches = [batch for other in range(ranks) for batch in microbatches(other, case.number)]
        want, alone = run(made(case), World.alone(), batches)
        assert seen.grads.keys() == want.grads.keys()
        assert seen.dtypes == {torch.float32}
        assert (result.num_targets, result.num_tokens) == (alone.num_targets, alone.num_tokens)
        errors = {name: relative(seen.grads[name], grad) for name, grad in want.grads.items()}
        worst = max(errors, key=errors.__getitem__)
        found.append((worst, errors[worst], abs(result.loss - alone.loss), abs(result.grad_norm / alone.grad_norm - 1)))
    return found


def relative(value, want):
    """Largest difference against the largest element."""
    return float((value - want).abs().max() / want.abs().max().clamp_min(1e-30))
