"""Two copies of two shards through torchrun, four processes: they train, save, resume; what cannot fit is refused."""

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.training.tiny import last_state, rows, settings
from tilewright.report.run_data.traffic_table import AXES

pytestmark = [pytest.mark.dist, pytest.mark.slow]
MESH = {
    "parallel__dp_replicate": 2, "parallel__dp_shard": 2, "optim__schedule": "constant", "optim__moments": "8bit",
    "train__global_batch_size": 8, "train__eval_interval": 0, "train__log_interval": 1, "log__report": "false",
}  # fmt: skip


def torchrun(data, runs, **changes):
    """Code and output of the tiny run on four processes."""
    return train_on_four("default", settings(data, runs, **MESH | changes))


def train_on_four(recipe, given):
    """Code and output of a recipe, by the command that documents give."""
    options = [f"--{name}={value}" for name, value in given.items()]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    command += ["-m", "tilewright", "train", recipe, *options]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=280, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.support("resume", "hsdp")
def test_it_trains_saves_and_resumes(data, tmp_path):
    """The bits of a run without a pause, and the bytes of its plan."""
    code, said = torchrun(data, tmp_path / "straight", train__steps=6)
    assert code == 0, said
    for steps in (3, 6):
        code, said = torchrun(data, tmp_path / "paused", train__steps=steps)
        assert code == 0, said
    folder, straight = tmp_path / "paused" / "tiny", tmp_path / "straight" / "tiny"
    assert [event["kind"] for event in rows(folder / "events.jsonl")].count("resume") == 1
    losses = [{row["step"]: row["loss"] for row in rows(run / "metrics.jsonl") if "loss" in row}
              for run in (folder, straight)]  # fmt: skip
    assert losses[0] == losses[1]
    assert list(losses[0]) == list(range(1, 7))
    assert max((folder / "checkpoints").iterdir()).name == "step_00000006"
    (tensors, _), (expected, _) = last_state(folder), last_state(straight)
    for name, tensor in expected.items():
        worst = (tensors[name].double() - tensor.double()).abs().max().item() if tensor.numel() else 0.0
        assert torch.equal(tensors[name], tensor), f"{name} is off by up to {worst:.3g}"
    planned = json.loads((folder / "plan.json").read_text())
    ranks = json.loads((folder / "ranks.json").read_text())["ranks"]
    assert [row["rank"] for row in ranks] == [0, 1, 2, 3]
    (step_bytes,) = {row["planned_bytes"] for row in ranks}
    assert step_bytes <= planned["peak_bytes"]


@pytest.mark.support("plan", "hsdp")
def test_what_does_not_fit_is_refused_once(data, tmp_path):
    code, said = torchrun(data, tmp_path, plan__device_memory="64MiB")
    assert code != 0
    assert said.count("tilewright: Run does not fit") == 1
    told = said[said.index("tilewright: Run does not fit") :]
    assert "64.00 MiB on the device of each of 4 ranks" in told
    for part in ("got", "need", "try"):
        assert f"\n  {part} " in told
    assert not (tmp_path / "tiny" / "run.toml").exists()
    assert not list((tmp_path / "tiny").rglob("step_*"))


@pytest.mark.parametrize("tp", [1, 2])
def test_a_mixture_in_8_bits_trains_with_spread_experts(data, tmp_path, tp):
    """`torchrun --nproc-per-node 4 -m tilewright train moe_cpu`, with a shorter run on a small text: the model and its
    mesh are the recipe's. `--parallel.tp 2` is the one flag that cuts matrices too."""
    given = {
        "run.dir": tmp_path, "run.name": "moe", "run.threads": 1, "data.source": data / "text",
        "data.cache_dir": tmp_path / "cache", "data.vocab_size": 512, "data.seq_len": 128, "train.steps": 3,
        "train.global_batch_size": 4, "train.micro_batch_size": 1, "train.eval_interval": 0, "train.log_interval": 1,
        "train.eval_batches": 1, "train.sample_tokens": 0,
    }  # fmt: skip
    code, said = train_on_four("moe_cpu", given | ({"parallel.tp": tp} if tp > 1 else {}))
    assert code == 0, said
    folder = tmp_path / "moe"
    steps = [row for row in rows(folder / "metrics.jsonl") if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert steps[-1]["loss"] < steps[0]["loss"]
    axes = ("ep", "dp_shard", "efsdp") if tp == 1 else ("ep", "dp_shard", "tp")
    for axis in axes:
        assert steps[-1][f"exchange_exposed_s.{axis}"] >= 0
        assert any(name.startswith(f"sent_bytes.{axis}.") and steps[-1][name] > 0 for name in steps[-1])
    page = (folder / "report.html").read_text()
    assert "Exchanges between processes" in page
    assert all(AXES[axis] in page for axis in axes)
    _, meta = last_state(folder)
    ran = [gemms for name, gemms in meta["parts"]["audit"].items() if ".mlp.experts." in name]
    assert ran
    assert all(set(formats) == {"fp8_tile"} for gemms in ran for formats in gemms.values())
