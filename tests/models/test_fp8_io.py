"""FP8 folders in the layout of DeepSeek-V3: read exactly, written without loss, fit for transformers; bad ones told."""

import json
import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.draws import examples
from tests.models.shapes import KERNELS, load_decoder, make_batch, make_decoder
from tests.models.test_hf_io import FP32_DB, deepseek, hf_logits, llama
from tests.ops.compare import assert_snr
from tilewright.core.errors import CheckpointError
from tilewright.formats.fp8_layout import SCALE_SUFFIX, from_stored, to_stored
from tilewright.models.build import init_weights
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.models.decoder.hf_weights import load_weights, save_decoder
from tilewright.models.folder import fp8_weights
from tilewright.models.hf.load import load_hf
from tilewright.models.hf.model import HFModel

FP8 = torch.float8_e4m3fn
IDS = make_batch(seed=5)["input_ids"]
BLOCK_SETTINGS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
DEEPSEEK_WIDTHS = {"hidden_size": 256, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32}
"""Among them kv_a_proj_with_mqa, 576 wide: 512 + 64 as in DeepSeek-V3 itself."""


def plain_encode(weight, block=(128, 128), scale_dtype=torch.float32):
    """Codes and scales as DeepSeek's own script makes them: scale = amax / 448 of each block, torch's cast."""
    rows, cols = -(-weight.shape[0] // block[0]), -(-weight.shape[1] // block[1])
    qdata, scale = torch.empty(weight.shape, dtype=FP8), torch.empty(rows, cols)
    for i in range(rows):
        for j in range(cols):
            part = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            amax = weight[part].abs().max().clamp(min=1e-12)
            scale[i, j] = (
                2 ** torch.ceil(torch.log2(amax / 448)) if scale_dtype != torch.float32 else amax / 448
            ).item()
            qdata[part] = (weight[part] / scale[i, j]).clamp(-448, 448).to(FP8)
    return qdata, scale.to(scale_dtype)


def plain_decode(qdata, scale, block=(128, 128)):
    """Code times scale, block by block."""
    out = qdata.float()
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            out[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]] *= scale[i, j].float()
    return out


def is_linear(name):
    in_layer = name.startswith("model.layers.") and name.endswith("_proj.weight")
    return in_layer or name.endswith("_proj_with_mqa.weight")


def write_plain(net, folder, **how):
    """A folder as DeepSeek publishes it, written with transformers and plain torch alone; the values it stands for."""
    net.save_pretrained(folder)
    tensors, values = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if is_linear(name):
            tensors[name], tensors[name + "_scale_inv"] = plain_encode(tensor, **how)
            values[name] = plain_decode(tensors[name], tensors[name + "_scale_inv"], how.get("block", (128, 128)))
        else:
            tensors[name] = values[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, quantization_config=BLOCK_SETTINGS | {"weight_block_size": how.get("block", (128, 128))})
    return values


def change_config(folder, **changes):
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | changes))


def read_by_transformers(folder):
    """What transformers makes of a folder, decoded, as it is without a GPU anyway; and what it says about it."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    decoded = FineGrainedFP8Config(dequantize=True)
    net, info = AutoModelForCausalLM.from_pretrained(folder, quantization_config=decoded, output_loading_info=True)
    return net.float(), info


NETS = {
    "llama": lambda: llama(hidden_size=256, intermediate_size=384),
    "llama ragged": lambda: llama(hidden_size=192, intermediate_size=300),
    "deepseek ragged": lambda: deepseek(**DEEPSEEK_WIDTHS),
}


# ---- reading ----


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize(
    "how",
    [{}, {"scale_dtype": torch.bfloat16}, {"scale_dtype": torch.float8_e8m0fnu}, {"block": (64, 32)}],
    ids=["FP32 scales", "BF16 scales", "E8M0 scales", "64x32 blocks"],
)
def test_weights_are_code_times_scale(name, how, tmp_path):
    torch.manual_seed(0)
    values = write_plain(NETS[name](), tmp_path, **how)
    state = load_decoder(tmp_path, KERNELS).state_dict()
    assert state.keys() == values.keys()
    for key, want in values.items():
        assert torch.equal(state[key], want), key


@pytest.mark.parametrize("name", NETS)
def test_a_hugging_face_model_gets_the_same_weights(name, tmp_path):
    torch.manual_seed(0)
    write_plain(NETS[name](), tmp_path)
    model = load_hf(tmp_path, "causal_lm", "load")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not hasattr(model.config, "quantization_config")
    assert_snr(hf_logits(model.net, IDS), load_decoder(tmp_path, KERNELS)(IDS), FP32_DB)


def test_slices_make_the_same_weights_and_stay_small(tmp_path, monkeypatch):
    torch.manual_seed(0)
    values = write_plain(NETS["llama ragged"](), tmp_path)
    monkeypatch.setattr(fp8_weights, "_SLICE_BYTES", 1)  # one row of blocks at a time
    sizes = []

    def recording(qdata, scale_inv, tile):
        sizes.append(qdata.shape[0])
        return from_stored(qdata, scale_inv, tile)

    monkeypatch.setattr(fp8_weights, "from_stored", recording)
    state = load_decoder(tmp_path, KERNELS).state_dict()
    assert max(sizes) == 128
    for key, want in values.items():
        assert torch.equal(state[key], want), key


def test_bf16_parameters_take_power_of_two_weights_exactly(tmp_path):
    torch.manual_seed(0)
    values = write_plain(NETS["llama ragged"](), tmp_path, scale_dtype=torch.bfloat16)
    model = load_decoder(tmp_path, KERNELS).bfloat16()
    load_weights(model, tmp_path)
    for key, want in values.items():
        if is_linear(key):
            assert torch.equal(model.state_dict()[key].float(), want), key


# ---- writing ----


def wide_decoder():
    config = DecoderConfig.of(vocab_size=61, dim=256, num_layers=2, num_heads=4, ffn_dim=384)
    model = Decoder(config, KERNELS)
    init_weights(model, 0)
    return model


@pytest.mark.parametrize("make", [wide_decoder, lambda: make_decoder("deepseek")], ids=["llama", "deepseek"])
def test_transformers_reads_what_the_decoder_writes(make, tmp_path):
    make().save_hf(tmp_path, dtype=FP8)
    stored = load_file(tmp_path / "model.safetensors")
    assert {name for name, tensor in stored.items() if tensor.dtype == FP8} == {n for n in stored if is_linear(n)}
    net, info = read_by_transformers(tmp_path)
    assert not any(info.values()), info
    assert_snr(hf_logits(net, IDS), load_decoder(tmp_path, KERNELS)(IDS), FP32_DB)


@pytest.mark.parametrize("make", [NETS["llama"], deepseek], ids=["llama", "deepseek"])
def test_transformers_reads_what_a_hugging_face_model_writes(make, tmp_path):
    torch.manual_seed(0)
    HFModel(make(), "causal_lm").save_hf(tmp_path, dtype=FP8, extra={"eos_token_id": 3})
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["quantization_config"]["modules_to_not_convert"] == ["lm_head"]
    assert (raw["eos_token_id"], raw["dtype"]) == (3, "bfloat16")
    stored = load_file(tmp_path / "model.safetensors")
    assert {name for name, tensor in stored.items() if tensor.dtype == FP8} == {n for n in stored if is_linear(n)}
    net, info = read_by_transformers(tmp_path)
    assert not any(info.values()), info
    assert_snr(hf_logits(net, IDS), load_decoder(tmp_path, KERNELS)(IDS), FP32_DB)


def test_ragged_weights_are_told_and_can_be_kept(tmp_path, caplog):
    """transformers 5.23 without a GPU takes the block from shape / grid: 576 fails there, 300 would come out wrong."""
    torch.manual_seed(0)
    NETS["deepseek ragged"]().save_pretrained(tmp_path / "plain")
    model = load_decoder(tmp_path / "plain", KERNELS)
    with caplog.at_level(logging.WARNING, logger="tilewright"):
        model.save_hf(tmp_path / "all", dtype=FP8)
    assert "kv_a_proj_with_mqa.weight (3)" in caplog.text
    assert load_decoder(tmp_path / "all", KERNELS)(IDS).isfinite().all()
    caplog.clear()
    keep = ("*.kv_a_proj_with_mqa", "*.kv_b_proj")
    with caplog.at_level(logging.WARNING, logger="tilewright"):
        save_decoder(model, tmp_path / "some", dtype=FP8, keep=keep)
    assert not caplog.text
    kept = json.loads((tmp_path / "some" / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert len(kept) == 7
    net, _ = read_by_transformers(tmp_path / "some")
    assert_snr(hf_logits(net, IDS), load_decoder(tmp_path / "some", KERNELS)(IDS), FP32_DB)


@pytest.mark.parametrize("name", NETS)
def test_a_folder_with_power_of_two_scales_is_written_again_without_loss(name, tmp_path):
    torch.manual_seed(0)
    write_plain(NETS[name](), tmp_path / "a", scale_dtype=torch.bfloat16)
    first = load_decoder(tmp_path / "a", KERNELS)
    first.save_hf(tmp_path / "b", dtype=FP8)
    second = load_decoder(tmp_path / "b", KERNELS)
    before, after = load_file(tmp_path / "a" / "model.safetensors"), load_file(tmp_path / "b" / "model.safetensors")
    assert before.keys() == after.keys()
    for key, want in first.state_dict().items():
        if is_linear(key):
            assert torch.equal(second.state_dict()[key], want), key


@given(
    st.integers(1, 260),
    st.integers(1, 260),
    st.integers(-100, 100),
    st.integers(0, 2**31),
    st.sampled_from((1, 16, 448)),
)
@examples(40)
def test_what_came_from_codes_goes_back_without_loss(rows, cols, exponent, seed, top):
    """Also where a block uses only small codes, subnormals among them."""
    generator = torch.Generator().manual_seed(seed)
    qdata = (torch.randn(rows, cols, generator=generator) * top / 4).clamp(-top, top).to(FP8)
    scale = 2.0 ** torch.randint(exponent, exponent + 9, (-(-rows // 128), -(-cols // 128)), generator=generator)
    values = from_stored(qdata, scale).dequantize()
    assert torch.equal(values, plain_decode(qdata, scale))
    assert torch.equal(from_stored(*to_stored(values)).dequantize(), values)


def test_shards_keep_codes_and_index_together(tmp_path):
    model = wide_decoder()
    save_decoder(model, tmp_path, dtype=FP8, shard_bytes=200_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3
    tensors = {name: tensor for file in files for name, tensor in load_file(tmp_path / file).items()}
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    again = load_decoder(tmp_path, KERNELS).state_dict()
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(again[name], plain_decode(tensors[name], tensors[name + SCALE_SUFFIX]))


# ---- bad input ----

UP = "model.layers.0.mlp.up_proj.weight"


def drop_scale(tensors):
    del tensors[UP + "_scale_inv"]


def drop_weight(tensors):
    del tensors[UP]


def widen_weight(tensors):
    tensors[UP] = tensors[UP].bfloat16()


def shrink_scale(tensors):
    tensors[UP + "_scale_inv"] = tensors[UP + "_scale_inv"][:-1]


def whole_scale(tensors):
    tensors[UP + "_scale_inv"] = torch.ones(4, dtype=torch.int32).view(2, 2)


def stack_weight(tensors):
    tensors[UP] = tensors[UP][None].contiguous()


def other_codes(tensors):
    tensors[UP] = tensors[UP].float().to(torch.float8_e5m2)


def nan_code(tensors):
    tensors[UP].view(torch.uint8)[130, 7] = 0xFF


def nan_scale(tensors):
    tensors[UP + "_scale_inv"][1, 1] = float("nan")


def negative_scale(tensors):
    tensors[UP + "_scale_inv"][0, 0] = -1.0


BROKEN = {
    drop_scale: ("an FP8 weight has no scale", UP),
    drop_weight: ("Scale without its FP8 weight", f"{UP}_scale_inv, and no such weight"),
    widen_weight: ("Scale without its FP8 weight", f"{UP}_scale_inv, and a weight in BF16"),
    shrink_scale: ("wrong shape", f"{UP}_scale_inv [1, 2]"),
    whole_scale: ("wrong dtype", f"{UP}_scale_inv in I32"),
    stack_weight: ("not a matrix", f"{UP} [1, 192, 192]"),
    other_codes: ("Unsupported 8-bit format", f"{UP} in F8_E5M2"),
    nan_code: ("holds NaN", f"{UP}, first in row 130"),
    nan_scale: ("not finite numbers", f"1 of 4 in {UP}_scale_inv"),
    negative_scale: ("not finite numbers", f"1 of 4 in {UP}_scale_inv"),
}


@pytest.fixture
def ragged_folder(tmp_path):
    torch.manual_seed(0)
    write_plain(llama(hidden_size=192, intermediate_size=192), tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", ["decoder", "hf"])
@pytest.mark.parametrize("damage", BROKEN, ids=lambda damage: damage.__name__)
def test_broken_weights(damage, kind, ragged_folder):
    file = ragged_folder / "model.safetensors"
    tensors = load_file(file)
    damage(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as error:
        load_decoder(ragged_folder, KERNELS) if kind == "decoder" else load_hf(ragged_folder, "causal_lm", "load")
    (problem,) = error.value.problems
    what, got = BROKEN[damage]
    assert what in problem.what
    assert got in problem.got
    assert problem.where == str(file)
    assert problem.need
    assert problem.try_


def test_all_broken_weights_at_once_and_the_model_untouched(ragged_folder):
    model = load_decoder(ragged_folder, KERNELS)
    before = model.model.layers[1].mlp.up_proj.weight.clone()
    tensors = load_file(ragged_folder / "model.safetensors")
    drop_scale(tensors)
    del tensors["model.layers.1.mlp.up_proj.weight_scale_inv"]
    tensors["model.layers.1.mlp.down_proj.weight_scale_inv"] = torch.ones(1, 1)
    save_file(tensors, ragged_folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as error:
        load_weights(model, ragged_folder)
    assert len(error.value.problems) == 3
    assert torch.equal(model.model.layers[1].mlp.up_proj.weight, before)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"weight_block_size": None}, "quantization_config.weight_block_size = None"),
        ({"weight_block_size": [128]}, "quantization_config.weight_block_size = [128]"),
        ({"weight_block_size": [0, 128]}, "quantization_config.weight_block_size = [0, 128]"),
        ({"fmt": "e5m2"}, "quantization_config.fmt = 'e5m2'"),
        ({"activation_scheme": "static"}, "quantization_config.activation_scheme = 'static'"),
        ({"expert_dtype": "fp4"}, "quantization_config.expert_dtype = 'fp4'"),
    ],
)
@pytest.mark.parametrize("kind", ["decoder", "hf"])
def test_other_layouts_are_refused(change, text, kind, ragged_folder):
    change_config(ragged_folder, quantization_config=BLOCK_SETTINGS | change)
    with pytest.raises(CheckpointError) as error:
        load_decoder(ragged_folder, KERNELS) if kind == "decoder" else load_hf(ragged_folder, "causal_lm", "load")
    (problem,) = error.value.problems
    assert text in problem.got
    assert problem.where == str(ragged_folder / "config.json")
    assert problem.need
    assert problem.try_


def test_another_block_than_the_files_have(ragged_folder):
    change_config(ragged_folder, quantization_config=BLOCK_SETTINGS | {"weight_block_size": [64, 64]})
    with pytest.raises(CheckpointError, match=r"wrong shape") as error:
        load_decoder(ragged_folder, KERNELS)
    assert "[3, 3], a scale for each 64x64 block of [192, 192]" in error.value.problems[0].need


@pytest.mark.parametrize("kind", ["decoder", "hf"])
def test_codes_without_a_quantization_config(kind, ragged_folder):
    change_config(ragged_folder, quantization_config=None)
    with pytest.raises(CheckpointError, match="no quantization_config"):
        load_decoder(ragged_folder, KERNELS) if kind == "decoder" else load_hf(ragged_folder, "causal_lm", "load")
