"""config.json with values of another kind or size: an error in four parts, or a shape of which a decoder is made."""

import json
import tempfile
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.draws import examples
from tests.models.shapes import KERNELS, MIXED, SHAPES
from tilewright.core.errors import TilewrightError
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.models.decoder.hf_config import read_config, to_hf_config, to_own_config
from tilewright.models.hf.load import load_hf

_SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
_SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "hidden_act": "silu"}
FOREIGN = {name: _SIZES | {"model_type": name} for name in ("llama", "qwen2", "gemma2")}
WINDOW = DecoderConfig.of(vocab_size=61, dim=64, num_heads=4, num_layers=2, sliding_window=5)
CONFIGS = {
    "llama": to_hf_config(SHAPES["gqa"], "float32"),
    "mistral": to_hf_config(WINDOW, "float32"),
    "deepseek": to_hf_config(SHAPES["deepseek"], "float32"),
    "own": to_own_config(MIXED["own_gqa"], "float32"),
}
ODD = (0, -1, 1.5, 64.0, 3, 10**400, 1e999, float("nan"), "8", "silu", True, None, [], [4], {}, {"rope_type": []})
MORE = ("model_type", "rope_scaling", "quantization_config", "sliding_window", "num_experts", "layers")


@examples(200)
@given(st.sampled_from(sorted(CONFIGS)), st.data(), st.sampled_from(ODD))
def test_one_odd_value_is_an_error_or_a_shape(name, data, value):
    raw = CONFIGS[name]
    inside = raw["model"] if name == "own" else raw
    changed = {**inside, data.draw(st.sampled_from(sorted({*inside, *MORE}))): value}
    with tempfile.TemporaryDirectory() as folder:
        text = json.dumps({**raw, "model": changed} if name == "own" else changed)
        (Path(folder) / "config.json").write_text(text)
        try:
            config = read_config(folder)
        except TilewrightError as error:
            problems = error.problems
        else:
            with torch.device("meta"):
                Decoder(config, KERNELS)
            return
    assert all((problem.what, problem.got, problem.need, problem.try_) for problem in problems)


@examples(60)
@given(st.sampled_from(sorted(FOREIGN)), st.data(), st.sampled_from((0, -1, -128, "8", [], {}, 1e999, None)))
def test_one_odd_value_of_another_architecture(name, data, value):
    """What its author's code raises is an error of the folder."""
    raw = FOREIGN[name]
    changed = raw | {data.draw(st.sampled_from(sorted({*raw, "hidden_act", "dtype", "rope_parameters"}))): value}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(changed))
        try:
            load_hf(folder, "causal_lm", device="meta")
        except TilewrightError as error:
            problems = error.problems
        else:
            return
    assert all((problem.what, problem.got, problem.need, problem.try_) for problem in problems)
