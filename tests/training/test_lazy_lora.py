"""A Hugging Face model with adapters filled tensor by tensor is, bit for bit, the one that transformers loads whole."""

import pytest
import torch

from tests.models.shapes import load_decoder
from tests.training.tiny import save_tokenizer, tiny
from tilewright.models.build import init_weights
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.ops.base.code_modules import named_constants
from tilewright.precision.float8.frozen_linear import FrozenFloat8Linear
from tilewright.training.assemble import build, set_up
from tilewright.training.components import model as lora_model

transformers = pytest.importorskip("transformers")


def make_folder(folder, kind):
    """Weights in a format; of Qwen3 with tied embeddings, or of our decoder with its own head and FP8 codes."""
    if kind == "fp8":
        model = Decoder(DecoderConfig.of(vocab_size=300, dim=160, num_layers=2, num_heads=2, tie_embeddings=False))
        init_weights(model, 5)
        model.save_hf(folder, dtype=torch.float8_e4m3fn)
        assert load_decoder(folder)
    else:
        torch.manual_seed(0)
        config = transformers.Qwen3Config(
            vocab_size=300, hidden_size=160, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16, max_position_embeddings=256, tie_word_embeddings=True,
        )  # fmt: skip
        transformers.Qwen3ForCausalLM(config).to(getattr(torch, kind)).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.mark.parametrize(
    ("stored", "base", "mode", "master"),
    [
        ("bfloat16", "keep", "bf16_mixed", "stochastic"),
        pytest.param("float32", "keep", "bf16_mixed", "fp32", marks=pytest.mark.slow),
        *(
            pytest.param(stored, "fp8", "fp8_tile", master, marks=pytest.mark.slow)
            for stored in ("bfloat16", "float32", "fp8")
            for master in ("fp32", "stochastic")
        ),
    ],
)
def test_the_model_is_the_one_loaded_whole(stored, base, mode, master, data, tmp_path, monkeypatch):
    folder = make_folder(tmp_path / "model", stored)
    changes = {"model__kind": "hf", "model__path": folder, "model__weights": "load", "precision__mode": mode}
    changes |= {"lora__rank": 4, "lora__base": base, "optim__master_weights": master}
    setup = set_up(tiny(data, tmp_path, **changes))
    lazy = build(setup, fresh=True)
    monkeypatch.setattr("tilewright.training.components.model.can_fill", lambda *_: False)
    whole = build(setup, fresh=True)
    mine, theirs = (dict(parts.model.state_dict(keep_vars=True)) for parts in (lazy, whole))
    mine |= named_constants(lazy.model)
    theirs |= named_constants(whole.model)
    assert set(mine) == set(theirs)
    for name, tensor in theirs.items():
        assert mine[name].dtype == tensor.dtype, name
        assert mine[name].requires_grad == tensor.requires_grad, name
        assert torch.equal(mine[name].view(torch.uint8), tensor.view(torch.uint8)), name
    tied = {id(param) for param in lazy.model.parameters()}
    assert len(tied) == len({id(param) for param in whole.model.parameters()})
    batch = lazy.stream.next_step()
    results = [parts.executor.step(batch, 1e-2) for parts in (lazy, whole)]
    assert results[0].loss == results[1].loss
    assert results[0].grad_norm == results[1].grad_norm
    for parts in (lazy, whole):
        parts.close()


@pytest.mark.slow
def test_a_base_in_fp8_is_never_there_in_fp32(data, tmp_path, monkeypatch):
    """What is alive at once: the layers' codes, and of the layer that is encoded the values."""
    folder = make_folder(tmp_path / "model", "bfloat16")
    changes = {"model__kind": "hf", "model__path": folder, "model__weights": "load", "precision__mode": "fp8_tile"}
    setup = set_up(tiny(data, tmp_path, **changes, lora__rank=4, lora__base="fp8", optim__master_weights="stochastic"))
    seen = []
    filled = lora_model.fill_adapted

    def watched(model, *args):
        assert all(param.is_meta for param in model.parameters())
        filled(model, *args)
        seen.append(sum(isinstance(part, FrozenFloat8Linear) for part in model.modules()))

    monkeypatch.setattr(lora_model, "fill_adapted", watched)
    build(setup, fresh=True).close()
    assert seen == [14]
