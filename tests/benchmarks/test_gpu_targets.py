"""Targets of `benchmarks.gpu`: each verdict from records as the parts write them, cut short ones too."""

import json

import pytest

from benchmarks.rows.claims import gpu_rows
from benchmarks.rows.gpu_targets import TARGETS, judged, table
from benchmarks.rows.verdict import MISS, NO_TARGET, NOT_RUN, PASS

GIB = 2**30
BY_KEY = {target.key: target for targets in TARGETS.values() for target in targets}


def record(results, **more):
    return {"exit_code": 0, "output_tail": "", "results": {"some_tiny": {"results": results}}} | more


def layers(*speedups):
    """As `fp8_gpu gemm`: the first candidate is the one that runs, whatever the next one reaches."""
    return {
        "unit": "ms",
        **{
            f"16384 tokens, {at} to 7": {
                "bf16": {"median": 2.0}, "not_run": {}, "scaled_mm": {"speedup_with_quantize": speedup},
                "dequant": {"speedup_with_quantize": 9.0},
            }
            for at, speedup in enumerate(speedups)
        },
    }  # fmt: skip


def step(speedup, share):
    return {
        "unit": "ms", "fp8_tile": {"speedup": speedup, "peak_share": share, "step": {"median": 3.0}},
        "torchao_rowwise": {"step": {"median": 6.0}}, "torchao_tensorwise": {"not_run": "torchao"},
    }  # fmt: skip


def largest(tokens_per_s=1500, steps=24, device=120, host=90, rises=False, planned=1.0):
    losses = [12 - 0.1 * at for at in range(steps)]
    return {
        "losses": losses[::-1] if rises else losses, "step_s": [9.0] + [5.0] * (steps - 1),
        "tokens_per_s": tokens_per_s,
        "device_peak_bytes": device * GIB, "host_peak_bytes": host * GIB, "parameters": 42.5e9, "layers": 66,
        "planned": {"peak_bytes": planned * device * GIB, "step_s": planned * 5.0, "fits": True},
    }  # fmt: skip


def quantised(*shares):
    return {"copy": {"median": 1.0}} | {
        f"rows {at}": {"floor_ms": 1.0, "not_run": {}, "triton": {"share_of_copy": share}, "ref": {"share_of_copy": 2}}
        for at, share in enumerate(shares)
    }


def attention(packed, peak, plain=10.0):
    """As `attention_gpu`: rows of 1, 4 and 64 documents in BF16, and FP32."""
    row = {"tilewright": {"median": plain, "peak_bytes": 10}, "all_pairs_bytes": 100}
    other = {"tilewright": {"median": packed, "peak_bytes": peak}, "all_pairs_bytes": 100}
    names = ("bfloat16, 1 documents", "bfloat16, 4 documents", "float32, 4 documents")
    return {"unit": "ms"} | dict(zip(names, (row, other, other | {"tilewright": row["tilewright"]}), strict=True))


def lora(memory, seconds):
    return {
        name: {"device_peak_bytes": size, "step_s": {"median": taken}}
        for name, size, taken in (("lora_fp8", memory * 100, seconds), ("peft_bf16", 100, 1.0))
    }


@pytest.mark.parametrize(
    ("key", "results", "status"),
    [
        ("fp8 0", quantised(0.9, 0.86), PASS),
        ("fp8 0", quantised(0.9, 0.84), MISS),
        ("fp8 1", layers(1.7, 1.41), PASS),
        ("fp8 1", layers(1.7, 1.39), MISS),
        ("fp8 best", layers(1.61, 1.3), PASS),
        ("fp8 best", layers(1.59, 1.5), MISS),
        ("fp8 2", step(1.31, 0.9), PASS),
        ("fp8 2", step(1.29, 0.9), MISS),
        ("fp8 2", step(1.31, 1.0), MISS),
        ("fp8 torchao", step(1.31, 0.9), NO_TARGET),
        ("fp8 torchao", {"fp8_tile": {"step": {"median": 1.0}}}, NOT_RUN),
        ("attention", attention(10.9, 49), PASS),
        ("attention", attention(11.1, 49), MISS),
        ("attention", attention(9.0, 51), MISS),
        ("attention", {"unit": "ms"}, NOT_RUN),
        ("memory 0", largest(), PASS),
        ("memory 0", largest(tokens_per_s=1099), MISS),
        ("memory 0", largest(steps=19), MISS),
        ("memory 0", largest(device=131), MISS),
        ("memory 0", largest(host=101), MISS),
        ("memory 0", largest(rises=True), MISS),
        ("memory peak", largest(planned=1.09), PASS),
        ("memory peak", largest(planned=0.89), MISS),
        ("memory time", largest(planned=1.14), PASS),
        ("memory time", largest(planned=0.84), MISS),
        ("memory limit", largest(), NO_TARGET),
        ("loss 0", {"bf16_mixed": {"losses": [1.0]}, "gap_percent": 0.2}, PASS),
        ("loss 0", {"bf16_mixed": {"losses": [1.0]}, "gap_percent": 0.3}, MISS),
        ("loss 0", {"bf16_mixed": {"losses": [1.0]}}, NOT_RUN),
        ("paths trainer", {"tilewright_hf over trainer": {"samples": [1.1, 1.2]}}, PASS),
        ("paths trainer", {"tilewright_hf over trainer": {"samples": [0.8, 0.9]}}, MISS),
        ("paths muon", {"muon_over_adamw": {"samples": [1.1, 1.12]}}, PASS),
        ("paths muon", {"muon_over_adamw": {"samples": [1.2, 1.3]}}, MISS),
        ("paths lora", lora(0.6, 1.1), PASS),
        ("paths lora", lora(0.6, 1.3), MISS),
        ("paths lora", lora(1.1, 0.9), MISS),
        ("paths peak", {"cases": {"a": {"error_before": 0.09}, "b": {"error_before": -0.1}}}, PASS),
        ("paths peak", {"cases": {"a": {"error_before": 0.09}, "b": {"error_before": -0.11}}}, MISS),
        ("paths time", {"cases": {"a": {"step_error": 0.16}, "b": {}}}, MISS),
        ("paths order", {"order": {"a": 1.0, "b": 0.8}}, MISS),
        ("paths order", {"order": {"a": 1.0, "b": 0.95}}, PASS),
        ("paths order", {"order": {}}, NOT_RUN),
    ],
)
def test_each_verdict(key, results, status):
    assert judged(BY_KEY[key], record(results)).status == status


@pytest.mark.parametrize(
    ("last", "code", "status"),
    [
        ("== 12 passed, 3 skipped in 4.1s ==", 0, PASS),
        ("3 skipped in 4.1s", 0, NOT_RUN),
        ("1 failed, 12 passed in 4.1s", 1, MISS),
        ("12 passed in 4.1s", 1, MISS),
    ],
)
def test_tests_pass_where_some_ran_and_none_failed(last, code, status):
    assert judged(BY_KEY["fp8 ops"], record({}, exit_code=code, output_tail=f"...\n{last}\n")).status == status


def test_contenders_that_did_not_run_are_named():
    ran = {"tokens_per_s": 9000.0, "device_peak_bytes": 20 * GIB}
    found = judged(
        BY_KEY["memory 24"],
        record({"layer_major": ran, "fsdp2_offload": ran, "torchao_offload": {"error": "out of memory"}}),
    )
    assert "fsdp2_offload 9,000 in 20 GiB; torchao_offload did not run" in found.text


def test_the_table_and_the_page_read_the_files(tmp_path):
    about = {"date": "2026-11-25", "machine": {"gpu": "NVIDIA H200", "cores": 16, "device": "x", "cpu_features": []}}
    (tmp_path / "loss.json").write_text(
        json.dumps(record({"bf16_mixed": {"losses": [1.0]}, "gap_percent": 0.3}, **about))
    )
    (line,) = table(["loss"], tmp_path)
    assert line.startswith("miss")
    (row,) = gpu_rows("loss", tmp_path)
    assert (row.verdict.status, row.where, row.date) == (MISS, "NVIDIA H200", "2026-11-25")
    assert {row.verdict.status for row in gpu_rows("memory", tmp_path)} == {NOT_RUN}
