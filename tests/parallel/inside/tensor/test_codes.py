"""What 8-bit layers of cut matrices read: their input's codes travel, quantised once, and are those of one process."""

import dataclasses

import pytest
import torch

from tests.models.shapes import make_batch
from tests.models.test_activation_bytes import AliveStorages
from tests.parallel.inside.tensor import cut as cuts
from tests.parallel.inside.tensor.cut import Case, cut, whole, world_of
from tests.parallel.inside.tensor.test_formats import TILES, least_db
from tests.parallel.steps import run
from tests.ranks import on_ranks
from tilewright.formats.tiled import WithCopies
from tilewright.models.decoder.activation_bytes import Storage, layer_bytes, role, tile_bytes
from tilewright.models.decoder.layers import rope_angles
from tilewright.parallel.inside.tensor.matrix_cuts import config_on_rank
from tilewright.parallel.world import World
from tilewright.precision.convert import evaluating, set_mode
from tilewright.precision.float8.linear import float8_layers

pytestmark = pytest.mark.dist
LENGTH = 256
"""Of two rows: a slice of two ranks is one tile of tokens of each."""
LATENT = {
    "attention": "mla", "kv_lora_rank": 128, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 64,
    "q_lora_rank": 128,
}  # fmt: skip
KINDS = {"tiles": TILES, "latent_tiles": dataclasses.replace(TILES, **LATENT)}
READERS = {
    "tiles": ("layers.0.self_attn.q_proj", "layers.0.self_attn.v_proj", "layers.0.mlp.gate_proj"),
    "latent_tiles": ("layers.0.self_attn.q_a_proj", "layers.0.self_attn.kv_a_proj_with_mqa"),
}


def _batch(length=LENGTH):
    return make_batch(2, length, seed=3, vocab=TILES.vocab_size)


def _inputs(model, names):
    """What these layers are given in a pass."""
    found, modules = {}, dict(model.model.named_modules())
    for name in names:
        modules[name].register_forward_pre_hook(lambda _, args, name=name: found.update({name: args[0]}))
    return found


def _read(rank, kind):
    """Of each of some layers: share of row codes, column codes and scales that are those of one process."""
    cuts.CONFIGS.update(KINDS)
    case, batch = Case(2, kind=kind, mode="fp8_tile"), _batch()
    models = cut(case, world_of(case)), whole(case)
    inputs = [_inputs(model, READERS[kind]) for model in models]
    for model in models:
        model.loss(batch)
    found = {}
    for name, ours in inputs[0].items():
        theirs = inputs[1][name]
        assert isinstance(ours, WithCopies)
        assert ours.value.isnan().all(), "nobody reads the value"
        assert ours.value.untyped_storage().nbytes() < 64
        qdata, scale, _ = ours.arrive((ours.column.qdata, ours.column.scale_inv, None))
        assert ours.column.qdata.numel() * 2 == theirs.column.qdata.numel(), "a rank keeps its part"
        order = _token_order(name)
        pairs = [
            (ours.row.qdata, theirs.row.qdata[order]), (ours.row.scale_inv, theirs.row.scale_inv[order]),
            (qdata, theirs.column.qdata[:, order]), (scale, theirs.column.scale_inv[:, order[::128] // 128]),
        ]  # fmt: skip
        found[name] = [float((got == want).float().mean()) for got, want in pairs]
    return found


def _token_order(name):
    """Of the tokens of one process: those of the first rank's slices come first where each token is alone."""
    numbers = torch.arange(2 * LENGTH)
    return numbers if "self_attn" in name else numbers.view(2, 2, LENGTH // 2).transpose(0, 1).flatten()


@pytest.mark.support("fp8", "tensor")
@pytest.mark.parametrize("kind", KINDS)
def test_codes_of_inputs_are_those_of_one_process(kind):
    """Of the first layer bit by bit. Behind attention a sum may have another last bit, and round to another code."""
    for found in on_ranks(2, _read, kind):
        assert found.keys() == set(READERS[kind])
        for name, shares in found.items():
            print(name, shares)
            assert min(shares) == 1.0 if "self_attn" in name else min(shares) > 0.98, f"{name}: {shares}"


def _steps(rank, kinds):
    cuts.CONFIGS.update(KINDS)
    found = []
    for kind, length, settings in kinds:
        case = Case(2, kind=kind, mode="fp8_tile", settings=settings)
        world, batches = world_of(case), [_batch(length) for _ in range(2)]
        model, reference = cut(case, world), whole(case)
        seen, result = run(model, world, batches)
        want, alone = run(reference, World.alone(), batches)
        worst = least_db(seen.grads, want.grads)
        with torch.no_grad(), evaluating(model), evaluating(reference):
            evaluated = [float(each.loss(batches[0]).loss_sum) for each in (model, reference)]
        found.append((*worst, abs(result.loss / alone.loss - 1), abs(evaluated[0] / evaluated[1] - 1), result.loss))
    return found


FULL = {"activation_checkpoint": "full"}
SOME = {"activation_checkpoint": "selective"}


@pytest.mark.parametrize(
    "kinds",
    [
        [("latent_tiles", LENGTH, FULL), ("tiles", LENGTH, SOME), ("tiles", 48, {})],
        pytest.param([("tiles", LENGTH, {})], marks=pytest.mark.slow),
    ],
    ids=["few", "more"],
)
def test_gradients_are_those_of_one_process(kinds):
    """Also where slices are no whole tiles, and values travel. Evaluation in FP32 reads none of these codes."""
    of_ranks = on_ranks(2, _steps, kinds)
    for found in zip(*of_ranks, strict=True):
        assert len({loss for *_, loss in found}) == 1, "all ranks have the same loss"
        for name, decibels, loss, evaluated, _ in found:
            print(f"{name} {decibels:.1f} dB, loss {loss:.2g}, evaluated {evaluated:.2g}")
            assert decibels >= 22.0, name
            assert loss < 2e-3
            assert evaluated < 2e-6


def _kept(rank):
    """Bytes alive after a layer's forward pass, and those that plans count."""
    cuts.CONFIGS.update(KINDS)
    case, config = Case(2, kind="tiles", mode="fp8_tile"), TILES
    model = cut(case, world_of(case))
    optimizer = torch.optim.SGD(model.parameters())
    cos_sin = rope_angles(torch.arange(LENGTH)[None], config.rope_dim, 1e4)
    x_BSD = torch.randn(2, LENGTH // 2, config.dim, dtype=torch.bfloat16, requires_grad=True)
    with AliveStorages() as storages:
        out = model.blocks[0](x_BSD, *cos_sin, None)
    layers = {role(fqn): layer for fqn, layer in float8_layers(model.blocks[0]).items()}
    qdata = {name: layer.gemms.operands.input for name, layer in layers.items() if layer.gemms.wgrad.scaled}
    fused = frozenset(name for name in qdata if layers[name].gemms.fprop.scaled)
    storage = Storage(2, 2, compiled=False, tiled=frozenset(layers), qdata=qdata, fused=fused, slices=2, cut_codes=True)
    del optimizer
    on_rank = config_on_rank(config, 2, 1)
    tokens = 2 * LENGTH
    counted = tokens * layer_bytes(on_rank, 0, "none", storage) + tile_bytes(on_rank, 0, "none", storage, tokens)
    return storages.alive_bytes() + x_BSD.nbytes - out[0].nbytes, counted


def test_a_rank_keeps_its_slice_of_codes():
    for alive, counted in on_ranks(2, _kept):
        print(alive, counted)
        assert alive == pytest.approx(counted, rel=0.03)


def _sent(rank):
    cuts.CONFIGS.update(KINDS)
    found = {}
    for mode in ("bf16_mixed", "fp8_tile"):
        case = Case(2, kind="tiles", mode=mode)
        world = world_of(case)
        model, batch = cut(case, world), _batch()
        world.traffic.take()
        with torch.no_grad():
            model.hidden(batch)
        found[mode] = _gathered(world)
        loss = model.loss(batch).loss_sum
        world.traffic.take()
        loss.backward()
        found[f"{mode} backward"] = _gathered(world)
    set_mode(model, "bf16_mixed")
    with torch.no_grad():
        world.traffic.take()
        model.hidden(_batch())
        found["moved"] = _gathered(world)
    return found


def _gathered(world):
    """Bytes of all-gathers along `tp`, by what they are sent as."""
    taken = world.traffic.take()
    return {wire: one.sent_bytes for (axis, kind, wire), one in taken.items() if (axis, kind) == ("tp", "all_gather")}


def test_codes_are_sent_in_the_place_of_values():
    for found in on_ranks(2, _sent):
        print(found)
        stream = 2 * LENGTH * TILES.dim  # elements; half of them go to the other rank
        codes = 2 * TILES.num_layers * stream // 2
        scales = 4 * codes // 128
        sums = {wire: size for wire, size in found["fp8_tile"].items() if wire not in ("uint8", "fp32")}
        assert found["fp8_tile"]["uint8"] == codes, "a byte per element, of what attention and MLP read"
        assert found["fp8_tile backward"]["uint8"] == codes, "the other copy, once for the layers that read it"
        assert found["fp8_tile"]["fp32"] <= scales + found["bf16_mixed"].get("fp32", 0)
        of_values = found["bf16_mixed"]["bf16"] - sums.get("bf16", 0)
        assert of_values == 2 * codes, "values are two bytes"
        assert found["moved"] == found["bf16_mixed"], "formats move, and values travel again"
