"""A source that one of two ranks cannot read is left out by both, from the same sample on, and taken in again."""

import os
from pathlib import Path

import pytest

from tests.contracts.observe import fixed_ceilings
from tests.data.remote.conftest import publish
from tests.data.remote.servers import serve
from tests.ranks import on_ranks
from tests.training.tiny import rows, tiny
from tilewright.planner.machine import ceilings
from tilewright.training.hooks.step_hook import AfterStep
from tilewright.training.session import train

MORE = {
    "train__steps": 40, "train__eval_interval": 0, "train__sample_tokens": 0, "train__global_batch_size": 32,
    "train__micro_batch_size": 8, "data__prefetch": 0, "parallel__dp_replicate": 2, "parallel__dp_shard": 1,
    "data__streaming__window": 1, "data__streaming__backoff_s": 0.001, "data__streaming__return_s": 0.01,
    "data__streaming__retries": 1, "data__streaming__cache_bytes": 9_000, "model__num_layers": 1,
}  # fmt: skip


def run(rank, folder, dataset):
    """A rank, whose own line to the first source breaks on rank 1 after step 3, until step 16."""
    ceilings.measure = fixed_ceilings  # this process is the test's own
    (one, server), (two, _) = serve("one", Path(dataset)), serve("two", Path(dataset))

    def outage(step, result):
        if rank == 1 and step.number == 3:
            server.away.add("shards/")
        if step.number == 16:
            server.away.clear()

    os.environ["XDG_CACHE_HOME"] = (
        f"{folder}/cache{rank}"  # two machines: in one cache a rank finds the shards of the other
    )
    sources = {"data__sources": f"{{one = '{one}', two = '{two}'}}", "data__cache_dir": ""}
    recipe = tiny(Path(folder), Path(folder) / "runs", **MORE | sources)
    weights = []
    train(recipe, hooks=[lambda setup, parts: AfterStep(lambda *_: weights.append(parts.stream.weights)), hook(outage)])
    return weights


def hook(after):
    """A hook of a function."""
    return lambda setup, parts: AfterStep(after)


@pytest.mark.dist
@pytest.mark.slow
def test_both_ranks_leave_out_what_one_cannot_read(tmp_path):
    ours, theirs = on_ranks(2, run, str(tmp_path), str(publish(tmp_path / "published")))
    assert ours == theirs
    assert len(ours) == 40
    folder = tmp_path / "runs" / "tiny"
    events = [row for row in rows(folder / "events.jsonl") if row["kind"].startswith("source_")]
    assert [(row["kind"], row["domain"]) for row in events] == [("source_away", "one"), ("source_back", "one")]
    assert "another process cannot read it" in events[0]["message"]
    stages = [row for row in rows(folder / "mixture.jsonl") if row["kind"] == "stage"]
    assert [row["weights"]["one"] > 0 for row in stages] == [True, False, True]
    assert all(row["loss"] == row["loss"] for row in rows(folder / "metrics.jsonl") if "loss" in row)
