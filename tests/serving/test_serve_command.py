"""`tilewright serve` as a process: what it prints of places and memory, its options' effects, and its end."""

import re
import signal

import pytest

from tests.cli.tuned import make_model
from tests.commands import Command
from tests.serving.served import post
from tilewright.cli.app import run


@pytest.mark.timeout(120)
def test_memory_places_and_the_end(tmp_path):
    folder = make_model(tmp_path / "tiny", "llama")
    options = ["--port", "0", "--concurrent", "2", "--waiting", "3", "--cache", "64KiB", "--chunk", "16"]
    process = Command(["serve", str(folder), *options])
    try:
        held = int(re.search(r"64[.0]* KiB hold ([0-9,]+) tokens", process.line(60, "KiB hold"))[1].replace(",", ""))
        assert process.line(60, "may wait").startswith("2 answers at a time, 3 may wait")
        # FP32 keys and values of one head of 16 columns in two layers
        assert held == 64 * 2**10 // (4 * 2 * 16 * 2)
        port = int(re.search(r":(\d+)/v1", process.line(60, "/v1"))[1])
        ask = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
        assert post(port, "/v1/chat/completions", ask | {"max_tokens": 3})[0] == 200
        status, content, _ = post(port, "/v1/chat/completions", ask | {"n": 6})
        assert (status, content["error"]["param"]) == (400, "n")
        status, content, _ = post(port, "/v1/chat/completions", ask | {"max_tokens": 250})
        assert status == 200, content
        assert content["usage"]["total_tokens"] <= 256
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 0


@pytest.mark.parametrize("size", ["lots", "-1", "4 apples"])
def test_memory_that_is_no_size(size, capsys):
    assert run(["serve", "none", f"--cache={size}"]) == 2
    assert "Memory for caches is not a size" in capsys.readouterr().err
