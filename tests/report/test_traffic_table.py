"""The report's table of what processes send each other, from rows of metrics."""

from hypothesis import given
from hypothesis import strategies as st

from tests.draws import examples
from tests.report.synthetic import PLAN, step_rows, write
from tilewright.report.page import render
from tilewright.report.run_data.collect_run import collect
from tilewright.report.run_data.traffic_table import traffic_view

SENT = {
    "sent_bytes": lambda step: 3072 + step,
    "sent_bytes.dp_shard.all_gather.fp32": [2048] * 4,
    "sent_bytes.dp_shard.reduce_scatter.fp8": [1024] * 4,
    "sent_bytes.ep.all_to_all.bf16": lambda step: step,
    "exchange_exposed_s": [0.25] * 4,
    "exchange_hidden_s": [0.75] * 4,
    "exchange_exposed_s.dp_shard": [0.1] * 4,
    "exchange_hidden_s.dp_shard": [0.3] * 4,
}


def _view(folder, columns, plan=PLAN):
    write(folder, step_rows([1.0] * 4, **columns), plan=plan)
    return traffic_view(collect(folder)), collect(folder)


def test_bytes_and_seconds_are_means_of_a_step(tmp_path):
    view, run = _view(tmp_path, SENT, PLAN | {"sent_bytes": {"all_gather": 2000, "all_reduce": 5}})
    assert [row[:4] for row in view.rows] == [
        ("shards", "all-gather", "fp32", "2.00 KiB"),
        ("shards", "reduce-scatter", "fp8", "1.00 KiB"),
        ("experts", "all-to-all", "bf16", "2 B"),
    ]
    assert [row[5] for row in view.rows] == ["1.95 KiB", "not planned", "not planned"]
    assert view.waits == [("shards", "100 ms", "300 ms", "75.0 %")]
    page = render(run)
    assert "Exchanges between processes" in page
    assert "all-to-all" in page


def test_one_process_has_no_table(tmp_path):
    view, run = _view(tmp_path, {})
    assert view is None
    assert "Exchanges between processes" not in render(run)


_ANYTHING = st.one_of(st.none(), st.booleans(), st.text(max_size=3), st.floats(), st.integers(-(10**30), 10**400))


@examples(50)
@given(
    st.dictionaries(
        st.sampled_from(
            [*SENT, "sent_bytes.", "sent_bytes.a.b", "sent_bytes.a.b.c.d", "sent_bytes.a.b.c", "exchange_exposed_s."]
        ),
        _ANYTHING,
    ),
    st.one_of(st.none(), st.dictionaries(st.sampled_from(["all_gather", "all_reduce"]), _ANYTHING)),
)
def test_odd_values_do_no_harm(tmp_path_factory, odd, planned):
    folder = tmp_path_factory.mktemp("odd")
    columns = {name: [value] * 4 for name, value in ({"sent_bytes": 5} | odd).items()}
    view, _ = _view(folder, columns, PLAN | {"sent_bytes": planned})
    assert view is None or all(isinstance(cell, str) for row in (*view.rows, *view.waits) for cell in row)
