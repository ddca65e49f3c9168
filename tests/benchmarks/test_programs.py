"""Programs of benchmarks/ read their command line before they measure: `--help` overwrites no result."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.common import RESULTS, arguments_for_card, parser_of

PROGRAMS = [path for path in RESULTS.parent.rglob("*.py") if '__name__ == "__main__"' in path.read_text("utf-8")]
READERS = ("parse_args(", "parse_known_args(", "arguments_for_card(", "drive(")
"""Calls that read the command line: argparse's own, and those of `common` and `fuzz` that do it for a program."""


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_reads_its_command_line(path: Path):
    assert any(call in path.read_text("utf-8") for call in READERS), "call benchmarks.common.parser_of"


def test_one_function_makes_all_parsers():
    """Generated cases have theirs, in `fuzz`: there a case is a number."""
    made = {path.name for path in RESULTS.parent.rglob("*.py") if "ArgumentParser(" in path.read_text("utf-8")}
    assert made == {"common.py", "fuzz.py"}, "call benchmarks.common.parser_of"


@pytest.mark.parametrize("interprets", [False, True])
def test_a_program_for_a_card_runs_its_small_form_alone_where_there_is_none(monkeypatch, interprets):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(sys, "argv", ["program"])
    parser = parser_of(None, tiny=True, steps=4)
    with pytest.raises(SystemExit, match="no CUDA device here; --tiny"):
        arguments_for_card(parser, interprets=interprets)
    monkeypatch.setattr(sys, "argv", ["program", "--tiny", "--steps", "2"])
    assert arguments_for_card(parser, interprets=interprets).steps == 2
    assert os.environ["TRITON_INTERPRET"] == str(int(interprets))


def test_no_result_is_of_a_call_for_help():
    for path in RESULTS.glob("*.json"):
        assert not {"--help", "-h"} & set(json.loads(path.read_text("utf-8"))["command"].split()), path.name


@pytest.mark.parametrize("arguments", [["--help"], ["unknown"], ["--unknown"]])
@pytest.mark.parametrize("cases", [(), ("small", "large")])
def test_help_and_unknown_words_end_a_program(arguments, cases):
    with pytest.raises(SystemExit):
        parser_of("A program.", cases).parse_args(arguments)


def test_all_cases_where_none_is_named():
    parser = parser_of(None, {"small": 1, "large": 2})
    assert parser.parse_args([]).cases == ["small", "large"]
    assert parser.parse_args(["large"]).cases == ["large"]
