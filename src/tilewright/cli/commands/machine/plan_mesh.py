"""`tilewright plan RECIPE --world N`: the fastest meshes for a recipe on many GPUs that are not at hand."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tilewright.cli.common import echo, gc_paused, print_json, show_table, write_answer
from tilewright.core.errors import ConfigError, FitError
from tilewright.core.units import format_bytes

if TYPE_CHECKING:
    from tilewright.core.config.load import Loaded
    from tilewright.planner.advice.energy import PlannedEnergy
    from tilewright.planner.simulate.mesh.mesh_search import BestMeshes, MeshStep, Tables
    from tilewright.planner.simulate.mesh.recipe_searches import MeshChange, MeshFinder

BEST = 5
"""Settings that are shown."""


def check_options(world: int, options: Mapping[str, Any]) -> None:
    """Check options of a mesh's plan: raise where they contradict each other: those of a mesh and of one recipe's plan;
    what one leaves unsaid.

    Args:
        world: of `--world`; 0: a plan of the recipe as it is.
        options: all others.

    Raises:
        ConfigError: they do.
    """
    # 1. Options that only a search of meshes reads.
    of_mesh = [name for name in ("nodes", "link") if options[name]]
    if not world and of_mesh:
        raise ConfigError(
            f"--{of_mesh[0]} without --world",
            got=f"--{of_mesh[0]}, and no number of ranks to search a mesh for",
            need="how many GPUs there are",
            try_=f"--world 8 --{of_mesh[0]} ...",
            where=f"--{of_mesh[0]}",
        )
    # 2. Options of the plan of one device, which a search of meshes would ignore.
    of_one = [name for name in ("fastest", "largest", "host_memory", "disk_memory") if options[name]]
    if world and of_one:
        option = f"--{of_one[0].replace('_', '-')}"
        raise ConfigError(
            f"{option} is of the plan of one device",
            got=f"{option} and --world {world}, which searches a mesh",
            need="one of them",
            try_=f"tilewright plan RECIPE --world {world} --on h100",
            where=option,
        )
    # 3. An explanation is printed alone: it has no plan to compare or to write.
    unseen = [name for name in ("compare", *(() if world else ("out", "html"))) if options[name]]
    if options["why"] and unseen:
        raise ConfigError(
            f"--why and --{unseen[0]} contradict each other",
            got=f"--why {options['why']}, which explains one {'line' if world else 'layer'} alone, and --{unseen[0]}",
            need="one of them",
            try_=f"two commands, one with --why and one with --{unseen[0]}",
            where="--why",
        )
    # 4. Links between ranks are not measured here but looked up by the GPU's name.
    if world and not options["on"]:
        raise ConfigError(
            "--world without the name of a GPU",
            got=f"--world {world}: links between ranks are known of published GPUs",
            need="which GPU each rank has",
            try_=f"--world {world} --on h100",
            where="--on",
        )


def plan_mesh(loaded: "Loaded", world: int, options: Mapping[str, Any], typed: Sequence[str], *, as_json: bool) -> None:
    """Plan a mesh: search, and show the best.

    Args:
        loaded: the recipe; its own mesh does not matter.
        world: ranks in all.
        options: of the command.
        typed: settings of the command line, which hold for a recipe that is compared too.
        as_json: instead of a table.

    Raises:
        ConfigError: see `cluster_of`; or no mesh takes the batch; or `--why` names no line.
        FitError: nothing fits.
    """
    # These import torch, which `--help` does without.
    with gc_paused():
        from tilewright.data.common.progress import ProgressBar
        from tilewright.planner.simulate.mesh import search_answer
        from tilewright.planner.simulate.mesh.why_slower import step_named, why
        from tilewright.planner.simulate.torch_tables import KeptTables

    with ProgressBar("planning") as progress:
        progress.phase("the model")
        tables = KeptTables()
        finder, notes = _finder(loaded, world, options, tables)
        progress.phase("the mesh")
        found = finder.best(BEST)
        if not found.best:
            progress.phase("what would fit")
            raise _nothing_fits(loaded, world, options, found, finder)
        # An explanation of one line, or the list with what would be faster. The second searches again, per change.
        if options["why"]:
            lines = why(found, *step_named(found, options["why"]))
            changes, other = (), None
        else:
            lines = []
            progress.phase("what would be faster")
            changes = finder.changes(found.best[0])
            other = _other(world, options, typed, tables) if options["compare"] else None
    # Files of --out and --html are written in each case.
    if lines:
        print_json({"why": lines}) if as_json else echo("\n".join(lines))
    elif as_json:
        told = {"notes": list(notes), "energy": _energy(loaded, found.best[0], world, options["on"]).to_json()}
        print_json(search_answer.to_json(found, changes) | told | ({"compared": other} if other else {}))
    else:
        _show(found, changes, world, loaded, options, notes)
        if other:
            echo()
            show_table(("", loaded.name, options["compare"]), search_answer.compared(found.best[0], other))
    _write(loaded, found, changes, world, options, notes)


def _nothing_fits(
    loaded: "Loaded", world: int, options: Mapping[str, Any], found: "BestMeshes", finder: "MeshFinder"
) -> FitError:
    from tilewright.cli.commands.machine.mesh_fit import fitting, tried_in_vain
    from tilewright.planner.simulate.mesh import search_answer

    assert found.nearest is not None

    def finder_of(world: int, options: Mapping[str, Any]) -> "MeshFinder":
        return _finder(loaded, world, options, finder.tables, finder)[0]

    helps = fitting(finder_of, world, options)
    return FitError(
        f"{loaded.name} does not fit {world} GPUs in any mesh",
        got=f"nearest of {found.settings:,} settings: {search_answer.miss_words(found.nearest)}",
        need=f"at most {format_bytes(found.nearest.budget_bytes)} on each rank",
        try_=" or ".join(helps) or tried_in_vain(world),
        where="--world",
    )


def _finder(
    loaded: "Loaded", world: int, options: Mapping[str, Any], tables: "Tables", like: "MeshFinder | None" = None
) -> "tuple[MeshFinder, tuple[str, ...]]":
    """Finder for a mesh's plan, of what was typed, with notes. `like`: one of the same recipe."""
    with gc_paused():
        from tilewright.core.hardware import detect_machine
        from tilewright.planner.machine.gpu_specs import HOST_BYTES, find_published
        from tilewright.planner.simulate.mesh.cluster import cluster_of
        from tilewright.planner.simulate.mesh.recipe_searches import MeshFinder
        from tilewright.training.planning.plan_request import device_budget, published_notes, vocab_size_of

    recipe, row = loaded.recipe, find_published(options["on"])
    cluster = cluster_of(row.name, world, options["nodes"], options["link"])
    machine = row.machine(detect_machine("cpu"), HOST_BYTES)
    usable = (1 - recipe.plan.margin) * device_budget(options["device_memory"], machine)
    vocab = vocab_size_of(recipe)
    model = like.model if like is not None and like.machine == machine else None
    finder = MeshFinder(recipe, vocab, machine, row.ceilings(), cluster, usable, row.bf16, tables).with_rates(model)
    even = "guessed: routing of experts is even, and transfers do not slow computation down"
    return finder, (*published_notes(options["on"]), *cluster.notes, even, *finder.notes)


def _other(world: int, options: Mapping[str, Any], typed: Sequence[str], tables: "Tables") -> "dict[str, str]":
    """The numbers of another recipe's best mesh, shown beside the plan."""
    from tilewright.core.config.load import load_recipe
    from tilewright.planner.simulate.mesh import search_answer

    other = load_recipe(options["compare"], list(typed))
    found = _finder(other, world, options, tables)[0].best(1)
    return search_answer.numbers(found.best[0]) if found.best else {"step": "does not fit"}


def _show(
    found: "BestMeshes",
    changes: "Sequence[MeshChange]",
    world: int,
    loaded: "Loaded",
    options: Mapping[str, Any],
    notes: Sequence[str],
) -> None:
    from tilewright.planner.simulate.mesh import search_answer

    best = found.best[0]
    echo(search_answer.verdict(found, world, options["on"]))
    echo()
    show_table(search_answer.COLUMNS, [search_answer.row_of(place, step) for place, step in enumerate(found.best, 1)])
    echo()
    for place, step in enumerate(found.best[1:], 2):
        echo(f"{place} lost: {search_answer.why_lost(best, step)}")
    own = (loaded.recipe.optim.moments, loaded.recipe.optim.master_weights)
    if found.formats != own:
        words = best.setting.optimizer_words()
        echo(f"narrowed, which changes what is learned: {words}; with the recipe's formats nothing fits")
    for change in changes:
        option, tokens, gain, setting = search_answer.change_row(change)
        echo(f"faster, but changes what is learned: {option}: {tokens} tokens/s, {gain} more ({setting})")
    for name, why_not in search_answer.refused_by_train(loaded.recipe, best).items():
        echo(f"not in train: {name} = {best.setting.settings()[name]} ({why_not})")
    echo(f"energy: {_energy(loaded, best, world, options['on']).words}")
    echo(f"searched: {found.settings:,} settings, {found.simulated:,} simulated; the others do not fit or are slower")
    for note in notes:
        echo(f"note: {note}")


def _energy(loaded: "Loaded", best: "MeshStep", world: int, on: str) -> "PlannedEnergy":
    """Estimate the energy of all steps in the planned mesh."""
    from tilewright.planner.advice.energy import PlannedEnergy
    from tilewright.planner.machine.gpu_specs import find_published
    from tilewright.training.planning.minutes import expected_steps

    seconds = expected_steps(loaded.recipe, best.seconds) * best.seconds
    return PlannedEnergy(find_published(on).watts, world, True, seconds)


def _write(
    loaded: "Loaded",
    found: "BestMeshes",
    changes: "Sequence[MeshChange]",
    world: int,
    options: Mapping[str, Any],
    notes: Sequence[str],
) -> None:
    """Write a mesh's plan: the files that are asked for."""
    from tilewright.planner.simulate.mesh import search_answer

    verdict = search_answer.verdict(found, world, options["on"])
    if options["out"]:
        head = [f"tilewright plan {loaded.name} --world {world} --on {options['on']}", verdict]
        text = search_answer.recipe_text(loaded.name, loaded.recipe, found.best[0], head)
        write_answer("--out", options["out"], text)
    if options["html"]:
        from tilewright.report.pages.mesh_page import render_meshes

        rows = [search_answer.change_row(change) for change in changes]
        write_answer("--html", options["html"], render_meshes(found, verdict, rows, notes))
