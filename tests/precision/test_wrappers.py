"""Converted models inside of what users wrap around them: FSDP2 with a policy of its own, DDP, torch's state dicts."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import on_ranks
from tilewright.core.errors import ConfigError
from tilewright.optim.adam import DeepSeekAdam
from tilewright.precision.convert import convert
from tilewright.precision.policy.policy import MODES


class Norms(nn.Module):
    """Each kind of torch's norms, and layers between them."""

    def __init__(self, dims):
        super().__init__()
        torch.manual_seed(0)
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        batch, instance = (getattr(nn, f"{kind}Norm{dims}d") for kind in ("Batch", "Instance"))
        self.layers = nn.Sequential(
            conv(4, 8, 1), batch(8), batch(8, momentum=None), instance(8, affine=True),
            instance(8, affine=True, track_running_stats=True), nn.GroupNorm(2, 8), nn.Linear(6, 16), nn.LayerNorm(16),
            nn.RMSNorm(16), nn.Linear(16, 3),
        )  # fmt: skip
        with torch.no_grad():
            for param in self.parameters():
                param.add_(torch.randn_like(param) * 0.1)

    def forward(self, x):
        return self.layers(x)


def inputs(dims, seed=1):
    return torch.randn(5, 4, *(1,) * (dims - 1), 6, generator=torch.Generator().manual_seed(seed))


def of_rounded(model, mode, dims, dtype):
    """What the model gives with parameters rounded to a format: those that FSDP2 gathers."""
    model = convert(copy.deepcopy(model), mode)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(param.to(dtype))
    return model, model(inputs(dims))


def main(rank):
    found = {}
    for dims, mode, dtype in MIXED:
        want_model, want = of_rounded(Norms(dims), mode, dims, dtype)
        model = convert(Norms(dims), mode)
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for layer in model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        out = model(inputs(dims))
        out.square().mean().backward()
        want.square().mean().backward()
        pairs = zip(model.parameters(), want_model.parameters(), strict=True)
        grads = [(got.grad.full_tensor(), want.grad) for got, want in pairs]
        error = max(float((got - want).abs().max() / want.abs().max().clamp_min(1e-3)) for got, want in grads)
        statistics = [torch.equal(a, b) for a, b in zip(model.buffers(), want_model.buffers(), strict=True)]
        found[dims, mode, dtype] = torch.equal(out, want), error, all(statistics)
    model = DistributedDataParallel(convert(Norms(1), "pure_fp16"))
    try:
        model(inputs(1))
    except ConfigError as error:
        found["ddp"] = str(error)
    for policy in (None, MixedPrecisionPolicy(param_dtype=torch.float16)):
        model = convert(nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)), "pure_fp16")
        for part in (model[1], model[0], model):
            fully_shard(part, **({} if policy is None else {"mp_policy": policy}))
        with torch.no_grad():
            model.eval()(torch.ones(2, 6))
        try:
            model.train()(torch.ones(2, 6))
        except ConfigError as error:
            found["by hand", policy is None] = str(error)
    for mode in MODES:
        for name, wrap in WRAPS.items():
            found[mode, name] = by_hand(mode, wrap)
    model = convert(Norms(1), "pure_fp16")
    with torch.no_grad():
        found["evaluated"] = bool(model.eval()(inputs(1)).isfinite().all())
    return found


def by_hand(mode, wrap):
    """What a user sees who shards a converted model: gradients that are those of the whole one, or the words of an
    error, in it or beside it."""
    whole, model = convert(Norms(1), mode), convert(Norms(1), mode)
    wrap(model)
    words = []
    for evaluation in (True, False):
        try:
            with torch.set_grad_enabled(not evaluation):
                loss = model.train(not evaluation)(inputs(1)).square().mean()
        except (ConfigError, AssertionError) as error:
            words.append("\n".join([str(error), *getattr(error, "__notes__", ())]))
    if words:
        return words[-1]
    loss.backward()
    whole(inputs(1)).square().mean().backward()
    pairs = zip(model.parameters(), whole.parameters(), strict=True)
    return all(torch.equal(getattr(got.grad, "full_tensor", lambda g=got: g.grad)(), want.grad) for got, want in pairs)


def each_and_all(model):
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)


def in_pairs(model):
    """A norm and a linear layer in one call."""
    fully_shard(list(model.layers[6:8]))
    fully_shard(model)


WRAPS = {"whole": fully_shard, "each": each_and_all, "pairs": in_pairs}
MIXED = [(dims, mode, dtype) for dims in (1, 3) for mode, dtype in (("bf16_mixed", torch.bfloat16),)]
MIXED += [(1, "hybrid", torch.float16), (1, "fp32", torch.bfloat16)]


@pytest.fixture(scope="module")
def found():
    return on_ranks(2, main)


@pytest.mark.dist
@pytest.mark.parametrize("case", MIXED, ids=str)
def test_norms_take_parameters_that_fsdp2_gathers_in_16_bits(found, case):
    """Equal to the model whose parameters have these values. Gradients come back rounded to the gathered format."""
    for of_rank in found:
        equal, error, statistics = of_rank[case]
        assert equal
        assert statistics
        assert error <= 2 * torch.finfo(case[2]).eps


@pytest.mark.dist
def test_ddp_refuses_parameters_in_16_bits_in_words(found):
    for of_rank in found:
        assert of_rank["ddp"].startswith(
            "torch's DistributedDataParallel cannot train parameters that are stored in 16"
        )
        assert "GradientReduction" in of_rank["ddp"]
        assert of_rank["evaluated"]


@pytest.mark.dist
def test_fully_shard_by_hand_refuses_parameters_in_16_bits_in_words(found):
    for of_rank in found:
        for plain in (True, False):
            said = of_rank["by hand", plain]
            assert said.startswith("torch's fully_shard cannot train parameters that are stored in 16 bits")
            assert "parallel.shard.shard" in said
    assert "fully_shard" in " ".join(convert(Norms(1), "pure_fp16").precision_report.notes)


@pytest.mark.dist
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("mode", MODES)
def test_fully_shard_by_hand_works_or_is_refused_in_words(found, mode, wrap):
    """Both ranks have the same rows, so sharded gradients are those of the whole model to the last bit."""
    for of_rank in found:
        said = of_rank[mode, wrap]
        if mode == "pure_fp16":
            assert "torch's fully_shard cannot train parameters that are stored in 16 bits" in said
            assert said.count("parallel.shard.shard") == 1
        else:
            assert said is True, said


def step(model, optimizer):
    model(inputs(1)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("mode", ["bf16_mixed", "pure_fp16"])
@pytest.mark.parametrize("moments", ["fp32", "8bit"])
def test_torchs_state_dicts_hold_a_run_in_16_bits(mode, moments):
    """A new optimizer's states are made first, as the note of the conversion says."""

    def new():
        model = convert(Norms(1), mode)
        return model, DeepSeekAdam(model.parameters(), lr=0.01, moments=moments)

    model, optimizer = new()
    step(model, optimizer)
    of_model, of_optimizer = copy.deepcopy(get_state_dict(model, optimizer))
    other, others = new()
    others.init_states()
    set_state_dict(other, others, model_state_dict=of_model, optim_state_dict=of_optimizer)
    step(model, optimizer)
    step(other, others)
    for param, want in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(param, want)
    said = " ".join(model.precision_report.notes)
    assert ("init_states()" in said) == (mode == "pure_fp16")


def test_a_converted_model_computes_norms_as_before():
    for dims in (1, 2, 3):
        for training in (True, False):
            model, plain = convert(Norms(dims), "fp32").train(training), Norms(dims).train(training)
            for _ in range(2):
                assert torch.equal(model(inputs(dims)), plain(inputs(dims)))
            for (name, buffer), want in zip(model.named_buffers(), plain.buffers(), strict=True):
                assert torch.equal(buffer, want), name
