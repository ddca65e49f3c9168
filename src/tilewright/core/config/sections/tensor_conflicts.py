"""Features that matrices that are cut over processes (`parallel.tp`) exclude, each by name."""

from collections.abc import Iterator
from math import gcd

from tilewright.core.config.model_conflicts import Conflict
from tilewright.core.config.recipe import Recipe
from tilewright.core.config.sections.parallel_conflicts import Refused, refused

REFUSED_WITH_TENSORS: tuple[Refused, ...] = (
    (
        lambda r: r.model.kind not in ("decoder", "hf"),
        "model.kind", "An architecture of one's own",
        "tilewright's decoder, or a Hugging Face model that transformers has a plan for",
        "--parallel.tp 1: shards take any model",
    ),
    (
        lambda r: r.parallel.cpu_offload,
        "parallel.cpu_offload", "Shards in host memory", "shards on the device", "--parallel.cpu_offload false",
    ),
    (
        lambda r: r.memory.can.offload,
        "memory.executor", "The layer-major executor", "the standard executor", "--memory.executor standard",
    ),
    (
        lambda r: r.precision.enabled and any(rule.compute.startswith("int") for rule in r.precision.rules),
        "precision.rules", "Weights that are trained for integers", "floating-point formats", "--precision.rules []",
    ),
    (
        lambda r: r.train.compile == "on" and r.model.kind == "hf",
        "train.compile", "Compiled layers of a Hugging Face model",
        "layers as they are, as each cut matrix exchanges in a hook of its own, where a graph would end; "
        "or tilewright's decoder",
        "--train.compile off",
    ),
    (
        lambda r: r.ops.cross_entropy == "ref",
        "ops.cross_entropy", "The reference of the loss", "a loss in tiles", "--ops.cross_entropy auto",
    ),
)  # fmt: skip


def tensor_conflicts(recipe: Recipe) -> Iterator[Conflict]:
    """Conflicts of tensor parallelism in a recipe with `parallel.tp` above 1: features that it cannot have yet; numbers
    that do not come out even."""
    parallel, model = recipe.parallel, recipe.model
    if parallel.tp == 1:
        return
    cannot = "cannot be with matrices that are cut over processes yet"
    yield from refused(recipe, "parallel.tp", REFUSED_WITH_TENSORS, cannot)
    if model.kind == "decoder" and not model.path:
        if "linear" in {model.attention, *(entry.attention for entry in model.layers)}:
            yield Conflict(
                ("parallel.tp", "model.attention", "model.layers"),
                "Linear attention that cannot be cut over processes yet",
                f"parallel.tp = {parallel.tp}, linear attention",
                "layers with softmax attention, or whole layers on each process",
                "--parallel.tp 1",
            )
        heads = model.num_kv_heads or model.num_heads
        heads = model.num_heads, heads if model.attention == "gqa" else 0
        shared = model.num_shared_experts * model.expert_dim if model.num_experts else 0
        if not model.layers:
            yield from uneven_widths(*heads, model.ffn_dim, parallel.tp, shared)
        of_layers = (
            (
                kind.num_heads or 0,
                kind.num_kv_heads or 0 if model.attention == "gqa" else 0,
                0 if model.routes(layer) else kind.ffn_dim or 0,  # routed experts are whole where they are
            )
            for layer, kind in enumerate(model.layer_entries())
        )
        for widths in dict.fromkeys(of_layers):
            yield from uneven_widths(*widths, parallel.tp, owner="model.layers: ")


def uneven_widths(
    num_heads: int, num_kv_heads: int, ffn_dim: int, tp: int, shared_width: int = 0, *, owner: str = "model."
) -> Iterator[Conflict]:
    """Find conflicts of tensor parallelism: widths that cannot be cut into so many parts; 0: there is none, or it is
    not known. `owner`: whose they are.

    Example:
        >>> [conflict.got for conflict in uneven_widths(8, 2, 100, 4)]
        ['parallel.tp = 4, model.num_kv_heads = 2']
        >>> [conflict.got for conflict in uneven_widths(6, 0, 0, 4)]
        ['parallel.tp = 4, model.num_heads = 6']
    """
    numbers = (
        ("num_heads", "Heads", num_heads),
        ("num_kv_heads", "Key and value heads", num_kv_heads),
        ("ffn_dim", "Hidden width", ffn_dim),
        ("expert_dim", "Hidden width of the shared experts", shared_width),
    )
    common = gcd(*(number for *_, number in numbers))
    for field, what, number in numbers:
        if number % tp:
            even = [size for size in range(1, number + 1) if number % size == 0]
            yield Conflict(
                ("parallel.tp", f"model.{field}"),
                f"{what} that cannot be cut over the processes evenly",
                f"parallel.tp = {tp}, {f'{number} wide' if field == 'expert_dim' else f'{owner}{field} = {number}'}",
                f"a tp that divides {number}: {', '.join(map(str, even[:8]))}{', ...' if len(even) > 8 else ''}",
                f"--parallel.tp {max(size for size in even if size <= tp and common % size == 0)}",
            )
