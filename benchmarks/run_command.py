"""Runs by the command line, as a user starts them, and what their folders say."""

import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.kept_rows import Kept, KeptRows

TRAIN_ALONE = {
    "train.eval_interval": 0, "train.sample_tokens": 0, "checkpoint.interval_minutes": 0, "log.report": "false",
}  # fmt: skip
"""Settings of a run that trains, evaluates at its end, and does nothing else."""


def train_command(
    recipe: str, settings: Mapping[str, object], more: Sequence[str] = (), *, ranks: int = 0, restarts: int = 0
) -> list[str]:
    """`tilewright train`, started by torchrun where there are ranks.

    Args:
        recipe: shipped, or a file.
        settings: of it.
        more: arguments as typed.
        ranks: processes; 0: one, without torchrun.
        restarts: how often torchrun starts all of them again.
    """
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    options = [f"--{key}={value}" for key, value in settings.items()]
    return [sys.executable, *(launch if ranks else []), "-m", "tilewright", "train", recipe, *options, *more]


def train(command: Sequence[str], **options: Any) -> None:
    """Run a command to its end.

    Args:
        command: from `train_command`.
        options: of `subprocess.run`.

    Raises:
        SystemExit: it failed; with the end of what it printed.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    if done.returncode:
        raise SystemExit(f"the run ended with code {done.returncode}: {done.stdout[-1000:]}{done.stderr[-3000:]}")


def rows(path: Path) -> list[Kept]:
    """The rows of a .jsonl file; a line corrupt by a kill is left out."""
    return KeptRows(path).all()


def step_rows(run: Path) -> list[Kept]:
    """Of the steps that a run has recorded."""
    return [row for row in rows(run / "metrics.jsonl") if "loss" in row]


def held_out(run: Path) -> dict[str, Kept]:
    """What a run's last evaluation says of each domain: loss, tokens, bytes."""
    return [row["eval"] for row in rows(run / "metrics.jsonl") if "eval" in row][-1]


def held_out_loss(run: Path) -> float:
    """Nats per token over all domains."""
    domains = held_out(run).values()
    return math.fsum(one["loss"] * one["tokens"] for one in domains) / sum(one["tokens"] for one in domains)
