"""The tokenizer: lossless, deterministic, and safe against text that looks like its special tokens."""

import json
import os
import subprocess
import sys

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from tests.data.conftest import write_text
from tests.draws import examples
from tilewright.core.errors import DataError
from tilewright.data.common.tokenizer import EOS, SPLIT_PATTERN, Tokenizer, load_tokenizer, train_tokenizer

TEXTS = [write_text(i, 200) for i in range(20)]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 420)


@examples(200)
@given(st.text(max_size=80))
def test_round_trip_of_any_text(text):
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert all(0 <= i < TOKENIZER.vocab_size for i in ids)
    assert not set(ids) & set(TOKENIZER.special_ids)


TOKENIZER = train_tokenizer(TEXTS, 400)


def test_special_names_in_the_text_are_text(tokenizer):
    ids = tokenizer.encode(f"before {EOS} after")
    assert tokenizer.eos_id not in ids
    assert tokenizer.decode(ids) == f"before {EOS} after"
    assert tokenizer.encode_batch([f"before {EOS} after"]) == [ids]


def test_vocabulary(tokenizer):
    assert tokenizer.vocab_size == 420
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.mask_id) == (0, 1, 2, 3)
    assert tokenizer.special_ids == (0, 1, 2, 3)
    small = train_tokenizer(["ab"], 5000)
    assert small.vocab_size < 300, "no more entries than the data has pairs"
    assert small.decode(small.encode("any ☃ text")) == "any ☃ text"


@pytest.mark.parametrize("target", ["folder", "folder/tokenizer.json"])
def test_save_and_load(tokenizer, tmp_path, target):
    tokenizer.save(tmp_path / target)
    again = load_tokenizer(tmp_path / target)
    assert again.encode(TEXTS[0] + EOS) == tokenizer.encode(TEXTS[0] + EOS)
    for name in ("bos_id", "eos_id", "pad_id", "mask_id", "vocab_size", "special_ids"):
        assert getattr(again, name) == getattr(tokenizer, name)


def test_transformers_reads_what_we_save(tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs(TEXTS[1])["input_ids"] == tokenizer.encode(TEXTS[1])
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.mask_token_id) == (0, 1, 3)


def test_two_processes_train_the_same_tokenizer(tokenizer):
    """Also with another number of threads and another hash seed."""
    code = (
        "from tests.data.test_tokenizer import TEXTS; from tilewright.data.common.tokenizer import train_tokenizer;"
        "print(train_tokenizer(TEXTS, 420).backend.to_str())"
    )
    env = os.environ | {"RAYON_NUM_THREADS": "1", "PYTHONHASHSEED": "7"}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == tokenizer.backend.to_str()


def test_names_of_other_tokenizers(tokenizer, tmp_path):
    """BERT-like names without a config; a GPT-2-like single token for begin and end; a config that says otherwise."""

    def renamed(names, config=None):
        text = tokenizer.backend.to_str()
        for old, new in names.items():
            text = text.replace(old, new)
        (tmp_path / "tokenizer.json").write_text(text)
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config or {}))
        return load_tokenizer(tmp_path)

    bert = renamed({"<|bos|>": "[CLS]", "<|eos|>": "[SEP]", "<|pad|>": "[PAD]", "<|mask|>": "[MASK]"})
    assert (bert.bos_id, bert.eos_id, bert.mask_id) == (0, 1, 3)
    gpt = renamed({"<|bos|>": "<unused>", "<|eos|>": "<|endoftext|>", "<|mask|>": "<unused2>"})
    assert (gpt.bos_id, gpt.eos_id, gpt.mask_id) == (1, 1, None)
    own = renamed({"<|bos|>": "<x>", "<|eos|>": "<y>"}, {"bos_token": {"content": "<x>"}, "eos_token": "<y>"})
    assert (own.bos_id, own.eos_id) == (0, 1)
    with pytest.raises(DataError, match="Tokenizer without an end-of-document token"):
        renamed({"<|eos|>": "<nothing known>"})


@examples(200)
@given(st.lists(st.text(max_size=60), max_size=4))
def test_sized_ids_are_the_same_ids_and_their_bytes_sum_to_the_text(texts):
    for text, (ids, sizes) in zip(texts, TOKENIZER.encode_sized(texts), strict=True):
        assert ids == TOKENIZER.encode(text)
        assert len(sizes) == len(ids)
        assert sum(sizes) == len(text.encode())


@examples(100)
@given(st.text(st.characters(codec="ascii"), max_size=60))
def test_a_token_of_ascii_has_as_many_bytes_as_characters(text):
    ((ids, sizes),) = TOKENIZER.encode_sized([text])
    assert sizes == [len(TOKENIZER.decode([i])) for i in ids]


def test_a_normalizer_loses_no_byte():
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "[SEP]": 1, "cafe": 2}, unk_token="[UNK]"))
    strip = [tokenizers.normalizers.NFD(), tokenizers.normalizers.StripAccents(), tokenizers.normalizers.Strip()]
    backend.normalizer = tokenizers.normalizers.Sequence(strip)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    found = Tokenizer(backend, 1, 1, None, None, 3, (1,))
    text = "  café \u3000 café  "
    ((ids, sizes),) = found.encode_sized([text])
    assert ids == [2, 2]
    assert sum(sizes) == len(text.encode())


def test_the_split_is_that_of_qwen2():
    """llama.cpp knows a fixed list of patterns; ours must be one of it, letter by letter."""
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    assert SPLIT_PATTERN == PRETOKENIZE_REGEX
