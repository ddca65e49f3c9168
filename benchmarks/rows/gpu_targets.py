"""What each part of `benchmarks.gpu` has to reach, and whether it did: a row per number, from the parts' files.

The targets were written down before anything was measured. What a card can do at best is in `benchmarks.plans.floors`.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.rows.verdict import MISS, NO_TARGET, NOT_RUN, PASS, Verdict, errors, once, turns

GIB = 2**30
Found = Mapping[str, Any]


@dataclass(frozen=True)
class Target:
    """A number that a part measures.

    Args:
        key: names the row.
        part: of `benchmarks.gpu`, and its file.
        metric: what is measured.
        target: in words; `-` where the number is for comparison.
        judge: from the part's record; raises KeyError or ValueError where the part did not get that far.
    """

    key: str
    part: str
    metric: str
    target: str
    judge: Callable[[Found], Verdict]


def _results(record: Found) -> Found:
    """Of the one result file that the part wrote."""
    (written,) = record["results"].values()
    return written["results"]


def _times(number: float) -> str:
    return f"{number:.2f}x"


# ---- correctness ----


def _tests(record: Found) -> Verdict:
    last = next(line for line in reversed(record["output_tail"].splitlines()) if " in " in line)
    passed = "passed" in last and record["exit_code"] == 0
    return Verdict(last.strip("= "), PASS if passed else NOT_RUN if record["exit_code"] == 0 else MISS)


# ---- FP8 ----


def _chosen(case: Found, number: str) -> float:
    """Of the candidate that a run would take: the first one that runs here."""
    return next(row[number] for row in case.values() if isinstance(row, dict) and number in row)


def _gemm_speedups(record: Found) -> list[float]:
    cases = (case for name, case in _results(record).items() if "tokens" in name)
    return [_chosen(case, "speedup_with_quantize") for case in cases]


def _gemm_least(record: Found) -> Verdict:
    found = _gemm_speedups(record)
    return once(min(found), f"{min(found):.2f}x to {max(found):.2f}x, {len(found)} layers", at_least=1.4)


def _gemm_best(record: Found) -> Verdict:
    best = max(_gemm_speedups(record))
    return once(best, _times(best), at_least=1.6)


def _quantize(record: Found) -> Verdict:
    cases = [case for case in _results(record).values() if isinstance(case, dict) and "floor_ms" in case]
    least = min(_chosen(case, "share_of_copy") for case in cases)
    return once(least, f"{100 * least:.0f} % in the slowest of {len(cases)} cases", at_least=0.85)


def _attention(record: Found) -> Verdict:
    cases = {name: row for name, row in _results(record).items() if isinstance(row, dict) and "tilewright" in row}
    plain = next(row for name, row in cases.items() if name.startswith("bfloat16, 1 "))
    packed = {name: row for name, row in cases.items() if name.startswith("bfloat16") and row is not plain}
    slowest = max(row["tilewright"]["median"] for row in packed.values()) / plain["tilewright"]["median"]
    share = max(row["tilewright"]["peak_bytes"] / row["all_pairs_bytes"] for row in cases.values())
    status = PASS if slowest <= 1.1 and share < 0.5 else MISS
    return Verdict(f"{_times(slowest)} of rows of one document, memory {100 * share:.0f} % of all pairs", status)


def _step(record: Found) -> Verdict:
    ours = _results(record)["fp8_tile"]
    speed, memory = ours["speedup"], ours["peak_share"]
    status = PASS if speed >= 1.3 and memory < 1 else MISS
    return Verdict(f"{_times(speed)}, {100 * memory:.0f} % of its memory", status)


def _beside_torchao(record: Found) -> Verdict:
    found = _results(record)
    theirs = min(row["step"]["median"] for name, row in found.items() if name.startswith("torchao") and "step" in row)
    return Verdict(_times(theirs / found["fp8_tile"]["step"]["median"]), NO_TARGET)


# ---- memory ----


def _largest(record: Found) -> Verdict:
    found = _results(record)
    losses, device, host = found["losses"], found["device_peak_bytes"] / GIB, found["host_peak_bytes"] / GIB
    falls = mean(losses[-5:]) < mean(losses[:5])
    met = found["tokens_per_s"] >= 1100 and len(losses) >= 20 and falls and device <= 130 and host <= 100
    text = f"{found['tokens_per_s']:,.0f}, {device:.0f} and {host:.0f} GiB, {len(losses)} steps"
    return Verdict(f"{text}, loss {losses[0]:.2f} to {losses[-1]:.2f}", PASS if met else MISS)


def _largest_peak(record: Found) -> Verdict:
    found = _results(record)
    return errors([found["planned"]["peak_bytes"] / found["device_peak_bytes"] - 1], 10)


def _largest_time(record: Found) -> Verdict:
    found = _results(record)
    return errors([found["planned"]["step_s"] / median(found["step_s"][1:]) - 1], 15)


def _limit(record: Found) -> Verdict:
    found = _results(record)
    return Verdict(f"{found['parameters'] / 1e9:.1f}B in {found['layers']} layers", NO_TARGET)


def _offload(record: Found) -> Verdict:
    found = _results(record)
    ours = found["layer_major"]
    others = {name: found[name] for name in ("fsdp2_offload", "torchao_offload") if "tokens_per_s" in found[name]}
    text = f"{ours['tokens_per_s']:,.0f} tokens/s in {ours['device_peak_bytes'] / GIB:.0f} GiB"
    for name, row in others.items():
        text += f"; {name} {row['tokens_per_s']:,.0f} in {row['device_peak_bytes'] / GIB:.0f} GiB"
    missing = sorted({"fsdp2_offload", "torchao_offload"} - others.keys())
    return Verdict(text + "".join(f"; {name} did not run" for name in missing), NO_TARGET)


# ---- loss ----


def _loss(record: Found) -> Verdict:
    found = _results(record)
    steps = len(found["bf16_mixed"]["losses"])
    gap = found["gap_percent"]
    return once(gap, f"{gap:+.2f} % after {steps} steps (1 seed)", at_most=0.25)


# ---- the other paths ----


def _turns(name: str, *, at_least: float | None = None, at_most: float | None = None) -> Callable[[Found], Verdict]:
    return lambda record: turns(_results(record)[name]["samples"], _times, at_least=at_least, at_most=at_most)


def _lora(record: Found) -> Verdict:
    found = _results(record)
    ours, theirs = found["lora_fp8"], found["peft_bf16"]
    memory = ours["device_peak_bytes"] / theirs["device_peak_bytes"]
    seconds = ours["step_s"]["median"] / theirs["step_s"]["median"]
    status = PASS if memory < 1 and seconds <= 1.2 else MISS
    return Verdict(f"{100 * memory:.0f} % of the memory, {seconds:.2f}x the time", status)


def _worst(name: str, most: float) -> Callable[[Found], Verdict]:
    def judge(record: Found) -> Verdict:
        cases = _results(record)["cases"].values()
        return errors([case[name] for case in cases if name in case], most)

    return judge


def _order(record: Found) -> Verdict:
    found = _results(record)["order"]
    least = min(found.values())
    return once(least, f"{least:.2f} in the worst of {len(found)} models", at_least=0.9)


TARGETS: dict[str, tuple[Target, ...]] = {
    "fp8": (
        Target("fp8 0", "fp8_quantize", "FP8 quantisation bandwidth against a copy", "at least 85 %", _quantize),
        Target("fp8 1", "fp8_gemm", "three GEMMs of a linear layer in FP8, all quantisation included, against BF16",
               "at least 1.4x", _gemm_least),
        Target("fp8 best", "fp8_gemm", "the same, fastest of the layers", "at least 1.6x", _gemm_best),
        Target("fp8 2", "fp8_step", "`fp8_tile` step of an 8B-shaped decoder against `bf16_mixed`",
               "at least 1.3x, less memory", _step),
        Target("fp8 torchao", "fp8_step", "the same against the faster of torchao's `tensorwise` and `rowwise`", "-",
               _beside_torchao),
        Target("attention", "attention", "attention of rows of several documents, grouped heads, forward and backward, "
               "against rows of one", "at most 1.1x, under half of the memory of all pairs", _attention),
        Target("fp8 bits", "tests_fp8", "8-bit operations on the card: bits of the CPU, matmuls against FP64",
               "all tests", _tests),
        Target("fp8 ops", "tests_rest", "all other operations, tiers and out-of-memory on the card", "all tests",
               _tests),
    ),
    "memory": (
        Target("memory 0", "largest", "42B parameters, all trained, on one card: tokens/s, with 130 GiB on the card "
               "and 100 GiB on the host at most", "at least 1,100", _largest),
        Target("memory peak", "largest", "42B parameters on one card: planned peak against the measured one",
               "within 10 %", _largest_peak),
        Target("memory time", "largest", "42B parameters on one card: planned seconds per step against measured",
               "within 15 %", _largest_time),
        Target("memory 1", "offload",
               "8B parameters layer by layer, against FSDP2 CPU offload and torchao's `CPUOffloadOptimizer`", "-",
               _offload),
        Target("memory 24", "offload_24gib", "the same with 24 GiB of device memory", "-", _offload),
        Target("memory limit", "limit", "the largest decoder that trains on the card", "-", _limit),
    ),
    "paths": (
        Target("paths trainer", "hf_layers", "tokens/s of a Hugging Face Llama, layers compiled, against `Trainer` "
               "with bf16, torch_compile and fused AdamW", "at least 1x",
               _turns("tilewright_hf over trainer", at_least=1)),
        Target("paths eager", "hf_layers", "the same against its layers run eagerly", "at least 1x",
               _turns("tilewright_hf over tilewright_hf_eager", at_least=1)),
        Target("paths lora", "lora", "adapters on an FP8 base against peft's on BF16, layers of the 8B model's size",
               "less memory, at most 1.2x the time", _lora),
        Target("paths muon", "muon", "time of a step with Muon against AdamW, 1024 wide", "at most 1.15x",
               _turns("muon_over_adamw", at_most=1.15)),
        Target("paths generate", "generate", "tokens/s of the default recipe's model with its cache, against "
               "transformers' `generate`", "at least 1x", _turns("over_transformers", at_least=1)),
        Target("paths peak", "plan_measured", "planned peak of three models under four plans, against the measured one",
               "within 10 %", _worst("error_before", 10)),
        Target("paths time", "plan_measured", "planned seconds per step of these, against measured", "within 15 %",
               _worst("step_error", 15)),
        Target("paths order", "plan_measured", "rank correlation of planned and measured seconds over the plans",
               "at least 0.9", _order),
    ),
    "loss": (
        Target("loss 0", "loss", "held-out loss of a 1B-shaped decoder: `fp8_tile` with the controller against BF16",
               "at most +0.25 %", _loss),
    ),
}  # fmt: skip


def record_of(part: str, folder: Path) -> dict[str, Any] | None:
    """What a part left, or None where it was not run."""
    path = folder / f"{part}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def judged(target: Target, record: Found | None) -> Verdict:
    """A target's verdict; `not run` also where the part ended before that number."""
    if record is None:
        return Verdict("-", NOT_RUN)
    try:
        return target.judge(record)
    except (KeyError, ValueError, StopIteration, ZeroDivisionError) as error:
        return Verdict(f"no such number ({type(error).__name__}: {error})", NOT_RUN)


def table(groups: list[str], folder: Path) -> Iterator[str]:
    """Lines to print after a run: verdict, number, target and what it is."""
    for group in groups:
        for target in TARGETS[group]:
            verdict = judged(target, record_of(target.part, folder))
            yield f"{verdict.status:<10} {target.part:<14} {verdict.text}  [{target.target}]  {target.metric}"
