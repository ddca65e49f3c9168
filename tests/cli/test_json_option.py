"""`--json`: standard output is one JSON document, whatever else the command says."""

import json
import sys

import click
import pytest

from tilewright.cli.app import COMMANDS, cli
from tilewright.cli.common import echo, json_option, print_json, show_table, verbosity, write_answer
from tilewright.core.log import say


@click.command()
@click.option("--out")
@json_option
@verbosity
def talking(out: str, as_json: bool) -> None:
    """Says all that a command can say around its answer."""
    say("measuring this machine once")
    print("a library's own line")
    show_table(["column"], [["cell"]])
    if as_json:
        print_json({"answer": 42, "none": float("nan")})
    else:
        echo("the answer is 42")
    write_answer("--out", out, "text")
    say("and an error", error=True)


@pytest.mark.parametrize("more", [[], ["-v"], ["-q"]], ids=" ".join)
def test_all_but_the_answer_goes_to_standard_error(tmp_path, capsys, more):
    talking.main(["--json", "--out", str(tmp_path / "file"), *more], standalone_mode=False)
    said = capsys.readouterr()
    assert json.loads(said.out) == {"answer": 42, "none": None}
    for line in ("a library's own line", "cell", "and an error", *([] if "-q" in more else ["measuring", "wrote"])):
        assert line in said.err


def test_without_it_all_is_on_standard_output(tmp_path, capsys):
    talking.main(["--out", str(tmp_path / "file")], standalone_mode=False)
    said = capsys.readouterr()
    assert said.err == "and an error\n"
    assert said.out.splitlines()[:2] == ["measuring this machine once", "a library's own line"]


def test_standard_output_is_back_when_the_command_has_ended_also_by_an_error(tmp_path):
    before = sys.stdout
    with pytest.raises(Exception, match="File of --out cannot be written"):
        talking.main(["--json", "--out", str(tmp_path)], standalone_mode=False)
    assert sys.stdout is before


def test_each_command_with_json_has_this_option():
    seen = []
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        under = command.commands.values() if isinstance(command, click.Group) else (command,)
        for one in under:
            for option in (option for option in one.params if "--json" in option.opts):
                assert getattr(option.callback, "__module__", "") == json_option.__module__, one.name
                seen.append(one.name)
    assert {"plan", "doctor", "compress", "eval"} <= set(seen)
