"""Whatever comes gets an answer: no status 5xx, nothing lost, and memory that does not grow."""

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
from http.client import HTTPConnection

import psutil
import pytest
from hypothesis import HealthCheck, given, settings

from tests.cli.tuned import make_model
from tests.draws import examples
from tests.serving.bodies import bodies
from tests.serving.served import make_session, serving
from tilewright.serving.http_server import Limits

CHAT = "/v1/chat/completions"
ALLOWED = {200, 400, 404, 408, 413, 415, 429}


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    session = make_session(tmp_path_factory.mktemp("model") / "model")
    with serving(session, Limits(concurrent=4, waiting=16)) as (port, _):
        yield port


def send(connection, path, body):
    connection.request("POST", path, body, {"content-type": "application/json"})
    answer = connection.getresponse()
    content = answer.read()
    assert answer.status in ALLOWED, (answer.status, content, body)
    if answer.headers["content-type"].startswith("text/event-stream"):
        assert content.endswith(b"data: [DONE]\n\n"), content
        assert b'"error"' not in content or b'"choices"' in content
        return answer.status
    value = json.loads(content)
    if answer.status == 200:
        assert value["choices"]
        assert all(choice["finish_reason"] for choice in value["choices"])
    else:
        assert set(value["error"]) == {"message", "type", "param", "code"}
        assert value["error"]["message"]
    return answer.status


def test_generated_bodies(port):
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    found = set()

    @examples(100, suppress_health_check=list(HealthCheck))
    @given(bodies())
    def check(body):
        found.add(send(connection, *body))

    check()
    assert {200, 400} <= found


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server as a user starts it: its address, and its process."""
    folder = make_model(tmp_path_factory.mktemp("model") / "tiny", "llama")
    command = [sys.executable, "-m", "tilewright", "serve", str(folder), "--port", "0", "--waiting", "4000"]
    process = subprocess.Popen(
        [*command, "--timeout", "3600"], stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    try:
        line = process.stdout.readline()
        yield int(re.search(r":(\d+)/v1", line)[1]), process
    finally:
        process.terminate()
        assert process.wait(60) == 0


def mib(process):
    return psutil.Process(process.pid).memory_info().rss / 2**20


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_ten_thousand_bodies_and_flat_memory(served):
    port, process = served
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    sizes = []

    for seed in range(5):

        @settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @given(bodies())
        def check(body):
            send(connection, *body)

        check._hypothesis_internal_use_seed = seed  # other cases each time
        check()
        sizes.append(mib(process))
    print(f"MiB after each 2,000 bodies: {[round(size) for size in sizes]}")
    assert sizes[-1] < 1.1 * sizes[1], sizes  # a cache may fill once


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_two_thousand_requests_at_once_beside_half_connections(served):
    """400 connections that never end their head are open meanwhile, again and again."""
    openai = pytest.importorskip("openai")
    httpx = pytest.importorskip("httpx2", reason="the openai package's client")
    port, process = served

    async def all_of_them(count):
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
        http = openai.DefaultAsyncHttpxClient(limits=limits, timeout=900)
        client = openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, http_client=http
        )

        async def ask(i):
            messages = [{"role": "user", "content": f"hello {i}"}]
            options = {"model": "tiny", "messages": messages, "max_tokens": 1 + i % 8, "seed": i}
            if i % 2:
                answer = await client.chat.completions.create(**options)
                return answer.choices[0].finish_reason
            reason = None
            async for part in await client.chat.completions.create(**options, stream=True):
                reason = part.choices[0].finish_reason or reason
            return reason

        found = await asyncio.gather(*(ask(i) for i in range(count)), return_exceptions=True)
        await client.close()
        return found

    half = []
    for _ in range(400):
        raw = socket.create_connection(("127.0.0.1", port), timeout=60)
        raw.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: local")
        half.append(raw)
    sizes = []
    for _ in range(3):
        found = asyncio.run(all_of_them(2000))
        wrong = [one for one in found if one not in ("stop", "length")]
        assert not wrong, (len(wrong), wrong[:3])
        sizes.append(mib(process))
    for raw in half:
        raw.close()
    print(f"MiB after each 2,000 requests: {[round(size) for size in sizes]}")
    assert sizes[-1] < 1.1 * sizes[0], sizes
