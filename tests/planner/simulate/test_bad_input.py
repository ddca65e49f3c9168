"""Whatever is typed is taken, or refused with what was got, what is needed and what to try; and that works."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.draws import examples
from tilewright.core.errors import ConfigError, TilewrightError
from tilewright.core.units import parse_bytes
from tilewright.parallel.mesh import MeshSizes
from tilewright.planner.machine.link_specs import LINKS, find_link
from tilewright.planner.simulate.document_lengths import lengths_from
from tilewright.planner.simulate.mesh.cluster import cluster_of
from tilewright.planner.simulate.mesh.setting_space import Space
from tilewright.planner.simulate.option_texts import (
    failures_of,
    network_of,
    pipeline_of,
    seconds_of,
    size_of,
    speeds_of,
)

_NUMBERS = st.sampled_from(["0", "1", "-1", "1e3", "0.5", ".", "nan", "inf", "8-15", "7-3", "99999999999", "x", ""])
_TEXT = st.lists(
    st.one_of(
        _NUMBERS, st.sampled_from([*"=,:/ -", "GB", "GB/s", "us", "ms", "h", "inter", "intra", "lognormal", "fixed"])
    ),
    max_size=7,
).map("".join)
"""Pieces of what is typed, in any order."""
_SCHEDULES = ("1f1b", "gpipe", "interleaved", "interleaved_deferred", "interleaved_zero_bubble", "zbv", "dualpipe_v")
READERS = {
    "--lengths": lambda text: lengths_from(text, 4096),
    "--slow": lambda text: speeds_of([text], 16),
    "--link": lambda text: network_of([text], 4, 1024),
    "--link of a mesh": lambda text: cluster_of("h100", 16, "", [text]),
    "--nodes": lambda text: cluster_of("h100", 16, text, []),
    "--message": lambda text: size_of(text, "--message"),
    "--forward": lambda text: seconds_of(text, "--forward"),
    "--fail-every": lambda text: failures_of(text, "15m", "0", "15m"),
}


def refusal(call):
    """The parts of a user's error; None where there is none."""
    try:
        call()
    except TilewrightError as error:
        return error.problems[0]
    return None


@pytest.mark.parametrize("option", READERS)
@examples(150)
@given(text=_TEXT)
def test_any_text_is_taken_or_refused_in_four_parts(option, text):
    problem = refusal(lambda: READERS[option](text))
    if problem is not None:
        assert problem.what
        assert problem.need
        assert problem.try_
        assert problem.got is not None


@given(st.sampled_from(_SCHEDULES), st.integers(1, 6), st.one_of(st.none(), st.integers(1, 4)), st.integers(1, 20))
def test_a_schedule_says_how_many_stages_and_micro_batches_it_takes(schedule, pp, virtual, count):
    problem = refusal(lambda: pipeline_of(pp, schedule, virtual))
    if problem is not None:
        assert refusal(lambda: pipeline_of(pp, schedule, int(problem.try_.removeprefix("--virtual-stages ")))) is None
        return
    pipeline = pipeline_of(pp, schedule, virtual)
    problem = refusal(lambda: pipeline.check_count(count))
    assert (problem is None) == pipeline.takes(count)
    if problem is not None:
        assert problem.need
        assert problem.try_


@given(st.sampled_from(sorted(LINKS)), st.data())
def test_a_link_that_is_nearly_one_has_one_of_the_table_to_try(name, data):
    at = data.draw(st.integers(0, len(name) - 1))
    wrong = name[:at] + name[at + 1 :]
    assume(wrong not in LINKS)
    with pytest.raises(ConfigError, match="Unknown link") as caught:
        find_link(wrong)
    assert caught.value.problems[0].try_.removeprefix("--link inter=") in LINKS


@examples(200)
@given(
    world=st.integers(1, 96), nodes=st.sampled_from([1, 2, 4, 8]), layers=st.integers(1, 12), heads=st.integers(1, 8),
    experts=st.sampled_from([0, 4, 6, 16]), batch=st.integers(1, 48),
)  # fmt: skip
def test_meshes_fill_the_world_or_the_batch_to_try_has_one_that_does(world, nodes, layers, heads, experts, batch):
    space = Space(world, min(world, nodes), layers, heads, 8 * heads, experts, batch)
    problem = refusal(space.check)
    if problem is None:
        sizes = [one.sizes for one in space.settings("fp32", "fp32")]
        assert sizes
        for one in set(map(_key, sizes)):
            assert one[0] * one[1] * one[2] * one[3] == world
            assert one[0] <= layers
            assert heads % one[3] == 0
            assert one[4] == 1 or experts % one[4] == 0
        return
    assert problem.try_.startswith("--train.global_batch_size ")
    rows = int(problem.try_.rpartition(" ")[2])
    assert refusal(replace(space, batch=rows).check) is None, (problem.try_, space)


def _key(sizes: MeshSizes) -> tuple[int, ...]:
    return sizes.pp, sizes.dp_replicate, sizes.dp_shard, sizes.tp, sizes.ep


@given(st.sampled_from(["3 GB", "64MiB", "1.5GiB", "7", "0"]))
def test_sizes_are_read_as_everywhere(text):
    assert size_of(text, "--message") == parse_bytes(text)
