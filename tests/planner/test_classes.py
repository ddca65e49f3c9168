"""Layer classes against the whole model: parameters, activations and FLOPs add up, and big models take seconds."""

import json
import time
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.cover import covering
from tests.planner.rates import GIB, make_machine, make_recipe
from tests.planner.shapes import DEEPSEEK_V3, DENSE_42B, LLAMA_8B, QWEN3_32B
from tests.planner.test_cost import HF, MLA, MOE
from tilewright.core.units import ranges
from tilewright.models.build import decoder_config
from tilewright.models.decoder.activation_bytes import work_per_token
from tilewright.models.decoder.decoder import Decoder
from tilewright.models.decoder.flops import count_flops, count_parameters
from tilewright.ops.kernels import Kernels
from tilewright.planner.model.gemms import BYTES
from tilewright.planner.model.layer_classes import ShapeFinder
from tilewright.planner.model.model_shape import Line
from tilewright.planner.trace.fake_model import KERNELS, quiet, to_fake
from tilewright.planner.trace.layer_trace import trace_layers
from tilewright.precision.convert import convert
from tilewright.precision.policy.policy import Policy

CPU, H200 = make_machine(), make_machine(139 * GIB, "cuda")


def folder(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


@pytest.mark.parametrize("model", [{}, MOE, MLA | MOE], ids=["dense", "moe", "mla_moe"])
def test_decoder_classes_add_up_to_the_whole_model(model):
    recipe = make_recipe(model=model)
    shape, config = ShapeFinder(512, CPU).find(recipe), decoder_config(recipe.model, 512)
    counted, flops = count_parameters(config), count_flops(config, 128)
    assert shape.num_parameters == counted.total
    assert sorted(i for found in shape.classes for i in found.indices) == [0, 1, 2]
    assert sum(found.count * found.matmul_flops for found in shape.classes) == 128 * sum(flops.layers)
    active = counted.active - counted.embedding - counted.head - counted.final_norm
    assert sum(found.count * found.active_parameters for found in shape.classes) == active


def test_what_a_foreign_layer_keeps_falls_with_the_kind(tmp_path):
    pytest.importorskip("transformers")
    recipe = make_recipe(model={"kind": "hf", "path": folder(tmp_path, HF)}, train={"micro_batch_size": 2})
    multiplies = replace(CPU, cpu_features=frozenset({"avx512_bf16"}))
    (layer,) = ShapeFinder(512, multiplies).find(recipe).classes
    assert layer.count == 3
    assert layer.input(2) == 2 * 128 * 128 * 2
    assert layer.input(1) < layer.kept_attention(1) < layer.kept_matmuls(1) < layer.kept_selective(1) < layer.kept(1)
    assert layer.last_flops == 2 * 128 * 128 * 320  # of the MLP, whose result backward does not read
    assert 0 < layer.mlp_kept(1) < layer.kept(1)


@pytest.mark.parametrize(
    ("config", "parameters", "counts"),
    [
        pytest.param(LLAMA_8B, 8_030_261_248, [32], marks=pytest.mark.slow),
        (QWEN3_32B, 32_762_123_264, [64]),
        pytest.param(DEEPSEEK_V3, 671_026_404_352, [3, 58], marks=pytest.mark.slow),
    ],
    ids=["llama", "qwen3", "deepseek"],
)
def test_well_known_models_take_seconds_and_no_memory(tmp_path, config, parameters, counts):
    pytest.importorskip("transformers")
    path = folder(tmp_path, config)
    recipe = make_recipe(model={"kind": "hf", "path": path}, data={"seq_len": 1024})
    start = time.process_time()
    shape = ShapeFinder(config["vocab_size"], H200).find(recipe)
    took = time.process_time() - start
    assert shape.num_parameters == parameters
    assert [found.count for found in shape.classes] == counts
    active = sum(found.count * found.active_parameters for found in shape.classes)
    forward = sum(found.count * found.matmul_flops for found in shape.classes)
    assert forward == pytest.approx(2 * 1024 * active, rel=0.01)
    for found in shape.classes:
        assert (
            found.input(1) < found.kept_attention(1) < found.kept_matmuls(1) < found.kept_selective(1) < found.kept(1)
        ), found.name
        assert 0 <= found.last_flops < 0.4 * found.matmul_flops, found.name
    assert took < 60, f"{took:.1f} s"


def test_our_decoder_and_the_same_model_of_transformers_agree(tmp_path):
    pytest.importorskip("transformers")
    path = folder(tmp_path, LLAMA_8B)
    ours, theirs = (
        ShapeFinder(128256, H200).find(make_recipe(model={"kind": kind, "path": path}, data={"seq_len": 1024}))
        for kind in ("decoder", "hf")
    )
    assert ours.num_parameters == theirs.num_parameters
    assert ours.classes[0].matmul_flops == theirs.classes[0].matmul_flops
    assert ours.classes[0].attention_flops == pytest.approx(theirs.classes[0].attention_flops, rel=0.01)
    assert ours.classes[0].kept(1) < theirs.classes[0].kept(1)  # compiled layers keep less than eager ones


def test_forty_two_billion_parameters():
    shape = ShapeFinder(128256, H200).find(make_recipe(model=DENSE_42B, data={"seq_len": 8192}))
    assert shape.num_parameters == 42_456_552_960
    assert shape.num_layers == 66


def test_adapters_train_and_their_base_does_not():
    shape = ShapeFinder(512, CPU).find(make_recipe(lora={"rank": 8}))
    (layer,) = shape.classes
    assert 0 < layer.weights.trained < 0.3 * layer.weights.count
    assert layer.weights.stored < 2 * layer.weights.count  # FP8 codes, and adapters in FP32
    assert all(matmul.frozen for matmul in layer.matmuls)
    assert shape.embedding.trained == 0


def test_a_module_that_cannot_be_traced_is_named(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaMLP

    def forward(self, x):
        return x * float(x.sum().item())

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    shape = ShapeFinder(512, CPU).find(make_recipe(model={"kind": "hf", "path": folder(tmp_path, HF)}))
    assert "module LlamaMLP" in shape.unknown
    assert shape.num_parameters > 0


def test_lines_and_ranges():
    assert Line.through(12, 22)(5) == 52
    both = Line(10, 1).covering(Line(0, 2))
    assert [both(rows) for rows in (1, 10, 20)] == [11, 20, 40]
    assert ranges([3, 1, 2, 9]) == "1-3, 9"


@pytest.mark.parametrize(
    ("mode", "ffn_dim"), covering(("bf16_mixed", "fp32", "hybrid", "pure_fp16"), (512, 1024, 4096), pairs=False)
)
def test_what_backward_of_a_dense_layer_needs_is_what_a_trace_says(mode, ffn_dim):
    machine = make_machine(64 * GIB, "cuda")
    model = {"dim": 512, "num_layers": 1, "num_heads": 8, "ffn_dim": ffn_dim}
    recipe = make_recipe(model=model, precision={"mode": mode})
    config = decoder_config(recipe.model, 8)
    policy = Policy.from_section(recipe.precision, "cuda").in_mode(mode)
    with torch.device("meta"):
        decoder = Decoder(config, Kernels(machine, KERNELS, compile=False))
    with FakeTensorMode(), quiet():
        to_fake(decoder, torch.device("cpu"))
        on_cpu = replace(policy, device_type="cpu")
        convert(decoder.train(), on_cpu, kernels=Kernels(machine, KERNELS, compile=False))
        traces = []
        for rows in (1, 2):  # copies of weights are the same for all rows
            ids = torch.zeros(rows, 128, dtype=torch.int64)
            traces += trace_layers(
                list(decoder.blocks), lambda ids=ids: decoder.hidden({"input_ids": ids, "positions": ids})
            ).memory
    one, two = traces
    want = (two.work - one.work) / 128
    matmul, stream = BYTES[policy.matmul], BYTES[policy.stream]
    assert 0.99 * want <= work_per_token(config, matmul, stream) <= 1.2 * want
