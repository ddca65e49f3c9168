"""How commands end: exit codes, four-part errors without a traceback, interrupts, closed pipes."""

import subprocess
import sys

import pytest

from tilewright.cli import app
from tilewright.core.config.setting_names import fields
from tilewright.core.errors import FitError, HardwareError, NumericsError


@pytest.fixture
def failing(monkeypatch):
    """A command line whose `init` raises what the test says."""

    def install(error: BaseException):
        def fail(*args, **kwargs):
            raise error

        monkeypatch.setattr(app.cli, "invoke", fail)

    return install


@pytest.mark.parametrize(("kind", "code"), [(FitError, 3), (NumericsError, 4), (HardwareError, 5)])
def test_exit_codes_are_those_of_the_errors(failing, capsys, kind, code):
    failing(kind("it cannot be done", got="this", need="that", try_="the other"))
    assert app.run(["init"]) == code
    error = capsys.readouterr().err
    assert error == "tilewright: it cannot be done\n  got    this\n  need   that\n  try    the other\n"


def test_an_interrupt_is_clean(failing, capsys):
    failing(KeyboardInterrupt())
    assert app.run(["init"]) == 130
    assert capsys.readouterr().err.strip() == "stopped"


def test_a_bug_keeps_its_traceback(failing):
    failing(AssertionError("ours"))
    with pytest.raises(AssertionError, match="ours"):
        app.run(["init"])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["trian"], "Did you mean 'train'?"),
        (["xyzzy"], "Commands: init, doctor"),
        (["train", "--dry-rum"], "Did you mean --dry-run?"),
        (["train", "--stesp", "4"], "Did you mean --train.steps?"),
        (["train", "--qqqq"], "Settings are written --section.field value."),
        (["train", "a", "b"], "unexpected extra argument"),
        (["init", "--lisst"], "--list"),
        (["doctor", "--device", "tpu"], "'tpu' is not one of 'auto', 'cpu', 'cuda'"),
    ],
)
def test_typing_errors_exit_2_with_a_hint(capsys, arguments, text):
    assert app.run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("tilewright: ")
    assert text in captured.err
    assert captured.out == ""


def test_every_problem_of_a_recipe_is_printed_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.toml").write_text('[train]\nsteps = "7"\nlrr = 3\n')
    assert app.run(["train", "bad.toml"]) == 2
    error = capsys.readouterr().err
    assert error.count("where  bad.toml:") == 2
    assert "2 problems; nothing was run." in error


def test_v_shows_the_traceback_of_a_user_error(tmp_path):
    command = [sys.executable, "-m", "tilewright", "train", "-v", "--train.steps", "no"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert "Traceback" in result.stderr
    assert result.stderr.startswith("tilewright: train.steps is not right")


def test_a_closed_pipe_is_silent(tmp_path):
    command = f"{sys.executable} -m tilewright inspect | head -1"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert result.stdout.startswith("setting")
    assert result.stderr == ""


def test_no_colour_without_a_terminal(capsys):
    assert app.run(["trian"]) == 2
    assert "\x1b" not in capsys.readouterr().err


@pytest.mark.parametrize("join", ["_", "-"])
@pytest.mark.parametrize("field", ["lora.rank", *(field.path for field in list(fields())[::9])])
def test_a_setting_with_other_signs_for_its_dots_is_suggested(field, join, capsys):
    assert app.run(["train", f"--{field.replace('.', join)}", "1"]) != 0
    assert f"--{field}" in capsys.readouterr().err
