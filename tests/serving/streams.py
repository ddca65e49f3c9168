"""Streams read without a client's package."""

import json
from http.client import HTTPConnection
from typing import Any


def events(port: int, path: str, body: Any) -> list[dict[str, Any]]:
    """The parts of a stream, which ends with `[DONE]`."""
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    assert answer.status == 200, text
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines), text
    assert lines[-1] == "data: [DONE]", text
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
