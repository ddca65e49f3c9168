"""Idle time of a pipeline on uneven documents: what a user of torch's pipelining has with a fixed number of documents
per micro-batch and 1F1B, and what balance, schedule and number of micro-batches each take off it.

Stages wait for what their passes cost instead of computing, so ranks on few cores overlap as on machines of their own:
schedules, messages (gloo) and buffers are those of a run. A pass of a unit of cost waits for 10 ms forward, 10 ms for
the gradient of its input, 10 ms for those of its weights. Idle is the share of the ranks' time, from a barrier before
the step to one behind it, in which none of that was due. Documents are log-normal; cost is tokens plus squares of
tokens.

Then one rank is 20 % slower, and its layers are split again by measured seconds. The cost model is fitted to measured
seconds of passes meanwhile.

python -m benchmarks.pipelines.pipeline_idle
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.common import RESULTS, Stolen, spread, write_result
from tilewright.core.config.sections.parallel import ScheduleName
from tilewright.ops.base.weight_gradient_queue import Waiting, WeightGradientQueue
from tilewright.parallel.agree import gather
from tilewright.parallel.pipeline.assignment import Room
from tilewright.parallel.pipeline.balance.assign import RowShape, WeighedDocuments, choose
from tilewright.parallel.pipeline.balance.balancer import Balanced
from tilewright.parallel.pipeline.balance.cost_model import CostModel, StageWork
from tilewright.parallel.pipeline.balance.fit_costs import CostFit, StageSeconds
from tilewright.parallel.pipeline.balance.passes import PassClock
from tilewright.parallel.pipeline.balance.replay import Pass, beside_s, idle_time
from tilewright.parallel.pipeline.balance.resplit import SplitCosts, best_split
from tilewright.parallel.pipeline.split import Pipeline
from tilewright.parallel.pipeline.torch_names import RaggedStage, Schedules

CLAIM = (
    "four ranks, stages that wait their cost, log-normal documents: idle at most 15 % where 1F1B with a fixed number "
    "of documents per micro-batch has 40 % or more; one rank 20 % slower: at most 18 % once layers are split again"
)
RANKS, LAYERS, MICROBATCHES, PER_MICROBATCH = 4, 48, 16, 2
UNIT_S = 0.010
WIDTH = 4


def documents(seed: int) -> list[int]:
    """Lengths in tokens, most of them short."""
    draw = random.Random(seed)
    number = MICROBATCHES * PER_MICROBATCH
    return [min(4096, max(32, int(draw.lognormvariate(6.2, 0.8)))) for _ in range(number)]


PER_UNIT = 200 * LAYERS / RANKS
"""Tokens of which one layer takes a unit: a rank with its share of the layers takes one for 200 tokens."""
TRUE = CostModel(("layer",), (1 / PER_UNIT, 1 / PER_UNIT / 6000, 0.0, 0.0, 0.0))
"""In units, of the forward pass: a document of 6,000 tokens spends half of it in attention."""


class Waits(torch.autograd.Function):
    """Waits as long forward as backward for its input and for its weights."""

    @staticmethod
    def forward(ctx, x, weight, seconds, queue):
        time.sleep(seconds)
        ctx.seconds, ctx.queue, ctx.param = seconds, queue, weight
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)

        def late() -> torch.Tensor:
            time.sleep(ctx.seconds)
            return torch.zeros_like(ctx.param)

        if ctx.queue is None or not ctx.queue.takes(ctx.param):
            return gradient, late(), None, None
        ctx.queue.add(ctx.param, Waiting(late, ()))
        return gradient, None, None, None


class WaitingStage(nn.Module):
    """Layers that wait.

    Args:
        each_s: seconds of a unit of cost in one of its layers.
        layers: number of them.
        first, last: whether it begins with the batch, and ends with the loss.
        queue: where weight gradients wait.
    """

    def __init__(self, each_s: float, layers: int, first: bool, last: bool, queue: WeightGradientQueue | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.each_s, self.num_layers, self.first, self.last, self.queue = each_s, layers, first, last, queue

    def forward(self, *received: torch.Tensor, micro_batch: tuple[int, int]) -> torch.Tensor:
        tokens, pairs = micro_batch
        work = StageWork({"layer": self.num_layers}, tokens, pairs)
        x = torch.ones(1, 1, WIDTH, requires_grad=True) if self.first else received[0]
        out = Waits.apply(x, self.weight, self.each_s * TRUE.seconds(work), self.queue)
        return out.sum() if self.last else out


def step_of(pipeline: Pipeline, split: Sequence[int], speed: float, rank: int) -> Any:
    """A function that runs a step of micro-batches, each (tokens, squares), and gives its seconds and passes."""
    queues = [WeightGradientQueue() if pipeline.defers else None for _ in pipeline.stages_of(rank)]
    clock = PassClock(torch.device("cpu"))
    stages = [
        RaggedStage(
            WaitingStage(UNIT_S / speed, split[i], i == 0, i == pipeline.num_stages - 1, queue), i, pipeline.num_stages,
            device=torch.device("cpu"), group=dist.group.WORLD, width=WIDTH, watch=clock.measure,
            sent=lambda _: None, before_reduce=lambda: None, queue=queue,
        )
        for i, queue in zip(pipeline.stages_of(rank), queues, strict=True)
    ]  # fmt: skip
    schedules = Schedules(pipeline.schedule, stages)

    def run(microbatches: Sequence[tuple[int, int]]) -> tuple[float, list[Pass]]:
        shapes = [torch.Size((1, 1, WIDTH)) for _ in microbatches]
        dist.barrier()
        began = time.perf_counter()
        clock.begin()
        with ExitStack() as regions:
            for queue in filter(None, queues):
                regions.enter_context(queue.region())
            schedules.run(shapes, torch.float32, [{"micro_batch": one} for one in microbatches])
        dist.barrier()
        return time.perf_counter() - began, clock.taken()[0]

    return run


def run_case(
    rank: int,
    name: ScheduleName,
    virtual: int,
    steps: Sequence[Sequence[tuple[int, int]]],
    speeds: Sequence[float],
    split: Any,
) -> list[dict[str, Any]]:
    """Of each step its seconds, idle share, causes, and the passes of all ranks; on one rank."""
    pipeline = Pipeline(RANKS, name, virtual)
    split = split or [len(layers) for layers in pipeline.split(LAYERS)]
    run = step_of(pipeline, split, speeds[rank], rank)
    run(steps[0][: MICROBATCHES // 2])
    found = []
    for microbatches in steps:
        seconds, passes = run(microbatches)
        row = gather(dist.group.WORLD, passes)
        seconds = max(gather(dist.group.WORLD, seconds))
        of_stage = [UNIT_S / speeds[pipeline.rank_of(stage)] * count for stage, count in enumerate(split)]
        cost = sum(TRUE.seconds(StageWork({"layer": 1}, *one)) for one in microbatches)
        idle = 1 - 3 * cost * sum(of_stage) / (RANKS * seconds)
        found.append({"seconds": seconds, "idle": idle, "causes": idle_time([row]).causes, "passes": row})
    return found if rank == 0 else []


def packed(places: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[tuple[int, int]]:
    """(tokens, squares) of each micro-batch."""
    return [(sum(lengths[i] for i in one), sum(lengths[i] ** 2 for i in one)) for one in places]


def fixed(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """As many documents in each micro-batch, in the stream's order."""
    return packed([range(i, i + PER_MICROBATCH) for i in range(0, len(lengths), PER_MICROBATCH)], lengths)


def balanced(lengths: Sequence[int], pipeline: Pipeline, each_s: float | None = None) -> list[tuple[int, int]]:
    """By cost; as many micro-batches as the fixed ones, or where it is said what one costs beside its documents, as
    many as take the least time."""
    costs = [3 * UNIT_S * TRUE.document({"layer": LAYERS}, length) for length in lengths]
    takes = MICROBATCHES.__eq__ if each_s is None else pipeline.takes
    row = replace(RowShape.of(pipeline), most=2 * MICROBATCHES)
    (places,) = choose(WeighedDocuments(lengths, costs), [1.0], Room(1, 10**6, takes), row, each_s=each_s or 0.0)
    return packed(places, lengths)


def measured(
    steps: Sequence[Sequence[tuple[int, int]]], found: Any, pipeline: Pipeline, split: Sequence[int]
) -> CostFit:
    """What a run learns of these steps."""
    fit = CostFit(CostModel(("layer",), (1.0, 1e-3, 0.0, 0.0, 0.0)), RANKS)
    for microbatches, step in zip(steps, found, strict=True):
        seconds: dict[tuple[int, int], float] = {}
        for one in (one for of_rank in step["passes"] for one in of_rank):
            seconds[one.stage, one.microbatch] = seconds.get((one.stage, one.microbatch), 0.0) + one.seconds
        fit.learn([
            StageSeconds(StageWork({"layer": split[stage]}, *microbatches[number]), pipeline.rank_of(stage), took)
            for (stage, number), took in seconds.items()
        ])  # fmt: skip
    return fit


class Cases:
    """Measures cases, and keeps what they gave.

    Args:
        lengths: of the documents of each step.
    """

    def __init__(self, lengths: Sequence[Sequence[int]]) -> None:
        self.lengths, self.results = lengths, dict[str, Any]()

    def run(self, name: str, pipeline: Pipeline, steps: Any, speeds: Sequence[float], split: Any = None) -> Any:
        """Of each step what `run_case` gives."""
        from tests.ranks import on_ranks

        with Stolen() as stolen:
            args = pipeline.schedule, pipeline.virtual, steps, speeds, split
            found = on_ranks(RANKS, run_case, *args, seconds=500)[0]
        idle, causes = [one["idle"] for one in found], found[0]["causes"]
        self.results[name] = {
            "idle": spread(idle),
            "seconds": spread([one["seconds"] for one in found]),
            "microbatches": [len(one) for one in steps],
            "causes": {key: round(statistics.median(one["causes"][key] for one in found), 4) for key in causes},
            "split": list(split or map(len, pipeline.split(LAYERS))),
            "stolen": round(stolen.share, 3),
        }
        print(f"{name}: idle {self.results[name]['idle']}", flush=True)
        return found


def planning_ms() -> dict[str, Any]:
    """Processor milliseconds of a plan for 4,096 documents over 8 data ranks."""
    lengths = [length for seed in range(128) for length in documents(seed)]
    took = []
    balance = Balanced(TRUE, (("layer", LAYERS),), (1.0,) * 8, RowShape(RANKS, 3.0), each_s=1.0)
    for _ in range(25):
        began = time.process_time()
        balance(np.array(lengths), Room(8, 32768))
        took.append(1e3 * (time.process_time() - began))
    return {"documents": len(lengths), "milliseconds": spread(took)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--only", choices=("plan",), help="measure this, and keep what the file says of the rest")
    parser.add_argument("--schedule", default="zbv", choices=("zbv", "interleaved", "interleaved_zero_bubble"))
    options = parser.parse_args()
    if options.only:
        known = json.loads((RESULTS / "pipeline_idle.json").read_text())["results"]
        write_result("pipeline_idle", CLAIM, known | {"plan": planning_ms()}, arguments=())
        return
    lengths = [documents(seed) for seed in range(options.steps)]
    plain, ours = Pipeline(RANKS), Pipeline(RANKS, options.schedule, 2)
    even, slow, cases = [1.0] * RANKS, [1.0, 1.0, 0.8, 1.0], Cases(lengths)
    fix = [fixed(one) for one in lengths]
    same = [balanced(one, ours) for one in lengths]
    name = options.schedule
    cases.run("fixed count, 1f1b", plain, fix, even)
    cases.run(f"fixed count, {name}", ours, fix, even)
    cases.run("balanced, 1f1b", plain, same, even)
    found = cases.run(f"balanced, {name}", ours, same, even)
    each_s = statistics.median(beside_s([one["passes"]]) for one in found)
    cases.run(f"balanced, {name}, count chosen", ours, [balanced(one, ours, each_s) for one in lengths], even)
    cases.run("one rank 20 % slower: fixed count, 1f1b", plain, fix, slow)
    found = cases.run(f"one rank 20 % slower: balanced, {name}", ours, same, slow)
    now = [len(layers) for layers in ours.split(LAYERS)]
    fit = measured(same, found, ours, now)
    layer = fit.model.document({"layer": 1}, 1000)
    costs = SplitCosts([layer] * LAYERS, [ours.rank_of(stage) for stage in range(ours.num_stages)], fit.speeds)
    cases.run(f"one rank 20 % slower: balanced, {name}, layers split again", ours, same, slow, best_split(costs))
    results = cases.results | {
        "cost_model": {"error_of_last_step": round(fit.error, 4), "speeds": [round(one, 3) for one in fit.speeds]},
        "beside_documents_s": round(each_s, 4),
        "plan": planning_ms(),
    }
    write_result("pipeline_idle", CLAIM, results, arguments=())


if __name__ == "__main__":
    main()
