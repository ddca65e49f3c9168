"""Rows of docs/benchmarks.md on speed and memory. See `benchmarks.rows.claims`."""

from collections.abc import Iterator, Mapping

from benchmarks.rows.claim_rows import GIB, Claim, Result, Row, of, read_all, row

LOOPS = (
    ("fp32", "a plain PyTorch loop, Hugging Face Llama, FP32", "at least 3x"),
    ("autocast", "the same loop under BF16 autocast", "-"),
    ("trainer", "Hugging Face `Trainer`: bf16, torch_compile, fused AdamW", "at least 1.3x"),
    ("trainer_tuned", "that `Trainer` with tilewright's allocator and thread settings", "-"),
)
OPS = {
    "attention, forward and backward": "attention 8x8x512x64 bf16",
    "attention over packed documents, forward and backward": "attention 8x8x512x64 bf16, packed documents",
    "cross-entropy with its GEMMs, forward and backward": "loss 4096x512x16384 bf16",
}
CLASSES = {"cpu": ("AVX2, FP32 GEMMs", 0.75), "avx512": ("AVX-512 BF16", 0.65), "amx": ("AMX", 0.50)}
"""Of processors, by the ends of names of results; and the share of its matmuls' rate that a compiled step must have."""
SPEEDS = {
    "eager over compiled": (0.7, "our decoder of 47M parameters, eager against compiled"),
    "llama over ours, compiled": (0.85, "transformers' Llama of 47M parameters against our decoder, compiled"),
    "llama over ours, eager": (0.9, "the same, eager"),
}
"""The least of each ratio, and what it is of."""
LOW_BIT = "tilewright 8bit moments, stochastic bf16 weights"


def speed() -> Iterator[Row]:
    yield from of("throughput_*", *(
        Claim(f"{{result}}_{loop}", f"tokens/s of a 47M decoder in `bf16_mixed`, against {text}", target,
              f"tilewright over {loop}")
        for loop, text, target in LOOPS
    ))  # fmt: skip
    yield from of("fp8_step_*", Claim(
        "{result}_time", "time of an `fp8_tile` step on a CPU against `bf16_mixed`, 1024 wide", "at most 1.35x", "ratio"
    ))  # fmt: skip
    yield from of("cast_linear", _cast)
    yield from of("fp8_cpu_*", _copies)
    yield from of("adam_states_cpu", Claim(
        "adam", "AdamW step per parameter, 8-bit moments, stochastic rounding", "at most 10 ns",
        f"speed/1 threads/{LOW_BIT}/wall", "{:.1f} ns",
    ))  # fmt: skip
    yield from of("step_share_*", _shares)
    yield from of("eager_attention_*", _eager_attention)
    yield from of("ops_*", *(
        Claim(f"{{result}}_{text}", f"speed of {text}, against torch's own", "at least 1x", f"{case}/speedup")
        for text, case in OPS.items()
    ))  # fmt: skip


def _shares(result: Result) -> Iterator[Row]:
    least = CLASSES[result.name.removeprefix("step_share_")][1]
    cases = {name: found for name, found in result.results.items() if isinstance(found, Mapping)}
    for name in (name for name in cases if name.endswith(" ours compiled")):
        size, share = name.split()[0], cases[name]["matmuls"]["share"]
        metric = f"share of its matmuls' rate that a compiled step reaches, decoder of {size.upper()} parameters"
        yield row(result, f"{result.name}_{size}", metric, f"at least {least}", share, "{:.2f}")
    for name, (target, text) in SPEEDS.items():
        yield row(result, f"{result.name}_{name}", f"tokens/s of {text}", f"at least {target}x", result.results[name])
    name, found = min(cases.items(), key=lambda case: case[1]["explained"])
    metric = f"share of a step whose owner is named, least of {len(cases)} cases ({name})"
    yield row(result, f"{result.name}_owners", metric, "at least 90 %", 100 * found["explained"], "{:.0f} %")


def _eager_attention(result: Result) -> Iterator[Row]:
    speeds = {name: one["bf16_speed_of_fp32"] for name, one in result.results.items() if isinstance(one, Mapping)}
    name = min(speeds, key=lambda case: speeds[case]["median"])
    metric = (
        f"speed of eager attention in BF16 (`{result.results['kernel']}`) against FP32, least of {len(speeds)}: {name}"
    )
    yield row(result, result.name, metric, "at least 0.75x", speeds[name])


def share_table() -> list[str]:
    """The seconds of steps by class of processor, from the results of `benchmarks.runs.step_share`."""
    lines = [
        "| class | model and layers | tokens/s | matmuls reach | by themselves | share |",
        "|---|---|---:|---:|---:|---:|",
    ]
    found = {result.name.removeprefix("step_share_"): result for result in read_all("step_share_*")}
    for kind, (name, least) in CLASSES.items():
        if kind not in found:
            lines.append(f"| {name} | not run | | | | at least {least} wanted |")
            continue
        for case, one in found[kind].results.items():
            if isinstance(one, dict):
                rates = [f"{one['matmuls'][key] / 1e9:,.0f} GFLOP/s" for key in ("reached", "alone")]
                wanted = f" (at least {least} wanted)" if case.endswith("ours compiled") else ""
                cells = [f"{one['tokens_per_s']:,.0f}", *rates, f"{one['matmuls']['share']:.2f}{wanted}"]
                lines.append(f"| {name}, {found[kind].record['date']} | {case} | {' | '.join(cells)} |")
    return lines


def _cast(result: Result) -> Iterator[Row]:
    slowest = max((case["cast_over_bf16"] for case in result.results.values()), key=lambda ratio: ratio["median"])
    metric = f"time of a converted linear layer against torch's BF16 one, slowest of {len(result.results)} shapes"
    yield row(result, "cast", metric, "at most 1.05x", slowest)


def _copies(result: Result) -> Iterator[Row]:
    cases = {name: case["over_copy"] for name, case in result.results["copies"].items()}
    name = max(cases, key=lambda case: cases[case]["median"])
    metric = f"time to quantise or decode FP8 tiles against a memory copy, slowest of {len(cases)} cases ({name})"
    yield row(result, "fp8_copy", metric, "at most 3x", cases[name])


def memory() -> Iterator[Row]:
    yield from of("headlines_*", _headlines)
    yield from of("big_cpu_3b", _big)
    yield from of("fp8_step_avx512", Claim(
        "inputs", "bytes of linear inputs kept for backward, `fp8_tile`", "at most -45 %",
        "linear_input_saving_percent", "{:.0f} % (exact)", -1,
    ))  # fmt: skip
    yield from of("adam_states_cpu", _states)
    yield from of("slices_cpu", _chunks)
    yield from of("tiers_cpu", *(
        Claim(f"hidden_{store}", f"wait for offload to {text} that prefetch hides", "-", f"{store}/hidden", "{:.0f} %",
              100)
        for store, text in (("host", "memory"), ("disk", "disk"))
    ))  # fmt: skip


def _headlines(result: Result) -> Iterator[Row]:
    pairs = (
        ("bits8_disk", "standard", "at most -70 %", "at most 1.5x",
         "8-bit moments on disk, layer by layer, against the standard executor"),
        ("bits8", "peer", "less", "-", "recipe `slice_cpu` against the tuned loop"),
        ("bits8", "peer_in_backward", "less", "-", "recipe `slice_cpu` against the loop tuned further"),
    )  # fmt: skip
    found = result.results["compiled"]
    for one, other, target, slower, text in pairs:
        key, pair, less = f"{one}_{other}", found[f"{one} against {other}"], {"at_most": 0} if target == "less" else {}
        first, second = (found[name]["peak_bytes"] - found[name]["base_bytes"] for name in (one, other))
        kinds = {"": pair["peak_change"], ", without the bytes of loaded libraries": first / second - 1}
        for kind, change in kinds.items():
            metric = f"peak memory, 209M parameters, {text}{kind}"
            yield row(result, f"{key}{kind}", metric, target, 100 * change, "{:+.0f} %", **less)
        metric = f"processor time, 209M parameters, {text}"
        yield row(result, f"{key} time", metric, slower, pair["processor_s_ratio"])


def _big(result: Result) -> Iterator[Row]:
    found = result.results
    before, after = found["held_out_before"], found["held_out_after"]
    said = f"held-out loss {before:.2f} to {after:.2f} in {len(found['losses'])} steps"
    said += f", peak {found['peak_bytes'] / GIB:.1f} GiB (1 run)"
    memory_gib = found["machine_memory_bytes"] / GIB
    metric = f"{found['parameters'] / 1e9:.1f}B parameters, all trained, on a CPU with {memory_gib:.0f} GiB"
    yield row(result, "big", metric, "loss falls", after - before, said=said, at_most=0)


def _states(result: Result) -> Iterator[Row]:
    states = result.results["speed"]["bytes per parameter, weight and states"]
    said = f"{states[LOW_BIT]:.2f} bytes (exact; FP32: {states['tilewright fp32 states']:.0f})"
    metric = "weight and Adam states per parameter, 8-bit moments"
    yield row(result, "states", metric, "-", states[LOW_BIT], said=said)


def _chunks(result: Result) -> Iterator[Row]:
    for length in ("short", "long"):
        rows = result.results[length]["contenders"]
        share = rows["all"]["above_bytes_of_whole"]["median"] - 1
        tokens = result.results[length]["row_tokens"]
        metric = f"memory of a step with MLP, attention, loss and inputs in chunks, rows of {tokens:,} tokens"
        yield row(result, f"chunks_{length}", metric, "-", 100 * share, "{:.0f} % (1 run)")
    rows = {name: one["above_bytes"]["median"] for name, one in result.results["long"]["contenders"].items()}
    more = [100 * (rows[name] / rows["all"] - 1) for name in rows if name.startswith("without ")]
    said = f"{min(more):+.0f} % to {max(more):+.0f} %"
    metric = "the same without one of the four, rows of 4,096 tokens"
    yield row(result, "chunks_each", metric, "more, each", min(more), said=said, at_least=0)
