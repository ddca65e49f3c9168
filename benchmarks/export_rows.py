"""Rows of docs/benchmarks.md on exports of the default model. See `benchmarks.claims`."""

from collections.abc import Iterator
from typing import Any

from benchmarks.claim_rows import Result, Row, read_all
from benchmarks.verdict import Verdict, once

UNITS = {"share": "{:.2f}", "seconds": "{:.0f} s", "percent": "{:+.2f} %", "over": "{:.2f}x", "bytes": "{:.3f}x"}
"""How a value is written, by the first of these words in what it is of; all others are divergences."""
METHODS = {"rtn": "rounded to nearest", "gptq": "GPTQ", "qat": "200 more steps in 4 bits, the run as the teacher"}
"""How integers were found."""


def rows() -> Iterator[Row]:
    """What is wanted of exports, and the worst domain of 4 bits by each method."""
    for result in read_all("export_default"):
        for wanted in result.results["wanted"]:
            side = "at least" if "at least" in wanted else "at most"
            limit, value = wanted[side], wanted["value"]
            text = f"{_write(wanted['what'], value)} ({wanted['of'].split()[-1]})"
            verdict = once(value, text, **{side.replace(" ", "_"): limit})
            target = f"{side} {_write(wanted['what'], limit)}"
            yield Row(_key(wanted["what"]), f"export: {wanted['what']}", target, verdict, result)
        yield from _four_bits(result)


def _four_bits(result: Result) -> Iterator[Row]:
    for method, found in result.results["artefacts"].items():
        worst: dict[str, float] = {
            name: max(row["loss_change_percent"].values())
            for name, row in found.items()
            if "q4" in name or "4w" in name
        }
        text = ", ".join(f"{value:+.2f} % ({name})" for name, value in worst.items())
        what = f"export in 4 bits, {METHODS[method]}: worst domain's loss"
        yield Row(f"export_4_bits_{method}", what, "-", Verdict(text, "-"), result)


def _write(what: str, value: Any) -> str:
    words = what.replace(",", " ").split()
    kinds = ("bytes", "share", "seconds", "percent", "over")
    kind = next((kind for kind in kinds if kind in words), None)
    return UNITS[kind].format(value) if kind else f"{value:.1e}"


def _key(what: str) -> str:
    return "export_" + "".join(letter if letter.isalnum() else "_" for letter in what.lower())
