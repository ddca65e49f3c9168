"""Nodes of GPUs, and the seconds of collectives between their ranks. No torch.

Ranks are numbered node by node; neighbours of a group are `stride` ranks apart (`parallel.mesh.AXES`). A ring goes
around the group: in each node it enters and leaves over the adapters of the group's ranks there, so these add up, to
the speed inside the node at most.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tilewright.core.errors import ConfigError
from tilewright.core.units import format_bytes
from tilewright.planner.machine.link_specs import LINK_GUESS, LINK_REACH, LinkSpec, find_link, links_of
from tilewright.planner.machine.measured_links import MeasuredLinks
from tilewright.planner.simulate.option_texts import seconds_of, size_of
from tilewright.planner.simulate.pass_costs import Link


@dataclass(frozen=True)
class Cluster:
    """Nodes with as many GPUs each.

    Example:
        >>> two = Cluster(nodes=2, gpus=4, intra=Link(400e9), inter=Link(50e9))
        >>> two.ring_s(1e9, ranks=4, stride=1) < two.ring_s(1e9, ranks=8, stride=1) < two.ring_s(1e9, ranks=2, stride=4)
        True
    """

    nodes: int
    gpus: int
    intra: Link
    """Of one GPU to others of its node, one direction."""
    inter: Link
    """Of one GPU to other nodes, one direction."""
    notes: tuple[str, ...] = ()
    """Where the speeds are from."""
    overlaps: bool = True
    """Whether ranks compute while they gather and sum; processes of one CPU do both on the same cores."""

    @property
    def world(self) -> int:
        """Ranks of the cluster in all."""
        return self.nodes * self.gpus

    def ring_s(self, num_bytes: float, ranks: int, stride: int) -> float:
        """The seconds of an all-gather or a reduce-scatter of tensors of `num_bytes` over a ring of the cluster's
        ranks; an all-reduce is both."""
        if ranks == 1 or not num_bytes:
            return 0.0
        link, hops = self._ring(ranks, stride), ranks - 1
        inside = min(ranks, max(1, self.gpus // stride))
        return num_bytes * hops / ranks / link.bytes_per_s + link.latency_s * -(-ranks // inside)

    def exchange_s(self, num_bytes: float, ranks: int, stride: int) -> float:
        """The seconds of an all-to-all over the cluster in which each rank has `num_bytes` for all ranks together,
        itself among them."""
        if ranks == 1 or not num_bytes:
            return 0.0
        inside = min(ranks, max(1, self.gpus // stride))
        near = num_bytes * (inside - 1) / ranks / self.intra.bytes_per_s
        far = num_bytes * (ranks - inside) / ranks / self.inter.bytes_per_s
        return max(near, far) + (self.inter if ranks > inside else self.intra).latency_s

    def hop(self, stride: int) -> Link:
        """The link of the cluster between two ranks that are so far apart."""
        return self.intra if stride < self.gpus else self.inter

    def _ring(self, ranks: int, stride: int) -> Link:
        if ranks * stride <= self.gpus:
            return self.intra
        inside = max(1, self.gpus // stride)
        return Link(min(self.intra.bytes_per_s, inside * self.inter.bytes_per_s), self.inter.latency_s)


def cluster_of(gpu: str, world: int, nodes: str, links: Sequence[str]) -> Cluster:
    """The cluster of `--on`, `--world`, `--nodes` and `--link`.

    Args:
        gpu: name of a published one.
        world: ranks in all.
        nodes: `32x8`: nodes x GPUs in each; empty: eight in each, or all in one.
        links: `intra=...`, `inter=...`: a rate, with latency or without, the name of a published link, or a file of
            `tilewright bench comm`.

    Raises:
        ConfigError: nodes that are none or do not make up the world, or no such link.

    Example:
        >>> cluster_of("h100", 16, "2x8", ["inter=100GB/s"]).inter.bytes_per_s
        100000000000.0
    """
    number, gpus = _nodes(world, nodes)
    intra, inter = (_published(one) for one in links_of(gpu))
    told = {"intra": _words("inside a node", links_of(gpu)[0]), "inter": _words("between nodes", links_of(gpu)[1])}
    given: dict[str, Link] = {}
    for text in links:
        name, _, value = text.partition("=")
        if name not in told or name in given or not value:
            raise ConfigError(
                "--link names no link and its rate",
                got=text,
                need="intra=RATE or inter=RATE, each once: a rate per GPU such as 50GB/s, the name of a link, or "
                "a file of `tilewright bench comm --out`",
                try_="--link inter=50GB/s, or --link inter=ethernet-100",
                where="--link",
            )
        given[name], told[name] = _given(name, value)
    notes = tuple(told[name] for name in (("intra", "inter") if number > 1 else ("intra",)))
    if any(note.startswith("published") for note in notes):
        notes += (LINK_GUESS,)
    return Cluster(number, gpus, given.get("intra", intra), given.get("inter", inter), notes)


def _published(spec: LinkSpec) -> Link:
    return Link(LINK_REACH * spec.rate, spec.latency_s)


def _words(where: str, spec: LinkSpec) -> str:
    return f"published, not measured: {format_bytes(spec.rate)}/s per GPU {where}: {spec.name} ({spec.source})"


def _given(name: str, value: str) -> tuple[Link, str]:
    where = "inside a node" if name == "intra" else "between nodes"
    if Path(value).is_file() or value.endswith(".json"):
        return _measured(name, value, where)
    match = re.fullmatch(r"([^,]+?)/s(?:,(.+))?", value)
    if match is None:
        spec = find_link(value, name)
        return _published(spec), _words(where, spec)
    rate = float(size_of(match[1], "--link"))
    if not rate:
        raise ConfigError(
            "--link has no rate", got=value, need="bytes per second above 0", try_="--link inter=50GB/s", where="--link"
        )
    latency = seconds_of(match[2], "--link") if match[2] else 0.0
    return Link(rate, latency), f"given: {format_bytes(rate)}/s per GPU {where}, as reached"


def _measured(name: str, path: str, where: str) -> tuple[Link, str]:
    """A cluster from a file of `tilewright bench comm`: what ranks reached of an all-gather, which send as many bytes
    as in a reduce-scatter."""
    found = MeasuredLinks.read(path)
    fit = found.fit("all_gather")
    one_machine = found.nodes == 1
    if fit is None or one_machine != (name == "intra"):
        machines = "one machine" if one_machine else f"{found.nodes} machines"
        raise ConfigError(
            "Measured links are of other ranks than --link names",
            got=f"{path}: {found.ranks} ranks on {machines}" + ("" if fit else ", no all-gather"),
            need="of ranks on one machine for intra, on several for inter",
            try_="tilewright bench comm --out FILE, under torchrun on several machines for inter",
            where="--link",
        )
    words = f"measured: {format_bytes(fit.bytes_per_s)}/s per rank {where}: all-gather of {found.ranks} ranks over "
    return Link(fit.bytes_per_s, fit.latency_s), f"{words}{found.backend}, {found.device} ({Path(path).name})"


def _nodes(world: int, nodes: str) -> tuple[int, int]:
    """Nodes of the cluster, and GPUs in each."""
    if not nodes:
        gpus = min(world, 8)
        nodes = f"{world // gpus}x{gpus}" if world % gpus == 0 else f"1x{world}"
    match = re.fullmatch(r"(\d+)x(\d+)", nodes.strip())
    found = (int(match[1]), int(match[2])) if match else (0, 0)
    if found[0] * found[1] != world:
        each = next(gpus for gpus in (8, 4, 2, 1) if world % gpus == 0)
        raise ConfigError(
            "Nodes that do not make up the world",
            got=f"--nodes {nodes}, --world {world}",
            need="NODESxGPUS, whose product is --world",
            try_=f"--nodes {world // each}x{each}",
            where="--nodes",
        )
    return found
