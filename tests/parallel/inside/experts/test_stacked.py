"""Experts of transformers' models that are spread over ranks: gradients of one process, whole names and shapes."""

from functools import partial
from typing import Any

import pytest
import torch

from tests.models.shapes import KERNELS
from tests.parallel.inside.experts.test_codes import BOUNDS
from tests.parallel.inside.parity import LIKE_ONE_PROCESS
from tests.parallel.steps import Seen, groups_of, is_part, microbatches, relative
from tests.ranks import of_one_rank, on_ranks
from tilewright.core import env
from tilewright.core.errors import ConfigError
from tilewright.models.build import init_weights
from tilewright.models.hf.load import load_hf
from tilewright.optim.clip import GradClip
from tilewright.parallel.fill_shards import shard_all
from tilewright.parallel.inside.experts.rank_experts import hold_experts
from tilewright.parallel.inside.experts.stacked import stacked_experts
from tilewright.parallel.mesh import MeshSizes
from tilewright.parallel.shard import Sharding
from tilewright.parallel.world import World, join
from tilewright.precision.convert import convert, evaluating
from tilewright.training.executor.standard import StandardExecutor

pytestmark = pytest.mark.dist
SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64,
}  # fmt: skip
FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3")


CASES = [("qwen3_moe", 2, "fp32"), ("mixtral", 2, "fp32"), ("deepseek_v3", 1, "fp8_tile")]
MORE = [("deepseek_v3", 2, "fp32"), ("deepseek_v3", 1, "bf16_mixed")]
"""DeepSeek-V3 has one layer of experts, whose router has the bits of one process."""


def config_of(family, experts=4):
    """A tiny one."""
    import transformers as hf

    if family == "mixtral":
        return hf.MixtralConfig(**SIZES, num_local_experts=experts, num_experts_per_tok=2)
    if family == "qwen3_moe":
        chosen = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
        return hf.Qwen3MoeConfig(**SIZES, **chosen, mlp_only_layers=[])
    latent = {"q_lora_rank": 20, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    chosen = {"n_routed_experts": experts, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    sizes = SIZES | {"num_key_value_heads": 4}
    return hf.DeepseekV3Config(**sizes, **latent, **chosen, moe_intermediate_size=24, first_k_dense_replace=1)


def model_of(family, mode="fp32", experts=4, checkpoint="none"):
    model = load_hf(config_of(family, experts), "causal_lm", kernels=KERNELS)
    init_weights(model, 0)
    model.activation_checkpoint = checkpoint
    convert(model.train(), mode, kernels=KERNELS)
    return model


def step(model, world, batches, **options):
    seen = Seen(model)
    clip = GradClip(0.0, experts=world.experts.handle)
    return seen, StandardExecutor(model, seen, clip=clip, **groups_of(world), **options).step(batches, 0.0)


def _logits(model, rank):
    ids = torch.arange(24).view(2, 12) % 50 + rank
    with torch.no_grad(), evaluating(model):
        return model.logits_at(ids, ids > 0)


def _alone(family, mode, ranks, number):
    """Of one process: gradients by name, the result, and logits of an evaluation on each rank's row."""
    model = model_of(family, mode)
    batches = [batch for rank in range(ranks) for batch in microbatches(rank, number)]
    seen, result = step(model, World.alone(), batches)
    return seen.grads, result, [_logits(model, rank) for rank in range(ranks)]


def _compared(rank, sizes, cases):
    world = join(env.ranks(), sizes, torch.device("cpu"))
    found = []
    for family, number, mode in cases:
        model = model_of(family, mode)
        shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
        hold_experts(model, world)
        shard_all(model, model.layers, world.fsdp_mesh, Sharding())
        assert {name: tuple(param.shape) for name, param in model.named_parameters()} == shapes, "whole names, shapes"
        spread = {name for name, param in model.named_parameters() if ".experts." in name}
        for name, param in model.named_parameters():
            part = param.to_local() if is_part(param) else param
            assert len(part) * sizes.dp_shard <= len(param) + sizes.dp_shard, f"{name}: of {len(param)} {len(part)}"
        seen, result = step(model, world, microbatches(rank, number))
        want, alone, logits = of_one_rank(partial(_alone, family, mode, world.size, number))
        assert seen.grads.keys() == want.keys()
        assert spread
        errors = {name: relative(grad, want[name]) for name, grad in seen.grads.items()}
        worst = max(errors, key=errors.__getitem__)
        evaluated = relative(_logits(model, rank), logits[rank])
        found.append((f"{family} {mode}", BOUNDS[mode], worst, errors[worst], abs(result.loss - alone.loss),
                      abs(result.grad_norm / alone.grad_norm - 1), evaluated))  # fmt: skip
    return found


def _check(of_ranks):
    for found in of_ranks:
        for family, bound, worst, error, loss, norm, evaluated in found:
            print(f"{family}: {worst} {error:.2g}, loss {loss:.2g}, norm {norm:.2g}, evaluated {evaluated:.2g}")
            assert error <= bound, f"{family}: {worst} is off by {error:.2g} of its largest element"
            assert loss <= 1e-6
            assert norm <= max(1e-6, bound / 10)
            assert evaluated <= LIKE_ONE_PROCESS


@pytest.mark.support("hf", "experts_spread")
@pytest.mark.parametrize("cases", [CASES, pytest.param(MORE, marks=pytest.mark.slow)], ids=["few", "more"])
def test_gradients_are_those_of_one_process(cases):
    _check(on_ranks(2, _compared, MeshSizes(dp_shard=2, ep=2), cases))


@pytest.mark.slow
def test_on_four_ranks_with_shards_of_experts():
    _check(on_ranks(4, _compared, MeshSizes(dp_shard=4, ep=2), [("qwen3_moe", 1, "fp32")]))


def drifting(module, _, out):
    """A router that chooses other experts when its layer is recomputed."""
    logits, weights, chosen = out
    return (logits, weights, (chosen + 1) % 4) if torch._C._current_graph_task_id() != -1 else out


def _recomputed(rank, drift):
    world = join(env.ranks(), MeshSizes(dp_shard=2, ep=2), torch.device("cpu"))
    model, reference = model_of("qwen3_moe", checkpoint="full"), model_of("qwen3_moe")
    if drift:
        for name, module in model.named_modules():
            if name.endswith("mlp.gate"):
                module.register_forward_hook(drifting)
    hold_experts(model, world)
    shard_all(model, model.layers, world.fsdp_mesh, Sharding())
    seen, _ = step(model, world, microbatches(rank, 2))
    want, _ = step(reference, World.alone(), [batch for other in range(2) for batch in microbatches(other, 2)])
    return {name: relative(grad, want.grads[name]) for name, grad in seen.grads.items()}


@pytest.mark.parametrize("drift", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_layer_that_is_recomputed_sends_tokens_where_they_were(drift):
    for errors in on_ranks(2, _recomputed, drift):
        worst = max(errors, key=errors.__getitem__)
        assert errors[worst] <= LIKE_ONE_PROCESS, f"{worst} is off by {errors[worst]:.2g}"


def _refused(rank):
    world = join(env.ranks(), MeshSizes(dp_shard=2, ep=2), torch.device("cpu"))
    with pytest.raises(ConfigError) as uneven:
        hold_experts(model_of("qwen3_moe", experts=5), world)
    with pytest.raises(ConfigError) as dense:
        hold_experts(torch.nn.Linear(2, 2), world)
    return str(uneven.value), str(dense.value)


def test_what_cannot_be_spread():
    for uneven, dense in on_ranks(2, _refused):
        assert "divides 5" in uneven
        assert "cannot be spread" in dense


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_found_by_what_they_are(family):
    found = [name for name, _ in stacked_experts(model_of(family))]
    assert len(found) == (1 if family == "deepseek_v3" else 2)
    assert all(name.endswith("mlp.experts") for name in found)
