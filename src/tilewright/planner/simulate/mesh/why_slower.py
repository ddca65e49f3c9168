"""One setting of a search in depth: where its step's time goes beside the first one's, and whose its bytes are."""

from tilewright.core.errors import ConfigError
from tilewright.core.units import format_bytes, format_seconds, ranges
from tilewright.planner.simulate.mesh.mesh_search import BestMeshes, MeshStep
from tilewright.planner.simulate.mesh.search_answer import why_lost


def step_named(found: BestMeshes, text: str) -> tuple[int, MeshStep]:
    """The step in the search's table that `--why` names.

    Raises:
        ConfigError: there is none.
    """
    if not text.isdecimal() or not 1 <= int(text) <= len(found.best):
        raise ConfigError(
            "--why names no line of the search's table",
            got=f"--why {text}",
            need=f"a number from 1 to {len(found.best)}",
            try_="--why 1",
            where="--why",
        )
    return int(text), found.best[int(text) - 1]


def why(found: BestMeshes, place: int, step: MeshStep) -> list[str]:
    """Why a setting is slower than the first one, as lines of text."""
    first, one, shards = found.best[0], step.setting, step.setting.sizes.dp_shard
    lines = [f"{place}: {one}"]
    if place > 1:
        lines.append(f"lost: {why_lost(first, step)}")
    lines.append(f"step {format_seconds(step.seconds)}:")
    for name, share in step.parts.items():
        mine, best = share * step.seconds, first.parts[name] * first.seconds
        beside = f" (line 1: {format_seconds(best)})" if place > 1 else ""
        lines.append(f"  {name:14s} {format_seconds(mine)}{beside}")
    if one.sizes.pp > 1:
        lines.append(f"layers of stages: {', '.join(map(str, one.pipeline.layers))}")
    lines.append(f"bytes at the peak of each rank of a row, of {format_bytes(step.budget_bytes)}:")
    same: dict[tuple[str, str], list[int]] = {}
    for rank, memory in enumerate(step.memory):
        same.setdefault((format_bytes(memory.peak), memory.peak_phase), []).append(rank)
    lines += [f"  rank {ranges(ranks)}: {size} at {phase}" for (size, phase), ranks in same.items()]
    lines.append("by owner, on the rank that needs most:")
    owners = sorted(step.worst.owners.items(), key=lambda item: -item[1])
    lines += [f"  {owner:14s} {format_bytes(size)}" for owner, size in owners if size]
    exposed = step.costs.exposed
    lines.append(
        f"not hidden behind computation: {format_seconds(exposed.gather)} of gathering {shards} shards, "
        f"{format_seconds(exposed.reduce)} of summing gradients in {one.wire}"
    )
    return lines
