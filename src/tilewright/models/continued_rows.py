"""Rows that are continued side by side: each begins and ends when it likes, and all take their next token together.

Decoding reads all weights for each pass, so a pass of eight rows takes about as long as a pass of one. A prompt is run
in chunks, so that rows which are being drawn wait for one chunk and not for a prompt. That of a model which
forgets where a row is continued by several tokens runs in one pass.

A row's logits do not depend on the others but for their last bits: matmuls of another number of rows add up in another
order. Where these matter, passes are filled up to one width. Then, since chunks have one size and attention is each
row's own, they are the same bits as alone where the machine's matmuls give equal rows equal bits, which torch's do on a
CPU for one shape; not for layers whose work depends on what all rows hold together, such as a mixture of experts.

Legend: B rows  S positions  V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewright.models.base.protocols import Model
from tilewright.models.generate import inference

CHUNK = 128
"""Tokens of a prompt in one pass."""
_LENGTHS = (2, 4)
"""Lengths of prompts by which the bytes of caches are known: any window holds the first, and two of them the second."""


@dataclass(frozen=True)
class RowBytes:
    """Bytes that a row's cache takes at most, by its positions.

    Args:
        fixed: whatever the length.
        layers: of each that grows, bytes per position, and the number of positions from which on it takes no more.

    Example:
        >>> sizes = RowBytes(100, ((8.0, float("inf")), (8.0, 50)))
        >>> sizes.of(10), sizes.of(1000)
        (260.0, 8500.0)
        >>> sizes.most_positions(8500), sizes.most_positions(10), RowBytes(100, ((8.0, 50),)).most_positions(500)
        (1000, 0, None)
    """

    fixed: float
    layers: tuple[tuple[float, float], ...]

    def of(self, positions: int) -> float:
        """Bytes of a row that is continued, of so many positions."""
        return self.fixed + sum(each * min(positions, most) for each, most in self.layers)

    def most_positions(self, num_bytes: float) -> int | None:
        """Most positions of a continued row for which so many bytes are enough; None: any number of them."""
        left, length = num_bytes - self.fixed, 0.0
        for end in sorted({most for _, most in self.layers}):
            slope = sum(each for each, most in self.layers if most >= end)
            if slope * (end - length) > left:
                return max(0, int(length + left / slope))
            left, length = left - slope * (end - length), end
        return None if left >= 0 else 0


class Row:
    """A row that is continued: its token ids, and its cache once it has run."""

    def __init__(self, ids: Sequence[int], cache: Any):
        self.ids = list(ids)
        self.cache = cache
        self.num_run = 0
        """Of `ids`: those that the model has run."""

    @property
    def in_prompt(self) -> bool:
        """True if a part of a continued row's prompt has not run."""
        return self.num_run < len(self.ids)


class RowBatch:
    """Rows of one model.

    Args:
        model: a causal language model.
        device: of the model.
        width: rows of passes that are filled up.
        chunk: tokens of a prompt in one pass.

    Example:
        >>> from tilewright.models.build import init_weights
        >>> from tilewright.models.decoder.config import DecoderConfig
        >>> from tilewright.models.decoder.decoder import Decoder
        >>> model = Decoder(DecoderConfig.of(vocab_size=50, dim=32, num_heads=4, num_layers=2))
        >>> init_weights(model, seed=0)
        >>> rows = RowBatch(model, torch.device("cpu"), width=2)
        >>> first, second = rows.begin([1, 2, 3], 4), rows.begin([4], 4)
        >>> rows.prefill(first).shape, rows.prefill(second).shape
        (torch.Size([50]), torch.Size([50]))
        >>> rows.step([first, second], [7, 8]).shape
        torch.Size([2, 50])
    """

    def __init__(self, model: Model, device: torch.device, *, width: int = 1, chunk: int = CHUNK):
        self._model, self._device, self.width, self.chunk = model, device, width, chunk

    def begin(self, ids: Sequence[int], num_new: int) -> Row:
        """Begin to continue a row with a prompt.

        Args:
            ids: at least one.
            num_new: most tokens behind them; memory is reserved for so many.
        """
        with inference(self._model):
            return Row(ids, self._model.new_cache(1, len(ids) + num_new))

    def prefill(self, row: Row) -> Tensor | None:
        """Run the next chunk of a row's prompt. Returns FP32 logits [V] on the CPU at its end, else None."""
        whole = row.cache is None
        chunk = row.ids[0 if whole else row.num_run :]
        with inference(self._model):
            if len(chunk) > self.chunk and not whole and row.cache.takes_pieces:
                chunk = chunk[: self.chunk]
            logits_BV = self._model.next_token_logits(self._ids([chunk]), row.cache)
        row.num_run = len(row.ids) if whole else row.num_run + len(chunk)
        return None if row.in_prompt else logits_BV[0].cpu()

    def step(self, rows: Sequence[Row], tokens: Sequence[int], *, filled: bool = True) -> Tensor:
        """Append a token to each row whose prompt has run. Returns FP32 logits [B, V] on the CPU of what follows.

        Args:
            rows: at least one.
            tokens: of them.
            filled: run a pass of the full width. A pass of one row takes half the time on a CPU, where it is a
                product with a vector.
        """
        width = self.width if filled else len(rows)
        for row, token in zip(rows, tokens, strict=True):
            row.ids.append(token)
        joined = rows[0].cache and rows[0].cache.joined([row.cache for row in rows[1:]], width)
        if joined is None:
            logits = [self._alone(row) for row in rows]
            return torch.stack(logits)
        ids = [[token] for token in tokens]
        ids += ids[:1] * (width - len(ids))
        with inference(self._model):
            logits_BV = self._model.next_token_logits(self._ids(ids), joined)
        for row in rows:
            row.num_run = len(row.ids)
        return logits_BV[: len(rows)].cpu()

    def row_bytes(self) -> RowBytes:
        """Bytes of a continued row's cache; none of a model that keeps none. Two short prompts are run."""
        short, long = _LENGTHS
        fixed, layers = 0.0, []
        for (before, most), (after, _) in zip(*(self._growth(length) for length in _LENGTHS), strict=True):
            each = (after - before) / (long - short)
            fixed += before - each * short
            if each:
                layers.append((each, most))
        return RowBytes(fixed, tuple(layers))

    def _growth(self, length: int) -> Sequence[tuple[int, float]]:
        row = self.begin([0] * length, 0)
        if row.cache is None:
            return ()
        self.prefill(row)
        with inference(self._model):
            return row.cache.growth(self.chunk)

    def _alone(self, row: Row) -> Tensor:
        logits_V = self.prefill(row)
        assert logits_V is not None, "one token is one chunk"
        return logits_V

    def _ids(self, ids_BS: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(ids_BS, dtype=torch.int64, device=self._device)
