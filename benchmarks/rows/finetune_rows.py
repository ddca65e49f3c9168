"""Rows of docs/benchmarks.md on fine-tuning: memory, answers, generation. See `benchmarks.rows.claims`."""

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.common import RESULTS
from benchmarks.rows.claim_rows import Result, Row, read, read_all
from benchmarks.rows.verdict import NOT_RUN, Verdict, once, turns

GIB = 2**30
LIMITS = {
    "full": ("all parameters trained layer by layer, 8-bit moments in memory", 4),
    "full_disk": ("all parameters trained layer by layer, 8-bit moments on disk", 4),
    "lora_fp8": ("adapters on an FP8 base", 2),
}

PEERS = {"trainer": "Hugging Face `Trainer`", "in_backward": "a loop with the optimizer in backward"}


NOT_YET = {
    "finetune_memory": (
        ("fine-tuning all parameters of a model of Qwen3-0.6B's shape: peak of the whole process", "at most 4 GiB"),
        ("the same by adapters on an FP8 base", "at most 2 GiB"),
    ),
    "finetune_quality": (
        ("held-out answers right after a fine-tune, three ways, against a plain FP32 loop", "at least -1 point"),
    ),
    "generate": (("512 tokens with the key/value cache against without, default model", "at least 10x"),),
}
"""Claims without a result: metric, target."""


def rows() -> Iterator[Row]:
    """All of them; those that were not run say so."""
    for name, measured in (("finetune_memory", memory), ("finetune_quality", answers), ("generate", generation)):
        found = list(measured())
        yield from found
        for number, (metric, target) in enumerate(() if found else NOT_YET[name]):
            yield Row(f"{name} {number}", metric, target, Verdict("-", NOT_RUN), None, "CPU")


def memory() -> Iterator[Row]:
    """The whole process' peak, and against the peers where they ran too."""
    for result in read_all("finetune_memory"):
        found = result.results
        for name, (words, limit) in LIMITS.items():
            if name in found:
                yield Row(
                    f"{result.name}_{name}",
                    f"fine-tuning a model of Qwen3-0.6B's shape, {words}: peak of the whole process",
                    f"at most {limit} GiB",
                    _peak(found[name], limit),
                    result,
                )
            for peer in PEERS:
                pair = found.get(f"{name} against {peer}")
                if pair is not None and name != "lora_fp8":
                    words_of = (
                        "Hugging Face `Trainer`" if peer == "trainer" else "a loop with the optimizer in backward"
                    )
                    yield Row(
                        f"{result.name}_{name}_{peer}_memory", f"{words}: peak against {words_of}", "at most 0.70x",
                        turns(pair["peak_ratio"]["samples"], _times, at_most=0.7), result,
                    )  # fmt: skip
                    times = pair["step_s_ratio"]["samples"]
                    if len(times) > 1:  # one turn beside other work says nothing of seconds
                        yield Row(
                            f"{result.name}_{name}_{peer}_time", f"{words}: seconds of a step against {words_of}",
                            "at most 1.20x", turns(times, _times, at_most=1.2), result,
                        )  # fmt: skip
        if "start" in found:
            yield Row(
                f"{result.name}_start",
                "`tilewright finetune` on a model of Qwen3-0.6B's shape: seconds from the command to its first step",
                "at most 60 s",
                turns(found["start"]["first_step_s"]["samples"], lambda seconds: f"{seconds:.0f} s", at_most=60.0),
                result,
            )


def _peak(row: Mapping[str, Any], limit: float) -> Verdict:
    highest = max(row["peak_bytes"]["samples"])
    return once(highest / GIB, f"{highest / GIB:.2f} GiB", at_most=limit)


def _found(name: str) -> list[Result]:
    """A result that is not of one machine; none where it was not run."""
    return [read(name)] if (RESULTS / f"{name}.json").exists() else []


def _times(number: float) -> str:
    return f"{number:.2f}x"


def answers() -> Iterator[Row]:
    """Held-out answers of a synthetic task, and the margins of preferences."""
    for result in _found("finetune_quality"):
        found = result.results
        for how, words in (("full", "all parameters"), ("lora", "LoRA"), ("lora_fp8", "LoRA on an FP8 base")):
            gap = found["points_to_plain_full"][how]
            yield Row(
                f"{result.name}_{how}",
                f"held-out answers right after a fine-tune, {words}, against a plain FP32 loop",
                "at least -1 point",
                once(gap, f"{gap:+.1f} points ({found['mean'][how]:.1f} %)", at_least=-1),
                result,
            )


def generation() -> Iterator[Row]:
    """Cached against uncached."""
    for result in read_all("generate"):
        yield Row(
            result.name,
            "512 tokens with the key/value cache against without, default model",
            "at least 10x",
            turns(result.results["speedup"]["samples"], _times, at_least=10.0),
            result,
        )
