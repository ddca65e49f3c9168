"""Loss of a 1B-shaped decoder on the default text: FP8 with the controller beside BF16, step by step on the same rows.

BF16 trains for its share of the time; FP8 then takes as many steps. Results are written every ten steps, so that a run
cut short keeps its curves.

python -m benchmarks.card.loss_gpu [--minutes 7.5] [--tiny]
"""

import math
import time
from typing import Any

from benchmarks.common import arguments_for_card, parser_of, write_result
from benchmarks.numerics.dpaa import sample
from tilewright.core.config.load import load_recipe
from tilewright.training.assemble import Components, build, set_up
from tilewright.training.executor.evaluate import evaluate, pooled
from tilewright.training.hooks.precision_hook import PrecisionHook

CLAIM = "fp8_tile with the controller: held-out loss within 0.25 % of bf16_mixed's after the same steps"
SHAPE = {
    "model.dim": "2048", "model.num_layers": "16", "model.num_heads": "32", "model.num_kv_heads": "8",
    "model.ffn_dim": "8192", "data.seq_len": "2048", "train.global_batch_size": "16", "train.micro_batch_size": "8",
    "optim.lr": "4e-4", "optim.schedule": "constant", "optim.warmup_steps": "50", "train.steps": "100000",
}  # fmt: skip
TINY = {
    "model.dim": "64", "model.num_layers": "2", "model.num_heads": "2", "model.num_kv_heads": "2",
    "model.ffn_dim": "128", "data.seq_len": "64", "data.vocab_size": "512", "data.max_bytes": "2MB",
    "train.global_batch_size": "4", "train.micro_batch_size": "2", "train.compile": "off", "optim.warmup_steps": "2",
}  # fmt: skip
MODES = {
    "bf16_mixed": {"precision.mode": "bf16_mixed"},
    "fp8_tile with controller": {"precision.mode": "fp8_tile", "precision.controller.enabled": "true"},
}
BF16_SHARE = 0.5
"""Of the time, building and compiling left out."""


def start(mode: str, tiny: bool) -> Components:
    """A run before its first step."""
    settings = SHAPE | (TINY if tiny else {}) | MODES[mode]
    return build(set_up(load_recipe("cpu_10m", settings, environ={})), fresh=True)


def one_step(parts: Components, step: int) -> dict[str, float]:
    """Train one step; what it gave."""
    microbatches = parts.stream.next_step()
    hook = parts.hook(PrecisionHook)
    control = hook.control if hook is not None else None
    if control is not None:
        control.enter(step)
        if control.due(step):
            sample(parts, control, step, microbatches)
    result = parts.executor.step(microbatches, parts.schedule.lr_at(step))
    if control is not None and control.controller.suspect is not None:
        sample(parts, control, step, microbatches)
    return {"loss": result.loss, "seconds": result.seconds}


def main() -> None:
    """Both runs, one after the other."""
    parser = parser_of(__doc__, tiny=True, minutes=7.5)
    args = arguments_for_card(parser)
    end = time.perf_counter() + 60 * args.minutes
    most, results = (12 if args.tiny else 10**9), {}
    for mode in MODES:
        parts = start(mode, args.tiny)
        now = time.perf_counter()
        until = now + BF16_SHARE * (end - now) if mode == "bf16_mixed" else end
        curve: list[float] = []
        seconds: list[float] = []
        results[mode] = record = {"data": parts.setup.prepared.fingerprint, "losses": curve, "step_s": seconds}
        while len(curve) < most and time.perf_counter() < until:
            done = one_step(parts, len(curve))
            curve.append(done["loss"])
            seconds.append(done["seconds"])
            if len(curve) % 10 == 0:
                write_result("loss", CLAIM, results)
        most = len(curve)
        finish(parts, record)
        write_result("loss", CLAIM, results)
        print(f"{mode}: {len(curve)} steps, held-out loss {record['held_out']:.4f}", flush=True)
    first, second = (results[mode] for mode in MODES)
    if len(first["losses"]) == len(second["losses"]):
        results["gap_percent"] = 100 * (second["held_out"] / first["held_out"] - 1)
    write_result("loss", CLAIM, results)


def finish(parts: Components, record: dict[str, Any]) -> None:
    """Held-out loss in FP32, and what the controller did; the model's memory is free afterwards."""
    whole = pooled(evaluate(parts.model, parts.held_out.batches, fp32=True))
    record["held_out"] = whole.loss if whole is not None else math.nan
    if (hook := parts.hook(PrecisionHook)) is not None:
        record["share_in_8_bits"] = 1 - hook.control.controller.share_above_8bit
    parts.stream.close()


if __name__ == "__main__":
    main()
