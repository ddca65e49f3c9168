"""The README's table of measured numbers, made from results/*.json alone.

python -m benchmarks.readme_table           # rewrite README.md
python -m benchmarks.readme_table --check   # fail where README.md is not what the results say
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS

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
    ("tilewright_bf16_moments", '+ `optim.moments = "bf16"`'),
    ("tilewright_recompute", '+ `train.activation_checkpoint = "full"`'),
)


def read(name: str) -> dict[str, Any] | None:
    """One result file, None where it is not there."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def ladder(record: dict[str, Any]) -> list[str]:
    """Throughput and peak memory, one row a step."""
    results, machine = record["results"], record["machine"]
    base = results["fp32"]["median"]
    lines = [
        f"One decoder of 47M parameters, batch 8 x 512, on {machine['cores']} cores of {machine['device']} with AMX, "
        f"torch {machine['versions']['torch']}, transformers {machine['versions']['transformers']}; medians of "
        f"{len(results['fp32']['samples'])} turns taken in alternation (`{record['command']}`). Memory is the whole "
        "process's peak, compiler included.",
        "",
        "| | tokens/s | against FP32 | peak memory |",
        "|---|---:|---:|---:|",
    ]
    for key, text in STEPS:
        row = results[key]
        lines.append(
            f"| {text} | {row['median']:,.0f} | {row['median'] / base:.2f}x | {row['peak_bytes'] / 2**30:.2f} GiB |"
        )
    return lines


def claims() -> list[str]:
    """The other promises and what was measured."""
    rows = []
    if record := read("loss_parity"):
        result = record["results"]
        gaps = ", ".join(f"{gap:+.2f}" for gap in result["gap_percent"]["samples"])
        text = f"{gaps} % ({len(result['fp32']['samples'])} seeds, {result['steps']} steps)"
        rows.append(("held-out loss, BF16 against FP32", "within 0.5 %", text, record))
    if record := read("run_costs"):
        result = record["results"]
        stall = result["checkpoint_stall_percent_of_1000_steps"]["max"]
        rows += [
            ("waiting for data", "under 1 % of step time", f"{result['data_wait_percent']:.2f} %", record),
            ("checkpoint stall, every 1000 steps", "under 2 %", f"{stall:.3f} %", record),
            ("kill -9 to the next step", "under 15 s", f"{result['recovery_s']:.1f} s", record),
            ("`tilewright --help`", "under 0.5 s", f"{result['help_s']['median']:.2f} s", record),
        ]
    if record := read("plan_accuracy"):
        errors = [100 * case["error"] for case in record["results"]["cases"].values()]
        text = f"{min(errors):+.1f} % to {max(errors):+.1f} % over {len(errors)} runs"
        rows.append(("planned against measured peak memory", "within 10 %", text, record))
    lines = ["", "| | promised | measured | by |", "|---|---|---|---|"]
    return lines + [f"| {what} | {want} | {got} | `{record['command']}` |" for what, want, got, record in rows]


def table() -> str:
    """The README's section between its marks."""
    record = read("throughput_cpu")
    lines = [*(ladder(record) if record else ["No results are committed yet."]), *claims()]
    return "\n".join([START, *lines, END])


def main() -> None:
    """Rewrite the README's section, or check it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    text = README.read_text()
    before, rest = text.split(START)
    wanted = before + table() + rest.split(END, 1)[1]
    if check:
        sys.exit(
            0 if text == wanted else "README.md is not what benchmarks/results say: python -m benchmarks.readme_table"
        )
    README.write_text(wanted)


if __name__ == "__main__":
    main()
