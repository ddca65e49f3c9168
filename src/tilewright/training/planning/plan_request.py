"""Target of a plan: the machine at hand or a published one, and budgets as typed."""

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tilewright.core.config.change_recipe import changed
from tilewright.core.config.load import CLI, DEFAULT, Loaded
from tilewright.core.config.recipe import Recipe
from tilewright.core.errors import ConfigError
from tilewright.core.hardware import Machine, detect_machine
from tilewright.core.log import say
from tilewright.core.units import format_bytes, parse_bytes
from tilewright.data.common.tokenizer import load_tokenizer
from tilewright.planner.advice.plan_sweep import largest
from tilewright.planner.cost.layer_choices import Links
from tilewright.planner.cost.rank_share import Shards, check_shared
from tilewright.planner.cost.storage_links import GUESSED_DISK
from tilewright.planner.decide import AUTO, How, decide
from tilewright.planner.machine import ceilings
from tilewright.planner.machine.gpu_specs import GUESSES, HOST_BYTES, LINK_SHARE, find_published
from tilewright.planner.plan import Plan
from tilewright.planner.site import Site, on_disk
from tilewright.training.components.model import pinned
from tilewright.training.components.recipe_tokenizer import check_rows, tokenizer_path
from tilewright.training.planning.does_not_fit import nothing_fits
from tilewright.training.planning.resolve_plan import plan_run

GPUS = 8
"""In one machine, at most."""


@dataclass(frozen=True)
class PlanRequest:
    """Budgets as typed, empty where nothing was; the name of a published machine; what is looked for."""

    device_memory: str = ""
    host_memory: str = ""
    disk_memory: str = ""
    on: str = ""
    fastest: bool = False
    """The fastest plan instead of what `train` does."""
    largest: bool = False
    """The deepest model that fits."""

    @property
    def how(self) -> How:
        """The request for a plan in `decide`'s words."""
        return "fastest" if self.fastest else "least_change"


def asked_for(loaded: Loaded, request: PlanRequest, *, quiet: bool = False) -> tuple[Loaded, Site]:
    """The recipe and site that a command plans: those of `train`, with the requested budget as `plan.device_memory`.

    Raises:
        ConfigError: a size that is none, or more than the machine has; a machine that is not published; more ranks than
            can share the recipe, or an unknown number of them.
    """
    loaded = pinned(loaded, weights=False)
    if loaded.recipe.model.path:
        check_rows(loaded.recipe)
    site = site_of(loaded, request, vocab_size_of(loaded.recipe), quiet=quiet)
    if not request.device_memory:
        return loaded, site
    device = _size(request.device_memory, "--device-memory", None, "")
    return replace(loaded, recipe=changed(loaded.recipe, {"plan.device_memory": device})), site


def site_of(loaded: Loaded, options: PlanRequest, vocab_size: int, *, quiet: bool = False) -> Site:
    """The site that a plan is requested for, by which a recipe is planned, by the options of a command; the device's
    budget is checked here, and belongs into the recipe.

    Args:
        loaded: the recipe.
        options: as typed.
        vocab_size: of the tokenizer.
        quiet: say nothing of measurements.

    Raises:
        ConfigError: a size that is none, or more than the machine has; a machine that is not published; an unknown
            number of ranks.
    """
    recipe, progress = loaded.recipe, None if quiet else say
    folder = Path(recipe.memory.offload_dir or Path(recipe.run.dir) / (recipe.run.name or loaded.name))
    ranks = _known_ranks(loaded)
    disk = float(_size(options.disk_memory, "--disk-memory", None, "")) if options.disk_memory else None
    if options.on:
        row = find_published(options.on)
        host = _size(options.host_memory, "--host-memory", None, "") if options.host_memory else HOST_BYTES
        machine = _share_of(row.machine(detect_machine("cpu"), host), ranks)
        _check_device(options, machine, machine.device_name)
        uses = disk is not None or on_disk(recipe)  # what the recipe says is there already
        guessed = f"guessed: {GUESSED_DISK / 1e9:.0f} GB/s of the disk" if uses else ""
        links = Links(LINK_SHARE * row.link, GUESSED_DISK if uses else None, guessed)
        notes = (*published_notes(options.on), *_of_ranks(loaded, ranks, machine))
        return Site(vocab_size, machine, row.ceilings(), folder, links=links, disk=disk, notes=notes)
    machine = _share_of(detect_machine(recipe.run.device), ranks)
    _check_device(options, machine, _owner(ranks))
    if options.host_memory:
        machine = replace(machine, host_memory_bytes=_host_here(options, machine, ranks))
    torch.set_num_threads(recipe.run.threads or machine.physical_cores)
    rates, notes = ceilings.measure(machine, progress=progress), _of_ranks(loaded, ranks, machine)
    return Site(vocab_size, machine, rates, folder, disk=disk, notes=notes, progress=progress)


def published_notes(name: str) -> tuple[str, ...]:
    """Notes on the numbers of a published machine in a plan: where they come from, and which of them are guesses."""
    row = find_published(name)
    return f"published, not measured: {row.full_name} ({row.source})", GUESSES


def _share_of(machine: Machine, ranks: int) -> Machine:
    """Each rank's share of the machine of a requested plan; of GPUs there are at most `GPUS` in one, and they share its
    host."""
    return machine.shared_by(ranks if machine.device == "cpu" else min(ranks, GPUS))


def _known_ranks(loaded: Loaded) -> int:
    """The number of ranks that a plan is requested for.

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
    shards = Shards.of(loaded.recipe)
    check_shared(loaded.recipe, shards.ranks)
    return shards.processes


def _of_ranks(loaded: Loaded, ranks: int, machine: Machine) -> tuple[str, ...]:
    """Assumptions of a requested plan about ranks and machines."""
    if loaded.recipe.parallel.dp_shard == -1 and loaded.sources["parallel.dp_shard"] != DEFAULT:
        many = "one process" if ranks == 1 else f"{ranks} processes"
        return (
            f"parallel.dp_shard = -1 is filled in by torchrun; this is the plan of {many}, and --parallel.dp_shard N "
            "plans N shards",
            *_shared_host(ranks, machine),
        )
    return _shared_host(ranks, machine)


def _shared_host(ranks: int, machine: Machine) -> tuple[str, ...]:
    """Assumptions of a plan requested for several ranks about machines."""
    if ranks == 1:
        return ()
    if machine.device == "cpu":
        return (f"taken for granted: all {ranks} ranks are on this machine, and share its cores and memory",)
    return (f"taken for granted: a GPU for each rank, {min(ranks, GPUS)} of them in a machine, which share its host",)


def _owner(ranks: int) -> str:
    """Whose memory a typed size of a request for a plan is held against."""
    return "this machine" if ranks == 1 else f"each of {ranks} ranks on this machine"


def device_budget(text: str, machine: Machine) -> float:
    """Bytes of a device that may be used, as the request for a plan types it; empty: all of it.

    Raises:
        ConfigError: a size that is none, or more than the machine has.
    """
    if not text:
        return float(machine.device_memory_bytes)
    return float(_size(text, "--device-memory", machine.device_memory_bytes, machine.device_name))


def _check_device(options: PlanRequest, machine: Machine, owner: str) -> None:
    if options.device_memory:
        _size(options.device_memory, "--device-memory", machine.device_memory_bytes, owner)


def plan_for(loaded: Loaded, site: Site, request: PlanRequest, *, as_it_stands: bool = False) -> Plan:
    """Make the requested plan: that of `train`, the fastest one, or that of the deepest model. A recipe for which
    nothing is decided is priced if it fits or not.

    Args:
        loaded: the recipe.
        site: where it would run.
        request: what was asked for.
        as_it_stands: where nothing that `train` may decide fits, the recipe as it stands, which does not.

    Raises:
        FitError: nothing fits.
        UnknownFitError: nothing is known of a step, and the fastest one, or the deepest model, is asked for.
    """
    if request.largest or request.fastest:
        found = largest(loaded, site, request.how) if request.largest else decide(loaded, site, request.how)
        if found is None or not found.accepted:
            raise nothing_fits(loaded, site, request.how)
        return found
    priced = changed(loaded.recipe, {"plan.enforce": False})
    _, plan = plan_run(replace(loaded, recipe=priced), site)
    open_ = loaded.recipe.memory.plan == AUTO and not plan.stands_because
    if not as_it_stands and plan.state == "does not fit" and open_:
        raise nothing_fits(loaded, site)
    return plan


def _host_here(options: PlanRequest, machine: Machine, ranks: int) -> int:
    """Host memory of a rank on the machine at hand, as the request for a plan types it."""
    if machine.device == "cpu":
        raise ConfigError(
            "Two memory sizes for one CPU memory",
            got=f"--host-memory {options.host_memory}",
            need="--device-memory alone",
            try_="--device-memory, or --on h200 for another machine",
            where="--host-memory",
        )
    return _size(options.host_memory, "--host-memory", machine.host_memory_bytes, _owner(ranks))


def _size(text: str, option: str, most: int | None, owner: str) -> int:
    """Bytes from the text of a request for a plan, with the units as they are written: Gib and Gb are bits to many."""
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
            try_=f"{option} {most // 2**30}GiB, or --on h200 for another machine",
            where=option,
        )
    return size


def vocab_size_of(recipe: Recipe) -> int:
    """The vocabulary size of a recipe that is planned: tokens of its tokenizer, a built dataset's own number, or
    classes of images."""
    source = Path(recipe.data.source).expanduser()
    if "://" in (first := next(iter(recipe.data.sources.values()), recipe.data.source)):
        from tilewright.data.dataset.remote.address import is_address
        from tilewright.data.dataset.remote.open_remote import far_vocabulary
        from tilewright.training.components.recipe_data import streaming_of

        if is_address(first):
            return far_vocabulary(first, streaming_of(recipe))
    if not recipe.data.sources and os.path.isdir(source):  # False, too, for what no file can be called
        from tilewright.data.dataset.open_built import built_at, built_vocabulary  # pyarrow, and all readers

        built = built_at(recipe.data.source)
        if built is not None:
            return built_vocabulary(built, images=recipe.model.task == "image_classification")
    if recipe.model.task == "image_classification":
        return max(1, sum(path.is_dir() for path in source.iterdir())) if source.is_dir() else 1
    path = tokenizer_path(recipe.model, recipe.data)
    return load_tokenizer(path).vocab_size if path else recipe.data.vocab_size
