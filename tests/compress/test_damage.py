"""A proof finds damage: each kind is planted in a sound file, and the state of its row is "failed" with the reason."""

import functools

import gguf
import numpy as np
import pytest
import torch

from tests.compress.models import decoder, our_tokenizer, proof, rules_of, source
from tests.data.chat.families import TEXT
from tilewright.compress.export.gguf import F16, Q4_0, Q8_0
from tilewright.compress.prove.held_out import reference
from tilewright.compress.prove.tolerance import TOLERANCES
from tilewright.data.common.tokenizer import train_tokenizer

TARGETS = {target.name: target for target in (Q4_0, Q8_0, F16)}
BLOCK_BYTES = {"Q4_0": 18, "Q8_0": 34, "F16": 2}


def tensor(reader, name):
    return next(tensor for tensor in reader.tensors if tensor.name == name)


def swap_halves(reader, draw):
    """The two halves of a matrix, as a converter with a wrong offset writes them."""
    data = tensor(reader, f"blk.{draw.integers(2)}.{draw.choice(['ffn_down', 'attn_v', 'ffn_up'])}.weight").data
    half = len(data) // 2
    data[:] = np.concatenate((data[half : 2 * half], data[:half], data[2 * half :]))


def zero(reader, draw):
    tensor(reader, f"blk.{draw.integers(2)}.{draw.choice(['ffn_gate', 'attn_output', 'attn_k'])}.weight").data[:] = 0


def double_scale(reader, draw):
    """The scales of one tensor are twice what they were; of F16 the values."""
    found = tensor(reader, f"blk.{draw.integers(2)}.{draw.choice(['attn_v', 'ffn_down', 'attn_q'])}.weight")
    kind = found.tensor_type.name
    if kind == "F16":
        found.data[:] = found.data * 2
        return
    blocks = found.data.reshape(-1, BLOCK_BYTES[kind])
    blocks[:, :2] = (blocks[:, :2].copy().view("<f2") * 2).astype("<f2").view(np.uint8)


def permute_heads(reader, draw):
    """Rows of queries or keys in Hugging Face's order of rotary pairs, where llama.cpp's is wanted."""
    data = tensor(reader, f"blk.{draw.integers(2)}.attn_{draw.choice(['q', 'k'])}.weight").data
    heads = data.reshape(-1, 8, 2, *data.shape[1:])
    data[:] = heads.swapaxes(1, 2).reshape(data.shape)


def wrong_rope(reader, draw):
    field = reader.fields["llama.rope.freq_base"]
    field.parts[field.data[0]][0] *= draw.choice([0.1, 2.0, 100.0])


def wrong_norm(reader, draw):
    data = tensor(reader, f"blk.{draw.integers(2)}.{draw.choice(['attn_norm', 'ffn_norm'])}.weight").data
    data[:] = data[::-1].copy()


def swap_tokens(reader, draw):
    """The texts of two tokens of one length."""
    parts = reader.fields["tokenizer.ggml.tokens"]
    plain = [parts.parts[i] for i in parts.data if len(parts.parts[i]) == 1 and chr(parts.parts[i][0]).islower()]
    first, second = draw.choice(len(plain), 2, replace=False)
    plain[first][:], plain[second][:] = plain[second].copy(), plain[first].copy()


def wrong_begin(reader, draw):
    field = reader.fields["tokenizer.ggml.add_bos_token"]
    field.parts[field.data[0]][0] = 0


def wrong_length(reader, draw):
    field = reader.fields["llama.context_length"]
    field.parts[field.data[0]][0] = 32


KINDS = (swap_halves, zero, double_scale, permute_heads, wrong_rope, wrong_norm, swap_tokens, wrong_begin, wrong_length)


@functools.cache
def model():
    """Attention that looks at single positions: of drawn weights it is a mean of all, and what is done to it hides."""
    found = decoder()
    with torch.no_grad():
        for block in found.blocks:
            block.self_attn.q_proj.weight.mul_(4)
            block.self_attn.k_proj.weight.mul_(4)
    return found


def proven(target, tmp_path, damage=None, seed=0, tokenizer=None):
    given = source(model(), our_tokenizer(), tmp_path / "run")
    path = tmp_path / "model.gguf"
    written = target.write(source(model(), tokenizer, tmp_path / "run") if tokenizer else given, path)
    if damage is not None:
        reader = gguf.GGUFReader(path, "r+")
        damage(reader, np.random.default_rng(seed))
        reader.data.flush()
    asked = proof(tmp_path / "proof", given.model, given.tokenizer, **rules_of(given))
    stored = reference(written.stored(), asked.question)
    row = asked.of(target.consumer.module, path, written.options, tolerance=TOLERANCES[target.name], stored=stored)
    print(target.name, damage and damage.__name__, row["state"], row["reason"], row.get("kl"), row.get("stored"))
    return row


@pytest.mark.parametrize(
    "name", ["gguf-q4_0", *(pytest.param(n, marks=pytest.mark.slow) for n in TARGETS if "q4" not in n)]
)
def test_a_sound_file_passes(name, tmp_path):
    row = proven(TARGETS[name], tmp_path)
    assert (row["state"], row["reason"]) == ("ran", "")
    assert row["stored"]["kl"] < 0.5 * TOLERANCES[name].stored


FEW = (permute_heads, swap_tokens)
"""Of heads, of ids; `test_held` damages each matrix."""


@pytest.mark.parametrize(
    "damage", [*FEW, *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind not in FEW)]
)
def test_damage_of_four_bits_is_found(damage, tmp_path):
    row = proven(Q4_0, tmp_path, damage)
    assert row["state"] == "failed", row
    assert row["reason"]


def test_the_tokenizer_of_another_run_is_found(tmp_path):
    other = train_tokenizer([text[::-1] for text in TEXT], 390)
    row = proven(Q4_0, tmp_path, tokenizer=other)
    assert row["state"] == "failed"
    assert "other token ids" in row["reason"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("damage", KINDS)
@pytest.mark.parametrize("name", TARGETS)
def test_damage_of_any_format_is_found(name, damage, seed, tmp_path):
    assert proven(TARGETS[name], tmp_path, damage, seed)["state"] == "failed"
