"""Real layers in a pipeline on log-normal documents: balance and ZBV against a fixed number of documents and 1F1B.

Four ranks in a row hold a decoder in FP32, twice: with one stage per rank for 1F1B, with two for ZBV. Steps of the two
take turns on the same documents, and each updates its weights by its gradients, so that losses show whether both train
the same. Documents of the balanced steps are placed by the cost model that is fitted to the passes of the steps before.

Ranks share two cores here, so no wall clock shows what a rank with a core of its own would take. Passes are measured by
the time that the processor spent in them, and the step is run again on paper, in the measured order, with a core for
each rank and free messages (`replay.replayed`). The wall clock of steps is kept beside it.

    python -m benchmarks.pipeline_layers
"""

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import Stolen, spread, write_result
from tilewright.core import env
from tilewright.core.hardware import detect_machine
from tilewright.data.batches.rows import starts_of
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
from tilewright.parallel.pipeline.balance.cost import CostModel, StageWork, names_of
from tilewright.parallel.pipeline.balance.fit import CostFit, StageSeconds
from tilewright.parallel.pipeline.balance.passes import PassClock
from tilewright.parallel.pipeline.balance.replay import Pass, busy_s, replayed, span_s
from tilewright.parallel.pipeline.split import Pipeline
from tilewright.parallel.pipeline.stages import hold_stages
from tilewright.parallel.pipeline.steps import PipelineSteps
from tilewright.parallel.world import World, join

CLAIM = (
    "real layers on four ranks, log-normal documents: a step takes at most 0.8 times that of 1F1B with a fixed number "
    "of documents per micro-batch, losses are equal to 1e-6, the cost model is within 10 % after 20 steps"
)
RANKS, LAYERS, MICROBATCHES, PER_MICROBATCH = 4, 8, 12, 2
VOCAB, WIDTH, LR = 512, 96, 0.05
SETTLED = 20
"""Steps after which the cost model is held against what is measured."""


def documents(step: int) -> list[np.ndarray]:
    """Tokens of the documents of a step, most of them short."""
    draw = np.random.default_rng(step)
    lengths = np.exp(draw.normal(5.2, 0.9, MICROBATCHES * PER_MICROBATCH)).clip(16, 2048).astype(int)
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
        config = DecoderConfig.of(vocab_size=VOCAB, dim=WIDTH, num_layers=LAYERS, num_heads=2)
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


def idle(step: dict[str, Any]) -> float:
    """Share of the ranks' time on paper."""
    return 1 - busy_s(step["passes"]) / (RANKS * on_paper(step))


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


def run_rank(rank: int, num_steps: int, seconds: float) -> list[dict[str, Any]]:
    """All steps, both cases in turn, none that begins after so many seconds; on the first rank what they took."""
    began = time.monotonic()
    world = join(env.ranks(), MeshSizes(pp=RANKS), torch.device("cpu"))
    plain, ours = Case(Pipeline(RANKS), world), Case(Pipeline(RANKS, "zbv", 2), world)
    prior = CostModel(("dense",), (12.0 * WIDTH * WIDTH, float(WIDTH), 0.0, float(VOCAB * WIDTH), 0.0))
    fit, found = CostFit(prior, RANKS), []
    row = replace(RowShape.of(ours.pipeline), most=2 * MICROBATCHES)
    for step in range(num_steps):
        if gather(dist.group.WORLD, time.monotonic() - began > seconds)[0]:
            break
        texts = documents(step)
        lengths = np.array([len(one) - 1 for one in texts])
        fixed = [texts[i : i + PER_MICROBATCH] for i in range(0, len(texts), PER_MICROBATCH)]
        places = Balanced(fit.model, (("dense", LAYERS),), (1.0,), row)(lengths, Room(1, 10**6, MICROBATCHES.__eq__))[0]
        sizes = [(int(lengths[place].sum()), int((lengths[place] ** 2).sum())) for place in places]
        work = {
            "fixed": (plain, [micro_batch(one) for one in fixed]),
            "balanced": (ours, [micro_batch([texts[i] for i in place]) for place in places]),
        }
        took = {
            name: case.run(batches) for name, (case, batches) in (work.items() if step % 2 else reversed(work.items()))
        }
        if step:  # the first one allocates
            fit.learn(measured(took["balanced"]["passes"], ours, sizes))
            fit.load_state_dict(gather(dist.group.WORLD, fit.state_dict())[0])
        found.append(took | {"error": fit.error, "model": fit.model.coefficients, "speeds": fit.speeds})
    return found if rank == 0 else []


def main() -> None:
    """Run the steps, and write the result."""
    from tests.ranks import on_ranks

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=900.0, help="no step begins later")
    options = parser.parse_args()
    with Stolen() as stolen:
        found = on_ranks(RANKS, run_rank, options.steps, options.seconds, seconds=options.seconds + 300)[0]
    settled = found[1:]
    off = max(abs(one["balanced"]["loss"] / one["fixed"]["loss"] - 1) for one in found)
    later = [one["error"] for one in found[SETTLED:] if math.isfinite(one["error"])]
    results: dict[str, Any] = {
        "steps": len(found),
        "ratio_on_paper": spread([on_paper(one["balanced"]) / on_paper(one["fixed"]) for one in settled]),
        "ratio_wall": spread([one["balanced"]["wall_s"] / one["fixed"]["wall_s"] for one in settled]),
        "processor_ratio": spread(
            [busy_s(one["balanced"]["passes"]) / busy_s(one["fixed"]["passes"]) for one in settled]
        ),
        "idle_on_paper": {name: spread([idle(one[name]) for one in settled]) for name in ("fixed", "balanced")},
        "step_on_paper_s": {
            name: statistics.median(on_paper(one[name]) for one in settled) for name in ("fixed", "balanced")
        },
        "loss_off": off,
        "losses": [float(f"{one['fixed']['loss']:.7g}") for one in found],
        "cost_model": {
            "error_after_20_steps": spread(later) if later else None,
            "errors": [round(one["error"], 4) if math.isfinite(one["error"]) else None for one in found],
            "seconds": dict(zip(names_of(["dense"]), found[-1]["model"], strict=True)),
            "speeds": [round(one, 3) for one in found[-1]["speeds"]],
        },
        "stolen": round(stolen.share, 3),
    }
    write_result("pipeline_layers", CLAIM, results)
    print({key: value for key, value in results.items() if key not in ("losses",)})


if __name__ == "__main__":
    main()
