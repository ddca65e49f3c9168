"""`tilewright plan RECIPE --world N`: the fastest meshes for a recipe on many GPUs that are not at hand."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.cli.common import echo, print_json, show_table
from tilewright.core.env import gc_paused
from tilewright.core.errors import ConfigError, FitError
from tilewright.core.units import format_bytes

if TYPE_CHECKING:
    from tilewright.core.config.load import Loaded
    from tilewright.planner.simulate.mesh.search import BestMeshes

BEST = 5
"""Settings that are shown."""


def check_options(world: int, options: Mapping[str, Any]) -> None:
    """Raise where options of a mesh and of one recipe's plan contradict each other.

    Args:
        world: of `--world`; 0: a plan of the recipe as it is.
        options: all others.

    Raises:
        ConfigError: they do.
    """
    of_mesh = [name for name in ("nodes", "link") if options[name]]
    if not world and of_mesh:
        raise ConfigError(
            f"--{of_mesh[0]} without --world",
            got=f"--{of_mesh[0]}, and no number of ranks to search a mesh for",
            need="how many GPUs there are",
            try_=f"--world 8 --{of_mesh[0]} ...",
            where=f"--{of_mesh[0]}",
        )
    of_one = [name for name in ("fastest", "largest", "why", "compare", "html", "disk_memory") if options[name]]
    if world and of_one:
        option = f"--{of_one[0].replace('_', '-')}"
        raise ConfigError(
            f"{option} is of the plan of one device",
            got=f"{option} and --world {world}, which searches a mesh",
            need="one of them",
            try_=f"tilewright plan RECIPE --world {world} --on h100",
            where=option,
        )
    if world and not options["on"]:
        raise ConfigError(
            "--world without the name of a GPU",
            got=f"--world {world}: links between ranks are known of published GPUs",
            need="which GPU each rank has",
            try_=f"--world {world} --on h100",
            where="--on",
        )


def plan_mesh(loaded: "Loaded", world: int, options: Mapping[str, Any], *, as_json: bool) -> None:
    """Search, and show the best.

    Args:
        loaded: the recipe; its own mesh does not matter.
        world: ranks in all.
        options: of the command.
        as_json: instead of a table.

    Raises:
        ConfigError: see `cluster_of`; or no mesh takes the batch.
        FitError: nothing fits.
    """
    from tilewright.planner.simulate.mesh import describe

    found, notes = _search(loaded, world, options)
    on = str(options["on"])
    if not found.best:
        assert found.nearest is not None
        raise FitError(
            f"{loaded.name} does not fit {world} GPUs in any mesh",
            got=f"nearest of {found.settings:,} settings: {describe.miss_words(found.nearest)}",
            need=f"at most {format_bytes(found.nearest.budget_bytes)} on each rank",
            try_=f"--world {2 * world}, a GPU with more memory, or --train.global_batch_size of fewer rows per rank",
            where="--world",
        )
    if as_json:
        print_json(describe.to_json(found) | {"notes": list(notes)})
    else:
        _show(found, world, on, loaded, notes)
    if options["out"]:
        _write(loaded, found, world, options, quiet=as_json)


def _search(loaded: "Loaded", world: int, options: Mapping[str, Any]) -> "tuple[BestMeshes, tuple[str, ...]]":
    with gc_paused():
        from tilewright.core.hardware import detect_machine
        from tilewright.data.common.progress import ProgressBar
        from tilewright.planner.machine.gpu_specs import HOST_BYTES, find_published
        from tilewright.planner.planner import narrower
        from tilewright.planner.simulate.mesh.cluster import cluster_of
        from tilewright.planner.simulate.mesh.model import MeshModel
        from tilewright.planner.simulate.mesh.search import MeshSearch
        from tilewright.planner.simulate.mesh.space import Space
        from tilewright.planner.simulate.mesh.step import MeshRates
        from tilewright.training.planning.request import device_budget, published_notes, vocab_size_of

    recipe, row = loaded.recipe, find_published(options["on"])
    cluster = cluster_of(row.name, world, options["nodes"], options["link"])
    machine = row.machine(detect_machine("cpu"), HOST_BYTES)
    budget = device_budget(options["device_memory"], machine)
    with ProgressBar("planning") as progress:
        progress.phase("the model")
        model = MeshModel(recipe, vocab_size_of(recipe), machine, row.ceilings())
        space = Space.of(model, world, cluster.gpus)
        space.check()
        progress.phase("the mesh")
        usable = (1 - recipe.plan.margin) * budget
        own = (recipe.optim.moments, recipe.optim.master_weights)
        formats = [own, *((one["optim.moments"], one.get("optim.master_weights", own[1])) for one in narrower(recipe))]
        found = MeshSearch(MeshRates(model, cluster), space, usable, row.bf16).best(BEST, formats)
    guessed = ("routing of experts is taken for even, and transfers do not slow computation down",)
    return found, (*published_notes(options["on"]), *cluster.notes, *guessed, *model.whole.notes)


def _show(found: "BestMeshes", world: int, on: str, loaded: "Loaded", notes: Sequence[str]) -> None:
    from tilewright.planner.simulate.mesh import describe

    best = found.best[0]
    echo(describe.verdict(found, world, on))
    echo()
    show_table(describe.COLUMNS, [describe.row_of(place, step) for place, step in enumerate(found.best, 1)])
    echo()
    for place, step in enumerate(found.best[1:], 2):
        echo(f"{place} lost: {describe.why_lost(best, step)}")
    own = (loaded.recipe.optim.moments, loaded.recipe.optim.master_weights)
    if found.formats != own:
        words = best.setting.optimizer_words()
        echo(f"narrowed, which changes what is learned: {words}; with the recipe's formats nothing fits")
    for name, why in describe.refused_by_train(loaded.recipe, best).items():
        echo(f"not in train: {name} = {best.setting.settings()[name]} ({why})")
    echo(f"searched: {found.settings:,} settings, {found.simulated:,} simulated; the others do not fit or are slower")
    for note in notes:
        echo(f"note: {note}")


def _write(loaded: "Loaded", found: "BestMeshes", world: int, options: Mapping[str, Any], *, quiet: bool) -> None:
    from tilewright.core.atomic_io import write_whole
    from tilewright.core.log import say
    from tilewright.planner.simulate.mesh import describe

    head = [
        f"tilewright plan {loaded.name} --world {world} --on {options['on']}",
        describe.verdict(found, world, options["on"]),
    ]
    write_whole(Path(options["out"]), describe.recipe_text(loaded.name, loaded.recipe, found.best[0], head))
    say(f"wrote {options['out']}", error=quiet)
