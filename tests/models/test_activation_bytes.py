"""Predicted activation bytes against the storages that are really alive after a layer's forward."""

from dataclasses import replace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.cover import covering
from tests.models.shapes import KERNELS, MIXED, SHAPES
from tilewright.models.build import init_weights
from tilewright.models.decoder.activation_bytes import (
    Storage,
    head_bytes,
    layer_bytes,
    role,
    tile_bytes,
    weight_copy_bytes,
)
from tilewright.models.decoder.decoder import Decoder
from tilewright.models.decoder.layers import rope_angles
from tilewright.ops.backends.native.wide import widens
from tilewright.precision.convert import convert
from tilewright.precision.float8.linear import Float8Linear
from tilewright.precision.float8.weight_cache import QuantizedWeights
from tilewright.precision.policy.policy import Policy, Rule

ALL = SHAPES | MIXED
ALL |= {"window": replace(SHAPES["gqa"], sliding_window=5), "linear": replace(SHAPES["gqa"], attention="linear")}
ROWS, POSITIONS = 2, 32
TOKENS = ROWS * POSITIONS
SCALES = ("fp8_tensorwise", "mxfp8", "mxfp4", "nvfp4")
"""Modes whose scales are not those of 1x128."""
STREAM = {"fp32": 4, "hybrid": 4} | dict.fromkeys(("bf16_mixed", "fp8_tile", "fp8_value", "mixed_rules", *SCALES), 2)
PRODUCT = STREAM | {"hybrid": 2}
FP8 = Policy("fp8_tile", device_type="cpu")
POLICIES = {
    "fp8_tile": FP8,
    "fp8_value": replace(FP8, keep="value"),
    # Of the readers of one input some in 8 bits and some not; and an attention output projection in 8 bits.
    "mixed_rules": replace(
        FP8,
        rules=(
            *(Rule("*v_[ap]*", compute="bf16"), Rule("*.down_proj", wgrad="bf16"), Rule("*.o_proj", wgrad="fp8_tile")),
        ),
    ),
}


class AliveStorages(TorchDispatchMode):
    """Every storage that an operation returned, weakly, so that those still alive can be counted."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in given:
                storage = tensor.untyped_storage()
                self.seen[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out

    def alive_bytes(self) -> int:
        return sum(size for ref, size in self.seen.values() if not ref.expired())


def make_block(name: str, mode: str, policy: str, layer: int | None = None):
    config = ALL[name]
    model = Decoder(config, KERNELS)
    init_weights(model, 0)
    convert(model, POLICIES.get(policy, policy))
    QuantizedWeights(model, torch.optim.SGD(model.parameters()))
    model.activation_checkpoint = mode
    if layer is None:
        layer = 1 if config.num_experts else 0
    cos_sin = rope_angles(torch.arange(POSITIONS)[None], config.rope_dim, 1e4)
    x = torch.randn(ROWS, POSITIONS, config.dim, dtype=model.residual_dtype, requires_grad=True)
    return model, model.blocks[layer], layer, (x, *cos_sin, None)


@pytest.fixture(autouse=True)
def unpadded_experts(monkeypatch):
    """Rows of experts as counted; the padding that saves oneDNN from new shapes depends on the routing."""
    monkeypatch.setattr("tilewright.models.decoder.moe._row_multiple", lambda mean_rows, device_type: 1)


def predicted(name: str, block, layer: int, mode: str, policy: str, compiled: bool, spread: bool = False) -> int:
    config = ALL[name]
    layers = {role(fqn): module for fqn, module in block.named_modules() if isinstance(module, Float8Linear)}
    tiled = {name: layer.gemms for name, layer in layers.items()}
    experts = {name for name in layers if name.startswith("experts.")}  # run as one operation, which keeps codes
    qdata = {
        name: gemms.operands.input
        for name, gemms in tiled.items()
        if gemms.wgrad.scaled and (policy != "fp8_value" or name in experts)
    }
    fused = frozenset(name for name, form in qdata.items() if tiled[name].fprop.scaled and form.in_rows)
    storage = Storage(
        STREAM[policy], PRODUCT[policy], compiled, tiled=frozenset(tiled), qdata=qdata, fused=fused, spread=spread
    )
    per_token = layer_bytes(config, layer, mode, storage)
    fixed = weight_copy_bytes(config, layer, mode, storage)
    # Of the 64 tokens some go to each of the experts, none gets more than 128: a tile of rows each.
    return TOKENS * per_token + fixed + tile_bytes(config, layer, mode, storage, TOKENS, 128 * config.num_experts)


KEPT = ("none", "selective", "matmuls", "attention", "full")


@pytest.mark.parametrize(
    ("name", "mode", "policy"),
    covering(
        ("gqa", "mla", "mla_q_rank", "gqa_moe", "deepseek"),
        KEPT,
        ("fp32", "hybrid", "bf16_mixed", "fp8_tile", "fp8_value", "mixed_rules"),
    ),
)
def test_eager_layer(name, mode, policy):
    check_eager(name, mode, policy)


def check_eager(name, mode, policy, place=None):
    _, block, layer, (leaf, *rest) = make_block(name, mode, policy, place)
    with AliveStorages() as storages:
        out = block(leaf * 1, *rest)
    returned = sum(t.nbytes for t in out if t is not None)
    assert storages.alive_bytes() - returned == predicted(name, block, layer, mode, policy, compiled=False)


@pytest.mark.parametrize(
    ("of", "mode", "policy"),
    covering(
        (("own_gqa", 1), ("own_gqa", 2), ("own_moe", 1), ("own_moe", 3)), KEPT, ("fp32", "bf16_mixed", "fp8_tile")
    ),
)
def test_eager_layer_of_its_own_shape(of, mode, policy):
    name, layer = of
    check_eager(name, mode, policy, layer)


@pytest.mark.parametrize(
    ("name", "mode", "policy"), covering(("gqa", "mla_q_rank"), ("none", "selective", "full"), SCALES)
)
def test_eager_layer_with_scales_of_any_tile(name, mode, policy):
    check_eager(name, mode, policy)


@pytest.mark.parametrize(("name", "mode", "policy"), covering(("gqa_moe", "deepseek"), KEPT, ("fp32", "bf16_mixed")))
def test_a_layer_whose_experts_are_on_several_ranks(name, mode, policy):
    """It keeps where its tokens went, to send them there again."""
    _, block, layer, (leaf, *rest) = make_block(name, mode, policy)
    before = block.mlp.exchange
    block.mlp.exchange = lambda rows, counts, run: torch.cat(run(rows.split(counts.tolist())))  # of one rank
    with AliveStorages() as storages:
        out = block(leaf * 1, *rest)
    returned = sum(t.nbytes for t in out if t is not None)
    kept = storages.alive_bytes() - returned
    assert before is None
    assert kept == predicted(name, block, layer, mode, policy, compiled=False, spread=True)


FAST = ("gqa", "none", "bf16_mixed")
COMPILED = [
    (name, mode, policy)
    for name in ("gqa", "mla", "mla_q_rank", "gqa_moe", "deepseek")
    for mode in ("none", "selective", "matmuls", "attention")
    for policy in ("fp32", "hybrid", "bf16_mixed", "fp8_tile", "fp8_value", "mixed_rules")
    # What an eager selective checkpoint around compiled parts caches, hooks do not see. With copies handed from module
    # to module (`precision.float8.quantizing_layers`) torch 2.13 compiles such layers in parts, too.
    if (mode == "none" or not (SHAPES[name].num_experts or policy in POLICIES)) and (name, mode, policy) != FAST
]


@pytest.mark.parametrize(
    ("name", "mode", "policy"), [FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in COMPILED)]
)
def test_compiled_layer(name, mode, policy):
    check_compiled(name, mode, policy)


def check_compiled(name, mode, policy, place=None):
    torch._dynamo.reset()
    model, block, layer, args = make_block(name, mode, policy, place)
    model.compile_blocks()
    keep: dict[int, tuple[int, torch.Tensor]] = {}
    switches = [t for m in block.modules() if isinstance(m, Float8Linear) for t in (m.formats, m.counts)]
    foreign = {t.untyped_storage().data_ptr() for t in (*block.parameters(), *block.buffers(), *args[1:3], *switches)}

    random = torch.get_rng_state().shape  # a checkpoint keeps it, once, whatever the layer is

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in foreign and (tensor.dtype, tensor.shape) != (torch.uint8, random):
            keep[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(*args)
    measured = sum(size for size, _ in keep.values())
    want, config = predicted(name, block, layer, mode, policy, compiled=True), ALL[name].at(layer)
    cpp = KERNELS.choices["attention", "cpu", torch.bfloat16, ""].candidate.name in ("amx", "avx512")
    if widens("cpu", torch.bfloat16) and policy != "fp32":  # the compiler casts weights again in backward where it may
        assert 0.5 * want <= measured <= want
    elif cpp or policy == "fp32" or config.sliding_window or config.attention == "linear":  # attention is an operator
        # its result lies as the output projection reads it, and is kept once
        assert want - PRODUCT[policy] * TOKENS * 64 <= measured <= want
    else:
        assert measured == want


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["fp32", "bf16_mixed"])
@pytest.mark.parametrize("mode", ["none", "selective", "matmuls", "attention"])
@pytest.mark.parametrize(("name", "layer"), [("own_gqa", 1), ("own_gqa", 2), ("window", 0), ("linear", 0)])
def test_compiled_layer_of_its_own_shape(name, layer, mode, policy):
    check_compiled(name, mode, policy, layer)


@pytest.mark.parametrize("policy", ["fp32", "bf16_mixed"])
def test_head(policy):
    model, *_ = make_block("gqa", "none", policy)
    x = torch.randn(ROWS, POSITIONS, 64, dtype=model.residual_dtype, requires_grad=True)
    labels = torch.zeros(TOKENS, dtype=torch.int64)
    with AliveStorages() as storages:
        hidden = model.model.norm(x * 1).flatten(0, 1)
        loss, count, each = model.kernels.linear_cross_entropy(hidden, model.lm_head.weight, labels)
        del hidden
    measured = storages.alive_bytes() - loss.nbytes - count.nbytes - each.nbytes
    assert measured == head_bytes(SHAPES["gqa"], TOKENS, Storage(STREAM[policy], PRODUCT[policy]))
