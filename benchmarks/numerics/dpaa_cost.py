"""What the precision controller costs on recipe cpu_10m: a sample beside a step, and so a share of the time.

CPU seconds of the process count besides seconds, because they hardly depend on what else runs on the machine.

python -m benchmarks.numerics.dpaa_cost [--samples 5] [--compile auto]
"""

import argparse
import statistics
import time

from benchmarks.common import machine_kind, spread, write_result
from tilewright.core.config.load import load_recipe
from tilewright.data.batches.microbatches import count_targets
from tilewright.training.assemble import build, set_up
from tilewright.training.hooks.precision_hook import PrecisionHook, one_row

CLAIM = "samples of evidence take at most 1 % of the time of training on recipe cpu_10m"


def main() -> None:
    """Steps and samples in turn, after two steps that compile."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--compile", choices=("auto", "off"), default="auto")
    args = parser.parse_args()
    changes = {"precision.controller.enabled": "true", "train.compile": args.compile}
    setup = set_up(
        load_recipe("cpu_10m", {"precision.mode": "fp8_tile", "precision.fp8_min_gain": "0.0"} | changes, environ={})
    )
    parts = build(setup, fresh=True)
    hook = parts.hook(PrecisionHook)
    if hook is None:
        raise AssertionError("the recipe has a controller")
    control, section = hook.control, setup.recipe.precision
    seconds: dict[str, list[float]] = {name: [] for name in ("step", "step_cpu", "sample", "sample_cpu")}
    for step in range(2 + args.samples):
        microbatches = parts.stream.next_step()
        control.enter(step)
        wall, cpu = time.perf_counter(), time.process_time()
        parts.executor.step(microbatches, parts.schedule.lr_at(step))
        after = time.perf_counter(), time.process_time()
        (batch,) = one_row(microbatches)
        control.sample(step, [lambda b=batch: (parts.model.loss(b).loss_sum / max(count_targets([b]), 1)).backward()])
        last = time.perf_counter(), time.process_time()
        if step >= 2:
            for name, value in zip(
                seconds, (after[0] - wall, after[1] - cpu, last[0] - after[0], last[1] - after[1]), strict=True
            ):
                seconds[name].append(value)
            print({name: round(values[-1], 2) for name, values in seconds.items()}, flush=True)
    parts.stream.close()
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    results = {
        "unit": "seconds",
        "compile": setup.compiles,
        "rows_a_step": setup.recipe.train.global_batch_size,
        "steps_between_samples": section.controller.interval,
        **{name: spread(values) for name, values in seconds.items()},
        "sample_over_step": middle["sample"] / middle["step"],
        "sample_over_step_cpu": middle["sample_cpu"] / middle["step_cpu"],
        "share_of_time_percent": 100 * middle["sample_cpu"] / middle["step_cpu"] / section.controller.interval,
    }
    write_result(f"dpaa_cost_{machine_kind()}", CLAIM, results)


if __name__ == "__main__":
    main()
