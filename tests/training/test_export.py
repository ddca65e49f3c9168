"""The folder that a run leaves: a Hugging Face model's config stays its own, and the event says what is FP8."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.training.tiny import rows, save_tokenizer, tiny
from tilewright.core.errors import CheckpointError
from tilewright.models.build import init_weights
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.training.session import train

transformers = pytest.importorskip("transformers")

_TEXT = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
_TEXT |= {"num_attention_heads": 2, "max_position_embeddings": 514}
FAMILIES = {
    "gpt2": ("causal_lm", {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}),
    "roberta": ("masked_lm", _TEXT | {"pad_token_id": 1}),
    "llama": ("causal_lm", _TEXT | {"num_key_value_heads": 2, "bos_token_id": 11, "eos_token_id": [12, 13]}),
}
ONCE = {"train__steps": 1, "train__eval_interval": 0, "train__sample_tokens": 0, "checkpoint__export_hf": "true"}


def foreign(name, folder):
    task, sizes = FAMILIES[name]
    transformers.AutoConfig.for_model(name, **sizes).save_pretrained(folder)
    return {"model__kind": "hf", "model__path": folder, "model__task": task}


@pytest.mark.parametrize(
    "name", ["roberta", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "llama"))]
)
def test_a_foreign_model_keeps_its_config(name, data, tmp_path):
    changes = foreign(name, tmp_path / "model")
    folder = train(tiny(data, tmp_path, **ONCE, **changes)).run_dir / "hf"
    before, after = (
        json.loads(transformers.AutoConfig.from_pretrained(path).to_json_string(use_diff=False))
        for path in (tmp_path / "model", folder)
    )
    different = {key for key in before | after if before.get(key) != after.get(key)}
    assert different <= {"dtype", "architectures", "_name_or_path"}, different
    kind = getattr(transformers, after["architectures"][0])
    net, info = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    longest = max(net.config.max_position_embeddings - 2, 32)
    assert net.eval()(input_ids=torch.zeros(1, longest, dtype=torch.long) + 5).logits.isfinite().all()


def test_the_event_says_how_much_is_fp8(data, tmp_path):
    changes = foreign("llama", tmp_path / "model") | {"checkpoint__export_format": "fp8"}
    run = train(tiny(data, tmp_path, **ONCE, **changes)).run_dir
    stored = load_file(run / "hf" / "model.safetensors")
    in_fp8 = sum(t.nbytes for k, t in stored.items() if t.itemsize == 1 or k.endswith("_scale_inv"))
    share = in_fp8 / (run / "hf" / "model.safetensors").stat().st_size
    (text,) = [row["message"] for row in rows(run / "events.jsonl") if row["kind"] == "export"]
    assert f"in FP8 ({100 * share:.1f} %)" in text
    assert 0.3 < share < 1


def test_an_fp8_export_without_fp8_is_refused_before_training(data, tmp_path):
    changes = foreign("gpt2", tmp_path / "model") | {"checkpoint__export_format": "fp8"}
    with pytest.raises(CheckpointError, match="No weight of this model can be stored in FP8"):
        train(tiny(data, tmp_path, **ONCE, **changes))
    assert not (tmp_path / "tiny" / "metrics.jsonl").exists()


@pytest.mark.parametrize(("weights", "length", "eos"), [("load", 512, 7), ("random", 32, None)])
def test_our_own_decoder_gets_what_the_data_decides_and_keeps_what_it_came_with(weights, length, eos, data, tmp_path):
    model = Decoder(DecoderConfig.of(vocab_size=300, dim=32, num_layers=1, num_heads=2, ffn_dim=48))
    init_weights(model, 0)
    model.save_hf(tmp_path / "model", extra={"max_position_embeddings": 512, "eos_token_id": 7})
    save_tokenizer(tmp_path / "model")
    changes = {"model__path": tmp_path / "model", "model__weights": weights}
    folder = train(tiny(data, tmp_path, **ONCE, **changes)).run_dir / "hf"
    config = json.loads((folder / "config.json").read_text())
    ids = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["max_position_embeddings"] == length
    assert config["eos_token_id"] == eos or (eos is None and isinstance(config["eos_token_id"], int)), ids
