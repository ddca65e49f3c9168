"""First weights on shards: bitwise those of one process, each rank asks for its rows alone."""

from pathlib import Path

import pytest
import torch

from tests.models.shapes import KERNELS, load_decoder, make_decoder
from tests.parallel.steps import build, hf_config, is_part, microbatches, run, world_of
from tests.ranks import on_ranks
from tilewright.models.base.protocols import ALL_WHOLE, InitialValues
from tilewright.models.build import random_values, stored_values
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.models.hf.load import load_hf
from tilewright.parallel.fill_shards import shard_from_meta
from tilewright.parallel.shard import Sharding
from tilewright.precision.convert import convert

CPU = torch.device("cpu")
CASES = (("tied", "fp32"), ("deepseek", "fp8_tile"), ("bert", "pure_fp16"))


class Asked:
    """Initial values, and how many elements were asked for at once."""

    def __init__(self, values: InitialValues):
        self.values, self.most = values, 0

    def __call__(self, tensors, first_rows=ALL_WHOLE):
        self.most = max(self.most, sum(tensor.numel() for tensor in tensors.values()))
        self.values(tensors, first_rows)


def _filled(kind, mode, world, folder=None, *, fresh=True):
    model = build(kind, "meta")
    values = Asked(random_values(model, 0) if folder is None else stored_values(model, folder))
    convert(model, mode, kernels=KERNELS)
    shard_from_meta(model, model.layers, world.fsdp_mesh, Sharding(), values, CPU, fresh=fresh)
    return model, values.most


def _first_weights(rank, sizes, folder):
    world = world_of(sizes)
    for kind, mode in CASES:
        model, most = _filled(kind, mode, world)
        want = dict(convert(build(kind), mode, kernels=KERNELS).state_dict())
        _same(model, want, f"{kind} {mode}")
        assert most <= _largest_part(want, sizes[1])
        trained, _ = run(model, world, microbatches(rank, 1))
        assert trained.grads
    for kind in ("llama", "mixtral", "deepseek"):
        path = Path(folder) / kind
        model, most = _filled(kind, "fp32", world, path)
        ours = kind == "deepseek"
        whole = load_decoder(path, KERNELS) if ours else load_hf(path, "causal_lm", "load", kernels=KERNELS)
        _same(model, whole.state_dict(), f"folder of {kind}")
        assert most <= _largest_part(whole.state_dict(), sizes[1])


def _largest_part(state, shards):
    """Elements; buffers are asked for together, and smaller."""
    return max(-(-len(tensor) // shards) * tensor[:1].numel() for tensor in state.values() if tensor.ndim)


def _same(model, want, what):
    state = model.state_dict()
    assert state.keys() == want.keys()
    for name, tensor in state.items():
        whole = tensor.full_tensor() if is_part(tensor) else tensor
        assert tensor.device.type == "cpu"
        assert torch.equal(whole, want[name]), f"{what}: {name}"


@pytest.mark.dist
@pytest.mark.parametrize(
    "sizes", [(1, 3), *(pytest.param(s, marks=pytest.mark.slow) for s in [(1, 2), (1, 4), (2, 2)])]
)
def test_first_weights_are_those_of_one_process(sizes, tmp_path):
    """Drawn, and read from folders: with the model's names, with experts that are stacked on the way, in FP8."""
    torch.manual_seed(5)
    for kind in ("llama", "mixtral"):
        load_hf(hf_config(kind), "causal_lm", kernels=KERNELS).save_hf(tmp_path / kind)
    make_decoder("deepseek").save_hf(tmp_path / "deepseek", dtype=torch.float8_e4m3fn)
    on_ranks(sizes[0] * sizes[1], _first_weights, sizes, str(tmp_path))


def _growth(rank, folder):
    """Bytes by which the process' peak grows while it is filled; then bytes of its parts."""
    world = world_of((1, 4))
    found = []
    for path in (None, folder):
        with torch.device("meta"):
            model = Decoder(LARGE, KERNELS)
        values = random_values(model, 0) if path is None else stored_values(model, path)
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what is held now
        before = _peak_bytes()
        shard_from_meta(model, model.layers, world.fsdp_mesh, Sharding(), values, CPU)
        parts = sum(param.to_local().nbytes for param in model.parameters())
        found.append((_peak_bytes() - before, parts))
    return found


def _peak_bytes():
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return 1024 * int(line.split()[1])


LARGE = DecoderConfig.of(vocab_size=80_001, dim=512, num_layers=1, num_heads=4, ffn_dim=64, tie_embeddings=True)
"""An embedding of 156 MiB, and little else."""
BEYOND = 48 * 2**20
"""Blocks of 2 MiB are drawn; the mapped file counts while 64 MiB of it or, as here, its 39 MiB part are read."""


@pytest.mark.dist
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of a process is read from Linux")
def test_a_rank_needs_little_beyond_its_parts(tmp_path):
    model = Decoder(LARGE, KERNELS)
    model.save_hf(tmp_path)
    del model
    for drawn, read in on_ranks(4, _growth, str(tmp_path)):
        assert drawn[0] < drawn[1] + 16 * 2**20, drawn
        assert read[0] < read[1] + BEYOND, read


def _unfilled(rank):
    world = world_of((1, 2))
    model, most = _filled("deepseek", "fp32", world, fresh=False)
    bias = model.blocks[1].mlp.gate.e_score_correction_bias
    return most, bias.tolist()


@pytest.mark.dist
def test_a_checkpoint_needs_no_draws_but_buffers():
    for most, bias in on_ranks(2, _unfilled):
        assert most < 100
        assert bias == [0.0] * 8
