"""Sources that fail, lie and go away: what is read is right or blank, and blank is counted."""

import resource
import time

import numpy as np
import pytest

from tests.data.remote.servers import serve
from tests.data.remote.test_far_data import far, run, stream
from tilewright.core.errors import DataError
from tilewright.data.batches.token_rows import IGNORE
from tilewright.data.dataset.remote.address import DamagedFileError, Remote, SourceAwayError
from tilewright.data.dataset.remote.prepared_shards import Streaming
from tilewright.data.dataset.remote.shard_cache import ShardCache
from tilewright.data.prepare import prepare


def test_reads_that_fail_are_tried_again_with_back_off(dataset):
    waits = []
    address, server = serve("fails", dataset, fail_every=2)
    remote = Remote(address, retries=3, backoff_s=1.0, sleep=waits.append)
    assert {len(remote.fetch("shards/00000.bin")) for _ in range(4)} == {(dataset / "shards/00000.bin").stat().st_size}
    server.away = {""}
    waits.clear()
    with pytest.raises(SourceAwayError, match="no route to host, 4 times"):
        remote.fetch("shards/00000.bin")
    assert waits == [1.0, 2.0, 4.0]


def test_credentials_that_expire_are_read_again(dataset):
    address, _ = serve("expired", dataset, refused=1)
    remote = Remote(address, retries=1, backoff_s=0)
    before = remote._files
    assert remote.fetch("dataset.json")
    assert remote._files is not before


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_wrong_checksum_is_fetched_again_twice(dataset, times):
    import json

    index = json.loads((dataset / "shards/index.json").read_bytes())["shards"][0]
    address, _ = serve("damaged", dataset)
    _.damaged[index["file"]] = times
    remote = Remote(address, backoff_s=0)
    if times < 3:
        assert remote.fetch(index["file"], index["size"], index["digest"])
    else:
        with pytest.raises(DamagedFileError, match="wrong checksum, read 3 times"):
            remote.fetch(index["file"], index["size"], index["digest"])


def test_samples_of_a_bad_line_are_those_of_a_good_one(dataset, tmp_path):
    expected = run(far(f"file://{dataset}", tmp_path / "good"), 20)
    address, server = serve(tmp_path.name, dataset, latency_s=0.002, fail_every=5)
    server.damaged.update({f"shards/{number:05}.bin": 1 for number in range(0, 40, 3)})
    prepared = far(address, tmp_path / "bad", cache_bytes=20_000)
    assert run(prepared, 20, prefetch=2) == expected
    assert prepared.reader.counts.fetched > 10
    assert not prepared.blank_rows


def test_a_shard_that_stays_damaged_is_set_aside_and_its_rows_are_blank_and_counted(dataset, tmp_path):
    address, server = serve(tmp_path.name, dataset)
    prepared = far(address, tmp_path / "bad")
    shard = prepared.reader.shards[0]
    server.damaged[shard.file] = 10**6
    rows = prepared.shard_rows[shard.domain]
    size = prepared.num_rows[shard.domain]
    found = run(prepared, 1, weights={shard.domain: 1.0}, batch_size=size, micro_batch_size=size)
    blank = sum(set(labels) == {IGNORE} for _, labels in found)
    assert blank == rows[0] == prepared.rows_of_shard(0) == prepared.blank_rows[shard.domain]
    assert list(prepared.reader.set_aside) == [0]


def test_the_others_go_on_without_a_source_that_is_away(dataset, tmp_path):
    first, one = serve(f"{tmp_path.name}-one", dataset)
    second, _ = serve(f"{tmp_path.name}-two", dataset)
    streaming = Streaming(2, 30_000, retries=1, backoff_s=0.001, return_s=0.01)
    prepared = prepare(sources={"one": first, "two": second}, seq_len=64, cache_dir=str(tmp_path), streaming=streaming)
    with stream(prepared) as batches:
        batches.next_step()
        one.away = {"shards/"}
        for _ in range(100):
            batches.next_step()
            if prepared.reader.away:
                break
        assert set(prepared.reader.away) == {"one"}
        start = batches.leave_away(["one"], "away")
        assert batches.weights == {"one": 0.0, "two": float(prepared.num_rows["two"])}
        assert batches.move({"one": 3.0, "two": 1.0}, "a policy that does not know") is not None
        assert batches.weights["one"] == 0.0
        while batches.state_dict()["next_sample"] < start + 40:
            batches.next_step()
        assert set(batches.row_domains.tolist()) == {1}
        other = stream(prepared)
        other.load_state_dict(batches.state_dict())
        assert other.away == ("one",)
        assert other.weights == batches.weights
        one.away = set()
        deadline = time.monotonic() + 60
        while prepared.reader.away and time.monotonic() < deadline:
            batches.next_step()
            time.sleep(0.01)
        assert not prepared.reader.away
        back = batches.leave_away([], "returned")
        assert batches.weights == {"one": 3.0, "two": 1.0}
        while batches.state_dict()["next_sample"] < back + 100:
            batches.next_step()
        assert 0 in batches.row_domains
        found = [batch["labels"].numpy() for batch in batches.next_step()]
        assert all((labels != IGNORE).any(1).all() for labels in found), "nothing is blank any more"
        assert [batches.explain(sample)["domain"] for sample in range(start, start + 40)] == ["two"] * 40


def test_an_address_that_does_not_answer_is_taken_to_have_what_was_found_there(dataset, tmp_path, caplog):
    (first, one), (second, _) = serve(f"{tmp_path.name}-one", dataset), serve(f"{tmp_path.name}-two", dataset)
    streaming = Streaming(2, 30_000, retries=1, backoff_s=0.001, return_s=0.01)

    def prepared(**sources):
        return prepare(sources=sources, seq_len=64, cache_dir=str(tmp_path), streaming=streaming)

    found = prepared(one=first, two=second)
    one.away = {""}
    again = prepared(one=first, two=second)
    assert (again.fingerprint, again.num_rows) == (found.fingerprint, found.num_rows)
    assert set(again.reader.away) == {"one"}
    assert "taken to be the one that was last found there" in caplog.text
    with pytest.raises(DataError, match="Address of a dataset cannot be read"):
        prepare(serve(f"{tmp_path.name}-three", dataset, away={""})[0], cache_dir=str(tmp_path), streaming=streaming)
    one.away = set()
    deadline = time.monotonic() + 60
    with stream(again) as batches:
        while again.reader.away and time.monotonic() < deadline:
            batches.next_step()
            time.sleep(0.01)
    assert not again.reader.away


def test_all_sources_away_is_an_error_of_four_parts(dataset, tmp_path):
    address, server = serve(tmp_path.name, dataset)
    prepared = far(address, tmp_path, retries=0)
    server.away = {"shards/"}
    with pytest.raises(DataError, match="sources of all domains are away"):
        run(prepared, 10)


def test_a_cache_without_room_reads_into_memory(dataset, tmp_path):
    """A disk that is full, or others that hold what there is, cost a fetch and no sample."""
    expected = run(far(f"file://{dataset}", tmp_path / "good"), 10)
    (tmp_path / "bad" / "data").mkdir(parents=True)
    (tmp_path / "bad" / "data" / "shards").write_text("not a folder")
    prepared = far(f"file://{dataset}", tmp_path / "bad")
    assert run(prepared, 10) == expected
    assert prepared.reader.counts.in_memory


def test_a_cache_disk_that_is_full_costs_a_fetch_and_no_sample(dataset, tmp_path):
    """The kernel refuses bytes of a file past some, as a full disk does: larger shards stay in memory, no part of one
    is left behind, and the cache goes into use again when there is room."""
    expected = run(far(f"file://{dataset}", tmp_path / "good"), 20)
    sizes = sorted(path.stat().st_size for path in (dataset / "shards").glob("*.bin"))
    prepared = far(f"file://{dataset}", tmp_path / "bad", cache_bytes=sum(sizes) // 4)
    folder = tmp_path / "bad" / "data" / "shards"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (sizes[len(sizes) // 2], before[1]))
    try:
        assert run(prepared, 20) == expected
        # Before there is room again: threads that read ahead would use it.
        kept = [path.stat().st_size for path in folder.glob("*.shard")]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert prepared.reader.counts.in_memory
    assert kept
    assert max(kept) <= sizes[len(sizes) // 2]
    prepared.reader.close()
    with ShardCache(folder, 1 << 20).fetching("none"):
        pass
    assert run(far(f"file://{dataset}", tmp_path / "bad"), 20) == expected
    assert max(path.stat().st_size for path in folder.glob("*.shard")) > sizes[len(sizes) // 2]


def test_two_runs_share_what_one_has_fetched(dataset, tmp_path):
    address, server = serve(tmp_path.name, dataset)
    one, two = far(address, tmp_path), far(address, tmp_path)
    assert run(one, 30) == run(two, 30)
    names = [name for name in server.reads if name.endswith(".bin")]
    assert len(names) == len(set(names))


def test_memory_of_tokens_is_not_copied(dataset, tmp_path):
    prepared = far(f"file://{dataset}", tmp_path)
    at = np.arange(prepared._tokens.starts[3], prepared._tokens.starts[5])
    spans = [(dataset / prepared.reader.shards[place].file).read_bytes() for place in (3, 4)]
    assert prepared._tokens[at].tobytes() == b"".join(spans)
