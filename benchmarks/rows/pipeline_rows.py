"""Rows of docs/benchmarks.md on pipelines: idle time of stages that wait, and of a recipe. See `claims`."""

from collections.abc import Iterator

from benchmarks.common import RESULTS
from benchmarks.rows.claim_rows import Row, read
from benchmarks.rows.verdict import once, turns

_CASES = (
    ("fixed count, 1f1b", None, "a fixed number of documents per micro-batch, 1F1B"),
    ("fixed count, zbv", None, "the same with schedule `zbv`"),
    ("balanced, 1f1b", None, "documents balanced by cost, 1F1B"),
    ("balanced, zbv", 0.15, "documents balanced by cost, `zbv`"),
    ("balanced, zbv, count chosen", 0.15, "the same, number of micro-batches chosen"),
    ("one rank 20 % slower: fixed count, 1f1b", None, "one rank 20 % slower: a fixed number, 1F1B"),
    ("one rank 20 % slower: balanced, zbv", None, "one rank 20 % slower: balanced, `zbv`"),
    ("one rank 20 % slower: balanced, zbv, layers split again", 0.18, "the same, layers split again by measured cost"),
)


def rows() -> Iterator[Row]:
    """All of them."""
    yield from _waiting_stages()
    yield from _recipe()
    yield from _real_layers()
    yield from _memory()
    yield from _parity()


def _parity() -> Iterator[Row]:
    """A row per mesh: its worst gradient, and how many of its cases have run."""
    if not (RESULTS / "pipeline_parity.json").exists():
        return
    result = read("pipeline_parity")
    for mesh in dict.fromkeys(name.partition(": ")[0] for name in result.results):
        found = {name: one for name, one in result.results.items() if name.startswith(f"{mesh}: ")}
        models = dict.fromkeys(name.partition(": ")[2].partition(", ")[0] for name in found)
        worst = max(one.get("beyond_fp32", one["error"]) for one in found.values())
        metric = f"worst gradient of stages against one process, {mesh}: {', '.join(models)}, each with its schedules"
        text = f"{worst:.1e} ({len(found)} cases of model and schedule)"
        yield Row(f"pipeline_parity {mesh}", metric, "at most 2e-6", once(worst, text, at_most=2e-6), result)


def _memory() -> Iterator[Row]:
    if not (RESULTS / "pipeline_memory.json").exists():
        return
    result = read("pipeline_memory")
    for name, found in result.results.items():
        if name == "stolen":
            continue
        metric = "growth of a rank's highest resident set after step 50, 500 steps of ragged micro-batches: "
        verdict = turns(
            [rank["highest"] for rank in found["ranks"]], lambda share: f"{100 * share:.1f} %", at_most=0.02
        )
        yield Row(f"pipeline_memory {name}", metric + name, "at most 2 %", verdict, result)


def _real_layers() -> Iterator[Row]:
    if not (RESULTS / "pipeline_layers.json").exists():
        return
    result = read("pipeline_layers")
    for name, found in result.results.items():
        if not name.endswith(" ranks"):
            continue
        clock = "the wall clock, a core per rank"
        if found["decides"] == "on_paper":
            clock = "processor seconds of passes, run again on paper with a core per rank"
        for case, ratio in found["ratio"].items():
            verdict = turns(ratio["samples"], lambda ratio: f"{ratio:.2f}", at_most=0.8)
            metric = "step of real layers on log-normal documents, over 1F1B with a fixed number of documents per "
            metric += f"micro-batch, {name}: {case}; {clock}"
            yield Row(f"pipeline_layers ratio, {name}, {case}", metric, "at most 0.8", verdict, result)
        for case, model in found["cost_model"]["cases"].items():
            metric = f"error of the cost model on a micro-batch in a stage, mean of a step, after 20, {name}: {case}"
            errors = model["error_after_20_steps"]["samples"]
            verdict = turns(errors, lambda error: f"{100 * error:.1f} %", at_most=0.1)
            yield Row(f"pipeline_layers error, {name}, {case}", metric, "at most 10 %", verdict, result)
        metric = f"losses of all, greatest relative difference, {name}"
        verdict = turns([found["loss_off"]], lambda off: f"{off:.1e}", at_most=1e-6)
        yield Row(f"pipeline_layers loss, {name}", metric, "at most 1e-6", verdict, result)


def _recipe() -> Iterator[Row]:
    if not (RESULTS / "pipeline_documents.json").exists():
        return
    result = read("pipeline_documents")
    for name, runs in result.results.items():
        samples = [share for run in runs for share in run["idle"]["samples"]]
        metric = f"idle time of recipe pipeline_cpu on whole documents, 4 processes on two cores: {name}"
        yield Row(
            f"pipeline_documents {name}", metric, "-", turns(samples, lambda share: f"{100 * share:.1f} %"), result
        )


def _waiting_stages() -> Iterator[Row]:
    if not (RESULTS / "pipeline_idle.json").exists():
        return
    result = read("pipeline_idle")
    for name, target, text in _CASES:
        verdict = turns(result.results[name]["idle"]["samples"], lambda share: f"{100 * share:.1f} %", at_most=target)
        metric = f"idle time of 4 ranks whose stages wait their cost, log-normal documents: {text}"
        wanted = f"at most {100 * target:g} %" if target else "-"
        yield Row(f"pipeline_idle {name}", metric, wanted, verdict, result)
    plan = result.results["plan"]
    verdict = turns(plan["milliseconds"]["samples"], lambda number: f"{number:.1f} ms", at_most=20.0)
    metric = f"processor time of placing {plan['documents']:,} documents on 8 data ranks"
    yield Row("pipeline_idle plan", metric, "at most 20 ms", verdict, result)
