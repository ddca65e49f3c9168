"""Small models with weights large enough that a wrong one shows, and a question about them."""

from pathlib import Path

import numpy as np
import torch

from tests.data.chat.families import TEXT, make_folder
from tests.models.shapes import KERNELS
from tilewright.compress.export.export_source import ExportSource
from tilewright.compress.prove.consumer_process import ConsumerLimits
from tilewright.compress.prove.held_out import ReferenceAnswer, reference
from tilewright.compress.prove.proof import Proof
from tilewright.compress.prove.question import Question
from tilewright.compress.prove.texts.compare_texts import ReferenceTexts
from tilewright.compress.prove.texts.odd_texts import odd_texts
from tilewright.core.config.load import load_recipe
from tilewright.data.common.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.models.hf.load import load_hf
from tilewright.training.components.export import max_positions

VOCAB, STD = 400, 0.12
HF_SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
}  # fmt: skip


@torch.no_grad()
def drawn(model):
    """All parameters drawn, norms around one."""
    generator = torch.Generator().manual_seed(5)
    for param in model.parameters():
        noise = torch.randn(param.shape, generator=generator) * STD
        param.copy_(noise if param.dim() > 1 else noise + (1 if param.abs().sum() else 0))
    return model.eval()


def decoder(**changes):
    """Our decoder, grouped-query."""
    values = {"vocab_size": VOCAB, "dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    values |= {"ffn_dim": 96, "rope_theta": 5000.0, "norm_eps": 1e-3}
    return drawn(Decoder(DecoderConfig(**values | changes), KERNELS))


def hf(name, **changes):
    """A model of transformers: "Llama", "Qwen2", "Qwen3", ..."""
    import transformers

    config = getattr(transformers, f"{name}Config")(**HF_SHAPE | changes)
    return drawn(load_hf(config, "masked_lm" if name == "Bert" else "causal_lm", kernels=KERNELS))


def our_tokenizer() -> Tokenizer:
    return train_tokenizer(TEXT, VOCAB - 10)


def source(model, tokenizer, run: Path, task="causal_lm", **options) -> ExportSource:
    """A run around a model; nothing of it is on the disk but the chat template that a test puts there."""
    run.mkdir(parents=True, exist_ok=True)
    settings = {"data.seq_len": "64", "model.task": task}
    settings |= (
        {} if isinstance(model, Decoder) else {"model.kind": "hf", "model.path": str(run), "model.weights": "load"}
    )
    recipe = load_recipe(None, settings, environ={}).recipe
    return ExportSource(run, recipe, tokenizer, model, run / "step_00000001", **options)


def family_tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(make_folder(folder, "chatml"))


def proof(folder: Path, model, tokenizer, texts=(), **rules) -> Proof:
    """Two rows of random ids, asked at each position; a few documents and odd texts.

    Args:
        model: whose distributions are expected.
        texts: further odd texts.
        rules: begin, end and facts of `ReferenceTexts`.
    """
    draw = np.random.default_rng(3)
    rows = [draw.integers(0, VOCAB, n) for n in (40, 17)]
    positions = np.array([(row, at) for row, ids in enumerate(rows) for at in range(len(ids))])
    every = [*TEXT[:4], *texts, *odd_texts()]
    asked = ReferenceTexts(every, tokenizer.encode_batch(every), num_documents=4, **rules)
    question = Question(rows, positions, draw.integers(0, VOCAB, 60), every, asked.special)
    zeros = np.zeros(len(positions), np.int64)
    expected = ReferenceAnswer(("random",), zeros, zeros, reference(model, question))
    folder.mkdir(parents=True, exist_ok=True)
    return Proof(folder, question, expected, 1, ConsumerLimits(60.0, 2 * 2**30), asked)


def rules_of(given: ExportSource) -> dict:
    """What `proof` takes of a run: begin, end, positions and template."""
    rules = given.text_rules
    facts = {"positions": max_positions(given.recipe, given.model)}
    facts |= {"chat_template": rules.template} if rules.template is not None else {}
    return {"begin": rules.begin, "end": rules.end, "facts": facts}
