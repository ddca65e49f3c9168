"""From a recipe to everything a run needs, built in the order in which trouble is cheapest to find.

`set_up`: machine, kernels, data, plan; no model memory yet. `build`: model, precision, optimizer, stream, executor.
What it makes takes plain arguments or sections; what decides what is made (`set_up`, the executor's factory) reads the
whole recipe.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

import torch
import xxhash

from tilewright.core.config.load import Loaded
from tilewright.core.config.recipe import Recipe
from tilewright.core.hardware import Machine, detect_machine
from tilewright.core.log import say
from tilewright.core.memory_plan import MemoryPlan, memory_plan_of
from tilewright.data.batches.stream import Stream
from tilewright.data.common.tokenizer import Tokenizer
from tilewright.data.dataset.prepared_chat import PreparedChat
from tilewright.data.dataset.prepared_images import PreparedImages
from tilewright.data.dataset.prepared_text import PreparedData
from tilewright.memory.tracking.malloc import trim_malloc
from tilewright.memory.tracking.tracker import FreeHeap, MemoryTracker
from tilewright.models.base.protocols import InitialValues, Model
from tilewright.ops.base.compile import compiles_layers
from tilewright.ops.kernels import Kernels
from tilewright.optim.adam import DeepSeekAdam
from tilewright.optim.clip import GradClip
from tilewright.optim.schedule import LRSchedule
from tilewright.parallel.agree import gather
from tilewright.parallel.communicate.gradient_sync import GradientSync
from tilewright.parallel.launch import check_equal, in_turn, on_first
from tilewright.parallel.parallelize import compile_layers, counted_elsewhere, parallelize
from tilewright.parallel.pipeline.stage_split import Pipeline
from tilewright.parallel.shard import WholeBytes, is_sharded
from tilewright.parallel.world import World
from tilewright.planner.machine import ceilings
from tilewright.planner.plan import Plan
from tilewright.planner.plan_file import PlanFile
from tilewright.planner.replan import Replanner
from tilewright.planner.site import Site
from tilewright.precision.controller.precision_controller import sites_of
from tilewright.precision.convert import convert, set_mode
from tilewright.precision.float8.audit import Audit
from tilewright.precision.loss_scaling.loss_scale import DynamicScaler
from tilewright.precision.policy.policy import Policy
from tilewright.precision.policy.precision_report import ConversionReport
from tilewright.precision.policy.schedule import ModeSchedule
from tilewright.training.checkpoint.checkpoint_state import TrainState
from tilewright.training.checkpoint.random_generators import draw_apart, seed_all
from tilewright.training.components.export import check_export
from tilewright.training.components.lifecycle import add_in_fp32, num_parameters
from tilewright.training.components.model import build_trained, fill_whole, first_values, is_vacant, pinned
from tilewright.training.components.optimizer import make_optimizer, rounding_numbers
from tilewright.training.components.recipe_data import held_out, in_parts, other_data, other_text, prepare_data
from tilewright.training.components.run_samples import stream_of
from tilewright.training.components.teacher import open_teacher
from tilewright.training.executor.activation_policy import checkpoint_layers, cut_layers
from tilewright.training.executor.base import Executor, ExecutorInputs, ExecutorKind
from tilewright.training.executor.evaluate import HeldOut
from tilewright.training.executor.executor_kinds import executor_of
from tilewright.training.hooks.pipeline_setup import rank_hooks
from tilewright.training.hooks.precision_hook import PrecisionModes, precision_hook
from tilewright.training.hooks.step_hook import AfterStep, StepHook, by_name
from tilewright.training.planning.minutes import Length, lasting
from tilewright.training.planning.oom_report import explained
from tilewright.training.planning.resolve_plan import plan_run, replanner_of
from tilewright.training.runlog.record_files import Counters

H = TypeVar("H", bound=StepHook)


@dataclass(frozen=True)
class RunContext:
    """Facts that are known before the model takes memory."""

    machine: Machine
    kernels: Kernels
    prepared: PreparedData | PreparedImages
    loaded: Loaded
    """The recipe with the plan's settings."""
    plan: Plan
    """Expected seconds and bytes of the run."""
    site: Site
    other: PreparedData | None
    """`data.eval_source`, where it is evaluated beside what is held out."""
    world: World = field(default_factory=World.alone)
    """The processes of the run."""
    given: ExecutorKind | None = None
    """An executor instead of the one that the recipe names."""

    @cached_property
    def other_text(self) -> HeldOut:
        """Held-out rows of `data.eval_source`, assembled for a run."""
        return other_text(self.other)

    @property
    def recipe(self) -> Recipe:
        """The settings of a run that is assembled."""
        return self.loaded.recipe

    @property
    def executor(self) -> ExecutorKind:
        """The executor of the steps of an assembled run."""
        return executor_of(self.recipe, self.given)

    @property
    def memory_plan(self) -> MemoryPlan | None:
        """The memory plan of each layer of an assembled run; None: the same for all, as the recipe says."""
        return self.plan.memory_plan if self.plan.decided and self.plan.shape.classes else None

    def lasting(self, length: Length) -> "RunContext":
        """The facts of an assembled run for another number of steps, an event of it where there is something to say."""
        told = ((length.text, length.numbers),) if length.text else ()
        plan = replace(self.plan, events=(*self.plan.events, *told))
        return replace(self, loaded=lasting(self.loaded, length), plan=plan)

    def replanner(self) -> Replanner | None:
        """Assemble the re-planner of a run; None where it cannot be planned again."""
        return replanner_of(self.loaded, self.site, self.plan)

    @property
    def device(self) -> torch.device:
        """The device on which the model of an assembled run is."""
        return torch.device(self.machine.device)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of an assembled run's data; None where it is images."""
        return self.prepared.tokenizer if isinstance(self.prepared, PreparedData) else None

    def save_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer of an assembled run, and the chat template where there is one; the first rank does."""
        prepared = self.prepared

        def save() -> None:
            if isinstance(prepared, PreparedData):
                prepared.tokenizer.save(folder)
            if isinstance(prepared, PreparedChat):
                prepared.template.save(folder)

        on_first(self.world, save)

    @property
    def recipe_digest(self) -> str:
        """A hash of all settings of an assembled run."""
        return xxhash.xxh3_128_hexdigest(self.recipe.model_dump_json().encode())

    @property
    def waits(self) -> bool:
        """True where the assembled run computes weight gradients later than those of inputs."""
        return self.recipe.parallel.pp > 1 and Pipeline.of(self.recipe.parallel).defers

    @property
    def compiles(self) -> bool:
        """True where an assembled run compiles layers: not by themselves where gradients wait or matrices are cut.

        Raises:
            HardwareError: the recipe insists, and there is no compiler that can be used.
        """
        recipe = self.recipe
        by_default = recipe.model.kind != "hf" and not self.waits and recipe.parallel.tp == 1
        return compiles_layers(recipe.train.compile, self.machine, by_default=by_default)

    @property
    def offload_dir(self) -> Path:
        """Folder of the disk tier of an assembled run."""
        return self.site.offload_dir

    @property
    def memory_limit(self) -> int:
        """Bytes that an assembled run may use on the device."""
        return self.recipe.plan.device_memory or self.machine.device_memory_bytes


@dataclass
class Components:
    """Objects that a step needs and changes."""

    model: Model
    modes: PrecisionModes
    optimizer: DeepSeekAdam
    scaler: DynamicScaler | None
    clip: GradClip
    schedule: LRSchedule
    stream: Stream
    memory_tracker: MemoryTracker
    executor: Executor
    counters: Counters
    setup: RunContext
    heap: FreeHeap
    counted: tuple[int, int]
    """Parameters of the whole model: those that are trained, and all."""
    hooks: tuple[StepHook, ...]
    """The hooks around the steps, in order."""
    sync: GradientSync | None
    """How gradients are summed over the ranks."""

    @cached_property
    def audit(self) -> Audit:
        """Formats that the matmuls of an assembled run's model have executed, on ranks with other layers too."""
        world = self.setup.world
        return Audit(self.model, partial(gather, world.waiting_group) if world.row.size > 1 else None)

    @cached_property
    def held_out(self) -> HeldOut:
        """Held-out rows of an assembled run's data, made once."""
        return held_out(self.setup.recipe, self.setup.prepared)

    @cached_property
    def held_out_parts(self) -> tuple[HeldOut, HeldOut]:
        """The held-out rows that evaluations of an assembled run on the way take, and the rest."""
        return in_parts(self.setup.recipe, self.setup.prepared, self.held_out)

    def state(self) -> TrainState:
        """The state of an assembled run: everything that a checkpoint holds."""
        small = {"counters": self.counters, "stream": self.stream, "audit": self.audit, **self.executor.stateful()}
        small |= by_name(self.hooks, taken=small)
        lost = None if self.sync is None else self.sync.feedback
        return TrainState(self.model, self.optimizer, small, self.executor.access, self.setup.world, lost)

    def hook(self, kind: type[H]) -> H | None:
        """The assembled run's hook of this class; None where there is none."""
        return next((hook for hook in self.hooks if isinstance(hook, kind)), None)

    def close(self) -> None:
        """Close an assembled run: free threads, files and memory off the device."""
        self.stream.close()
        self.memory_tracker.close()
        self.executor.close()


HookFactory = Callable[[RunContext, Components], StepHook]
"""Makes a hook of a run that is assembled, at the step that it begins with."""


def set_up(
    loaded: Loaded,
    *,
    world: World = World.alone(),  # noqa: B008 (frozen)
    run_plan: PlanFile | None = None,
    resuming: bool = False,
    at: Callable[[str], object] = lambda _: None,
    executor: ExecutorKind | None = None,
) -> RunContext:
    """Assemble a run, first: machine, kernels, data and plan. The first of several ranks prepares, measures and plans.

    Args:
        loaded: the recipe.
        world: the processes of the run; those of one machine share its cores and memory.
        run_plan: the plan that the run resumes under.
        resuming: the run has a checkpoint: nothing is decided that changes a number.
        at: told what begins.
        executor: runs the steps instead of the one that the recipe names, at whose costs they are planned.

    Raises:
        HardwareError: the device is not there.
        CheckpointError: a model of the hub that cannot be had.
        DataError: the data cannot be used.
        ConfigError: the data's settings do not fit the model, or a plan file that cannot be used, or ranks whose data
            differ.
        FitError: the plan says that the run does not fit, and the recipe enforces it.
    """
    loaded = in_turn(world, lambda: pinned(loaded))
    recipe = loaded.recipe
    machine = detect_machine(recipe.run.device).shared_by(world.local_size)
    torch.set_num_threads(recipe.run.threads or machine.physical_cores)
    add_in_fp32(machine.device)
    world.at("data preparation")
    prepared = in_turn(world, lambda: prepare_data(recipe))
    check_equal(world, {"prepared data": prepared.fingerprint})

    def planned() -> tuple[Loaded, Plan, Site]:
        at("measuring this machine")
        rates = ceilings.measure(machine, progress=say, own_process=True)
        run = recipe.run
        offload_dir = Path(recipe.memory.offload_dir or Path(run.dir) / (run.name or loaded.name))
        together = world.local_size == world.size
        at("planning")
        known = {"notes": prepared.notes, "attention_share": prepared.attention_share}
        site = Site(prepared.vocab_size, machine, rates, offload_dir, mesh=world.sizes, one_machine=together, **known)
        return *plan_run(loaded, site, run_plan=run_plan, resuming=resuming), site

    world.at("planning")
    resolved, plan, site = on_first(world, planned)
    trim_malloc()  # what all of this used; a plan is of the run
    settings = resolved.recipe
    kernels = Kernels.from_sections(machine, settings.ops, settings.memory)
    other = in_turn(world, lambda: other_data(settings, prepared))
    return RunContext(machine, kernels, prepared, resolved, plan, site, other, world, executor)


def build(
    setup: RunContext,
    *,
    fresh: bool,
    memory_plan: MemoryPlan | None = None,
    values_of: Callable[[Model], InitialValues] | None = None,
) -> Components:
    """Assemble a run, second: model, precision, optimizer, executor, hooks and data stream.

    In this order: what reads a module's kind or dtype comes after what sets it, and what holds a parameter after what
    makes it a new object.

    Args:
        setup: machine, data and plan.
        fresh: give the model its initial weights; False where a checkpoint overwrites them.
        memory_plan: what is done with each layer; None: what the plan, or the recipe, says.
        values_of: gives a model its first weights where they are written late (layer by layer, shards); None: those
            that the recipe says.
    """
    recipe, device, world = setup.recipe, setup.device, setup.world
    can, memory_plan = setup.executor.capabilities, memory_plan or setup.memory_plan
    seed_all(recipe.run.seed)  # alike on all ranks, which make the same model
    memory_tracker = MemoryTracker(device)
    with explained(memory_tracker, recipe, "while the model was made"), memory_tracker.phase("load"):
        # 1. Built without memory where it is filled in pieces. What layers keep is set before they are compiled.
        vacant = is_vacant(recipe, world, can)
        model = build_trained(
            recipe, setup.prepared.vocab_size, setup.kernels, "meta" if vacant else device,
            fresh=fresh and not vacant, lazy=not vacant,
        )  # fmt: skip
        check_export(recipe, model)
        layers = memory_plan or memory_plan_of(recipe, len(model.layers) or 1)
        if can.activation_checkpoint:
            checkpoint_layers(model, layers)
        model.checkpoint_inputs = recipe.train.checkpoint_inputs
        values = (values_of or partial(first_values, recipe))(model.train()) if vacant else None
        # 2. Converted before anything is cut or filled: dtypes and kinds of layers are settled here.
        policy, schedule, scaled, reports = _precision(setup, model)
        # 3. Cut, each part filled on its rank. A base under adapters is encoded as it is read, so it is filled before.
        fill_whole(recipe, model, device, values, world)
        counted, num_params = num_parameters(model), sum(param.numel() for param in model.parameters())
        in_stages = world.row.size > 1
        numbers = rounding_numbers(recipe.optim, model) if recipe.parallel.numbers_by_name else None
        sites = sites_of(model) if recipe.precision.moves_matmuls else None  # of all ranks
        model = parallelize(model, world, setup.plan.held(recipe.parallel), device=device, values=values, fresh=fresh)
        sync = GradientSync.attached(world, recipe.parallel, setup.kernels, model)
        layers = memory_plan or memory_plan_of(recipe, len(model.layers) or 1)
        # 4. Compiled as it is now; nothing is traced before the first step.
        cut_layers(model, layers, compile=setup.compiles and world.sizes.tp == 1)
        if setup.compiles:
            compile_layers(model, world, waits=setup.waits)
        # 5. The optimizer, over parameters that stay the same objects from here on.
        optim = recipe.optim
        optimizer = make_optimizer(optim, model, setup.kernels, recipe.run.seed, numbers)
        scaler = DynamicScaler.from_section(recipe.precision, fp16=scaled, num_params=num_params)
        limits = optim.clip_norm, optim.clip_adaptive, optim.clip_threshold
        more = {"elements": optim.clip_elements, "counted_elsewhere": counted_elsewhere(model, world)}
        clip = GradClip(*limits, row=world.row.handle, experts=world.experts.handle, **more)
        control = precision_hook(recipe, model, device, world.everyone.handle, sites)
        # 6. The executor, which gives parameters and states their homes.
        executor = setup.executor.make(
            ExecutorInputs(
                recipe=recipe, model=model, optimizer=optimizer, memory_plan=memory_plan, clip=clip, scaler=scaler,
                control=None if control is None else control.control, memory_tracker=memory_tracker,
                kernels=setup.kernels, world=world, folder=setup.offload_dir, values=values, sync=sync,
            )
        )  # fmt: skip
        modes = PrecisionModes(
            model, policy, schedule, schedule.at(0), scaled, executor.weights, reports if in_stages else {}
        )
    memory_tracker.watch(model, WholeBytes(model) if is_sharded(model) else dict)
    if sync is not None:
        memory_tracker.count_beside(sync.owned_bytes)
    # 7. Hooks. The controller samples what the stream gave, so the teacher adds to it after; free pages go last.
    heap = FreeHeap(memory_tracker, setup.plan.allocated_bytes)
    draw_apart(world)
    teacher = open_teacher(recipe, setup.prepared, model, policy, world) if recipe.distill.teacher else None
    hooks = modes, *filter(None, (control, teacher)), AfterStep(heap.after_step)
    # 8. The stream, which reads ahead from here on.
    stream = stream_of(recipe, setup.prepared, rank=world.data.rank, world=world.data.size)
    hooks += rank_hooks(recipe.parallel, model, executor, world, stream, setup.memory_limit, sync)
    rates = LRSchedule(
        optim.schedule, optim.lr, recipe.train.steps, optim.warmup_steps, optim.decay_fraction, optim.min_lr_ratio
    )
    return Components(
        model=model, modes=modes, optimizer=optimizer, scaler=scaler, clip=clip, schedule=rates, stream=stream,
        memory_tracker=memory_tracker, executor=executor, counters=Counters(), setup=setup, heap=heap,
        counted=counted, hooks=hooks, sync=sync,
    )  # fmt: skip


def _precision(setup: RunContext, model: Model) -> tuple[Policy, ModeSchedule, bool, dict[str, ConversionReport]]:
    """Assemble a run's precision: the first mode, the policy, modes by step, loss scaling, reports by mode."""
    section = setup.recipe.precision
    parameters = "" if setup.recipe.optim.master_weights == "fp32" else "bf16"
    policy = Policy.from_section(section, setup.machine.device, parameters=parameters)
    schedule = ModeSchedule.from_section(section, setup.recipe.train.steps)
    first, last = schedule.at(0), schedule.mode
    reports = {first: convert(model, policy.in_mode(first), kernels=setup.kernels).precision_report}
    if last != first:
        reports[last] = set_mode(model, policy.in_mode(last))
        set_mode(model, policy.in_mode(first))
    return policy, schedule, any(report.needs_loss_scaling for report in reports.values()), reports
