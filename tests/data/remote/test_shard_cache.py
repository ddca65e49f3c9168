"""The cache of shards: under its limit whoever shares it, never without what is in use or cannot be had again."""

import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest
import xxhash

from tilewright.data.dataset.remote.shard_cache import ShardCache


def content(number: int, size: int = 1000) -> bytes:
    return number.to_bytes(4, "little") * (size // 4)


def key(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def there(folder: Path) -> set[str]:
    return {path.stem for path in folder.glob("*.shard")}


def test_what_was_not_used_for_longest_goes_and_what_is_held_stays(tmp_path):
    cache, data = ShardCache(tmp_path, 3000), [content(n) for n in range(6)]
    for number in range(3):
        assert cache.put(key(data[number]), data[number]).read_bytes() == data[number]
        os.utime(tmp_path / f"{key(data[number])}.shard", ns=(number, number))
    assert cache.put(key(data[3]), data[3]) is None, "all are held"
    cache.release(key(data[1]))
    cache.release(key(data[0]))
    assert cache.put(key(data[3]), data[3])
    assert there(tmp_path) == {key(one) for one in data[1:4]}
    assert cache.hold(key(data[0])) is None


def test_a_damaged_shard_is_gone_and_one_of_another_process_is_found(tmp_path):
    data = content(1)
    one, other = ShardCache(tmp_path, 9000), ShardCache(tmp_path, 9000)
    path = one.put(key(data), data)
    assert other.hold(key(data)) == path
    one.close()
    other.close()
    path.write_bytes(content(2))
    assert one.hold(key(data)) is None
    assert not path.exists()
    assert one.put(key(data), data)


def test_what_the_cache_did_not_fetch_is_never_removed(tmp_path):
    own = tmp_path / "00000.bin"
    own.write_bytes(content(0, 50_000))
    cache = ShardCache(tmp_path, 2000)
    for number in range(5):
        data = content(number)
        cache.put(key(data), data)
        cache.release(key(data))
    assert own.read_bytes() == content(0, 50_000)
    assert len(there(tmp_path)) == 2


def test_a_cache_that_cannot_be_written_keeps_nothing(tmp_path, caplog):
    (tmp_path / "file").write_text("no folder")
    cache = ShardCache(tmp_path / "file" / "shards", 5000)
    assert cache.put(key(content(1)), content(1)) is None
    assert cache.put(key(content(2)), content(2)) is None
    assert len([one for one in caplog.records if "cannot be written" in one.message]) == 1


def _share(folder: str, seed: int, failures) -> None:
    cache, draw = ShardCache(Path(folder), 5000), np.random.default_rng(seed)
    for _ in range(150):
        data = content(int(draw.integers(12)))
        with cache.fetching(key(data)):
            path = cache.hold(key(data)) or cache.put(key(data), data)
        if path is not None and path.read_bytes() != data:
            failures.put("another content")
        with cache._locked():  # files come and go under it
            used = sum(one.stat().st_size for one in Path(folder).glob("*.shard"))
        if used > 5000:
            failures.put(f"{used} bytes")
        cache.release(key(data))


@pytest.mark.dist
def test_processes_share_it_under_one_limit(tmp_path):
    context = multiprocessing.get_context("fork")
    failures = context.Queue()
    processes = [context.Process(target=_share, args=(str(tmp_path), seed, failures)) for seed in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    assert failures.empty(), failures.get()


def test_a_process_that_was_killed_leaves_nothing_in_the_way(tmp_path):
    data = content(1)
    (tmp_path / f"{key(data)}.part").write_bytes(b"half")
    (tmp_path / f"{key(data)}.lock").write_bytes(b"")
    cache = ShardCache(tmp_path, 1000)
    with cache.fetching(key(data)):
        assert cache.put(key(data), data).read_bytes() == data
    assert not list(tmp_path.glob("*.part"))
