"""Runs whose data is at an address: what metrics tell, a source that goes away, and kills that change nothing."""

import fsspec
import pytest

from tests.data.remote.conftest import publish
from tests.data.remote.servers import PacedFileSystem, serve
from tests.training.tiny import assert_same_run, rows, tiny
from tilewright.training.hooks.step_hook import AfterStep
from tilewright.training.session import train


class KilledError(RuntimeError):
    """The end of a process, as far as a run can tell."""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return publish(tmp_path_factory.mktemp("published"))


def far(data, runs, address, **changes):
    shards = {"data__streaming__window": 2, "data__streaming__backoff_s": 0.001, "data__streaming__return_s": 0.01}
    shards |= {"data__streaming__retries": 2, "data__streaming__cache_bytes": 40_000}
    given = {} if address is None else {"data__source": address}
    return tiny(data, runs, **{**given, **shards, **changes})


def test_metrics_tell_waiting_reading_and_preparing_apart(dataset, tmp_path):
    address, server = serve(tmp_path.name, dataset, latency_s=0.03)
    train(far(tmp_path, tmp_path / "runs", address, data__prefetch=0, train__steps=8))
    steps = [row for row in rows(tmp_path / "runs" / "tiny" / "metrics.jsonl") if "loss" in row]
    assert all(row["read_s"] + row["prepare_s"] <= row["wait_s"] for row in steps), "nothing is made ahead"
    assert steps[0]["read_s"] > 0, "later shards may be there before they are wanted"
    assert all(row["prepare_s"] > 0 for row in steps)
    told = [row["fetched_bytes"] for row in steps if "fetched_bytes" in row]
    assert 0 < told[-1] <= server.num_bytes


@pytest.mark.slow
def test_a_source_that_goes_away_is_left_out_and_returns_by_moves_that_are_told(dataset, tmp_path):
    (one, server), (two, _) = serve(f"{tmp_path.name}-one", dataset), serve(f"{tmp_path.name}-two", dataset)
    sources = f"{{one = '{one}', two = '{two}'}}"
    ahead = {"data__streaming__cache_bytes": 9_000, "data__prefetch": 0, "data__streaming__window": 1}

    def outage(step, result):
        """The line breaks after step 3, and is mended after step 12."""
        if step.number == 3:
            server.away.add("shards/")
        if step.number == 12:
            server.away.clear()

    more = {"data__sources": sources, "train__steps": 40, "train__eval_interval": 0, "train__global_batch_size": 32}
    recipe = far(tmp_path, tmp_path / "runs", None, train__micro_batch_size=16, **more, **ahead)
    train(recipe, hooks=[lambda setup, parts: AfterStep(outage)])
    run = tmp_path / "runs" / "tiny"
    events = [row for row in rows(run / "events.jsonl") if row["kind"] in ("source_away", "source_back")]
    assert [row["kind"] for row in events] == ["source_away", "source_back"]
    assert all(row["domain"] == "one" for row in events)
    assert 3 < events[0]["step"] < 12 < events[1]["step"]
    stages = [row for row in rows(run / "mixture.jsonl") if row["kind"] == "stage"]
    assert [row["weights"]["one"] > 0 for row in stages] == [True, False, True]
    assert [row["start"] for row in stages[1:]] == [row["first_sample"] for row in events]
    assert events[1]["blank_rows"] > 0
    assert all(row["loss"] == row["loss"] for row in rows(run / "metrics.jsonl") if "loss" in row)


def test_a_run_that_is_stopped_while_a_source_is_away_continues_without_it(dataset, tmp_path):
    """It continues twice: while the source is still away, of which no row is asked for, and until it has returned."""
    (one, server), (two, _) = serve(f"{tmp_path.name}-one", dataset), serve(f"{tmp_path.name}-two", dataset)
    more = {
        "data__sources": f"{{one = '{one}', two = '{two}'}}", "train__steps": 40, "train__eval_interval": 0,
        "train__global_batch_size": 32, "train__micro_batch_size": 16, "checkpoint__interval": 1, "data__prefetch": 0,
        "data__streaming__cache_bytes": 9_000, "data__streaming__window": 1,
    }  # fmt: skip
    run = tmp_path / "runs" / "tiny"

    def until(number, then=None):
        def after(step, result):
            if step.number == 3:
                server.away.add("")  # all of it, its index too, which a start reads
            if step.number == number:
                if then is not None:
                    then()
                else:
                    raise KilledError

        return lambda setup, parts: AfterStep(after)

    for number in (14, 22):
        with pytest.raises(KilledError):
            train(far(tmp_path, tmp_path / "runs", None, **more), hooks=[until(number)])
    away = [row for row in rows(run / "events.jsonl") if row["kind"] == "source_away"]
    assert len(away) == 1, "it is said once"
    before = len([name for name in server.reads if name.startswith("shards/0")])
    train(far(tmp_path, tmp_path / "runs", None, **more), hooks=[until(26, server.away.clear)])
    assert len([name for name in server.reads if name.startswith("shards/0")]) > before
    stages = [row for row in rows(run / "mixture.jsonl") if row["kind"] == "stage"]
    assert [row["weights"]["one"] > 0 for row in stages] == [True, False, True]
    assert [row["kind"] for row in rows(run / "events.jsonl") if row["kind"].startswith("source")][-1] == "source_back"


@pytest.mark.slow
def test_a_shard_that_stays_damaged_is_told_once_with_its_rows(dataset, tmp_path):
    address, server = serve(tmp_path.name, dataset)
    server.damaged["shards/00000.bin"] = 10**6
    train(far(tmp_path, tmp_path / "runs", address, train__steps=60, train__eval_interval=0))
    events = rows(tmp_path / "runs" / "tiny" / "events.jsonl")
    (told,) = [row for row in events if row["kind"] == "shard_set_aside"]
    assert told["shard"] == "shards/00000.bin"
    assert told["rows"] > 0


@pytest.mark.slow
def test_a_run_from_memory_that_is_stopped_goes_on_as_if_it_had_not(dataset, tmp_path):
    files = fsspec.filesystem("memory")
    for part in ("dataset.json", "tokens", "shards"):
        files.put(str(dataset / part), f"/{tmp_path.name}/{part}", recursive=True)
    mixing = {
        "data__mixing__policy": "exp3",
        "data__mixing__interval": 3,
        "train__steps": 24,
        "train__eval_interval": 0,
    }
    address = f"memory://{tmp_path.name}"
    train(far(tmp_path, tmp_path / "whole", address, **mixing))

    def kill_at(number):
        def after(step, result):
            if step.number == number:
                raise KilledError

        return lambda setup, parts: AfterStep(after)

    for number in (7, 17):
        with pytest.raises(KilledError):
            train(far(tmp_path, tmp_path / "parts", address, **mixing), hooks=[kill_at(number)])
    train(far(tmp_path, tmp_path / "parts", address, **mixing))
    assert_same_run(tmp_path / "parts" / "tiny", tmp_path / "whole" / "tiny")


def teardown_module():
    PacedFileSystem.servers.clear()
