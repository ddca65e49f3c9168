"""What is planned for: the machine at hand or a published one, and budgets as typed."""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from tilewright.core.config.load import CLI, DEFAULT, Loaded
from tilewright.core.config.recipe import Recipe
from tilewright.core.errors import ConfigError
from tilewright.core.hardware import Machine, detect_machine
from tilewright.core.log import say
from tilewright.core.units import format_bytes, parse_bytes
from tilewright.data.build.finished.open_built import built_at, built_vocabulary
from tilewright.data.common.tokenizer import load_tokenizer
from tilewright.planner.advice.changes import cheapest_changes, replan_with
from tilewright.planner.advice.describe import no_plan
from tilewright.planner.advice.sweep import largest
from tilewright.planner.cost.choices import Links
from tilewright.planner.cost.links import GUESSED_DISK, as_links, disk_speed, existing, host_speed, rank_speed
from tilewright.planner.cost.shards import Shards
from tilewright.planner.decide import planner_of
from tilewright.planner.machine import ceilings
from tilewright.planner.machine.gpu_specs import GUESSES, HOST_BYTES, LINK_SHARE, GpuSpec, find_published
from tilewright.planner.plan import Budget, Plan
from tilewright.planner.planner import Planner
from tilewright.planner.site import PublishedContext, Site
from tilewright.training.components.dataset import check_rows, tokenizer_path
from tilewright.training.components.pinned import pinned
from tilewright.training.planning.ranks import check_shared

GPUS = 8
"""In one machine, at most."""


@dataclass(frozen=True)
class PlanRequest:
    """Budgets as typed, empty where nothing was; the name of a published machine; the deepest model that fits."""

    device_memory: str = ""
    host_memory: str = ""
    disk_memory: str = ""
    on: str = ""
    largest: bool = False

    @property
    def decides(self) -> bool:
        """Whether the planner may choose; else the recipe is priced as it stands."""
        return bool(self.device_memory or self.host_memory or self.disk_memory or self.on or self.largest)


def planner_for(loaded: Loaded, options: PlanRequest, *, quiet: bool) -> tuple[Planner, Budget]:
    """The planner of a command, and its budget.

    Raises:
        ConfigError: a size that is none, or more than the machine has; a machine that nobody published; more ranks than
            can share the recipe, or an unknown number of them.
    """
    loaded = pinned(loaded, weights=False)
    recipe = loaded.recipe
    if recipe.model.path:
        check_rows(recipe)
    vocab_size = _vocab_size(recipe)
    disk = _size(options.disk_memory, "--disk-memory", None, "") if options.disk_memory else 0
    memory = recipe.memory
    if memory.executor == "layer_major" and "disk" in memory.tiers:
        disk = disk or _free_space(recipe)  # what the recipe says is there already
    ranks = _known_ranks(loaded)
    if options.on:
        row, machine, links = _published(options, disk, ranks)
        there = machine.device_memory_bytes
        device = (
            _size(options.device_memory, "--device-memory", there, machine.device_name)
            if options.device_memory
            else recipe.plan.device_memory or there
        )
        budget = Budget(device, machine.host_memory_bytes, links, disk)
        notes = (*published_notes(options.on), *_of_ranks(loaded, ranks, machine))
        return planner_of(loaded, vocab_size, machine, row.ceilings(), notes), budget
    machine = _share_of(detect_machine(recipe.run.device), ranks)
    torch.set_num_threads(recipe.run.threads or machine.physical_cores)
    rates = ceilings.measure(machine, progress=None if quiet else say)
    device, host = _budgets_here(options, machine, recipe.plan.device_memory, ranks)
    progress = None if quiet else say
    folder = _tier_folder(recipe)
    links = as_links(
        host_speed(machine, progress=progress),
        disk_speed(folder, machine, progress=progress) if disk else None,
        rank_speed(machine, ranks, progress=progress),
    )
    return planner_of(loaded, vocab_size, machine, rates, _of_ranks(loaded, ranks, machine)), Budget(
        device, host, links, disk
    )


def site_for(loaded: Loaded, options: PlanRequest, vocab_size: int, *, quiet: bool) -> Site:
    """The place for which `train` would plan a run, by the options of a command.

    The device's budget is in the recipe, as `plan.device_memory`; here it is checked.

    Args:
        loaded: the recipe.
        options: as typed.
        vocab_size: of the tokenizer.
        quiet: say nothing of measurements.

    Raises:
        ConfigError: a size that is none, or one that the machine at hand has anyway; a machine that nobody published;
            an unknown number of ranks.
    """
    recipe = loaded.recipe
    folder = Path(recipe.memory.offload_dir or Path(recipe.run.dir) / (recipe.run.name or loaded.name))
    ranks = _known_ranks(loaded)
    if options.on:
        disk = _size(options.disk_memory, "--disk-memory", None, "") if options.disk_memory else 0
        row, machine, links = _published(options, disk, ranks)
        _check_device(options, machine, machine.device_name)
        return PublishedContext(vocab_size, machine, row.ceilings(), folder, links, float(disk))
    for option, text in (("--host-memory", options.host_memory), ("--disk-memory", options.disk_memory)):
        if text:
            raise ConfigError(
                "Host and disk budgets of a fine-tune cannot be typed",
                got=f"{option} {text}",
                need="--device-memory alone, which the run's plan.device_memory sets too",
                try_=f"--device-memory, or {option} with --on for a machine that is not at hand",
                where=option,
            )
    machine = _share_of(detect_machine(recipe.run.device), ranks)
    _check_device(options, machine, _owner(ranks))
    torch.set_num_threads(recipe.run.threads or machine.physical_cores)
    progress = None if quiet else say
    rates = ceilings.measure(machine, progress=progress)
    return Site(vocab_size, machine, rates, folder, progress=progress)


def published_notes(name: str) -> tuple[str, ...]:
    """Where the numbers of a published machine come from, and what is guessed of them."""
    row = find_published(name)
    return f"published, not measured: {row.full_name} ({row.source})", GUESSES


def _share_of(machine: Machine, ranks: int) -> Machine:
    """What each of so many ranks has of a machine; of GPUs there are at most `GPUS` in one, and they share its host."""
    return machine.shared_by(ranks if machine.device == "cpu" else min(ranks, GPUS))


def _known_ranks(loaded: Loaded) -> int:
    """The number of ranks that a plan is for.

    Raises:
        ConfigError: as many shards were typed as torchrun starts processes, and here it starts none; or so many ranks
            cannot share the recipe.
    """
    if loaded.recipe.parallel.dp_shard == -1 and loaded.sources["parallel.dp_shard"].startswith((CLI, "env")):
        raise ConfigError(
            "Number of processes is not known to a plan",
            got="parallel.dp_shard = -1, which is what torchrun starts; a plan is made without it",
            need="the number of shards that the run will have",
            try_="--parallel.dp_shard 4 for torchrun --nproc-per-node 4; without the option, the plan of one process",
            where="parallel.dp_shard",
        )
    ranks = Shards.of(loaded.recipe).ranks
    check_shared(loaded.recipe, ranks)
    return ranks


def _of_ranks(loaded: Loaded, ranks: int, machine: Machine) -> tuple[str, ...]:
    """What a plan takes for granted of ranks and machines."""
    if loaded.recipe.parallel.dp_shard == -1 and loaded.sources["parallel.dp_shard"] != DEFAULT:
        many = "one process" if ranks == 1 else f"{ranks} processes"
        return (
            f"parallel.dp_shard = -1 is filled in by torchrun; this is the plan of {many}, and --parallel.dp_shard N "
            "plans N shards",
            *_shared_host(ranks, machine),
        )
    return _shared_host(ranks, machine)


def _shared_host(ranks: int, machine: Machine) -> tuple[str, ...]:
    """What a plan for several ranks takes for granted of machines."""
    if ranks == 1:
        return ()
    if machine.device == "cpu":
        return (f"taken for granted: all {ranks} ranks are on this machine, and share its cores and memory",)
    return (f"taken for granted: a GPU for each rank, {min(ranks, GPUS)} of them in a machine, which share its host",)


def _owner(ranks: int) -> str:
    """Whose memory a typed size is held against."""
    return "this machine" if ranks == 1 else f"each of {ranks} ranks on this machine"


def _published(options: PlanRequest, disk: int, ranks: int) -> tuple[GpuSpec, Machine, Links]:
    """What a rank has of a machine that is not at hand, and its links; without bytes on its disk, none to that."""
    row = find_published(options.on)
    host = _size(options.host_memory, "--host-memory", None, "") if options.host_memory else HOST_BYTES
    guessed = f"guessed: {GUESSED_DISK / 1e9:.0f} GB/s of the disk" if disk else ""
    links = Links(LINK_SHARE * row.link, GUESSED_DISK if disk else None, guessed)
    return row, _share_of(row.machine(detect_machine("cpu"), host), ranks), links


def _check_device(options: PlanRequest, machine: Machine, owner: str) -> None:
    if options.device_memory:
        _size(options.device_memory, "--device-memory", machine.device_memory_bytes, owner)


def plan_for(planner: Planner, budget: Budget, request: PlanRequest) -> Plan:
    """The plan that was asked for: the recipe as it stands, or the fastest within a budget.

    Raises:
        FitError: the planner may decide, and nothing fits.
        UnknownFitError: it may decide, and the model cannot be traced.
    """
    if not request.decides:
        return planner.as_it_stands(budget)
    found = largest(planner, budget) if request.largest else planner.plan(budget)
    if found is None:
        changes = cheapest_changes(planner.recipe, budget, None, replan_with(planner))
        raise no_plan(planner, budget, [str(change) for change in changes])
    return found


def _tier_folder(recipe: Recipe) -> str:
    return recipe.memory.offload_dir or recipe.run.dir


def _free_space(recipe: Recipe) -> int:
    """Of the disk that the recipe's tier is on."""
    return shutil.disk_usage(existing(_tier_folder(recipe))).free


def _budgets_here(options: PlanRequest, machine: Machine, wanted: int, ranks: int) -> tuple[int, int]:
    """Device and host budget of a rank on the machine at hand."""
    if options.host_memory and machine.device == "cpu":
        raise ConfigError(
            "Two memory sizes for one CPU memory",
            got=f"--host-memory {options.host_memory}",
            need="--device-memory alone",
            try_="--device-memory, or --on for a machine that is not at hand",
            where="--host-memory",
        )
    device, host = wanted or machine.device_memory_bytes, machine.host_memory_bytes
    if options.device_memory:
        device = _size(options.device_memory, "--device-memory", machine.device_memory_bytes, _owner(ranks))
    if options.host_memory:
        host = _size(options.host_memory, "--host-memory", machine.host_memory_bytes, _owner(ranks))
    return device, host


def _size(text: str, option: str, most: int | None, owner: str) -> int:
    """Bytes from text, with the units as they are written: Gib and Gb are bits to many."""
    unit = re.sub(r"[^A-Za-z]", "", text)
    try:
        size = parse_bytes(text)
        if unit != unit.lower() and unit.endswith("b"):
            raise ValueError(f"{unit} may mean bits")
        if size <= 0:
            raise ValueError("no memory at all")
    except ValueError as error:
        raise ConfigError(
            "Invalid memory size",
            got=f"{option} {text!r}: {error}",
            need="a number above 0 with GiB, GB, MiB or MB",
            try_=f"{option} 24GiB",
            where=option,
        ) from error
    if most is not None and size > most:
        raise ConfigError(
            "Memory size exceeds that of the machine",
            got=f"{option} {text}, {owner} has {format_bytes(most)}",
            need=f"at most {format_bytes(most)}",
            try_=f"{option} {most // 2**30}GiB, or --on for a machine that is not at hand",
            where=option,
        )
    return size


def _vocab_size(recipe: Recipe) -> int:
    """Tokens of the tokenizer that the run would use, of a built dataset its own; classes of images."""
    built = None if recipe.data.sources else built_at(recipe.data.source)
    if built is not None:
        return built_vocabulary(built, images=recipe.model.task == "image_classification")
    if recipe.model.task == "image_classification":
        source = Path(recipe.data.source).expanduser()
        return max(1, sum(path.is_dir() for path in source.iterdir())) if source.is_dir() else 1
    path = tokenizer_path(recipe.model, recipe.data)
    return load_tokenizer(path).vocab_size if path else recipe.data.vocab_size
