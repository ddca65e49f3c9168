"""Settings that a wire format of gradients (`parallel.grad_sync`) or parameters (`parallel.param_gather`) excludes."""

from collections.abc import Iterator

from tilewright.core.config.model_conflicts import Conflict
from tilewright.core.config.recipe import Recipe
from tilewright.core.config.sections.parallel_conflicts import Refused, refused

REFUSED_WITH_CODES: tuple[Refused, ...] = (
    (
        lambda r: r.parallel.tp > 1,
        "parallel.tp", "Matrices that are cut", "whole matrices in each layer",
        "--parallel.tp 1, or --parallel.param_gather as_read",
    ),
    (
        lambda r: r.memory.can.offload,
        "memory.executor", "The layer-major executor",
        "the standard executor, or stages of a pipeline",
        "--memory.executor standard, or --parallel.param_gather as_read",
    ),
    (
        lambda r: r.precision.enabled and r.precision.controller.enabled,
        "precision.controller.enabled", "The controller of 8-bit matmuls",
        "formats that stay: its samples compare 8 bits with weights as they are stored",
        "--precision.controller.enabled false, or --parallel.param_gather as_read",
    ),
)  # fmt: skip


def sync_conflicts(recipe: Recipe) -> Iterator[Conflict]:
    """Find conflicts of gradient sync: settings that would be read and do nothing."""
    parallel = recipe.parallel
    if parallel.param_gather == "fp8":
        cannot = "cannot be with weights that are gathered as codes"
        yield from refused(recipe, "parallel.param_gather", REFUSED_WITH_CODES, cannot)
    # FP32 on the wire loses nothing that feedback could return or a limit could stop.
    if parallel.grad_feedback and parallel.grad_sync == "fp32":
        yield Conflict(
            ("parallel.grad_feedback", "parallel.grad_sync"),
            "Error feedback of gradients that lose nothing",
            "parallel.grad_feedback = true, parallel.grad_sync = 'fp32'",
            "a wire format that rounds",
            "--parallel.grad_sync fp8, or --parallel.grad_feedback false",
        )
    if parallel.grad_sync_error and parallel.grad_sync == "fp32":
        yield Conflict(
            ("parallel.grad_sync_error", "parallel.grad_sync"),
            "Limit of what gradients lose that lose nothing",
            f"parallel.grad_sync_error = {parallel.grad_sync_error}, parallel.grad_sync = 'fp32'",
            "a wire format that rounds",
            "--parallel.grad_sync fp8, or --parallel.grad_sync_error 0",
        )
    # Combinations that nothing has tried.
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
