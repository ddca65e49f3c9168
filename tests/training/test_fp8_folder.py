"""FP8 folders through whole runs: all weights are trained from one, and one is written at the end."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.shapes import KERNELS, load_decoder, make_batch
from tests.training.tiny import rows, save_tokenizer, tiny
from tilewright.core.errors import CheckpointError
from tilewright.models.build import init_weights
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.ops.base.code_modules import named_constants
from tilewright.optim.adam import DeepSeekAdam
from tilewright.optim.clip import GradClip
from tilewright.optim.param_groups import decay_groups
from tilewright.precision.convert import convert
from tilewright.precision.lora.lora import adapted_layers, load_lora_decoder
from tilewright.training.checkpoint.checkpoint_state import TrainState
from tilewright.training.checkpoint.checkpoint_store import CheckpointStore
from tilewright.training.executor.standard import StandardExecutor
from tilewright.training.session import train

FP8 = torch.float8_e4m3fn


@pytest.fixture
def published(tmp_path):
    """A folder in the layout of DeepSeek-V3, ragged."""
    config = DecoderConfig.of(vocab_size=300, dim=48, num_layers=2, num_heads=2, ffn_dim=200, tie_embeddings=False)
    model = Decoder(config)
    init_weights(model, 5)
    model.save_hf(tmp_path / "published", dtype=FP8)
    save_tokenizer(tmp_path / "published")
    return tmp_path / "published"


def exported(result):
    folder = result.run_dir / "hf"
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("value", "dtypes"),
    [("keep", {torch.float32}), ("bf16", {torch.bfloat16}), ("fp8", {FP8, torch.float32, torch.bfloat16})],
)
def test_export_format(value, dtypes, data, tmp_path):
    changes = {"train__steps": 1, "train__eval_interval": 0, "checkpoint__export_hf": "true"}
    config, tensors = exported(train(tiny(data, tmp_path, **changes, checkpoint__export_format=value)))
    assert {tensor.dtype for tensor in tensors.values()} == dtypes
    assert ("quantization_config" in config) == (value == "fp8")


@pytest.mark.parametrize("kind", ["decoder", pytest.param("hf", marks=pytest.mark.slow)])
@pytest.mark.parametrize("master", [pytest.param("fp32", marks=pytest.mark.slow), "stochastic"])
def test_all_weights_are_fine_tuned_from_fp8_to_fp8(kind, master, published, data, tmp_path):
    changes = {"model__kind": kind, "model__path": published, "model__weights": "load", "optim__master_weights": master}
    changes |= {
        "precision__mode": "fp8_tile",
        "checkpoint__export_hf": "true",
        "checkpoint__export_format": "fp8",
        "optim__lr": 0.01,
    }
    result = train(tiny(data, tmp_path, **changes))
    losses = [row["loss"] for row in rows(result.run_dir / "metrics.jsonl") if "loss" in row]
    assert losses[-1] < losses[0] - 0.5, losses
    config, tensors = exported(result)
    before = load_file(published / "model.safetensors")
    dtypes = {name: tensor.dtype for name, tensor in before.items()}
    if kind == "hf":  # blocks of several sizes, which transformers without a GPU misreads
        dtypes = {name: dtype for name, dtype in dtypes.items() if ".mlp." not in name}
        dtypes |= {name: torch.bfloat16 for name in before if ".mlp." in name and name.endswith(".weight")}
    assert {name: tensor.dtype for name, tensor in tensors.items()} == dtypes
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(tensors[name].view(torch.uint8), before[name].view(torch.uint8))
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    assert load_decoder(result.run_dir / "hf")(torch.arange(8)[None]).isfinite().all()


def test_a_broken_folder_stops_the_run_before_it_begins(published, data, tmp_path):
    tensors = load_file(published / "model.safetensors")
    tensors.pop("model.layers.1.self_attn.q_proj.weight_scale_inv")
    save_file(tensors, published / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="an FP8 weight has no scale") as error:
        train(tiny(data, tmp_path, model__path=published, model__weights="load"))
    assert "model.layers.1.self_attn.q_proj.weight" in error.value.problems[0].got


def test_adapters_train_with_the_executor_and_resume_from_a_checkpoint(published, tmp_path):
    """The optimizer holds adapters alone; codes and scales go through a checkpoint as they are."""

    def make():
        model = load_lora_decoder(published, rank=4, alpha=8.0, kernels=KERNELS)
        convert(model, "fp8_tile", kernels=KERNELS)
        optimizer = DeepSeekAdam(decay_groups(model, 0.0), lr=0.01)
        return model, optimizer, StandardExecutor(model, optimizer, clip=GradClip(1.0))

    batches = [make_batch(rows=2, seed=seed, vocab=300) for seed in range(2)]
    model, optimizer, executor = make()
    trained = {param for group in optimizer.param_groups for param in group["params"]}
    assert trained == {getattr(m, part) for m in adapted_layers(model).values() for part in ("lora_A", "lora_B")}
    losses = [executor.step(batches, 0.01).loss for _ in range(6)]
    assert losses[-1] < losses[0]
    store = CheckpointStore(tmp_path / "checkpoints")
    store.save(6, TrainState(model, optimizer, {}).tensors(), TrainState(model, optimizer, {}).meta(), now=True)
    again, other, resumed = make()
    for buffer in named_constants(again).values():
        buffer.view(torch.uint8).zero_()
    path, _ = store.newest_sound()
    TrainState(again, other, {}).restore(path)
    store.close()
    want, got = executor.step(batches, 0.01).loss, resumed.step(batches, 0.01).loss
    assert got == want
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name].view(torch.uint8), tensor.view(torch.uint8)), name
