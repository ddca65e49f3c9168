"""`tilewright watch`: the whole command as a process, and its errors."""

import os
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

from tests.report.watch.runs import make
from tilewright.cli import app


def start(folder, *arguments, **environment):
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "tilewright", "watch", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
    )


def stop(process):
    process.send_signal(signal.SIGINT)
    return (*process.communicate(timeout=60), process.returncode)


def test_the_latest_run_is_served_until_it_is_interrupted(tmp_path):
    make(tmp_path / "runs" / "a", [3.0, 2.0])
    os.symlink("a", tmp_path / "runs" / "latest")
    process = start(tmp_path, "--port", "0")
    address = process.stdout.readline().strip()
    with urllib.request.urlopen(f"{address}api/view", timeout=60) as answer:
        assert b'"name":"a"' in answer.read()
    out, error, code = stop(process)
    assert (code, error) == (0, "")
    assert "stopped" in out


@pytest.mark.slow
def test_a_port_in_use_is_said_and_no_browser_is_no_error(tmp_path):
    make(tmp_path / "runs" / "a", [3.0, 2.0])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        # No program on the path: no browser.
        process = start(tmp_path, "a", "--port", str(port), "--open", PATH="", BROWSER="", DISPLAY="")
        address = process.stdout.readline().strip()
        assert process.stdout.readline() == "Ctrl-C ends it\n"
        _, error, code = stop(process)
    assert code == 0
    assert f"port {port} is in use: {address.rstrip('/').rpartition(':')[2]} instead" in error
    assert f"no browser was found; open it yourself: {address}" in error


def test_report_without_a_browser_says_where_it_is(tmp_path, monkeypatch, capfd):
    run = make(tmp_path / "runs" / "a", [3.0, 2.0])
    monkeypatch.setattr("webbrowser.open", lambda address: False)
    assert app.run(["report", str(run), "--open"]) == 0
    out, error = capfd.readouterr()
    assert str(run / "report.html") in out
    assert f"open it yourself: {(run / 'report.html').as_uri()}" in error


@pytest.mark.parametrize("arguments", [["nothing"], ["empty"], ["a", "nothing"], []])
def test_a_folder_that_is_no_run(tmp_path, monkeypatch, capfd, arguments):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "runs" / "a", [3.0, 2.0])
    (tmp_path / "empty").mkdir()
    assert app.run(["watch", *arguments]) == 2
    error = capfd.readouterr().err
    assert error.startswith("tilewright: No such run")
    assert all(part in error for part in ("got", "need", "try", "in runs: a"))


@pytest.mark.parametrize("port", ["-1", "65536", "x"])
def test_a_port_that_is_none(port):
    assert app.run(["watch", "--port", port]) == 2
