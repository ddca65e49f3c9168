"""A dataset at an address gives the rows that its documents have, once per epoch, whatever lies between."""

import importlib.util
import json
import time
from collections import Counter
from pathlib import Path

import fsspec
import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.data.remote.servers import serve
from tilewright.core.errors import ConfigError, DataError, HardwareError
from tilewright.data.batches.stream import Stream
from tilewright.data.batches.token_rows import IGNORE
from tilewright.data.dataset.remote.prepared_shards import Streaming
from tilewright.data.prepare import prepare

SEQ = 64


def far(address: str, cache: Path, window: int = 2, cache_bytes: int = 1 << 20, **options):
    streaming = Streaming(window, cache_bytes, **{"retries": 3, "backoff_s": 0.001, "return_s": 0.01, **options})
    return prepare(address, seq_len=SEQ, cache_dir=str(cache), streaming=streaming)


def stream(prepared, **options):
    return Stream(prepared, seed=3, **{"batch_size": 8, "micro_batch_size": 4, "prefetch": 0, **options})


def run(prepared, steps: int, **options) -> list[tuple[list[int], list[int]]]:
    """Inputs and labels of each row, in order."""
    with stream(prepared, **options) as batches:
        found = [batch for _ in range(steps) for batch in batches.next_step()]
    return [
        (ids.tolist(), labels.tolist())
        for batch in found
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True)
    ]


def epoch_of(prepared) -> list[tuple[list[int], list[int]]]:
    """All rows of one domain after the other."""
    sizes = [({name: 1.0}, rows) for name, rows in prepared.num_rows.items()]
    return [
        row for only, size in sizes for row in run(prepared, 1, weights=only, batch_size=size, micro_batch_size=size)
    ]


def pairs_of(rows) -> Counter[tuple[int, int]]:
    return Counter((i, label) for ids, labels in rows for i, label in zip(ids, labels, strict=True) if label != IGNORE)


def expected_pairs(out: Path) -> Counter[tuple[int, int]]:
    """Each token and the one behind it in its document, from the dataset's own stream."""
    table = pq.read_table(out / "tokens" / "documents.parquet", filters=[("split", "=", "train")])
    tokens = np.load(out / "tokens" / "train.npy")
    marks = out / "tokens" / "train.trained.npy"
    trained = np.load(marks) if marks.exists() else np.ones(len(tokens), np.uint8)
    found, end = Counter(), 0
    for length in table["length"].to_pylist():
        start, end = end, end + length
        pairs = zip(
            tokens[start : end - 1].tolist(), tokens[start + 1 : end].tolist(), trained[start + 1 : end], strict=True
        )
        found.update((one, other) for one, other, target in pairs if target)
    return found


def addresses(kind: str, dataset: Path, name: str) -> str:
    if kind == "file":
        return f"file://{dataset}"
    if kind == "paced":
        return serve(name, dataset)[0]
    files = fsspec.filesystem("memory")
    for path in dataset.rglob("*"):
        if path.is_file() and "work" not in path.parts:
            files.pipe_file(f"/{name}/{path.relative_to(dataset)}", path.read_bytes())
    return f"memory://{name}"


@pytest.mark.parametrize("which", ["dataset", "windowed"])
def test_an_epoch_has_each_pair_of_tokens_once(which, request, tmp_path):
    """The independent count is over the dataset's stream; packing and shards lose and repeat nothing."""
    out = request.getfixturevalue(which)
    prepared = far(f"file://{out}", tmp_path)
    assert len(prepared.reader.shards) > 20
    assert pairs_of(epoch_of(prepared)) == expected_pairs(out)


@pytest.mark.parametrize("window", [1, 3, 1000])
def test_samples_do_not_depend_on_the_address_nor_the_ranks(dataset, tmp_path, window):
    found = {}
    for kind in ("file", "memory", "paced"):
        prepared = far(addresses(kind, dataset, f"{tmp_path.name}{window}"), tmp_path / kind, window)
        found[kind] = run(prepared, 12)
        prepared.reader.close()
    assert found["file"] == found["memory"] == found["paced"]
    prepared = far(f"file://{dataset}", tmp_path / "ranks", window)
    ranks = [run(prepared, 12, rank=rank, world=2) for rank in range(2)]
    together = [row for pair in zip(*ranks, strict=True) for row in pair]
    assert together == found["file"]


def test_rows_of_a_window_come_together(dataset, tmp_path):
    prepared = far(f"file://{dataset}", tmp_path, window=2)
    name, rows = prepared.domains[0], prepared.num_rows[prepared.domains[0]]
    with stream(prepared, weights={name: 1.0}) as batches:
        picks = [batches.explain(sample)["row"] for sample in range(2 * rows)]
    first, second = picks[:rows], picks[rows:]
    assert sorted(first) == sorted(second) == list(range(rows))
    assert first != second
    counts = prepared.shard_rows[name]
    shard_of = np.repeat(np.arange(len(counts)), counts)
    for epoch in (first, second):
        order = list(dict.fromkeys(shard_of[epoch].tolist()))
        spans = [[at for at, row in enumerate(epoch) if shard_of[row] == shard] for shard in order]
        for number in range(0, len(order) - 2, 2):  # both shards of a window are over before the next window begins
            assert max(max(one) for one in spans[number : number + 2]) < min(min(one) for one in spans[number + 2 :])


def size_of(path):
    """Bytes of a file, which the cache may have removed by now."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def test_each_shard_is_fetched_once_per_epoch_in_the_order_of_its_first_sample(dataset, tmp_path):
    size = sum(path.stat().st_size for path in (dataset / "shards").glob("*.bin"))
    near = far(f"file://{dataset}", tmp_path / "near")
    total = sum(near.num_rows.values())
    order, ends = [], np.cumsum([count for counts in near.shard_rows.values() for count in counts])
    with stream(near) as batches:
        for sample in range(total):
            found = batches.explain(sample)
            row = near._ranges["train"][found["domain"]][0] + found["row"]
            order.append(near.reader.shards[int(np.searchsorted(ends, row, side="right"))].file)
    address, server = serve(tmp_path.name, dataset)
    prepared = far(address, tmp_path, window=2, cache_bytes=size // 3)
    with stream(prepared) as batches:
        for _ in range(total // 8):
            batches.next_step()
            assert sum(map(size_of, tmp_path.glob("data/shards/*.shard"))) <= size // 3
    prepared.reader.close()
    fetched = [name for name in server.reads if name.endswith(".bin")]
    wanted = list(dict.fromkeys(order))
    assert set(wanted) <= set(fetched)
    assert len(fetched) <= 1.1 * len(set(fetched)) + 8, "windows of the next epoch may have been read ahead"
    late = [abs(fetched.index(name) - at) for at, name in enumerate(wanted)]
    assert max(late) <= 4 * 2 * 2, "four threads take them in order; a window that was begun is fetched whole"


def test_moves_of_weights_fetch_nothing_again(dataset, tmp_path):
    """Windows come in another order then, and those that were read ahead are still wanted. What is being fetched while
    it is let go is not held for ever."""
    size = sum(path.stat().st_size for path in (dataset / "shards").glob("*.bin"))
    address, server = serve(tmp_path.name, dataset, latency_s=0.002)
    prepared = far(address, tmp_path, window=1, cache_bytes=size // 3)
    total, fetched, used = sum(prepared.num_rows.values()), [], set()
    ends = np.cumsum([count for counts in prepared.shard_rows.values() for count in counts])
    with stream(prepared) as batches:
        for step in range(total // 8):
            if step % 8 == 7:
                factor = 3.0 if step % 16 == 7 else 0.3
                batches.move({name: rows * factor**at for at, (name, rows) in enumerate(prepared.num_rows.items())}, "")
            batches.next_step()
            for sample in batches.samples_of(step):
                one = batches.explain(sample)
                row = prepared._ranges["train"][one["domain"]][0] + one["row"]
                used.add((one["epoch"], int(np.searchsorted(ends, row, side="right"))))
            wanted = {prepared.reader.shards[place].digest for place in prepared.reader._plan.all_wanted()}
            fetched = [name for name in server.reads if name.endswith(".bin")]
    deadline = time.monotonic() + 30
    while set(prepared.reader.cache._held) - wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(prepared.reader.cache._held) <= wanted
    assert len(fetched) <= len(used) + len(wanted), "once per epoch, and what is read ahead at the end"
    prepared.reader.close()


def test_state_goes_on_from_the_same_sample(dataset, tmp_path):
    prepared = far(f"file://{dataset}", tmp_path)
    with stream(prepared) as one:
        for step in range(30):
            if step == 11:
                one.move({"news": 1, "tales": 3}, "test")
            if step == 20:
                state = json.loads(json.dumps(one.state_dict()))
            one.next_step()
        expected = [batch["input_ids"].tolist() for batch in one.next_step()]
    other = far(f"file://{dataset}", tmp_path / "other", cache_bytes=60_000)
    with stream(other, prefetch=2) as two:
        two.load_state_dict(state)
        for _ in range(10):
            two.next_step()
        assert [batch["input_ids"].tolist() for batch in two.next_step()] == expected


def test_several_addresses_are_domains_of_their_names(dataset, windowed, tmp_path):
    streaming = Streaming(2, 1 << 20)
    sources = {"first": f"file://{dataset}", "second": addresses("memory", dataset, "second")}
    prepared = prepare(sources=sources, seq_len=SEQ, cache_dir=str(tmp_path), streaming=streaming)
    assert prepared.domains == prepared.eval_domains == ("first", "second")
    rows = epoch_of(prepared)
    once = expected_pairs(dataset)
    assert pairs_of(rows) == once + once
    assert prepared.describe_row("second", 0)[0]["name"]


def test_documents_can_be_steps(dataset, tmp_path):
    streaming = Streaming(2, 1 << 20)
    prepared = prepare(f"file://{dataset}", seq_len=SEQ, rows="documents", cache_dir=str(tmp_path), streaming=streaming)
    tokens = sum(prepared.num_tokens.values())
    with Stream(prepared, seed=1, batch_size=tokens, micro_batch_size=512, documents=True, prefetch=0) as batches:
        found = batches.next_step()
    rows = [(b["input_ids"][0].tolist(), b["labels"][0].tolist()) for b in found]
    missing = expected_pairs(dataset) - pairs_of(rows)
    assert sum(missing.values()) <= SEQ, "but for the last document, which does not fit"


BAD = {
    "an unknown scheme": ("nosuch://a/b", DataError, "Unknown scheme"),
    "a scheme without its package": ("oci://bucket/data", HardwareError, "pip install ocifs"),
    "no dataset": ("memory://nothing-here", DataError, "No built dataset at this address"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_address_is_an_error_of_four_parts(name, tmp_path):
    address, kind, words = BAD[name]
    if name == "a scheme without its package" and importlib.util.find_spec("ocifs"):
        pytest.skip("ocifs is installed")
    with pytest.raises(kind, match=words) as caught:
        far(address, tmp_path)
    (problem,) = caught.value.problems
    assert problem.got
    assert problem.need
    assert problem.try_
    assert problem.where


def test_a_cache_smaller_than_a_window_names_the_bytes(dataset, tmp_path):
    with pytest.raises(DataError, match="smaller than one window") as caught:
        far(f"file://{dataset}", tmp_path, window=4, cache_bytes=3000)
    need = int(caught.value.problems[0].need.split()[0].replace(",", ""))
    sizes = [path.stat().st_size for path in (dataset / "shards").glob("*.bin")]
    assert 3000 < need <= 8 * max(sizes)
    assert run(far(f"file://{dataset}", tmp_path, window=4, cache_bytes=need), 20)


def test_paths_and_addresses_are_not_mixed(dataset, tmp_path):
    with pytest.raises(ConfigError, match="cannot be mixed"):
        prepare(sources={"a": f"file://{dataset}", "b": str(dataset)}, cache_dir=str(tmp_path))


def test_a_dataset_without_shards_says_so(dataset, tmp_path):
    (tmp_path / "old").mkdir()
    content = json.loads((dataset / "dataset.json").read_bytes())
    (tmp_path / "old" / "dataset.json").write_text(json.dumps({**content, "shards": None}))
    with pytest.raises(DataError, match="no token shards"):
        far(f"file://{tmp_path}/old", tmp_path)
