"""A model that is filled layer group by layer group equals one that was made whole, whatever it is and wherever it
goes."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.shapes import KERNELS, load_decoder, make_batch
from tests.models.test_hf_models import ALL, CAUSAL, IMAGES, MASKED
from tilewright.core.config.sections.precision import PrecisionSection
from tilewright.core.errors import CheckpointError
from tilewright.memory.offload.flat_layout import placeholder
from tilewright.memory.offload.lazy_params import dummy_values, fill_buffers, to_placeholders
from tilewright.memory.offload.pool import OffloadPool
from tilewright.memory.tracking.process_memory import Sampler
from tilewright.models.build import init_weights, layered, random_values, stored_values
from tilewright.models.decoder import init
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.models.decoder.hf_weights import save_decoder
from tilewright.models.hf.load import load_hf
from tilewright.models.layerwise.layer_view import find_layer_groups
from tilewright.precision.convert import convert
from tilewright.precision.policy.policy import Policy

MLA = {"attention": "mla", "q_lora_rank": 8, "kv_lora_rank": 8}
MLA |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
SHAPES = {
    "dense": {},
    "tied": {"tie_embeddings": True},
    "moe": MLA | {"num_experts": 4, "expert_dim": 16, "num_shared_experts": 1, "num_dense_layers": 1},
}


def make_config(name):
    return DecoderConfig.of(vocab_size=61, dim=32, num_heads=4, num_layers=3, ffn_dim=64, **SHAPES[name])


def meta_decoder(name):
    with torch.device("meta"):
        return Decoder(make_config(name), KERNELS)


def whole_decoder(name):
    model = Decoder(make_config(name), KERNELS)
    init_weights(model, 3)
    return model


def fill_lazily(model, values, tier, folder, num_slices=4):
    """All parameters by way of an pool of layer groups that cut across modules; afterwards they are in the model."""
    to_placeholders(model, "cpu")
    fill_buffers(model, values)
    named = list(model.named_parameters())
    params = dict(named)
    with OffloadPool(tier, "cpu", folder=folder) as pool:
        for index in range(num_slices):
            pool.add(index, dict(named[index::num_slices]), fill=values)
        pool.seal()
        found = {name: value for index in range(num_slices) for name, value in pool.read(index).items()}
    assert all(param is params[name] for name, param in model.named_parameters())
    for name, param in model.named_parameters():
        param.data = found[name]


def assert_same_model(found, expected):
    theirs = dict(expected.named_parameters()) | dict(expected.named_buffers())
    ours = dict(found.named_parameters()) | dict(found.named_buffers())
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        gap = (ours[name].double() - value.double()).abs().max().item() if value.numel() else 0.0
        assert gap == 0, f"{name} differs by up to {gap}"


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
@pytest.mark.parametrize("name", SHAPES)
def test_random_decoder(name, tier, tmp_path):
    model = meta_decoder(name)
    fill_lazily(model, random_values(model, 3), tier, tmp_path)
    expected = whole_decoder(name)
    assert_same_model(model, expected)
    batch = make_batch(2, 12, seed=0, vocab=61)
    assert model.loss(batch).loss_sum.item() == expected.loss(batch).loss_sum.item()


@pytest.mark.parametrize("mode", ["bf16_mixed", "fp8_tile"])
def test_dtypes_chosen_on_meta(mode, tmp_path):
    """Parameters in BF16: values are drawn in FP32 and rounded once, as those of a whole model are."""
    policy = Policy.from_section(PrecisionSection(mode=mode), "cpu", parameters="bf16")
    expected = whole_decoder("dense")
    convert(expected, policy, kernels=KERNELS)
    model = meta_decoder("dense")
    values = random_values(model, 3)
    convert(model, policy, kernels=KERNELS)
    fill_lazily(model, values, "host", tmp_path)
    assert any(param.dtype == torch.bfloat16 for param in model.parameters())
    assert_same_model(model, expected)
    batch = make_batch(2, 12, seed=0, vocab=61)
    assert model.loss(batch).loss_sum.item() == expected.loss(batch).loss_sum.item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", SHAPES)
def test_stored_decoder(name, dtype, tmp_path):
    save_decoder(whole_decoder(name), tmp_path, dtype=dtype, shard_bytes=20_000)
    model = meta_decoder(name)
    fill_lazily(model, stored_values(model, tmp_path), "host", None)
    assert_same_model(model, load_decoder(tmp_path, KERNELS))


def test_large_tensors_are_drawn_in_pieces(monkeypatch):
    """Whatever the number of threads; the first piece is what a smaller tensor of that name would be."""
    monkeypatch.setattr(init, "_PIECE", 100)
    name, threads = "model.layers.0.mlp.up_proj.weight", torch.get_num_threads()
    found = []
    for count in (1, 4):
        torch.set_num_threads(count)
        found.append(torch.empty(64, 32))
        random_values(meta_decoder("dense"), 3)({name: found[-1]})
    torch.set_num_threads(threads)
    assert torch.equal(*found)
    pieces = found[0].view(-1).split(100)
    assert len({piece[:5].sum().item() for piece in pieces}) == 21, "no two alike"
    assert 0.015 < found[0].std() < 0.025
    assert torch.equal(pieces[0], whole_decoder("dense").model.layers[0].mlp.up_proj.weight.view(-1)[:100])


def make_foreign(name, **options):
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    group, task = next(
        (group, task)
        for group, task in ((CAUSAL, "causal_lm"), (MASKED, "masked_lm"), (IMAGES, "image_classification"))
        if name in group
    )
    return load_hf(AutoConfig.for_model(name, **group[name]), task, kernels=KERNELS, **options)


@pytest.mark.parametrize("name", ALL)
def test_random_foreign_model(name, tmp_path):
    expected = make_foreign(name)
    init_weights(expected, 3)
    state = torch.get_rng_state()
    model = make_foreign(name, device="meta")
    fill_lazily(model, random_values(model, 3), "host", None)
    assert_same_model(model, expected)
    assert torch.equal(torch.get_rng_state(), state), "the run's own generator is left alone"


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "mixtral"])
def test_stored_foreign_model(name, tmp_path):
    expected = make_foreign(name)
    init_weights(expected, 3)
    expected.net.save_pretrained(tmp_path)
    model = make_foreign(name, device="meta")
    fill_lazily(model, stored_values(model, tmp_path), "host", None)
    assert_same_model(model, expected)
    assert model.notes == []


def test_a_tied_weight_under_its_other_name_is_loaded_with_the_whole(tmp_path):
    """transformers finds it; by names alone it is not there."""
    expected = make_foreign("qwen3")
    init_weights(expected, 3)
    expected.net.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    model = make_foreign("qwen3", device="meta")
    fill_lazily(model, stored_values(model, tmp_path), "host", None)
    assert_same_model(model, expected)
    assert model.notes == ["The folder's weights have other names than the model's: they are loaded whole before use."]


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "mixtral", "bert", "vit", "resnet"])
def test_models_are_cut_before_they_have_their_values(name):
    """Blocks are found, tied weights are seen and what cannot be cut is kept whole, as with the model's own weights."""
    expected = make_foreign(name)
    init_weights(expected, 0)
    model = make_foreign(name, device="meta")
    to_placeholders(model, "cpu")
    fill_buffers(model, random_values(model, 0))
    with dummy_values(model):
        view = layered(model)
    assert all(param.isnan().all() for param in model.parameters())

    def names(whose, cut):
        own = {param: name for name, param in whose.named_parameters()}
        return {part.name: [own[param] for param in part.params] for part in find_layer_groups(whose, cut)}

    assert names(model, view) == names(expected, layered(expected))
    assert model.notes == expected.notes


def test_lent_values_cost_one_buffer_and_are_taken_back():
    model = meta_decoder("tied")
    to_placeholders(model, "cpu")
    model.scale = torch.nn.Parameter(placeholder((1,), torch.float32, "cpu"))
    model.real = torch.nn.Parameter(torch.tensor(3.0))
    with dummy_values(model):
        assert model.real == 3
        params = list(model.parameters())
        assert not any(param.isnan().any() for param in params)
        assert len({param.untyped_storage().data_ptr() for param in params}) == 3, "weights, vectors, the real one"
        assert abs(model.model.norm.weight.mean().item() - 1) < 0.1
        assert torch.isfinite(model.loss(make_batch(2, 8, seed=0, vocab=61)).loss_sum)
    assert all(param.isnan().all() for param in model.parameters() if param is not model.real)


class TestBadFolders:
    def folder(self, tmp_path):
        save_decoder(whole_decoder("dense"), tmp_path, shard_bytes=20_000)
        return sorted(tmp_path.glob("model-*.safetensors"))

    def test_truncated_shard(self, tmp_path):
        files = self.folder(tmp_path)
        assert len(files) > 3
        with open(files[2], "r+b") as file:
            file.truncate(files[2].stat().st_size - 100)
        with pytest.raises(CheckpointError, match=rf"{files[2].name} cannot be read"):
            stored_values(meta_decoder("dense"), tmp_path)

    def test_shard_torn_between_check_and_use(self, tmp_path):
        files = self.folder(tmp_path)
        model = meta_decoder("dense")
        values = stored_values(model, tmp_path)
        with open(files[1], "r+b") as file:
            file.truncate(1000)
        with pytest.raises(CheckpointError, match=rf"{files[1].name} cannot be read"):
            fill_lazily(model, values, "disk", tmp_path / "tier")

    def test_shard_is_missing(self, tmp_path):
        self.folder(tmp_path)[0].unlink()
        with pytest.raises(CheckpointError, match="Weights are missing"):
            stored_values(meta_decoder("dense"), tmp_path)

    def test_another_shape(self, tmp_path):
        self.folder(tmp_path)
        with pytest.raises(CheckpointError, match="Weights in the folder belong to another model"):
            stored_values(meta_decoder("moe"), tmp_path)

    def test_foreign_folder_without_a_tensor(self, tmp_path):
        model = make_foreign("llama")
        init_weights(model, 0)
        model.net.save_pretrained(tmp_path)
        file = tmp_path / "model.safetensors"
        tensors = load_file(file)
        del tensors["model.layers.1.mlp.up_proj.weight"]
        save_file(tensors, file, metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
            stored_values(make_foreign("llama", device="meta"), tmp_path)


def test_vacate_keeps_ties_flags_and_what_is_real():
    model = meta_decoder("tied")
    model.model.norm.weight.requires_grad_(False)
    real = torch.nn.Parameter(torch.ones(32))
    model.model.layers[0].input_layernorm.weight = real
    to_placeholders(model, "cpu")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not model.model.norm.weight.requires_grad
    assert model.model.layers[0].input_layernorm.weight is real
    assert model.lm_head.weight.isnan().all()
    assert model.lm_head.weight.untyped_storage().nbytes() == 4


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_model_is_never_in_memory_twice(tier, tmp_path):
    """By the C library's own count of live bytes, while layer groups are filled: the tier, and about one layer
    group."""
    config = DecoderConfig.of(vocab_size=100, dim=256, num_heads=4, num_layers=8, ffn_dim=1024)
    with torch.device("meta"):
        model = Decoder(config, KERNELS)
    values, live = random_values(model, 0), []
    sampler = Sampler()
    if sampler._mallinfo is None:
        pytest.skip("this C library does not count live bytes")

    def watched(tensors):
        values(tensors)
        live.append(sampler.live_and_kept()[0] - start)

    to_placeholders(model, "cpu")
    start = sampler.live_and_kept()[0]
    with OffloadPool(tier, "cpu", folder=tmp_path) as pool:
        for index, block in enumerate(model.blocks):
            pool.add(index, {f"model.layers.{index}.{n}": p for n, p in block.named_parameters()}, fill=watched)
        pool.seal()
        slice_bytes = 4 * sum(p.numel() for p in model.blocks[0].parameters())
        most = (max(live) - pool.num_bytes["host"]) / slice_bytes
        assert len(live) == 8
        assert most < 1.2, f"{most:.2f} layer groups beside the tier"
    sampler.close()
