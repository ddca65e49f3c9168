"""Llama, Mistral and DeepSeek-V3 folders: transformers reads what we write, we read what transformers writes."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.shapes import SHAPES, load_decoder, make_batch, make_decoder
from tests.ops.compare import assert_snr
from tilewright.core.errors import CheckpointError
from tilewright.models.decoder import hf_weights
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.models.decoder.hf_config import to_hf_config
from tilewright.models.decoder.hf_weights import load_weights, read_config, save_decoder

FP32_DB = 110
"""FP32 holds 24 bits, 144 dB; two implementations that sum in another order differ by about 130 dB here."""
WRITABLE = ["gqa", "tied", "mla", "mla_q_rank", "deepseek"]


def hf_logits(net, ids):
    with torch.no_grad():
        return net.eval()(input_ids=ids).logits


@pytest.mark.parametrize("name", WRITABLE)
def test_transformers_reads_what_we_write(name, tmp_path):
    from transformers import AutoModelForCausalLM

    model = make_decoder(name).eval()
    if name == "deepseek":
        model.blocks[1].mlp.gate.e_score_correction_bias += torch.linspace(-0.1, 0.1, 8)
    model.save_hf(tmp_path, extra={"eos_token_id": 3})
    net, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert net.config.eos_token_id == 3
    ids = make_batch(seed=5)["input_ids"]
    assert_snr(hf_logits(net, ids), model(ids), FP32_DB)


def llama(**changes):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1}
    return LlamaForCausalLM(LlamaConfig(**sizes | heads | changes))


def mistral(**changes):
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16, "initializer_range": 0.1}
    return MistralForCausalLM(MistralConfig(**sizes | heads | {"sliding_window": None} | changes))


def deepseek(**changes):
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    sizes = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    mla = {"kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 12}
    moe = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
    rest = {"num_attention_heads": 4, "num_key_value_heads": 4, "first_k_dense_replace": 1, "initializer_range": 0.1}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**sizes | mla | moe | rest | changes))


@pytest.mark.parametrize(
    "make",
    [
        llama,
        lambda: llama(tie_word_embeddings=True, num_key_value_heads=4),
        lambda: llama(head_dim=32, rope_parameters={"rope_type": "default", "rope_theta": 5e5}, rms_norm_eps=1e-3),
        mistral,
        lambda: mistral(sliding_window=3),
        deepseek,
        lambda: deepseek(q_lora_rank=None, n_shared_experts=2, tie_word_embeddings=True, rms_norm_eps=1e-4),
        lambda: deepseek(first_k_dense_replace=3),
    ],
    ids=[
        "llama",
        "llama tied",
        "llama wide heads",
        "mistral",
        "mistral with a window",
        "deepseek",
        "deepseek tied, no q rank",
        "deepseek dense",
    ],
)
def test_we_read_what_transformers_writes(make, tmp_path):
    torch.manual_seed(0)
    net = make()
    for name, buffer in net.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer += torch.randn_like(buffer) * 0.05
    net.save_pretrained(tmp_path)
    model = load_decoder(tmp_path).eval()
    ids = make_batch(seed=6)["input_ids"]
    assert_snr(model(ids), hf_logits(net, ids), FP32_DB)


def test_old_folders_keep_rope_theta_outside(tmp_path):
    llama().save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(raw | {"rope_theta": 12345.0, "rope_scaling": None}))
    assert read_config(tmp_path).rope_theta == 12345.0


@pytest.mark.parametrize("name", ["tied", "deepseek"])
def test_shards_and_slices_hold_the_same(name, tmp_path, monkeypatch):
    monkeypatch.setattr(hf_weights, "SLICE_BYTES", 1000)  # a few rows a time
    model = make_decoder(name)
    save_decoder(model, tmp_path, shard_bytes=20_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3
    assert files == sorted(p.name for p in tmp_path.glob("*.safetensors"))
    again = load_decoder(tmp_path)
    assert again.config == model.config
    for key, want in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], want), key


def test_rewriting_leaves_no_stale_file(tmp_path):
    model = make_decoder("gqa")
    save_decoder(model, tmp_path, shard_bytes=20_000)
    save_decoder(model, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert torch.equal(load_decoder(tmp_path).lm_head.weight, model.lm_head.weight)


def test_weights_in_bf16_keep_the_routing_bias_in_fp32(tmp_path):
    model = make_decoder("deepseek")
    model.save_hf(tmp_path, dtype=torch.bfloat16)
    dtypes = {tensor.dtype for name, tensor in load_file(tmp_path / "model.safetensors").items() if "bias" not in name}
    assert dtypes == {torch.bfloat16}
    bias = load_file(tmp_path / "model.safetensors")["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert bias.dtype == torch.float32
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    weight = load_decoder(tmp_path).lm_head.weight
    assert torch.equal(weight, model.lm_head.weight.bfloat16().float())


def test_all_mismatches_at_once(tmp_path):
    make_decoder("gqa").save_hf(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del (
        tensors["model.norm.weight"],
        tensors["model.layers.0.mlp.up_proj.weight"],
        tensors["model.layers.1.mlp.up_proj.weight"],
    )
    tensors |= {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64), "lm_head.weight": torch.zeros(61, 63)}
    save_file(tensors, tmp_path / "model.safetensors")
    model = make_decoder("gqa", seed=1)
    before = model.lm_head.weight.clone()
    with pytest.raises(CheckpointError) as error:
        load_weights(model, tmp_path)
    text = str(error.value)
    assert "missing (3): model.layers.*.mlp.up_proj.weight (2), model.norm.weight" in text
    assert "unexpected (1): model.layers.0.self_attn.q_proj.bias" in text
    assert "lm_head.weight: [61, 63] in the folder, [61, 64] in the model" in text
    assert "try" in text
    assert torch.equal(model.lm_head.weight, before)


def test_multi_token_prediction_layers_are_left_out(tmp_path):
    net = deepseek()
    net.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"model.layers.3.eh_proj.weight": torch.zeros(4, 4)}, tmp_path / "model.safetensors")
    load_decoder(tmp_path)  # num_nextn_predict_layers is 1
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"num_nextn_predict_layers": 0}))
    with pytest.raises(CheckpointError, match=r"unexpected \(1\)"):
        load_decoder(tmp_path)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "rope_type = 'yarn'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type = 'linear'"),
        ({"attention_bias": True, "hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"hidden_size": None, "vocab_size": "many"}, "vocab_size = 'many', hidden_size = None"),
        ({"model_type": "mamba"}, "model_type 'mamba'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
)
def test_what_the_decoder_cannot_do_is_said(change, text, tmp_path):
    make_decoder("gqa").save_hf(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | change))
    with pytest.raises(CheckpointError) as error:
        read_config(tmp_path)
    assert text in str(error.value)
    assert all(problem.got and problem.need and problem.try_ for problem in error.value.problems)


def break_folder(folder, how):
    weights = folder / "model.safetensors"
    if how == "no folder":
        return folder / "nowhere"
    if how == "no config":
        (folder / "config.json").unlink()
    elif how == "broken config":
        (folder / "config.json").write_text('{"model_type": ')
    elif how == "config is a list":
        (folder / "config.json").write_text("[1]")
    elif how == "no weights":
        weights.unlink()
    elif how == "corrupt weights":
        weights.write_bytes(weights.read_bytes()[:5000])
    elif how == "empty weights":
        weights.write_bytes(b"")
    return folder


@pytest.mark.parametrize(
    "how",
    ["no folder", "no config", "broken config", "config is a list", "no weights", "corrupt weights", "empty weights"],
)
def test_bad_folders(how, tmp_path):
    make_decoder("gqa").save_hf(tmp_path)
    with pytest.raises(CheckpointError) as error:
        load_decoder(break_folder(tmp_path, how))
    (problem,) = error.value.problems
    assert all((problem.what, problem.got, problem.need, problem.try_, problem.where))


def test_index_and_files_must_agree(tmp_path):
    save_decoder(make_decoder("gqa"), tmp_path, shard_bytes=60_000)
    lost = sorted(tmp_path.glob("model-00002-of-*"))[0]
    lost.unlink()
    with pytest.raises(CheckpointError, match=f"no {lost.name}"):
        load_decoder(tmp_path)


@pytest.mark.parametrize(("heads", "groups", "width"), [(3, 3, 16), (6, 2, 8), (5, 1, 10), (1, 1, 64), (12, 3, 6)])
def test_any_number_of_heads_has_a_layout(heads, groups, width, tmp_path):
    """Llama's where transformers takes it, else Mistral's; read by transformers and by us."""
    from transformers import AutoModelForCausalLM

    config = DecoderConfig.of(
        vocab_size=61, dim=64, num_layers=2, num_heads=heads, num_kv_heads=groups, head_dim=width, ffn_dim=96
    )
    model = Decoder(config).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(0, 0.2)
    model.save_hf(tmp_path)
    expected = "llama" if 64 % heads == 0 else "mistral"
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == expected
    net, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    ids = make_batch(seed=5)["input_ids"]
    assert_snr(hf_logits(net, ids), model(ids), FP32_DB)
    assert read_config(tmp_path) == config
    assert_snr(load_decoder(tmp_path).eval()(ids), model(ids), FP32_DB)


@pytest.mark.parametrize("window", [4096, "absent", None, 0, -1, 2.5, "all"])
def test_a_sliding_window_is_read(window, tmp_path):
    """Where config.json says nothing of a window, transformers' Mistral has one."""
    mistral().save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw.pop("sliding_window", None)
    raw |= {} if window == "absent" else {"sliding_window": window}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    if window in (4096, "absent", None):
        assert read_config(tmp_path).sliding_window == (0 if window is None else 4096)
        return
    with pytest.raises(CheckpointError, match=f"sliding_window = {window!r}"):
        read_config(tmp_path)


def test_shapes_without_a_layout_cannot_be_written(tmp_path):
    with pytest.raises(CheckpointError, match="No Hugging Face layout"):
        make_decoder("gqa_moe").save_hf(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_unwritable_folder(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="cannot be written") as error:
        make_decoder("gqa").save_hf(tmp_path / "file")
    assert "in a writable folder" in error.value.problems[0].need


@pytest.mark.skipif(sys.platform == "win32", reason="no file size limit to set")
def test_a_full_disk_leaves_no_half_model(tmp_path):
    """The limit on the size of a file makes the write fail as a full disk does, in the middle."""
    import resource

    make_decoder("gqa").save_hf(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="cannot be written"):
            make_decoder("gqa", seed=1).save_hf(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    with pytest.raises(CheckpointError, match=r"No config\.json"):
        load_decoder(tmp_path)


def test_reading_holds_one_slice_beside_the_model(tmp_path, monkeypatch):
    """What reading allocates in addition to the parameters is at most one slice."""
    monkeypatch.setattr(hf_weights, "SLICE_BYTES", 4096)
    config = DecoderConfig.of(vocab_size=500, dim=64, num_layers=1, num_heads=4)
    model = Decoder(config)
    model.save_hf(tmp_path)
    sizes = []
    monkeypatch.setattr(torch.Tensor, "copy_", _recording_copy(sizes))
    load_weights(model, tmp_path)
    assert max(sizes) <= 4096


def _recording_copy(sizes):
    original = torch.Tensor.copy_

    def copy_(self, source, *args):
        sizes.append(source.nbytes)
        return original(self, source, *args)

    return copy_


@pytest.mark.parametrize("name", WRITABLE)
def test_config_round_trip(name, tmp_path):
    make_decoder(name).save_hf(tmp_path)
    assert to_hf_config(read_config(tmp_path), "float32") == to_hf_config(SHAPES[name], "float32")
