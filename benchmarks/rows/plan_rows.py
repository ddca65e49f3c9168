"""Rows of docs/benchmarks.md on plans, of one process and of ranks, and on pipelines. See `benchmarks.rows.claims`."""

from collections.abc import Iterator

from benchmarks.rows.claim_rows import MIB, Claim, Result, Row, not_run, of, row
from benchmarks.rows.verdict import MISS, PASS, UNDECIDED, Verdict, errors, turns


def plans() -> Iterator[Row]:
    yield from of("plan_measured_*", _measured)
    yield from of("plan_accuracy", _dry_runs)
    metric = "seconds per step, planned against measured: FP8, FP32, low-bit moments, smaller micro-batches"
    yield not_run("plan 0", metric, "within 15 %")
    yield from of("plan_budget_*", _budgets)
    yield from of("plan_solver", *(
        Claim(f"solver_{key}", f"time to plan {text}", target, f"{key}/wall_s", "{:.1f} s")
        for key, text, target in (("decoder_200m", "a 200M decoder", "at most 3 s"),
                                  ("decoder_42b", "the 42B decoder on an H200", "at most 10 s"))
    ))  # fmt: skip
    yield from of("rank_fill", _filled)
    yield from of("rank_memory", _ranks)


def _measured(result: Result) -> Iterator[Row]:
    cases = result.results["cases"].values()
    rated = all("step_s_planned" in case for case in cases)
    rates = "machine rates of the same minutes" if rated else "machine rates from before the run"
    texts = {
        "error_before": ("peak memory, planned against measured, before the first step", 10),
        "error_after": ("peak memory, planned against measured, after the first step", 5),
        "step_error": (f"seconds per step, planned against measured, {rates}", 15),
    }
    for key, (text, most) in texts.items():
        found = [case[key] for case in cases if key in case]
        yield Row(f"{result.name}_{key}", text, f"within {most} %", errors(found, most), result)


def _dry_runs(result: Result) -> Iterator[Row]:
    found = [case["error"] for case in result.results["cases"].values()]
    metric = "peak memory, planned against a dry run, shipped recipes and two Hugging Face models"
    yield Row("plan_accuracy", metric, "within 10 %", errors(found, 10), result)


def _budgets(result: Result) -> Iterator[Row]:
    rivals = (
        ("torch", "torch's `activation_memory_budget`"),
        ("every_k", "every k-th layer recomputed"),
        ("full", "every layer recomputed"),
    )
    for key, text in rivals:
        found = [budget[key]["over planned"] for budget in result.results["budgets"] if key in budget]
        states = [turns(one["samples"], "{:.2f}x".format, at_least=1).status for one in found]
        status = MISS if MISS in states else UNDECIDED if UNDECIDED in states else PASS
        medians = sorted(one["median"] for one in found)
        said = f"{medians[len(medians) // 2]:.2f}x ({medians[0]:.2f}x to {medians[-1]:.2f}x, {len(found)} budgets)"
        open_ones = f"{states.count(UNDECIDED)} of {len(states)} budgets within their noise"
        verdict = Verdict(said, status, open_ones if status == UNDECIDED else "")
        metric = f"speed of the planned step at equal peak memory, against {text}"
        yield Row(f"{result.name}_{key}", metric, "at least 1x, each", verdict, result)


def _filled(result: Result) -> Iterator[Row]:
    whole = result.results["largest_parameter_bytes"] / MIB
    for world, measured in result.results["worlds"].items():
        most = measured["worst_beside_bytes"] / MIB
        metric = (
            f"memory of each of {world} ranks beside its shards as it draws or reads them, {whole:.0f} MiB embedding"
        )
        yield row(result, f"rank_fill_{world}", metric, "< 16 MiB", most, "{:.1f} MiB at most", at_most=16)


def _ranks(result: Result) -> Iterator[Row]:
    for world, cases in result.results["worlds"].items():
        worst = 100 * max(case["worst"] for case in cases.values())
        metric = (
            f"parameters, gradients and optimizer states of each of {world} ranks against their plan, "
            f"worst of {len(cases)} cases"
        )
        said = f"off by {worst:.3f} % at most"
        yield row(result, f"rank_memory_{world}", metric, "within 5 %", worst, said=said, at_most=5)
        name, first = next(iter(cases.items()))  # the others' processes keep pages of those before
        peaks = [100 * (one["measured_peak"] / one["planned_peak"] - 1) for one in first["ranks"]]
        said = f"{min(peaks):+.0f} % to {max(peaks):+.0f} % (1 run)"
        metric = f"peak memory of each of {world} ranks against its plan, 10M model, {name}"
        yield row(result, f"rank_peak_{world}", metric, "-", max(peaks), said=said)


# ---- pipelines ----

WAITING = (
    ("fixed count, 1f1b", "-", "a fixed number of documents per micro-batch, 1F1B"),
    ("fixed count, zbv", "-", "the same with schedule `zbv`"),
    ("balanced, 1f1b", "-", "documents balanced by cost, 1F1B"),
    ("balanced, zbv", "at most 15 %", "documents balanced by cost, `zbv`"),
    ("balanced, zbv, count chosen", "at most 15 %", "the same, number of micro-batches chosen"),
    ("one rank 20 % slower: fixed count, 1f1b", "-", "one rank 20 % slower: a fixed number, 1F1B"),
    ("one rank 20 % slower: balanced, zbv", "-", "one rank 20 % slower: balanced, `zbv`"),
    ("one rank 20 % slower: balanced, zbv, layers split again", "at most 18 %",
     "the same, layers split again by measured cost"),
)  # fmt: skip


def pipelines() -> Iterator[Row]:
    metric = "idle time of 4 ranks whose stages wait their cost, log-normal documents: "
    yield from of("pipeline_idle", *(
        Claim(f"pipeline_idle {name}", metric + text, target, f"{name}/idle", "{:.1f} %", 100)
        for name, target, text in WAITING
    ), _placing)  # fmt: skip
    yield from of("pipeline_documents", _recipe)
    yield from of("pipeline_layers", _real_layers)
    yield from of("pipeline_memory", _growth)
    yield from of("pipeline_parity", _parity)


def _placing(result: Result) -> Iterator[Row]:
    plan = result.results["plan"]
    metric = f"processor time of placing {plan['documents']:,} documents on 8 data ranks"
    yield row(result, "pipeline_idle plan", metric, "at most 20 ms", plan["milliseconds"], "{:.1f} ms")


def _recipe(result: Result) -> Iterator[Row]:
    for name, runs in result.results.items():
        samples = [100 * share for run in runs for share in run["idle"]["samples"]]
        metric = f"idle time of recipe pipeline_cpu on whole documents, 4 processes on two cores: {name}"
        yield row(result, f"pipeline_documents {name}", metric, "-", samples, "{:.1f} %")


def _real_layers(result: Result) -> Iterator[Row]:
    for name, found in result.results.items():
        if not name.endswith(" ranks"):
            continue
        clock = "the wall clock, a core per rank"
        if found["decides"] == "on_paper":
            clock = "processor seconds of passes, run again on paper with a core per rank"
        for case, ratio in found["ratio"].items():
            metric = "step of real layers on log-normal documents, over 1F1B with a fixed number of documents per "
            metric += f"micro-batch, {name}: {case}; {clock}"
            yield row(result, f"pipeline_layers ratio, {name}, {case}", metric, "at most 0.8", ratio, "{:.2f}")
        for case, model in found["cost_model"]["cases"].items():
            metric = f"error of the cost model on a micro-batch in a stage, mean of a step, after 20, {name}: {case}"
            off = [100 * error for error in model["error_after_20_steps"]["samples"]]
            yield row(result, f"pipeline_layers error, {name}, {case}", metric, "at most 10 %", off, "{:.1f} %")
        metric, off = f"losses of all, greatest relative difference, {name}", [found["loss_off"]]
        yield row(result, f"pipeline_layers loss, {name}", metric, "at most 1e-6", off, "{:.1e}")


def _growth(result: Result) -> Iterator[Row]:
    for name, found in result.results.items():
        if name != "stolen":
            metric = f"growth of a rank's highest resident set after step 50, 500 steps of ragged micro-batches: {name}"
            samples = [100 * rank["highest"] for rank in found["ranks"]]
            yield row(result, f"pipeline_memory {name}", metric, "at most 2 %", samples, "{:.1f} %")


def _parity(result: Result) -> Iterator[Row]:
    """A row per mesh: its worst gradient, and how many of its cases have run."""
    for mesh in dict.fromkeys(name.partition(": ")[0] for name in result.results):
        found = {name: one for name, one in result.results.items() if name.startswith(f"{mesh}: ")}
        models = dict.fromkeys(name.partition(": ")[2].partition(", ")[0] for name in found)
        worst = max(one.get("beyond_fp32", one["error"]) for one in found.values())
        metric = f"worst gradient of stages against one process, {mesh}: {', '.join(models)}, each with its schedules"
        said = f"{worst:.1e} ({len(found)} cases of model and schedule)"
        yield row(result, f"pipeline_parity {mesh}", metric, "at most 2e-6", worst, said=said)
