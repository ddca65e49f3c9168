"""The README's table of measured numbers, made from results/*.json alone.

python -m benchmarks.readme_table           # rewrite README.md
python -m benchmarks.readme_table --check   # fail where README.md is not what the results say
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, keep_section, place
from benchmarks.headline_table import table as headlines
from benchmarks.precision_search import ENDS, EVERYTHING, SEARCHED
from benchmarks.quality import BASE

README = Path(__file__).parent.parent / "README.md"
START, END = (
    "<!-- ladder: made by `python -m benchmarks.readme_table` from benchmarks/results/*.json -->",
    "<!-- /ladder -->",
)
STEPS = (
    ("fp32", "plain PyTorch loop, Hugging Face Llama, FP32"),
    ("autocast", "the same under BF16 autocast"),
    ("trainer", "Hugging Face `Trainer`, bf16, torch_compile, fused AdamW"),
    ("trainer_tuned", "the same with huge pages and short spinning, which tilewright sets for itself"),
    ("tilewright_eager", "**tilewright** decoder, `bf16_mixed`, not compiled"),
    ("tilewright", "+ layers compiled (the default)"),
    ("tilewright_fp8", "`fp8_tile` instead: on a CPU the same operand bits, multiplied in BF16"),
    ("tilewright_bf16_moments", '+ `optim.moments = "bf16"`'),
    ("tilewright_recompute", '+ `train.activation_checkpoint = "full"`'),
)


def read(name: str) -> dict[str, Any] | None:
    """One result file, None where it is not there."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def ladder(records: list[dict[str, Any]]) -> list[str]:
    """Throughput on each machine and peak memory, one row per step."""
    first = records[0]
    versions, turns = first["machine"]["versions"], len(first["results"]["fp32"]["samples"])
    lines = [
        f"One decoder of 47M parameters, batch 8 x 512, torch {versions['torch']}, transformers "
        f"{versions['transformers']}; medians of {turns} turns taken "
        f"in alternation (`{first['command']}`). Memory is the whole process's peak, compiler included.",
        "",
        "| | " + " | ".join(f"tokens/s, {place(record)} | against FP32" for record in records) + " | peak memory |",
        "|---" + "|---:" * (2 * len(records) + 1) + "|",
    ]
    for key, text in STEPS:
        if not any(key in record["results"] for record in records):
            continue
        cells = []
        for record in records:
            row = record["results"].get(key)
            base = record["results"]["fp32"]["median"]
            cells += [f"{row['median']:,.0f}", f"{row['median'] / base:.2f}x"] if row else ["", ""]
        known = next(record["results"][key] for record in records if key in record["results"])
        lines.append(f"| {text} | {' | '.join(cells)} | {known['peak_bytes'] / 2**30:.2f} GiB |")
    return lines


QUALITY = (
    ("fp32", "held-out loss, FP32 against BF16", "within 0.5 %"),
    ("fp8_tile", "held-out loss, `fp8_tile` against BF16", "within 0.25 %"),
    ("fp8_hybrid", "held-out loss, `fp8_hybrid` against BF16", "for comparison"),
    ("fp8_tensorwise", "held-out loss, `fp8_tensorwise` against BF16", "for comparison"),
    ("8bit", "held-out loss, 8-bit moments against FP32 ones", "within 0.5 %"),
    ("8bit_split24", "held-out loss, 8-bit moments and 24-bit weights against FP32 ones", "within 0.5 %"),
    ("8bit_stochastic", "held-out loss, 8-bit moments and BF16 weights against FP32 ones", "within 0.5 %"),
)


def _quality_row(record: dict[str, Any], mode: str, what: str, want: str) -> tuple[str, str, str, dict] | None:
    """Gaps seed by seed; None where the mode was not run beside BF16."""
    result = record["results"]
    gaps = result.get(mode, {}).get("gap_percent", {}).values()
    if not gaps:
        return None
    noise = result.get("seed_noise_percent")
    beside = f"; seeds alone differ by {noise:.2f} %" if noise is not None else ""
    # Runs are kept, so the last call made some of them only; this one makes what is missing of all.
    command = f"python -m benchmarks.quality --rows {result['rows_a_step']} --modes {BASE} {mode}"
    text = f"{_signed(gaps)} % ({result['steps']} steps{beside})"
    return what, want, text, record | {"command": command}


def _controller_rows() -> list[tuple[str, str, str, dict]]:
    """What the precision controller does under stress and in calm, what it costs, and what a search finds."""
    rows = []
    if record := read("dpaa"):
        result = record["results"]
        gaps = {mode: _signed(result["stress"][mode]["gap_percent"].values()) for mode in ("fp8_tile", "controller")}
        text = f"without it {gaps['fp8_tile']} %; with it {gaps['controller']} %"
        what = "loss against BF16 where FP8 alone fails (outliers), precision controller"
        rows.append((what, "at most 0.5 % more", text, record))
        shares = [100 * run["share_8bit"] for run in result["calm"]["controller"]["runs"].values()]
        what = "share of the matmuls' work that the controller leaves in 8 bits where nothing is wrong"
        rows.append((what, "at least 95 %", f"{min(shares):.1f} % or more", record))
    if record := read("dpaa_cost_amx") or read("dpaa_cost_cpu"):
        text = f"{record['results']['share_of_time_percent']:.2f} %"
        rows.append(("precision controller: its evidence, of the time of training", "at most 1 %", text, record))
    if record := read("search_planted"):
        found = {name: row for name, row in record["results"].items() if isinstance(row, dict)}
        texts = [
            f"{name.replace('and last block', 'and last layer')} {_signed(found[name]['gap_percent'])} % at "
            f"{found[name]['times_as_fast']:.2f}x"
            for name in (EVERYTHING, ENDS, SEARCHED)
        ]
        what = "loss against BF16, and speed of linear matmuls, of policies where outliers hurt some layers"
        rows.append((what, "searched: less than all FP8, faster than the habit", "; ".join(texts), record))
    return rows


def _headline_rows() -> list[tuple[str, str, str, dict]]:
    """Memory and time of the low-memory recipes against standard training and the tuned loops, layers compiled."""
    on_disk = "layer-major, 8-bit moments on disk, against the standard executor"
    pairs = (
        ("bits8_disk", "standard", "-70 % at 1.5x", on_disk),
        ("bits8", "peer", "less memory", "recipe `slice_cpu` against the tuned loop"),
        ("bits8", "peer_in_backward", "less memory", "recipe `slice_cpu` against the loop tuned further"),
        ("layer_major", "recomputed", "at most 1.05x", "layer-major without offload against full checkpointing"),
    )
    rows = []
    for record, _ in headline_results():
        for one, other, wanted, what in pairs:
            found = record["results"].get("compiled", {}).get(f"{one} against {other}")
            if found:
                slower = found["processor_s_ratio"]["median"]
                text = f"{100 * found['peak_change']:+.0f} % memory at {slower:.2f}x the processor time"
                rows.append((f"{what}, 209M parameters, {place(record)}", wanted, text, record))
    return rows


def headline_results() -> list[tuple[dict[str, Any], dict[str, Any] | None]]:
    """Of each machine the result of `benchmarks.headlines contest`, and that of `cap` where there is one."""
    names = [path.stem for path in sorted(RESULTS.glob("headlines_*.json")) if "_cap_" not in path.name]
    return [(read(name), read(name.replace("headlines_", "headlines_cap_"))) for name in names]


def _signed(gaps: Iterable[float]) -> str:
    return ", ".join(f"{gap:+.2f}" for gap in gaps)


def claims() -> list[str]:
    """The other promises and what was measured."""
    rows = []
    if record := read("quality"):
        rows += [row for case in QUALITY if (row := _quality_row(record, *case))]
    if record := read("fp8_step_avx512"):
        result = record["results"]
        text = f"{result['ratio']['median']:.2f}x"
        rows.append(("`fp8_tile` step on a CPU against BF16, 1024 wide", "at most 1.35x", text, record))
        saving = f"-{result['linear_input_saving_percent']:.0f} %"
        rows.append(("bytes of linear inputs kept for backward, `fp8_tile`", "-45 %", saving, record))
    rows += _controller_rows()
    if record := read("adam_states_cpu"):
        times = record["results"]["speed"]["1 threads"]["tilewright 8bit moments, stochastic bf16 weights"]
        text = f"{times['wall']['median']:.1f} ns, one thread"
        rows.append(("AdamW with 8-bit moments and stochastic rounding, a parameter", "at most 10 ns", text, record))
    rows += _headline_rows()
    if record := read("big_cpu_3b"):
        result = record["results"]
        losses = f"held-out loss {result['held_out_before']:.2f} to {result['held_out_after']:.2f}"
        text = f"{len(result['losses'])} steps, {losses}, peak {result['peak_bytes'] / 2**30:.1f} GiB"
        memory = f"{result['machine_memory_bytes'] / 2**30:.0f} GiB"
        what = f"{result['parameters'] / 1e9:.1f}B parameters, all trained, on a CPU with {memory}"
        rows.append((what, "3 steps, loss falling", text, record))
    if record := read("run_costs"):
        result = record["results"]
        stall = result["checkpoint_stall_percent_of_1000_steps"]["max"]
        rows += [
            ("waiting for data", "under 1 % of step time", f"{result['data_wait_percent']:.2f} %", record),
            ("checkpoint stall, every 1000 steps", "under 2 %", f"{stall:.3f} %", record),
            ("kill -9 to the next step", "under 15 s", f"{result['recovery_s']:.1f} s", record),
            ("`tilewright --help`", "under 0.5 s", f"{result['help_s']['median']:.2f} s", record),
        ]
    for path in sorted(RESULTS.glob("plan_measured_*.json")):
        record = json.loads(path.read_text())
        units = "with AMX" if "amx_bf16" in record["machine"]["cpu_features"] else "without 16-bit units"
        cases = record["results"]["cases"].values()
        memory = "planned against measured peak memory, {} the first step"
        told = [("error_before", memory.format("before"), 10), ("error_after", memory.format("after"), 5)]
        if all("step_s_planned" in case for case in cases):
            told.append(("step_error", "planned against measured seconds of a step, rates of the same minutes", 15))
        for key, what, most in told:
            errors = [100 * case[key] for case in cases if key in case]
            text = f"{min(errors):+.1f} % to {max(errors):+.1f} % over {len(errors)} runs"
            rows.append((f"{what}, CPU {units}", f"within {most} %", text, record))
    lines = ["", "| | promised | measured | by |", "|---|---|---|---|"]
    return lines + [f"| {what} | {want} | {got} | `{record['command']}` |" for what, want, got, record in rows]


def table() -> str:
    """The README's section between its marks."""
    records = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("throughput_*.json"))]
    lines = ladder(records) if records else ["No results are committed yet."]
    for record, cap in headline_results():
        lines += ["", *headlines(record, cap)]
    lines += claims()
    return "\n".join([START, *lines, END])


def main() -> None:
    """Rewrite the README's section, or check it."""
    keep_section(README, START, END, table(), "python -m benchmarks.readme_table")


if __name__ == "__main__":
    main()
