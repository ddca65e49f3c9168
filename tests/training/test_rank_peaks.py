"""The highest resident set of each rank beside its plan, through torchrun: shards, copies, two copies of two shards,
and a Hugging Face model. Models are as large as shipped ones: of tiny ones the process is all."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.dist, pytest.mark.slow]
WITHIN = 0.05
"""Of the measured peak: the claim of the issue. Measured: -1.8 to +0.9 % (docs/log.md)."""
LLAMA = {
    "model_type": "llama", "vocab_size": 8192, "hidden_size": 320, "intermediate_size": 896, "num_hidden_layers": 6,
    "num_attention_heads": 5, "num_key_value_heads": 5, "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip
CASES = {
    "4 shards": (4, {}),
    "2 shards": (2, {}),
    "2 copies": (2, {"parallel.dp_shard": 1, "parallel.dp_replicate": 2}),
    "2 copies of 2 shards": (4, {"parallel.dp_shard": 2, "parallel.dp_replicate": 2}),
    "llama": (2, {"model.kind": "hf", "model.task": "causal_lm"}),
}
STEPS = {
    "train.steps": 10, "train.eval_interval": 0, "train.log_interval": 5, "train.sample_tokens": 0,
    "checkpoint.interval": 0, "checkpoint.interval_minutes": 0, "checkpoint.save_last": "false", "log.report": "false",
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_peaks_of_ranks_are_planned(name, tmp_path):
    ranks, changes = CASES[name]
    settings = STEPS | changes | {"run.dir": tmp_path, "run.name": "run", "train.global_batch_size": 4 * ranks}
    if changes.get("model.kind") == "hf":
        (tmp_path / "config.json").write_text(json.dumps(LLAMA))
        settings["model.path"] = tmp_path
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", "tilewright", "train", "zero_cpu", *(f"--{key}={value}" for key, value in settings.items())]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "run" / "ranks.json").read_text())["ranks"]
    assert len(rows) == ranks
    errors = {row["rank"]: row["planned_bytes"] / row["peak_bytes"] - 1 for row in rows}
    assert max(map(abs, errors.values())) <= WITHIN, f"planned over measured, less one, by rank: {errors}"
