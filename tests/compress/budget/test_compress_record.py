"""The record of a folder of stages: without it nothing says what they are of."""

import pytest

from tests.optim.test_citizen import assert_in_words
from tilewright.compress.budget.compress_record import FILE, read_record, record_of, write_record
from tilewright.core.errors import ConfigError


@pytest.mark.parametrize("text", [None, "", "{", "[1]", '{"format": 0}', "[" * 100_000])
def test_stages_without_their_record_are_refused(text, tmp_path):
    """They would be taken for stages of whatever run is compressed next."""
    if text is not None:
        (tmp_path / FILE).write_text(text)
    assert read_record(tmp_path) is None
    (tmp_path / "blocks").mkdir()
    assert read_record(tmp_path) is None
    with pytest.raises(ConfigError) as caught:
        read_record(tmp_path, FILE, ("blocks", "shapes"))
    assert_in_words(caught.value, "blocks in", "new folder")
    write_record(tmp_path, {"run": "a"})
    assert read_record(tmp_path, FILE, ("blocks", "shapes"))["run"] == "a"


@pytest.mark.parametrize("run", ["control-teacher", "recovered-ffn-32"])
def test_a_run_folder_without_the_record_is_refused(run, tmp_path):
    """It would be continued for whatever is compressed next, also where no other stage has begun."""
    (tmp_path / run).mkdir()
    assert read_record(tmp_path) is None
    (tmp_path / run / "run.toml").write_text("")
    with pytest.raises(ConfigError) as caught:
        read_record(tmp_path)
    assert_in_words(caught.value, f"{run} in", "new folder")


def test_settings_that_differ_are_named(tmp_path):
    """Not only that some do."""
    write_record(tmp_path, {"run": "a", "settings": {"budget": 0.01, "steps": 5, "goal": "bytes"}})
    asked = {"run": "a", "settings": {"budget": 0.02, "steps": 5, "goal": "latency"}}
    with pytest.raises(ConfigError) as caught:
        record_of(tmp_path, FILE, asked, what="stages of another compression", need="the same settings")
    assert_in_words(caught.value, "with another budget and another goal", "new folder")
