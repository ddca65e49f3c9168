"""Foreign models under the layer-major executor get their bytes slice by slice, and learn as models made whole."""

import pytest
import torch

from tests.training.tiny import last_state, save_tokenizer, tiny, write_text
from tilewright.models.hf.load import load_hf
from tilewright.training.session import train

RUN = {"precision__mode": "fp32", "train__steps": 4, "train__eval_interval": 2, "model__kind": "hf"}
LAYERS = {"memory__executor": "layer_major"}
AWAY = {"memory__offload_params": "disk", "memory__offload_optimizer": "cpu", "memory__offload_activations": "disk"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    from transformers import AutoConfig

    folder = tmp_path_factory.mktemp("foreign")
    write_text(folder / "text")
    sizes = {"vocab_size": 320, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    AutoConfig.for_model("gpt2", **sizes, **drops).save_pretrained(folder / "gpt2")
    sizes = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    llama = AutoConfig.for_model("llama", **sizes)
    torch.manual_seed(0)
    load_hf(llama, "causal_lm").save_hf(folder / "llama")
    save_tokenizer(folder / "llama")
    return folder


def differences(run, reference):
    """Largest difference of each tensor that is not the same; losses may round differently in another order."""
    tensors, expected = last_state(run)[0], last_state(reference)[0]
    assert tensors.keys() == expected.keys()
    gaps = {n: (tensors[n].double() - t.double()).abs().max().item() for n, t in expected.items() if n[:4] != "rng."}
    return {name: gap for name, gap in gaps.items() if gap}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "weights"), [("gpt2", "random"), ("llama", "random"), ("llama", "load")])
def test_first_values_and_numbers_are_those_of_a_whole_model(data, tmp_path, name, weights):
    options = RUN | {"model__path": data / name, "model__weights": weights}
    whole = train(tiny(data, tmp_path, run__name="whole", **options)).run_dir
    here = train(tiny(data, tmp_path, run__name="here", **options, **LAYERS)).run_dir
    away = train(tiny(data, tmp_path, run__name="away", **options, **LAYERS, **AWAY)).run_dir
    assert differences(away, here) == {}
    # Four steps of Adam at 1e-3 or less; exact clipping's norm is summed in another order.
    assert max(differences(here, whole).values(), default=0.0) < 1e-5
