"""What a wire format of gradients (`parallel.grad_sync`) cannot be together with."""

from collections.abc import Iterator

from tilewright.core.config.model_conflicts import Conflict
from tilewright.core.config.recipe import Recipe


def sync_conflicts(recipe: Recipe) -> Iterator[Conflict]:
    """Settings of which one would be read and do nothing."""
    parallel = recipe.parallel
    if parallel.grad_feedback and parallel.grad_sync == "fp32":
        yield Conflict(
            ("parallel.grad_feedback", "parallel.grad_sync"),
            "Error feedback of gradients that lose nothing",
            "parallel.grad_feedback = true, parallel.grad_sync = 'fp32'",
            "a wire format that rounds",
            "--parallel.grad_sync fp8, or --parallel.grad_feedback false",
        )
    if parallel.grad_sync != "fp32" and parallel.tp > 1:
        yield Conflict(
            ("parallel.grad_sync", "parallel.tp"),
            "Wire formats of gradients have not been tried with matrices that are cut",
            f"parallel.grad_sync = {parallel.grad_sync!r}, parallel.tp = {parallel.tp}",
            "gradients sent as FP32, or whole matrices",
            "--parallel.grad_sync fp32, or --parallel.tp 1",
        )
    if parallel.grad_sync != "fp32" and recipe.memory.can.offload:
        yield Conflict(
            ("parallel.grad_sync", "memory.executor"),
            "The layer-major executor sends gradients as FP32",
            f"parallel.grad_sync = {parallel.grad_sync!r}, memory.executor = {recipe.memory.executor!r}",
            "the standard executor, or stages of a pipeline",
            "--parallel.grad_sync fp32, or --memory.executor standard",
        )
