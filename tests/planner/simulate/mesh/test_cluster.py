"""Seconds of collectives on nodes of GPUs, and the options that say which nodes and links."""

import pytest

from tilewright.core.errors import ConfigError
from tilewright.planner.machine.gpu_specs import TABLE
from tilewright.planner.machine.link_specs import LINK_REACH, links_of
from tilewright.planner.simulate.costs import Link
from tilewright.planner.simulate.mesh.cluster import Cluster, cluster_of

NODES = Cluster(4, 8, Link(400e9), Link(50e9))


@pytest.mark.parametrize(
    ("ranks", "stride", "rate"),
    [
        (8, 1, 400e9),  # inside a node
        (32, 1, 400e9),  # eight adapters per node, as fast as the inside
        (4, 8, 50e9),  # one rank per node
        (8, 4, 100e9),  # two ranks per node: two adapters
        (16, 2, 200e9),
    ],
)
def test_a_ring_takes_its_slowest_part(ranks, stride, rate):
    found = NODES.ring_s(1e9, ranks, stride)
    assert found == pytest.approx((ranks - 1) / ranks * 1e9 / rate)


def test_an_exchange_is_as_fast_as_what_leaves_the_node():
    inside, across = NODES.exchange_s(1e9, 8, 1), NODES.exchange_s(1e9, 32, 1)
    assert inside == pytest.approx(7 / 8 * 1e9 / 400e9)
    assert across == pytest.approx(24 / 32 * 1e9 / 50e9)
    assert NODES.exchange_s(1e9, 1, 1) == 0


def test_every_published_gpu_has_links():
    for name in TABLE:
        intra, inter = links_of(name)
        assert intra.rate > 0 < inter.rate
        assert intra.source
        assert inter.source


def test_links_are_published_or_given_and_the_notes_say_which():
    found = cluster_of("h100", 16, "", [])
    assert (found.nodes, found.gpus) == (2, 8)
    assert found.intra.bytes_per_s == LINK_REACH * 450e9
    assert all("published" in note for note in found.notes[:2])
    given = cluster_of("h100", 16, "4x4", ["inter=12GB/s,20us"])
    assert (given.inter.bytes_per_s, given.inter.latency_s) == (12e9, pytest.approx(2e-5))
    assert any(note.startswith("given: ") and "between nodes" in note for note in given.notes)
    named = cluster_of("h100", 16, "4x4", ["inter=ethernet-100"])
    assert named.inter.bytes_per_s == LINK_REACH * 12.5e9


@pytest.mark.parametrize(
    ("world", "nodes", "links", "what"),
    [
        (16, "3x8", [], "Nodes that do not make up"),
        (16, "many", [], "Nodes that do not make up"),
        (16, "", ["inter=nvlink9"], "Unknown link"),
        (16, "", ["outer=1GB/s"], "names no link"),
        (16, "", ["inter=0/s"], "has no rate"),
        (16, "", ["inter=1GB/s", "inter=2GB/s"], "names no link"),
    ],
)
def test_wrong_options(world, nodes, links, what):
    with pytest.raises(ConfigError, match=what) as error:
        cluster_of("h100", world, nodes, links)
    assert error.value.problems[0].try_
