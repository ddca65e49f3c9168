"""What a run does with a sharded model besides steps: formats, evaluation, bytes, models used unlike on other ranks."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from tests.models.shapes import KERNELS, make_batch
from tests.parallel.steps import Case, Seen, build, groups_of, is_part, made, microbatches, relative, run, world_of
from tests.ranks import on_ranks
from tilewright.core.config.recipe import Recipe
from tilewright.core.errors import ConfigError
from tilewright.memory.tracking.tensor_bytes import owner_bytes
from tilewright.models.base.protocols import LossOutput
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.optim.adam import DeepSeekAdam
from tilewright.optim.clip import GradClip
from tilewright.parallel.gradients import GradientReduction
from tilewright.parallel.shard import Sharding, is_sharded, shard, takes_unused
from tilewright.parallel.world import World
from tilewright.precision.convert import convert, evaluating, set_mode
from tilewright.precision.float8.linear import Float8Linear
from tilewright.training.executor.evaluate import evaluate
from tilewright.training.executor.standard import StandardExecutor, quantized_weights
from tilewright.training.executor.step_transaction import all_finite
from tilewright.training.planning.rank_watch import check_world


def _sharded(case, world):
    model = made(case)
    shard(model, model.layers, world.fsdp_mesh, case.sharding or Sharding())
    return model


# ---- formats ----


def _formats(rank):
    """A linear layer that FSDP2 shards by itself stays sharded through each change of its class."""
    world = world_of((1, 2))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(128, 128), nn.LayerNorm(128), nn.Linear(128, 128))
    whole = convert(nn.Sequential(*(nn.Linear(128, 128), nn.LayerNorm(128), nn.Linear(128, 128))), "bf16_mixed")
    whole.load_state_dict(net.state_dict())
    convert(net, "bf16_mixed")
    for layer in (*net, net):
        fully_shard(layer, mesh=world.fsdp_mesh)
    x, outs = torch.randn(4, 128, generator=torch.Generator().manual_seed(1)), []
    for mode in ("fp8_tile", "bf16_mixed", "fp32", "fp8_tile"):
        for model in (net, whole):
            set_mode(model, mode)
        outs.append(torch.equal(net(x), whole(x)))
        with evaluating(net), evaluating(whole):
            outs.append(torch.equal(net(x), whole(x)))
    kept = all(isinstance(layer, FSDPModule) for layer in net) and isinstance(net[0], Float8Linear)
    return outs, kept, type(net[0]).__mro__[2].__name__


@pytest.mark.dist
def test_a_layer_that_is_sharded_by_itself_changes_formats():
    for outs, kept, layer in on_ranks(2, _formats):
        assert all(outs)
        assert kept
        assert layer == "Float8Linear"


def _fp8_weights(rank):
    model = _sharded(Case("gqa", "fp8_tile"), world_of((1, 2)))
    return quantized_weights(model, Seen(model)) is None


@pytest.mark.dist
def test_codes_of_whole_weights_are_not_kept():
    assert all(on_ranks(2, _fp8_weights))
    model = made(Case("gqa", "fp8_tile"))
    assert quantized_weights(model, Seen(model)) is not None


# ---- evaluation ----


def _evaluated(rank, sizes):
    world, found = world_of(sizes), []
    batches = {"a": [make_batch(seed=seed) for seed in range(5)], "b": [make_batch(rows=1, seed=9)]}
    cases = (Case("gqa", "fp8_tile"), Case("bert", "pure_fp16"), Case("deepseek", "pure_fp16"))
    for case in cases[: 3 if sizes[1] > 1 else 1]:
        model = _sharded(case, world) if world.fsdp_mesh is not None else made(case)
        got = evaluate(model, batches, data=world.data.handle)
        want = evaluate(made(case), batches)
        parts = [is_part(param) for param in model.parameters()]
        found.append(({name: (got[name].loss, want[name].loss, got[name].tokens == want[name].tokens) for name in want},
                      all(parts) == is_sharded(model) and any(parts) == is_sharded(model)))  # fmt: skip
    return found


@pytest.mark.dist
@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)])
@pytest.mark.support("evaluation", "copies", "shards")
def test_evaluation_shares_the_batches(sizes):
    for found in on_ranks(2, _evaluated, sizes):
        for losses, parts in found:
            assert parts, "what evaluation gathered is free again"
            for got, want, tokens in losses.values():
                assert got == pytest.approx(want, rel=1e-6)
                assert tokens


# ---- several steps ----


def _trained(rank):
    """Losses of three steps on ranks and on one process, and how far a weight is off, in units of the rate."""
    world, found, lr = world_of((1, 2)), [], 1e-3
    for case, moments in ((Case("gqa"), "8bit"), (Case("gqa", "fp8_tile"), "fp32"), (Case("deepseek"), "bf16")):
        losses, models = [], []
        for model, ranks in ((_sharded(case, world), [rank]), (made(case), [0, 1])):
            alone = len(ranks) > 1
            optimizer = DeepSeekAdam(model.parameters(), lr=lr, moments=moments, kernels=KERNELS)
            groups = {} if alone else groups_of(world)
            executor = StandardExecutor(model, optimizer, clip=GradClip(0.5), **groups)
            losses.append(
                [executor.step([batch for each in ranks for batch in microbatches(each, 2)], lr).loss for _ in range(3)]
            )
            models.append({name: param.full_tensor() if is_part(param) else param for name, param in
                           model.state_dict().items()})  # fmt: skip
        moved = max(float((models[0][name] - tensor).abs().max()) for name, tensor in models[1].items()) / lr
        found.append((losses, moved))
    return found


@pytest.mark.dist
@pytest.mark.slow
def test_steps_of_deepseek_adam_are_those_of_one_process():
    for found in on_ranks(2, _trained):
        for (ours, theirs), moved in found:
            assert ours == pytest.approx(theirs, rel=1e-5)
            assert ours[-1] < ours[0]
            assert moved < 0.3, f"a weight is off by {moved:.2g} of the rate"


# ---- bytes ----


def _bytes(rank, shards):
    world = world_of((1, shards))
    config = DecoderConfig.of(vocab_size=512, dim=128, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=384)
    model = convert(Decoder(config, KERNELS), "bf16_mixed", kernels=KERNELS)
    shard(model, model.layers, world.fsdp_mesh, Sharding())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seen = {}
    optimizer.register_step_post_hook(lambda *_: seen.update(owner_bytes(model, optimizer, "cpu")))
    executor = StandardExecutor(model, optimizer, clip=GradClip(1.0), **groups_of(world))
    executor.step([make_batch(vocab=512, seed=rank + 2 * index) for index in range(2)], 1e-3)
    return seen, sum(param.numel() for param in model.parameters())


@pytest.mark.dist
@pytest.mark.parametrize("shards", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_bytes_per_rank_are_one_over_the_shards(shards):
    for seen, number in on_ranks(shards, _bytes, shards):
        for owner, each in {"parameters": 4, "gradients": 4, "optimizer": 8}.items():
            assert seen[owner] == pytest.approx(each * number / shards, rel=0.05), owner


# ---- other uses on other ranks ----


class Branches(nn.Module):
    """Two branches, of which a batch names the one that it uses; and a parameter that nothing uses."""

    forward_methods = ("loss",)

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(6, 6)
        self.branches = nn.ModuleList(nn.Linear(6, 3) for _ in range(2))
        self.unused = nn.Linear(2, 2)

    @property
    def layers(self):
        return ()

    def loss(self, batch):
        out = self.branches[int(batch["branch"])](torch.tanh(self.trunk(batch["x"])))
        return LossOutput(out.square().sum(), torch.tensor(len(out)))

    def after_step(self, group=None): ...


def _branch(rank, index=0):
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(rank + 10 * index))
    return {"x": x, "labels": torch.ones(3, dtype=torch.int64), "branch": torch.tensor(rank)}


def _unlike(rank, sizes):
    world = world_of(sizes)
    model = Branches()
    if world.fsdp_mesh is not None:
        shard(model, model.layers, world.fsdp_mesh, Sharding())
    seen, _ = run(model, world, [_branch(rank, index) for index in range(2)])
    want, _ = run(Branches(), World.alone(), [_branch(other, index) for other in range(2) for index in range(2)])
    zero = [float(seen.grads[name].abs().max()) for name in seen.grads.keys() - want.grads.keys()]
    return max(relative(seen.grads[name], grad) for name, grad in want.grads.items()), zero


@pytest.mark.dist
@pytest.mark.skipif(not takes_unused(), reason="FSDP2 of this torch takes no parameter that one rank alone uses")
@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)])
def test_parameters_that_one_rank_alone_uses(sizes):
    for error, zero in on_ranks(2, _unlike, sizes):
        assert error <= 2e-6
        assert not any(zero)


def _refused(rank):
    world, said = world_of((1, 2)), []
    model = _sharded(Case("gqa"), world)
    recipe = Recipe.model_validate({"memory": {"executor": "layer_major"}})
    layer_major = partial(check_world, world, recipe, recipe.memory.can)
    for wrong in (lambda: run(model, world, microbatches(rank, 1 + rank)), layer_major):
        try:
            wrong()
        except ConfigError as error:
            said.append(str(error))
    return said


@pytest.mark.dist
def test_what_would_hang_or_cannot_be_is_refused_on_all_ranks():
    for uneven, layer_major in on_ranks(2, _refused):
        assert "1 on one rank, 2 on another" in uneven
        assert "--parallel.dp_replicate 2" in layer_major


def _sound(rank):
    model = _sharded(Case("gqa"), world_of((1, 2)))
    before = all_finite(model.named_parameters())
    weight = model.lm_head.weight.to_local()
    if rank == 1:
        weight.detach()[0, 0] = float("nan")
    return before, all_finite(model.named_parameters())


@pytest.mark.dist
def test_a_part_that_is_not_finite_is_seen_on_all_ranks():
    assert on_ranks(2, _sound) == [(True, False)] * 2


# ---- refusals, and one process ----


def test_layers_that_share_parameters_are_refused():
    model = build("gqa")
    model.blocks[1].mlp = model.blocks[0].mlp
    with pytest.raises(ConfigError, match="3 parameters that belong to several layers"):
        shard(model, model.layers, None, Sharding())


def test_one_process_is_as_it_was():
    """Nothing around the model, and no number summed."""
    model = made(Case("gqa"))
    assert not is_sharded(model)
    gradients = GradientReduction(model, list(model.parameters()), None, everyone=None)
    assert not gradients.sharded
    losses = []
    for each in (model, made(Case("gqa"))):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        executor = StandardExecutor(each, optimizer, clip=GradClip(1.0))
        losses.append([executor.step(microbatches(0, 2), 0.1).loss for _ in range(3)])
    assert losses[0] == losses[1]
