"""What an export writes in integers against what the run was trained with, read back by the formats' own packages."""

from dataclasses import replace

import gguf
import numpy as np
import onnx
import pytest
import torch

from tests.compress.models import decoder, our_tokenizer, source
from tilewright.compress.export import executorch
from tilewright.compress.export import onnx as onnx_targets
from tilewright.compress.export.gguf import Q4_0
from tilewright.compress.export.stored_codes import four_bit_codes, through, trained_codes
from tilewright.compress.gguf.tensors import to_neighbours
from tilewright.compress.graph.quantized import quantize_8da4w
from tilewright.compress.graph.trace import graph_of
from tilewright.core.config.change_recipe import changed
from tilewright.core.config.load import load_recipe
from tilewright.formats.integer import INT4, quantize_integer
from tilewright.formats.scaling import Tile
from tilewright.precision.integer.compute_formats import COMPUTE_FORMATS


def trained_source(tmp_path, name, **shape):
    """A run whose rules round everything to `name`."""
    found = source(decoder(**shape), our_tokenizer(), tmp_path / "run")
    settings = {"data.seq_len": "64", "precision.rules": f'[{{compute = "{name}"}}]'}
    return replace(found, recipe=load_recipe(None, settings, environ={}).recipe)


@pytest.mark.parametrize("tied", [True, False])
def test_blocks_of_q4_0_hold_the_codes_that_were_trained(tmp_path, tied):
    run = trained_source(tmp_path, "int4", tie_embeddings=tied)
    written = Q4_0.write(run, tmp_path / "a.gguf")
    assert any("codes that they were trained with" in note for note in written.notes)
    assert not any("rounded to nearest" in note for note in written.notes)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    form, seen = COMPUTE_FORMATS["int4"], 0
    blocks = run.model.blocks
    pairs = [("token_embd.weight", run.model.model.embed_tokens.weight)]
    pairs += [] if tied else [("output.weight", run.model.lm_head.weight)]
    for index, block in enumerate(blocks):
        pairs += [
            (f"blk.{index}.attn_q.weight", block.self_attn.q_proj.weight),
            (f"blk.{index}.attn_output.weight", block.self_attn.o_proj.weight),
            (f"blk.{index}.ffn_down.weight", block.mlp.down_proj.weight),
        ]
    for name, weight in pairs:
        expected = form.weight(weight.detach()).numpy()
        codes = form.quantize(weight).codes.numpy()
        if "attn_q" in name:
            expected, codes = to_neighbours(expected, 16), to_neighbours(codes, 16)
        raw = tensors[name].data.reshape(codes.shape[0], codes.shape[1] // 32, 18)
        low, high = raw[:, :, 2:] & 15, raw[:, :, 2:] >> 4
        found = np.concatenate((low, high), axis=2).astype(np.int8).reshape(codes.shape) - 8
        assert (found == codes).all(), f"{name}: {(found != codes).sum()} codes differ"
        values = gguf.dequantize(tensors[name].data, tensors[name].tensor_type)
        assert np.abs(values - expected).max() == 0, name
        seen += 1
    assert seen == len(pairs) > 6


def test_joined_layers_of_a_graph_have_the_codes_of_their_parts(tmp_path):
    run = trained_source(tmp_path, "int4_a8")
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    coded = trained_codes(run.model, run.recipe, 4)
    found = through(run.model, coded.codes, graph_of)
    attention, form = run.model.blocks[0].self_attn, COMPUTE_FORMATS["int4"]
    parts = [form.quantize(p.weight) for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
    joined = found["blocks.0.attention.qkv_proj"]
    assert torch.equal(joined.codes, torch.cat([part.codes for part in parts]))
    assert torch.equal(joined.scale, torch.cat([part.scale for part in parts]))
    assert "head" in found
    after = dict(run.model.named_parameters())
    assert all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.slow
def test_torchao_computes_with_the_codes_that_were_trained(tmp_path):
    pytest.importorskip("torchao")
    run = trained_source(tmp_path, "int4_a8")
    coded = run.four_bits
    graph = graph_of(run.model)
    quantized, counts = quantize_8da4w(graph, through(run.model, coded.codes, graph_of))
    assert counts["int4"] == sum(isinstance(module, torch.nn.Linear) for module in graph.modules())
    form = COMPUTE_FORMATS["int4"]
    for name, module in graph.named_modules():
        if isinstance(module, torch.nn.Linear):
            weight = quantized.get_submodule(name).weight
            assert torch.equal(weight.qdata, form.quantize(module.weight).codes), name
            assert torch.equal(weight.dequantize(), form.weight(module.weight.detach())), name
    program = tmp_path / "a.pte"
    executorch.EXECUTORCH.write(run, program)
    assert program.stat().st_size > 0


def test_onnx_int8_has_the_codes_that_were_trained(tmp_path):
    run = trained_source(tmp_path, "int8")
    onnx_targets.ONNX_INT8.write(run, tmp_path / "a.onnx")
    model = onnx.load(tmp_path / "a.onnx")
    tensors = [onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer]
    stored = [tensor for tensor in tensors if tensor.dtype == np.int8 and tensor.ndim == 2]
    form = COMPUTE_FORMATS["int8"]
    for name, layer in graph_of(run.model).named_modules():
        if isinstance(layer, torch.nn.Linear):
            codes = form.quantize(layer.weight).codes.numpy()
            same = [t for t in stored if t.shape == codes.T.shape and (t == codes.T).all()]
            same += [t for t in stored if t.shape == codes.shape and (t == codes).all()]
            assert same, f"no INT8 tensor of the file holds the codes of {name}"


def test_gptq_codes_lie_on_the_grid_and_lose_less(tmp_path):
    """Inputs are correlated, as the model is driven by the same tokens in calibration and in the comparison."""
    run = source(decoder(), our_tokenizer(), tmp_path / "run")
    recipe = changed(run.recipe, {"train.micro_batch_size": 8})
    rows = _Rows()
    found = four_bit_codes(run.model, recipe, lambda: rows, "gptq")
    assert "by GPTQ" in found.how
    assert len(found.codes) == 15  # the tied embedding is rounded
    assert "1 matrices rounded with scales of least error" in found.how
    for name, weight in found.codes.items():
        assert torch.equal(weight.scale, weight.scale.half().float()), name
    batch = rows.batch
    exact = run.model.loss(batch).loss_sum
    plain = replace(run)
    lost = {"gptq": abs(float((found.model.loss(batch).loss_sum - exact).detach()))}
    rounded = decoder()
    for name, parameter in rounded.named_parameters():
        if name in found.codes:
            parameter.data = quantize_integer(parameter.data, INT4, Tile(1, 32)).dequantize()
    logits = [model(batch["input_ids"]).log_softmax(-1) for model in (plain.model, found.model, rounded)]
    kl = [float((logits[0].exp() * (logits[0] - other)).sum(-1).mean().detach()) for other in logits[1:]]
    assert kl[0] < kl[1], f"GPTQ {kl[0]:.4f}, rounding {kl[1]:.4f}, loss off by {lost['gptq']:.3f}"


class _Rows:
    """As much of prepared data as a stream reads: 64 rows of random ids."""

    fingerprint = "rows"

    def __init__(self):
        self.num_rows = {"text": 64}
        draw = torch.Generator().manual_seed(4)
        self._ids = torch.randint(0, 400, (64, 32), generator=draw)
        self.batch = {"input_ids": self._ids, "labels": self._ids.roll(-1, 1)}

    def train_arrays(self, picks, seed):
        return {name: value.numpy()[picks.row] for name, value in self.batch.items()}

    def blank_row(self):
        return {name: value.numpy()[:1] for name, value in self.batch.items()}

    def describe_row(self, domain, row):
        return []


@pytest.mark.parametrize("negative", [False, True])
def test_a_run_without_rules_is_rounded_with_scales_of_least_error(tmp_path, negative):
    run = source(decoder(), our_tokenizer(), tmp_path / "run")
    coded = run.four_bits_signed if negative else run.four_bits
    assert not coded.trained
    assert set(coded.codes) == {name for name, p in run.model.named_parameters() if p.ndim > 1}
    for name, found in coded.codes.items():
        weight = run.model.get_parameter(name).detach()
        plain = quantize_integer(weight, INT4, Tile(1, 32)).dequantize()
        blocks = gguf.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q4_0)
        theirs = torch.from_numpy(gguf.dequantize(blocks, gguf.GGMLQuantizationType.Q4_0))
        error = [(values - weight).square().sum().item() for values in (found.dequantize(), plain, theirs)]
        assert error[0] < 0.93 * error[1], name
        assert error[0] < (0.92 if negative else 1.03) * error[2], name
        assert bool((found.scale < 0).any()) == negative


def test_blocks_of_q4_0_hold_the_codes_of_least_error(tmp_path):
    """Negative scales and all: what the file gives back is what was found."""
    run = source(decoder(), our_tokenizer(), tmp_path / "run")
    written = Q4_0.write(run, tmp_path / "a.gguf")
    assert written.notes == ["15 matrices rounded with scales of least error"]
    assert not written.trained
    found = next(t for t in gguf.GGUFReader(tmp_path / "a.gguf").tensors if t.name == "blk.1.ffn_down.weight")
    values = torch.from_numpy(gguf.dequantize(found.data, found.tensor_type))
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(values, run.four_bits_signed.codes[name].dequantize())
    assert torch.equal(values, written.stored().get_parameter(name))
