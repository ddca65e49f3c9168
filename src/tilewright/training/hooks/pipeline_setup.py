"""Hooks that some runs have: of rows of several domains, of ranks, of a model in stages. torch's pipelining takes its
time to be imported, so this is where it first is."""

from typing import cast

import torch

from tilewright.core.config.sections.parallel import ParallelSection
from tilewright.data.batches.rank_sums import SumsOfRanks
from tilewright.data.batches.stream import Stream
from tilewright.models.base.protocols import Model
from tilewright.models.decoder.decoder import Decoder
from tilewright.parallel.communicate.gradient_sync import GradientSync
from tilewright.parallel.world import World
from tilewright.training.executor.base import Executor
from tilewright.training.hooks.expert_hook import ExpertHook
from tilewright.training.hooks.step_hook import AfterStep, StepHook
from tilewright.training.hooks.sync_hook import GradSyncHook


def rank_hooks(
    section: ParallelSection,
    model: Model,
    executor: Executor,
    world: World,
    stream: Stream,
    limit_bytes: int,
    sync: GradientSync | None,
) -> tuple[StepHook, ...]:
    """Set up hooks of runs on several processes: those of `pipeline_hooks`; the mover of experts; the raiser of wire
    formats.

    Args:
        section, model, executor, world, stream, limit_bytes: see `pipeline_hooks`.
        sync: how gradients are summed; None on one process.
    """
    found = pipeline_hooks(section, model, executor, world, stream, limit_bytes)
    if section.place_experts == "on" and world.experts.size > 1:
        found += (ExpertHook(cast(Decoder, model), world, section),)
    if sync is not None and section.grad_sync_error:
        found += (GradSyncHook(sync, section.grad_sync_error, world.everyone.handle),)
    return found


def pipeline_hooks(
    section: ParallelSection, model: Model, executor: Executor, world: World, stream: Stream, limit_bytes: int
) -> tuple[StepHook, ...]:
    """Set up the pipeline's hooks, which measure passes of stages and balance documents over them; none where there are
    no stages.

    Args:
        section: `[parallel]`.
        model: this rank's part.
        executor: of the run.
        world: of the run.
        stream: of the run.
        limit_bytes: that it may use on this rank's device.
    """
    if section.pp == 1:
        return ()
    from tilewright.parallel.pipeline.stage_base import Staged
    from tilewright.training.executor.pipeline import PipelineExecutor
    from tilewright.training.hooks.pipeline_hook import PipelineHook

    assert isinstance(model, Staged), "cut by `parallelize`"
    runs = cast(PipelineExecutor, executor)  # the one that can run stages
    balance = section.balance == "on" and stream.takes_documents
    return (
        PipelineHook(
            model, runs, world, stream, balance=balance, resplit=section.resplit == "on", limit_bytes=limit_bytes
        ),
    )


def domain_hooks(world: World, stream: Stream, device: torch.device) -> tuple[StepHook, ...]:
    """Set up the hook that reports the training loss of each domain; none where there is one domain.

    Args:
        world: of the run.
        stream: of the run.
        device: of the run.
    """
    if len(stream.domains) < 2:
        return ()
    sums = SumsOfRanks(stream, world, device)
    return (AfterStep(sums.after_step, name="domain_losses", part=sums),)
