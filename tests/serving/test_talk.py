"""`tilewright chat` where a message is wrong, or it is interrupted: pipes, single messages, terminals."""

import io
import os
import pty
import signal
import sys

import pytest

from tests.cli.tuned import make_model
from tilewright.cli.app import run

REFUSES = "{{ raise_exception('no') if 'never' in messages[-1].content }}{{ messages[-1].content }}"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "model", "llama")


def pipe(monkeypatch, content):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))


def test_bytes_that_are_no_text_are_an_error_of_the_message(model, capsys, monkeypatch):
    asked = ["chat", str(model), "--device", "cpu", "--tokens", "3"]
    pipe(monkeypatch, b"hello\nhello \xff\nhello\n")
    assert run(asked) == 2
    out, error = capsys.readouterr()
    assert "byte 0xff at character 7" in error
    assert out.count("\n") >= 1  # the line before was answered
    for option in ("--message", "--system"):
        pipe(monkeypatch, b"hello\n")
        assert run([*asked, option, os.fsdecode(b"\xe9")]) == 2
        assert "byte 0xe9" in capsys.readouterr().err


def test_a_script_ends_at_a_message_that_the_template_refuses(model, tmp_path, capsys, monkeypatch):
    (tmp_path / "refuses.jinja").write_text(REFUSES)
    pipe(monkeypatch, b"never\nhello\n")
    assert run(["chat", str(model), "--device", "cpu", "--chat-template", str(tmp_path / "refuses.jinja")]) == 2
    out, error = capsys.readouterr()
    assert "Chat template refuses the conversation" in error
    assert not out


@pytest.mark.parametrize(
    ("template", "text"),
    [("no-such", "No chat template of this name"), ("broken.jinja", "not valid jinja")],
)
def test_what_is_wrong_with_a_template_is_told_with_the_option(model, template, text, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.jinja").write_text("{% for")
    assert run(["chat", str(model), "--device", "cpu", "--message", "x", "--chat-template", template]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert "--chat-template" in error
    assert "data." not in error


def test_what_is_wrong_with_a_folder_is_told_without_settings(tmp_path, capsys):
    folder = make_model(tmp_path / "model", "llama")
    (folder / "tokenizer.json").unlink()
    assert run(["chat", str(folder), "--device", "cpu", "--message", "x"]) == 2
    error = capsys.readouterr().err
    assert "No usable tokenizer" in error
    assert not any(f"{section}." in error for section in ("data", "model.weights", "model.path"))


class Interrupted(io.StringIO):
    """Ctrl-C where the first piece of an answer is written."""

    def write(self, text):
        raise KeyboardInterrupt


@pytest.mark.parametrize("how", [[], ["--message", "hello"]])
def test_an_interrupted_script_ends(model, how, capsys, monkeypatch):
    pipe(monkeypatch, b"hello\nhello again\n")
    monkeypatch.setattr(sys, "stdout", Interrupted())
    assert run(["chat", str(model), "--device", "cpu", "--tokens", "8", "--quiet", *how]) == 130
    assert capsys.readouterr().err.count("stopped") == 1


def read_until(end, mark):
    seen = b""
    while mark not in seen:
        seen += os.read(end, 4096)
    return seen


def test_a_conversation_at_a_terminal_goes_on(model, tmp_path):
    (tmp_path / "refuses.jinja").write_text(REFUSES)
    options = ["--chat-template", "refuses.jinja", "--tokens", "1000", "--temperature", "5", "--device", "cpu"]
    process, end = pty.fork()
    if process == 0:
        os.chdir(tmp_path)
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TERM": "dumb", "OMP_NUM_THREADS": "1"}
        os.execve(sys.executable, [sys.executable, "-m", "tilewright", "chat", str(model), *options], environ)
    read_until(end, b"Ctrl-C stops an answer.\r\n> ")
    for said, answer in (
        (b"never", b"Chat template refuses"),
        (b"hello " * 400, b"longer than the model's context"),
        (b"hello \xff", b"not valid Unicode"),
    ):
        os.write(end, said[:4000] + b"\n")
        assert answer in read_until(end, b"continues without this message.\r\n> ").replace(b"\r\n", b"\n"), said[:9]
    os.write(end, b"hello\n")
    read_until(end, b"hello\r\n")
    os.read(end, 1)  # the answer has begun
    os.kill(process, signal.SIGINT)
    read_until(end, b"\n> ")
    os.write(end, b"/reset\n")
    read_until(end, b"starts from the beginning.\r\n> ")
    os.write(end, b"\x04")
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    os.close(end)
