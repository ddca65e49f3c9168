"""Rows of docs/benchmarks.md on runs: the default job, fine-tuning, what kills and waits cost, `watch`, the server. See
`benchmarks.rows.claims`."""

from collections.abc import Iterator, Sequence
from statistics import mean

from benchmarks.rows.claim_rows import GIB, Claim, Result, Row, bound_of, of, row
from benchmarks.rows.verdict import UNDECIDED, Verdict, interval_of_mean, status_at_most


def default_job() -> Iterator[Row]:
    yield from of("default_job_[!s]*", _default_job)
    yield from of("default_peer_[!s]*", _default_peer)
    metric = "a step with Muon against one with AdamW, default model"
    yield from of("muon_step_*", Claim("{result}", metric, "at most 1.15x", "muon_over_adamw"))


def _default_job(result: Result) -> Iterator[Row]:
    found = result.results
    metric = "bits per byte of held-out text after the default job, mean over runs of other seeds or texts"
    bits = found["default"]["samples"]
    yield from _of_seeds(result, f"{result.name}_bits", metric, "at most 2.0 (aim 1.85)", bits)
    metric = "bits per byte by which Muon is ahead of AdamW, tuned, at equal seconds"
    gaps = found.get("adamw", {}).get("above_default", [])
    yield from _of_seeds(result, f"{result.name}_muon", metric, "ahead", gaps, at_least=0.0)


def _default_peer(result: Result) -> Iterator[Row]:
    metric = "bits per byte by which the default job is ahead of Hugging Face `Trainer` with its AdamW tuned, at equal "
    gaps = result.results["ahead"]["samples"]
    yield from _of_seeds(result, result.name, metric + "seconds", "at least 0.15", gaps)


def _of_seeds(
    result: Result, key: str, metric: str, target: str, samples: Sequence[float], **bound: float
) -> Iterator[Row]:
    """The mean over runs (a seed on a text each) against a bound; what scatters is the mean. One run says nothing."""
    if len(samples) < 2:
        return
    low, high = interval_of_mean(samples)
    said = f"{mean(samples):.3f} ({min(samples):.3f} to {max(samples):.3f}, {len(samples)} runs)"
    ((side, limit),) = (bound or bound_of(target)).items()
    status = status_at_most(low, high, limit) if side == "at_most" else status_at_most(-high, -low, -limit)
    why = f"95 % interval {low:.3f} to {high:.3f}" if status == UNDECIDED else ""
    yield Row(key, metric, target, Verdict(said, status, why), result)


# ---- fine-tuning ----

FINETUNED = {
    "full": ("all parameters trained layer by layer, 8-bit moments in memory", 4),
    "full_disk": ("all parameters trained layer by layer, 8-bit moments on disk", 4),
    "lora_fp8": ("adapters on an FP8 base", 2),
}
"""Words, and GiB at most."""
PEERS = {"trainer": "Hugging Face `Trainer`", "in_backward": "a loop with the optimizer in backward"}


def finetuning() -> Iterator[Row]:
    yield from of("finetune_memory_*", _finetune_memory)
    yield from of("finetune_quality", _answers)
    metric = "512 tokens with the key/value cache against without, default model"
    generation = Claim("{result}", metric, "at least 10x", "speedup")
    yield from of("generate_*", generation, absent=[("generate 0", metric, "at least 10x")])


def _finetune_memory(result: Result) -> Iterator[Row]:
    """The whole process' peak, and against the peers where they ran too."""
    found, shape = result.results, "a model of Qwen3-0.6B's shape"
    for name, (words, limit) in FINETUNED.items():
        key = f"{result.name}_{name}"
        if name in found:
            peak = max(found[name]["peak_bytes"]["samples"]) / GIB
            metric = f"fine-tuning {shape}, {words}: peak of the whole process"
            yield row(result, key, metric, f"at most {limit} GiB", peak, "{:.2f} GiB")
        for peer, words_of in PEERS.items():
            pair = found.get(f"{name} against {peer}")
            if pair is None or name == "lora_fp8":
                continue
            metric = f"{words}: peak against {words_of}"
            yield row(result, f"{key}_{peer}_memory", metric, "at most 0.70x", pair["peak_ratio"])
            if len(pair["step_s_ratio"]["samples"]) > 1:  # one turn beside other work says nothing of seconds
                metric = f"{words}: seconds of a step against {words_of}"
                yield row(result, f"{key}_{peer}_time", metric, "at most 1.20x", pair["step_s_ratio"])
    if "start" in found:
        metric = f"`tilewright finetune` on {shape}: seconds from the command to its first step"
        yield row(result, f"{result.name}_start", metric, "at most 60 s", found["start"]["first_step_s"], "{:.0f} s")


def _answers(result: Result) -> Iterator[Row]:
    """Held-out answers of a synthetic task."""
    for how, words in (("full", "all parameters"), ("lora", "LoRA"), ("lora_fp8", "LoRA on an FP8 base")):
        gap, share = result.results["points_to_plain_full"][how], result.results["mean"][how]
        metric = f"held-out answers right after a fine-tune, {words}, against a plain FP32 loop"
        said = f"{gap:+.1f} points ({share:.1f} %)"
        yield row(result, f"{result.name}_{how}", metric, "at least -1 point", gap, said=said)


# ---- reliability ----


def reliability() -> Iterator[Row]:
    yield from of("regroup", _regrouped)
    yield from of(
        "run_costs",
        Claim("wait", "step time spent waiting for data", "at most 1 %", "data_wait_percent", "{:.3f} %"),
        Claim("stall", "training time lost to checkpoints, one per 1,000 steps", "at most 2 %",
              "checkpoint_stall_percent_of_1000_steps", "{:.3f} %"),
        Claim("recovery", "from `kill -9` to the next step", "at most 15 s", "recovery_s", "{:.1f} s (1 run)"),
        Claim("help", "`tilewright --help`", "at most 0.5 s", "help_s", "{:.2f} s"),
    )  # fmt: skip
    for name, what in (("fuzz_data", "data files"), ("fuzz_config", "configurations")):
        yield from of(name, lambda result, name=name, what=what: _fuzzed(result, name, what))
    yield from of("kills", _kills)
    yield from of("rank_kills", _rank_kills)
    yield from of("sharded_checkpoint", _sharded)
    yield from of("world_one_*", _world_one)
    yield from of("watch", _watch)


def _regrouped(result: Result) -> Iterator[Row]:
    equal = [result.results[kind]["bit_equal"] for kind in ("rows", "budget", "memory")]
    metric, said = "losses equal to the bit while the memory plan changes", f"{sum(equal)} of {len(equal)} runs"
    yield row(result, "replan", metric, "each run", sum(equal), said=said, at_least=len(equal))
    metric = "peak of a step against a memory budget that was cut by 30 % during the run"
    yield row(result, "cut", metric, "at most +5 %", 100 * result.results["over_the_cut_budget"], "{:+.1f} %")


def _fuzzed(result: Result, name: str, what: str) -> Iterator[Row]:
    failed, cases = result.results["failed"], result.results["cases"]
    metric, said = f"{what} with a traceback, a hang or an uncounted part", f"{failed} of {cases:,} generated {what}"
    yield row(result, name, metric, "none", failed, said=said, at_most=0)


def _kills(result: Result) -> Iterator[Row]:
    found = result.results
    same, said = found["runs_with_equal_bits"], f"{found['runs_with_equal_bits']} of {found['runs']} runs"
    metric, said = (
        "runs killed at random moments whose bits are those of an undisturbed one",
        f"{said}, {found['kills']} kills",
    )
    yield row(result, "kills", metric, "all", same, said=said, at_least=found["runs"])
    most = found["interval_s"] + max(found["write_s"]["samples"]) + found["slowest_step_s"]
    metric = "work lost per kill, with a checkpoint each half second"
    target = f"at most {most:.2f} s: the interval, a write and a step"
    yield row(result, "kills_lost", metric, target, found["lost_most_s"], "{:.2f} s at most", at_most=most)


def _rank_kills(result: Result) -> Iterator[Row]:
    found, ranks = result.results, result.results["ranks"]
    same, jobs = found["jobs_with_equal_bits"], found["jobs"]
    metric = f"jobs of {ranks} ranks, one killed or stopped at random moments, with the bits of an undisturbed one"
    said = f"{same} of {jobs} jobs, {found['kills']} kills"
    yield row(result, "rank_kills", metric, "all", same, said=said, at_least=jobs)
    for key, how, target in (("recovery_s", "", "at most 20 s"), ("recovery_busy_s", ", beside other jobs", "-")):
        if found[key] is not None:
            metric = f"{ranks} ranks through torchrun: from `kill -9` of one to the next step{how}"
            yield row(result, f"rank_kills_{key}", metric, target, found[key], "{:.1f} s")
    stalls = [1000 * stall for stall in found["stall_s"]["samples"]]
    metric = "the same: stands still for a checkpoint"
    yield row(result, "rank_kills_stall", metric, "at most 50 ms", stalls, "{:.1f} ms")
    named = found["stopped_named_s"]["samples"]
    metric, said = (
        f"{ranks} ranks: until one that is stopped (SIGSTOP) is named",
        f"{max(named):.1f} s at most, of {len(named)}",
    )
    yield row(result, "rank_kills_stopped", metric, "at most 30 s", max(named), said=said)


def _sharded(result: Result) -> Iterator[Row]:
    ranks = str(result.results["ranks"])
    stalls = [1000 * stall for stall in result.results["saved_by"][ranks]["stall_s"]["samples"]]
    metric = f"{ranks} ranks, 10M model: training stands still for a checkpoint"
    yield row(result, "sharded_checkpoint", metric, "at most 50 ms", stalls, "{:.0f} ms")
    for number, found in result.results["loaded_by"].items():
        whole_s = found["verify_s"] + found["load_s"]
        metric = f"its checkpoint checked and loaded by {number} rank{'s' * (number != '1')}"
        said = f"{whole_s:.2f} s, of which checking {found['verify_s']:.2f} s"
        yield row(result, f"sharded_resume_{number}", metric, "-", whole_s, said=said)


def _world_one(result: Result) -> Iterator[Row]:
    metric = "step time of one process under torchrun against a plain run"
    yield row(result, result.name, metric, "at most 1.02x", result.results["torchrun_to_plain"], "{:.3f}x")
    equal = result.results["losses_equal"]
    metric, said = "the same: losses equal to the bit", f"{sum(equal)} of {len(equal)} runs"
    yield row(result, f"{result.name}_losses", metric, "each run", sum(equal), said=said, at_least=len(equal))


def _watch(result: Result) -> Iterator[Row]:
    found = result.results
    metric = "`watch` of 4 runs of 10,000 steps: first view"
    yield row(result, "watch_view", metric, "at most 1 s", found["first_view_s"], "{:.2f} s")
    if "browser_first_view_s" in found:
        metric = "the same, until a headless browser has drawn the curves"
        yield row(result, "watch_browser", metric, "at most 1 s", found["browser_first_view_s"], "{:.2f} s")
    size = max(found["resident_bytes"]["median"], found["resident_bytes_after"]) / 1e6
    yield row(result, "watch_memory", "the same: resident memory", "at most 100 MB", size, "{:.0f} MB")
    metric = "the same: share of a core while nothing happens, with a page open"
    yield row(result, "watch_idle", metric, "at most 1 %", found["idle_percent_with_a_page"], "{:.2f} %")


# ---- the server of models ----


def server() -> Iterator[Row]:
    yield from of("serve_batch_*", _together)
    metric = (
        "speed at which a cached token of 150 million parameters in BF16 reads its weights, over that of a sum of them"
    )
    reads = Claim("{result}", metric, "at least 0.5", "bfloat16 token/rows_share_of_sum", "{:.2f}")
    yield from of("row_linear_*", reads, absent=[("row_linear", metric, "at least 0.5")])
    yield from of("serve", _requests)


def _together(result: Result) -> Iterator[Row]:
    found = result.results["eight_tokens_per_processor_s_of_one"]
    metric = "tokens per processor second of 8 clients side by side against one, 150 million parameters in FP32"
    said = f"{found['median']:.2f}x ({found['min']:.2f} to {found['max']:.2f})"
    yield row(result, "serve_batch", metric, "at least 3", found["median"], said=said)


def _requests(result: Result) -> Iterator[Row]:
    found, mib = result.results, result.results["server_mib"]
    refused = found["malformed"] - len(found["malformed_not_4xx"])
    metric = "200 requests of 8 clients answered and 50 malformed ones refused with 4xx, of 250"
    said = f"{found['answered']} answered, {refused} refused"
    yield row(result, "serve_requests", metric, "at least 250", found["answered"] + refused, said=said)
    growth = mib["250"] / mib["50"]
    metric, said = (
        "memory of the server after 250 requests against after 50",
        f"{growth:.2f}x ({mib['50']:.0f} to {mib['250']:.0f} MiB)",
    )
    yield row(result, "serve_memory", metric, "-", growth, said=said)
