"""Processor time of a step that learns from kept tokens of a teacher, beside a plain one and one with the teacher live.

The model of a run, in its own precision, on one micro-batch of random tokens; a step is forward, backward, and for kept
tokens their rows read from disk, for the live teacher its forward pass (of the same model). The update, which is alike
in all three, is left out. Rounds alternate; processor seconds of the process, on one thread.

python -m benchmarks.compress.kept_tokens_step RUN [--rounds 15] [--rows 4]
"""

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import write_result
from tilewright.cli.load_run import open_to_export
from tilewright.core.config.load import load_recipe
from tilewright.models.distill import loss as distill
from tilewright.precision.convert import convert
from tilewright.precision.policy.policy import Policy
from tilewright.training.components.teacher_rows import TeacherRows

CLAIM = "a step that learns from 32 kept tokens takes at most 1.15 times the processor time of a plain one"
TOP_K = 32


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rows", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    recipe = load_recipe(args.run / "run.toml", environ={}).recipe
    teacher: Any = open_to_export(args.run).model
    student = copy.deepcopy(teacher)
    for model in (teacher, student):
        convert(model, Policy.from_section(recipe.precision, "cpu"), kernels=model.kernels)
    teacher.eval().requires_grad_(False)
    words, length = student.head.out_features, recipe.data.seq_len
    ids = torch.randint(words, (args.rows, length), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids.roll(-1, 1)}
    with tempfile.TemporaryDirectory() as folder:
        rows = TeacherRows(Path(folder), {}, top_k=TOP_K, vocab_size=words, divergence="forward_kl")
        with torch.no_grad():
            log_NV = teacher.logits(ids).flatten(0, 1).float().log_softmax(-1)
            chosen = rows.keeping.choose(log_NV, TOP_K, rows.numbers(batch).flatten())
            rows.add(batch, *(tensor.unflatten(0, ids.shape) for tensor in chosen))
        how = distill.how(1.0, 0.5, "forward_kl")

        def kept() -> dict[str, Tensor]:
            found = [one for one in rows.find(batch) if one is not None]
            tokens, logs = (torch.stack(parts) for parts in zip(*found, strict=True))
            return batch | {distill.TOKENS: tokens, distill.LOGS: logs, distill.HOW: how}

        @torch.no_grad()
        def live() -> dict[str, Tensor]:
            return batch | {
                distill.HIDDEN: teacher.hidden(batch), distill.HEAD: teacher.head.weight, distill.HOW: how
            }  # fmt: skip

        ways: dict[str, Callable[[], dict[str, Tensor]]] = {"plain": lambda: batch, "kept": kept, "live": live}
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for round_ in range(args.rounds + 2):
            for name, make in ways.items():
                started = time.process_time()
                student.loss(make()).loss_sum.backward()
                if round_ >= 2:  # the first ones compile and fill caches
                    seconds[name].append(time.process_time() - started)
                student.zero_grad()
    ratios = {
        name: [one / plain for one, plain in zip(seconds[name], seconds["plain"], strict=True)]
        for name in ("kept", "live")
    }
    found = {
        "tokens": ids.numel(), "vocabulary": words, "parameters": sum(p.numel() for p in student.parameters()),
        "plain_s": statistics.median(seconds["plain"]), "ratios": ratios,
    }  # fmt: skip
    print({name: round(statistics.median(values), 3) for name, values in ratios.items()})
    write_result("kept_tokens_step", CLAIM, found)


if __name__ == "__main__":
    main()
