"""Shares of steps: kept by machine and name, the latest of a name; what cannot be read is told and measured again."""

import logging

from tilewright.planner.machine.step_share import StepShare, keep, known

FIRST = StepShare(175e9, 389e9, 0.02, "2026-11-27")
SECOND = StepShare(190e9, 389e9, 0.4, "2026-11-28")


def test_the_latest_of_each_name_is_kept_by_machine(tmp_path):
    assert known("here", tmp_path) == {}
    keep("here", "default in fp32", SECOND, tmp_path)
    keep("here", "default in bf16_mixed", FIRST, tmp_path)
    keep("here", "default in fp32", FIRST, tmp_path)
    assert known("here", tmp_path) == {"default in fp32": FIRST, "default in bf16_mixed": FIRST}
    assert known("elsewhere", tmp_path) == {}


def test_a_busy_machine_is_told():
    assert "others" not in str(FIRST)
    assert str(SECOND).endswith("2026-11-28; others took 40 % of the processors' time)")


def test_a_damaged_file_is_told_and_written_again(tmp_path, caplog):
    (tmp_path / "steps").mkdir()
    for text in ("{", "[]", '{"a": {"reached": 1}}', "\xff"):
        (tmp_path / "steps" / "here.json").write_bytes(text.encode("latin-1"))
        with caplog.at_level(logging.WARNING, logger="tilewright"):
            assert known("here", tmp_path) == {}
        assert "cannot be used" in caplog.text
        caplog.clear()
    keep("here", "a", FIRST, tmp_path)
    assert known("here", tmp_path) == {"a": FIRST}


def test_a_folder_that_is_a_file_is_told(tmp_path, caplog):
    (tmp_path / "steps").write_text("")
    with caplog.at_level(logging.WARNING, logger="tilewright"):
        keep("here", "a", FIRST, tmp_path)
    assert "cannot be written" in caplog.text
