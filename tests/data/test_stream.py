"""The stream: the same samples at any number of ranks, through any stop and resume; a thread that behaves."""

import json
import shutil
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.draws import examples
from tilewright.core.errors import CheckpointError, ConfigError
from tilewright.data.batches.mixture_order import BLOCK
from tilewright.data.batches.stream import Stream


class Numbers:
    """Stands for prepared data: each row is the number 1000 * domain + row, and its sample index."""

    fingerprint = "f0"

    def __init__(self, num_rows=None, fail_at=None, delay_s=0.0):
        self.num_rows = num_rows or {"x": 40, "y": 90, "z": 7}
        self.fail_at, self.delay_s = fail_at, delay_s

    def train_arrays(self, picks, seed):
        time.sleep(self.delay_s)
        if self.fail_at is not None and (picks.sample >= self.fail_at).any():
            raise RuntimeError("a row cannot be read")
        return {"row": 1000 * picks.domain + picks.row, "sample": picks.sample, "labels": picks.row}

    def blank_row(self):
        return {"row": np.array([-1]), "sample": np.array([-1]), "labels": np.array([-100])}

    def describe_row(self, domain, row):
        return [{"name": f"{domain}/{row}"}]


def make(world=1, rank=0, batch_size=12, micro_batch_size=4, prefetch=0, rows=None, **options):
    return Stream(
        rows or Numbers(), seed=5, batch_size=batch_size, micro_batch_size=micro_batch_size, rank=rank, world=world,
        prefetch=prefetch, **options,
    )  # fmt: skip


def steps(streams, num):
    """The samples and rows of `num` steps over all ranks, in sample order."""
    found = []
    for _ in range(num):
        batches = [batch for stream in streams for batch in stream.next_step()]
        pairs = [(int(s), int(r)) for b in batches for s, r in zip(b["sample"], b["row"], strict=True) if s >= 0]
        found += sorted(pairs)
    return found


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("prefetch", [0, 3])
def test_ranks_share_one_order(world, prefetch):
    with make() as single:
        expected = steps([single], 60)
    streams = [make(world, rank, prefetch=prefetch) for rank in range(world)]
    assert steps(streams, 60) == expected
    assert [sample for sample, _ in expected] == list(range(720))
    for stream in streams:
        stream.close()


def test_resume_at_another_world_size_after_weights_changed():
    """Stop anywhere, also between a change of weights and its start; continue at worlds of 3 and 2; same samples."""

    def change(streams, at, step):
        if step == at:
            for stream in streams:
                stream.mix_with({"x": 1, "y": 5, "z": 1})

    def run(streams, first, last):
        found = []
        for step in range(first, last):
            change(streams, 23, step)
            change(streams, 50, step)
            found += steps(streams, 1)
        return found

    with make(prefetch=2) as single:
        expected = run([single], 0, 80)
    for stop in (0, 1, 22, 23, 24, 43, 79):
        first = [make(3, rank, prefetch=2) for rank in range(3)]
        start = run(first, 0, stop)
        states = [json.loads(json.dumps(stream.state_dict())) for stream in first]
        assert states[0] == states[1] == states[2], "the state depends on the rank"
        assert len(json.dumps(states[0])) < 1000
        second = [make(2, rank, prefetch=1) for rank in range(2)]
        for stream in second:
            stream.load_state_dict(states[0])
        assert start + run(second, stop, 80) == expected, f"stopped after {stop} steps"
        for stream in first + second:
            stream.close()


def test_prefetch_changes_nothing_but_time():
    plain, ahead = make(), make(prefetch=4)
    for step in range(90):
        if step in (10, 11, 60):
            start = [stream.mix_with({"x": step, "y": 3}) for stream in (plain, ahead)]
            assert [stream.mix_with({"x": step, "y": 3, "z": 0}) for stream in (plain, ahead)] == [None, None]
            assert start == [-(-12 * step // BLOCK) * BLOCK] * 2
        assert steps([plain], 1) == steps([ahead], 1)
        assert plain.state_dict() == ahead.state_dict()
    ahead.close()


class Gathered(Numbers):
    """Rows that are made for several steps at once."""

    rows_per_call = 50

    def __init__(self):
        super().__init__()
        self.calls = 0

    def train_arrays(self, picks, seed):
        self.calls += 1
        return super().train_arrays(picks, seed)


@examples(15)
@given(
    asked=st.lists(st.sampled_from(["step", "step", "move", "skip", "resume"]), min_size=5, max_size=40),
    batch_size=st.integers(5, 30),
    world=st.integers(1, 5),
)
def test_steps_that_are_made_together_are_those_that_are_made_alone(asked, batch_size, world):
    rows = [Gathered() for _ in range(world)]
    alone = [make(world, rank, batch_size) for rank in range(world)]
    together = [make(world, rank, batch_size, rows=rows[rank]) for rank in range(world)]
    for number, what in enumerate(asked):
        for streams in (alone, together):
            for at, stream in enumerate(streams):
                if what == "move":
                    stream.move({"x": 1 + number, "y": 3}, "test")
                elif what == "skip":
                    stream.leave_out(
                        stream.state_dict()["next_sample"] + 7, stream.state_dict()["next_sample"] + 40, ""
                    )
                elif what == "resume":
                    state, streams[at] = stream.state_dict(), make(world, at, batch_size, rows=stream._prepared)
                    streams[at].load_state_dict(state)
        assert steps(alone, 3) == steps(together, 3)
        for one, other in zip(alone, together, strict=True):
            assert one.row_domains.tolist() == other.row_domains.tolist()
            assert one.state_dict() == other.state_dict()


def test_rows_in_memory_are_made_for_several_steps_at_once():
    rows = Gathered()
    steps([make(batch_size=5, rows=rows)], 50)
    assert rows.calls <= 7


@examples(40)
@given(
    runs=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 9)), min_size=1, max_size=6),
    world=st.integers(1, 2),
)
def test_the_samples_of_a_step_are_told_after_any_changes_of_its_size(runs, world):
    """Each run has a size of its own and takes some steps, also none, from where the one before it stopped. Of the
    steps before it the log tells."""
    taken, state = [], None
    log = Path(tempfile.mkdtemp()) / "mixture.jsonl"
    for size, num in runs:
        stream = make(batch_size=size * world, world=world)
        if state is not None:
            stream.load_state_dict(json.loads(json.dumps(state)))
        assert stream.keep_log(log) == (None, [])
        for _ in range(num):
            start = stream.state_dict()["next_sample"]
            stream.next_step()
            taken.append(range(start, start + size * world))
        state = stream.state_dict()
        assert [stream.samples_of(step) for step in range(len(taken))] == taken
        assert stream.samples_of(len(taken))[0] == state["next_sample"], "of the step that comes next"
    shutil.rmtree(log.parent)


def test_a_state_without_sizes_is_of_steps_of_one_size():
    stream = make(batch_size=6)
    state = {"seed": 5, "fingerprint": "f0", "next_sample": 24, "stages": [[0, {"x": 1, "y": 1, "z": 1}]]}
    stream.load_state_dict(state)
    assert stream.samples_of(4) == range(24, 30)
    assert stream.samples_of(1) == range(6, 12)


@pytest.mark.parametrize(
    ("batch_size", "world", "micro_batch_size", "sizes"),
    [
        (12, 1, 4, [4, 4, 4]),
        (12, 1, 5, [4, 4, 4]),
        (7, 1, 4, [3, 4]),
        (7, 2, 2, [2, 2]),
        (2, 2, 8, [1]),
        (5, 3, 1, [1, 1]),
    ],
)
def test_micro_batches(batch_size, world, micro_batch_size, sizes):
    """As many on every rank, none above the limit; a rank short of a row gets one without targets."""
    seen = []
    for rank in range(world):
        batches = make(world, rank, batch_size, micro_batch_size).next_step()
        assert [len(b["row"]) for b in batches] == sizes
        assert all((b["labels"][b["row"] == -1] == -100).all() for b in batches)
        seen += [int(s) for b in batches for s in b["sample"] if s >= 0]
    assert sorted(seen) == list(range(batch_size))


def test_default_weights_follow_the_rows():
    rows = [row for _, row in steps([make(batch_size=BLOCK)], 8)]
    share = np.bincount(np.array(rows) // 1000) / len(rows)
    assert share == pytest.approx(np.array([40, 90, 7]) / 137, abs=2 / len(rows))


def test_explain_agrees_with_the_batch():
    stream = make(prefetch=2)
    for sample, row in steps([stream], 30):
        told = stream.explain(sample)
        assert 1000 * "xyz".index(told["domain"]) + told["row"] == row
        assert told["documents"] == [{"name": f"{told['domain']}/{told['row']}"}]
    stream.close()


def test_an_error_in_the_thread_reaches_the_caller():
    stream = make(prefetch=2, rows=Numbers(fail_at=36))
    steps([stream], 3)
    for _ in range(2):  # and again, instead of waiting for ever
        with pytest.raises(RuntimeError, match="cannot be read"):
            stream.next_step()
    stream.close()


def test_close_ends_the_thread_and_can_be_repeated():
    before = threading.active_count()
    stream = make(prefetch=2)
    stream.next_step()
    assert threading.active_count() == before + 1
    stream.close()
    stream.close()
    assert threading.active_count() == before
    assert int(stream.next_step()[0]["sample"][0]) == 12  # usable again, at its place
    stream.close()


def test_wait_is_what_the_caller_waited():
    slow = make(prefetch=0, rows=Numbers(delay_s=0.1))
    slow.next_step()
    assert slow.wait_s >= 0.1
    ahead = make(prefetch=2, rows=Numbers(delay_s=0.1))
    ahead.next_step()
    for _ in range(20):  # on a busy machine the rows ahead are late now and then
        time.sleep(0.4)
        ahead.next_step()
        if ahead.wait_s < 0.1:
            break
    assert ahead.wait_s < 0.1
    ahead.close()


def test_state_of_other_data_is_refused():
    stream = make()
    state = stream.state_dict() | {"fingerprint": "other"}
    with pytest.raises(CheckpointError, match="Dataset changed: the saved data position is invalid") as caught:
        stream.load_state_dict(state)
    problem = caught.value.problems[0]
    assert "f0" in problem.got
    assert "other" in problem.need
    assert problem.try_
    incomplete = stream.state_dict()
    del incomplete["stages"]
    with pytest.raises(CheckpointError, match="incomplete"):
        stream.load_state_dict(incomplete)


def test_state_brings_its_own_seed():
    first, second = make(), Stream(Numbers(), seed=99, batch_size=12, micro_batch_size=4, prefetch=0)
    steps([first], 4)
    second.load_state_dict(first.state_dict())
    assert steps([first], 4) == steps([second], 4)


def test_fewer_rows_than_ranks():
    with pytest.raises(ConfigError, match="Fewer rows"):
        make(world=4, batch_size=3)


def test_batches_of_prepared_text(prepared):
    stream = Stream(prepared, seed=1, batch_size=6, micro_batch_size=4, prefetch=2)
    batches = stream.next_step()
    assert [tuple(b["input_ids"].shape) for b in batches] == [(3, 64), (3, 64)]
    dtypes = {name: tensor.dtype for name, tensor in batches[0].items()}
    int64 = torch.int64
    assert dtypes == {"input_ids": int64, "labels": int64, "positions": int64, "segments": torch.int32}
    assert stream.explain(0)["documents"][0]["name"].endswith(".txt")
    stream.close()
