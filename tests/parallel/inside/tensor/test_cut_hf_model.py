"""Hugging Face models whose matrices are cut by transformers' plans: gradients of one process, whole names, shapes."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch

from tests.models.shapes import KERNELS
from tests.parallel.inside.experts.test_stacked import SIZES, config_of
from tests.parallel.inside.parity import LIKE_ONE_PROCESS
from tests.parallel.steps import Seen, adapt, as_pairs, groups_of, is_part, microbatches, relative
from tests.ranks import of_one_rank, on_ranks
from tilewright.core import env
from tilewright.core.config.recipe import ParallelSection
from tilewright.core.errors import ConfigError
from tilewright.models.build import init_weights
from tilewright.models.hf.load import load_hf
from tilewright.optim.clip import GradClip
from tilewright.parallel.mesh import MeshSizes
from tilewright.parallel.parallelize import parallelize
from tilewright.parallel.world import World, join
from tilewright.precision.convert import convert, evaluating
from tilewright.training.executor.standard import StandardExecutor

pytestmark = pytest.mark.dist
EVEN = {"vocab_size": 64}
BOUND = {"fp32": LIKE_ONE_PROCESS, "bf16_mixed": 2e-2, "fp8_tile": 10 ** (-22 / 20)}


@dataclass(frozen=True)
class Case:
    """A model and how it is trained."""

    family: str
    tp: int = 2
    shards: int = 1
    ep: int = 1
    copies: int = 1
    mode: str = "fp32"
    number: int = 2
    checkpoint: str = "none"
    more: dict[str, Any] = field(default_factory=dict)
    lora: str = ""
    """Storage of the frozen weights under adapters."""
    dropout: float = 0.0
    """Of adapters' inputs."""
    pairs: bool = False
    """Of answers, see `models.base.preference`."""

    @property
    def sizes(self):
        return MeshSizes(dp_replicate=self.copies, dp_shard=self.shards, tp=self.tp, ep=self.ep)


def net_config(case):
    import transformers as hf

    kinds = {"llama": hf.LlamaConfig, "qwen2": hf.Qwen2Config, "qwen3": hf.Qwen3Config}
    if case.family not in kinds:
        config = config_of(case.family)
        for name, value in (EVEN | case.more).items():
            setattr(config, name, value)
        return config
    sizes = SIZES | EVEN | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8} | case.more
    return kinds[case.family](**sizes)


def whole(case, *, exact=False):
    """The model of one process; `exact`: in FP64."""
    model = load_hf(net_config(case), "causal_lm", kernels=KERNELS)
    init_weights(model, 0)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():  # biases and norms that are not all the same
        for param in model.parameters():
            if param.ndim == 1:
                param.add_(0.1 * torch.randn(param.shape, generator=generator))
    adapt(model, case.lora, 0.02, dropout=case.dropout)
    model.activation_checkpoint = case.checkpoint
    if exact:
        return model.train().double()
    convert(model.train(), case.mode, kernels=KERNELS)
    return model


def cut(case, world):
    model = whole(case)
    return parallelize(model, world, ParallelSection(), device=torch.device("cpu"))


def batches_of(case, rank):
    found = microbatches(rank, case.number)
    return [as_pairs(batch) for batch in found] if case.pairs else found


def step(model, world, batches):
    torch.manual_seed(1)
    seen = Seen(model)
    clip = GradClip(0.0, row=world.row.handle, experts=world.experts.handle)
    return seen, StandardExecutor(model, seen, clip=clip, **groups_of(world)).step(batches, 0.0)


def _logits(model):
    ids = torch.arange(24).view(2, 12) % 50
    with torch.no_grad(), evaluating(model):
        return model.logits_at(ids, ids > 0)


def _alone(case, ranks):
    """Of one process: gradients by name, the result, logits of an evaluation, shapes; and where gradients cancel out,
    how far its own are off from FP64."""
    model = whole(case)
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    batches = [batch for rank in range(ranks) for batch in batches_of(case, rank)]
    seen, result = step(model, World.alone(), batches)
    own = {}
    if case.mode == "fp32" and case.more.get("attention_bias"):
        exact = step(whole(case, exact=True), World.alone(), batches)[0].grads
        own = {name: _error(name, seen.grads, exact, case.mode) for name in exact}
    return seen.grads, result, _logits(model), shapes, own


def _error(name, grads, want, mode):
    """Of a gradient, by its largest element: a bias's by that of its weight too, whose summands are as large, as its
    own may cancel out. In narrow formats by its norm, of which 22 dB are said."""
    if mode != "fp32":
        return float((grads[name] - want[name]).norm() / want[name].norm().clamp_min(1e-30))
    weight = want.get(f"{name.removesuffix('bias')}weight", want[name]) if name.endswith(".bias") else want[name]
    largest = max(float(of.abs().max()) for of in (want[name], weight))
    return float((grads[name] - want[name]).abs().max()) / max(largest, 1e-30)


def compare(rank, cases):
    found = []
    for case in cases:
        world = join(env.ranks(), case.sizes, torch.device("cpu"))
        model = cut(case, world)
        want, alone, theirs, shapes, own = of_one_rank(partial(_alone, case, world.data.size))
        assert {name: tuple(param.shape) for name, param in model.named_parameters()} == shapes, "whole names, shapes"
        parts = {name for name, param in model.named_parameters() if is_part(param)}
        seen, result = step(model, world, batches_of(case, world.data.rank))
        sums = {kind: one.exchanges for kind, one in world.traffic.total.items()}
        model.loss(microbatches(0, 1)[0]).loss_sum.backward()
        again = {kind: one.exchanges - sums[kind] for kind, one in world.traffic.total.items()}
        assert seen.grads.keys() == want.keys()
        errors = {name: _error(name, seen.grads, want, case.mode) - own.get(name, 0.0) for name in want}
        ours = _logits(model)
        found.append({
            "errors": errors, "parts": parts, "notes": list(model.notes), "evaluated": relative(ours, theirs),
            "loss": abs(result.loss / alone.loss - 1), "norm": abs(result.grad_norm / alone.grad_norm - 1),
            "sums": again.get(("tp", "all_reduce", "fp32"), 0), "layers": len(model.layers),
            "exact": (result.loss, result.grad_norm),
        })  # fmt: skip
    return found


def check(cases, of_ranks):
    for number, case in enumerate(cases):
        results = [found[number] for found in of_ranks]
        assert len({found["exact"] for found in results}) == 1, f"{case}: {[found['exact'] for found in results]}"
        for rank, found in enumerate(results):
            worst = max(found["errors"], key=found["errors"].__getitem__)
            error, bound = found["errors"][worst], BOUND[case.mode]
            print(f"{case}: rank {rank}: {worst} {error:.2g}, evaluated {found['evaluated']:.2g}")
            assert any("o_proj" in name for name in found["parts"]) or case.family == "deepseek_v3"
            assert any("down_proj" in name for name in found["parts"])
            assert error <= bound, f"{case}, rank {rank}: {worst} is off by {error:.2g}"
            assert found["loss"] <= max(1e-6, bound / 10)
            assert found["norm"] <= max(1e-6, bound / 4)
            assert found["evaluated"] <= LIKE_ONE_PROCESS


def test_on_two_ranks():
    cases = [
        Case("llama"),
        Case("qwen3", checkpoint="full"),
        Case("qwen3_moe", ep=2),
        Case("deepseek_v3"),
    ]
    of_ranks = on_ranks(2, compare, cases)
    check(cases, of_ranks)
    for found in of_ranks:
        llama = found[0]
        assert llama["sums"] == 4 * llama["layers"] + 2 + 2, "two each way, both ends, and two numbers of each token"


@pytest.mark.slow
def test_more_on_two_ranks():
    cases = [
        Case("qwen2"),  # biases of what is cut by outputs
        Case("llama", more={"attention_bias": True, "mlp_bias": True}),
        Case("llama", more={"tie_word_embeddings": True}),
        Case("llama", more={"vocab_size": 61}),
        Case("llama", more={"pad_token_id": 0}),
        Case("qwen3_moe", checkpoint="full"),
        Case("mixtral", ep=2),
        Case("deepseek_v3", ep=2, checkpoint="full"),
    ]
    check(cases, on_ranks(2, compare, cases))


@pytest.mark.slow
def test_formats_on_two_ranks():
    cases = [Case(family, mode=mode) for family in ("llama", "qwen3") for mode in ("bf16_mixed", "fp8_tile")]
    check(cases, on_ranks(2, compare, cases))


def _bad(rank):
    """What each is refused with: styles, sizes and formats, before anything is cut."""
    world = join(env.ranks(), MeshSizes(tp=2), torch.device("cpu"))
    found = {}

    def refused(name, model):
        before = {own: type(param) for own, param in model.named_parameters()}
        with pytest.raises(ConfigError) as error:
            parallelize(model, world, ParallelSection(), device=torch.device("cpu"))
        assert {own: type(param) for own, param in model.named_parameters()} == before, "it is as it was"
        found[name] = str(error.value)

    for style in ("packed_colwise", "sequence_parallel", "local_params", "of tomorrow"):
        model = whole(Case("llama"))
        model.net._tp_plan = model.net._tp_plan | {"model.layers.*.mlp.up_proj": style}
        refused(style, model)
    model = whole(Case("llama"))
    model.net._tp_plan = model.net._tp_plan | {"model.norm": "colwise"}
    refused("norm", model)
    model = whole(Case("llama"))
    model.net._tp_plan = {}
    refused("none", model)
    refused("kv heads", whole(Case("llama", more={"num_key_value_heads": 1})))
    refused("heads", whole(Case("llama", more={"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3})))
    refused("width", whole(Case("llama", more={"intermediate_size": 47})))
    return found


def test_what_cannot_be_cut():
    for found in on_ranks(2, _bad):
        for name in ("packed_colwise", "sequence_parallel", "local_params", "of tomorrow"):
            assert "Style of tensor parallelism that is not known" in found[name]
            assert f"{name} for model.layers.0.mlp.up_proj" in found[name]
        assert "colwise of" in found["norm"]
        assert "no plan of tensor parallelism" in found["none"]
        assert "1 heads of model.layers.0.self_attn.k_proj" in found["kv heads"]
        assert "3 heads of" in found["heads"]
        assert "47 rows of" in found["width"]


@pytest.mark.slow
def test_on_four_ranks():
    cases = [
        Case("qwen3", tp=4, number=1),
        Case("llama", shards=2, checkpoint="full"),
        Case("qwen3", copies=2),
        Case("qwen3_moe", shards=2, ep=2),
        Case("deepseek_v3", shards=2),
    ]
    check(cases, on_ranks(4, compare, cases))
