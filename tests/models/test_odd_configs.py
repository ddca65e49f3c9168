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
