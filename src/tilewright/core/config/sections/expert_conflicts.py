"""Settings that experts on several processes (`parallel.ep`) exclude, each by name."""

from collections.abc import Iterator

from tilewright.core.config.model_conflicts import Conflict
from tilewright.core.config.recipe import Recipe
from tilewright.core.config.sections.parallel_conflicts import Refused, refused

REFUSED_WITH_EXPERTS: tuple[Refused, ...] = (
    (
        lambda r: r.memory.can.offload,
        "memory.executor", "The layer-major executor", "the standard executor", "--memory.executor standard",
    ),
    (
        lambda r: r.parallel.cpu_offload,
        "parallel.cpu_offload", "Shards in host memory", "shards on the device", "--parallel.cpu_offload false",
    ),
)  # fmt: skip


def expert_conflicts(recipe: Recipe) -> Iterator[Conflict]:
    """Find conflicts of experts: settings of a recipe with `parallel.ep` above 1 that are not supported yet, and
    numbers that do not divide."""
    parallel, model = recipe.parallel, recipe.model
    if parallel.ep == 1:
        return
    yield from refused(recipe, "parallel.ep", REFUSED_WITH_EXPERTS, "cannot be with experts on several processes yet")
    # 1. Ranks with other experts are shards of everything else.
    if parallel.dp_shard > 0 and parallel.dp_shard * parallel.tp % parallel.ep:
        tp, ep, shards = parallel.tp, parallel.ep, parallel.dp_shard
        cut = f", parallel.tp = {tp}" if tp > 1 else ""
        even = next(size for size in range(shards, shards + ep + 1) if not size * tp % ep)
        yield Conflict(
            ("parallel.ep", "parallel.dp_shard"),
            "Experts that do not come out even over the shards",
            f"parallel.ep = {ep}, parallel.dp_shard = {shards}{cut}",
            f"an ep that divides dp_shard{' x tp' if cut else ''}: processes with other experts are shards of the rest",
            f"--parallel.dp_shard {even}, or --parallel.ep 1",
        )
    # 2. Settings that move or copy experts between ranks.
    off = {"place_experts": "off", "expert_order": "[]", "redundant_experts": "0"}
    given = [name for name in off if getattr(parallel, name) not in ("off", (), 0)]
    if given and model.kind == "hf":
        yield Conflict(
            (f"parallel.{given[0]}", "model.kind"),
            "Experts of Hugging Face models stay where they are",
            f"{', '.join(f'parallel.{name}' for name in given)} {'is' if len(given) == 1 else 'are'} given, "
            "model.kind = 'hf'",
            "tilewright's own decoder, whose experts are modules of their own",
            " ".join(f"--parallel.{name} {off[name]}" for name in given),
        )
    elif given == ["redundant_experts"]:
        yield Conflict(
            ("parallel.redundant_experts", "parallel.place_experts"),
            "Redundant experts that nothing chooses",
            f"parallel.redundant_experts = {parallel.redundant_experts}, parallel.place_experts = 'off'",
            "parallel.place_experts, which copies those that get most rows, or an expert_order",
            "--parallel.place_experts on",
        )
    # 3. The number of experts, where the recipe gives it and not a folder.
    if model.kind != "hf" and not model.path:
        yield from uneven_experts(model.num_experts, parallel.ep, parallel.redundant_experts)


def uneven_experts(num_experts: int, ep: int, redundant: int = 0) -> Iterator[Conflict]:
    """Find a number of experts that cannot be spread over so many processes, or too few experts of other processes for
    `redundant` copies on each.

    Example:
        >>> [conflict.got for number in (0, 6, 8) for conflict in uneven_experts(number, 4)]
        ['parallel.ep = 4, model.num_experts = 0', 'parallel.ep = 4, 6 experts']
    """
    fields = "parallel.ep", "model.num_experts"
    # Each check relies on the ones before it.
    if not num_experts:
        yield Conflict(
            fields,
            "Dense model has no experts to spread",
            f"parallel.ep = {ep}, model.num_experts = 0",
            "a mixture of experts",
            f"--parallel.ep 1, or --model.num_experts {4 * ep}",
        )
    elif num_experts % ep:
        even = [size for size in range(1, num_experts + 1) if num_experts % size == 0]
        yield Conflict(
            fields,
            "Experts that do not come out even over the processes",
            f"parallel.ep = {ep}, {num_experts} experts",
            f"an ep that divides {num_experts}: {', '.join(map(str, even))}",
            f"--parallel.ep {max(size for size in even if size <= ep)}, or "
            f"--model.num_experts {-(-num_experts // ep) * ep}",
        )
    # A rank copies experts of other ranks only: there are as many.
    elif redundant > num_experts - num_experts // ep:
        most = num_experts - num_experts // ep
        yield Conflict(
            ("parallel.redundant_experts", *fields),
            "More redundant experts than other processes have",
            f"parallel.redundant_experts = {redundant}, {num_experts} experts, parallel.ep = {ep}",
            f"at most {most}: a process has {num_experts // ep} of its own, and copies of others",
            f"--parallel.redundant_experts {most}",
        )
