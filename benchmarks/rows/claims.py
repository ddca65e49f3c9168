"""The rows of docs/benchmarks.md: each claim with its target, what was measured, and the verdict; from results/*.json.

A target names its side ("at most", "at least"). A change of loss may be as far below zero as it likes: lower is better.
A claim that needs a GPU is a row without a measurement until there is a result of one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.common import RESULTS
from benchmarks.rows import compress_rows, data_rows, numerics_rows, plan_rows, run_rows, speed_rows
from benchmarks.rows.claim_rows import Group, Result, Row
from benchmarks.rows.gpu_targets import TARGETS, judged, record_of
from benchmarks.rows.verdict import NOT_RUN, Verdict


def groups() -> list[Group]:
    """All sections of the page."""
    gpu = "python -m benchmarks.gpu"
    return [
        Group("Speed", [*speed_rows.speed(), *gpu_rows("fp8"), *gpu_rows("paths")], gpu),
        Group("Pipelines", list(plan_rows.pipelines())),
        Group("Memory", [*speed_rows.memory(), *gpu_rows("memory")], gpu),
        Group("Numerics", [*numerics_rows.rows(), *gpu_rows("loss")], gpu),
        Group("Planner accuracy", list(plan_rows.plans()), "python -m benchmarks.plans.plan_measured", PLANS),
        Group("Data builds", list(data_rows.builds()), note=DATA),
        Group("Mixing and the stream", list(data_rows.stream())),
        Group("Default job", list(run_rows.default_job())),
        Group("Fine-tuning", list(run_rows.finetuning()), "python -m benchmarks.runs.finetune_memory, .generate"),
        Group("Exports", list(compress_rows.exports()), note=EXPORTS),
        Group("Smaller models", list(compress_rows.smaller()), COMPRESS, SMALLER),
        Group("Server of models", list(run_rows.server())),
        Group("Reliability", list(run_rows.reliability())),
    ]


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


def gpu_rows(group: str, folder: Path = RESULTS / "gpu") -> Iterator[Row]:
    """What `benchmarks.gpu` measures of a group, from the card's files where there are any."""
    for target in TARGETS[group]:
        record = record_of(target.part, folder)
        verdict = judged(target, record)
        result = Result(f"gpu/{target.part}", record) if record and verdict.status != NOT_RUN else None
        row = Row(target.key, target.metric, target.target, verdict, result, "" if result else H200)
        yield row if result else replace(row, verdict=Verdict("-", NOT_RUN))


UNUSED = {
    "overlap": "layers and a link that wait as long as is said; the log has the numbers",
    "pipeline_ladder": "simulated, not measured; the log has the table, with the cases that fail",
    "pipeline_simulated": "simulated steps beside the clock: 27 runs of stages that wait; the log has the numbers",
    "published_meshes": "simulated, not measured: published runs beside the search; the how-to has the table",
    "mesh_search": "what a search takes of a core; processor seconds beside other jobs; the log has the numbers",
    "mesh_memory": "bytes of ranks of small runs beside the search; the log has the numbers",
    "mesh_memory_8": "the same on eight ranks; experts are fuller on some ranks than even routing",
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
