"""A search's answer in words: the table of the best, what binds, why others lost, and the recipe that runs it."""

from collections.abc import Mapping, Sequence

import tomlkit

from tilewright.core.config.change_recipe import changed
from tilewright.core.config.conflicts import conflicts
from tilewright.core.config.recipe import Recipe
from tilewright.core.config.setting_names import nested
from tilewright.core.units import format_bytes, format_count, format_seconds, format_share
from tilewright.planner.simulate.mesh.mesh_search import BestMeshes, MeshStep
from tilewright.planner.simulate.mesh.recipe_searches import MeshChange

COLUMNS = (
    *("", "mesh", "schedule", "micro-batches", "recomputation", "step", "tokens/s", "MFU", "GiB"),
    *("idle", "exposed", "binds"),
)


def row_of(place: int, step: MeshStep) -> list[str]:
    """One row of the table of the best settings in a search's answer."""
    one = step.setting
    return [
        str(place), one.mesh_words(), one.schedule_words() or "-", f"{one.count} x {one.rows}",
        one.recomputed + (", reduced each" if one.reduce_each else ""), format_seconds(step.seconds),
        format_count(step.tokens_per_s), format_share(step.mfu), f"{step.worst.peak / 2**30:.1f}",
        format_share(step.idle), format_share(step.exposed), binds(step),
    ]  # fmt: skip


def binds(step: MeshStep) -> str:
    """The bottleneck of a step in a search's answer: the cause that takes most of its time, apart from computation that
    any setting has."""
    parts = {name: share for name, share in step.parts.items() if name != "computation"}
    most = max(parts, key=lambda name: parts[name])
    return f"{most} ({format_share(parts[most])})" if parts[most] >= 0.01 else "computation"


def why_lost(first: MeshStep, other: MeshStep) -> str:
    """Answer why a setting lost the mesh search: the cause on which it spends more time than the first one."""
    more = {name: other.seconds * share - first.seconds * first.parts[name] for name, share in other.parts.items()}
    most = max(more, key=lambda name: more[name])
    slower = other.seconds / first.seconds - 1
    if slower < 5e-4:
        return "as fast"
    return f"{format_share(slower)} longer: {format_seconds(more[most])} more {most}"


def verdict(found: BestMeshes, world: int, on: str) -> str:
    """The search's answer in a sentence."""
    best = found.best[0]
    return (
        f"{on} x {world}: {format_seconds(best.seconds)} a step, {format_count(best.tokens_per_s)} tokens/s, "
        f"{format_share(best.mfu)} MFU, {best.worst.peak / 2**30:.1f} of {best.budget_bytes / 2**30:.1f} GiB on the "
        f"rank that needs most (at {best.worst.peak_phase}): {best.setting}."
    )


def miss_words(step: MeshStep) -> str:
    """The nearest miss in a search's answer, in words: the memory that it takes, and of what most."""
    owners = step.worst.owners
    largest = sorted(owners, key=lambda owner: -owners[owner])[:3]
    parts = ", ".join(f"{owner} {format_bytes(owners[owner])}" for owner in largest)
    return f"{format_bytes(step.worst.peak)} at {step.worst.peak_phase} ({parts}): {step.setting}"


def refused_by_train(recipe: Recipe, step: MeshStep) -> dict[str, str]:
    """Settings of a search's answer that `train` does not take together with the recipe's others, each with the
    reason."""
    settings = step.setting.settings()
    found: dict[str, str] = {}
    for one in conflicts(changed(recipe, settings)):
        mine = [name for name in one.fields if name in settings]
        found |= dict.fromkeys(mine or ["parallel.dp_shard"], one.what)
    return found


def recipe_text(name: str, recipe: Recipe, step: MeshStep, head: Sequence[str]) -> str:
    """Write the found mesh as a recipe: TOML with these settings, which extends another recipe.

    Args:
        name: of that.
        recipe: which it is.
        step: what was chosen.
        head: lines of a comment above.
    """
    refused = refused_by_train(recipe, step)
    settings = {key: _plain(value) for key, value in step.setting.settings().items()}
    lines = [f"# {line}" for line in head]
    for key, why in refused.items():
        lines.append(f"# {key} = {settings[key]}: {why}")
    kept = {key: value for key, value in settings.items() if key not in refused}
    return "\n".join([*lines, f'extends = "{name}"', "", tomlkit.dumps(nested(kept))])


def numbers(step: MeshStep) -> dict[str, str]:
    """Numbers of one setting of a search's answer, by name."""
    return {
        "step": format_seconds(step.seconds),
        "tokens/s": format_count(step.tokens_per_s),
        "MFU": format_share(step.mfu),
        "memory": format_bytes(step.worst.peak),
        "idle": format_share(step.idle),
        "exposed": format_share(step.exposed),
        "setting": str(step.setting),
    }


def compared(step: MeshStep, other: Mapping[str, str]) -> list[list[str]]:
    """Rows of a table in a search's answer that compares one setting with another recipe's."""
    return [[name, text, other.get(name, "-")] for name, text in numbers(step).items()]


def change_row(change: MeshChange) -> list[str]:
    """Write a change as a row of the search's answer: the option to type, and the best mesh with it."""
    step = change.step
    return [change.words, format_count(step.tokens_per_s), format_share(change.gain - 1), str(step.setting)]


def to_json(found: BestMeshes, changes: Sequence[MeshChange] = ()) -> dict[str, object]:
    """Write the search's answer for JSON: numbers of the best meshes, and of changes that would be faster."""
    faster = [
        {"settings": dict(one.settings), "tokens_per_s": one.step.tokens_per_s, "gain": one.gain} for one in changes
    ]
    return {
        "faster": faster,
        "settings": found.settings,
        "simulated": found.simulated,
        "best": [
            {
                "settings": {key: _plain(value) for key, value in step.setting.settings().items()},
                "micro_batches": step.setting.count,
                "seconds": step.seconds,
                "tokens_per_s": step.tokens_per_s,
                "mfu": step.mfu,
                "peak_bytes": step.worst.peak,
                "peak_phase": step.worst.peak_phase,
                "owners": dict(step.worst.owners),
                "parts": step.parts,
            }
            for step in found.best
        ],
    }


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
