"""Gradients in a wire format under stages and under spread experts: the run in FP32 but for the format's rounding."""

from pathlib import Path

import pytest

from tests.contracts.observe import fixed_ceilings
from tests.ranks import on_ranks
from tests.training.tiny import rows, tiny
from tilewright.planner.machine import ceilings
from tilewright.training.session import train

pytestmark = [pytest.mark.dist, pytest.mark.slow]
QUIET = {"train__eval_interval": 0, "train__sample_tokens": 0, "log__report": "false", "train__global_batch_size": 8}
QUIET |= {"precision__mode": "fp32", "optim__warmup_steps": 0}
EXPERTS = {"model__num_experts": 4, "model__expert_dim": 16, "parallel__ep": 2}
WORST = {"bf16": 1e-5, "fp8": 1e-3}
"""Of losses: AdamW takes gradients by their size relative to each other, six steps from the start."""


def run(rank, data, runs, changes):
    ceilings.measure = fixed_ceilings  # this process is the test's own
    return train(tiny(Path(data), Path(runs), **QUIET | changes)).step


@pytest.mark.parametrize(
    ("world", "mesh"),
    [
        (4, {"parallel__pp": 2, "parallel__dp_shard": 2}),
        (4, {"parallel__pp": 2, "parallel__dp_replicate": 2, "parallel__dp_shard": 1}),
        (2, EXPERTS),
        (4, EXPERTS | {"parallel__dp_shard": 4}),
    ],
    ids=["stages_of_shards", "stages_of_copies", "experts", "experts_of_shards"],
)
def test_losses_are_those_of_fp32_but_for_the_rounding(world, mesh, data, tmp_path):
    losses = {}
    for wire in ("fp32", "bf16", "fp8"):
        assert (
            on_ranks(world, run, str(data), str(tmp_path / wire), mesh | {"parallel__grad_sync": wire}) == [6] * world
        )
        found = rows(tmp_path / wire / "tiny" / "metrics.jsonl")
        losses[wire] = [row["loss"] for row in found if "loss" in row]
    for wire, most in WORST.items():
        worst = max(abs(a / b - 1) for a, b in zip(losses[wire], losses["fp32"], strict=True))
        assert 0 < worst < most, f"{wire} is off by {worst:.2g}"
