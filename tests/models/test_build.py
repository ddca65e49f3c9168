"""From a section to a model: shapes, weights, errors."""

import pytest
import torch

from tests.models.shapes import KERNELS, make_batch, make_decoder
from tilewright.core.config.sections.model import ModelSection
from tilewright.core.errors import CheckpointError, ConfigError
from tilewright.models.build import build_model, init_weights, materialize
from tilewright.models.hf.model import HFModel

SECTION = ModelSection(dim=64, num_layers=2, num_heads=4)


def test_meta_by_default_then_real():
    model = build_model(SECTION, 100, KERNELS)
    assert {param.device.type for param in model.parameters()} == {"meta"}
    materialize(model, "cpu")
    init_weights(model, 0)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.isfinite(model.loss(make_batch()).loss_sum)


def test_first_weights_depend_on_names_and_seed_alone():
    one, two, three = (build_model(SECTION, 100, device="cpu") for _ in range(3))
    deeper = build_model(SECTION.model_copy(update={"num_experts": 4}), 100, device="cpu")
    init_weights(one, 7)
    torch.randn(100)
    for model, seed in ((two, 7), (three, 8), (deeper, 7)):
        init_weights(model, seed)
    name = "model.layers.0.self_attn.q_proj.weight"
    values = [dict(model.named_parameters())[name] for model in (one, two, three, deeper)]
    assert torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])
    assert torch.equal(values[0], values[3])
    assert abs(values[0].std().item() - 0.02) < 1e-3
    residual = one.blocks[0].mlp.down_proj.weight.std().item()
    assert abs(residual - 0.02 / 2) < 1e-3, "0.02 / sqrt(2 * 2 layers)"


def test_untied_heads_differ_from_the_embedding():
    model = build_model(SECTION.model_copy(update={"tie_embeddings": False}), 100, device="cpu")
    init_weights(model, 0)
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_every_buffer_is_initialised():
    model = make_decoder("deepseek")
    for buffer in model.buffers():
        buffer.fill_(float("nan"))
    init_weights(model, 0)
    assert all(not buffer.any() for buffer in model.buffers())


def test_a_folder_replaces_the_shape_and_gives_weights(tmp_path):
    source = make_decoder("tied")
    source.save_hf(tmp_path)
    loaded = build_model(ModelSection(path=str(tmp_path), weights="load"), 61, device="cpu")
    assert loaded.config == source.config
    assert torch.equal(loaded.lm_head.weight, source.lm_head.weight)
    random = build_model(ModelSection(path=str(tmp_path)), 61)
    assert random.config == source.config


def test_any_hugging_face_folder(tmp_path):
    source = make_decoder("gqa").eval()
    source.save_hf(tmp_path)
    model = build_model(ModelSection(kind="hf", path=str(tmp_path), weights="load"), 61, KERNELS, "cpu").eval()
    assert isinstance(model, HFModel)
    batch = make_batch()
    assert abs(model.loss(batch).loss_sum.item() - source.loss(batch).loss_sum.item()) < 1e-4


@pytest.mark.parametrize(
    ("section", "text"),
    [
        (ModelSection(task="masked_lm"), "supports task causal_lm only"),
        (ModelSection(kind="hf"), "needs model.path"),
        (ModelSection(weights="load"), "needs model.path"),
        (ModelSection(dim=100, num_heads=7), "not a multiple of model.num_heads"),
        (ModelSection(dim=64, num_heads=4, num_kv_heads=3), "model.num_kv_heads = 2"),
        (ModelSection(dim=60, num_heads=4), "model.head_dim = 16"),
        (ModelSection(num_experts=9, num_expert_groups=2), "model.num_expert_groups = 1"),
        (ModelSection(num_experts=8, num_expert_groups=8, num_experts_per_token=3), "model.num_experts_per_token = 1"),
        (ModelSection(num_experts=8, num_expert_groups=2, num_limited_groups=4), "model.num_limited_groups = 2"),
    ],
)
def test_impossible_sections(section, text):
    with pytest.raises(ConfigError) as error:
        build_model(section, 100)
    assert text in str(error.value)
    assert all((p.got and p.need and p.try_ and p.where) for p in error.value.problems)


def test_every_problem_at_once():
    section = ModelSection(dim=60, num_heads=4, num_kv_heads=3, num_experts=9, num_expert_groups=2)
    with pytest.raises(ConfigError) as error:
        build_model(section, 100)
    assert len(error.value.problems) == 3


@pytest.mark.parametrize("kind", ["decoder", "hf"])
def test_the_tokenizer_must_fit(kind, tmp_path):
    make_decoder("gqa").save_hf(tmp_path)
    with pytest.raises(ConfigError, match="more tokens than the model"):
        build_model(ModelSection(kind=kind, path=str(tmp_path)), 62)


def test_missing_folder():
    with pytest.raises(CheckpointError, match="does not exist"):
        build_model(ModelSection(path="nowhere"), 100)
