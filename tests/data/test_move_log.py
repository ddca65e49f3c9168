"""The log of a stream's moves: the state stays small without it, and with it every sample can be told for ever."""

import json
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.test_stream import Numbers, make, steps
from tests.draws import examples
from tilewright.core.errors import CheckpointError, DataError
from tilewright.data.batches.mixture_order import BLOCK, Mixture
from tilewright.data.batches.state.move_log import MoveLog, chained

DOMAINS = [f"domain_of_{kind}" for kind in ("code", "docs", "mail", "talk", "news", "math", "law", "songs")]
MOVES = 10_000


def copied(state):
    return json.loads(json.dumps(state))


def reopened(state, log=None, **how):
    stream = make(**how)
    stream.load_state_dict(copied(state))
    return (stream, None) if log is None else (stream, stream.keep_log(log))


def test_ten_thousand_moves_leave_a_state_of_a_kilobyte_and_a_short_resume(tmp_path):
    """Also at the other end of ten million samples, and where the weights have as many digits as doubles have."""
    rows = Numbers({name: 1_000_003 + 7 * number for number, name in enumerate(DOMAINS)})
    stream = make(rows=rows, batch_size=1024)
    for number in range(MOVES):
        if number % 1000 == 0:
            stream.next_step()
        stream._next += BLOCK * 4
        assert stream.move(dict(zip(DOMAINS, np.random.random(8).tolist(), strict=True)), "a move") is not None
    stream.keep_log(tmp_path / "mixture.jsonl")
    stream.next_step()
    state = stream.state_dict()
    text = json.dumps(state)
    assert state["next_sample"] > 10_000_000
    assert len(text) <= 1024, f"{len(text)} bytes: {text}"
    assert len((tmp_path / "mixture.jsonl").read_text().splitlines()) == MOVES + 2
    began = time.process_time()
    again, kept = reopened(state, tmp_path / "mixture.jsonl", rows=rows, batch_size=1024)
    assert time.process_time() - began < 1
    assert kept == (None, [])
    assert steps([again], 2) == steps([stream], 2)
    assert again.explain(5)["domain"] in DOMAINS, "of the first stage"


@examples(12)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.sampled_from(["stop", "kill", "move", "recipe"])), max_size=8),
    st.integers(0, 2**31),
)
def test_every_sample_is_told_the_same_however_often_the_run_was_stopped(log, seed):
    """A kill loses the steps and moves behind the last checkpoint; they come again, and the log has them once."""
    rng = np.random.default_rng(seed)
    folder = Path(tempfile.mkdtemp())
    stream, straight = make(batch_size=30), make(batch_size=30)
    stream.keep_log(folder / "mixture.jsonl")
    for number, event in log:
        state = copied(stream.state_dict())
        weights = dict(zip("xyz", (0.1 + rng.random(3)).tolist(), strict=True))
        if event == "kill":  # after steps and a move that nobody will know of
            steps([stream], number)
            stream.move(weights, "lost")
        else:
            assert steps([stream], number) == steps([straight], number)
            if event == "stop":
                state = copied(stream.state_dict())
            else:
                changes = [
                    one.mix_with(weights) if event == "recipe" else one.move(weights, "") for one in (stream, straight)
                ]
                assert changes[0] == changes[1]
                continue
        stream, kept = reopened(state, folder / "mixture.jsonl", batch_size=30)
        assert kept == (None, [])
    assert stream.state_dict() == straight.state_dict() | {"log": stream.state_dict()["log"]}
    last = stream.state_dict()["step"] + 3
    assert [stream.samples_of(step) for step in range(last)] == [straight.samples_of(step) for step in range(last)]
    told = [[one.explain(sample) for sample in range(0, 30 * last, 37)] for one in (stream, straight)]
    assert told[0] == told[1]
    shutil.rmtree(folder)


def old_state(stages, next_sample, step, sizes):
    """As a version before the log wrote it."""
    return {
        "seed": 5, "fingerprint": "f0", "next_sample": next_sample, "step": step, "sizes": sizes, "stages": stages,
    }  # fmt: skip


def test_a_checkpoint_of_today_loads_and_brings_its_log(tmp_path):
    """With every stage in it, as it was written until the log came: the same samples, and all of them told."""
    stages = [[0, {"x": 1, "y": 1, "z": 1}], [512, {"x": 5, "y": 1, "z": 0}], [1024, {"x": 1, "y": 5, "z": 1}]]
    mixture = Mixture(5, Numbers().num_rows)
    for start, weights in stages:
        mixture.add_stage(start, weights)
    picks = mixture.picks(np.arange(1200))
    state = old_state(stages, 1008, 84, [[0, 0, 12]])
    stream, kept = reopened(state, tmp_path / "mixture.jsonl")
    assert kept == (None, [])
    for sample in (0, 511, 512, 1007, 1199):
        told = stream.explain(sample)
        assert ("xyz".index(told["domain"]), told["row"]) == (picks.domain[sample], picks.row[sample])
    again, kept = reopened(stream.state_dict(), tmp_path / "mixture.jsonl")
    assert kept == (None, [])
    assert [again.samples_of(step) for step in (0, 50, 84)] == [range(12 * s, 12 * s + 12) for s in (0, 50, 84)]
    assert steps([again], 3) == steps([stream], 3)
    assert stream.mix_with({"x": 1, "y": 5, "z": 1}) is None, "it was asked for last"
    assert stream.mix_with({"x": 2, "y": 5, "z": 1}) == 1280


@pytest.mark.parametrize(
    "wrong",
    [
        {"stages": []}, {"stages": [[0, [1.0], [0]]]}, {"stages": [[0, {"x": 1}]]}, {"size": [0, 0]}, {"log": 3},
        {"next_sample": "many"}, {"next_sample": -3}, {"stages": [[2560, [1.0, 1, 1], [0, 0, 0]]]}, {"step": 1.5},
    ],
)  # fmt: skip
def test_a_state_that_is_none_is_refused_in_words(wrong):
    stream = make()
    steps([stream], 2)
    with pytest.raises(CheckpointError, match="Saved data position is incomplete") as caught:
        make().load_state_dict(stream.state_dict() | wrong)
    assert caught.value.problems[0].got
    assert caught.value.problems[0].try_


def moved(log):
    stream = make()
    stream.keep_log(log)
    for number in range(1, 4):
        steps([stream], 25)
        stream.move({"x": number, "y": 1, "z": 1}, f"move {number}")
    steps([stream], 30)
    return stream


def test_a_log_that_is_another_one_is_kept_under_another_name_and_training_goes_on(tmp_path):
    log = tmp_path / "mixture.jsonl"
    stream = moved(log)
    changed = log.read_text().replace("move 1", "another")
    for content in (changed, "", None):
        log.write_text(content) if content is not None else log.unlink()
        again, kept = reopened(stream.state_dict(), log)
        assert "can no longer be told" in kept.lost
        assert steps([again], 40) == steps([reopened(stream.state_dict())[0]], 40)
        third, kept = reopened(again.state_dict(), log)
        assert kept == (None, [])
        assert third.explain(stream.state_dict()["next_sample"]) == stream.explain(stream.state_dict()["next_sample"])
        with pytest.raises(DataError, match="cannot be read") as caught:
            third.explain(0)
        assert "sample 0" in caught.value.problems[0].got
        with pytest.raises(DataError, match="cannot be read"):
            third.samples_of(3)
    assert (tmp_path / "mixture.jsonl.old-1").read_text() == changed


def test_a_reader_refuses_a_log_of_another_run_and_takes_one_that_goes_on(tmp_path):
    log = tmp_path / "mixture.jsonl"
    stream = moved(log)
    state = copied(stream.state_dict())
    stream.move({"x": 9, "y": 1, "z": 1}, "behind the checkpoint")
    steps([stream], 40)
    reader = reopened(state)[0]
    reader.read_log(log, tuple(state["log"]))
    last = stream.state_dict()["next_sample"]
    assert [reader.explain(one) for one in range(0, last, 11)] == [stream.explain(one) for one in range(0, last, 11)]
    log.write_text(log.read_text().replace("move 2", "another"))
    with pytest.raises(DataError, match="not the one of this checkpoint") as caught:
        reader.read_log(log, tuple(state["log"]))
    assert all((caught.value.problems[0].got, caught.value.problems[0].need, caught.value.problems[0].try_))
    log.write_text('{"kind": "stage", "start": "x"}\n')
    with pytest.raises(DataError, match="cannot be read"):
        reader.read_log(log, None)
    log.write_text("17\n")
    with pytest.raises(DataError, match="cannot be read"):
        reader.read_log(log, None)


def test_half_a_line_at_the_end_is_cut(tmp_path):
    log = tmp_path / "mixture.jsonl"
    stream = moved(log)
    whole = log.read_text()
    log.write_text(whole + '{"kind": "sta')
    again, kept = reopened(stream.state_dict(), log)
    assert kept == (None, [])
    assert log.read_text() == whole
    again.move({"x": 7, "y": 1, "z": 1}, "")
    assert reopened(again.state_dict(), log)[1] == (None, [])


def test_what_is_undone_in_a_run_is_undone_in_the_log(tmp_path):
    """A step that finds no memory is taken back, its moves too."""
    stream = moved(tmp_path / "mixture.jsonl")
    state = copied(stream.state_dict())
    stream.move({"x": 8, "y": 1, "z": 1}, "taken back")
    steps([stream], 30)
    stream.load_state_dict(state)
    assert "taken back" not in (tmp_path / "mixture.jsonl").read_text()
    assert stream.state_dict() == state


def test_samples_that_are_left_out_come_in_no_step_and_their_neighbours_stay(tmp_path):
    """At any world, through a stop before, in and behind them; a step's samples are told."""
    log = tmp_path / "mixture.jsonl"
    plain = [sample for sample, _ in steps([make()], 60)]
    expected = [sample for sample in plain if not 120 <= sample < 171]
    rows = dict(steps([make()], 60))
    for world in (1, 2, 3, 5):
        log.unlink(missing_ok=True)
        streams = [make(world, rank) for rank in range(world)]
        streams[0].keep_log(log)
        found = steps(streams, 5)
        for first, stop in ((120, 140), (130, 171), (0, 60)):
            left = [stream.leave_out(first, stop, "a spike") for stream in streams]
        assert left == [None] * world, "what was trained on stays so"
        for _ in range(10):
            states = [stream.state_dict() for stream in streams]
            assert all(state == states[0] for state in states)
            streams = [reopened(states[0], world=world, rank=rank)[0] for rank in range(world)]
            assert streams[0].keep_log(log) == (None, [])
            found += steps(streams, 4)
        assert [sample for sample, _ in found] == expected[: len(found)]
        assert all(rows[sample] == row for sample, row in found)
        told = [sample for step in range(45) for sample in streams[0].samples_of(step)]
        assert told == expected[: len(told)]
        assert "skips" not in streams[0].state_dict(), "they are over"


def test_what_a_user_asks_behind_the_checkpoint_is_handed_on(tmp_path):
    log = tmp_path / "mixture.jsonl"
    stream = moved(log)
    with open(log, "a") as file:
        file.write('{"kind": "skip", "samples": [2000, 2100], "why": "asked"}\n{"kind": "skip", "samples": "all"}\n')
        file.write('{"kind": "stage", "start": 9, "of": "steps that were lost"}\n')
    again, kept = reopened(stream.state_dict(), log)
    assert kept == (None, [(2000, 2100, "asked")])
    assert "lost" not in log.read_text()
    assert again.leave_out(*kept.skips[0]) == (2000, 2100)
    assert reopened(again.state_dict(), log)[0].state_dict()["skips"] == [[2000, 2100]]


def test_a_disk_that_is_full_is_said(tmp_path):
    log = MoveLog()
    log.begin([{"kind": "size"}])
    with pytest.raises(DataError, match="cannot be written"):
        log.keep_in(tmp_path / "no such folder" / "mixture.jsonl")
    log = MoveLog()
    log.keep_in(tmp_path / "mixture.jsonl")
    (tmp_path / "mixture.jsonl").unlink()
    (tmp_path / "mixture.jsonl").mkdir()
    with pytest.raises(DataError, match="cannot be written"):
        log.append({"kind": "size"})


def test_the_hash_is_of_every_line_and_their_order():
    lines = [b"a", b"b", b"c"]
    marks = {chained(lines[:number]) for number in range(4)} | {chained([b"a", b"c", b"b"]), chained([b"ab", b"c"])}
    assert len(marks) == 6
