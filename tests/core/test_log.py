"""`say`: plain without a terminal, silent under --quiet and on other ranks; logging without side effects on import."""

import logging

from tilewright.core import log


def test_plain_text_without_a_terminal(capsys):
    log.say("step 1 [bold] | loss 2.5")
    assert capsys.readouterr().out == "step 1 [bold] | loss 2.5\n"


def test_quiet_keeps_errors_only(capsys):
    log.configure(quiet=True)
    log.say("hello")
    log.say("bad", error=True)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "bad\n")


def test_other_ranks_say_nothing(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    log.say("hello")
    assert capsys.readouterr().out == ""


def test_verbosity_sets_the_level(capsys):
    for verbosity, level in ((0, logging.WARNING), (1, logging.INFO), (3, logging.DEBUG)):
        log.configure(verbosity)
        assert logging.getLogger(log.ROOT).level == level
    log.configure(1)
    log.get_logger("tilewright.training").info("decided")
    assert capsys.readouterr().err == "I tilewright.training: decided\n"


def test_names_are_below_our_root():
    assert log.get_logger("x").name == "tilewright.x"
    assert log.get_logger("tilewright.core").name == "tilewright.core"
