"""Rows of docs/benchmarks.md on exports of the default model. See `benchmarks.rows.claims`."""

from collections.abc import Iterator
from typing import Any

from benchmarks.compress.export_default import wanted
from benchmarks.rows.claim_rows import Result, Row, read_all
from benchmarks.rows.verdict import NOT_RUN, Verdict, once

UNITS = {"share": "{:.2f}", "seconds": "{:.0f} s", "percent": "{:+.2f} %", "over": "{:.2f}x", "bytes": "{:.3f}x"}
"""How a value is written, by the first of these words in what it is of; all others are divergences."""
METHODS = {
    "rtn": "rounded to nearest",
    "gptq": "GPTQ",
    "qat": "200 more steps in 4 bits, the run as the teacher",
    "control": "200 more steps without rounding, the run as the teacher (F16)",
}
"""How integers were found."""


def rows() -> Iterator[Row]:
    """What is wanted of exports, and the worst domain of 4 bits by each method."""
    for result in read_all("export_default"):
        for each in wanted(result.results["artefacts"], result.results["baselines"]):
            yield _row(each, result)
        yield from _four_bits(result)


def _row(wanted: dict[str, Any], result: Result) -> Row:
    value, side = wanted["value"], next((side for side in ("at least", "at most") if side in wanted), None)
    target = "-" if side is None else f"{side} {_write(wanted['what'], wanted[side])}"
    if value is None:
        return Row(_key(wanted["what"]), f"export: {wanted['what']}", target, Verdict("-", NOT_RUN), None, "CPU")
    text = f"{_write(wanted['what'], value)} ({wanted['of'].split()[-1]})"
    verdict = Verdict(text, "-") if side is None else once(value, text, **{side.replace(" ", "_"): wanted[side]})
    return Row(_key(wanted["what"]), f"export: {wanted['what']}", target, verdict, result)


def _four_bits(result: Result) -> Iterator[Row]:
    for method, found in result.results["artefacts"].items():
        worst: dict[str, float] = {
            name: max(row["loss_change_percent"].values())
            for name, row in found.items()
            if "q4" in name or "4w" in name or method == "control"
        }
        text = ", ".join(f"{value:+.2f} % ({name})" for name, value in worst.items())
        what = f"export{'' if method == 'control' else ' in 4 bits'}, {METHODS[method]}: worst domain's loss"
        yield Row(f"export_4_bits_{method}", what, "-", Verdict(text, "-"), result)


def _write(what: str, value: Any) -> str:
    words = what.replace(",", " ").split()
    kinds = ("bytes", "share", "seconds", "percent", "over")  # the first of these that is among the words
    kind = next((kind for kind in kinds if kind in words), None)
    return UNITS[kind].format(value) if kind else f"{value:.1e}"


def _key(what: str) -> str:
    return "export_" + "".join(letter if letter.isalnum() else "_" for letter in what.lower())
