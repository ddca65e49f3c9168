"""The error of a run that found no memory: who held how much at each phase, and what would help."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tilewright.core.config.recipe import Recipe
from tilewright.core.errors import FitError
from tilewright.core.units import format_bytes
from tilewright.memory.tracking.byte_tables import is_out_of_memory, phase_table
from tilewright.memory.tracking.tracker import MemoryTracker


def no_memory(
    error: BaseException, memory: Mapping[str, Any], when: str, recipe: Recipe, fixes: Sequence[str] = ()
) -> FitError:
    """Report out of memory (OOM) to the user as an error.

    Args:
        error: the allocator's.
        memory: the memory tracker's snapshot just after it.
        when: what was being done.
        recipe: the run's settings; what it has already is not proposed.
        fixes: planned changes, the cheapest first; without any, settings that lower the peak.
    """
    said = str(error).splitlines()[0] if str(error) else type(error).__name__
    lines = [said, f"measured up to then, at the peak of each phase (most in {memory['peak_phase']}):"]
    lines += phase_table(memory["known_phases"])
    for tier, owners in memory["tiers"].items():
        lines.append(f"on {tier}: " + ", ".join(f"{owner} {format_bytes(size)}" for owner, size in owners.items()))
    if "reserved_bytes" in memory:
        lines.append(f"held by the allocator, free blocks included: {format_bytes(memory['reserved_bytes'])}")
    return FitError(
        f"Out of memory {when}",
        got="\n".join(lines),
        need="a smaller peak; a checkpoint that is there is untouched, and the same command continues from it",
        try_="\n".join(fixes or _proposals(recipe)),
    )


@contextmanager
def explained(memory_tracker: MemoryTracker, recipe: Recipe, when: str) -> Iterator[None]:
    """Inside, an allocator's out-of-memory error (OOM) becomes `no_memory`.

    Raises:
        FitError: no memory was found.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise no_memory(error, memory_tracker.snapshot(None, None), when, recipe) from error


def _proposals(recipe: Recipe) -> list[str]:
    """Propose settings for the report of an out-of-memory (OOM): they lower the peak and are not in use, those that
    change no loss first."""
    train, memory = recipe.train, recipe.memory
    found = []
    if train.micro_batch_size > 1:
        found.append(f"train.micro_batch_size = {train.micro_batch_size // 2} (changes no loss)")
    if memory.can.activation_checkpoint:
        if train.activation_checkpoint != "full":
            found.append('train.activation_checkpoint = "full" (changes no loss)')
        found.append('memory.executor = "layer_major" (one slice of gradients and activations at a time)')
    elif memory.layers_per_group > 1:
        found.append("memory.layers_per_group = 1 (changes no loss)")
    if memory.mlp_chunks == 1:
        found.append("memory.mlp_chunks = 4 (less for the widest values of a layer)")
    if recipe.optim.moments == "fp32":
        found.append('optim.moments = "bf16" (changes results a little)')
    return found
