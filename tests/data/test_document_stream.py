"""Steps of whole documents: a budget of tokens, each document once per epoch, the same at any number of ranks, through
any stop and resume; what a batch holds is what the documents hold."""

import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.data.conftest import write_text
from tests.draws import examples
from tilewright.data.batches.mixture_order import Picks
from tilewright.data.batches.step_samples import NUM_LENGTHS, padded_length
from tilewright.data.batches.stream import Stream
from tilewright.data.batches.token_rows import IGNORE, STARTS
from tilewright.data.prepare import prepare
from tilewright.ops.base.documents import document_starts

TOKENS, MICRO, LONGEST = 400, 96, 48


class Lengths:
    """Stands for prepared data: a document of a domain is its number, as often as it is long."""

    fingerprint = "f1"

    def __init__(self, **lengths: list[int]):
        self._lengths = [np.array(of, np.int64) for of in lengths.values()]
        self.num_rows = {name: len(of) for name, of in lengths.items()}
        self.num_tokens = {name: sum(of) for name, of in lengths.items()}

    def lengths(self, picks):
        return np.array([self._lengths[d][r] for d, r in zip(picks.domain, picks.row, strict=True)], np.int64)

    def joined(self, picks, seed, length):
        lengths = self.lengths(picks)
        sample = np.full((1, length), -1)
        sample[0, : lengths.sum()] = np.repeat(picks.sample, lengths)
        row = np.full((1, length), -1)
        row[0, : lengths.sum()] = np.repeat(1000 * picks.domain + picks.row, lengths)
        return {"input_ids": row, "sample": sample}


def make(lengths, world=1, rank=0, prefetch=0, **options):
    size = {"batch_size": TOKENS, "micro_batch_size": MICRO} | options
    return Stream(lengths, seed=3, rank=rank, world=world, prefetch=prefetch, documents=True, **size)


def drawn(name, count=200, domains=2):
    rng = np.random.default_rng(sum(name.encode()))
    lengths = np.clip(np.exp(rng.normal(2.5, 1.0, (domains, count))), 1, LONGEST).astype(int)
    return Lengths(**{f"d{i}": of.tolist() for i, of in enumerate(lengths)})


def taken(streams):
    """(sample, document, tokens) of one step over all ranks, in stream order."""
    found = {}
    for batch in (batch for stream in streams for batch in stream.next_step()):
        samples, counts = np.unique(batch["sample"].numpy(), return_counts=True)
        for sample, count in zip(samples.tolist(), counts.tolist(), strict=True):
            if sample >= 0:
                assert sample not in found, "one document in two micro-batches"
                found[sample] = int(batch["input_ids"][batch["sample"] == sample].unique()), count
    return [(sample, *found[sample]) for sample in sorted(found)]


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_ranks_share_one_order_and_the_budget(world):
    lengths = drawn("order")
    single = make(lengths)
    streams = [make(lengths, world, rank, prefetch=2 * (rank % 2)) for rank in range(world)]
    samples = itertools.count()
    for _ in range(40):
        expected = taken([single])
        assert taken(streams) == expected
        assert [sample for sample, _, _ in expected] == [next(samples) for _ in expected]
        assert TOKENS - LONGEST < sum(count for _, _, count in expected) <= TOKENS
    for stream in streams:
        stream.close()


def test_an_epoch_has_each_document_once():
    lengths = drawn("epoch", 60)
    stream, seen = make(lengths), ([], [])
    while min(map(len, seen)) < 60:
        for _, document, _ in taken([stream]):
            seen[document // 1000].append(document % 1000)
    for of_domain in seen:
        assert sorted(of_domain[:60]) == list(range(60))


@examples(6)
@given(
    runs=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 7), st.booleans()), min_size=1, max_size=5),
    seed=st.integers(0, 99),
)
def test_any_stops_and_numbers_of_ranks_give_the_stream_of_one_run(runs, seed):
    """Also with weights that change, and steps made ahead; the samples of each step are told afterwards."""
    lengths = drawn(f"resume {seed}")
    whole, state, before = make(lengths), None, []
    for world, num, reweigh in runs:
        streams = [make(lengths, world, rank, prefetch=rank) for rank in range(world)]
        for stream in streams:
            if state is not None:
                stream.load_state_dict(json.loads(json.dumps(state)))
        if reweigh:
            starts = {stream.mix_with({"d0": 3.0, "d1": float(num)}) for stream in (whole, *streams)}
            assert len(starts) == 1
        for _ in range(num):
            expected = taken([whole])
            assert taken(streams) == expected
            before.append([sample for sample, _, _ in expected])
        state = streams[0].state_dict()
        assert all(stream.state_dict() == state for stream in streams)
        assert len(json.dumps(state)) < 1000
        for stream in streams:
            stream.close()
    assert [list(whole.samples_of(step)) for step in range(len(before))] == before


@pytest.mark.slow
def test_the_samples_of_far_steps_are_counted_once_and_fast():
    stream, lengths = make(drawn("far", 3000)), []
    for _ in range(700):
        stream.next_step()
        lengths.append(len(stream.documents.lengths_N))
    for step in (0, 1, 350, 699):
        assert stream.samples_of(step) == range(sum(lengths[:step]), sum(lengths[: step + 1]))


def test_weights_are_of_tokens():
    lengths = Lengths(short=[4] * 500, long=[40] * 500)
    stream = make(lengths, weights={"short": 1.0, "long": 3.0})
    counts = np.zeros(2)
    for _ in range(60):
        for _, document, count in taken([stream]):
            counts[document // 1000] += count
    assert counts[1] / counts.sum() == pytest.approx(0.75, abs=0.03)


def test_another_assignment_from_the_next_step_on():
    """Steps made ahead are made again; the documents of a step stay those of the stream."""
    lengths = drawn("assign")
    plain, streams = make(lengths), [make(lengths, 2, rank, prefetch=3) for rank in range(2)]

    def backwards(lengths_N, room):
        """One document in each micro-batch, the last first."""
        order = np.arange(len(lengths_N))[::-1]
        count = room.next_count(-(-len(order) // 2))
        parts = [order[i : i + 1] for i in range(2 * count)]
        return tuple(parts[:count]), tuple(parts[count:])

    for step in range(6):
        if step == 2:
            for stream in streams:
                stream.assign_with(backwards)
        assert taken(streams) == taken([plain])
        longest = max(len(part) for rank in streams[0].documents.assignment for part in rank)
        assert (longest == 1) == (step >= 2)
    for stream in streams:
        stream.close()


@given(st.integers(1, 200_000))
def test_there_are_few_lengths(most):
    lengths = {padded_length(tokens, most) for tokens in np.unique(np.linspace(0, most, 3000).astype(int)).tolist()}
    assert len(lengths) <= NUM_LENGTHS
    assert max(lengths) <= most
    assert padded_length(most, most) == most


@pytest.fixture(scope="module")
def in_documents(corpus_folder, tmp_path_factory):
    """The folder in documents of at most 64 tokens."""
    cache = str(tmp_path_factory.mktemp("documents"))
    options = {"seq_len": 64, "vocab_size": 400, "holdout": 0.1, "cache_dir": cache}
    return {task: prepare(str(corpus_folder), rows="documents", task=task, **options) for task in _TASKS}


_TASKS = ("causal_lm", "masked_lm")


@pytest.mark.parametrize("task", _TASKS)
def test_a_batch_holds_the_documents_one_after_the_other(in_documents, task):
    """Against rows that hold one document each, which `train_arrays` lays out."""
    prepared = in_documents[task]
    stream = Stream(prepared, seed=1, batch_size=1000, micro_batch_size=256, prefetch=0, documents=True)
    seen = 0
    for _ in range(4):
        batches, sample = stream.next_step(), seen
        for batch, part in zip(batches, stream.documents.assignment[0], strict=True):
            length = batch["input_ids"].shape[1]
            assert {name: tuple(x.shape) for name, x in batch.items() if name != STARTS} == {
                name: (1, length) for name in ("input_ids", "labels", "positions", "segments")
            }
            assert torch.equal(batch[STARTS], document_starts(batch["segments"]))
            alone = prepared.train_arrays(_of(stream, sample + part), 1)
            for place in range(len(part)):
                here, kept = batch["segments"][0] == place, alone["segments"][place] == 0
                for name in ("input_ids", "labels", "positions"):
                    assert batch[name][0, here].tolist() == alone[name][place, kept].tolist(), name
            padding = batch["segments"][0] < 0
            assert (batch["labels"][0, padding] == IGNORE).all()
        seen += len(stream.documents.lengths_N)


def _of(stream, samples) -> Picks:
    return stream._mixture.picks(np.asarray(samples))


def test_every_token_is_in_one_row_and_what_is_split_is_said(in_documents):
    prepared = in_documents["causal_lm"]
    assert sum(prepared.num_tokens.values()) == sum(int((row.lengths_P).sum()) for row in _packings(prepared))
    (note,) = [note for note in prepared.summary["notes"] if "split" in note]
    assert "longer than data.seq_len = 64" in note
    assert prepared.summary["domains"]["a"]["rows"] == prepared.num_rows["a"]


def _packings(prepared):
    return [prepared._rows["train"].packing]


def test_short_documents_need_no_word(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(30):
        (folder / f"{i}.txt").write_text(write_text(i, 12))
    prepared = prepare(str(folder), rows="documents", seq_len=256, vocab_size=320, cache_dir=str(tmp_path))
    assert not [note for note in prepared.summary.get("notes", ()) if "split" in note]


def test_evaluation_takes_the_same_documents_in_few_batches_and_in_many(in_documents):
    prepared = in_documents["causal_lm"]
    for domain in prepared.eval_domains:
        few, many = (prepared.eval_batches(domain, 3, num) for num in (1, 50))
        assert len(few) == 1
        for name, tensor in few[0].items():
            assert torch.equal(tensor, many[0][name])
        assert all(batch["input_ids"].shape[1] <= 3 * 64 for batch in many)
        tokens = sum(int((batch["labels"] != IGNORE).sum()) for batch in many)
        first, stop = prepared._ranges["holdout"][domain]
        assert tokens == int(prepared._rows["holdout"].lengths(np.arange(first, stop)).sum())
        assert 0 < prepared.eval_bytes(domain, 3, 1) <= prepared.eval_bytes(domain, 3, 50)
