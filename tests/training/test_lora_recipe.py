"""Adapters from a recipe: trained, resumed, exported for peft, planned."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.models.shapes import load_decoder
from tests.training.tiny import assert_same_run, last_state, rows, save_tokenizer, tiny
from tilewright.core.config.load import load_recipe
from tilewright.core.errors import ConfigError
from tilewright.models.build import init_weights
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.precision.lora.peft_io import load_adapter
from tilewright.training.session import train

FP8 = torch.float8_e4m3fn
LORA = {"lora__rank": 4, "lora__alpha": 8.0, "optim__lr": 1e-2}


@pytest.fixture
def published(tmp_path):
    """A folder in the layout of DeepSeek-V3."""
    model = Decoder(DecoderConfig.of(vocab_size=300, dim=32, num_layers=2, num_heads=2, tie_embeddings=False))
    init_weights(model, 5)
    model.save_hf(tmp_path / "published", dtype=FP8)
    save_tokenizer(tmp_path / "published")
    return tmp_path / "published"


@pytest.mark.parametrize("kind", ["decoder", pytest.param("hf", marks=pytest.mark.slow)])
def test_an_fp8_folder_is_adapted_and_the_adapter_written(kind, published, data, tmp_path):
    changes = LORA | {"model__kind": kind, "model__path": published, "model__weights": "load"}
    changes |= {"precision__mode": "fp8_tile", "checkpoint__export_hf": "true"}
    result = train(tiny(data, tmp_path, **changes))
    losses = [row["loss"] for row in rows(result.run_dir / "metrics.jsonl") if "loss" in row]
    assert losses[-1] < losses[0]
    # The base is the folder's, code by code.
    tensors, _ = last_state(result.run_dir)
    prefix = "model.net." if kind == "hf" else "model."
    name = "model.layers.1.mlp.down_proj"
    qdata = load_file(published / "model.safetensors")[f"{name}.weight"]
    assert torch.equal(tensors[f"{prefix}{name}.weight"].view(torch.uint8), qdata.view(torch.uint8))
    # What is trained, and has states, are the adapters.
    trained = {key.split(".", 1)[1].rsplit(".", 1)[0] for key in tensors if key.startswith("optimizer.")}
    assert trained == {key.removeprefix("model.") for key in tensors if ".lora_" in key and key.startswith("model.")}
    start = rows(result.run_dir / "events.jsonl")[0]
    adapters = sum(tensor.numel() for key, tensor in tensors.items() if ".lora_" in key and key.startswith("model."))
    whole = sum(param.numel() for param in load_decoder(published).parameters())
    assert start["trained"] == adapters
    assert start["parameters"] == whole + adapters  # FP8 codes too, which are buffers
    assert "parameters trained in fp8_tile" in start["message"]
    # The adapter continues the folder's model.
    model = load_decoder(published)
    load_adapter(model, result.run_dir / "hf")
    config = json.loads((result.run_dir / "hf" / "adapter_config.json").read_text())
    assert config["r"] == 4
    assert config["base_model_name_or_path"] == str(published)
    assert torch.equal(model.get_parameter(f"{name}.lora_B"), tensors[f"{prefix}{name}.lora_B"])


def test_a_resumed_run_equals_one_that_never_stopped(data, tmp_path):
    train(tiny(data, tmp_path / "parts", **LORA, train__steps=3, optim__schedule="constant"))
    straight = train(tiny(data, tmp_path / "straight", **LORA, optim__schedule="constant"))
    resumed = train(tiny(data, tmp_path / "parts", **LORA, optim__schedule="constant"))
    assert_same_run(resumed.run_dir, straight.run_dir)


def test_targets_and_base(data, tmp_path):
    changes = LORA | {"lora__targets": '["*.q_proj"]', "lora__base": "keep", "train__steps": 2}
    tensors, _ = last_state(train(tiny(data, tmp_path, **changes)).run_dir)
    adapted = {key for key in tensors if key.startswith("model.") and ".lora_" in key}
    assert adapted == {f"model.model.layers.{i}.self_attn.q_proj.lora_{part}" for i in range(2) for part in "AB"}
    assert tensors["model.model.layers.0.self_attn.q_proj.weight"].dtype == torch.float32


def test_a_target_without_a_layer_is_an_error_with_near_names(data, tmp_path):
    with pytest.raises(ConfigError, match="q_proj"):
        train(tiny(data, tmp_path, **LORA, lora__targets='["*.q_porj"]'))


def test_what_adapters_cannot_go_with_is_said_at_once():
    settings = {
        "lora.rank": "4",
        "memory.executor": "layer_major",
        "checkpoint.export_hf": "true",
        "checkpoint.export_format": "fp8",
        "precision.mode": "fp8_tile",
        "precision.controller.enabled": "true",
    }
    with pytest.raises(ConfigError) as caught:
        load_recipe(None, settings, environ={})
    assert "LoRA needs the standard executor" in str(caught.value)
    assert "Export format does not apply to adapters" in str(caught.value)
    assert "FP8 switching does not apply to weights that are kept as codes" in str(caught.value)
