"""Adapters of matrices that are cut: gradients of one process, codes of FP8 bases in parts, what is refused; pairs of
answers, with adapters and without."""

import pytest
import torch

from tests.parallel.inside.tensor import cut as own
from tests.parallel.inside.tensor import test_cut_hf_model as foreign
from tests.parallel.inside.tensor import test_parity as parity
from tests.parallel.steps import microbatches, run
from tests.ranks import on_ranks
from tilewright.core import env
from tilewright.core.config.recipe import ParallelSection
from tilewright.core.errors import ConfigError
from tilewright.ops.base.tensor_parts import cut_like, local
from tilewright.parallel.mesh import MeshSizes
from tilewright.parallel.parallelize import parallelize
from tilewright.parallel.world import join
from tilewright.precision.float8.frozen_linear import FrozenFloat8Linear
from tilewright.precision.lora.lora import merge_lora

pytestmark = pytest.mark.dist
TILES = {"hidden_size": 256, "intermediate_size": 256, "num_key_value_heads": 8, "head_dim": 32}
"""Parts of two ranks have whole blocks of 128 x 128."""


def compare(rank, foreign_cases, own_cases):
    """Gradients of both kinds of models, see there."""
    return foreign.compare(rank, foreign_cases), own.compare(rank, own_cases)


def check(foreign_cases, own_cases, of_ranks):
    foreign.check(foreign_cases, [found for found, _ in of_ranks])
    parity.check(own_cases, [found for _, found in of_ranks])
    for results, _ in of_ranks:
        for case, found in zip(foreign_cases, results, strict=True):
            assert not case.lora or all("lora_" in name for name in found["errors"]), f"{case}: the base is frozen"


@pytest.mark.support("lora", "tensor")
@pytest.mark.support("lora_fp8", "tensor")
@pytest.mark.support("pairs", "tensor")
@pytest.mark.support("dropout", "tensor")
def test_on_two_ranks():
    """A base of FP8 codes, in FP32: each rank decodes its own. Inputs of adapters are dropped as by one process, also
    where a layer is recomputed. Answers of pairs have a loss each."""
    theirs = [foreign.Case("llama", lora="keep", pairs=True)]
    theirs += [foreign.Case("qwen3", lora="fp8", more=TILES, checkpoint="full", dropout=0.3)]
    ours = [own.Case(2, lora="keep", dropout=0.3, rows=1, kind="moe"), own.Case(2, pairs=True)]
    check(theirs, ours, on_ranks(2, compare, theirs, ours))


@pytest.mark.slow
def test_more_on_two_ranks():
    """A base of biases, of experts, of latent attention; in 16 and 8 bits, where codes of inputs would travel."""
    theirs = [foreign.Case("qwen2", lora="keep"), foreign.Case("qwen3_moe", lora="keep"),
              foreign.Case("deepseek_v3", lora="keep", checkpoint="full")]  # fmt: skip
    theirs += [foreign.Case("llama", lora=base, more=TILES, mode=mode)
               for base, mode in (("keep", "bf16_mixed"), ("fp8", "fp8_tile"))]  # fmt: skip
    ours = [own.Case(2, lora="keep", kind=kind) for kind in ("moe", "mla_q", "latent_moe")]
    ours += [own.Case(2, lora="keep", slices=False, settings={"activation_checkpoint": "full"}, chunks=2)]
    ours += [own.Case(2, lora="keep", slices=False, dropout=0.3, kind=kind) for kind in ("mla_q", "moe")]
    ours += [own.Case(2, lora="keep", dropout=0.3, kind="latent_moe", length=15, targets=("*.experts.*",))]
    theirs += [foreign.Case("llama", pairs=True), foreign.Case("qwen3_moe", pairs=True)]
    ours += [own.Case(2, pairs=True, kind="mla_q"), own.Case(2, pairs=True, kind="moe", slices=False)]
    check(theirs, ours, on_ranks(2, compare, theirs, ours))


@pytest.mark.slow
def test_on_four_ranks():
    """In shards of what is cut, and in copies."""
    theirs = [foreign.Case("llama", shards=2, lora="keep"), foreign.Case("qwen3", copies=2, lora="fp8", more=TILES)]
    ours = [own.Case(2, 2, lora="keep"), own.Case(4, lora="keep")]
    check(theirs, ours, on_ranks(4, compare, theirs, ours))


def _codes(rank):
    """Codes and scales of a rank's parts are those of the whole model; what has no whole scales is refused."""
    world = join(env.ranks(), MeshSizes(tp=2), torch.device("cpu"))
    case = foreign.Case("llama", lora="fp8", more=TILES, mode="fp8_tile")
    wholes = {n: m for n, m in foreign.whole(case).named_modules() if isinstance(m, FrozenFloat8Linear)}
    model = foreign.cut(case, world)
    state = model.state_dict()
    for name, layer in wholes.items():
        for key in ("weight", "weight_scale_inv"):
            found = state[f"{name}.{key}"]
            assert foreign.is_part(found), f"{name}.{key}"
            part = cut_like(getattr(layer, key), found)
            assert torch.equal(found.to_local().float(), part.float()), f"{name}.{key}"
    small = foreign.whole(foreign.Case("llama", lora="fp8"))
    with pytest.raises(ConfigError) as error:
        parallelize(small, world, ParallelSection(), device=torch.device("cpu"))
    assert not any(foreign.is_part(param) for param in small.parameters()), "it is as it was"
    return len(wholes), str(error.value)


def _merged(rank):
    """Names of what differs from one process, whether all trains again, the loss before and after."""
    found, batches = [], microbatches(0, 1)
    for kind, case in ((foreign, foreign.Case("llama", lora="fp8", more=TILES)), (own, own.Case(2, lora="keep"))):
        world = join(env.ranks(), case.sizes, torch.device("cpu"))
        whole, model = kind.whole(case), kind.cut(case, world)
        adapted = run(model, world, batches)[1].loss
        assert merge_lora(model) == merge_lora(whole)
        state = model.state_dict()
        other = [
            name
            for name, tensor in whole.state_dict().items()
            if not torch.equal(local(state[name]), cut_like(tensor, state[name]))
        ]
        seen, result = run(model, world, batches)
        found.append((other, len(seen.grads) == len(list(whole.parameters())), adapted, result.loss))
    return found


def test_merged_on_ranks_they_are_the_bits_of_one_process():
    for results in on_ranks(2, _merged):
        for other, trains, before, after in results:
            assert not other
            assert trains, "what was frozen for the adapters"
            assert before == pytest.approx(after, rel=1e-5)


def test_codes_are_cut_between_their_scales():
    for layers, refused in on_ranks(2, _codes):
        assert layers == 14
        assert "FP8 weight that cannot be cut between its scales" in refused
        assert "a multiple of 128 x 2" in refused
        assert "--lora.base keep" in refused
