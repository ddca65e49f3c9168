"""Where a model chooses between experts, found by structure: it works for models of any origin.

Called by `hf` and by `precision.sites`.
"""

from collections.abc import Iterator

from torch import nn


def find_routers(model: nn.Module) -> Iterator[nn.Module]:
    """Modules with a [experts, width] weight that stand beside a collection of just as many experts.

    Example:
        >>> experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        >>> layer = nn.ModuleDict({"gate": nn.Linear(8, 4), "experts": experts})
        >>> list(find_routers(layer))
        [Linear(in_features=8, out_features=4, bias=True)]
    """
    for parent in model.modules():
        children = list(parent.children())
        counts = {count for child in children if (count := _num_experts(child)) > 1}
        for child in children:
            weight = getattr(child, "weight", None)
            if weight is not None and weight.ndim == 2 and weight.shape[0] in counts and not list(child.children()):
                yield child


def _num_experts(module: nn.Module) -> int:
    """How many experts a module holds: a list of modules of one type, or stacked weights [E, N, K]; else 0."""
    if isinstance(module, nn.ModuleList):
        return len(module) if len({type(child) for child in module}) == 1 else 0
    stacked = {p.shape[0] for p in module.parameters(recurse=False) if p.ndim == 3}
    return stacked.pop() if len(stacked) == 1 else 0
