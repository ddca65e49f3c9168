"""A synthetic run folder with all parts, from formulas: nothing in it was measured."""

import json
import math
import random
from pathlib import Path

import pytest

STEPS = 400
DOMAINS = {"code": 3.1, "docs": 3.6, "headers": 2.9, "licences": 2.2, "tests": 3.0}
OWNERS = {
    "parameters": 38.5,
    "optimizer": 77.0,
    "gradients": 38.5,
    "activations": 412.0,
    "buffers": 19.3,
    "allocator": 41.0,
    "other": 330.0,
}
MIB = 2**20

RUN_TOML = """\
# Resolved recipe 'default'; the comment of a value is where it came from.

[run]
name = "" # default
seed = 1234 # default

[data]
domains = ["code", "docs"] # file mine.toml

[optim]
lr = 0.002 # file default.toml
warmup_steps = 20 # default
clip_norm = 1.0 # default

[train]
steps = 400 # cli
"""


def metrics_rows() -> list[dict]:
    draw = random.Random(3)
    rows = []
    for step in range(1, STEPS + 1):
        loss = 2.9 + 6.1 * math.exp(-step / 45) + 0.9 * math.exp(-step / 300) + draw.gauss(0, 0.05)
        norm = math.exp(draw.gauss(-0.7, 0.28)) * (1 + 4 * math.exp(-step / 12))
        speed = 13_100 * (1 + draw.gauss(0, 0.015)) * (0.25 if step < 3 else 1.0)
        owners = {name: round(size * MIB * (1 + draw.gauss(0, 0.004))) for name, size in OWNERS.items()}
        row = {
            "step": step, "time_s": step * 0.63, "loss": loss, "grad_norm": norm,
            "lr": 2e-3 * min(step / 20, 0.55 + 0.45 * math.cos(math.pi * step / STEPS)),
            "loss_scale": 2.0 ** (15 + (step > 160) + (step > 260) - (step > 310)), "skipped": None,
            "tokens": step * 8192, "tokens_per_s": speed, "step_s": 8192 / speed, "wait_s": 0.002,
            "wait_share": abs(draw.gauss(0.003, 0.001)), "memory_bytes": sum(owners.values()),
        }  # fmt: skip
        if step % 10 == 0:
            row["memory"] = owners
            row["memory_phases"] = {"forward": {"parameters": 2**30}, "backward": owners}
            row["memory_tiers"] = {"disk": {"optimizer": step * 2**20}}
        rows.append(row)
        if step % 100 == 0:
            losses = {d: base + 5 * math.exp(-step / 90) for d, base in DOMAINS.items()}
            evals = {d: {"loss": v, "ppl": math.exp(v), "tokens": 16_384} for d, v in losses.items()}
            rows.append({"step": step, "time_s": step * 0.63 + 0.1, "eval": evals})
    return rows


EVENTS = [
    {"step": 0, "time_s": 0.0, "kind": "start", "message": "9.63M parameters, bf16_mixed, cpu"},
    {"step": 80, "time_s": 50.4, "kind": "precision_switch", "message": "tf32 -> bf16_mixed after 20 % of the steps"},
    {"step": 100, "time_s": 63.1, "kind": "eval", "message": "held out: 3.21 nats"},
    {"step": 200, "time_s": 126.1, "kind": "eval", "message": "held out: 3.05 nats"},
    {"step": 231, "time_s": 145.9, "kind": "resume", "message": "from step 230, 4.1 s after the process started"},
    {"step": 310, "time_s": 195.3, "kind": "overflow", "message": "gradient not finite; loss scale 131072 -> 65536"},
    {"step": 400, "time_s": 252.9, "kind": "save", "message": "checkpoints/step_00000400, 115 MiB in 0.31 s"},
    {"step": 400, "time_s": 253.0, "kind": "done", "message": "400 steps"},
]  # fmt: skip

PLAN = {
    "verdict": "The run fits: 1.00 GiB of 23.4 GiB at the peak (backward, activations); a step takes about 0.61 s.",
    "peak_phase": "backward", "peak_bytes": 1000 * MIB, "tokens_per_s": 13_400.0, "step_seconds": 0.61,
    "phases": {
        "forward": {"parameters": 38 * MIB, "other": 350 * MIB},
        "backward": {name: int(size * 1.04 * MIB) for name, size in OWNERS.items()},
    },
}  # fmt: skip

MACHINE = {
    "device": "cpu", "device_name": "Test CPU @ 2.10GHz", "capability": None, "device_memory_bytes": 25 * 2**30,
    "host_memory_bytes": 25 * 2**30, "physical_cores": 2, "cpu_features": ["amx_bf16", "avx512_bf16"],
    "cxx_compiler": "/usr/bin/g++", "versions": {"python": "3.11.7", "torch": "2.13.0"},
    "kernels": [
        {"op": "linear", "case": "cpu bfloat16", "chosen": "native", "rejected": []},
        {"op": "linear", "case": "cpu float32", "chosen": "native", "rejected": []},
        {"op": "cross_entropy", "case": "cpu bfloat16", "chosen": "native",
         "rejected": [["compiled", "no C++ compiler was found"]]},
    ],
}  # fmt: skip

DATA = {
    "fingerprint": "9f31c0de77aa", "docs": 3121, "bytes": 24_000_000, "tokens": 6_913_442,
    "rejects": {"binary": 4, "too short": 211}, "duplicates_removed": 57,
    "domains": {d: {"docs": 600 + i, "bytes": 4_800_000 + i, "tokens": 1_400_000 + i} for i, d in enumerate(DOMAINS)},
}  # fmt: skip


def precision_rows() -> list[dict]:
    rows = [
        {"fqn": "embed_tokens", "op": "embedding", "compute": "bf16", "storage": "fp32", "reason": "mode bf16_mixed"}
    ]
    for layer in range(6):
        for name in ("q_proj", "k_proj"):
            rows.append(
                {"fqn": f"layers.{layer}.self_attn.{name}", "op": "linear", "compute": "bf16", "storage": "fp32",
                 "reason": "mode bf16_mixed: matmuls in BF16"}
            )  # fmt: skip
        rows.append(
            {"fqn": f"layers.{layer}.input_layernorm", "op": "norm", "compute": "fp32", "storage": "fp32",
             "reason": "statistics need FP32"}
        )  # fmt: skip
    return rows


def write_run(folder: Path, without: tuple[str, ...] = ()) -> Path:
    """All files of a run folder but those in `without`."""
    folder.mkdir(parents=True)
    sample = {"step": 400, "time_s": 252.0, "prompt": "def main(", "text": "argv):\n    <b>return</b> 0 & 1"}
    files = {
        "metrics.jsonl": metrics_rows(), "events.jsonl": EVENTS, "samples.jsonl": [sample],
        "plan.json": PLAN, "machine.json": MACHINE, "data.json": DATA, "precision.json": precision_rows(),
    }  # fmt: skip
    for name, value in files.items():
        if name in without:
            continue
        lines = name.endswith(".jsonl")
        text = "".join(json.dumps(row) + "\n" for row in value) if lines else json.dumps(value)
        (folder / name).write_text(text, encoding="utf-8")
    if "run.toml" not in without:
        (folder / "run.toml").write_text(RUN_TOML, encoding="utf-8")
    return folder


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write_run(tmp_path / "my run")
