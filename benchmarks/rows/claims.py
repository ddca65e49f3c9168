"""The rows of docs/benchmarks.md: each claim with its target, what was measured, and the verdict; from results/*.json.

A target names its side ("at most", "at least"). A change of loss may be as far below zero as it likes: lower is better.
A claim that needs a GPU is a row without a measurement until there is a result of one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

from benchmarks.common import RESULTS
from benchmarks.rows import (
    data_rows,
    export_rows,
    finetune_rows,
    first_hour_rows,
    mixing_rows,
    pipeline_rows,
    prune_rows,
    rank_rows,
    rank_run_rows,
    serve_rows,
)
from benchmarks.rows.claim_rows import Group, Result, Row, read, read_all
from benchmarks.rows.gpu_targets import TARGETS, judged, record_of
from benchmarks.rows.verdict import (
    MISS,
    NO_TARGET,
    NOT_RUN,
    PASS,
    UNDECIDED,
    Verdict,
    errors,
    once,
    seeds,
    turns,
)

GIB = 2**30


def groups() -> list[Group]:
    """All sections of the page."""
    gpu = "python -m benchmarks.gpu"
    return [
        Group("Speed", [*_throughput(), *_operations(), *gpu_rows("fp8"), *gpu_rows("paths")], gpu),
        Group("Pipelines", list(pipeline_rows.rows())),
        Group("Memory", [*_headlines(), *_other_memory(), *gpu_rows("memory")], gpu),
        Group("Numerics",
              [*_quality(), *_controller(), *_search(), *_search_predictions(), *_sync(), *gpu_rows("loss")], gpu),
        Group("Planner accuracy", [*_planned(), *_not_run("plan"), *_budgets(), *_solver(), *rank_rows.rows()],
              "python -m benchmarks.plans.plan_measured", PLANS),
        Group("Data builds", list(data_rows.rows()), note=DATA),
        Group("Mixing and the stream", list(mixing_rows.rows())),
        Group("Default job", [*first_hour_rows.default_job(), *first_hour_rows.muon()]),
        Group("Fine-tuning", list(finetune_rows.rows()),
              "python -m benchmarks.runs.finetune_memory, .generate"),
        Group("Exports", list(export_rows.rows()), note=EXPORTS),
        Group("Smaller models", list(prune_rows.rows()), COMPRESS, SMALLER),
        Group("Server of models", list(serve_rows.rows())),
        Group("Reliability", [*_replanning(), *_costs(), *first_hour_rows.kills(),
                              *rank_run_rows.rows(), *first_hour_rows.watch()]),
    ]  # fmt: skip


PLANS = (
    "The twelve runs of each machine are three models (decoder, mixture of experts, Hugging Face Llama) in BF16, in "
    "four settings each: as the recipe is, under a memory budget, with every layer recomputed, and layer by layer "
    "with 8-bit moments on disk."
)
EXPORTS = (
    "Of recipe `default` after 2,000 steps (1.28 bits per byte), each artefact in its own runtime, two threads. "
    "Speed and loss of INT8 are of one artefact, and so are those of 4 bits; what of a speed-up is the runtime's "
    "stands below it. The worst artefact counts for divergence, token ids and seconds, which include GPTQ's. The "
    "200 steps in 4 bits train the model further, so its loss is below the run's: its control is as many steps "
    "without rounding, which the benchmark runs with `--qat-steps` and this result has not. Measured before INT8 "
    "had room for clipped sums and before scales of 4 bits were searched."
)
COMPRESS = "python -m benchmarks.compress.compress_path RUN --work FOLDER"
SMALLER = (
    "Small runs, all from the same commands: decoders of 0.6M parameters on Python's library (fits) and of 1.3M on "
    "installed text, 200 steps (predictions) or 600, recovered for 120. Rises are of the loss in FP32; over as "
    "many more steps of the run, unless it says that nothing was trained."
)
DATA = (
    "The peer splits words at white space, as tilewright does, and has its own bands of MinHash; both sides' counts "
    "are in the result. The machine was busy with other programs, so processor time is the firmer number."
)
H200 = "NVIDIA H200"
TO_RUN = {
    "plan": (
        ("seconds per step, planned against measured: FP8, FP32, low-bit moments, smaller micro-batches", "within 15 %",
         "CPU"),
    ),
}  # fmt: skip
"""Claims that nothing has measured yet: metric, target, hardware."""


def _not_run(part: str) -> Iterator[Row]:
    for number, (metric, target, hardware) in enumerate(TO_RUN[part]):
        yield Row(f"{part} {number}", metric, target, Verdict("-", NOT_RUN), None, hardware)


def gpu_rows(group: str, folder: Path = RESULTS / "gpu") -> Iterator[Row]:
    """What `benchmarks.gpu` measures of a group, from the card's files where there are any."""
    for target in TARGETS[group]:
        record = record_of(target.part, folder)
        verdict = judged(target, record)
        result = Result(f"gpu/{target.part}", record) if record and verdict.status != NOT_RUN else None
        row = Row(target.key, target.metric, target.target, verdict, result, "" if result else H200)
        yield row if result else replace(row, verdict=Verdict("-", NOT_RUN))


def _times(number: float) -> str:
    return f"{number:.2f}x"


# ---- speed ----


def _throughput() -> Iterator[Row]:
    pairs = (
        ("fp32", "a plain PyTorch loop, Hugging Face Llama, FP32", 3.0),
        ("autocast", "the same loop under BF16 autocast", None),
        ("trainer", "Hugging Face `Trainer`: bf16, torch_compile, fused AdamW", 1.3),
        ("trainer_tuned", "that `Trainer` with tilewright's allocator and thread settings", None),
    )
    for result in read_all("throughput"):
        for key, text, least in pairs:
            found = result.results[f"tilewright over {key}"]
            target = f"at least {least:g}x" if least else "-"
            metric = f"tokens/s of a 47M decoder in `bf16_mixed`, against {text}"
            yield Row(f"{result.name}_{key}", metric, target, turns(found["samples"], _times, at_least=least), result)
    for result in read_all("fp8_step"):
        verdict = turns(result.results["ratio"]["samples"], _times, at_most=1.35)
        metric = "time of an `fp8_tile` step on a CPU against `bf16_mixed`, 1024 wide"
        yield Row(f"{result.name}_time", metric, "at most 1.35x", verdict, result)


def _operations() -> Iterator[Row]:
    result = read("cast_linear")
    slowest = max(result.results.values(), key=lambda case: case["cast_over_bf16"]["median"])["cast_over_bf16"]
    metric = f"time of a converted linear layer against torch's BF16 one, slowest of {len(result.results)} shapes"
    yield Row("cast", metric, "at most 1.05x", turns(slowest["samples"], _times, at_most=1.05), result)
    for result in read_all("fp8_cpu"):
        cases = {name: case["over_copy"] for name, case in result.results["copies"].items()}
        name = max(cases, key=lambda case: cases[case]["median"])
        metric = f"time to quantise or decode FP8 tiles against a memory copy, slowest of {len(cases)} cases ({name})"
        yield Row("fp8_copy", metric, "at most 3x", turns(cases[name]["samples"], _times, at_most=3), result)
    result = read("adam_states_cpu")
    times = result.results["speed"]["1 threads"]["tilewright 8bit moments, stochastic bf16 weights"]["wall"]
    verdict = turns(times["samples"], lambda number: f"{number:.1f} ns", at_most=10)
    yield Row("adam", "AdamW step per parameter, 8-bit moments, stochastic rounding", "at most 10 ns", verdict, result)
    texts = {
        "attention 8x8x512x64 bf16": "attention, forward and backward",
        "attention 8x8x512x64 bf16, packed documents": "attention over packed documents, forward and backward",
        "loss 4096x512x16384 bf16": "cross-entropy with its GEMMs, forward and backward",
    }
    for result in read_all("ops"):
        for case, text in texts.items():
            verdict = turns(result.results[case]["speedup"]["samples"], _times, at_least=1)
            yield Row(f"{result.name}_{text}", f"speed of {text}, against torch's own", "at least 1x", verdict, result)
    for result in read_all("generate"):
        speedup, same = result.results["speedup"], result.results["same_tokens"]
        metric = f"{result.results['new_tokens']} tokens by the default recipe's model, with the cache against without"
        verdict = turns(speedup["samples"], _times, at_least=10) if same else once(0, "other tokens", at_least=10)
        yield Row(result.name, metric, "at least 10x, the same tokens", verdict, result)


# ---- memory ----


def _headlines() -> Iterator[Row]:
    pairs = (
        ("bits8_disk", "standard", -0.7, 1.5, "8-bit moments on disk, layer by layer, against the standard executor"),
        ("bits8", "peer", 0, None, "recipe `slice_cpu` against the tuned loop"),
        ("bits8", "peer_in_backward", 0, None, "recipe `slice_cpu` against the loop tuned further"),
    )
    for result in read_all("headlines"):
        found = result.results["compiled"]
        for one, other, most, slower, text in pairs:
            key, pair = f"{one}_{other}", found[f"{one} against {other}"]
            target = f"at most {100 * most:.0f} %" if most else "less"
            first, second = (found[name]["peak_bytes"] - found[name]["base_bytes"] for name in (one, other))
            kinds = {"": pair["peak_change"], ", without the bytes of loaded libraries": first / second - 1}
            for kind, change in kinds.items():
                verdict = once(change, f"{100 * change:+.0f} %", at_most=most)
                yield Row(f"{key}{kind}", f"peak memory, 209M parameters, {text}{kind}", target, verdict, result)
            verdict = turns(pair["processor_s_ratio"]["samples"], _times, at_most=slower)
            target = f"at most {slower:g}x" if slower else "-"
            yield Row(f"{key} time", f"processor time, 209M parameters, {text}", target, verdict, result)


def _other_memory() -> Iterator[Row]:
    result = read("big_cpu_3b")
    found = result.results
    losses = f"held-out loss {found['held_out_before']:.2f} to {found['held_out_after']:.2f}"
    memory = found["machine_memory_bytes"] / GIB
    said = f"{losses} in {len(found['losses'])} steps, peak {found['peak_bytes'] / GIB:.1f} GiB (1 run)"
    metric = f"{found['parameters'] / 1e9:.1f}B parameters, all trained, on a CPU with {memory:.0f} GiB"
    fell = found["held_out_after"] - found["held_out_before"]
    yield Row("big", metric, "loss falls", once(fell, said, at_most=0), result)
    result = read("fp8_step_avx512")
    saving = -result.results["linear_input_saving_percent"]
    verdict = once(saving, f"{saving:.0f} % (exact)", at_most=-45)
    yield Row("inputs", "bytes of linear inputs kept for backward, `fp8_tile`", "at most -45 %", verdict, result)
    result = read("adam_states_cpu")
    states = result.results["speed"]["bytes per parameter, weight and states"]
    kept = states["tilewright 8bit moments, stochastic bf16 weights"]
    said = f"{kept:.2f} bytes (exact; FP32: {states['tilewright fp32 states']:.0f})"
    yield Row("states", "weight and Adam states per parameter, 8-bit moments", "-", Verdict(said, NO_TARGET), result)
    result = read("slices_cpu")
    for length in ("short", "long"):
        rows = result.results[length]["contenders"]
        share = rows["all"]["above_bytes_of_whole"]["median"] - 1
        tokens = result.results[length]["row_tokens"]
        verdict = Verdict(f"{100 * share:.0f} % (1 run)", NO_TARGET)
        metric = f"memory of a step with MLP, attention, loss and inputs in chunks, rows of {tokens:,} tokens"
        yield Row(f"chunks_{length}", metric, "-", verdict, result)
    rows = {name: row["above_bytes"]["median"] for name, row in rows.items()}
    more = [100 * (rows[name] / rows["all"] - 1) for name in rows if name.startswith("without ")]
    verdict = once(min(more), f"{min(more):+.0f} % to {max(more):+.0f} %", at_least=0)
    yield Row("chunks_each", "the same without one of the four, rows of 4,096 tokens", "more, each", verdict, result)
    result = read("tiers_cpu")
    for store, text in (("host", "memory"), ("disk", "disk")):
        verdict = Verdict(f"{100 * result.results[store]['hidden']:.0f} %", NO_TARGET)
        yield Row(f"hidden_{store}", f"wait for offload to {text} that prefetch hides", "-", verdict, result)


# ---- numerics ----


def _quality() -> Iterator[Row]:
    result = read("quality")
    noise = result.results["seed_noise_percent"]
    cases = (
        ("fp32", "FP32 against BF16", 0.5),
        ("fp8_tile", "`fp8_tile` against BF16", 0.25),
        ("fp8_hybrid", "`fp8_hybrid` (gradients in E5M2) against BF16", None),
        ("fp8_tensorwise", "`fp8_tensorwise` (one scale per tensor) against BF16", None),
        ("8bit_split24", "8-bit moments and 24-bit weights against FP32 ones", 0.5),
        ("8bit_stochastic", "8-bit moments and BF16 weights against FP32 ones", 0.5),
    )
    for mode, text, most in cases:
        gaps = list(result.results[mode]["gap_percent"].values())
        target = f"at most +{most:g} %" if most else "-"
        metric = f"held-out loss after {result.results['steps']:,} steps: {text}"
        yield Row(f"quality_{mode}", metric, target, seeds(gaps, noise, at_most=most), result)


def _controller() -> Iterator[Row]:
    result = read("dpaa")
    stress, calm = result.results["stress"], result.results["calm"]
    losses = [run["loss"] for run in stress["bf16_mixed"]["runs"].values()]
    noise = 100 * stdev(losses) / mean(losses)
    outliers = "held-out loss against BF16 where outliers make static FP8 fail"
    gaps = {mode: list(stress[mode]["gap_percent"].values()) for mode in ("fp8_tile", "controller")}
    yield Row("dpaa_without", f"{outliers}: without the controller", "-", seeds(gaps["fp8_tile"], noise), result)
    verdict = seeds(gaps["controller"], noise, at_most=0.5)
    yield Row("dpaa", f"{outliers}: with the precision controller", "at most +0.5 %", verdict, result)
    shares = [100 * run["share_8bit"] for run in calm["controller"]["runs"].values()]
    said = f"{min(shares):.1f} % (lowest of {len(shares)} seeds)"
    metric = "share of GEMM work that the controller keeps in FP8 on a healthy run"
    yield Row("calm", metric, "at least 95 %", once(min(shares), said, at_least=95), result)
    for result in read_all("dpaa_cost"):
        share = result.results["share_of_time_percent"]
        verdict = once(share, f"{share:.2f} %", at_most=1)
        metric = "training time that the controller's samples take"
        yield Row(f"{result.name}", metric, "at most 1 %", verdict, result)


def _search() -> Iterator[Row]:
    result = read("search_planted")
    base, every, ends, searched = (
        result.results[name] for name in ("all BF16", "all FP8", "first and last block BF16", "searched")
    )
    losses = list(base["loss"].values())
    noise = 100 * stdev(losses) / mean(losses)
    metric = "held-out loss of the searched policy where outliers hurt some layers"
    for other, text in ((every, "all in FP8"), (ends, "first and last layer in BF16")):
        gaps = [100 * (searched["loss"][seed] / other["loss"][seed] - 1) for seed in other["loss"]]
        yield Row(f"search {text}", f"{metric}, against {text}", "lower", _below_zero(gaps, noise), result)
    speed = searched["times_as_fast"] / ends["times_as_fast"]
    verdict = once(speed, f"{_times(speed)} (modelled, not timed)", at_least=1)
    metric = "speed of its linear layers against first and last layer in BF16"
    yield Row("search speed", metric, "at least 1x", verdict, result)
    predicted, measured = searched["predicted_percent"], searched["mean_gap_percent"]
    known = searched["standard_error_percent"] < abs(measured)
    within = 0.5 <= measured / predicted <= 2
    said = f"{predicted:+.2f} % predicted, {measured:+.2f} % measured ({len(losses)} seeds)"
    why = "" if known else f"standard error {searched['standard_error_percent']:.2f} %"
    status = (PASS if within else MISS) if known else UNDECIDED
    metric = "predicted change of loss of the searched policy against BF16"
    yield Row("search predicted", metric, "within 2x", Verdict(said, status, why), result)


def _search_predictions() -> Iterator[Row]:
    result = read("search_predictions")
    for seed, found in result.results["seeds"].items():
        for cost, text in (("token", "a cached token"), ("prefill", "a prefill")):
            error = 100 * found["table"]["largest error"][cost]
            metric = (
                f"latency of {text} by the table of `tilewright search`, largest error of 20 random shapes, seed {seed}"
            )
            verdict = once(error, f"{error:.1f} %", at_most=10)
            yield Row(f"search_table_{cost}_{seed}", metric, "at most 10 %", verdict, result)
        ranks = found["ranks"]
        metric = f"rank correlation of 12 shapes' predicted with their trained loss, seed {seed}"
        chance = f"chance {ranks['random'][1]:.2f} at most in 95 %"
        said = f"{ranks['predicted']:.2f} (FLOPs alone {ranks['flops']:.2f}, {chance})"
        verdict = once(ranks["predicted"], said, at_least=0.6)
        yield Row(f"search_ranks_{seed}", metric, "at least 0.6", verdict, result)


def _sync() -> Iterator[Row]:
    result = read("sync_loss")
    for way, found in result.results["against_bf16"].items():
        off, half = (100 * found["held_out"][name] for name in ("mean", "half"))
        said = f"{off:+.2f} % \u00b1 {half:.2f} % ({len(found['held_out']['off'])} pairs)"
        status = {"within": PASS, "beyond": MISS, "undecided": UNDECIDED}[found["held_out"]["verdict"]]
        why = "95 % interval wider than the bound" if status == UNDECIDED else ""
        metric = f"held-out loss after gradients sent as `{way}`, against `bf16`, 2,000 steps of a small transformer"
        control = way.startswith("bf16")
        target, verdict = ("-", Verdict(said, NO_TARGET)) if control else ("within 0.25 %", Verdict(said, status, why))
        yield Row(f"sync_{way}", metric, target, verdict, result)


def _below_zero(gaps: Sequence[float], noise: float) -> Verdict:
    """A loss that must be lower: as far below zero as seeds alone differ, or undecided."""
    verdict = seeds(gaps, None, at_most=0)
    if verdict.status == PASS and abs(mean(gaps)) < noise:
        return Verdict(verdict.text, UNDECIDED, f"seeds alone differ by {noise:.2f} %")
    return verdict


# ---- planner ----


def _planned() -> Iterator[Row]:
    texts = {
        "error_before": ("peak memory, planned against measured, before the first step", 10),
        "error_after": ("peak memory, planned against measured, after the first step", 5),
        "step_error": ("seconds per step, planned against measured, machine rates of the same minutes", 15),
    }
    for result in read_all("plan_measured"):
        cases = result.results["cases"].values()
        rated = all("step_s_planned" in case for case in cases)
        for key, (text, most) in texts.items():
            if key == "step_error" and not rated:
                text = "seconds per step, planned against measured, machine rates from before the run"
            found = [case[key] for case in cases if key in case]
            yield Row(f"{result.name}_{key}", text, f"within {most} %", errors(found, most), result)
    result = read("plan_accuracy")
    found = [case["error"] for case in result.results["cases"].values()]
    metric = "peak memory, planned against a dry run, shipped recipes and two Hugging Face models"
    yield Row("plan_accuracy", metric, "within 10 %", errors(found, 10), result)


def _budgets() -> Iterator[Row]:
    rivals = (
        ("torch", "torch's `activation_memory_budget`"),
        ("every_k", "every k-th layer recomputed"),
        ("full", "every layer recomputed"),
    )
    for result in read_all("plan_budget"):
        for key, text in rivals:
            found = [budget[key]["over planned"] for budget in result.results["budgets"] if key in budget]
            each = [turns(one["samples"], _times, at_least=1) for one in found]
            states = {verdict.status for verdict in each}
            status = MISS if MISS in states else UNDECIDED if UNDECIDED in states else PASS
            medians = sorted(one["median"] for one in found)
            said = f"{_times(medians[len(medians) // 2])} ({_times(medians[0])} to {_times(medians[-1])}, " \
                f"{len(found)} budgets)"  # fmt: skip
            open_ones = sum(verdict.status == UNDECIDED for verdict in each)
            why = f"{open_ones} of {len(each)} budgets within their noise" if status == UNDECIDED else ""
            metric = f"speed of the planned step at equal peak memory, against {text}"
            yield Row(f"{result.name}_{key}", metric, "at least 1x, each", Verdict(said, status, why), result)


def _solver() -> Iterator[Row]:
    result = read("plan_solver")
    cases = (("decoder_200m", "a 200M decoder", 3), ("decoder_42b", "the 42B decoder on an H200", 10))
    for key, text, most in cases:
        samples = result.results[key]["wall_s"]["samples"]
        verdict = turns(samples, lambda number: f"{number:.1f} s", at_most=most)
        yield Row(f"solver_{key}", f"time to plan {text}", f"at most {most} s", verdict, result)


# ---- reliability ----


def _replanning() -> Iterator[Row]:
    result = read("regroup")
    kinds = ("rows", "budget", "memory")
    equal = [result.results[kind]["bit_equal"] for kind in kinds]
    verdict = once(sum(equal), f"{sum(equal)} of {len(equal)} runs", at_least=len(equal))
    yield Row("replan", "losses equal to the bit while the memory plan changes", "each run", verdict, result)
    over = result.results["over_the_cut_budget"]
    verdict = once(over, f"{100 * over:+.1f} %", at_most=0.05)
    metric = "peak of a step against a memory budget that was cut by 30 % during the run"
    yield Row("cut", metric, "at most +5 %", verdict, result)


def _costs() -> Iterator[Row]:
    result = read("run_costs")
    found = result.results
    wait = found["data_wait_percent"]
    yield Row("wait", "step time spent waiting for data", "at most 1 %", once(wait, f"{wait:.3f} %", at_most=1), result)
    stall = turns(
        found["checkpoint_stall_percent_of_1000_steps"]["samples"], lambda number: f"{number:.3f} %", at_most=2
    )
    yield Row("stall", "training time lost to checkpoints, one per 1,000 steps", "at most 2 %", stall, result)
    verdict = once(found["recovery_s"], f"{found['recovery_s']:.1f} s (1 run)", at_most=15)
    yield Row("recovery", "from `kill -9` to the next step", "at most 15 s", verdict, result)
    verdict = turns(found["help_s"]["samples"], lambda number: f"{number:.2f} s", at_most=0.5)
    yield Row("help", "`tilewright --help`", "at most 0.5 s", verdict, result)
    for name, what in (("fuzz_data", "data files"), ("fuzz_config", "configurations")):
        result = read(name)
        found = result.results
        text = f"{found['failed']} of {found['cases']:,} generated {what}"
        verdict = once(found["failed"], text, at_most=0)
        yield Row(name, f"{what} with a traceback, a hang or an uncounted part", "none", verdict, result)


UNUSED = {
    "overlap": "layers and a link that wait as long as is said; the log has the numbers",
    "pipeline_ladder": "simulated, not measured; the log has the table, with the cases that fail",
    "pipeline_simulated": "simulated steps beside the clock: 27 runs of stages that wait; the log has the numbers",
    "published_meshes": "simulated, not measured: published runs beside the search; the how-to has the table",
    "mesh_search": "what a search takes of a core; processor seconds beside other jobs; the log has the numbers",
    "mesh_memory": "bytes of ranks of small runs beside the search; the log has the numbers",
    "mesh_exchanges": "seconds of six small meshes on two cores beside what was simulated; the log has the numbers",
    "fsdp_tracked": "bytes of a rank of 256 as torch's tracker counts them, beside the search; the log has the numbers",
    "mixing_costs": "counts and processor seconds of policies and of the stream's state; the how-to has the numbers",
    "data_scores_avx512": "noise that is made, in the text of one Python; processor time, beside other jobs",
    "encodings": "files of another project's tests, which are not in this repository; the changelog has the number",
    "golden_avx512": "reference values of a test, not a claim",
    "default_job_steps_avx512": "seconds per step, from which the rungs of the default job get their steps",
    "int8_linear_avx512": "measured beside other jobs on the same cores; the claim waits for a quiet machine",
    "default_peer_steps_avx512": "seconds per step, from which the peer of the default job gets its steps",
    "readers_avx512": "processor time of the readers alone, beside other jobs; the claim is on all stages of a build",
}
"""Result files without a row, and why."""


def by_key(found: Sequence[Group]) -> dict[str, Row]:
    """All rows by their keys."""
    return {row.key: row for group in found for row in group.rows}
