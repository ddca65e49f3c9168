"""Text to token ids and back: a byte-level BPE trained on the data, or a tokenizer of the user's.

A thin layer over `tokenizers` that knows which ids begin and end a document and which one is the mask. The training is
deterministic: the same texts in the same order give the same file. Special tokens that occur in the text itself are
encoded as plain text, so that no document can end another one.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from tilewright.core.errors import DataError
from tilewright.data.common.guarded_tokenizer import Reader, TokenizerError, check_loadable, failures_told, reader_of
from tilewright.data.common.hashing import hash64
from tilewright.data.common.ranked_bpe import RankedBpe
from tilewright.data.common.tokenizer_folder import (
    CONFIG,
    TOKENIZER,
    declared_stops,
    declared_tokens,
    special_names,
    tokenizer_at,
    write_stops,
)

BOS, EOS, PAD, MASK = "<|bos|>", "<|eos|>", "<|pad|>", "<|mask|>"

# Words with the mark before them, single digits, runs of punctuation, line ends, indentation. It is Qwen2's pattern
# letter by letter, because llama.cpp has a fixed list of patterns, which it knows by name (this one: "qwen2").
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

LONGEST_WORD = 256
"""Characters of the longest run of letters, of punctuation or of white space in what a tokenizer is trained on."""

_LONG = re.compile(
    r"[^\W\d_]{%d,}|(?:[^\w\s]|_){%d,}|\s{%d,}|\d{%d,}" % ((LONGEST_WORD + 1,) * 4)  # noqa: UP031  braces mean repeats
)

_SAMPLE_BYTES = 16_000_000  # of text that a tokenizer is trained on

# Names that published tokenizers use, tried where no file beside the tokenizer says which token is which.
_KNOWN = {
    "bos_token": (BOS, "<s>", "<|begin_of_text|>", "<|startoftext|>", "<bos>", "[CLS]", "<|endoftext|>"),
    "eos_token": (EOS, "</s>", "<|end_of_text|>", "<|endoftext|>", "<eos>", "[SEP]"),
    "pad_token": (PAD, "<pad>", "[PAD]"),
    "mask_token": (MASK, "<mask>", "[MASK]"),
}


@dataclass(frozen=True)
class Tokenizer:
    """Ids are in [0, vocab_size). `bos_id` begins and `eos_id` ends a document; they may be the same token."""

    backend: tokenizers.Tokenizer
    bos_id: int
    eos_id: int
    pad_id: int | None
    mask_id: int | None
    vocab_size: int
    special_ids: tuple[int, ...]  # ids that stand for no text
    stop_ids: tuple[int, ...] = ()
    """Ids that end what a model of this tokenizer writes: `eos_id`, and those that its folder declares
    (`tokenizer_folder.declared_stops`)."""
    names: tuple[str, ...] = ()
    """Of tokens that its folder calls special, beside those that `backend` does."""
    reads_names: bool = True
    """Whether names of special tokens in a prompt are these tokens."""
    ranked: RankedBpe | None = None
    """Encodes batches, see `encoder.choose_encoder`."""

    def encode(self, text: str) -> list[int]:
        """Encode `text` by the tokenizer to ids alone, without begin and end."""
        return self.reader.encode(text).ids

    @cached_property
    def reader(self) -> Reader:
        """The tokenizer's reader of texts, in which names of special tokens are text, and ids."""
        return reader_of(self.backend, self.ranked)

    def prompt_ids(self, text: str) -> list[int]:
        """The tokenizer's ids of a prompt, a text that a model continues, as transformers' `AutoTokenizer` makes them:
        names of special tokens are these tokens, and around the text is what the tokenizer's post-processor puts there.
        An empty text is the beginning of a document.

        Example:
            >>> tok = train_tokenizer(["low lower lowest " * 20], 300)
            >>> tok.prompt_ids("<|eos|>"), tok.prompt_ids("")
            ([1], [0])
        """
        return self._prompts.encode(text, special=True).ids or [self.bos_id]

    @cached_property
    def _prompts(self) -> Reader:
        backend = tokenizers.Tokenizer.from_str(self.backend.to_str())
        known = [name for name in self.names if backend.token_to_id(name) is not None]
        backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in known])
        backend.encode_special_tokens = not self.reads_names
        return reader_of(backend)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokenizer's `encode` of many texts, on all cores."""
        return self.reader.encode_ids(texts)

    def encode_sized(self, texts: Sequence[str]) -> list[tuple[list[int], list[int]]]:
        """The tokenizer's ids of each text, and how many of its UTF-8 bytes each id stands for.

        The bytes of a text sum to its length: a character that several tokens share counts for the first of them,
        and what a normalizer drops counts for the token after it, at the end for the last one.

        Example:
            >>> tok = train_tokenizer(["low lower lowest " * 20], 300)
            >>> [sum(sizes) for ids, sizes in tok.encode_sized(["naïve 🦊", ""])]
            [11, 0]
        """
        encodings = self.reader.encode_batch(texts)
        return [
            (e.ids, _token_bytes(text, [end for _, end in e.offsets])) for text, e in zip(texts, encodings, strict=True)
        ]

    def decode(self, ids: Sequence[int]) -> str:
        """Decode `ids` by the tokenizer to text; special tokens give none."""
        return self.reader.decode([int(i) for i in ids])

    def stopping_at(self, ids: Iterable[int]) -> "Tokenizer":
        """This tokenizer with further `stop_ids`; those that its vocabulary does not have are left out.

        Example:
            >>> tok = train_tokenizer(["low lower lowest " * 20], 300)
            >>> tok.stop_ids, tok.stopping_at([4, 1, 9000]).stop_ids
            ((1,), (1, 4))
        """
        known = (i for i in ids if self.backend.id_to_token(i) is not None)
        return replace(self, stop_ids=tuple(dict.fromkeys((self.eos_id, *self.stop_ids, *known))))

    def with_ranked(self, ranked: RankedBpe) -> "Tokenizer":
        """This tokenizer with another encoder for its batches."""
        return replace(self, ranked=ranked)

    def save(self, path: Path | str) -> None:
        """Write the tokenizer where `load_tokenizer(path)` finds it again, and Hugging Face libraries too.

        Args:
            path: a .json file, or a folder, which gets a tokenizer.json. A tokenizer_config.json is written beside it,
                and a generation_config.json where more ends a text than one token.
        """
        file = Path(path) if str(path).endswith(".json") else Path(path) / TOKENIZER
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(self.backend.to_str(pretty=True), encoding="utf-8")
        ids = {"bos_token": self.bos_id, "eos_token": self.eos_id, "pad_token": self.pad_id, "mask_token": self.mask_id}
        config: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        config |= {name: self.backend.id_to_token(i) for name, i in ids.items() if i is not None}
        file.with_name(CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if len(self.stop_ids) > 1:
            write_stops(file.parent, self.stop_ids)


def _token_bytes(text: str, ends: list[int]) -> list[int]:
    """The tokenizer's UTF-8 bytes of `text` per token, from the character at which each token ends."""
    sizes, done = [], 0
    for end in ends:
        end = max(end, done)
        sizes.append(len(text[done:end].encode("utf-8")))
        done = end
    if sizes:
        sizes[-1] += len(text[done:].encode("utf-8"))
    return sizes


def short_words(texts: Iterable[str]) -> Iterator[str]:
    """Short words for training a tokenizer: the texts, cut where a run of letters, digits, punctuation or white space
    is longer than `LONGEST_WORD`.

    A merge of byte pairs goes through every word that holds the pair, from its first byte to its last. Where a text has
    no spaces (Chinese, DNA, base64, a line of dashes) the word is the text, and each of thousands of merges went
    through all of it. No token is longer than a few dozen bytes, so pieces of a word teach the same merges.

    Example:
        >>> [len(text) for text in short_words(["two words", "a" * 600])]
        [9, 256, 256, 88]
    """
    for text in texts:
        start = 0
        for match in _LONG.finditer(text):
            for stop in range(match.start() + LONGEST_WORD, match.end(), LONGEST_WORD):
                yield text[start:stop]
                start = stop
        yield text[start:]


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a tokenizer: a byte-level BPE with at most `vocab_size` entries, the four special tokens first.

    Small data may not have enough pairs to merge; the vocabulary is then smaller. Long runs of one kind of character
    are cut for the training alone (`short_words`): texts are encoded whole.

    Example:
        >>> tok = train_tokenizer(["low lower lowest " * 20], 300)
        >>> tok.decode(tok.encode("lowest naïve 🦊")), tok.bos_id, tok.eos_id
        ('lowest naïve 🦊', 0, 1)
    """
    backend = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS, PAD, MASK],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(short_words(texts), trainer)
    return _wrap(backend, {}, "the trained tokenizer")


def training_sample(sizes: np.ndarray, seed: int) -> np.ndarray:
    """Choose the texts that a tokenizer is trained on, by a seeded hash: all of a small data set, else about 16 MB, in
    which domains keep their proportions. More text does not change a tokenizer for the better.

    Args:
        sizes: int64 [texts], UTF-8 bytes of each text of the training part, in the order of the data set.
        seed: of the hash.

    Returns:
        Indices of the chosen texts, sorted, int64.

    Example:
        >>> len(training_sample(np.full(5, 6_000_000), 0)), training_sample(np.array([3, 4]), 0).tolist()
        (3, [0, 1])
    """
    order = np.argsort(hash64(seed, np.arange(len(sizes))), kind="stable")
    num = int(np.searchsorted(np.cumsum(sizes[order]), _SAMPLE_BYTES)) + 1
    return np.sort(order[:num])


def load_tokenizer(path: Path | str) -> Tokenizer:
    """Load a tokenizer from a tokenizer.json, or from a folder that holds one.

    Which tokens begin and end a document is read from the files beside it (`declared_tokens`), else from common names.

    Raises:
        DataError: no such file, not a tokenizer, or nothing in it that could end a document.
    """
    file = tokenizer_at(path)
    try:
        # A pattern that is not known is tried in the guarded process: it may take any time and memory.
        with failures_told("Tokenizer cannot be read"):
            text = file.read_text(encoding="utf-8")
            check_loadable(text)
            backend = tokenizers.Tokenizer.from_str(text)
    except (TokenizerError, OSError, ValueError) as error:
        raise DataError(
            "Tokenizer cannot be read",
            where=str(file),
            got=error.problems[0].got if isinstance(error, TokenizerError) else str(error)[:200],
            need="a tokenizer.json written by Hugging Face tokenizers",
        ) from None
    # Length is the business of rows: a file's truncation would drop text without a count.
    backend.no_truncation()
    backend.no_padding()
    # Files beside it say which tokens begin and end a document, and which end an answer.
    found = _wrap(backend, declared_tokens(file.parent), str(file)).stopping_at(declared_stops(file.parent))
    names, reads = special_names(file.parent)
    return replace(found, names=names, reads_names=reads)


def _token_id(backend: tokenizers.Tokenizer, token: str | int) -> int | None:
    """The tokenizer's id of a token that is named by its text or by its id; None where the vocabulary does not hold
    it."""
    if isinstance(token, int):
        return token if backend.id_to_token(token) is not None else None
    return backend.token_to_id(token)


def _wrap(backend: tokenizers.Tokenizer, declared: Mapping[str, str | int], where: str) -> Tokenizer:
    ids: dict[str, int | None] = {}
    for name, known in _KNOWN.items():
        names = (declared[name],) if name in declared else known
        ids[name] = next((i for n in names if (i := _token_id(backend, n)) is not None), None)
    eos, bos = ids["eos_token"], ids["bos_token"]
    if eos is None:
        raise DataError(
            "Tokenizer without an end-of-document token",
            where=where,
            got=f"{declared['eos_token']!r}, which is not in its vocabulary"
            if "eos_token" in declared
            else "none of " + ", ".join(_KNOWN["eos_token"]),
            need='an "eos_token" in tokenizer_config.json, or a token of a common name',
            try_='"eos_token" in the tokenizer_config.json beside it',
        )
    backend.encode_special_tokens = True  # their names in the text are text
    size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
    special = tuple(sorted(i for i, token in backend.get_added_tokens_decoder().items() if token.special))
    begin = eos if bos is None else bos
    return Tokenizer(backend, begin, eos, ids["pad_token"], ids["mask_token"], size, special, (eos,))
