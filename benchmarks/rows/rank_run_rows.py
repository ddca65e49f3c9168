"""Rows of docs/benchmarks.md on several processes: kills through torchrun, checkpoints of shards, a world of one. See
`benchmarks.rows.claims`.
"""

from collections.abc import Iterator

from benchmarks.common import RESULTS
from benchmarks.rows.claim_rows import Row, read, read_all
from benchmarks.rows.verdict import once, turns


def rows() -> Iterator[Row]:
    """All of them."""
    yield from kills()
    yield from sharded_checkpoint()
    yield from world_one()


def kills() -> Iterator[Row]:
    if not (RESULTS / "rank_kills.json").exists():
        return
    result = read("rank_kills")
    found = result.results
    ranks = found["ranks"]
    text = f"{found['jobs_with_equal_bits']} of {found['jobs']} jobs, {found['kills']} kills"
    verdict = once(found["jobs_with_equal_bits"], text, at_least=found["jobs"])
    metric = f"jobs of {ranks} ranks, one killed or stopped at random moments, with the bits of an undisturbed one"
    yield Row("rank_kills", metric, "all", verdict, result)
    for key, how, target in (("recovery_s", "", 20.0), ("recovery_busy_s", ", beside other jobs", None)):
        if found[key] is not None:
            verdict = turns(found[key]["samples"], lambda number: f"{number:.1f} s", at_most=target)
            metric = f"{ranks} ranks through torchrun: from `kill -9` of one to the next step{how}"
            yield Row(f"rank_kills_{key}", metric, f"at most {target:g} s" if target else "-", verdict, result)
    stall = turns(found["stall_s"]["samples"], lambda number: f"{1000 * number:.1f} ms", at_most=0.05)
    yield Row("rank_kills_stall", "the same: stands still for a checkpoint", "at most 50 ms", stall, result)
    named = max(found["stopped_named_s"]["samples"])
    text = f"{named:.1f} s at most, of {len(found['stopped_named_s']['samples'])}"
    metric = f"{ranks} ranks: until one that is stopped (SIGSTOP) is named"
    yield Row("rank_kills_stopped", metric, "at most 30 s", once(named, text, at_most=30.0), result)


def sharded_checkpoint() -> Iterator[Row]:
    if not (RESULTS / "sharded_checkpoint.json").exists():
        return
    result = read("sharded_checkpoint")
    ranks = str(result.results["ranks"])
    saved, loaded = result.results["saved_by"][ranks], result.results["loaded_by"]
    verdict = turns(saved["stall_s"]["samples"], lambda number: f"{1000 * number:.0f} ms", at_most=0.05)
    metric = f"{ranks} ranks, 10M model: training stands still for a checkpoint"
    yield Row("sharded_checkpoint", metric, "at most 50 ms", verdict, result)
    for number, found in loaded.items():
        whole_s = found["verify_s"] + found["load_s"]
        text = f"{whole_s:.2f} s, of which checking {found['verify_s']:.2f} s"
        metric = f"its checkpoint checked and loaded by {number} rank{'s' * (number != '1')}"
        yield Row(f"sharded_resume_{number}", metric, "-", once(whole_s, text), result)


def world_one() -> Iterator[Row]:
    for result in read_all("world_one"):
        found = result.results
        metric = "step time of one process under torchrun against a plain run"
        verdict = turns(found["torchrun_to_plain"]["samples"], lambda number: f"{number:.3f}x", at_most=1.02)
        yield Row(result.name, metric, "at most 1.02x", verdict, result)
        equal = sum(found["losses_equal"])
        verdict = once(equal, f"{equal} of {len(found['losses_equal'])} runs", at_least=len(found["losses_equal"]))
        yield Row(f"{result.name}_losses", "the same: losses equal to the bit", "each run", verdict, result)
