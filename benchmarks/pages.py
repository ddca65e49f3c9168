"""Writes docs/benchmarks.md and the tables of README.md and other pages from the committed results.

python -m benchmarks.pages           # write them
python -m benchmarks.pages --check   # fail where they are not what the results say
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import parser_of, place, with_section, write_pages
from benchmarks.rows.claim_rows import GIB, REMOVED, Group, Result, Row, program_of, read, read_all
from benchmarks.rows.claims import UNUSED, by_key, groups
from benchmarks.rows.headline_table import table as contest
from benchmarks.rows.speed_rows import share_table
from benchmarks.rows.verdict import MISS, NO_TARGET, NOT_RUN, PASS, UNDECIDED

ROOT = Path(__file__).parent.parent
README, PAGE = ROOT / "README.md", ROOT / "docs" / "benchmarks.md"
DEFAULT_JOB = ROOT / "docs" / "explanation" / "default-job.md"
SECONDS = ROOT / "docs" / "how-to" / "where-seconds-go.md"
COMMAND = "python -m benchmarks.pages"
STEPS = (
    ("fp32", "plain PyTorch loop, Hugging Face Llama, FP32"),
    ("autocast", "the same under BF16 autocast"),
    ("trainer", "Hugging Face `Trainer`, bf16, torch_compile, fused AdamW"),
    ("trainer_tuned", "the same with tilewright's allocator and thread settings"),
    ("tilewright_eager", "**tilewright**, `bf16_mixed`, not compiled"),
    ("tilewright", "**tilewright**, `bf16_mixed` (the default)"),
    ("tilewright_fp8", "**tilewright**, `fp8_tile`: emulated on a CPU, so slower than BF16"),
    ("tilewright_bf16_moments", '**tilewright**, `bf16_mixed`, `optim.moments = "bf16"`'),
    ("tilewright_recompute", '**tilewright**, `bf16_mixed`, `train.activation_checkpoint = "full"`'),
)
SPEED_ROWS = ("fp32", "autocast", "trainer", "tilewright", "tilewright_fp8")
MEMORY_ROWS = (
    ("autocast", "plain PyTorch loop, FP32 AdamW, BF16 autocast"),
    ("peer", "tuned loop: pure BF16, recomputed layers, loss in chunks, torchao's 8-bit AdamW"),
    ("standard", "**tilewright**, standard executor, FP32 AdamW"),
    ("bits8_disk", "**tilewright**, recipe `slice_cpu` with the optimizer states on disk"),
)
HEADLINES = (
    ("throughput_amx_trainer", "Faster than Hugging Face `Trainer` on a CPU (bf16, compiled, fused AdamW)"),
    ("bits8_disk_standard", "Less peak memory layer by layer than standard training, 209M parameters"),
    ("plan_measured_amx_error_before", "Peak memory predicted before the first step"),
    ("quality_fp8_tile", "Held-out loss of `fp8_tile` against BF16"),
    ("dpaa", "Held-out loss with the precision controller, on a model where static FP8 fails"),
    ("export_int8_over_compiled_bf16__1_tokens", "ONNX INT8 export against compiled BF16, one token"),
    ("export_fp32_in_the_runtime_over_compiled_bf16__1_tokens", "its runtime in FP32 against compiled BF16, one token"),
    ("export_gguf_f16_over_compiled_bf16__1_tokens", "GGUF F16 export against compiled BF16, one token"),
    (
        "export_4_bits__worst_domain_s_loss__over_that_of_as_many_unrounded_steps__percent",
        "4-bit export after 200 steps in 4 bits: loss of the worst domain over that of 200 unrounded steps",
    ),
    ("memory 0", "42B parameters trained on one H200, tokens/s"),
)
COMMANDS = {
    "quality": "python -m benchmarks.numerics.quality --rows 1 --seeds 3 --modes bf16_mixed fp32 fp8_tile fp8_hybrid "
    "fp8_tensorwise 8bit_split24 8bit_stochastic",
    "regroup": "python -m benchmarks.runs.regroup",
}
"""Of results that several calls filled: the call that makes whatever is missing."""
STATUSES = {
    PASS: "the target holds, and so does the 95 % interval of the measurement",
    MISS: "the interval is on the wrong side of the target",
    UNDECIDED: "the target is inside the interval, or smaller than the noise between seeds",
    NOT_RUN: "nothing has been measured yet",
    NO_TARGET: "for comparison, without a target",
}


def shown(status: str) -> str:
    """A status in a table: a miss stands out."""
    return f"**{status}**" if status == MISS else status


def tally(found: Sequence[Group]) -> str:
    """How many rows have each status."""
    counts = Counter(row.verdict.status for group in found for row in group.rows)
    said = [f"{counts[status]} {status}" for status in STATUSES if status != NO_TARGET]
    return f"{', '.join(said)}, {counts[NO_TARGET]} without a target"


# ---- the page ----


def page(found: Sequence[Group]) -> str:
    """docs/benchmarks.md."""
    lines = [
        "# Benchmarks",
        "",
        f"<!-- made by `{COMMAND}` from benchmarks/results/*.json: do not edit -->",
        "",
        "Every number of the project, with its target, spread, machine and date. Nothing has been run on a GPU yet.",
        f"The rows: {tally(found)}.",
        "",
        "A row is a claim. The measurement is a median with its range and the number of samples: *n* runs in",
        "alternation, seeds, or single runs. A target names its side. The statuses:",
        "",
        *(f"- {shown(status)}: {text}." for status, text in STATUSES.items()),
        "",
        "The interval is that of the median by order statistics (the whole range below six samples), or that of the",
        "mean over seeds by Student's t. The machines were shared with other programs, so times vary; runs that are",
        "compared took turns. Programs of studies that have given their answer are no longer kept: the last commit",
        "that has one is named beside its command.",
        "",
        "## What misses its target",
        "",
        *(f"- {group.title}: {row.metric}" for group, row in missed(found)),
    ]
    for group in found:
        lines += ["", f"## {group.title}", "", *section(group)]
        lines += ["", *ladder(read_all("throughput_*"))] if group.title == "Speed" else []
        lines += ["", *contests()] if group.title == "Memory" else []
        lines += [line for table in group.tables for line in ("", *table.splitlines())]
    lines += ["", "## Results without a row", ""]
    lines += [f"- {_link(name)}: {why}{_last(read(name).program)}." for name, why in UNUSED.items()]
    return "\n".join(lines) + "\n"


def missed(found: Sequence[Group]) -> list[tuple[Group, Row]]:
    """Rows that miss their target."""
    return [(group, row) for group in found for row in group.rows if row.verdict.status == MISS]


def section(group: Group) -> list[str]:
    """The table of a group, and the commands that measured it."""
    lines = [
        "| metric | target | median (min to max, samples) | hardware | date | status |",
        "|---|---|---|---|---|---|",
    ]
    for row in group.rows:
        status = shown(row.verdict.status) + (f": {row.verdict.why}" if row.verdict.why else "")
        lines.append(f"| {row.metric} | {row.target} | {row.verdict.text} | {row.where} | {row.date} | {status} |")
    if group.note:
        lines += ["", group.note]
    results = {row.result.name: row.result for row in group.rows if row.result}
    lines += ["", "Commands and results:", ""]
    for result in results.values():
        command = COMMANDS.get(result.name, result.record["command"])
        lines.append(f"- `{command}`: {_link(result.name)}, commit {result.record['commit']}{_last(result.program)}")
    if group.to_run:
        lines.append(f"- `{group.to_run}`: the rows that were not run{_last(program_of(group.to_run))}")
    return lines


def _last(program: str) -> str:
    """Where the program is, if it is not here."""
    return f"; its program: commit {REMOVED[program]}" if program in REMOVED else ""


def _link(name: str) -> str:
    return f"[{name}.json](../benchmarks/results/{name}.json)"


def ladder(results: Sequence[Result]) -> list[str]:
    """Throughput on each machine and peak memory, one row per loop."""
    first = results[0].record
    versions, count = first["machine"]["versions"], len(first["results"]["fp32"]["samples"])
    places = " | ".join(f"tokens/s, {place(result.record)} | against FP32" for result in results)
    lines = [
        "### Throughput of each loop",
        "",
        f"One decoder of 47M parameters, batch 8 x 512, torch {versions['torch']}, transformers "
        f"{versions['transformers']}; medians of {count} runs in alternation. Peak memory is that of the whole "
        "process, compiler included.",
        "",
        f"| | {places} | peak memory |",
        "|---" + "|---:" * (2 * len(results) + 1) + "|",
    ]
    for key, text in STEPS:
        cells = []
        for result in results:
            row, base = result.results.get(key), result.results["fp32"]["median"]
            cells += [f"{row['median']:,.0f}", f"{row['median'] / base:.2f}x"] if row else ["", ""]
        known = next(result.results[key] for result in results if key in result.results)
        lines.append(f"| {text} | {' | '.join(cells)} | {known['peak_bytes'] / GIB:.2f} GiB |")
    return lines


def contests() -> list[str]:
    """Memory and time of the low-memory loops."""
    lines = ["### Memory and time of each loop"]
    for result in read_all("headlines_*"):
        lines += ["", *contest(dict(result.record), None)]
    return lines


# ---- README ----


def speed() -> list[str]:
    """Five rows of one machine."""
    result = read("throughput_amx")
    base = result.results["fp32"]["median"]
    lines = [
        f"A decoder of 47M parameters, batch 8 x 512, {_where(result)}; median and range of "
        f"{len(result.results['fp32']['samples'])} runs in alternation.",
        "",
        "| | tokens/s | against FP32 | peak memory |",
        "|---|---:|---:|---:|",
    ]
    texts = dict(STEPS)
    for key in SPEED_ROWS:
        row = result.results[key]
        rate = f"{row['median']:,.0f} ({row['min']:,.0f} to {row['max']:,.0f})"
        lines.append(f"| {texts[key]} | {rate} | {row['median'] / base:.2f}x | {row['peak_bytes'] / GIB:.2f} GiB |")
    return lines


def memory() -> list[str]:
    """Four rows of one machine."""
    result = read("headlines_avx512")
    found = result.results["compiled"]
    count = len(found["standard"]["step_s"]["samples"])
    lines = [
        f"A decoder of 209M parameters, {result.results['tokens_per_step']:,} tokens per step, layers compiled, "
        f"{_where(result)}; {count} runs in alternation.",
        "",
        "| | peak of the process | of which libraries | processor seconds per step |",
        "|---|---:|---:|---:|",
    ]
    for key, text in MEMORY_ROWS:
        row: Any = found[key]
        cells = [f"{row[name] / GIB:.2f} GiB" for name in ("peak_bytes", "base_bytes")]
        lines.append(f"| {text} | {' | '.join(cells)} | {row['processor_s']['median']:.1f} |")
    return lines


def headlines(found: Sequence[Group]) -> list[str]:
    """Six claims, how many there are of each kind, and where the misses are."""
    rows = by_key(found)
    lines = ["| claim | target | result | status |", "|---|---|---|---|"]
    for key, text in HEADLINES:
        row: Row = rows[key]
        group = next(group for group in found if row in group.rows)
        status = f"[{row.verdict.status}]({_anchor(group.title)})"
        why = f" ({row.verdict.why})" if row.verdict.why else ""
        lines.append(f"| {text} | {row.target} | {row.verdict.text} | {status}{why} |")
    misses = Counter(group.title for group, _ in missed(found))
    lines += ["", f"All rows of [docs/benchmarks.md](docs/benchmarks.md): {tally(found)}."]
    named = ", ".join(f"[{title}]({_anchor(title)}) {count}" for title, count in misses.items())
    return [*lines, f"[The misses]({_anchor('What misses its target')}): {named}."]


def _anchor(title: str) -> str:
    return f"docs/benchmarks.md#{title.lower().replace(' ', '-')}"


def default_job() -> list[str]:
    """The rungs of the default job on each machine, and the peer."""
    lines = []
    for result in read_all("default_job_[!s]*"):  # without the seconds of their steps
        rungs = {key: row for key, row in result.results.items() if isinstance(row, dict)}
        lines = [*lines, ""] if lines else []
        lines += [
            f"{_where(result)}; mean of the runs (a seed on a text each) and their range.",
            "",
            "| | steps | seconds of training | bits per byte | runs |",
            "|---|---:|---:|---:|---:|",
        ]
        for row in rungs.values():
            spread = f"{row['mean']:.3f} ({row['min']:.3f} to {row['max']:.3f})"
            taken = f"{row['seconds']:.0f}" if row["seconds"] else ""
            lines.append(f"| {row['words']} | {row['steps']:,} | {taken} | {spread} | {len(row['samples'])} |")
    return lines


def _where(result: Result) -> str:
    return f"{place(result.record)}, {result.record['date']}"


def readme(text: str, found: Sequence[Group]) -> str:
    """README.md with its tables written again, each between its marks."""
    for name, lines in (("speed", speed()), ("memory", memory()), ("claims", headlines(found))):
        text = with_section(text, name, lines, COMMAND)
    return text


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--check", action="store_true", help="fail where a page is not up to date")
    check = parser.parse_args().check
    found = groups()
    wanted = {
        PAGE: page(found),
        README: readme(README.read_text(encoding="utf-8"), found),
        DEFAULT_JOB: with_section(DEFAULT_JOB.read_text(encoding="utf-8"), "ladder", default_job(), COMMAND),
        SECONDS: with_section(SECONDS.read_text(encoding="utf-8"), "shares", share_table(), COMMAND),
    }
    write_pages(wanted, check, COMMAND)


if __name__ == "__main__":
    main()
