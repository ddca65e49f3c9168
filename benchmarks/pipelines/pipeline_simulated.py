"""Steps of pipelines by the clock against their simulation: torch's schedules over gloo, on stages that wait.

Stages wait instead of computing, so ranks on few cores overlap as on machines of their own, and other work on the
machine disturbs them little: it delays the end of a wait, and what torch does between passes (some milliseconds, which
is why waits are long). The schedules are torch's own, called by their public names (`schedule.step`); of tilewright's
there is only the queue in which gradients of weights wait, given to torch as `dw_builder`. The simulation takes the
waits of passes, and nothing that was measured.

A run is a schedule on so many ranks with even micro-batches, ragged ones (log-normal), or ragged ones and one rank
20 % slower. Of each steps are measured, after one that is not, until the two shortest agree within 1 %, and at most
`--steps` of them; the shortest counts: what else the machine does can only make a step longer, and not twice as much.

python -m benchmarks.pipelines.pipeline_simulated
"""

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from benchmarks.common import Stolen, spread, write_result
from benchmarks.pipelines.pipeline_idle import Waits
from tilewright.ops.base.weight_gradient_queue import WeightGradientQueue
from tilewright.parallel.agree import gather
from tilewright.parallel.pipeline.split import Pipeline
from tilewright.parallel.pipeline.torch_names import SCHEDULES
from tilewright.planner.simulate.pass_costs import KindSeconds, PassCosts, StepCosts
from tilewright.planner.simulate.schedule_table import ScheduleTable
from tilewright.planner.simulate.simulated_step import SimulatedStep
from tilewright.planner.simulate.torch_tables import torch_tables

CLAIM = (
    "2 to 8 ranks over gloo, stages that wait their cost, torch's schedules called directly: the simulated step is "
    "within 5 % of the measured one in the median of at least 20 runs, and within 12 % in the worst"
)
UNIT = "seconds of a pass forward, for the gradient of the input, and for those of the weights, where work is 1"
HEAD_START_S, AGREE, SECONDS = 0.1, 0.01, 900.0
KINDS = ("even", "ragged", "one slow rank")


def work_of(kind: str, count: int, seed: int) -> tuple[float, ...]:
    """Of each micro-batch; 1 on average."""
    if kind == "even":
        return (1.0,) * count
    draw = random.Random(seed)
    drawn = [draw.lognormvariate(0.0, 0.6) for _ in range(count)]
    return tuple(count * one / sum(drawn) for one in drawn)


def speeds_of(kind: str, pp: int) -> tuple[float, ...]:
    """Of each rank."""
    return tuple(0.8 if kind == "one slow rank" and rank == pp // 2 else 1.0 for rank in range(pp))


class WorkStage(nn.Module):
    """Waits for the work that its input says, and hands it on.

    Args:
        seconds: of work 1.
        queue: where weight gradients wait.
    """

    def __init__(self, seconds: float, queue: WeightGradientQueue | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.seconds, self.queue = seconds, queue

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Waits.apply(x.requires_grad_(), self.weight, self.seconds * float(x.detach()), self.queue)


def steps_of(
    rank: int, pipeline: Pipeline, work: Sequence[float], speed: float, unit_s: float, steps: int
) -> list[float]:
    """Seconds of each step, of the rank that ends last.

    Args:
        rank: of the row.
        pipeline: that it is a rank of.
        work: of each micro-batch.
        speed: of the rank.
        unit_s: see `UNIT`.
        steps: that are measured at most.
    """
    count, last = len(work), pipeline.num_stages - 1
    numbers = pipeline.stages_of(rank)
    queues = [WeightGradientQueue() if pipeline.defers else None for _ in numbers]
    stream = torch.empty(1, requires_grad=True, device="meta")
    stages = [
        PipelineStage(
            WorkStage(unit_s / pipeline.virtual / speed, queue), i, pipeline.num_stages,
            torch.device("cpu"), input_args=stream, output_args=stream, group=dist.group.WORLD,
            dw_builder=None if queue is None else queue.builder,
        )
        for i, queue in zip(numbers, queues, strict=True)
    ]  # fmt: skip
    single = issubclass(SCHEDULES[pipeline.schedule], PipelineScheduleSingle)
    schedule = SCHEDULES[pipeline.schedule](
        stages[0] if single else stages, n_microbatches=count, loss_fn=lambda out, _: out.sum(), scale_grads=False
    )
    args = (torch.tensor(work),) if 0 in numbers else ()
    target = {"target": torch.zeros(count)} if last in numbers else {}
    found = []
    for number in range(steps + 1):
        began = max(gather(dist.group.WORLD, time.monotonic())) + HEAD_START_S  # one clock for all processes
        time.sleep(max(0.0, began - time.monotonic()))
        with ExitStack() as regions:
            for queue in filter(None, queues):
                regions.enter_context(queue.region())
            schedule.step(*args, **target)
        found.append(max(gather(dist.group.WORLD, time.monotonic())) - began)
        shortest = sorted(found[1:])[:2]
        if number > 1 and shortest[1] < (1 + AGREE) * shortest[0]:  # the same on all ranks
            break
    return found[1:]


def on_one_rank(
    rank: int, pipeline: Pipeline, work: Sequence[float], speeds: Sequence[float], unit_s: float, steps: int
) -> list[float]:
    """`steps_of` of this rank."""
    return steps_of(rank, pipeline, work, speeds[rank], unit_s, steps)


def simulated_s(
    table: ScheduleTable, pipeline: Pipeline, work: tuple[float, ...], speeds: tuple[float, ...], unit_s: float
) -> float:
    """Of a step."""
    shares, kinds = ((1 / pipeline.virtual,) * pipeline.num_stages,), KindSeconds(unit_s, unit_s, unit_s)
    return SimulatedStep.of(table, StepCosts(PassCosts(kinds, (work,), shares, (speeds,)))).seconds


def main() -> None:
    """All runs."""
    from tests.ranks import on_ranks

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--unit", type=float, default=0.16, help=UNIT)
    options = parser.parse_args()
    pipelines = [Pipeline(pp, *how) for pp in options.ranks for how in (("1f1b", 1), ("interleaved", 2), ("zbv", 2))]
    asked = [(one, min(16, 4 * one.pp)) for one in pipelines]
    tables, runs = torch_tables(asked), []
    for (pipeline, count), kind in itertools.product(asked, KINDS):
        work, speeds = work_of(kind, count, seed=count), speeds_of(kind, pipeline.pp)
        with Stolen() as stolen:
            given = pipeline, work, speeds, options.unit
            found = on_ranks(pipeline.pp, on_one_rank, *given, options.steps, seconds=SECONDS)[0]
        wanted, took = simulated_s(tables[pipeline, count], *given), min(found)
        runs.append({
            "ranks": pipeline.pp, "schedule": pipeline.schedule, "microbatches": count, "kind": kind,
            "measured_s": spread(found), "simulated_s": wanted, "error": wanted / took - 1,
            "stolen": round(stolen.share, 3),
        })  # fmt: skip
        print(
            f"{pipeline.pp} {pipeline.schedule:12s} {kind:14s} {took:.3f} {wanted:.3f} {wanted / took - 1:+.1%}",
            flush=True,
        )
    errors = [abs(run["error"]) for run in runs]
    summary = {"runs": len(runs), "median_error": statistics.median(errors), "worst_error": max(errors)}
    print(summary)
    write_result("pipeline_simulated", CLAIM, {"unit_s": options.unit, **summary, "of_each": runs})


if __name__ == "__main__":
    main()
