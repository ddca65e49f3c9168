"""Silent corruption: tensors that several ranks hold, compared by checksum.

Ranks that differ only along `dp_replicate` hold the same shard, and all ranks hold the same unsharded tensors. A bit
that flips on one of them goes into its gradients and, by the next reduction, into all the others' weights. Ranks first
compare one number per class of tensors; only where those differ they look which tensors do.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from tilewright.ops.base.tensor_parts import Place
from tilewright.parallel.agree import gather, named_ranks


@dataclass(frozen=True)
class ReplicaDifference:
    """A tensor that some ranks hold with other bits than the rest."""

    name: str
    ranks: tuple[int, ...]
    """Whose bits most ranks do not have; of two that differ from each other, the higher one."""
    others: tuple[int, ...]
    """Ranks that hold the same part, with the bits of most."""

    def __str__(self) -> str:
        return f"{self.name} on {named_ranks(self.ranks)}, against {named_ranks(self.others)}"


def checksum(tensor: Tensor) -> int:
    """Checksum the bytes of a tensor by XXH3, 64 bits.

    Args:
        tensor: of any shape, dtype and device.

    Example:
        >>> checksum(torch.zeros(2, 3)) == checksum(torch.zeros(3, 2)), checksum(torch.tensor([0.0, -0.0]))
        (True, 9407778237848358495)
    """
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return xxhash.xxh3_64_intdigest(flat.numpy().data)


def find_differences(group: dist.ProcessGroup | None, sums: Mapping[Place, int]) -> list[ReplicaDifference]:
    """Find silent corruption by checksum: tensors of which the group's ranks hold the same part with different bits;
    the same list on all ranks.

    Args:
        group: whose ranks all call this.
        sums: checksums of this rank's parts.
    """
    if group is None:
        return []
    wholes, parts = set(), defaultdict(set)
    for whole, (places, values) in gather(group, (_digest(sums, True), _digest(sums, False))):
        wholes.add(whole)
        parts[places].add(values)
    if len(wholes) == 1 and all(len(values) == 1 for values in parts.values()):
        return []
    return sorted(_compare(gather(group, dict(sums))), key=lambda difference: difference.name)


def _digest(sums: Mapping[Place, int], whole: bool) -> tuple[str, str]:
    """Digest of places and of their checksums; of tensors that every rank holds, or of those in shards."""
    rows = sorted((name, start or (), value) for (name, start), value in sums.items() if (start is None) == whole)
    places, values = [row[:2] for row in rows], [row[2] for row in rows]
    return xxhash.xxh3_128_hexdigest(repr(places).encode()), xxhash.xxh3_128_hexdigest(repr(values).encode())


def _compare(by_rank: list[dict[Place, int]]) -> Iterable[ReplicaDifference]:
    holders: dict[Place, dict[int, int]] = defaultdict(dict)
    for rank, sums in enumerate(by_rank):
        for place, value in sums.items():
            holders[place][rank] = value
    for (name, _), values in holders.items():
        counts = Counter(values.values())  # in the order of ranks, which decides between equal counts
        usual = counts.most_common(1)[0][0]
        wrong = tuple(rank for rank, value in values.items() if value != usual)
        if wrong:
            yield ReplicaDifference(name, wrong, tuple(rank for rank, value in values.items() if value == usual))
