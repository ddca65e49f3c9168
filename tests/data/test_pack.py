"""Packing against its definition: every position of every document in exactly one piece, rows never too long."""

import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.draws import examples
from tilewright.data.batches.pack_documents import pack
from tilewright.data.batches.token_rows import IGNORE, TextRows


@examples(200)
@given(st.lists(st.integers(1, 90), max_size=60), st.integers(1, 33))
def test_every_position_is_placed_once(lengths, row_length):
    lengths = np.array(lengths, np.int64)
    starts = 7 + 3 * np.arange(len(lengths)) + np.cumsum(lengths) - lengths  # gaps between documents
    packed = pack(starts, lengths, row_length)
    covered = [p for s, n in zip(packed.starts_P, packed.lengths_P, strict=True) for p in range(s, s + n)]
    expected = [p for s, n in zip(starts, lengths, strict=True) for p in range(s, s + n)]
    assert sorted(covered) == expected
    for a, b in pairwise(packed.first_R):
        assert 0 < packed.lengths_P[a:b].sum() <= row_length


@examples(100)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 33))
def test_documents_that_fit_are_not_cut(lengths, row_length):
    lengths = np.array(lengths, np.int64)
    packed = pack(np.cumsum(lengths) - lengths, lengths, row_length)
    assert len(packed.starts_P) == sum(-(-n // row_length) for n in lengths)


def test_rows_are_nearly_full_for_real_lengths():
    """Log-normal document lengths, as in the installed corpus."""
    lengths = np.random.default_rng(0).lognormal(5.3, 1.1, 20_000).astype(np.int64) + 1
    started = time.process_time()
    packed = pack(np.cumsum(lengths) - lengths, lengths, 512)
    assert time.process_time() - started < 2.0
    assert packed.utilisation(512) > 0.995
    assert packed.num_rows <= 1.005 * np.ceil(lengths.sum() / 512)


@examples(100)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=20), st.integers(2, 24), st.booleans())
def test_batches_train_every_token_once(num_tokens, row_length, shifted):
    """Rows gathered from the stream against a plain walk over the documents."""
    stream, documents, fresh = [], [], 10
    for n in num_tokens:
        document = [1, *range(fresh, fresh + n), 2]  # unique tokens between begin 1 and end 2
        fresh += n
        documents.append((len(stream), document))
        stream += document
    starts = np.array([start for start, _ in documents])
    lengths = np.array([len(d) - shifted for _, d in documents])
    rows = TextRows(np.array(stream, np.uint16), pack(starts, lengths, row_length), row_length, shifted)
    order = np.random.default_rng(len(stream)).permutation(rows.packing.num_rows)
    batch = rows.gather(order)
    pairs = []
    for ids, labels, positions, segments in zip(*(batch[k] for k in batch), strict=True):
        for segment in range(segments.max() + 1):
            at = np.flatnonzero(segments == segment)
            assert (np.diff(at) == 1).all()
            assert (positions[at] == np.arange(len(at))).all()
            assert shifted is False or (labels[at][:-1] == ids[at][1:]).all()
        assert (labels[segments < 0] == IGNORE).all()
        pairs += [(int(a), int(b)) for a, b, s in zip(ids, labels, segments, strict=True) if s >= 0]
    expected = []
    for _, document in documents:
        expected += pairwise(document) if shifted else zip(document, document, strict=True)
    assert sorted(pairs) == sorted(expected)
    assert batch["input_ids"].dtype == batch["labels"].dtype == batch["positions"].dtype == np.int64
    assert batch["segments"].dtype == np.int32


def test_ten_million_tokens_pack_in_seconds():
    lengths = np.random.default_rng(1).integers(2, 200, 100_000)
    started = time.process_time()
    packed = pack(np.cumsum(lengths) - lengths, lengths, 1024)
    assert packed.lengths_P.sum() == lengths.sum()
    assert time.process_time() - started < 5.0


def test_no_documents():
    empty = np.zeros(0, np.int64)
    packed = pack(empty, empty, 8)
    assert packed.num_rows == 0
    assert packed.utilisation(8) == pytest.approx(0.0)
