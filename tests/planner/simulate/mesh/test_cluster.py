"""Seconds of collectives on nodes of GPUs, and the options that say which nodes and links."""

import pytest

from tilewright.core.errors import ConfigError
from tilewright.core.json_text import to_json
from tilewright.planner.machine.gpu_specs import TABLE
from tilewright.planner.machine.link_specs import LINK_REACH, links_of
from tilewright.planner.machine.measured_links import LinkPoint, MeasuredLinks
from tilewright.planner.simulate.mesh.cluster import Cluster, cluster_of
from tilewright.planner.simulate.pass_costs import Link

NODES = Cluster(4, 8, Link(400e9), Link(50e9))


@pytest.mark.parametrize(
    ("place", "wrong", "near"), [("inter", "ethernet100", "ethernet-100"), ("intra", "nvlnk4", "nvlink4")]
)
def test_a_link_that_is_unknown_has_the_nearest_one_to_try(place, wrong, near):
    with pytest.raises(ConfigError, match="Unknown link") as error:
        cluster_of("h100", 16, "", [f"{place}={wrong}"])
    assert error.value.problems[0].try_ == f"--link {place}={near}"


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


def links_file(folder, nodes):
    """As `bench comm` writes it: 20 us, and 8 GB/s."""
    points = tuple(LinkPoint("all_gather", "fp32", 2 * size, size, 2e-5 + size / 8e9) for size in (2**12, 2**20, 2**25))
    path = folder / f"links{nodes}.json"
    path.write_text(to_json(MeasuredLinks(8, nodes, "nccl", "a GPU", points).to_json()))
    return str(path)


def test_links_that_were_measured_are_used_and_said(tmp_path):
    intra, inter = links_file(tmp_path, 1), links_file(tmp_path, 2)
    found = cluster_of("h100", 16, "2x8", [f"intra={intra}", f"inter={inter}"])
    for link in (found.intra, found.inter):
        assert link.bytes_per_s == pytest.approx(8e9)
        assert link.latency_s == pytest.approx(2e-5)
    assert all(note.startswith("measured: ") for note in found.notes), found.notes
    half = cluster_of("h100", 16, "2x8", [f"intra={intra}"])
    assert [note.split(":")[0] for note in half.notes] == ["measured", "published, not measured", "guessed"]
    for links, what in (
        (f"inter={intra}", "other ranks"),
        (f"intra={inter}", "other ranks"),
        ("intra=gone.json", "no measured"),
    ):
        with pytest.raises(ConfigError, match=what) as error:
            cluster_of("h100", 16, "2x8", [links])
        assert error.value.problems[0].try_


@pytest.mark.parametrize(
    ("world", "nodes", "links", "what"),
    [
        (16, "3x8", [], "Nodes that do not make up"),
        (16, "many", [], "Nodes that do not make up"),
        (16, "", ["inter=nvlink9"], "Unknown link"),
        (16, "", ["inter=ethernet100"], "Unknown link"),
        (16, "", ["outer=1GB/s"], "names no link"),
        (16, "", ["inter=0/s"], "has no rate"),
        (16, "", ["inter=1GB/s", "inter=2GB/s"], "names no link"),
    ],
)
def test_wrong_options(world, nodes, links, what):
    with pytest.raises(ConfigError, match=what) as error:
        cluster_of("h100", world, nodes, links)
    assert error.value.problems[0].try_
