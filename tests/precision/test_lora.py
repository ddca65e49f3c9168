"""Adapters on frozen FP8 weights: exact operands, right gradients, one byte per weight, files that peft reads."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.cover import covering, some
from tests.models.shapes import KERNELS, load_decoder, make_batch, make_decoder
from tests.models.test_fp8_io import DEEPSEEK_WIDTHS, NETS, write_plain
from tests.models.test_hf_io import deepseek
from tests.ops.compare import assert_snr
from tilewright.core.errors import CheckpointError, ConfigError
from tilewright.core.hardware import detect_machine
from tilewright.formats.quantize import quantize
from tilewright.formats.scaling import ROW_TILE
from tilewright.formats.spec import E4M3, E5M2
from tilewright.formats.tiled import FP8_BLOCK, TiledTensor, fp8_format
from tilewright.models.hf.load import load_hf
from tilewright.ops.base.code_modules import named_constants
from tilewright.ops.kernels import Kernels
from tilewright.precision.convert import convert, evaluating, set_mode
from tilewright.precision.float8.frozen_linear import FrozenFloat8Linear, freeze_in_fp8
from tilewright.precision.float8.linear import Float8Linear
from tilewright.precision.lora.lora import adapted_layers, add_lora, load_fp8_weights, load_lora_decoder, merge_lora
from tilewright.precision.lora.peft_io import load_adapter, save_adapter
from tilewright.precision.policy.gemm_formats import Gemms

REF = Kernels(detect_machine("cpu"), {"tile_gemm": "ref", "quantize": "ref"})
WAYS = covering(("bf16_mixed", "fp8_tile"), ("convert", "adapters"), ("fp8", "keep"), pairs=False)
BF16_DB = 45
"""Adapters compute in BF16: relative rounding errors up to 2^-9 (54 dB each), several of them in a row."""
FP32_DB = 120
"""Sums of the same exact matmuls in another order: FP32 has 24 bits, 144 dB."""
FP8_DB = 25
"""E4M3 rounds by up to 1/16: about 31 dB an operand, and two operands differ from the unrounded ones."""


def make_linear(in_features=300, out_features=576, bias=False, seed=0):
    torch.manual_seed(seed)
    return nn.Linear(in_features, out_features, bias=bias)


def with_adapter(layer, **options):
    """The layer in a model of its own, with adapters that are not zero."""
    model = nn.Sequential(layer)
    add_lora(model, rank=4, alpha=8.0, kernels=KERNELS, **options)
    torch.manual_seed(1)
    for module in adapted_layers(model).values():
        nn.init.normal_(module.lora_B, std=0.1)
    return model


def rounded(x, spec, powers):
    return quantize(x, fp8_format(spec, ROW_TILE, power_of_two=powers)).dequantize().double()


@pytest.mark.parametrize(("kernels", "at_least_db"), [(REF, FP32_DB), (KERNELS, BF16_DB)], ids=["ref", "chosen"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "gemm", "powers"), [(1, "fp8_tile", True), (37, "fp8_hybrid", False)])
def test_products_have_exactly_the_fp8_operands(bias, rows, gemm, powers, kernels, at_least_db):
    """To FP32 accuracy with the reference; the kernel of a CPU rounds its result to BF16."""
    layer = make_linear(bias=bias)
    weight = quantize(layer.weight.detach(), FP8_BLOCK).dequantize().double()
    offset = layer.bias.detach().double() if bias else 0.0
    freeze_in_fp8(layer, kernels)
    layer.set_gemms(Gemms.all(gemm), power_of_two=powers)
    x = torch.randn(rows, 300, requires_grad=True)
    dy = torch.randn(rows, 576)
    out = layer(x)
    out.backward(dy)
    assert_snr(out, rounded(x.detach(), E4M3, powers) @ weight.T + offset, at_least_db, "forward")
    dy = rounded(dy, E4M3 if gemm == "fp8_tile" else E5M2, powers)
    assert_snr(x.grad, dy @ weight, at_least_db, "input gradient")


def test_gradients_against_float64():
    """A, B and x, against autograd in float64 on the decoded weight and inputs that are not rounded."""
    model = with_adapter(make_linear())
    layer = model[0]
    x = torch.randn(64, 300, requires_grad=True)
    dy = torch.randn(64, 576)
    model(x).backward(dy)
    weight = layer.tiled_weight().dequantize().double()
    x64, a64, b64 = (t.detach().double().requires_grad_() for t in (x, layer.lora_A, layer.lora_B))
    (x64 @ weight.T + (x64 @ a64.T @ b64.T) * 2.0).backward(dy.double())
    assert_snr(layer.lora_A.grad, a64.grad, BF16_DB, "A")
    assert_snr(layer.lora_B.grad, b64.grad, BF16_DB, "B")
    assert_snr(x.grad, x64.grad, FP8_DB, "x")


def test_the_base_is_frozen_and_takes_a_byte_a_weight():
    model = with_adapter(make_linear(bias=True))
    model(torch.randn(5, 300)).sum().backward()
    assert {name for name, param in model.named_parameters() if param.requires_grad} == {"0.lora_A", "0.lora_B"}
    assert all((param.grad is not None) == param.requires_grad for param in model.parameters())
    buffers = named_constants(model)
    assert buffers.keys() == {"0.weight", "0.weight_scale_inv"}
    assert sum(b.nbytes for b in buffers.values()) == 300 * 576 + 4 * 3 * 5
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        model(torch.randn(64, 300, dtype=torch.bfloat16, requires_grad=True))
    extra = {t.data_ptr(): t.nbytes for t in saved if t.data_ptr() not in {b.data_ptr() for b in buffers.values()}}
    # BF16 input, A, B and the narrow matmul: nothing as large as the weight in BF16, no copy of the codes
    assert sum(extra.values()) <= 2 * (64 * 300 + 4 * 300 + 4 * 576 + 2 * 64 * 4)


def test_the_first_output_is_that_of_the_base_alone():
    model = make_decoder("gqa")
    base = copy.deepcopy(model)
    for name, module in list(base.named_modules()):
        if name.startswith("model.layers") and isinstance(module, nn.Linear):
            freeze_in_fp8(module, KERNELS)
    names = add_lora(model, rank=4, kernels=KERNELS)
    assert len(names) == 14
    assert not any("lm_head" in name for name in names)
    ids = make_batch()["input_ids"]
    assert torch.equal(model(ids), base(ids))


def test_compiled_in_one_graph():
    model = with_adapter(make_linear(256, 200))
    x = torch.randn(24, 256)
    want = model(x)
    want.square().sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    got = torch.compile(model, fullgraph=True)(x)
    got.square().sum().backward()
    assert_snr(got, want, BF16_DB)
    for name, grad in grads.items():
        assert_snr(model.get_parameter(name).grad, grad, BF16_DB, name)


def test_gradients_add_up_over_micro_batches():
    model = with_adapter(make_linear())
    parts = [torch.randn(8, 300), torch.randn(16, 300)]
    sums = {}
    for x in parts:
        model.zero_grad()
        model(x).square().sum().backward()
        for name, p in model.named_parameters():
            sums[name] = sums.get(name, 0) + p.grad
    model.zero_grad()
    for x in parts:
        model(x).square().sum().backward()
    assert all(torch.equal(p.grad, sums[name]) for name, p in model.named_parameters())


def test_recomputation_changes_nothing():
    model = with_adapter(make_linear())
    grads = []
    for run in (model, lambda x: checkpoint(model, x, use_reentrant=False)):
        x = torch.randn(16, 300, generator=torch.Generator().manual_seed(3), requires_grad=True)
        model.zero_grad()
        run(x).square().sum().backward()
        grads.append([x.grad, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("mode", some((None, "bf16_mixed", "fp8_tile"), "fp8_tile"))
def test_fine_tuning_loses_loss(mode):
    model = make_decoder("deepseek")
    add_lora(model, rank=8, alpha=16.0, kernels=KERNELS)
    if mode is not None:
        convert(model, mode, kernels=KERNELS)
    model.activation_checkpoint = "full"
    qdata = {name: b.clone() for name, b in named_constants(model).items() if b.dtype == torch.float8_e4m3fn}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    batch, losses = make_batch(rows=4), []
    for _ in range(12):
        out = model.loss(batch)
        (out.loss_sum / out.count).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append((out.loss_sum / out.count).item())
    assert losses[-1] < 0.8 * losses[0], losses
    for name, want in qdata.items():
        assert torch.equal(named_constants(model)[name].view(torch.uint8), want.view(torch.uint8)), name


# ---- with precision policies ----


@pytest.mark.parametrize(("mode", "first", "base"), WAYS)
def test_adapters_act_in_every_mode(mode, first, base):
    """Converted before or after, also where experts are multiplied together."""
    model = make_decoder("deepseek")
    if first == "convert":
        convert(model, mode, kernels=KERNELS)
    add_lora(model, rank=4, base=base, kernels=KERNELS)
    if first == "adapters":
        convert(model, mode, kernels=KERNELS)
    ids = make_batch()["input_ids"]
    before, silent = model(ids), []
    for name, module in adapted_layers(model).items():
        nn.init.normal_(module.lora_B, std=1.0)
        after = model(ids)
        if torch.equal(after, before):
            silent.append(name)
        before = after
    # An expert may have no tokens; it is then silent in all three of its layers.
    assert all(".experts." in name for name in silent), silent
    assert len(silent) < 12, silent


def test_evaluation_in_fp32_decodes_the_weights():
    model = make_decoder("gqa")
    add_lora(model, rank=4, kernels=KERNELS)
    convert(model, "fp8_tile", kernels=KERNELS)
    ids = make_batch()["input_ids"]
    narrow = model(ids)
    with evaluating(model), torch.no_grad():
        wide = model(ids)
    again = model(ids)
    assert torch.equal(narrow, again)
    merge_lora(model)
    set_mode(model, "fp32")
    assert_snr(wide, model(ids), FP32_DB - 10)


def test_tensorwise_scales_are_refused():
    model = make_decoder("gqa")
    add_lora(model, rank=4, kernels=KERNELS)
    with pytest.raises(ConfigError) as error:
        convert(model, "fp8_tensorwise", kernels=KERNELS)
    assert "without block scales" in error.value.problems[0].what


@pytest.mark.parametrize("base", ["fp8", "keep"])
def test_converted_layers_are_converted_again_after_merging(base):
    """Through adapters and back: the table, the classes and the outputs are those of a model converted once."""
    model, plain = make_decoder("deepseek"), make_decoder("deepseek")
    report = convert(plain, "fp8_tile", kernels=KERNELS).precision_report
    convert(model, "fp8_tile", kernels=KERNELS)
    add_lora(model, rank=4, base=base, kernels=KERNELS)
    assert all(
        (row.storage == "fp8" and "frozen, in FP8" in row.reason) == (base == "fp8")
        for row in model.precision_report.rows
        if row.fqn in adapted_layers(model)
    )
    merge_lora(model)
    assert model.precision_report.rows == report.rows
    classes = {name: type(module) for name, module in plain.named_modules()}
    assert {name: type(module) for name, module in model.named_modules()} == classes
    if base == "fp8":  # the weights are rounded now; once more, by the layers, changes nothing
        with torch.no_grad():
            for module in plain.modules():
                if isinstance(module, Float8Linear):
                    module.weight.copy_(quantize(module.weight, FP8_BLOCK).dequantize())
    batch = make_batch()
    for net in (model, plain):
        net.loss(batch).loss_sum.backward()
    for (name, got), (_, want) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(got.grad, want.grad), name


def test_neighbours_quantise_an_input_once(monkeypatch):
    model = make_decoder("gqa")
    add_lora(model, rank=4, kernels=KERNELS)
    calls = []
    run = Kernels.quantize
    monkeypatch.setattr(Kernels, "quantize", lambda *args, **options: calls.append(args) or run(*args, **options))
    model(make_batch()["input_ids"])
    assert len(calls) == 2 * 4  # a layer's inputs: of q, k, v; of o; of gate and up; of down


def test_a_hugging_face_model_trains_converted():
    torch.manual_seed(0)
    net = NETS["llama"]()
    add_lora(net, rank=4, kernels=KERNELS)
    convert(net, "fp8_tile", kernels=KERNELS)
    net(input_ids=make_batch()["input_ids"]).logits.sum().backward()
    assert all(p.grad is not None for p in net.parameters() if p.requires_grad)


def test_casting_the_model_leaves_the_codes():
    model = with_adapter(make_linear())
    before = {name: b.clone() for name, b in named_constants(model).items()}
    model.bfloat16().float().double()
    for name, buffer in named_constants(model).items():
        assert buffer.dtype == before[name].dtype
        assert torch.equal(buffer.view(torch.uint8), before[name].view(torch.uint8)), name


# ---- merging and files ----


@pytest.mark.parametrize("base", ["fp8", "keep"])
def test_merged_weights_compute_the_same(base, tmp_path):
    model = make_decoder("deepseek")
    add_lora(model, rank=4, base=base, kernels=KERNELS)
    for module in adapted_layers(model).values():
        nn.init.normal_(module.lora_B, std=0.05)
    with pytest.raises(CheckpointError, match="Adapters in the model, none in the folder") as error:
        model.save_hf(tmp_path / "no")
    assert "merge_lora" in error.value.problems[0].try_
    assert not (tmp_path / "no").exists()
    want = {
        name: (m.tiled_weight().dequantize() if base == "fp8" else m.weight) + 8.0 * m.lora_B @ m.lora_A
        for name, m in adapted_layers(model).items()
    }
    names = merge_lora(model)
    assert names == list(want)
    for name, weight in want.items():
        module = model.get_submodule(name)
        assert type(module) is nn.Linear
        assert_snr(module.weight, weight, FP32_DB, name)
    assert not any("lora" in name for name in model.state_dict())
    model.save_hf(tmp_path)
    assert torch.equal(load_decoder(tmp_path, KERNELS)(make_batch()["input_ids"]), model(make_batch()["input_ids"]))


def test_adapters_round_trip_in_the_layout_of_peft(tmp_path):
    model = make_decoder("gqa")
    names = add_lora(model, rank=4, alpha=6.0, targets=["*.q_proj", "*.down_proj"], kernels=KERNELS)
    for module in adapted_layers(model).values():
        nn.init.normal_(module.lora_B, std=0.1)
    save_adapter(model, tmp_path, base_model="some/base")
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert tensors.keys() == {f"base_model.model.{name}.lora_{part}.weight" for name in names for part in "AB"}
    assert list(tensors["base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"].shape) == [4, 96]
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 6.0)
    assert config["base_model_name_or_path"] == "some/base"
    again = make_decoder("gqa")
    assert load_adapter(again, tmp_path) == names
    ids = make_batch()["input_ids"]
    assert torch.equal(again(ids), model(ids))
    load_adapter(again, tmp_path)  # over the ones that are there


def test_peft_reads_our_adapters(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(0)
    net = NETS["llama"]()
    net.save_pretrained(tmp_path / "base")
    model = load_hf(tmp_path / "base", "causal_lm", "load")
    add_lora(model, rank=4, base="keep", kernels=KERNELS)
    for module in adapted_layers(model).values():
        nn.init.normal_(module.lora_B, std=0.1)
    save_adapter(model, tmp_path / "adapter")
    ids = make_batch()["input_ids"]
    with torch.no_grad():
        theirs = peft.PeftModel.from_pretrained(net, tmp_path / "adapter")(input_ids=ids).logits
        assert_snr(model.net(input_ids=ids).logits, theirs, FP32_DB - 10)


# ---- from folders ----


@pytest.mark.parametrize("name", ["llama ragged", "deepseek ragged"])
def test_a_deepseek_folder_becomes_the_layers_without_decoding(name, tmp_path, monkeypatch):
    torch.manual_seed(0)
    write_plain(NETS[name](), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    with monkeypatch.context() as patch:
        patch.setattr(TiledTensor, "dequantize", None)
        model = load_lora_decoder(tmp_path, rank=4, kernels=KERNELS)
    layers = adapted_layers(model)
    assert {f"{layer}.weight" for layer in layers} == {n for n, t in stored.items() if t.dtype == torch.float8_e4m3fn}
    for layer, module in layers.items():
        assert torch.equal(module.weight.view(torch.uint8), stored[f"{layer}.weight"].view(torch.uint8)), layer
        assert torch.equal(module.weight_scale_inv, stored[f"{layer}.weight_scale_inv"]), layer
    plain = load_decoder(tmp_path, KERNELS)
    ids = make_batch()["input_ids"]
    if name == "llama ragged":  # with experts, a rounding may send a token elsewhere
        assert_snr(model(ids), plain(ids), FP8_DB - 10, "inputs rounded in every layer")
    convert(model, "fp32")
    assert_snr(model(ids), plain(ids), FP32_DB - 10, "decoded")


def test_a_folder_in_high_precision_is_encoded(tmp_path):
    model = make_decoder("gqa")
    model.save_hf(tmp_path)
    loaded = load_lora_decoder(tmp_path, rank=4, kernels=KERNELS)
    add_lora(model, rank=4, kernels=KERNELS)
    ids = make_batch()["input_ids"]
    assert torch.equal(loaded(ids), model(ids))


def test_a_hugging_face_model_gets_the_folders_codes(tmp_path):
    torch.manual_seed(0)
    write_plain(NETS["llama ragged"](), tmp_path)
    model = load_hf(tmp_path, "causal_lm", "load").net
    names = add_lora(model, rank=4, kernels=KERNELS)
    assert load_fp8_weights(model, tmp_path) == names
    stored = load_file(tmp_path / "model.safetensors")
    for name in names:
        assert torch.equal(named_constants(model)[f"{name}.weight_scale_inv"], stored[f"{name}.weight_scale_inv"])
    model(input_ids=make_batch()["input_ids"]).logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_other_blocks_need_decoding(tmp_path):
    torch.manual_seed(0)
    write_plain(NETS["llama ragged"](), tmp_path, block=(64, 64))
    with pytest.raises(CheckpointError, match="FP8 block size is not supported without decoding") as error:
        load_lora_decoder(tmp_path, rank=4, kernels=KERNELS)
    assert "64x64" in error.value.problems[0].got
    load_lora_decoder(tmp_path, rank=4, base="keep", kernels=KERNELS)


def test_the_576_wide_layer_trains(tmp_path):
    torch.manual_seed(0)
    write_plain(deepseek(**DEEPSEEK_WIDTHS), tmp_path)
    model = load_lora_decoder(tmp_path, rank=4, targets=["*.kv_a_proj_with_mqa"], kernels=KERNELS)
    model.loss(make_batch()).loss_sum.backward()
    layer = model.model.layers[0].self_attn.kv_a_proj_with_mqa
    assert isinstance(layer, FrozenFloat8Linear)
    assert layer.out_features == 576
    assert layer.lora_B.grad.abs().sum() > 0


# ---- bad input ----


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rank": 0}, "rank 0"),
        ({"alpha": -1.0}, "alpha -1.0"),
        ({"base": "int4"}, "'int4'"),
        ({"targets": ["*.q_prj"]}, "'*.q_prj'"),
        ({"targets": ["lm_head"]}, "'lm_head'"),
    ],
)
def test_adapters_that_cannot_be(options, text):
    model = make_decoder("gqa")
    before = list(model.state_dict())
    with pytest.raises(ConfigError) as error:
        add_lora(model, **options)
    (problem,) = error.value.problems
    assert text in problem.got
    assert problem.need
    assert problem.try_
    assert list(model.state_dict()) == before
    assert all(p.requires_grad for p in model.parameters())


def test_near_names_and_twice():
    model = make_decoder("gqa")
    with pytest.raises(ConfigError, match=r"near names: .*q_proj"):
        add_lora(model, targets=["model.layers.0.self_attn.q_prj"])
    add_lora(model, kernels=KERNELS)
    with pytest.raises(ConfigError, match="Model already has adapters"):
        add_lora(model)


def break_adapter(folder, how):
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    key = next(iter(tensors))
    if how == "no config":
        (folder / "adapter_config.json").unlink()
        return
    if how == "no weights":
        (folder / "adapter_model.safetensors").unlink()
        return
    if how == "another kind":
        config["use_dora"] = True
    elif " = " in how:
        config[{"r": "r", "alpha": "lora_alpha"}[how.partition(" ")[0]]] = json.loads(how.partition(" = ")[2])
    elif how == "a tensor less":
        del tensors[key]
    elif how == "another shape":
        tensors[key] = torch.zeros(3, 3)
    elif how == "another layer":
        tensors |= {f"base_model.model.nowhere.lora_{part}.weight": torch.zeros(4, 4) for part in "AB"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")


WRONG_R = ("0", "4.5", "3", "Infinity", "NaN", "null", "true", '"4"', "[4]", "-4", "1000000000000")
HOWS = ("no config", "no weights", "another kind", "a tensor less", "another shape", "another layer")
HOWS += (*(f"r = {r}" for r in WRONG_R), *(f"alpha = {a}" for a in ("NaN", "Infinity", "0", "1e999", "{}")))


@pytest.mark.parametrize("there", [False, True], ids=["none there", "some there"])
@pytest.mark.parametrize("how", HOWS)
def test_bad_adapter_folders(how, there, tmp_path):
    model = make_decoder("gqa")
    add_lora(model, rank=4, kernels=KERNELS)
    save_adapter(model, tmp_path)
    break_adapter(tmp_path, how)
    if not there:
        model = make_decoder("gqa")
    with pytest.raises(CheckpointError) as error:
        load_adapter(model, tmp_path)
    (problem,) = error.value.problems
    assert all((problem.what, problem.got, problem.need, problem.try_, problem.where))


def test_nothing_to_save(tmp_path):
    with pytest.raises(CheckpointError, match="No adapter to save"):
        save_adapter(make_decoder("gqa"), tmp_path)
