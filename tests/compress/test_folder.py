"""Hugging Face folders in transformers and in tilewright: one of each kind of model."""

import pytest

from tests.compress.models import decoder, drawn, family_tokenizer, hf, our_tokenizer, proof, rules_of, source
from tilewright.compress.export.hf_folder import FP8, HF
from tilewright.compress.export.targets import why_not
from tilewright.compress.prove.tolerance import TOLERANCES
from tilewright.core.config.sections.model import ModelSection
from tilewright.models.build import build_model

LATENT = {"attention": "mla", "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
EXPERTS = {"num_experts": 4, "expert_dim": 32, "num_expert_groups": 2}
BF16_KL = 3e-3
"""Weights and activations in 8 bits of mantissa: about 2**-9 of noise in each product, logits of order ten."""


def write(target, model, tokenizer, tmp_path, task="causal_lm"):
    given = source(model, tokenizer, tmp_path / "run", task=task)
    tokenizer.save(tmp_path / "run")
    assert why_not(target, given) is None
    return target.write(given, tmp_path / "folder")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "task"),
    [
        (lambda: decoder(), "causal_lm"),
        (lambda: drawn(decoder(**LATENT | EXPERTS)), "causal_lm"),
        (lambda: hf("Bert"), "masked_lm"),
    ],
    ids=["decoder", "latent attention and experts", "BERT"],
)
def test_transformers_gives_what_our_model_gives(make, task, tmp_path):
    model = make()
    tokenizer = our_tokenizer() if task == "causal_lm" else family_tokenizer(tmp_path / "tokenizer")
    written = write(HF, model, tokenizer, tmp_path, task)
    given = source(model, tokenizer, tmp_path / "run", task=task)
    asked = proof(tmp_path / "proof", model, tokenizer, **rules_of(given))
    limit = TOLERANCES[HF.name]
    row = asked.of(HF.consumer.module, tmp_path / "folder", written.options, tolerance=limit)
    assert row["state"] == "ran", row["reason"]
    assert row["kl"] < BF16_KL, row
    assert row["token_ids"]["equal"] == row["token_ids"]["documents"] > 0
    assert (row["cached_token_s"] is None) == (task == "masked_lm")


@pytest.mark.slow
def test_an_fp8_folder_is_what_a_run_would_load(tmp_path):
    tokenizer = our_tokenizer()
    written = write(FP8, decoder(), tokenizer, tmp_path)
    loaded = build_model(ModelSection(path=str(tmp_path / "folder"), weights="load"), 1, device="cpu").eval()
    row = proof(tmp_path / "proof", loaded, tokenizer).of(FP8.consumer.module, tmp_path / "folder", written.options)
    assert row["state"] == "ran", row["reason"]
    assert row["kl"] < 1e-9, row
    assert "in FP8" in written.notes[0]


def test_a_shape_without_a_layout_is_refused_before_work_begins(tmp_path):
    reason = why_not(HF, source(decoder(num_experts=4, expert_dim=32), our_tokenizer(), tmp_path / "run"))
    assert "grouped-query attention with experts" in reason
