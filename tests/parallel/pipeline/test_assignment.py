"""Documents of a step to micro-batches: each once, none over the limit, in stream order, few and even ones."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.draws import examples
from tilewright.parallel.pipeline.assignment import Room, check_assignment, in_stream_order
from tilewright.parallel.pipeline.stage_split import Pipeline

_PIPELINES = (
    Pipeline(pp=2),
    Pipeline(pp=3, schedule="gpipe"),
    Pipeline(pp=3, schedule="interleaved", virtual=2),
    Pipeline(pp=2, schedule="interleaved_deferred", virtual=3),
    Pipeline(pp=2, schedule="zbv", virtual=2),
    Pipeline(pp=2, schedule="dualpipe_v", virtual=2),
)


@st.composite
def _steps(draw):
    tokens = draw(st.integers(1, 60))
    lengths = draw(st.lists(st.integers(1, tokens), min_size=0, max_size=40))
    pipeline = draw(st.sampled_from((None, *_PIPELINES)))
    room = Room(draw(st.integers(1, 5)), tokens)
    return np.array(lengths, np.int64), room if pipeline is None else Room(room.ranks, tokens, pipeline.takes)


def _fewest_parts(lengths: list[int], most: int) -> int:
    """By brute force over the documents, one at a time."""
    parts, free = 0, 0
    for length in lengths:
        if length > free:
            parts, free = parts + 1, most
        free -= length
    return parts


@given(_steps())
@examples(300)
def test_every_step_of_documents_is_cut_into_few_even_parts_in_their_order(step):
    lengths_N, room = step
    assignment = in_stream_order(lengths_N, room)
    check_assignment(assignment, lengths_N, room)
    parts = [part for level in itertools.zip_longest(*assignment) for part in level]
    assert np.concatenate(parts).tolist() == list(range(len(lengths_N)))
    count, least = len(assignment[0]), -(-_fewest_parts(lengths_N.tolist(), room.tokens) // room.ranks)
    assert count == next(number for number in itertools.count(max(1, least)) if room.takes(number))
    longest = max(int(lengths_N[part].sum()) for part in parts)
    if longest > lengths_N.max(initial=1):
        assert _fewest_parts(lengths_N.tolist(), longest - 1) > count * room.ranks


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([[[0, 1]], [[2], []]], "micro-batches by rank"),
        ([[[0, 1]], [[2, 1]]], "each of 3 documents once"),
        ([[[0]], [[2]]], "each of 3 documents once"),
        ([[[0, 1, 2]], [[]]], "a micro-batch of 12 tokens"),
    ],
)
def test_a_wrong_assignment_is_found(parts, why):
    assignment = tuple(tuple(np.array(part, np.int64) for part in rank) for rank in parts)
    with pytest.raises(AssertionError, match=why):
        check_assignment(assignment, np.array([3, 4, 5]), Room(2, 10))
