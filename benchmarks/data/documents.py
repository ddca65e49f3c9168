"""Whole documents against rows of one length, in interleaved pairs: attention with a mask, and steps of padded rows.

    python -m benchmarks.data.documents

Prints ratios: of attention forward and backward over one micro-batch of log-normal documents, document by document and
with a mask by blocks of query rows; and of training per token, with documents behind each other and each padded to the
longest. No result is kept: docs/log.md has one of a busy machine.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from tilewright.data.batches.rows import starts_of
from tilewright.models.build import init_weights
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.ops.backends.document_attention import attention
from tilewright.ops.backends.native import wide_ops
from tilewright.ops.base.documents import STARTS, documents_of

MEDIAN, SPREAD, LONGEST = 100, 1.0, 1024


def drawn(tokens: int, seed: int) -> np.ndarray:
    """Lengths of log-normal documents with at most so many tokens together."""
    lengths = np.exp(np.random.default_rng(seed).normal(np.log(MEDIAN), SPREAD, tokens)).clip(8, LONGEST).astype(int)
    return lengths[np.cumsum(lengths) <= tokens]


def joined(lengths: np.ndarray, length: int) -> dict[str, torch.Tensor]:
    """A micro-batch of them, in one row."""
    pad = length - int(lengths.sum())
    segments = np.append(np.repeat(np.arange(len(lengths)), lengths), np.full(pad, -1))
    return batch_of(segments[None]) | {STARTS: torch.from_numpy(starts_of(lengths, length))}


def padded(lengths: np.ndarray) -> dict[str, torch.Tensor]:
    """A micro-batch of them, a row each."""
    return batch_of(np.where(np.arange(lengths.max()) < lengths[:, None], 0, -1))


def batch_of(segments: np.ndarray) -> dict[str, torch.Tensor]:
    """Random tokens; none where there is no segment."""
    segments_BS = torch.from_numpy(segments.astype(np.int32))
    ids = torch.randint(0, 512, segments_BS.shape)
    labels = ids.masked_fill(segments_BS < 0, -100)
    return {"input_ids": ids, "labels": labels, "positions": torch.zeros_like(ids), "segments": segments_BS}


def ratio(one: Callable[[], object], other: Callable[[], object], pairs: int) -> str:
    """Median and range of the seconds of `one` over those of `other`, turn by turn."""
    found = []
    for _ in range(pairs):
        seconds = []
        for work in (one, other):
            started = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - started)
        found.append(seconds[0] / seconds[1])
    return f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"


def attention_pair(tokens: int, pairs: int) -> str:
    """Document by document over a mask, forward and backward, FP32, 4 heads of 64."""
    lengths = drawn(tokens, 1)
    segments_BS = joined(lengths, tokens)["segments"]
    documents = documents_of(segments_BS)
    operands = [torch.randn(1, 4, tokens, 64).requires_grad_() for _ in range(3)]

    def by_documents() -> None:
        attention(*operands, documents).sum().backward()

    def by_mask() -> None:
        wide_ops.attention(*operands, segments_BS).sum().backward()

    for work in (by_documents, by_mask):
        work()
    share = float((lengths.astype(float) ** 2).sum()) / tokens**2
    return f"{tokens} tokens, {len(lengths)} documents, sum of L^2 {share:.1%} of T^2: " + ratio(
        by_documents, by_mask, pairs
    )


def step_pair(tokens: int, pairs: int) -> str:
    """A forward and backward pass over the same documents: behind each other over padded rows."""
    lengths = drawn(tokens, 2)
    model = Decoder(DecoderConfig.of(vocab_size=512, dim=128, num_heads=2, num_layers=2))
    init_weights(model, seed=0)
    together, apart = joined(lengths, tokens), padded(lengths)

    def passes(batch: dict[str, torch.Tensor]) -> None:
        model.loss(batch).loss_sum.backward()
        model.zero_grad()

    for batch in (together, apart):
        passes(batch)
    cells = f"{apart['input_ids'].numel() / tokens:.1f} times as many positions"
    return f"{len(lengths)} documents, padded rows have {cells}: " + ratio(
        lambda: passes(together), lambda: passes(apart), pairs
    )


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=5)
    pairs = parser.parse_args().pairs
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for tokens in (1024, 4096):
        print("attention by documents over attention with a mask,", attention_pair(tokens, pairs))
    print("documents behind each other over padded rows,", step_pair(4096, pairs))


if __name__ == "__main__":
    main()
