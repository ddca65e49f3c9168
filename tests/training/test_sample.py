"""Samples: prompt and continuation are pieces of one text, whatever the tokenizer does at the start of a text."""

import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from tilewright.training.runlog.sample_texts import _continuation

WORDS = ["▁the", "▁cat", "▁sat", "s", "▁"]
BYTES = [f"<0x{byte:02X}>" for byte in "é🦊".encode()]


class Sentencepiece:
    """As Llama's first tokenizers: a space before each word, the first one dropped again; bytes for what is rare."""

    bos_id = eos_id = 0

    def __init__(self) -> None:
        vocab = {word: number for number, word in enumerate(["<s>", *WORDS, *BYTES])}
        self.backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<s>"))
        self.backend.pre_tokenizer = pre_tokenizers.Metaspace()
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        self.backend.decoder = decoders.Sequence(parts)
        self.size = len(vocab)

    def decode(self, ids):
        return self.backend.decode(ids, skip_special_tokens=True)


def test_the_first_space_is_kept():
    prompt, ids = torch.tensor([1, 2]), torch.tensor([3, 4])
    assert Sentencepiece().decode(ids.tolist()) == "sats", "or this tokenizer shows nothing"
    assert _continuation(Sentencepiece(), prompt, ids) == ("the cat", " sats")


@given(st.lists(st.integers(1, 11), max_size=8), st.lists(st.integers(1, 11), max_size=8))
def test_together_they_are_the_text(prompt, ids):
    tokenizer = Sentencepiece()
    begun, written = _continuation(tokenizer, torch.tensor(prompt), torch.tensor(ids))
    assert begun + written == tokenizer.decode(prompt + ids)
