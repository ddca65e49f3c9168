"""A made-up architecture is one object: it trains, is planned, keeps a folder and is exported as far as it says so, and
what it does not say is refused in words. No file of `src` names it.

`NORMS_BEHIND` has other sums in the same modules, which nothing may take for the decoder's; `TWO_MATRICES` has others.
"""

import functools
import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.models.shapes import KERNELS, make_batch
from tests.optim.test_citizen import assert_in_words
from tests.planner.rates import make_machine, make_recipe
from tests.training.tiny import rows, settings, tiny
from tilewright.compress.gguf.architecture import why_no_shape
from tilewright.compress.graph.decoder import DecoderGraph, GraphBlock
from tilewright.compress.graph.trace import graph_of, why_no_graph
from tilewright.core.config.change_recipe import accepted, with_settings
from tilewright.core.config.load import load_recipe
from tilewright.core.errors import CheckpointError, ConfigError
from tilewright.models.build import (
    build_model,
    decoder_like,
    init_weights,
    layered,
    random_values,
    spec_of,
    stored_values,
    with_architecture,
)
from tilewright.models.decoder.block import Block
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.flops import FlopCount, attention_weights, count_flops
from tilewright.models.decoder.layers import MLP
from tilewright.models.folder.json_file import read_json
from tilewright.models.spec import Formulas
from tilewright.planner.model.layer_classes import ShapeFinder
from tilewright.training.session import train

FIELDS = ("vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "ffn_dim")


class NormsBehind(Block):
    """x + norm(attention(x)), then x + norm(mlp(x))."""

    def quantized_readers(self):
        return iter(())

    def _run(self, x, cos, sin, segments, cache=None):
        x = (x + self.input_layernorm(self.self_attn(x, cos, sin, segments, cache))).to(x.dtype)
        return (x + self.post_attention_layernorm(self.mlp(x))).to(x.dtype), None


class GraphNormsBehind(GraphBlock):
    def forward(self, x, cos, sin, bias, past):
        attended, kept = self.attention(x, cos, sin, bias, past)
        x = x + self.attention_norm(attended)
        return x + self.mlp_norm(self.mlp(x)), kept


class Squared(nn.Module):
    """down(relu(up(x))^2)."""

    def __init__(self, config):
        super().__init__()
        self.up_proj = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.down_proj = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x):
        return self.down_proj(self.up_proj(x).relu().square())


class TwoMatrices(Block):
    def __init__(self, config, layer, kernels):
        super().__init__(config, layer, kernels)
        self.mlp = Squared(config)

    def quantized_readers(self):
        return iter(())


def read_own(folder):
    raw = read_json(folder)
    if raw.get("model_type") != "norms_behind":
        raise CheckpointError("Not a folder of norms_behind", got=str(raw.get("model_type")), need="it", try_="another")
    return DecoderConfig(architecture=NORMS_BEHIND, **{name: raw[name] for name in FIELDS})


def write_own(config, dtype_name):
    return {"model_type": "norms_behind", "dtype": dtype_name} | {name: getattr(config, name) for name in FIELDS}


def two_matrices(config, layer):
    return 2 * config.dim * config.ffn_dim


def flops_of_two(config, seq_len):
    whole = count_flops(config, seq_len)
    layers = tuple(2 * (attention_weights(config) + two_matrices(config, layer)) for layer in range(config.num_layers))
    return FlopCount(layers, whole.attention, whole.head, whole.last)


NORMS_BEHIND = decoder_like(
    "norms_behind",
    NormsBehind,
    read_config=read_own,
    write_config=write_own,
    graph=functools.partial(DecoderGraph, block=GraphNormsBehind),
)
TWO_MATRICES = decoder_like(
    "two_matrices",
    TwoMatrices,
    formulas=Formulas(
        parameters=lambda config, layer: attention_weights(config) + 2 * config.dim + two_matrices(config, layer),
        mlp_weights=two_matrices,
        flops=flops_of_two,
    ),
)
BOTH = pytest.mark.parametrize("spec", [NORMS_BEHIND, TWO_MATRICES], ids=lambda spec: spec.name)


def model_of(spec, seed=0):
    model = build_model(make_recipe().model.model_copy(update={"kind": spec}), 61, KERNELS, "cpu")
    init_weights(model, seed)
    return model.eval()


QUICK = {"train__steps": 3, "train__eval_interval": 0, "train__sample_tokens": 0, "checkpoint__interval": 0}


@pytest.fixture(scope="module")
def plain(data, tmp_path_factory):
    """A run of the decoder."""
    return train(tiny(data, tmp_path_factory.mktemp("plain"), **QUICK)).run_dir


@pytest.mark.parametrize(
    ("spec", "executor"),
    [
        pytest.param(NORMS_BEHIND, "standard", marks=pytest.mark.slow),
        (TWO_MATRICES, "standard"),
        (NORMS_BEHIND, "layer_major"),
    ],
)
def test_it_trains_and_its_run_says_whose_layers_it_has(spec, executor, data, plain, tmp_path):
    run = train(with_architecture(tiny(data, tmp_path, memory__executor=executor, **QUICK), spec)).run_dir
    losses, others = ([row["loss"] for row in rows(where / "metrics.jsonl") if "loss" in row] for where in (run, plain))
    assert len(losses) == 3
    assert losses != others, "it is the decoder's own layer that was trained"
    assert f'kind = "{spec.name}"' in (run / "run.toml").read_text()
    with pytest.raises(ConfigError) as caught:  # another process does not know it
        load_recipe(run / "run.toml", {}, {})
    assert_in_words(caught.value, spec.name, "decoder", "hf")


def test_a_run_of_it_goes_on_where_it_stopped(data, tmp_path):
    for steps in (2, 3):
        loaded = tiny(data, tmp_path, **QUICK | {"train__steps": steps})
        run = train(with_architecture(loaded, TWO_MATRICES)).run_dir
    steps = [row["step"] for row in rows(run / "metrics.jsonl") if "loss" in row]
    assert steps == [1, 2, 3]


@BOTH
def test_settings_of_a_plan_keep_it(spec):
    """A recipe that is checked again, as the planner's advice is, is of the same architecture."""
    loaded = with_architecture(load_recipe("default", {}, {}), spec)
    found = accepted(loaded.recipe, {"train.micro_batch_size": 1})
    assert found is not None
    assert found.model.kind is spec
    assert with_settings(loaded, {"train.micro_batch_size": 1}, "plan.json").recipe.model.kind is spec


@BOTH
def test_its_plan_is_of_its_layers(spec):
    recipe = make_recipe()
    own = recipe.model_copy(update={"model": recipe.model.model_copy(update={"kind": spec})})
    shape = ShapeFinder(512, make_machine()).find(own)
    real = build_model(own.model, 512, KERNELS)
    assert shape.num_parameters == sum(param.numel() for param in real.parameters())
    (layer,) = shape.classes
    assert layer.matmul_flops == 2 * 128 * sum(p.numel() for p in real.blocks[0].parameters() if p.dim() == 2)
    assert layer.mlp_flops == 2 * 128 * sum(param.numel() for param in real.blocks[0].mlp.parameters())


class WideEverySecond(Block):
    """Its MLP is twice as wide in layers of odd numbers."""

    def __init__(self, config, layer, kernels):
        super().__init__(config, layer, kernels)
        if layer % 2:
            self.mlp = MLP(config.dim, 2 * config.ffn_dim, kernels)


def in_layer(formula):
    """A formula of the decoder's layers, of one that may be twice as wide."""
    return lambda config, layer, *rest: formula(replace(config, ffn_dim=(1 + layer % 2) * config.ffn_dim), layer, *rest)


@pytest.mark.parametrize("num_layers", [1, 2, 5])
def test_a_plan_takes_a_layer_of_each_kind(num_layers):
    sums = {name: in_layer(getattr(Formulas, name)) for name in ("parameters", "mlp_weights", "width")}
    kinds = Formulas(kind=lambda config, layer: "wide" if layer % 2 else "narrow", **sums)
    recipe = make_recipe(model={"num_layers": num_layers})
    spec = decoder_like("wide_every_second", WideEverySecond, formulas=kinds)
    own = recipe.model_copy(update={"model": recipe.model.model_copy(update={"kind": spec})})
    shape = ShapeFinder(512, make_machine()).find(own)
    found = [kind.indices for kind in shape.classes]
    assert found == [tuple(range(first, num_layers, 2)) for first in range(min(2, num_layers))]
    real = build_model(own.model, 512, KERNELS)
    assert shape.num_parameters == sum(param.numel() for param in real.parameters())
    for kind in shape.classes:
        (first, *_) = kind.indices
        assert kind.mlp_flops == 2 * 128 * sum(param.numel() for param in real.blocks[first].mlp.parameters())


def test_formulas_of_another_layer_are_refused():
    wrong = decoder_like("wrong", TwoMatrices)
    recipe = make_recipe()
    own = recipe.model_copy(update={"model": recipe.model.model_copy(update={"kind": wrong})})
    with pytest.raises(ConfigError) as caught:
        ShapeFinder(512, make_machine()).find(own)
    assert_in_words(caught.value, "wrong", "formulas", "parameters=")


def test_its_folder_is_its_own(tmp_path):
    model = model_of(NORMS_BEHIND)
    model.save_hf(tmp_path / "own")
    assert json.loads((tmp_path / "own" / "config.json").read_text())["model_type"] == "norms_behind"
    section = make_recipe().model.model_copy(update={"kind": NORMS_BEHIND, "weights": "load"})
    again = build_model(section.model_copy(update={"path": str(tmp_path / "own")}), 61, KERNELS, "cpu").eval()
    ids = make_batch()["input_ids"]
    with torch.no_grad():
        assert torch.equal(again(ids), model(ids))
    model_of("decoder").save_hf(tmp_path / "other")
    with pytest.raises(CheckpointError):
        build_model(section.model_copy(update={"path": str(tmp_path / "other")}), 61, KERNELS, "cpu")
    with pytest.raises(CheckpointError) as caught:  # nor does the decoder take its folder for its own
        build_model(make_recipe(model={"path": str(tmp_path / "own")}).model, 61, KERNELS, "cpu")
    assert_in_words(caught.value, "norms_behind", 'model.kind = "hf"')


@BOTH
def test_first_values_in_pieces_and_layers_are_the_model_s(spec, tmp_path):
    model = model_of(spec, seed=3)
    name, param = next(iter(model.blocks[1].mlp.named_parameters()))
    piece = {f"model.layers.1.mlp.{name}": torch.empty_like(param)}
    random_values(model, 3)(piece)
    assert torch.equal(*piece.values(), param)
    assert layered(model) is model
    if spec.write_config is not None:
        model.save_hf(tmp_path)
        stored_values(model, tmp_path)({key: tensor.zero_() for key, tensor in piece.items()})
        assert torch.equal(*piece.values(), param)


@torch.no_grad()
def test_its_graph_computes_it():
    model = model_of(NORMS_BEHIND)
    assert why_no_graph(model) is None
    graph = graph_of(model)
    ids = torch.randint(0, 61, (1, 9), generator=torch.Generator().manual_seed(1))
    empty = [torch.zeros(1, heads, 0, width) for _, (heads, _, width) in graph.kept]
    assert (graph(ids, *empty)[0] - model(ids)).abs().max() < 1e-5  # see tests/compress/test_graph.py


def test_what_it_does_not_say_is_refused_in_words(data, tmp_path):
    model = model_of(TWO_MATRICES)
    assert "two_matrices" in (why_no_graph(model) or "")
    with pytest.raises(CheckpointError) as caught:
        graph_of(model)
    assert_in_words(caught.value, "two_matrices", "ModelSpec.graph", "--to hf")
    with pytest.raises(CheckpointError) as caught:
        model.save_hf(tmp_path / "folder")
    assert_in_words(caught.value, "two_matrices", "ModelSpec.write_config", "checkpoint.export_hf = false")
    assert not (tmp_path / "folder").exists()
    assert "two_matrices" in (why_no_shape(model, "causal_lm") or "")
    assert "norms_behind" in (why_no_shape(model_of(NORMS_BEHIND), "causal_lm") or ""), "llama.cpp has no such layers"
    loaded = load_recipe(None, settings(data, tmp_path, checkpoint__export_hf=True), environ={})
    with pytest.raises(CheckpointError, match="two_matrices"):  # before the first step
        train(with_architecture(loaded, TWO_MATRICES))
    section = make_recipe().model.model_copy(update={"kind": TWO_MATRICES, "path": str(tmp_path)})
    with pytest.raises(CheckpointError) as caught:
        build_model(section, 61, KERNELS)
    assert_in_words(caught.value, "two_matrices", "ModelSpec.read_config")


def test_names_of_recipes_are_those_of_the_tuple():
    from typing import get_args

    from tilewright.core.config import setting_names
    from tilewright.models.build import ARCHITECTURES

    kind = setting_names.find("model.kind")
    assert kind is not None
    assert [spec.name for spec in ARCHITECTURES] == list(kind.choices) == list(get_args(kind.info.annotation))
    assert all(spec_of(spec.name) is spec for spec in ARCHITECTURES)
