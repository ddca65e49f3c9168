"""Who the server answers, and that clients which send half of a request take no place for long."""

import socket
import time

import pytest

from tests.serving.served import NAME, make_batch, make_session, post, serving
from tilewright.core.web_origin import own_names, why_not
from tilewright.serving.connections import TimedConnection
from tilewright.serving.http_server import Server
from tilewright.serving.server_process import server_config

BODY = {"model": NAME, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    return make_session(tmp_path_factory.mktemp("model"))


LOCAL = own_names("127.0.0.1")
CASES = [
    *[({"host": host}, True) for host in ("127.0.0.1", "127.0.0.1:8000", "LOCALHOST:1", "[::1]:8000", "localhost.")],
    *[({"host": host}, False) for host in ("", "evil.example", "evil.example:8000", "127.0.0.1.evil.example", "a b")],
    *[
        ({"host": host}, False)
        for host in ("10.0.0.7", "[::1", "127.0.0.1@evil.example", "localhost:8000/x", "0.0.0.0")
    ],
    ({"host": "localhost:8000", "origin": "http://localhost:8000"}, True),
    ({"host": "localhost:8000", "origin": "http://localhost:3000"}, False),
    ({"host": "localhost:8000", "origin": "null"}, False),
    ({"host": "localhost:8000", "origin": "https://evil.example"}, False),
    ({"host": "localhost:8000", "sec-fetch-site": "cross-site"}, False),
    ({"host": "localhost:8000", "sec-fetch-site": "same-origin"}, True),
]


@pytest.mark.parametrize(("headers", "answered"), CASES)
def test_hosts_and_pages_that_are_answered(headers, answered):
    assert (why_not(headers, LOCAL, any_ip=False) == "") is answered


def test_other_addresses_and_allowed_pages():
    names = own_names("0.0.0.0")
    assert why_not({"host": "10.0.0.7:8000"}, names, any_ip=True) == ""
    assert why_not({"host": f"{socket.gethostname()}:8000"}, names, any_ip=True) == ""
    assert why_not({"host": "evil.example"}, names, any_ip=True)
    page = {"host": "localhost", "origin": "https://chat.example", "sec-fetch-site": "cross-site"}
    assert why_not(page, LOCAL, any_ip=False, origins=["https://chat.example"]) == ""
    assert why_not(page, LOCAL, any_ip=False, origins=["*"]) == ""
    assert why_not(page, LOCAL, any_ip=False, origins=["https://other.example"])


def test_a_page_of_another_site_is_refused(session):
    with serving(session) as (port, _):
        for headers in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}, {"Sec_Fetch_Site": "cross-site"}):
            status, content, _ = post(port, CHAT, BODY, **headers)
            assert status == 403, headers
            assert "does not answer" in content["error"]["message"]
        assert post(port, CHAT, BODY)[0] == 200


@pytest.mark.parametrize("temperature", [1e-320, 5e-324, 1e-38, 1e-6, 0.0, 2.0])
def test_any_temperature_is_drawn_at(session, temperature):
    with serving(session) as (port, _):
        assert post(port, CHAT, BODY | {"temperature": temperature})[0] == 200


HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


def _half(port: int, text: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    connection.sendall(text)
    return connection


def _is_closed(connection: socket.socket, seconds: float) -> bool:
    connection.settimeout(seconds)
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


@pytest.mark.parametrize(
    "sent",
    [b"", b"POST /v1/chat", HEAD, HEAD + b"\r\n"],
)  # fmt: skip
def test_a_head_that_does_not_end_is_closed(session, monkeypatch, sent):
    """Also of the second request of a connection."""
    monkeypatch.setattr(TimedConnection, "head_seconds", 0.5)
    with serving(session) as (port, _):
        connection = _half(port, sent)
        if sent.endswith(b"\r\n\r\n"):
            answer = b""
            while not answer.endswith(b"}"):
                answer += connection.recv(65536)
            connection.sendall(b"GET /hea")
        for _ in range(3):  # a byte now and then gives no more time
            time.sleep(0.1)
            if sent:
                connection.sendall(b"x")
        assert _is_closed(connection, 10)
        connection.close()


def test_an_answer_that_takes_longer_than_a_head_may_is_not_closed(session, monkeypatch):
    monkeypatch.setattr(TimedConnection, "head_seconds", 0.05)
    with serving(session) as (port, _):
        status, content, _ = post(port, CHAT, BODY | {"max_tokens": 120, "temperature": 0})
        assert status == 200
        assert content["usage"]["completion_tokens"] > 0


def test_half_connections_do_not_stop_a_request(session, monkeypatch):
    """As many as there is place for, and more: the oldest give their places."""
    monkeypatch.setattr(TimedConnection, "most", 64)
    monkeypatch.setattr(TimedConnection, "head_seconds", 300)  # not by their time
    with serving(session) as (port, _):
        half = [_half(port, b"POST /v1/chat/completions HTTP/1.1\r\nHost: loc") for _ in range(200)]
        started = time.perf_counter()
        assert post(port, CHAT, BODY)[0] == 200
        assert time.perf_counter() - started < 100
        assert sum(_is_closed(connection, 0.01) for connection in half) >= 200 - 64
        for connection in half:
            connection.close()


def test_cors_by_choice(session):
    """The browser's question beforehand is answered for pages that are allowed, and for no other."""
    from starlette.testclient import TestClient

    from tilewright.serving.http_server import Limits
    from tilewright.serving.worker import Worker

    asked = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
    with Worker(make_batch(session, 1), 1, 1) as worker:
        for origins, status in (((), 403), (("https://chat.example",), 200)):
            app = Server(session, NAME, worker, Limits(), origins=origins).app
            answer = TestClient(app, base_url="http://localhost").options(CHAT, headers=asked)
            assert answer.status_code == status
            assert answer.headers.get("access-control-allow-origin") == (origins[0] if origins else None)


def test_the_command_serves_with_these_connections():
    assert server_config(lambda: None, 1).http is TimedConnection  # type: ignore[arg-type]
