"""A pruned model is a folder like any other: `from_pretrained` reads it without code of ours, and so do we."""

import json

import pytest
import torch

from tests.compress.prune.models import FOREIGN, batch_of, foreign, ours
from tests.cover import some
from tilewright.compress.prune.prune import prune
from tilewright.compress.prune.tensors_of_units import find_units
from tilewright.compress.prune.unit_kinds import counts
from tilewright.models.build import kind_of
from tilewright.models.decoder.hf_weights import load_weights, read_config
from tilewright.models.hf.load import load_hf

AUTO = {
    "causal_lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
    "image_classification": "AutoModelForImageClassification",
}
FEWER = {"ffn": 0.3, "expert_channels": 0.4, "layers": 0.3}


def reloaded(folder, task):
    import transformers

    net, info = getattr(transformers, AUTO[task]).from_pretrained(
        folder, output_loading_info=True, dtype=torch.float64, experts_implementation="eager"
    )
    assert not any(info.values()), info
    return net.eval()


@torch.no_grad()
def answers(net, batch):
    arguments = {name: tensor for name, tensor in batch.items() if name in ("input_ids", "pixel_values")}
    return net(**arguments).logits


def assert_same(got, expected):
    """Equal weights in the same operations; where tensors lie in memory may decide the last bits of a product."""
    far = float((got - expected).abs().max() / expected.abs().max())
    assert far <= 64 * torch.finfo(torch.float64).eps, f"worst logit differs by {far:.1e} of the largest"


@pytest.mark.parametrize("name", some(FOREIGN, "Llama biased", "Qwen3", "Phi3", "GPT2", "Bert", "ViT", "DeepseekV3"))
def test_foreign_folders_reload(name, tmp_path):
    model = foreign(name)
    kinds = set(find_units(model)[0])
    shares = {kind: share for kind, share in FEWER.items() if kind in kinds}
    pruned = prune(model, shares, importance="l1", multiple={"ffn": 8, "expert_channels": 8}).model
    pruned.save_hf(tmp_path, dtype=torch.float64)
    batch = batch_of(model)
    got, expected = answers(reloaded(tmp_path, model.task), batch), answers(pruned.net, batch)
    assert_same(got, expected)
    again = load_hf(tmp_path, model.task, "load")
    units = {kind: getattr(count, "units", None) for kind, count in counts(again.config).items()}
    assert units == {kind: getattr(count, "units", None) for kind, count in counts(pruned.config).items()}


@pytest.mark.parametrize("name", ["Llama", "Llama tied", "Qwen3"])
def test_heads_that_do_not_divide_the_width_reload(name, tmp_path):
    """Llama's config refuses 3 heads at a width of 64; Mistral's is the same model and takes them."""
    model = foreign(name, num_attention_heads=4, num_key_value_heads=4, head_dim=16)
    pruned = prune(model, {"heads": 0.25}, importance="l1").model
    assert pruned.config.num_attention_heads == 3
    pruned.save_hf(tmp_path, dtype=torch.float64)
    kind = json.loads((tmp_path / "config.json").read_text())["model_type"]
    assert kind == ("qwen3" if name == "Qwen3" else "mistral")
    batch = batch_of(model)
    got, expected = answers(reloaded(tmp_path, "causal_lm"), batch), answers(pruned.net, batch)
    assert_same(got, expected)
    assert kind_of(str(tmp_path)) == ("hf" if name == "Qwen3" else "decoder")


@pytest.mark.parametrize("name", ["gqa", "tied", "mla", "mla_q_rank"])
@pytest.mark.parametrize("share", [0.25, 0.5])
def test_our_folders_reload(name, share, tmp_path):
    model = ours(name, num_heads=4, num_kv_heads=4)
    kinds = {kind: share for kind in find_units(model)[0]}
    pruned = prune(model, kinds, importance="l1", multiple={"ffn": 8}).model
    pruned.save_hf(tmp_path, dtype=torch.float64)
    batch = batch_of(model)
    with torch.no_grad():
        expected = pruned(batch["input_ids"])
    got = answers(reloaded(tmp_path, "causal_lm"), batch)
    far = float((got - expected).abs().max() / expected.abs().max())
    assert far < 1e-4, far  # of FP32: both compute rotary angles in it
    again = type(model)(read_config(tmp_path), model.kernels).double()
    load_weights(again, tmp_path)
    with torch.no_grad():
        assert_same(again.eval()(batch["input_ids"]), expected)
