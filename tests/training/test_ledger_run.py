"""What a run writes down of its memory."""

import pytest

from tests.training.tiny import rows, tiny, write_text
from tilewright.training.session import train


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_text(folder / "text")
    return folder


def test_owners_by_phase_are_in_the_metrics_and_sum_to_the_peaks(data, tmp_path):
    once = {"checkpoint__interval": 0, "train__eval_interval": 0, "train__log_interval": 4}
    train(tiny(data, tmp_path, train__steps=4, **once))
    first, last = (row for row in rows(tmp_path / "tiny" / "metrics.jsonl") if "memory" in row)
    assert {"load", "forward", "backward", "update"} <= first["memory_phases"].keys()
    assert {"forward", "backward", "update"} <= last["memory_phases"].keys()
    for row in (first, last):
        held = {phase: sum(owners.values()) for phase, owners in row["memory_phases"].items()}
        assert max(held.values()) == row["memory_bytes"] == sum(row["memory"].values())
    assert last["memory_tiers"] == {}
    phases = last["memory_phases"]
    counters = phases["forward"]["optimizer"] - 2 * phases["forward"]["parameters"]
    assert 0 < counters < 1000, "two moments a parameter, and a counter a tensor"
    assert phases["forward"]["activations"] > 0 == phases["update"]["activations"]


def test_tiers_off_the_device_are_in_the_metrics(data, tmp_path):
    settings = {"executor": "layer_major", "offload_optimizer": "disk", "offload_activations": "disk"}
    changes = {f"memory__{name}": value for name, value in settings.items()}
    train(tiny(data, tmp_path, train__steps=4, checkpoint__interval=0, train__eval_interval=0, **changes))
    row = [row for row in rows(tmp_path / "tiny" / "metrics.jsonl") if "memory" in row][-1]
    disk = row["memory_tiers"]["disk"]
    # Two FP32 moments a parameter, but those of the tied embedding (300 x 32), which stay; inputs of two layers and of
    # the head, three micro-batches (5 rows) of 32 x 32 BF16.
    elsewhere = row["memory_phases"]["forward"]["parameters"] - 300 * 32 * 4
    assert disk["optimizer"] == pytest.approx(2 * elsewhere, rel=0.01)
    assert disk["activations"] == 3 * 5 * 32 * 32 * 2
