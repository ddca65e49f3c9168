"""Real layers in a pipeline on log-normal documents: balance and ZBV against a fixed number of documents and 1F1B.

Ranks in a row hold a decoder in FP32, once per case: with one stage per rank for 1F1B, with two for ZBV. Steps of the
cases take turns on the same documents, and each updates its weights by its gradients, so that losses show whether all
train the same. Documents of the balanced steps are placed by the cost model that is fitted to the passes of the steps
before, in as many micro-batches as it says take least; none has more tokens than the largest one of fixed numbers may.

Two rows are run, one after the other: of two ranks and of four, each rank on one core and with one thread.

- Where each rank has a core to itself, the wall clock of a step is what a step takes, and decides.
- Where ranks share cores, no wall clock shows what a rank with a core of its own would take. Passes are measured by
  the time that the processor spent in them, and the step is run again on paper, in the measured order, with a core for
  each rank and free messages (`replay.replayed`). The wall clock of steps is kept beside it.

Beside the ratio is what bounds it: idle time of both by cause, the processor's time that the schedule costs in
addition, the number of micro-batches, and how much of the wall clock is beside the step on paper (messages). The cost
model says the seconds of each micro-batch in each stage before the step, which are held against those measured.

    python -m benchmarks.pipelines.pipeline_layers --seconds 440
"""

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import Stolen, spread, write_result
from tilewright.core import env
from tilewright.core.config.sections.parallel import ScheduleName
from tilewright.core.hardware import detect_machine
from tilewright.data.batches.token_rows import starts_of
from tilewright.models.build import init_weights
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.ops.base.documents import STARTS
from tilewright.ops.kernels import Kernels
from tilewright.parallel.agree import gather, sum_over
from tilewright.parallel.mesh import MeshSizes
from tilewright.parallel.pipeline.assignment import Room
from tilewright.parallel.pipeline.balance.assign import RowShape
from tilewright.parallel.pipeline.balance.balancer import Balanced
from tilewright.parallel.pipeline.balance.cost_model import CostModel, StageWork, names_of
from tilewright.parallel.pipeline.balance.fit_costs import CostFit, StageSeconds
from tilewright.parallel.pipeline.balance.passes import PassClock
from tilewright.parallel.pipeline.balance.replay import Pass, busy_s, idle_time, replayed, span_s
from tilewright.parallel.pipeline.rank_passes import PipelineSteps
from tilewright.parallel.pipeline.split import Pipeline
from tilewright.parallel.pipeline.stages import hold_stages
from tilewright.parallel.world import World, join

CLAIM = (
    "real layers, log-normal documents: a step takes at most 0.8 times that of 1F1B with a fixed number of documents "
    "per micro-batch, losses are equal to 1e-6, the cost model is within 10 % after 20 steps"
)
LAYERS, MICROBATCHES, PER_MICROBATCH = 8, 12, 2
LONGEST = 2048
"""Tokens of a document."""
VOCAB, WIDTH, HEADS, LR = 512, 192, 4, 0.05
SETTLED = 20
"""Steps after which the cost model is held against what is measured."""
FIXED = "fixed"
BALANCED: dict[str, tuple[ScheduleName, int]] = {"balanced, zbv": ("zbv", 2), "balanced, 1f1b": ("1f1b", 1)}
"""Schedule and stages per rank."""
CASES = (FIXED, *BALANCED)


def documents(step: int) -> list[np.ndarray]:
    """Tokens of the documents of a step, most of them short."""
    draw = np.random.default_rng(step)
    lengths = np.exp(draw.normal(5.2, 0.9, MICROBATCHES * PER_MICROBATCH)).clip(16, LONGEST).astype(int)
    return [draw.integers(0, VOCAB, length + 1) for length in lengths]


def micro_batch(found: Sequence[np.ndarray]) -> dict[str, Tensor]:
    """Documents behind each other, [1, T]."""
    lengths = np.array([len(one) - 1 for one in found])
    parts = {
        "input_ids": np.concatenate([one[:-1] for one in found]),
        "labels": np.concatenate([one[1:] for one in found]),
        "positions": np.concatenate([np.arange(length) for length in lengths]),
        "segments": np.repeat(np.arange(len(found)), lengths).astype(np.int32),
    }
    starts = torch.from_numpy(starts_of(lengths, int(lengths.sum())))
    return {name: torch.from_numpy(part)[None] for name, part in parts.items()} | {STARTS: starts}


class Case:
    """One pipeline with its own weights.

    Args:
        pipeline: how the model is cut.
        world: of the ranks.
    """

    def __init__(self, pipeline: Pipeline, world: World) -> None:
        config = DecoderConfig.of(vocab_size=VOCAB, dim=WIDTH, num_layers=LAYERS, num_heads=HEADS)
        model = Decoder(config, Kernels(detect_machine("cpu"), compile=False))
        init_weights(model, seed=0)
        self.pipeline, self.world, self.clock = pipeline, world, PassClock(torch.device("cpu"), time.thread_time)
        self.model = hold_stages(model, pipeline, world.row)
        self.steps = PipelineSteps(self.model, torch.device("cpu"), self.clock.measure)

    def run(self, microbatches: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        """A step: loss per token, seconds by the wall clock, and the passes of all ranks."""
        targets = sum(int(batch["labels"].numel()) for batch in microbatches)
        dist.barrier()
        began = time.perf_counter()
        self.clock.begin()
        results = self.steps.run(microbatches, 1 / targets)
        dist.barrier()
        seconds = time.perf_counter() - began
        loss = torch.zeros((), dtype=torch.float64)
        for result in results:
            loss += 0.0 if result.loss_sum is None else result.loss_sum.double()
        sum_over(self.world.row.handle, [loss])
        with torch.no_grad():
            for param in self.model.parameters():
                param -= LR * param.grad
                param.grad = None
        passes = gather(dist.group.WORLD, self.clock.taken()[0])
        return {"loss": float(loss) / targets, "wall_s": seconds, "passes": passes}


def on_paper(step: dict[str, Any]) -> float:
    """Seconds of the step with a core for each rank."""
    return span_s(replayed(step["passes"]))


def idle(step: dict[str, Any]) -> dict[str, float]:
    """Share of the ranks' time on paper that is idle, and its parts by cause."""
    found = idle_time([replayed(step["passes"])])
    return {"share": found.share, **found.causes}


def measured(passes: Sequence[Sequence[Pass]], case: Case, sizes: Sequence[tuple[int, int]]) -> list[StageSeconds]:
    """Seconds of each micro-batch in each stage, for the fit."""
    took: dict[tuple[int, int], float] = {}
    for one in itertools.chain.from_iterable(passes):
        took[one.stage, one.microbatch] = took.get((one.stage, one.microbatch), 0.0) + one.seconds
    layers, last = [len(of) for of in case.pipeline.split(LAYERS)], case.pipeline.num_stages - 1
    return [
        StageSeconds(
            StageWork({"dense": layers[stage]}, *sizes[number], first=stage == 0, last=stage == last),
            case.pipeline.rank_of(stage),
            seconds,
        )
        for (stage, number), seconds in took.items()
    ]


def errors_of(fit: CostFit, found: Sequence[StageSeconds]) -> list[float]:
    """Relative error of what the model says, of each micro-batch in each stage, before it has seen them."""
    return [abs(fit.model.seconds(one.work) / fit.speeds[one.rank] / one.seconds - 1) for one in found]


def run_rank(rank: int, num_steps: int, seconds: float) -> list[dict[str, Any]]:
    """All steps, both cases in turn, none that begins after so many seconds; on the first rank what they took."""
    began, world_size = time.monotonic(), dist.get_world_size()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    world = join(env.ranks(), MeshSizes(pp=world_size), torch.device("cpu"))
    cases = {FIXED: Case(Pipeline(world_size), world)}
    cases |= {name: Case(Pipeline(world_size, *how), world) for name, how in BALANCED.items()}
    prior = CostModel(("dense",), (12.0 * WIDTH * WIDTH, float(WIDTH), 0.0, float(VOCAB * WIDTH), 0.0))
    fit, found, counts = CostFit(prior, world_size), list[dict[str, Any]](), dict.fromkeys(BALANCED, 0)
    for step in range(num_steps):
        if gather(dist.group.WORLD, time.monotonic() - began > seconds)[0]:
            break
        texts = documents(step)
        lengths = np.array([len(one) - 1 for one in texts])
        places = {FIXED: [range(i, i + PER_MICROBATCH) for i in range(0, len(texts), PER_MICROBATCH)]}
        for name in BALANCED:
            pipeline = cases[name].pipeline
            balanced = Balanced(fit.model, (("dense", LAYERS),), (1.0,), RowShape.of(pipeline), count=counts[name])
            places[name] = balanced(lengths, Room(1, PER_MICROBATCH * LONGEST, pipeline.takes))[0]
            counts[name] = len(places[name])
        turn = step % len(CASES)
        took = {
            name: cases[name].run([micro_batch([texts[i] for i in place]) for place in places[name]])
            for name in (*CASES[turn:], *CASES[:turn])
        }
        seen = {}
        for name in BALANCED:
            sizes = [(int(lengths[place].sum()), int((lengths[place] ** 2).sum())) for place in places[name]]
            seen[name] = measured(took[name]["passes"], cases[name], sizes)
        # The first step allocates, and the prior has no seconds.
        errors = {name: errors_of(fit, of_case) if step > 1 else [] for name, of_case in seen.items()}
        if step:
            fit.learn([one for of_case in seen.values() for one in of_case])
            fit.load_state_dict(gather(dist.group.WORLD, fit.state_dict())[0])
        told = {"errors": errors, "model": fit.model.coefficients, "speeds": list(fit.speeds), "counts": dict(counts)}
        found.append(took | told)
    return found if rank == 0 else []


def results_of(ranks: int, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What is told of a row's steps; the first of them allocates."""
    steps, alone = found[1:], ranks <= (psutil.cpu_count() or 1)

    def over_fixed(of: Callable[[dict[str, Any]], float]) -> dict[str, Any]:
        return {name: spread([of(one[name]) / of(one[FIXED]) for one in steps]) for name in BALANCED}

    causes = {name: [idle(one[name]) for one in steps] for name in CASES}
    paper, wall = over_fixed(on_paper), over_fixed(lambda one: one["wall_s"])
    return {
        "steps": len(found),
        "core_for_each_rank": alone,
        "decides": "wall" if alone else "on_paper",
        "ratio": wall if alone else paper,
        "ratio_on_paper": paper,
        "ratio_wall": wall,
        "ratio_without_idle": spread([1 - one["share"] for one in causes[FIXED]]),
        "micro_batches": {name: [one["counts"][name] for one in found] for name in BALANCED},
        "processor_ratio": over_fixed(lambda one: busy_s(one["passes"])),
        "idle_on_paper": {name: spread([one["share"] for one in causes[name]]) for name in CASES},
        "idle_by_cause": {
            name: {cause: statistics.median(one[cause] for one in causes[name]) for cause in causes[name][0]}
            for name in CASES
        },
        "beside_paper": {
            name: statistics.median(1 - on_paper(one[name]) / one[name]["wall_s"] for one in steps) for name in CASES
        },
        "step_s": {
            name: {
                "on_paper": statistics.median(on_paper(one[name]) for one in steps),
                "wall": statistics.median(one[name]["wall_s"] for one in steps),
            }
            for name in CASES
        },
        "loss_off": max(abs(one[name]["loss"] / one[FIXED]["loss"] - 1) for one in found for name in BALANCED),
        "losses": [float(f"{one[FIXED]['loss']:.7g}") for one in found],
        "cost_model": {
            "cases": {name: errors_after([one["errors"][name] for one in found]) for name in BALANCED},
            "seconds": dict(zip(names_of(["dense"]), found[-1]["model"], strict=True)),
            "speeds": [round(one, 3) for one in found[-1]["speeds"]],
        },
    }


def errors_after(by_step: Sequence[Sequence[float]]) -> dict[str, Any]:
    """How far the cost model was off on micro-batches in stages."""
    later = [error for of_step in by_step[SETTLED:] for error in of_step]
    return {
        "micro_batches_after_20_steps": len(later),
        "median_error": statistics.median(later) if later else None,
        "error_after_20_steps": spread([statistics.fmean(one) for one in by_step[SETTLED:]]) if later else None,
        "errors": [round(statistics.fmean(one), 4) if one else None for one in by_step],
    }


def main() -> None:
    """Run the steps, and write the result."""
    from tests.ranks import on_ranks

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="2,4", help="in a row; one row after the other")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=440.0, help="of all rows; no step begins later")
    options = parser.parse_args()
    rows = [int(number) for number in options.ranks.split(",")]
    results: dict[str, Any] = {}
    with Stolen() as stolen:
        for ranks in rows:
            each = options.seconds / len(rows)
            results[f"{ranks} ranks"] = results_of(
                ranks, on_ranks(ranks, run_rank, options.steps, each, seconds=each + 300)[0]
            )
    for name, found in results.items():
        print(
            f"{name}: {found['steps']} steps, {found['decides']} decides, 0.8 wanted; losses off by "
            f"{found['loss_off']:.1e}; with no idle time and as much work "
            f"{found['ratio_without_idle']['median']:.3f}"
        )
        for case in BALANCED:
            ratio, model = found["ratio"][case], found["cost_model"]["cases"][case]
            print(
                f"  {case}: ratio {ratio['median']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f}), processor time "
                f"{found['processor_ratio'][case]['median']:.3f} times; cost model off by {model['median_error']} "
                f"(median of {model['micro_batches_after_20_steps']} micro-batches in stages)"
            )
        for case in CASES:
            told = ", ".join(f"{cause} {share:.3f}" for cause, share in found["idle_by_cause"][case].items())
            print(f"  {case}: idle {told}; beside paper {found['beside_paper'][case]:.3f}")
    write_result("pipeline_layers", CLAIM, results | {"stolen": round(stolen.share, 3)})


if __name__ == "__main__":
    main()
