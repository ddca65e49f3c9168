"""One step of a tiny decoder whose matrices are cut over ranks, against the step of one process with all rows."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from tests.models.shapes import KERNELS
from tests.parallel.steps import adapt, as_pairs, microbatches, relative, run
from tests.ranks import of_one_rank
from tilewright.core import env
from tilewright.core.config.recipe import ParallelSection
from tilewright.memory.chunked_mlp import chunk_mlps
from tilewright.models.build import init_weights, random_values
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.models.distill.loss import HEAD, HIDDEN, HOW, how
from tilewright.parallel.inside.experts.rank_experts import mixtures
from tilewright.parallel.mesh import MeshSizes
from tilewright.parallel.parallelize import compile_layers, parallelize
from tilewright.parallel.world import World, join
from tilewright.precision.convert import convert

WIDE = {"vocab_size": 64, "dim": 32, "num_heads": 8, "num_layers": 2, "ffn_dim": 96}
LATENT = {"attention": "mla", "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
MIXED = {"num_experts": 4, "num_experts_per_token": 2, "num_shared_experts": 1, "expert_dim": 24, "num_dense_layers": 1}
CONFIGS = {
    "moe": DecoderConfig.of(**WIDE, **MIXED, num_kv_heads=4),
    "latent_moe": DecoderConfig.of(
        **WIDE, **LATENT, **MIXED | {"num_shared_experts": 0}, num_expert_groups=2, tie_embeddings=False
    ),
    "gqa": DecoderConfig.of(**WIDE, num_kv_heads=4),
    "untied": DecoderConfig.of(**WIDE, num_kv_heads=4, tie_embeddings=False),
    "mla": DecoderConfig.of(**WIDE, **LATENT),
    "mla_q": DecoderConfig.of(**WIDE, **LATENT, q_lora_rank=24, tie_embeddings=False),
    "windows": DecoderConfig.of(
        **WIDE, num_kv_heads=4, layers=({"sliding_window": 4}, {"ffn_dim": 48, "num_heads": 4})
    ),
    "three": DecoderConfig.of(
        vocab_size=66, dim=24, num_heads=6, num_kv_heads=3, head_dim=6, ffn_dim=36, num_layers=2, sliding_window=5
    ),
    "odd_vocabulary": replace(DecoderConfig.of(**WIDE, num_kv_heads=4), vocab_size=61),
}


@dataclass(frozen=True)
class Case:
    """A model and how it is trained."""

    tp: int
    shards: int = 1
    ep: int = 1
    copies: int = 1
    length: int = 16
    """Of the rows, 16 at most."""
    rows: int = 2
    """Of a micro-batch."""
    documents: bool = False
    """Several in each row, and padding behind the last."""
    pairs: bool = False
    """Of answers, see `models.base.preference`."""
    taught: bool = False
    """By a teacher, whose hidden values and head the batches have."""
    slices: bool = True
    """Of the residual stream on each rank."""
    kind: str = "gqa"
    mode: str = "fp32"
    number: int = 2
    settings: dict[str, Any] = field(default_factory=dict)
    chunks: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    reshard: bool = True
    compiled: bool = False
    lora: str = ""
    """Storage of the frozen weights under adapters."""
    dropout: float = 0.0
    """Of adapters' inputs."""
    targets: tuple[str, ...] = ("*",)
    """Of adapters."""

    @property
    def sizes(self) -> MeshSizes:
        """The mesh."""
        return MeshSizes(dp_replicate=self.copies, dp_shard=self.shards, tp=self.tp, ep=self.ep)


def world_of(case: Case) -> World:
    """Of a test's ranks."""
    return join(env.ranks(), case.sizes, torch.device("cpu"))


def prepared(model: Decoder, case: Case) -> Decoder:
    """Converted and set as the case says."""
    convert(model.train(), case.mode, kernels=KERNELS)
    for name, value in case.settings.items():
        setattr(model, name, value)
    return model


def whole(case: Case) -> Decoder:
    """The model of one process."""
    model = Decoder(CONFIGS[case.kind], KERNELS)
    init_weights(model, 0)
    adapt(model, case.lora, 0.02, dropout=case.dropout, targets=case.targets)
    prepared(model, case)
    if case.chunks > 1:
        chunk_mlps(model, case.chunks, print)
    return model


def cut(case: Case, world: World) -> Decoder:
    """The same over ranks, from the meta device; with adapters from one that is whole."""
    if case.lora:
        model, values = whole(replace(case, chunks=1)), None
    else:
        with torch.device("meta"):
            model = Decoder(CONFIGS[case.kind], KERNELS)
        values = random_values(model, 0)
        prepared(model, case)
    section = ParallelSection(reshard_after_forward=case.reshard, sequence_parallel=case.slices)
    parallelize(model, world, section, device=torch.device("cpu"), values=values)
    if case.chunks > 1:
        chunk_mlps(model, case.chunks, print)
    if case.compiled:
        compile_layers(model, world)
    return model


def _batches(case: Case, rank: int) -> list[dict[str, torch.Tensor]]:
    """A data rank's micro-batches."""
    batches = [
        {name: tensor[:, : case.length].contiguous() for name, tensor in batch.items()}
        for batch in microbatches(rank, case.number, case.rows)
    ]
    for batch in batches if case.documents else ():
        place = torch.arange(case.length).expand_as(batch["labels"])
        batch["segments"] = torch.where(place < 5, 0, torch.where(place < case.length - 2, 1, -1))
        batch["positions"] = torch.where(place < 5, place, place - 5)
        batch["labels"] = batch["labels"].masked_fill(batch["segments"] < 0, -100)
    generator = torch.Generator().manual_seed(rank)
    for batch in batches if case.taught else ():
        shape, words = batch["labels"].shape, CONFIGS[case.kind].vocab_size
        batch[HIDDEN] = torch.randn(*shape, 24, generator=generator)
        batch[HEAD] = 0.1 * torch.randn(words, 24, generator=torch.Generator().manual_seed(9))
        batch[HOW] = how(2.0, 0.5, "forward_kl")
    return [as_pairs(batch) for batch in batches] if case.pairs else batches


def _alone(case: Case, ranks: int) -> tuple[dict[str, torch.Tensor], Any, list[torch.Tensor]]:
    """The step of one process: gradients by name, the result, the biases of routers."""
    model = whole(case)
    torch.manual_seed(1)
    seen, result = run(model, World.alone(), [batch for rank in range(ranks) for batch in _batches(case, rank)])
    return seen.grads, result, [layer.gate.e_score_correction_bias for layer in mixtures(model)]


def compare(rank: int, cases: list[Case]) -> list[dict[str, Any]]:
    """On each rank, for each case: errors by name, of loss and norm."""
    found = []
    for case in cases:
        world = world_of(case)
        model = cut(case, world)
        torch.manual_seed(1)
        seen, result = run(model, world, _batches(case, world.data.rank), **case.options)
        want, alone, want_biases = of_one_rank(partial(_alone, case, world.data.size))
        held = {number for layer in mixtures(model) for number, _ in layer.experts.named_children()}
        assert seen.grads.keys() == {name for name in want if _is_here(name, held)}
        biases = [
            torch.equal(ours.gate.e_score_correction_bias, theirs)
            for ours, theirs in zip(mixtures(model), want_biases, strict=True)
        ]
        assert all(biases), "load is counted once over all ranks"
        assert seen.dtypes == {torch.float32}
        assert (result.num_targets, result.num_tokens) == (alone.num_targets, alone.num_tokens)
        found.append({
            "errors": {name: relative(grad, want[name]) for name, grad in seen.grads.items()},
            "loss": abs(result.loss / alone.loss - 1),
            "norm": abs(result.grad_norm / alone.grad_norm - 1),
            "exact": (result.loss, result.grad_norm),
        })  # fmt: skip
    return found


def _is_here(name: str, held: set[str]) -> bool:
    """Whether a rank with these experts has a parameter."""
    _, routed, place = name.partition(".experts.")
    return not routed or place.partition(".")[0] in held
