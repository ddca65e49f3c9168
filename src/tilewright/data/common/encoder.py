"""Which library encodes the texts of a data set, and what becomes of a text that the tokenizer fails on."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import tokenizers

from tilewright.data.common.guarded_tokenizer import Direct, TokenizerError
from tilewright.data.common.ranked_bpe import RankedBpe, has_tiktoken, ranks_of
from tilewright.data.common.tokenizer import Tokenizer

MUCH_BYTES = 8_000_000
"""Text from which tiktoken is sooner done: its ranks take some three seconds of a large vocabulary."""
_SAMPLE, _SAMPLE_CHARS = 64, 200_000
FAILS = "tokenizer fails on the text"
"""Reason of a text that is set aside."""
_SPARED, _SHARE = 3, 0.1
_Found = TypeVar("_Found")
_Item = TypeVar("_Item")


def choose_encoder(tokenizer: Tokenizer, num_bytes: int, texts: Iterable[str]) -> tuple[Tokenizer, str]:
    """The tokenizer with the library that encodes a large text soonest; and which library that is, with the reason.

    Ids are the same, see `ranked_bpe`; both libraries encode some of the sample, and where ids differ all the same, it
    is `tokenizers`.

    Args:
        tokenizer: of any kind.
        num_bytes: of all text that is to be encoded.
        texts: of which some at the beginning are encoded by both.

    Example:
        >>> from tilewright.data.common.tokenizer import train_tokenizer
        >>> choose_encoder(train_tokenizer(["low lower lowest " * 20], 300), 1000, ["low"])[1].split(" ", 2)[2]
        '(less than 8 MB of text)'
    """
    why = f"less than {MUCH_BYTES / 1e6:.0f} MB of text" if num_bytes < MUCH_BYTES else ""
    quick = tokenizer if why else with_ranks(tokenizer)
    if isinstance(quick, Tokenizer) and not why:
        chosen = _of_chars(islice(texts, _SAMPLE), _SAMPLE_CHARS)
        try:
            same = quick.encode_batch(chosen) == tokenizer.encode_batch(chosen)
        except TokenizerError:
            quick = "it fails on a text"
        else:
            if same and quick.ranked is not None:
                return quick, quick.ranked.name
            quick = "ids of a sample differ"
    return tokenizer, f"tokenizers {tokenizers.__version__} ({why or quick})"


def with_ranks(tokenizer: Tokenizer) -> Tokenizer | str:
    """The encoder with ranks: the tokenizer with tiktoken to encode batches of text, or the reason why it cannot."""
    if not isinstance(tokenizer.reader, Direct):
        return "the tokenizer reads in a process under limits"
    if not has_tiktoken():
        return "the package tiktoken is not installed"
    ranks = ranks_of(tokenizer.backend)
    return ranks if isinstance(ranks, str) else tokenizer.with_ranked(RankedBpe(ranks))


def _of_chars(texts: Iterable[str], most: int) -> list[str]:
    found, size = [], 0
    for text in texts:
        found.append(text[: most - size])
        size += len(found[-1])
        if size >= most:
            break
    return found


@dataclass
class Spared:
    """Encodes texts by a tokenizer that may fail on a few of them: each alone, where a batch does.

    A tokenizer that fails on more than a tenth of its texts, and on more than three, is an error.
    """

    texts: int = 0
    failed: int = 0

    def encoded(
        self, encode: Callable[[Sequence[str]], list[_Found]], texts: Sequence[str]
    ) -> list[_Found | TokenizerError]:
        """The token ids that the encoder gives of each text, or its error.

        Raises:
            TokenizerError: too many fail.
        """
        self.texts += len(texts)
        try:
            return list(encode(texts))
        except TokenizerError as error:
            if len(texts) == 1:
                self.fail(error)
                return [error]
        found: list[_Found | TokenizerError] = []
        for text in texts:
            try:
                found += encode([text])
            except TokenizerError as error:
                self.fail(error)
                found.append(error)
        return found

    def fail(self, error: TokenizerError) -> None:
        """Count a text that the encoder's tokenizer fails on.

        Raises:
            TokenizerError: too many do.
        """
        self.failed += 1
        if self.failed > _SPARED and self.failed > _SHARE * self.texts:
            raise error


def in_batches(
    items: Iterable[_Item], size_of: Callable[[_Item], int], most: int, most_bytes: int
) -> Iterator[list[_Item]]:
    """Texts in batches that an encoder takes together, in their order.

    Args:
        items: the items.
        size_of: bytes of one.
        most: items in a batch, at most.
        most_bytes: with this many bytes a batch is full.

    Example:
        >>> list(in_batches(["a", "bb", "ccc", "d", "e", "f"], len, 3, 3))
        [['a', 'bb'], ['ccc'], ['d', 'e', 'f']]
    """
    batch: list[_Item] = []
    size = 0
    for item in items:
        batch.append(item)
        size += size_of(item)
        if len(batch) == most or size >= most_bytes:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
